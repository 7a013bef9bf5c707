# SPDX-License-Identifier: Apache-2.0
"""A `Permutation` is a bijection, the same however it is asked, and random to every statistic.

The statistics have fixed seeds, so they pass or fail for good; their bounds are p-values of 1e-4 or
five standard deviations. Beside them stand orders that are not random enough, which must fail.
"""

import itertools
import math
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from penstock.errors import ConfigError
from penstock.sampling import permutation
from penstock.sampling.permutation import (
    LARGEST,
    TABLE_LIMIT,
    GroupShuffle,
    Permutation,
    replace_in_turn,
)

HUGE = 10**10
# Where the two ways of making an order meet, and where the halves of a position change their sizes.
EDGES = [0, 1, 2, TABLE_LIMIT - 1, TABLE_LIMIT, TABLE_LIMIT + 1]
EDGES += [side * side + more for side in (65, 100) for more in (-1, 0, 1, side - 1, side, side + 1)]

lengths = st.integers(0, 20_000) | st.sampled_from(EDGES)
large = st.integers(TABLE_LIMIT + 1, LARGEST) | st.sampled_from([HUGE, LARGEST - 1, LARGEST])
seeds = st.integers(0, 1 << 70) | st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=3)


@given(lengths, seeds)
@example(TABLE_LIMIT, 0)
@example(TABLE_LIMIT + 1, 0)
def test_every_index_comes_exactly_once(n, seed):
    values = Permutation(n, seed)[:]
    assert values.dtype == np.int64
    assert np.array_equal(np.sort(values), np.arange(n))


@pytest.mark.parametrize("n", [LARGEST, LARGEST - 1, (1 << 31) * ((1 << 31) - 1) + 1, HUGE + 1])
def test_the_largest_orders_stay_in_range_and_repeat_nothing(n):
    order = Permutation(n, 5)
    drawn = np.random.default_rng(0).integers(n, size=100_000)
    side = math.isqrt(n - 1) + 1
    same_half = np.concatenate([np.arange(50_000), np.arange(50_000) * side % n])
    ends = np.concatenate([np.arange(100), n - 1 - np.arange(100)])
    positions = np.unique(np.concatenate([drawn, same_half, ends]))
    values = order[positions]
    assert 0 <= values.min() <= values.max() < n
    assert len(np.unique(values)) == len(positions)
    assert [order[int(position)] for position in ends] == order[ends].tolist()


@given(lengths, seeds, st.data())
def test_one_index_a_slice_and_an_array_are_parts_of_the_same_order(n, seed, data):
    order = Permutation(n, seed)
    whole = order[:]
    part = data.draw(st.slices(n))
    assert order[part].tolist() == whole[part].tolist()
    assert order[part].dtype == np.int64
    positions = data.draw(st.lists(st.integers(-n, n - 1), max_size=20)) if n else []
    assert [order[position] for position in positions] == [int(whole[i]) for i in positions]
    asked = np.array(positions, np.int64)
    assert order[asked].tolist() == whole[asked].tolist()


