# SPDX-License-Identifier: Apache-2.0
"""A stream is shuffled and balanced in bounded memory, the same way every time."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.support.processes import python

import penstock.torch
from penstock import Loader, sample_rng
from penstock.data import ArrayDataset, IterableDataset, shard
from penstock.errors import ConfigError, StateError, TooManyFailures
from penstock.sampling.balanced_shuffle import BalancedShuffle
from penstock.sampling.class_balanced import class_shares

SKEWED = (0.8, 0.15, 0.04, 0.01)


def skewed_stream(length=20_000, shares=SKEWED, seed=0):
    """Pairs (place, class), classes at random."""
    labels = np.random.default_rng(seed).choice(len(shares), length, p=shares)
    return list(enumerate(labels.tolist()))


def labels_of(samples):
    return [label for _, label in samples]


def held_by(running):
    """The samples in the buffer."""
    entries = [e for pool in running._pools for e in (*pool.fresh, *pool._given.values())]
    return [sample for _, _, sample in entries]


class Stream(IterableDataset):
    """Pairs (place, class), dealt out to workers and ranks, with noise of the sample's own."""

    def __init__(self, length=60):
        self.length = length
        self.epoch = 0

    def __iter__(self):
        for place in shard(range(self.length)):
            yield place + 1000 * self.epoch, sample_rng().random(), int(place % 10 == 0)

    def set_epoch(self, epoch):
        self.epoch = epoch


