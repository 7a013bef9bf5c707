# SPDX-License-Identifier: Apache-2.0
"""Index streams: which samples an epoch takes, in which order."""

from penstock.sampling.distributed import DistributedSampler
from penstock.sampling.buckets import AspectRatioBatchSampler, GroupedSampler
from penstock.sampling.permutation import Permutation
from penstock.sampling.samplers import (
    BatchSampler,
    IndexSampler,
    Indices,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from penstock.sampling.weighted import WeightedRandomSampler

__all__ = [
    "AspectRatioBatchSampler",
    "BatchSampler",
    "DistributedSampler",
    "GroupedSampler",
    "IndexSampler",
    "Indices",
    "Permutation",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
]
