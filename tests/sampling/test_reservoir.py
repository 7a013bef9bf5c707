# SPDX-License-Identifier: Apache-2.0
"""A reservoir gives what is fresh first, then everything once a round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sampling.balanced_shuffle import _Reservoir as Reservoir


def held(reservoir):
    return [*reservoir.fresh, *reservoir._given.values()]


def filled(samples):
    reservoir = Reservoir()
    for sample in samples:
        reservoir.add(sample)
    return reservoir


@given(length=st.integers(1, 20), num_rounds=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_round_gives_every_sample_once(length, num_rounds, seed):
    rng, reservoir = np.random.default_rng(seed), filled(range(length))
    for number in range(num_rounds):
        given_now = [reservoir.give(rng) for _ in range(length)]
        assert sorted(sample for sample, _ in given_now) == list(range(length))
        assert {is_repeat for _, is_repeat in given_now} == {number > 0}


def test_a_fresh_sample_is_given_before_the_round_goes_on():
    rng, reservoir = np.random.default_rng(1), filled("abcd")
    first = [reservoir.give(rng)[0] for _ in range(6)]
    reservoir.add("e")
    rest = [reservoir.give(rng) for _ in range(3)]
    assert rest[0] == ("e", False)
    assert sorted(first[4:] + [sample for sample, _ in rest[1:]]) == list("abcd")
    assert sorted(reservoir.give(rng)[0] for _ in range(5)) == list("abcde")


def test_of_those_given_before_the_one_first_given_is_crowded_out():
    rng, reservoir = np.random.default_rng(1), filled("abcd")
    first = [reservoir.give(rng)[0] for _ in range(3)]
    assert reservoir.crowd_out(rng) is None
    assert sorted(held(reservoir)) == sorted(set("abcd") - {first[0]})
    assert reservoir.give(rng) == (*set("abcd").difference(first), False)
    assert sorted(reservoir.give(rng)[0] for _ in range(3)) == sorted(held(reservoir))


def test_any_fresh_sample_is_crowded_out_where_none_was_given():
    rng = np.random.default_rng(1)
    lost = np.bincount([filled(range(4)).crowd_out(rng) for _ in range(400)])
    assert lost.min() > 60  # 100 expected, standard deviation 8.7


@given(st.lists(st.sampled_from(["add", "give", "crowd"]), max_size=60), st.integers(0, 9))
def test_what_is_held_is_what_came_in_less_what_was_crowded_out(steps, seed):
    rng, reservoir, added, length = np.random.default_rng(seed), Reservoir(), 0, 0
    fresh = set()
    for step in steps:
        if step == "add":
            reservoir.add(added)
            fresh.add(added)
            added, length = added + 1, length + 1
        elif length and step == "give":
            sample, is_repeat = reservoir.give(rng)
            assert is_repeat == (sample not in fresh)
            fresh.discard(sample)
        elif length:
            lost = reservoir.crowd_out(rng)
            assert (lost is None) == (len(fresh) < length)
            fresh.discard(lost)
            length -= 1
        assert len(held(reservoir)) == length == len(set(held(reservoir)))
        assert set(reservoir.fresh) == fresh


def test_an_empty_reservoir_gives_nothing():
    with pytest.raises(IndexError, match="holds no such sample"):
        Reservoir().give(np.random.default_rng(0))
    with pytest.raises(IndexError, match="holds no such sample"):
        Reservoir().crowd_out(np.random.default_rng(0))
    with pytest.raises(IndexError, match="holds no such sample"):
        Reservoir().take(np.random.default_rng(0))


def test_what_is_taken_is_fresh_and_gone():
    rng, reservoir = np.random.default_rng(1), filled("abcd")
    kept = reservoir.give(rng)[0]
    taken = [reservoir.take(rng) for _ in range(3)]
    assert sorted([kept, *taken]) == list("abcd")
    assert held(reservoir) == [kept]
    assert reservoir.fresh == []
    with pytest.raises(IndexError, match="holds no such sample"):
        reservoir.take(rng)