class TorchStream(torch.utils.data.IterableDataset):
    """The same in torch's words."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for place in range(first, 60, step):
            yield place, int(place % 10 == 0)


def noisy(sample):
    """A transform that draws."""
    return (*sample[:-1], sample_rng().random(), sample[-1])


def rows(loader):
    """What a loader gives, as lists, batch by batch."""
    return [[np.asarray(part).tolist() for part in batch] for batch in loader]


# What goes out.


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, "effective"])
def test_classes_are_drawn_with_their_shares(alpha):
    stream = skewed_stream()
    drawn = np.bincount(labels_of(BalancedShuffle(stream, alpha=alpha, buffer_size=300)))
    came = np.cumsum(np.eye(4, dtype=np.int64)[labels_of(stream)], axis=0)
    read_at = np.minimum(np.arange(len(stream)) + 300, len(stream)) - 1  # when each was drawn
    expected = sum(class_shares(came[place], alpha) for place in read_at)
    assert drawn.sum() == len(stream)
    assert stats.chisquare(drawn, expected).pvalue > 1e-6
    if alpha == 0:
        assert drawn.tolist() == came[-1].tolist()


@given(
    labels=st.lists(st.integers(0, 4), max_size=60),
    buffer_size=st.integers(1, 70),
    seed=st.integers(0, 3),
)
def test_without_balancing_each_sample_comes_exactly_once(labels, buffer_size, seed):
    stream = list(enumerate(labels))
    balanced = BalancedShuffle(stream, alpha=0, buffer_size=buffer_size, seed=seed)
    out = list(balanced)
    assert sorted(out) == stream
    assert all(place < k + buffer_size for k, (place, _) in enumerate(out))
    assert set(balanced.counts.repeated.values()) <= {0}
    assert set(balanced.counts.dropped.values()) <= {0}


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_one_class_in_a_large_enough_buffer_comes_in_any_order_alike(alpha):
    stream = [(place, "only") for place in range(4)]
    orders = Counter(
        tuple(place for place, _ in BalancedShuffle(stream, alpha=alpha, seed=seed))
        for seed in range(2400)
    )
    assert len(orders) == 24
    assert stats.chisquare(list(orders.values())).pvalue > 1e-6


def test_a_rare_class_goes_through_all_it_has_before_one_repeats():
    rare = [(place, "rare") for place in range(10)]
    stream = rare + [(place, "common") for place in range(2000)]
    out = list(BalancedShuffle(stream, buffer_size=100))
    places = [place for place, label in out if label == "rare"]
    assert len(places) > 900
    rounds = [places[k : k + 10] for k in range(0, len(places) - 9, 10)]
    assert all(sorted(each) == list(range(10)) for each in rounds)
    assert len(set(map(tuple, rounds))) == len(rounds)  # each round in an order of its own


def test_samples_of_a_thinned_class_have_the_same_chance_wherever_they_are():
    stream = skewed_stream()
    out = list(BalancedShuffle(stream, buffer_size=200))[:-200]  # the last come from what is left
    common = [place for place, label in out if label == 0]
    assert len(set(common)) == len(common)  # none twice
    by_tenth = np.histogram(common, 10, (0, len(stream)))[0]
    came = np.histogram([place for place, label in stream if label == 0], 10, (0, len(stream)))[0]
    assert stats.chisquare(by_tenth, came * (by_tenth.sum() / came.sum())).pvalue > 1e-6


# What is held.


@given(
    labels=st.lists(st.integers(0, 4), max_size=80),
    buffer_size=st.integers(5, 30),
    alpha=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
)
def test_the_buffer_never_exceeds_its_size_and_nothing_is_lost_count_of(labels, buffer_size, alpha):
    num_read = 0

    def stream():
        nonlocal num_read
        for sample in enumerate(labels):
            num_read += 1
            yield sample

    balanced = BalancedShuffle(stream(), buffer_size=buffer_size, alpha=alpha)
    running, out = iter(balanced), []
    for sample in running:
        out.append(sample)
        held = held_by(running)
        assert len(held) == len(set(held)) <= buffer_size
        assert num_read <= len(out) - 1 + buffer_size
        counts = balanced.counts
        assert sum(counts.read.values()) == num_read
        assert counts.given == Counter(labels_of(out))
        fresh = Counter(labels_of(set(held) - set(out)))
        for label, read in counts.read.items():
            first_given = counts.given[label] - counts.repeated[label]
            assert read == first_given + counts.dropped[label] + fresh[label]
    assert len(out) == len(labels)
    counts = balanced.counts
    for label, read in counts.read.items():
        assert read == counts.given[label] - counts.repeated[label] + counts.dropped[label]
        assert len(set(out) & {(place, label) for place in range(len(labels))}) == (
            counts.given[label] - counts.repeated[label]
        )


def test_a_rare_class_keeps_all_it_has_until_it_has_as_many_as_the_others():
    stream = [(place, "rare" if place % 20 == 0 else "common") for place in range(4000)]
    running = iter(BalancedShuffle(stream, buffer_size=100))
    shares = []
    for _ in range(3000):
        next(running)
        shares.append(Counter(labels_of(held_by(running)))["rare"])
    assert shares[:2] == [5, 6]  # samples 0, 20 … 80, then 100
    num_rising = shares.index(50)
    assert shares[:num_rising] == sorted(shares[:num_rising])
    assert set(shares[num_rising:]) <= {49, 50, 51}


def test_writing_into_a_sample_leaves_its_repeats_alone():
    stream = [({"pixels": np.zeros(2)}, label) for label in [0] * 50 + [1]]
    for sample, _ in BalancedShuffle(stream, buffer_size=100):
        assert sample["pixels"].tolist() == [0, 0]
        sample["pixels"] += 1
        sample["pixels"] = "decoded"


class Copied:
    """Counts how often it is copied."""

    num_copies = 0

    def __deepcopy__(self, memo):
        Copied.num_copies += 1
        return self


def num_copies(labels, **options):
    Copied.num_copies = 0
    balanced = BalancedShuffle([(Copied(), label) for label in labels], 100, **options)
    list(balanced)
    return Copied.num_copies, balanced.counts


def test_only_what_may_come_again_is_copied():
    labels = [label for _, label in skewed_stream(5000, shares=(0.9, 0.1))]
    assert num_copies(labels, alpha=0)[0] == num_copies([3] * 5000)[0] == 0
    copied, counts = num_copies(labels)
    assert counts.repeated[1] > 1500
    # All of the rare class; of the common one what comes near the beginning and the end.
    assert 0.9 * counts.given[1] < copied < counts.given[1] + 0.1 * counts.given[0]


def test_a_sample_that_cannot_be_copied_is_named():
    stream = [(place, "common") for place in range(8)] + [((n for n in "ab"), "rare")]
    with pytest.raises(TypeError, match="generator") as caught:
        list(BalancedShuffle(stream, 9))
    assert caught.value.__notes__[0].startswith("list gave sample 8 to BalancedShuffle. It may")
    assert len(list(BalancedShuffle(stream, 9, alpha=0))) == 9  # nothing comes again


# The same order every time.


def order_of(**options):
    return [place for place, _ in BalancedShuffle(skewed_stream(500), **options)]


def test_seed_and_epoch_decide_the_order():
    balanced = BalancedShuffle(skewed_stream(500), buffer_size=50, seed=3)
    first = [place for place, _ in balanced]
    assert first == [place for place, _ in balanced] == order_of(buffer_size=50, seed=3)
    assert first != order_of(buffer_size=50, seed=4)
    balanced.set_epoch(1)
    assert first != [place for place, _ in balanced]
    balanced.set_epoch(0)
    assert first == [place for place, _ in balanced]


NO_WORKERS = (0, None)
FORKED = (2, "fork")
SPAWNED = pytest.param(2, "spawn", marks=pytest.mark.slow)  # each imports torch anew


@pytest.mark.parametrize(("num_workers", "start"), [NO_WORKERS, FORKED, SPAWNED])
@pytest.mark.parametrize("loader_of", [Loader, penstock.torch.DataLoader])
def test_loaders_give_the_same_for_every_start_method(loader_of, num_workers, start):
    balanced = BalancedShuffle(Stream(), buffer_size=10, transform=noisy, seed=1)
    more = {"multiprocessing_context": start} if num_workers else {}
    loader = loader_of(balanced, batch_size=4, num_workers=num_workers, seed=7, **more)
    epochs = [rows(loader) for _ in range(2)]
    assert [len(batches) for batches in epochs] == [15, 15]
    reference = Loader(
        BalancedShuffle(Stream(), buffer_size=10, transform=noisy, seed=1),
        batch_size=4,
        num_workers=num_workers,
        seed=7,
    )
    assert epochs == [rows(reference) for _ in range(2)]
    places = [[place for batch in batches for place in batch[0]] for batches in epochs]
    assert {place // 1000 for place in places[0]} == {0}
    assert {place // 1000 for place in places[1]} == {1}
    assert places[0] != [place - 1000 for place in places[1]]


def test_each_worker_balances_its_own_share():
    balanced = BalancedShuffle(Stream(400), buffer_size=40)
    batches = rows(Loader(balanced, batch_size=4, num_workers=2))
    for worker_id in range(2):
        own = batches[worker_id::2]
        places = {place for batch in own for place in batch[0]}
        assert all(place // 4 % 2 == worker_id for place in places)
        labels = [label for batch in own for label in batch[2]]
        assert len(labels) == 200
        assert 60 < sum(labels) < 140


@pytest.mark.parametrize(("num_workers", "start"), [NO_WORKERS, FORKED, SPAWNED])
def test_torchs_own_loader_takes_it(num_workers, start):
    balanced = BalancedShuffle(TorchStream(), alpha=0, buffer_size=10)
    more = {"multiprocessing_context": start} if num_workers else {}
    loader = torch.utils.data.DataLoader(balanced, batch_size=4, num_workers=num_workers, **more)
    first = rows(loader)
    assert sorted(place for batch in first for place in batch[0]) == list(range(60))
    assert rows(loader) == first  # it is in the same epoch
    balanced.set_epoch(1)
    second = rows(loader)
    assert second != first
    assert sorted(place for batch in second for place in batch[0]) == list(range(60))


def test_torchs_loader_knows_it_for_a_stream_without_penstock_torch():
    code = """
