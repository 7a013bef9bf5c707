# SPDX-License-Identifier: Apache-2.0
"""A schedule's shares are exact in every block, its history never changes, and no pass is cut."""

import json

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from penstock import Loader
from penstock.data import ArrayDataset, ConcatDataset
from penstock.errors import ConfigError, StateError
from penstock.sampling import (
    BatchSampler,
    DistributedSampler,
    MixtureSampler,
    RandomSampler,
    SequentialSampler,
)
from penstock.sampling.mixture_schedule import (
    BLOCK,
    SHARE_PARTS,
    Knot,
    MixtureSchedule,
    bounds_of,
    pieces_of,
    pieces_until_used_up,
)
from penstock.torch import DataLoader

KEY = (7, 1)
parts = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


@st.composite
def knots(draw):
    """Jumps and ramps over three sources, some of which end in the middle of a block."""
    found, place = [], 0
    for number in range(draw(st.integers(1, 4))):
        length = draw(st.sampled_from([0, 0, 1, 700, BLOCK, 5000])) if number else 0
        bounds = tuple(bounds_of(draw(parts)).tolist())
        found.append(Knot(place, place + length, bounds))
        place += length + draw(st.sampled_from([1, 5, 1000, BLOCK, 3000]))
    return found, place


def counts_of(sources, num_sources=3):
    return np.bincount(sources, minlength=num_sources)


def is_numbered(sources, numbers):
    """Whether each source's draws are 0, 1, 2 …, in this order."""
    return all(
        np.array_equal(numbers[sources == source], np.arange(np.count_nonzero(sources == source)))
        for source in np.unique(sources)
    )


@given(knots())
def test_each_source_is_numbered_without_a_gap_and_counts_are_what_was_drawn(drawn):
    schedule = MixtureSchedule(pieces_of(drawn[0]))
    end = drawn[1] + 3000
    sources, numbers = schedule.draws(np.arange(end), KEY)
    assert is_numbered(sources, numbers)
    for place in (0, 1, end // 3, drawn[1], end):
        assert schedule.counts(place, KEY).tolist() == counts_of(sources[:place]).tolist()


@given(knots(), st.lists(st.integers(0, 12_000), max_size=40))
def test_a_draw_is_the_same_whatever_it_is_asked_with(drawn, places):
    schedule = MixtureSchedule(pieces_of(drawn[0]))
    sources, numbers = schedule.draws(np.arange(12_001), KEY)
    some = np.array(places, np.int64)
    found = schedule.draws(some, KEY)
    assert np.array_equal(found[0], sources[some])
    assert np.array_equal(found[1], numbers[some])


@given(knots())
def test_every_block_of_a_piece_has_each_share_rounded_down_or_up(drawn):
    schedule = MixtureSchedule(pieces_of(drawn[0]))
    last = schedule.pieces[-1]
    sources, _ = schedule.draws(last.start + np.arange(5 * BLOCK), KEY)
    exact = np.diff(last.bounds) / BLOCK
    for block in np.split(sources, 5):
        assert (np.abs(counts_of(block) - exact) < 1).all()
        assert not counts_of(block)[exact == 0].any()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any), st.integers(0, 5000))
def test_shares_are_exact_over_1024_blocks_wherever_they_begin(parts, first):
    bounds = bounds_of(parts)
    schedule = MixtureSchedule([*pieces_of([Knot(0, 0, tuple(bounds.tolist()))])])
    before, after = (schedule.counts_before_block(n * BLOCK) for n in (first, first + BLOCK))
    assert (after - before).tolist() == np.diff(bounds).tolist()
    assert bounds[-1] == SHARE_PARTS


