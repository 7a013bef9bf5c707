# SPDX-License-Identifier: Apache-2.0
"""Samples by class: found without a sort, and given in turn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.class_items import ClassItems, grouped

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
    items = ClassItems.of(labels)
    assert items.classes.tolist() == sorted(set(labels.tolist()))
    for position, value in enumerate(items.classes.tolist()):
        expected = [index for index, label in enumerate(labels.tolist()) if label == value]
        assert items.items_of(position).tolist() == expected
        assert items.counts[position] == len(expected)
    assert not len(items.unlabelled)
    assert items.num_samples == len(labels)


@given(rows_of_labels)
def test_a_sample_is_an_item_of_each_of_its_classes_once(rows):
    if not any(rows):
        with pytest.raises(ConfigError, match="no label at all"):
            ClassItems.of(RaggedArray.of(rows))
        return
    items = ClassItems.of(RaggedArray.of(rows))
    assert items.classes.tolist() == sorted({label for row in rows for label in row})
    for position, value in enumerate(items.classes.tolist()):
        expected = [index for index, row in enumerate(rows) if value in row]
        assert items.items_of(position).tolist() == expected
        assert items.counts[position] == len(expected)
    assert items.unlabelled.tolist() == [index for index, row in enumerate(rows) if not row]


@given(st.lists(st.integers(0, 200_000), max_size=60))
def test_grouping_is_a_stable_sort_of_any_number_of_classes(codes):
    codes = np.array(codes, np.uint32)
    assert grouped(codes, 200_001).tolist() == np.argsort(codes, kind="stable").tolist()


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.lists(st.integers(0, 4), max_size=120),
    st.integers(0, 1000),
)
def test_a_class_gives_all_its_items_before_one_comes_again(labels, wanted, seed):
    items = ClassItems.of(np.array(labels))
    sequence = np.array(wanted, np.int64) % len(items.classes)
    drawn = items.cycled(sequence, np.random.default_rng(seed))
    for position in range(len(items.classes)):
        of_class = drawn[sequence == position].tolist()
        size = int(items.counts[position])
        for start in range(0, len(of_class), size):
            cycle = of_class[start : start + size]
            assert len(set(cycle)) == len(cycle)
            assert set(cycle) <= set(items.items_of(position).tolist())


def test_independent_draws_keep_to_their_class():
    labels = np.arange(1000) % 7
    items = ClassItems.of(labels)
    sequence = np.arange(500) % 7
    drawn = items.independent(sequence, np.random.default_rng(0))
    assert (labels[drawn] == sequence).all()


def test_many_classes_are_as_right_as_few():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(70_000), 3))
    items = ClassItems.of(labels)
    sequence = np.random.default_rng(1).integers(70_000, size=300_000)
    drawn = items.cycled(sequence, np.random.default_rng(2))
    assert (labels[drawn] == sequence).all()
    # Of three draws in a row of one class none is another's.
    order = np.argsort(sequence, kind="stable")
    place = np.arange(len(order)) - np.searchsorted(sequence[order], sequence[order])
    cycle = place // 3
    keys = (sequence[order] * 1000 + cycle) * len(labels) + drawn[order]
    assert len(np.unique(keys)) == len(keys)


def test_a_digest_tells_other_labels_from_these():
    digests = {ClassItems.of(np.array(labels)).digest for labels in ([0, 1, 1], [1, 0, 1], [0, 0])}
    assert len(digests) == 3
