# SPDX-License-Identifier: Apache-2.0
"""`stratified_parts`: every class in every part, in the shares that were asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import RaggedArray
from penstock.sampling.stratified import stratified_parts

SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(
    lambda weights: [weight / sum(weights) for weight in weights]
)
COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)
ROWS = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=60).map(RaggedArray.of)


@given(COUNTS, SHARES, st.integers(0, 99))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_of_one_class_each_every_part_has_its_share_of_each_class(counts, shares, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(range(len(counts)), counts))
    parts = stratified_parts(labels, shares, seed)
    for number, count in enumerate(counts):
        here = np.bincount(parts[labels == number], minlength=len(shares))
        assert here.sum() == count
        assert (np.abs(here - np.multiply(shares, count)) < max(2, len(shares))).all()
        if count >= len(shares):
            assert here.min() >= 1


@given(ROWS, SHARES, st.integers(0, 99))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_of_several_classes_each_the_rarest_is_in_every_part(rows, shares, seed):
    parts = stratified_parts(rows, shares, seed)
    assert parts.shape == (len(rows),)
    assert ((parts >= 0) & (parts < len(shares))).all()
    counts = {c: sum(c in row.tolist() for row in rows) for c in np.unique(rows.values).tolist()}
    if counts:
        rarest = min(counts, key=counts.get)
        here = {part for part, row in zip(parts, rows, strict=True) if rarest in row.tolist()}
        assert len(here) == min(counts[rarest], len(shares))


@given(st.integers(0, 300), SHARES, st.integers(0, 99))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_without_classes_sizes_are_the_shares(num_samples, shares, seed):
    parts = stratified_parts(RaggedArray.of([[]] * num_samples), shares, seed)
    sizes = np.bincount(parts, minlength=len(shares))
    assert (np.abs(sizes - np.multiply(shares, num_samples)) < 1).all()


def test_several_classes_keep_their_shares_where_no_single_one_could():
    rng = np.random.default_rng(0)
    rows = [[0] + [1] * (n % 3 == 0) + [2] * (rng.random() < 0.1) for n in range(600)]
    parts = stratified_parts(RaggedArray.of(rows), [0.8, 0.1, 0.1], 1)
    for number in range(3):
        has = np.array([number in row for row in rows])
        assert np.bincount(parts[has]) / has.sum() == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_the_seed_decides_and_nothing_else():
    labels = np.arange(90) % 4
    one, again, other = (stratified_parts(labels, [0.5, 0.5], seed) for seed in (3, 3, 4))
    assert one.tolist() == again.tolist() != other.tolist()