import sys
from penstock.sampling.balanced_shuffle import BalancedShuffle
stream = BalancedShuffle([(k, k % 2) for k in range(6)], alpha=0)
assert "torch" not in sys.modules
import torch.utils.data
assert sum(len(batch[0]) for batch in torch.utils.data.DataLoader(stream, batch_size=4)) == 6
assert "penstock.torch" not in sys.modules
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_workers_that_read_the_same_stream_are_still_noticed():
    balanced = BalancedShuffle([(k, k % 2) for k in range(40)], buffer_size=10)
    with pytest.warns(UserWarning, match=r"both began BalancedShuffle .* 2 times"):
        list(Loader(balanced, batch_size=2, num_workers=2))


# Random numbers, and going on.


def test_a_repeated_sample_is_transformed_anew():
    balanced = BalancedShuffle(Stream(), buffer_size=10, transform=noisy)
    out = [list(zip(*batch, strict=True)) for batch in rows(Loader(balanced, batch_size=4))]
    seen = Counter((place, own) for batch in out for place, own, _, _ in batch)
    assert max(seen.values()) > 3  # what the stream drew is repeated
    assert len({drawn for batch in out for _, _, drawn, _ in batch}) == 60


def test_what_the_stream_draws_differs_between_its_samples_and_workers():
    balanced = BalancedShuffle(Stream(), alpha=0, buffer_size=20)
    batches = rows(Loader(balanced, batch_size=4, num_workers=2))
    assert len({number for batch in batches for number in batch[1]}) == 60


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("cut", [1, 2, 7, 14])
def test_resumed_at_any_step_it_goes_on_exactly(cut, num_workers):
    def make():
        balanced = BalancedShuffle(Stream(), buffer_size=10, transform=noisy)
        return Loader(balanced, batch_size=4, num_workers=num_workers, seed=7)

    loader = make()
    batches = iter(loader)
    head = rows(next(batches) for _ in range(cut))
    state = json.loads(json.dumps(loader.state_dict()))
    tail = rows(batches)
    assert len(json.dumps(state)) < 2000
    resumed = make()
    with pytest.warns(UserWarning, match="BalancedShuffle"):
        resumed.load_state_dict(state)
    assert rows(resumed) == tail
    assert head + tail == rows(make())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader_of", [Loader, penstock.torch.DataLoader])
