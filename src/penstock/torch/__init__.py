# SPDX-License-Identifier: Apache-2.0
"""The drop-in for `torch.utils.data`: the same names, on Penstock's engine.

One line of a program changes:

    from penstock.torch import DataLoader    # was: from torch.utils.data import DataLoader

Datasets and samplers are torch's own classes.
"""

from __future__ import annotations

from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
    random_split,
)

import penstock.torch.datasets  # noqa: F401 - registers how torch's are read by the batch
from penstock.data.dataset import IterableDataset as PlainIterableDataset
from penstock.torch.device.prefetcher import DevicePrefetcher
from penstock.torch.images import NormalizeImages
from penstock.torch.loader import DataLoader
from penstock.torch.replacement import install, uninstall
from penstock.torch.stateful import StatefulDataLoader

__all__ = [
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "DevicePrefetcher",
    "DistributedSampler",
    "IterableDataset",
    "NormalizeImages",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "StackDataset",
    "StatefulDataLoader",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "WeightedRandomSampler",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "install",
    "random_split",
    "uninstall",
]

# A dataset that needs no torch may still be given to the drop-in: torch's checks see it as
# iterable.
IterableDataset.register(PlainIterableDataset)  # type: ignore[type-abstract]
