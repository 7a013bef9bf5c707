# SPDX-License-Identifier: Apache-2.0
"""The loaders that ranks and the test make alike."""

from __future__ import annotations

import itertools

import torch
from tests.process.seeded_datasets import BatchNoise, Countdown, Noise

from penstock.sampling import (
    BalancedBatchSampler,
    BucketBatchSampler,
    ClassBalancedSampler,
    DistributedSampler,
    WeightedRandomSampler,
)
from penstock.torch import DataLoader

SEED = 7
# 4 ranks with batches of 4 have 25, 24, 24 and 24 samples: 7, 6, 6 and 6 batches.
LENGTH = 97
GLOBAL_BATCH = 16
WEIGHTS = [1.0 + index % 5 for index in range(LENGTH)]
LABELS = [0] * 67 + [1] * 20 + [2] * 10
LENGTHS = [1 + (index * 37) % 60 for index in range(LENGTH)]
# By batch sampler: batches of one rank, or of all, whichever it counts.
NUM_BALANCED = 23
P_CLASSES, K_SAMPLES = 2, 2


def _sampler_of(kind, pad, ranks):
    if kind == "torch's":
        # It knows the process group itself; only the test says which rank it means.
        return torch.utils.data.DistributedSampler(range(LENGTH), seed=3, **ranks)
    source = {
        "dataset": lambda: Noise(LENGTH),
        "weighted": lambda: WeightedRandomSampler(WEIGHTS, LENGTH, seed=3),
        "own generators": lambda: BatchNoise(LENGTH),
        "class balanced": lambda: ClassBalancedSampler(LABELS, seed=3, exact=True),
    }[kind]()
    return DistributedSampler(source, pad=pad, **ranks)


def _batch_sampler_of(kind, world_size, ranks):
    if kind == "balanced batches":
        return BalancedBatchSampler(LABELS, P_CLASSES, K_SAMPLES, NUM_BALANCED, seed=3, **ranks)
    size = GLOBAL_BATCH // world_size
    return BucketBatchSampler(LENGTHS, size, boundaries=[20, 40], seed=3, **ranks)


def loader_of(kind, world_size, *, pad="repeat", drop_last=False, num_workers=0, **options):
    """A rank's loader of `GLOBAL_BATCH` samples a step.

    Args:
        kind: Of sampler, or a stream.
        world_size: Number of ranks; which one this is, the process group says, or `rank`.
        pad: Of `DistributedSampler`.
        drop_last: Of the loader.
        num_workers: Of the loader; the usual start method imports torch in each, so they fork.
        options: `rank`, and others for the loader.
    """
    ranks = {}
    if (rank := options.pop("rank", None)) is not None:
        ranks = {"num_replicas": world_size, "rank": rank}
    if num_workers and "backend" not in options:
        options = {"multiprocessing_context": "fork", **options}
    options |= {"seed": SEED, "num_workers": num_workers}
    if kind in ("balanced batches", "buckets"):
        batch_sampler = _batch_sampler_of(kind, world_size, ranks)
        return DataLoader(Noise(LENGTH), batch_sampler=batch_sampler, **options)
    options |= {"batch_size": GLOBAL_BATCH // world_size, "drop_last": drop_last}
    if kind.startswith("stream"):
        by = kind.removeprefix("stream by ")
        return DataLoader(Countdown(LENGTH, shuffled=True, by=by), **options)
    # Threads share the global generators, so that only the samples' own are as they were.
    data = BatchNoise(LENGTH) if kind == "own generators" else Noise(LENGTH)
    return DataLoader(data, sampler=_sampler_of(kind, pad, ranks), **options)


def content(batch):
    """The samples of a batch: [index, the bytes of its random numbers]."""
    indices, draws = batch
    return [[int(i), row.numpy().tobytes().hex()] for i, row in zip(indices, draws, strict=True)]


def taken(loader, count=None):
    """The next epoch, or so many batches of it."""
    return [content(batch) for batch in itertools.islice(loader, count)]