def test_a_ramp_goes_in_a_straight_line():
    one, other = (tuple(bounds_of(p).tolist()) for p in ([4, 0, 1], [0, 4, 1]))
    stop = 40 * BLOCK
    schedule = MixtureSchedule(pieces_of([Knot(0, 0, one), Knot(0, stop, other)]))
    sources, _ = schedule.draws(np.arange(stop + BLOCK), KEY)
    shares = np.array([counts_of(block) for block in np.split(sources, 41)]) / BLOCK
    middles = (np.arange(40) + 0.5) / 40
    np.testing.assert_allclose(shares[:40, 0], 0.8 * (1 - middles), atol=1.5 / BLOCK)
    np.testing.assert_allclose(shares[:40, 1], 0.8 * middles, atol=1.5 / BLOCK)
    np.testing.assert_allclose(shares[:, 2], 0.2, atol=1.5 / BLOCK)
    assert shares[40, 1] == pytest.approx(0.8, abs=1 / BLOCK)


def test_a_long_ramp_is_1024_steps_and_takes_no_more_memory():
    one, other = (tuple(bounds_of(p).tolist()) for p in ([1, 0], [0, 1]))
    schedule = MixtureSchedule(pieces_of([Knot(0, 0, one), Knot(0, 10**12, other)]))
    assert len(schedule.pieces) <= 1025
    counts = schedule.counts_before_block(10**12)
    assert counts.sum() <= 10**12
    np.testing.assert_allclose(counts / 10**12, 0.5, atol=1e-3)


@given(st.integers(1, 5000), parts, parts)
def test_counts_before_a_block_are_the_sums_of_those_of_the_blocks_before(num_blocks, one, other):
    knots = [Knot(0, 0, tuple(bounds_of(one).tolist()))]
    knots.append(Knot(0, num_blocks * BLOCK, tuple(bounds_of(other).tolist())))
    schedule = MixtureSchedule(pieces_of(knots))
    firsts = BLOCK * np.arange(num_blocks + 10)
    number, index, sizes = schedule._block_at(firsts)
    counts = np.cumsum(np.diff(schedule._within(number, index, sizes), axis=1), axis=0)
    for block in (1, num_blocks // 2 + 1, num_blocks, num_blocks + 9):
        before = schedule.counts_before_block(block * BLOCK)
        assert before.tolist() == counts[block - 1].tolist()


@given(knots(), st.integers(0, 9000), parts, st.sampled_from([0, 100, 6000]))
def test_a_change_leaves_all_draws_before_its_block_as_they_were(drawn, at, weights, length):
    schedule = MixtureSchedule(pieces_of(drawn[0]))
    before = schedule.draws(np.arange(16_000), KEY)
    schedule.change(at, at + length, bounds_of(weights))
    after = schedule.draws(np.arange(16_000), KEY)
    kept = schedule.whole_blocks(at)
    assert at <= kept < at + BLOCK
    for then, now in zip(before, after, strict=True):
        assert np.array_equal(then[:kept], now[:kept])
    assert is_numbered(*after)
    late, _ = schedule.draws(schedule.whole_blocks(at + 8 * BLOCK) + np.arange(4 * BLOCK), KEY)
    exact = np.array(weights) / sum(weights) * 4 * BLOCK
    assert (np.abs(counts_of(late) - exact) < 4).all()


@given(knots(), st.lists(st.integers(0, 4000), min_size=3, max_size=3))
def test_once_gives_each_source_exactly_its_items(drawn, items):
    pieces = pieces_of(drawn[0])
    ever = np.any([np.diff(piece.bounds) > 0 for piece in pieces], axis=0)
    items = np.array(items)
    used_up = pieces_until_used_up(pieces, items)
    schedule, end = MixtureSchedule(used_up), used_up[-1].start
    sources, numbers = schedule.draws(np.arange(end), KEY)
    assert is_numbered(sources, numbers)
    counts = counts_of(sources)
    assert (counts <= items).all()
    # A source that the schedule leaves out for good before its end may keep some.
    last = np.diff(pieces[-1].bounds) > 0
    assert (counts == items)[last].all()
    assert not counts[~ever].any()


def test_once_of_sources_that_end_with_a_block_has_no_empty_block():
    for items in ([BLOCK, 0, 0], [BLOCK, 2 * BLOCK, 2048], [3 * BLOCK, 3 * BLOCK, 1]):
        used_up = pieces_until_used_up(
            pieces_of([Knot(0, 0, (0, 1 << 19, 1 << 20, 1 << 20))]), np.array(items)
        )
        assert all(piece.block for piece in used_up)
        assert [piece.start for piece in used_up] == sorted({piece.start for piece in used_up})


def test_once_of_sources_of_2_to_the_60():
    sampler = MixtureSampler([1 << 60, 1 << 50, 7], [3, 1, 1], "once")
    assert len(sampler) == (1 << 60) + (1 << 50) + 7
    assert sampler.quotas.tolist() == [1 << 60, 1 << 50, 7]


# The sampler.


def sources_of(sampler, indices):
    return np.searchsorted(np.cumsum(sampler.lengths), indices, side="right")


def through(sampler, num_epochs):
    orders = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        orders.append(sampler.indices()[:])
    return np.concatenate(orders)


schedules = st.lists(parts, min_size=1, max_size=3).map(
    lambda weights: [(400 * number, w) for number, w in enumerate(weights)]
)


@given(schedules, st.integers(1, 700), st.integers(0, 1 << 40))
def test_no_sample_comes_again_before_all_of_its_source_have(schedule, num_samples, seed):
    sampler = MixtureSampler([300, 41, 5], schedule, num_samples, seed)
    drawn = through(sampler, 5)
    for source, (start, length) in enumerate(zip((0, 300, 341), (300, 41, 5), strict=True)):
        of_source = drawn[sources_of(sampler, drawn) == source] - start
        for first in range(0, len(of_source), length):
            assert len(set(of_source[first : first + length].tolist())) == len(
                of_source[first : first + length]
            )


@given(schedules, st.integers(1, 3000), st.integers(0, 4))
def test_quotas_are_those_of_the_epoch(schedule, num_samples, epoch):
    sampler = MixtureSampler([3000, 410, 50], schedule, num_samples)
    sampler.set_epoch(epoch)
    counts = counts_of(sources_of(sampler, sampler.indices()[:]))
    assert counts.tolist() == sampler.quotas.tolist()
    assert sampler.shares.sum() == pytest.approx(1)


@given(schedules, st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 3))
def test_ranks_together_have_the_order_of_one(schedule, num_ranks, epoch):
    sampler = MixtureSampler([300, 41, 5], schedule, 960, seed=3)
    sampler.set_epoch(epoch)
    shares = [
        DistributedSampler(sampler, num_ranks, rank).indices()[:] for rank in range(num_ranks)
    ]
    assert np.stack(shares, axis=1).ravel().tolist() == sampler.indices()[:].tolist()