def test_epochs_of_a_loader_without_a_seed_differ_and_are_told(loader_of, num_workers):
    def make():
        stream = BalancedShuffle(Stream(), alpha=0, buffer_size=20)
        return loader_of(stream, batch_size=4, num_workers=num_workers)

    def places(loader):
        return [place for batch in rows(loader) for place in batch[0]]

    loader = make()
    first, second = places(loader), places(loader)
    assert sorted(first) == list(range(60))
    assert sorted(second) == list(range(1000, 1060))  # the stream's epoch is set as well
    assert [place - 1000 for place in second] != first
    again = make()
    again.set_epoch(1)
    assert places(again) == second


@pytest.mark.parametrize("loader_of", [Loader, penstock.torch.DataLoader])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"buffer_size": 300}, r"dataset\.buffer_size is 100 in the state and 300 here"),
        ({"alpha": 0.5}, r"dataset\.alpha is 1\.0 in the state and 0\.5 here"),
        ({"seed": 1}, r"dataset\.seed is 0 in the state and 1 here"),
    ],
)
def test_the_state_of_a_loader_is_refused_by_one_whose_stream_is_ordered_otherwise(
    loader_of, other, said
):
    def make(options):
        return loader_of(BalancedShuffle(Stream(), **options), batch_size=4, seed=7)

    state = json.loads(json.dumps(make({"buffer_size": np.int64(100)}).state_dict()))
    with pytest.raises(StateError, match=said):
        make({"buffer_size": 100, **other}).load_state_dict(state)
    make({"buffer_size": 100, "alpha": 1}).load_state_dict(state)


# When something is wrong.


class Failing:
    """A stream of which sample 7 cannot be read; it goes on after it."""

    def __init__(self):
        self.place = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        if self.place == 7:
            raise OSError("bad tape")
        if self.place == 30:
            raise StopIteration
        return self.place, self.place % 2


