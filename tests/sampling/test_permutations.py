# SPDX-License-Identifier: Apache-2.0
"""Many orders at once are the orders one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.sampling.permutation import LARGEST, TABLE_LIMIT, Permutation, Permutations

lengths = st.one_of(
    st.integers(1, 50),
    st.integers(TABLE_LIMIT - 1, TABLE_LIMIT + 300),  # on both sides of what is stored
    st.integers(1, LARGEST),
)


@settings(max_examples=50)
@given(st.lists(lengths, min_size=1, max_size=6), st.integers(0, 1 << 70), st.data())
def test_every_value_is_that_of_the_one_permutation(lengths, seed, data):
    seeds = [(seed, number, 3) for number in range(len(lengths))]
    places = st.integers(0, len(lengths) - 1).flatmap(
        lambda number: st.tuples(st.just(number), st.integers(0, lengths[number] - 1))
    )
    wanted = data.draw(st.lists(places, max_size=30))
    which, positions = np.array(wanted, np.int64).reshape(-1, 2).T
    values = Permutations(lengths, seeds).at(which, np.ascontiguousarray(positions))
    assert values.dtype == np.int64
    ones = [Permutation(length, each) for length, each in zip(lengths, seeds, strict=True)]
    assert values.tolist() == [ones[number][position] for number, position in wanted]


# Of 4161 items 64 of 4225 values are too large: of 30 such orders, some walk on twice.
@pytest.mark.parametrize(
    "lengths",
    [[4095, 4096], [4097, 70_000], [10, 70_000, 4097, 0], [4161] * 30],
    ids=["stored", "computed", "both", "walking"],
)
def test_whole_orders_hold_every_item_once(lengths):
    seeds = [(7, number) for number in range(len(lengths))]
    which = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    given = positions.copy()
    values = Permutations(lengths, seeds).at(which, positions)
    np.testing.assert_array_equal(positions, given)  # not written to
    for number, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
        np.testing.assert_array_equal(values[which == number], Permutation(length, seed)[:])
