# SPDX-License-Identifier: Apache-2.0
"""Classes in turn, and of each a sample that has it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling import ClassBalancedSampler


def in_turn(labels, num_samples=None, in_a_row=1, seed=0):
    return ClassBalancedSampler(
        labels, num_samples=num_samples, samples_per_class=in_a_row, seed=seed
    )


rows_of_labels = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=20)


@given(rows_of_labels.filter(any), st.integers(1, 80), st.integers(1, 3), st.integers(0, 9))
def test_every_class_comes_once_before_any_comes_again(rows, num_samples, in_a_row, seed):
    sampler = in_turn(RaggedArray.of(rows), num_samples, in_a_row, seed)
    drawn = sampler.indices().tolist()
    assert len(drawn) == num_samples
    classes = {label for row in rows for label in row}
    for start in range(0, num_samples, in_a_row * len(classes)):
        cycle = drawn[start : start + in_a_row * len(classes)]
        if len(cycle) < in_a_row * len(classes):
            break
        # Each turn is of a class that all of its samples have, and no two turns of the same one.
        turns = [
            set.intersection(*(set(rows[index]) for index in cycle[turn : turn + in_a_row]))
            for turn in range(0, len(cycle), in_a_row)
        ]
        assert _can_all_differ(turns)


def _can_all_differ(choices):
    """Whether a different class can be taken from each set."""
    owner = {}

    def place(turn, seen):
        for label in choices[turn] - seen:
            seen.add(label)
            if label not in owner or place(owner[label], seen):
                owner[label] = turn
                return True
        return False

    return all(place(turn, set()) for turn in range(len(choices)))


def test_single_labels_are_equally_frequent_to_within_one():
    labels = np.repeat(np.arange(6), [500, 200, 100, 50, 10, 1])
    drawn = labels[in_turn(labels, 1000, seed=1).indices()]
    assert set(np.bincount(drawn).tolist()) == {166, 167}


def test_each_cycle_has_an_order_of_its_own():
    labels = np.repeat(np.arange(4), 10)
    drawn = labels[in_turn(labels, 4 * 500, seed=2).indices()].reshape(500, 4)
    for place in range(4):
        assert stats.chisquare(np.bincount(drawn[:, place], minlength=4)).pvalue > 1e-6
    pairs = np.bincount(4 * drawn[:-1:2, 0] + drawn[1::2, 0], minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-6


def test_samples_without_a_label_never_come():
    assert 1 not in in_turn([[0], [], [1]], 500)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: in_turn([]), "have no label"),
        (lambda: in_turn([0, 1], 0), "num_samples"),
        (lambda: in_turn([0, 1], in_a_row=0), "samples_per_class"),
        (lambda: ClassBalancedSampler([0, 1], 0.5, samples_per_class=1), "classes take turns, and"),
        (lambda: in_turn(5), "ClassBalancedSampler"),
    ],
)
def test_what_makes_no_sense_is_an_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