@given(large, seeds, st.data())
def test_they_agree_where_the_whole_cannot_be_had(n, seed, data):
    order = Permutation(n, seed)
    start = data.draw(st.integers(0, n - 50))
    step = data.draw(st.integers(1, (n - start) // 50))
    positions = range(start, start + 50 * step, step)
    one_by_one = [order[position] for position in positions]
    assert order[np.array(positions)].tolist() == one_by_one
    assert order[start : start + 50 * step : step].tolist() == one_by_one
    downwards = order[positions[-1] : start - 1 if start else None : -step]
    assert downwards.tolist() == one_by_one[::-1]
    assert order[np.array(positions) - n].tolist() == one_by_one
    assert [order[position - n] for position in positions] == one_by_one


@pytest.mark.parametrize("n", [0, 1, 3000, 4096, 4097, 30_000])
def test_iterating_yields_python_integers_in_order(n):
    order = Permutation(n, 2)
    indices = list(order)
    assert indices == order[:].tolist()
    assert {type(index) for index in indices} <= {int}
    assert list(reversed(order)) == indices[::-1]
    assert len(order) == n


@pytest.mark.parametrize("n", [300, 1 << 40])
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4"])
def test_positions_may_be_of_any_integer_dtype_and_shape(n, dtype):
    order = Permutation(n, 4)
    positions = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for asked in (positions, positions.T, positions[:, ::-2], positions[:0], positions[0, 0, 1]):
        asked = np.asarray(asked)
        values = order[asked]
        assert values.shape == asked.shape
        assert values.dtype == np.int64
        assert values.tolist() == np.vectorize(lambda i: order[int(i)], "q")(asked).tolist()


@pytest.mark.parametrize("n", [1000, 100_000])
def test_arrays_are_fresh_and_the_positions_stay_as_they_were(n):
    order = Permutation(n, 6)
    before = order[:].tolist()
    order[:][:] = 0
    positions = np.arange(-5, 5)
    order[positions][:] = 0
    assert positions.tolist() == list(range(-5, 5))
    assert order[:].tolist() == before


@pytest.mark.parametrize("n", [1000, 100_000])
def test_numpy_makes_an_array_of_it(n):
    order = Permutation(n, 8)
    assert np.asarray(order).dtype == np.int64
    assert np.asarray(order).tolist() == list(order)
    assert np.asarray(order, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="without a copy"):
        order.__array__(copy=False)


def test_threads_that_share_an_order_do_not_disturb_each_other():
    order = Permutation(HUGE + 1, 9)
    starts = [block * 50_000 for block in range(40)]
    alone = [order[start : start + 50_000] for start in starts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda start: order[start : start + 50_000], starts))
    assert all(map(np.array_equal, alone, together))


# Pinned so that an order never changes between versions unnoticed: a run that is
# resumed would read some samples twice and others never. Should these fail, the change needs a line
# in the changelog, or must not be made. (Up to TABLE_LIMIT the order is numpy's `permutation`; a
# new numpy may change it.)
@pytest.mark.parametrize(
    ("n", "seed", "first", "last"),
    [
        (10, 0, [6, 5, 1, 7], 9),
        (4096, (7, 3), [1760, 938, 3571, 303], 1531),
        (4097, 0, [2566, 2485, 2653, 3441], 158),
        (5000, 1, [3379, 1269, 898, 1883], 956),
        (10**7, (7, 3), [6828132, 8513519, 2744204, 6416766], 6396867),
        (HUGE, (7, 3), [9112033596, 4594684732, 3309466208, 1711150924], 9955012082),
        (
            LARGEST,
            1 << 70,
            [747327965273113839, 928341967660949090, 1273334519464709035, 2012936116305118117],
            1842761170652389541,
        ),
    ],
)
def test_orders_are_the_same_in_every_version(n, seed, first, last):
    order = Permutation(n, seed)
    assert order[:4].tolist() == first
    assert order[-1] == last


@pytest.mark.parametrize("n", [1000, 5000, HUGE])
def test_seeds_and_epochs_give_unrelated_orders(n):
    ways = [0, 1, 2, (0, 1), (1, 0), (0, 0), (0, 0, 0), (0, 2), 1 << 32, 1 << 64]
    orders = [Permutation(n, seed)[:1000] for seed in ways]
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one == other) <= 8  # 1 is expected, at n = 1000
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(1000)


def test_it_pickles_small_and_its_repr_makes_it_again():
    order = Permutation(np.int64(HUGE), [np.uint8(7), 3])
    for again in (pickle.loads(pickle.dumps(order)), eval(repr(order))):
        assert (again.n, again.seed) == (order.n, order.seed) == (HUGE, (7, 3))
        assert again[:5].tolist() == order[:5].tolist()
    assert len(pickle.dumps(Permutation(TABLE_LIMIT))) < 200
    assert repr(order) == "Permutation(10000000000, seed=(7, 3))"
    assert Permutation(5, (7,)).seed == 7


