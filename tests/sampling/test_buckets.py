# SPDX-License-Identifier: Apache-2.0
"""Similar samples share a batch, every sample comes once, and chance decides the rest."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import penstock
from penstock import Loader
from penstock.errors import ConfigError, StateError
from penstock.sampling import BucketBatchSampler

by_shape = functools.partial(BucketBatchSampler, key="aspect_ratio")


def in_windows(keys, batch_size, window=32, **options):
    """The order of the indices."""
    return BucketBatchSampler(keys, batch_size, window=window, **options).sampler


def sizes_of(num_images=1000):
    """Photos of five common shapes, lying and standing, in three scales."""
    rng = np.random.default_rng(7)
    shapes = np.array([(3, 4), (2, 3), (9, 16), (1, 1), (4, 5)])[rng.integers(5, size=num_images)]
    standing = rng.random(num_images) < 0.4
    shapes[standing] = shapes[standing][:, ::-1]
    return shapes * rng.choice([60, 100, 160], (num_images, 1))


class Sized:
    def __init__(self, sizes_px):
        self.sizes_px = sizes_px

    def __len__(self):
        return len(self.sizes_px)

    def __getitem__(self, index):
        return index


def wasted(sizes, batches):
    """Padded pixels, as a part of all."""
    padded = sum(int(np.prod(sizes[batch].max(axis=0))) * len(batch) for batch in batches)
    return 1 - np.prod(sizes, axis=1).sum() / padded


@pytest.mark.parametrize("num_samples", [0, 1, 7, 64, 1000, 1003])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_index_comes_once(num_samples, shuffle):
    keys = np.random.default_rng(1).random(num_samples)
    sampler = in_windows(keys, 8, shuffle=shuffle)
    assert sorted(sampler) == list(range(num_samples)) == sorted(sampler.indices().tolist())
    assert len(sampler) == num_samples


def test_a_group_is_a_run_of_the_sorted_window():
    keys = np.random.default_rng(1).permutation(1000)
    order = in_windows(keys, 10, window=100).indices()
    groups = {tuple(sorted(keys[order[k : k + 10]] // 10)) for k in range(0, 1000, 10)}
    assert groups == {(n,) * 10 for n in range(100)}


def test_groups_are_not_the_same_in_every_epoch():
    sampler = by_shape(sizes_of(), 8)

    def groups():
        return {tuple(sorted(batch)) for batch in sampler}

    first = groups()
    sampler.set_epoch(1)
    assert len(first & groups()) < 5  # of 125


def test_the_order_of_batches_says_nothing_of_their_shape():
    sizes = sizes_of(8000)
    order = by_shape(sizes, 8).sampler.indices()
    ratio = (sizes[order, 0] / sizes[order, 1]).reshape(-1, 8).mean(axis=1)
    assert abs(np.corrcoef(ratio, np.arange(len(ratio)))[0, 1]) < 0.1
    assert abs(np.corrcoef(ratio[1:], ratio[:-1])[0, 1]) < 0.1


def test_little_is_padded():
    sizes = sizes_of()
    at_random = np.random.default_rng(3).permutation(1000).reshape(-1, 8)
    assert wasted(sizes, at_random) > 0.5
    assert wasted(sizes, [np.array(batch) for batch in by_shape(sizes, 8)]) < 0.3


def test_those_left_over_are_of_any_shape():
    keys = np.arange(103)
    left = []
    sampler = in_windows(keys, 10)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        left += sampler.indices()[100:].tolist()
    assert min(left) < 10
    assert np.mean(left) == pytest.approx(51, abs=5)


class Images:
    """A dataset whose sizes are known to none but who reads it."""

    num_read = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.num_read += 1
        return np.zeros((4 + index, 5, 3), np.uint8), 0


def test_a_dataset_without_sizes_is_refused_and_not_read():
    images = Images()
    for source in (images, penstock.data.Subset(images, [0, 2])):
        with pytest.raises(ConfigError, match=r"got a (Images|Subset)"):
            by_shape(source, 2)
    assert images.num_read == 0


@pytest.mark.parametrize("kind", [penstock.data.Subset, torch.utils.data.Subset])
def test_a_subset_has_the_sizes_of_what_it_is_of(kind):
    sizes = sizes_of(60)
    inner = kind(Sized(sizes), list(range(59, 9, -1)))
    part = kind(inner, [3, 8, 40, 7, 1, 0])
    assert list(by_shape(part, 2, seed=3)) == list(
        by_shape(sizes[[56, 51, 19, 52, 58, 59]], 2, seed=3)
    )


def test_a_state_of_other_sizes_is_refused():
    data = Sized(sizes_of(200))
    state = Loader(data, batch_sampler=by_shape(data, 8)).state_dict()
    other = by_shape(data.sizes_px[::-1].copy(), 8)
    with pytest.raises(StateError, match=r"sampler\.keys"):
        Loader(data, batch_sampler=other).load_state_dict(state)


def test_ranks_share_groups_of_similar_images():
    sizes = sizes_of(960)
    one = list(by_shape(sizes, 16, seed=2))
    ranks = [list(by_shape(sizes, 8, seed=2, num_replicas=2, rank=r)) for r in (0, 1)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(batch) for batch in one]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: in_windows([[1]], 2), r"shape \(1, 1\)"),
        (lambda: in_windows([1, np.nan], 2), r"keys\[1\] is nan"),
        (lambda: in_windows(["a"], 2), "one number per sample"),
        (lambda: in_windows([1], 1, shuffle=0), "shuffle should be a boolean value"),
        (lambda: in_windows([1], 0), "batch_size should be a positive integer"),
        (lambda: in_windows([1], 1, window=0), "window should be a positive integer"),
        (lambda: by_shape([(1, 2), (0, 0), (3, 0)], 2), r"image 1 are \(0, 0\) \(2 such"),
        (lambda: by_shape([1, 2], 2), r"integers of shape \(images, 2\)"),
        (lambda: by_shape([(1.5, 2)], 2), "dtype float64"),
        (lambda: by_shape([(1, 2)], 2, num_replicas=2, rank=2), "Invalid rank 2"),
        (lambda: by_shape([(1, 2)], 2, boundaries=[1]), "with a window leave out max_tokens=None"),
        (lambda: BucketBatchSampler([1], 1, key="shape"), "key='shape'"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
