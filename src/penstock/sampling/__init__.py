# SPDX-License-Identifier: Apache-2.0
"""Index streams: which samples an epoch takes, in which order, and how often."""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_names

if TYPE_CHECKING:
    from penstock.sampling.balance import BalanceReport, ClassCounts, balance_report
    from penstock.sampling.balanced_batches import BalancedBatchSampler
    from penstock.sampling.balanced_shuffle import BalancedShuffle, ShuffleCounts
    from penstock.sampling.batches import BatchSampler
    from penstock.sampling.bucket_batches import BucketBatchSampler
    from penstock.sampling.buckets import AspectRatioBatchSampler, BucketSampler
    from penstock.sampling.class_aware import ClassAwareSampler
    from penstock.sampling.class_balanced import ClassBalancedSampler, DynamicBalancedSampler
    from penstock.sampling.distributed import DistributedSampler
    from penstock.sampling.mixture import MixtureSampler
    from penstock.sampling.permutation import Permutation
    from penstock.sampling.repeat_factor import RepeatFactorSampler
    from penstock.sampling.samplers import (
        IndexSampler,
        Indices,
        RandomSampler,
        Sampler,
        SequentialSampler,
        SubsetRandomSampler,
    )
    from penstock.sampling.shard_assignment import assign_shards
    from penstock.sampling.shards import AbsentShard, ShardSampler
    from penstock.sampling.shares import class_shares
    from penstock.sampling.weighted import WeightedRandomSampler

__all__ = [
    "AbsentShard",
    "AspectRatioBatchSampler",
    "BalanceReport",
    "BalancedBatchSampler",
    "BalancedShuffle",
    "BatchSampler",
    "BucketBatchSampler",
    "BucketSampler",
    "ClassAwareSampler",
    "ClassBalancedSampler",
    "ClassCounts",
    "DistributedSampler",
    "DynamicBalancedSampler",
    "IndexSampler",
    "Indices",
    "MixtureSampler",
    "Permutation",
    "RandomSampler",
    "RepeatFactorSampler",
    "Sampler",
    "SequentialSampler",
    "ShardSampler",
    "ShuffleCounts",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "assign_shards",
    "balance_report",
    "class_shares",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".balance": ("BalanceReport", "ClassCounts", "balance_report"),
        ".balanced_batches": ("BalancedBatchSampler",),
        ".balanced_shuffle": ("BalancedShuffle", "ShuffleCounts"),
        ".batches": ("BatchSampler",),
        ".bucket_batches": ("BucketBatchSampler",),
        ".buckets": ("AspectRatioBatchSampler", "BucketSampler"),
        ".class_aware": ("ClassAwareSampler",),
        ".class_balanced": ("ClassBalancedSampler", "DynamicBalancedSampler"),
        ".shares": ("class_shares",),
        ".distributed": ("DistributedSampler",),
        ".mixture": ("MixtureSampler",),
        ".permutation": ("Permutation",),
        ".repeat_factor": ("RepeatFactorSampler",),
        ".samplers": (
            "IndexSampler",
            "Indices",
            "RandomSampler",
            "Sampler",
            "SequentialSampler",
            "SubsetRandomSampler",
        ),
        ".shard_assignment": ("assign_shards",),
        ".shards": ("AbsentShard", "ShardSampler"),
        ".weighted": ("WeightedRandomSampler",),
    },
)
