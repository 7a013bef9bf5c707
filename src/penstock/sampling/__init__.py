# SPDX-License-Identifier: Apache-2.0
"""Samplers: which samples an epoch takes, in which order, and how often."""

from typing import TYPE_CHECKING

from penstock.deprecation import lazy_names
from penstock.sampling.distributed import DistributedSampler
from penstock.sampling.permutation import Permutation
from penstock.sampling.samplers import (
    BatchSampler,
    IndexSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

if TYPE_CHECKING:
    from penstock.sampling.balance import balance_report
    from penstock.sampling.balanced_batches import BalancedBatchSampler
    from penstock.sampling.balanced_shuffle import BalancedShuffle
    from penstock.sampling.buckets import BucketBatchSampler
    from penstock.sampling.class_balanced import ClassBalancedSampler
    from penstock.sampling.lanes import LaneBatchSampler
    from penstock.sampling.mixture import MixtureSampler
    from penstock.sampling.packing import PackingSampler
    from penstock.sampling.repeat_factor import RepeatFactorSampler
    from penstock.sampling.shards import AbsentShard, ShardSampler, assign_shards

__all__ = [
    "AbsentShard",
    "BalancedBatchSampler",
    "BalancedShuffle",
    "BatchSampler",
    "BucketBatchSampler",
    "ClassBalancedSampler",
    "DistributedSampler",
    "IndexSampler",
    "LaneBatchSampler",
    "MixtureSampler",
    "PackingSampler",
    "Permutation",
    "RandomSampler",
    "RepeatFactorSampler",
    "Sampler",
    "SequentialSampler",
    "ShardSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "assign_shards",
    "balance_report",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".balance": ("balance_report",),
        ".balanced_batches": ("BalancedBatchSampler",),
        ".balanced_shuffle": ("BalancedShuffle",),
        ".buckets": ("BucketBatchSampler",),
        ".class_balanced": ("ClassBalancedSampler",),
        ".lanes": ("LaneBatchSampler",),
        ".mixture": ("MixtureSampler",),
        ".packing": ("PackingSampler",),
        ".repeat_factor": ("RepeatFactorSampler",),
        ".shards": ("AbsentShard", "ShardSampler", "assign_shards"),
    },
    {
        "AspectRatioBatchSampler": 'BucketBatchSampler(dataset, batch_size, key="aspect_ratio")',
        "BalanceReport": "penstock.sampling.balance.BalanceReport, which balance_report returns",
        "BucketSampler": "BucketBatchSampler(keys, batch_size, window=32)",
        "ClassAwareSampler": "ClassBalancedSampler(labels, samples_per_class=1)",
        "ClassCounts": "report.images and report.objects of what balance_report returns",
        "DynamicBalancedSampler": "ClassBalancedSampler(labels, alpha=(0, 1), num_epochs=...)",
        "Indices": "numpy.ndarray in annotations",
        "ShuffleCounts": "the attribute counts of a BalancedShuffle",
        "class_shares": "MixtureSampler(sources, alpha=...), or ClassBalancedSampler(...).shares",
    },
)