def test_once_is_every_sample_once_in_every_epoch_each_in_another_order():
    sampler = MixtureSampler([3000, 41, 500], [(0, [1, 1, 0]), (200, [1, 0, 1])], "once", seed=3)
    orders = [through(sampler, 1)]
    sampler.set_epoch(1)
    orders.append(sampler.indices()[:])
    for order in orders:
        # The second source has half of the draws, until it is used up.
        assert sorted(order.tolist()) == list(range(3541))
        assert max(np.flatnonzero(sources_of(sampler, order) == 1)) < 2 * 41
    assert orders[0].tolist() != orders[1].tolist()


def test_over_and_undersampling_are_whole_blocks():
    schedule = [(0, [3, 1]), (5000, [1, 1])]
    under = MixtureSampler([10_000, 3000], schedule, "undersample")
    over = MixtureSampler([10_000, 3000], schedule, "oversample")
    assert (under.quotas <= under.lengths).all()
    assert (over.quotas >= over.lengths).all()
    ends = [5000 + number * BLOCK for number in range(20)]
    assert len(under) in ends
    assert len(over) in ends
    longer = MixtureSampler([10_000, 3000], schedule, len(under) + BLOCK)
    shorter = MixtureSampler([10_000, 3000], schedule, len(over) - BLOCK)
    assert (longer.quotas > longer.lengths).any()
    assert (shorter.quotas < shorter.lengths).any()


