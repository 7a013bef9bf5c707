# SPDX-License-Identifier: Apache-2.0
"""Index streams: which samples an epoch takes, in which order."""

from penstock.sampling.samplers import (
    BatchSampler,
    DistributedSampler,
    IndexSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = [
    "BatchSampler",
    "DistributedSampler",
    "IndexSampler",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
]
