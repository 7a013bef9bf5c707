# SPDX-License-Identifier: Apache-2.0
"""Samples by class: found without a sort, and given in turn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.data.ragged import RaggedArray
from penstock.sampling import class_items
from penstock.sampling.class_items import ClassItems

rows_of_labels = st.lists(st.lists(st.integers(-3, 5), max_size=4), min_size=1, max_size=30)
LABELS = {
    "bool": np.array([True, False, True, True]),
    "int8": np.array([-128, 127, 127, -1], np.int8),
    "uint64": np.array([2**64 - 1, 2**64 - 2, 2**64 - 1], np.uint64),
    "far apart": np.array([-(2**62), 2**62, 5, 5]),
    "near the end": np.array([2**63 - 1, 2**63 - 3, 2**63 - 1]),
    "strings": np.array(["cat", "dog", "ant", "cat"]),
    "one class": np.array([7, 7, 7]),
    "not native": np.array([3, 1, 3], ">i4"),
    "strided": np.arange(20)[::3] % 4,
}


@pytest.mark.parametrize("kind", LABELS)
def test_the_items_of_a_class_are_the_samples_with_its_label(kind):
    labels = LABELS[kind]
    items = ClassItems(labels)
    assert items.classes.tolist() == sorted(set(labels.tolist()))
    for position, value in enumerate(items.classes.tolist()):
        expected = [index for index, label in enumerate(labels.tolist()) if label == value]
        assert items.items_of(position).tolist() == expected
        assert items.counts[position] == len(expected)
    assert not len(items.unlabelled)
    assert items.num_samples == len(labels)


@given(rows_of_labels)
def test_a_sample_is_an_item_of_each_of_its_classes_once(rows):
    items = ClassItems(RaggedArray.of(rows))
    assert items.classes.tolist() == sorted({label for row in rows for label in row})
    for position, value in enumerate(items.classes.tolist()):
        expected = [index for index, row in enumerate(rows) if value in row]
        assert items.items_of(position).tolist() == expected
        assert items.counts[position] == len(expected)
    assert items.unlabelled.tolist() == [index for index, row in enumerate(rows) if not row]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.lists(st.integers(0, 4), max_size=120),
    st.integers(0, 1000),
)
def test_a_class_gives_all_its_items_before_one_comes_again(labels, wanted, seed):
    items = ClassItems(np.array(labels))
    sequence = np.array(wanted, np.int64) % len(items.classes)
    drawn = items.cycled(sequence, np.random.default_rng(seed)).ravel()
    for position in range(len(items.classes)):
        of_class = drawn[sequence == position].tolist()
        size = int(items.counts[position])
        for start in range(0, len(of_class), size):
            cycle = of_class[start : start + size]
            assert len(set(cycle)) == len(cycle)
            assert set(cycle) <= set(items.items_of(position).tolist())


def drawn_often(sizes, sequence, together=1, repeats=6000):
    """Numbers of items within their classes, (repeats, draws x together), which take turns."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    items, rng = ClassItems(labels), np.random.default_rng(5)
    sequence = np.array(sequence)
    drawn = [items.cycled(sequence, rng, together).ravel() for _ in range(repeats)]
    first = np.cumsum(sizes) - sizes
    return np.array(drawn) - np.repeat(first[sequence], together)


def assert_independent(one, other):
    table = np.zeros((one.max() + 1, other.max() + 1))
    np.add.at(table, (one, other), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-6


def assert_even(numbers, size):
    assert stats.chisquare(np.bincount(numbers, minlength=size)).pvalue > 1e-6


@pytest.mark.parametrize(
    ("sizes", "num_draws"),
    [([5], 5), ([5], 3), ([5], 12), ([5, 5, 5], 5), ([5, 5, 5], 3), ([5, 5, 5], 12)],
    ids=["one turn", "part of a turn", "some turns", "alike", "parts of alike", "turns of alike"],
)
def test_every_place_of_a_turn_is_as_likely_for_every_item(sizes, num_draws):
    drawn = drawn_often(sizes, np.tile(np.arange(len(sizes)), num_draws))
    for numbers in drawn.T:
        assert_even(numbers, 5)


def test_all_orders_of_a_turn_are_as_likely():
    drawn = drawn_often([4, 4], [0, 0, 0, 0, 1, 1, 1, 1])
    for numbers in (drawn[:, :4], drawn[:, 4:]):
        orders = np.unique(numbers @ [64, 16, 4, 1], return_counts=True)[1]
        assert len(orders) == 24
        assert stats.chisquare(orders).pvalue > 1e-6


def test_what_gives_way_to_keep_draws_apart_has_any_later_place_as_likely():
    # Of 5 items in threes, the second three are two of one turn and one of the next.
    drawn = drawn_often([5], [0, 0, 0, 0], together=3, repeats=10_000)
    turn, following = drawn[:, :5], drawn[:, 5:10]
    for last in (3, 4):
        assert (following[:, 0] != turn[:, last]).all()
        place = np.argmax(following == turn[:, [last]], axis=1)
        assert_even(place - 1, 4)
    for numbers in following.T:
        assert_even(numbers, 5)


def test_parts_of_the_classes_of_one_size_are_drawn_as_all_of_them_are(monkeypatch):
    monkeypatch.setattr(class_items, "_BLOCK", 64)
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(50), 7))
    items = ClassItems(labels)
    sequence = np.random.default_rng(1).integers(50, size=1000)
    drawn = items.cycled(sequence, np.random.default_rng(2)).ravel()
    assert (labels[drawn] == sequence).all()
    for number in range(50):
        of_class = drawn[sequence == number]
        for start in range(0, len(of_class), 7):
            assert len(set(of_class[start : start + 7].tolist())) == len(
                of_class[start : start + 7]
            )


def test_few_of_a_large_class_differ():
    items = ClassItems(np.zeros(50, np.int64))
    drawn = [items.cycled(np.zeros(20, np.int64), np.random.default_rng(s)) for s in range(5)]
    assert all(len(np.unique(one)) == 20 for one in drawn)


def test_blocks_group_as_all_codes_at_once_do(monkeypatch):
    monkeypatch.setattr(class_items, "_BLOCK", 64)
    labels = np.random.default_rng(0).integers(9, size=1000)
    items = ClassItems(labels)
    assert (
        np.concatenate(list(map(items.items_of, range(9)))).tolist()
        == np.argsort(labels, kind="stable").tolist()
    )
    assert items.counts.tolist() == np.bincount(labels).tolist()


def test_independent_draws_keep_to_their_class():
    labels = np.arange(1000) % 7
    items = ClassItems(labels)
    sequence = np.arange(500) % 7
    drawn = items.independent(sequence, np.random.default_rng(0))
    assert (labels[drawn] == sequence).all()


def test_many_classes_are_as_right_as_few():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(70_000), 3))
    items = ClassItems(labels)
    sequence = np.random.default_rng(1).integers(70_000, size=300_000)
    drawn = items.cycled(sequence, np.random.default_rng(2)).ravel()
    assert (labels[drawn] == sequence).all()
    # Of three draws in a row of one class none is another's.
    order = np.argsort(sequence, kind="stable")
    place = np.arange(len(order)) - np.searchsorted(sequence[order], sequence[order])
    cycle = place // 3
    keys = (sequence[order] * 1000 + cycle) * len(labels) + drawn[order]
    assert len(np.unique(keys)) == len(keys)