def test_a_source_may_be_a_mixture_or_any_order():
    inner = MixtureSampler({"de": 40, "fr": 60}, [1, 1], num_samples=100)
    sampler = MixtureSampler(
        {"text": inner, "steps": SequentialSampler(range(500)), "rest": 70}, [2, 1, 1], 2048, seed=5
    )
    drawn = np.array(list(sampler))
    assert sampler.source_length == 100 + 500 + 70
    text = drawn[drawn < 100]
    assert len(text) == 1024
    for block in np.split(text[:1000], 10):  # an epoch of the inner one
        assert np.count_nonzero(block < 40) == 50
    steps = drawn[(drawn >= 100) & (drawn < 600)] - 100
    assert steps.tolist() == [*range(500), *range(12)]
    inner.set_epoch(3)  # its own epoch does not matter here
    assert list(sampler) == drawn.tolist()


def test_an_inner_mixture_may_change_too():
    def make():
        inner = MixtureSampler([500, 500], [(0, [1, 0])], num_samples=100_000)
        return inner, MixtureSampler([inner, 500], [1, 1], 60_000, seed=1)

    inner, outer = make()
    order = iter(outer)
    first = [next(order) for _ in range(100)]
    inner.change(20_000, [0, 1])
    rest = np.array(list(order))
    assert np.count_nonzero((rest >= 500) & (rest < 1000)) == pytest.approx(10_000, abs=BLOCK)
    inner, again = make()
    again.load_state_dict(json.loads(json.dumps(outer.state_dict())) | {"position": 100})
    assert list(again) == rest.tolist()
    assert len(first) == 100


def test_shares_of_tokens_are_shares_of_samples_over_their_means():
    sampler = MixtureSampler({"long": 1000, "short": 1000}, [1, 1], 1100, tokens=[1000, 100])
    assert sampler.quotas.tolist() == [100, 1000]
    tokens = {"short": 100, "long": 1000}
    scheduled = MixtureSampler(
        {"long": 1000, "short": 1000}, [(0, [1, 1]), (1100, [1, 0])], 1100, tokens=tokens
    )
    assert scheduled.quotas.tolist() == pytest.approx([100, 1000], abs=1)
    scheduled.set_epoch(1)
    assert scheduled.quotas.tolist() == [1100, 0]


# Changes.


DATA = ConcatDataset([ArrayDataset(np.arange(9000)), ArrayDataset(9000 + np.arange(9000))])