class FailingStream(IterableDataset):
    def __iter__(self):
        return Failing()


class FailingGenerator(IterableDataset):
    def __iter__(self):
        yield from Failing()


@pytest.mark.parametrize("stream", [FailingStream, FailingGenerator])
def test_an_exception_of_the_stream_comes_through_with_its_place(stream):
    with pytest.raises(OSError, match="bad tape") as caught:
        list(BalancedShuffle(stream(), buffer_size=5))
    assert caught.value.__notes__ == [
        "BalancedShuffle was reading sample 7 (counted from 0) of its stream, "
        f"{stream.__name__}, and had given 3."
    ]


def test_a_stream_that_goes_on_after_an_exception_does():
    loader = Loader(
        BalancedShuffle(FailingStream(), alpha=0, buffer_size=5), batch_size=4, on_error="skip"
    )
    with pytest.warns(UserWarning, match="1 bad sample"):
        places = [place for batch in rows(loader) for place in batch[0]]
    assert sorted(places) == [place for place in range(30) if place != 7]


def test_a_generator_that_raised_is_not_taken_for_one_that_ended():
    running = iter(BalancedShuffle(FailingGenerator(), buffer_size=5))
    with pytest.raises(OSError, match="bad tape"):
        list(running)
    with pytest.raises(RuntimeError, match=r"ended with an exception after 7 samples") as caught:
        next(running)
    assert isinstance(caught.value.__cause__, OSError)
    loader = Loader(
        BalancedShuffle(FailingGenerator(), buffer_size=5), batch_size=4, on_error="skip"
    )
    with pytest.raises((TooManyFailures, RuntimeError), match="ended with an exception"):
        list(loader)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"image": 1}, r"stream \(list\) is a dict, no pair nor dict with"),
        ((1, [2, 3]), r"stream \(list\) has as its label \[2, 3\]"),
    ],
)
def test_a_sample_without_a_class_is_named_by_its_place(sample, said):
    stream = [(0, 0), (1, 1), sample, (3, 0)]
    message = r"^Sample 2 \(counted from 0\) of the stream \(list\) .*: pass get_label="
    with pytest.raises(ConfigError, match=message) as caught:
        list(BalancedShuffle(stream, buffer_size=10))
    assert caught.match(said)


def test_a_label_is_what_get_label_says():
    stream = [{"meta": {"kind": place % 5 == 0}, "place": place} for place in range(400)]

    def kind_of(sample):
        return sample["meta"]["kind"]

    balanced = BalancedShuffle(stream, 50, get_label=kind_of)
    assert 150 < sum(sample["meta"]["kind"] for sample in balanced) < 250
    assert balanced.counts.read == {True: 80, False: 320}


def test_more_classes_than_room_is_an_error_that_says_where():
    stream = [(place, place) for place in range(5)]
    with pytest.raises(ConfigError, match=r"^Sample 3 .* class, 3, after 3 others, but buffer_siz"):
        list(BalancedShuffle(stream, buffer_size=3))
    assert len(list(BalancedShuffle(stream, buffer_size=3, alpha=0))) == 5


def test_a_stop_iteration_of_a_function_does_not_end_the_stream():
    def empty(_sample):
        return next(iter(()))

    for options in ({"get_label": empty}, {"transform": empty}):
        with pytest.raises(RuntimeError, match="transform raised StopIteration"):
            list(BalancedShuffle([(0, 0)], **options))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"buffer_size": 0}, ConfigError, "buffer_size"),
        ({"alpha": -1}, ConfigError, "alpha"),
        ({"beta": 1}, ConfigError, "beta"),
        ({"seed": -1}, ConfigError, "seed"),
    ],
)
def test_arguments_out_of_range_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        BalancedShuffle([(0, 0)], **options)


def test_a_data_set_with_an_index_is_sent_elsewhere():
    with pytest.raises(ConfigError, match=r"ArrayDataset has none\. .* ClassBalancedSampler"):
        BalancedShuffle(ArrayDataset(np.arange(3)))