def test_ten_thousand_million_take_less_than_a_megabyte():
    positions = np.random.default_rng(0).integers(HUGE, size=1 << 16)
    Permutation(HUGE + 1, 1)[:10]  # what is imported or compiled once
    for asked in (slice(1 << 16), positions):
        tracemalloc.start()
        try:
            values = Permutation(HUGE + 1, (7, 3))[asked]
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert values.nbytes < peak_bytes < 1_000_000


def p_value(counts):
    """The chance that counts which all have the same expectation are as uneven as this."""
    return stats.chisquare(np.ravel(counts)).pvalue


def is_plausible(p):
    # Too even is as suspicious as too uneven.
    return 1e-4 < p < 1 - 1e-4


@pytest.mark.parametrize("n", [1000, 5000])
def test_every_value_is_as_likely_at_every_position(n):
    table = np.zeros((10, 10))
    for seed in range(400):
        bins = Permutation(n, seed)[:] * 10 // n
        np.add.at(table, (np.arange(n) * 10 // n, bins), 1)
    assert is_plausible(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize("n", [1000, 5000, HUGE, LARGEST])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_position_has_every_value_over_the_seeds(n, where):
    position = {"first": 0, "middle": n // 2, "last": n - 1}[where]
    values = [Permutation(n, (11, epoch))[position] for epoch in range(3000)]
    assert is_plausible(p_value(np.bincount([v * 50 // n for v in values], minlength=50)))


@pytest.mark.parametrize("n", [10**6, HUGE, 1 << 50])
@pytest.mark.parametrize("start", [0, 0.5, 0.9])
def test_the_values_of_a_block_are_spread_evenly(n, start):
    first = int(n * start)
    values = Permutation(n, 13)[first : first + (1 << 16)]
    counts = np.bincount(values // -(-n // 1000), minlength=1000)
    if n == 10**6:  # drawn without putting back: a fifteenth of the values are gone
        expected = len(values) / 1000
        scaled = ((counts - expected) ** 2).sum() / expected / (1 - len(values) / n)
        assert is_plausible(stats.chi2.sf(scaled, 999))
    else:
        assert is_plausible(p_value(counts))


def differences(order, n, lag):
    positions = np.arange(1 << 16)
    return (order[positions + lag] - order[positions]) % n


# The second lag is b: positions that far apart share their right half, neighbours their left one.
@pytest.mark.parametrize(("n", "lag"), [(HUGE, 1), (HUGE, 2), (HUGE, 100_000), (10**6, 1000)])
def test_neighbours_are_unrelated(n, lag):
    order = Permutation(n, 17)
    positions = np.arange(1 << 16)
    one, other = order[positions], order[positions + lag]
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(1 << 16)
    assert is_plausible(p_value(np.histogram2d(one, other, 32, [[0, n], [0, n]])[0]))
    apart = differences(order, n, lag)
    assert is_plausible(p_value(np.bincount(apart // -(-n // 1000), minlength=1000)))


def paired_differences(num_keys):
    """Chi-square p-values of how pairs of positions that share a half differ in value.

    64 x 65 is the smallest network there is, where too few rounds show most. Of each pair's 4160
    differences (left, right), all but (0, 0) are equally likely if the order is random.
    """
    a, b = 64, 65
    counts = np.zeros((2, a * b))
    for key in range(num_keys):
        values = Permutation(a * b, (19, key))[:].reshape(a, b)
        left, right = np.divmod(values, b)
        for which, (one, other) in enumerate(
            [(np.s_[:, 0:64:2], np.s_[:, 1:64:2]), (np.s_[0::2], np.s_[1::2])]
        ):
            apart = (left[one] - left[other]) % a * b + (right[one] - right[other]) % b
            counts[which] += np.bincount(apart.ravel(), minlength=a * b)
    assert not counts[:, 0].any()
    return [p_value(row[1:]) for row in counts]


def test_pairs_that_share_a_half_end_unrelated():
    assert all(map(is_plausible, paired_differences(2000)))


@pytest.mark.parametrize("rounds", [4, 5])
def test_fewer_rounds_fail_that_test(rounds, monkeypatch):
    monkeypatch.setattr(permutation, "_ROUNDS", rounds)
    assert min(paired_differences(2000)) < 1e-10


@pytest.mark.parametrize("n", [5, LARGEST])
def test_what_is_in_an_order_is_not_searched_for(n):
    order = Permutation(n)
    assert 0 in order
    assert np.int64(n - 1) in order
    for other in (n, -1, 2.5, "a"):
        assert other not in order


@pytest.mark.parametrize(
    ("n", "seed", "error", "message"),
    [
        (-1, 0, ConfigError, "n should be 0 or more, but got n=-1."),
        (LARGEST + 1, 0, ConfigError, "n should be at most .* but got n=4611686018427387905"),
        (2.0, 0, TypeError, "n should be an integer"),
        (5, "7", TypeError, "seed.* should be an integer"),
        (5, (1, -1), ConfigError, "should be 0 or more, but got .*=-1"),
        (5, (), ConfigError, "should be 0 or more"),
        (5, (1 << 40, 1 << 32), ConfigError, "parts of 2.*32 or more"),
    ],
)
def test_an_argument_outside_its_range_is_named(n, seed, error, message):
    with pytest.raises(error, match=message):
        Permutation(n, seed)


@pytest.mark.parametrize("n", [0, 5, 5000])
def test_a_position_outside_the_order_is_named(n):
    order = Permutation(n)
    outside = [n, -n - 1, np.array([[n + 3]]), np.array([(1 << 64) - 1], np.uint64)]
    for which in outside:
        with pytest.raises(IndexError, match=f"^position {np.ravel(which)[0]} is outside"):
            order[which]
    for positions in (np.array([1.0]), np.array([True, False])):
        with pytest.raises(IndexError, match=f"integers, but got an array of {positions.dtype}"):
            order[positions]
    with pytest.raises(TypeError):
        order["1"]


@pytest.mark.parametrize("lengths", [(10, 5000, 7, 70_000), (5000, 10**10, 9_999)])
def test_several_orders_at_once_are_each_its_own(lengths):
    orders = [Permutation(n, (3, number)) for number, n in enumerate(lengths)]
    rng = np.random.default_rng(0)
    asked = [
        rng.integers(n, size=size) for n, size in zip(lengths, (300, 0, 41, 2000), strict=False)
    ]
    values = np.concatenate(asked)
    replace_in_turn(orders, np.array(list(map(len, asked))), values)
    expected = [order[positions] for order, positions in zip(orders, asked, strict=True)]
    assert values.tolist() == np.concatenate(expected).tolist()


@given(st.lists(st.integers(0, 90), min_size=1, max_size=30), st.integers(0, 9))
def test_each_group_is_shuffled_by_itself(sizes, seed):
    shuffle = GroupShuffle(np.array(sizes), seed, 1)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes]).astype(np.int64)
    values = shuffle.replaced(positions, groups)
    for group, size in enumerate(sizes):
        assert sorted(values[groups == group].tolist()) == list(range(size))
    places = np.random.default_rng(seed).permutation(len(positions))
    assert (shuffle.replaced(positions[places], groups[places]) == values[places]).all()


def test_small_groups_have_all_orders_about_as_often():
    sizes = np.full(6000, 3)
    positions, groups = np.tile(np.arange(3), 6000), np.repeat(np.arange(6000), 3)
    orders = GroupShuffle(sizes, 7).replaced(positions, groups).reshape(-1, 3)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert counts.min() > 800
