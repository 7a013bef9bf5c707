# SPDX-License-Identifier: Apache-2.0
"""Random streams per sample: independent, cheap to begin, and the same in every process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.support.processes import python

from penstock import renumbered_samples, sample_rng
from penstock.randomness.generators import GlobalStates
from penstock.randomness.samples import SampleStreams, one_sample

# Pinned: a change would alter every seeded run there is. (seed 7, epoch 2, sample 5.)
GOLDEN = {
    "rng": 0.3608575088561179,
    "random": 0.370603138346414,
    "numpy": 0.5994098528238427,
    "torch": 0.9077087302370757,
}


def all_draws():
    return {
        "rng": sample_rng().random(),
        "random": random.random(),
        "numpy": np.random.random(),
        "torch": torch.rand((), dtype=torch.float64).item(),
    }


def draws_of(seed, epoch, position, attempt=0):
    streams = SampleStreams(seed, epoch)
    with streams.active(isolated=True):
        streams.begin_sample(position, attempt)
        return all_draws()


def test_the_numbers_of_a_sample_never_change():
    assert draws_of(7, 2, 5) == GOLDEN


@given(
    first=st.tuples(
        st.integers(0, 1 << 70), st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 62),
        st.integers(0, 9),
    ),
    other=st.tuples(
        st.integers(0, 1 << 70), st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 62),
        st.integers(0, 9),
    ),
)  # fmt: skip
def test_every_part_of_the_key_counts(first, other):
    one, two = draws_of(*first), draws_of(*other)
    assert (one == two) == (first == other)
    changed = [
        draws_of(first[0] + 1, *first[1:]),
        draws_of(first[0], (first[1] + 1) % (1 << 32), *first[2:]),
        draws_of(*first[:2], first[2] + 1, first[3]),
        draws_of(*first[:3], first[3] + 1),
    ]
    for found in changed:
        assert all(found[name] != one[name] for name in one)


def sequence(count, draw):
    """The first number of each of `count` samples in a row."""
    streams = SampleStreams(3, 0)
    numbers = np.empty(count)
    with streams.active(isolated=True):
        for position in range(count):
            streams.begin_sample(position)
            numbers[position] = draw()
    return numbers


DRAWS = {
    "rng": lambda: sample_rng().random(),
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_samples_in_a_row_are_uniform_and_do_not_depend_on_each_other(draw):
    numbers = sequence(20_000, draw)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    pairs, _, _ = np.histogram2d(numbers[:-1], numbers[1:], bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3
    for lag in (1, 2, 7, 64):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4 / np.sqrt(20_000)


@pytest.mark.parametrize("name", DRAWS)
def test_among_100_000_samples_no_two_draw_the_same_as_they_would_from_seeds_of_32_bits(name):
    numbers = sequence(100_000, DRAWS[name])
    assert len(np.unique(numbers)) == len(numbers)


def test_cached_normal_numbers_of_the_sample_before_are_forgotten():
    def normals():
        return random.gauss(0, 1), np.random.randn(), torch.randn(1).item(), sample_rng().normal()

    streams = SampleStreams(1, 0)
    with streams.active(isolated=True):
        streams.begin_sample(4)
        expected = normals()
        streams.begin_sample(3)
        normals()  # the second of a pair waits now
        sample_rng().integers(1 << 16, dtype=np.uint32)  # and half of a word
        streams.begin_sample(4)
        assert normals() == expected


def test_the_generator_goes_on_within_a_sample_and_begins_anew_in_the_next():
    streams = SampleStreams(1, 0)
    with streams.active():
        streams.begin_batch(10, 3, 4)
        singles = [[sample_rng(k).random() for _ in range(3)] for k in range(4)]
        streams.begin_batch(10, 3, 4)
        mixed = [[], [], [], []]
        for _ in range(3):
            for k in (2, 0, 3, 1):
                mixed[k].append(sample_rng(k).random())
        assert mixed == singles
        for k in range(4):
            streams.begin_sample(10 + 3 * k)
            assert [sample_rng().random() for _ in range(3)] == singles[k]
            assert sample_rng() is sample_rng(0)


def test_a_part_of_a_batch_may_be_numbered_by_itself():
    streams = SampleStreams(1, 0)
    with streams.active():
        streams.begin_batch(0, 1, 5)
        expected = [sample_rng(k).random() for k in range(5)]
        streams.begin_batch(0, 1, 5)
        with renumbered_samples(np.array([4, 1, 3])):
            assert sample_rng(0).random() == expected[4]
            with renumbered_samples(np.array([2, 1])):
                assert sample_rng(0).random() == expected[3]
                with pytest.raises(IndexError, match="2 samples"):
                    sample_rng(2)
            assert sample_rng(1).random() == expected[1]
        assert sample_rng(0).random() == expected[0]


def test_a_sample_of_a_batch_may_be_read_by_itself():
    streams = SampleStreams(1, 0)
    with streams.active(isolated=True):
        streams.begin_sample(14)
        expected = all_draws()
        streams.begin_batch(10, 2, 5)
        with one_sample(2):
            assert all_draws() == expected
        assert sample_rng(2).random() == expected["rng"]
        streams.take_seeding_ns()
        with one_sample(3):
            pass
        assert streams.take_seeding_ns() > 0


def test_a_bit_generator_of_the_users_choice_is_seeded_and_put_back():
    ours = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        kept = GlobalStates.now()
        user = np.random.random()
        kept.restore()
        one, other, again = draws_of(1, 0, 0), draws_of(1, 0, 1), draws_of(1, 0, 0)
        assert one == again
        assert one["numpy"] != other["numpy"]
        assert np.random.random() == user
    finally:
        np.random.set_bit_generator(ours)


def test_torchs_seed_tells_samples_apart_too():
    streams = SampleStreams(1, 0)
    with streams.active(isolated=True):
        seeds = set()
        for position in range(100):
            streams.begin_sample(position)
            seeds.add(torch.initial_seed())
    assert len(seeds) == 100


def test_without_torch_random_and_numpy_draw_the_same():
    code = (
        "import random, sys, numpy as np\n"
        "from penstock import sample_rng\n"
        "from penstock.randomness.samples import SampleStreams\n"
        "streams = SampleStreams(7, 2)\n"
        "with streams.active():\n"
        "    streams.begin_sample(5)\n"
        "    print(repr([random.random(), np.random.random(), sample_rng().random()]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    expected = [GOLDEN["random"], GOLDEN["numpy"], GOLDEN["rng"]]
    assert python("-c", code).stdout.strip() == repr(expected)


def test_samples_read_within_a_sample_draw_on_from_its_stream():
    """A dataset that makes one sample of several others must not draw the same numbers twice."""
    streams = SampleStreams(7, 0)
    with streams.active():
        streams.begin_sample(5)
        together = sample_rng().random(4).tolist()
        streams.begin_sample(5)
        apart = [sample_rng().random()]
        for k in (0, 1):
            with one_sample(k):
                apart.append(sample_rng().random())
        apart.append(sample_rng().random())
    assert apart == together