class EveryOther:
    """A batch sampler as users write them."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        indices = list(self.sampler)
        return iter([indices[k : k + 100] for k in range(0, len(indices), 100)])


def changeable():
    return MixtureSampler([9000, 9000], [(0, [3, 1])], num_samples=40_000, seed=1)


LOADERS = {
    "sampler": lambda sampler, seed: DataLoader(DATA, 100, sampler=sampler, seed=seed),
    "batches": lambda sampler, seed: DataLoader(
        DATA, batch_sampler=BatchSampler(sampler, 100, drop_last=False), seed=seed
    ),
    "rank": lambda sampler, seed: DataLoader(
        DATA, 100, sampler=DistributedSampler(sampler, 2, 1), seed=seed
    ),
    "numpy": lambda sampler, seed: Loader(DATA, 100, sampler=sampler, seed=seed or 0),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("seed", [None, 4])
def test_a_resumed_run_repeats_the_changes_that_were_made(kind, seed):
    sampler = changeable()
    loader = LOADERS[kind](sampler, seed)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    sampler.change(35_000, [1, 3], until=39_000)
    sampler.change(37_000, [0, 1])
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch[0].tolist() for batch in batches]
    again = LOADERS[kind](other := changeable(), seed)
    again.load_state_dict(state)
    assert [batch[0].tolist() for batch in again] == rest
    assert min(rest[-1]) >= 9000
    assert other.quotas.tolist() == sampler.quotas.tolist()
    assert len(json.dumps(state)) < 1000


def test_a_change_after_a_resume_may_not_reach_back():
    loader = LOADERS["numpy"](changeable(), 0)
    batches = iter(loader)
    for _ in range(30):
        next(batches)
    again = LOADERS["numpy"](sampler := changeable(), 0)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="at should be 3072 or more, but got at=2999"):
        sampler.change(2999, [1, 1])
    sampler.change(3072, [0, 1])
    rest = np.concatenate([batch[0] for batch in again])
    assert (rest[72:] >= 9000).all()
    assert np.count_nonzero(rest[:72] < 9000) > 30


@pytest.mark.parametrize("pad", ["repeat", "drop"])
def test_a_change_after_a_resume_counts_the_draws_that_ranks_leave_out_or_repeat(pad):
    def share():
        mixture = MixtureSampler([9000, 9000], [(0, [3, 1])], num_samples=4000, seed=1)
        return mixture, DistributedSampler(mixture, 999, 0, pad=pad)

    _, saved = share()
    saved.set_epoch(100)
    order = iter(saved)
    for _ in range(3):
        next(order)
    mixture, again = share()
    again.load_state_dict(saved.state_dict())
    least = -(-(100 * 4000 + 3 * 999) // BLOCK) * BLOCK
    with pytest.raises(ConfigError, match=f"at should be {least} or more"):
        mixture.change(least - 1, [1, 1])
    mixture.change(least, [1, 1])


def test_a_change_of_an_inner_mixture_after_a_resume_may_not_reach_back():
    def make():
        inner = MixtureSampler([500, 500], [(0, [1, 0])], num_samples=100_000)
        return inner, MixtureSampler([inner, 500], [1, 1], 60_000, seed=1)

    _, outer = make()
    order = iter(outer)
    for _ in range(8192):
        next(order)
    inner, again = make()
    again.load_state_dict(outer.state_dict())
    with pytest.raises(ConfigError, match="at should be 4096 or more, but got at=1:"):
        inner.change(1, [0, 1])


def test_what_was_computed_ahead_cannot_change():
    sampler = changeable()
    batches = iter(LOADERS["numpy"](sampler, 0))
    next(batches)
    for at in (0, 200):
        with pytest.raises(ConfigError, match=f"at should be 16384 or more, but got at={at}"):
            sampler.change(at, [1, 1])


@pytest.mark.parametrize("seed", [None, 4])
def test_a_change_reaches_through_a_batch_sampler_of_the_users(seed):
    def make():
        sampler = changeable()
        return sampler, DataLoader(DATA, batch_sampler=EveryOther(sampler), seed=seed)

    sampler, loader = make()
    batches = iter(loader)
    next(batches)
    sampler.change(42_000, [0, 1])  # in the next epoch: all of this one is drawn
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch[0].tolist() for batch in [*batches, *loader]]
    _, again = make()
    again.load_state_dict(state)
    assert [batch[0].tolist() for batch in [*again, *again]] == rest
    assert min(rest[-1]) >= 9000


def test_a_state_that_is_refused_changes_nothing():
    sampler = changeable()
    loader = Loader(DATA, 50, sampler=sampler)
    sampler.change(2048, [0, 1])
    state = loader.state_dict()
    other = changeable()
    with pytest.raises(StateError, match="global_batch_size"):
        Loader(DATA, 100, sampler=other).load_state_dict(state)
    assert other.quotas.tolist() == changeable().quotas.tolist()


def test_sources_of_one_length_come_in_orders_of_their_own():
    inner = [RandomSampler(range(500)) for _ in range(2)]
    drawn = np.array(list(MixtureSampler(inner, [1, 1], 1000, seed=3)))
    one, other = drawn[drawn < 500], drawn[drawn >= 500] - 500
    assert np.mean(one[:400] == other[:400]) < 0.1


def test_a_state_of_another_schedule_is_refused_and_says_so():
    state = changeable().state_dict()
    other = MixtureSampler([9000, 9000], [(0, [2, 1])], num_samples=40_000, seed=1)
    with pytest.raises(StateError, match="weights is"):
        other.load_state_dict(state)
    changed = changeable()
    changed.change(2048, [1, 1])
    with pytest.raises(StateError, match="changes is"):
        changed.load_state_dict(state)
    constant = MixtureSampler([9000, 9000], [3, 1], num_samples=40_000, seed=1)
    with pytest.raises(ConfigError, match="only a schedule can change"):
        constant.change(2048, [1, 1])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([(1, [1, 1])], r"should begin with \(0, weights\), but begins with \(1, \[1, 1\]\)"),
        ([(0, [1, 1]), (5, [0, 0])], "not all 0"),
        ([(0, [1, 1]), (5, [1, -1])], "0 or more"),
        ([(0, [1, 1]), (9, [1, 1]), (5, [1, 0])], r"weights\[2\] should begin at draw 9 or later"),
        ([(0, [1, 1]), (9, 9, [1, 0])], r"weights\[1\] should begin .* end after it begins"),
        ([(0, [1, 1]), (9, 20, [1, 0]), (19, [1, 0])], "should begin at draw 20 or later"),
        ([(0, [1, 1e-7])], "'1' would never be drawn: .* share of 1e-07 in weights.0."),
        ([(0, [1, 1]), (-5, [1, 0])], "start=-5"),
        ([(0, [1])], "each of the 2 sources"),
        ([(0, [1, 1]), (5,)], "weights should be numbers"),
        ((0, [1, 1]), "weights should be numbers"),
        ([(0, 5, [1, 1])], "should begin with"),
    ],
)
def test_wrong_schedules_are_named(weights, words):
    with pytest.raises(ConfigError, match=words):
        MixtureSampler([5, 5], weights)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MixtureSampler([5, 0], [(0, [1, 0]), (5, [1, 1])]), "it has 0 samples"),
        (lambda: MixtureSampler([5, 5], [1, 1], tokens=[1, 0]), "tokens should be above 0"),
        (lambda: MixtureSampler([5, 5], alpha=1, tokens=[1, 1]), "tokens with weights"),
        (
            lambda: MixtureSampler([5, 500], [(0, [1, 1]), (9, [1, 0])], "oversample"),
            "would have no end",
        ),
        (lambda: MixtureSampler([5, 5], [(0, [1, 1])], "undersample"), "leaves nothing"),
        (
            lambda: MixtureSampler([DistributedSampler(range(9), 2, 0), 5]),
            "source '0' is a DistributedSampler that gives one rank's share",
        ),
    ],
)
def test_other_wrong_arguments_are_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_random_sampler_is_a_source_like_its_data_set():
    sampler = MixtureSampler([RandomSampler(range(512)), 512], [1, 1], 1024, seed=2)
    assert sorted(sampler) == list(range(1024))


def test_a_mixture_that_runs_out_of_one_kind_of_source_goes_on_with_the_next_piece():
    sampler = MixtureSampler([100, 100], [(0, [1, 0]), (5000, [0, 1])], "once")
    order = list(sampler)
    assert max(order[:100]) < 100 <= min(order[100:])
    assert len(order) == 200


@pytest.mark.parametrize(
    "source",
    [
        BatchSampler(SequentialSampler(range(50)), 5, drop_last=False),
        torch.utils.data.SequentialSampler(range(50)),
    ],
)
def test_a_sampler_of_another_kind_is_no_source(source):
    with pytest.raises(ConfigError, match="A source may be a dataset, a length"):
        MixtureSampler([source, 50], [1, 1])


def test_lengths_of_epochs_that_are_no_option_are_named():
    with pytest.raises(ConfigError, match="'undersample', 'once' or None"):
        MixtureSampler([5, 5], [1, 1], "all_exhausted")
