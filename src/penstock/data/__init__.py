# SPDX-License-Identifier: Apache-2.0
"""Datasets, what they are made of, and lists that workers share."""

from typing import TYPE_CHECKING

from penstock.data.dataset import Allocator, Dataset, IterableDataset, shard
from penstock.deprecation import lazy_names

if TYPE_CHECKING:
    from penstock.collate import default_collate
    from penstock.data.combinators import (
        ArrayDataset,
        ChainDataset,
        ConcatDataset,
        StackDataset,
        Subset,
        random_split,
    )
    from penstock.data.file_stream import FileStream
    from penstock.data.packed_list import PackedList
    from penstock.data.ragged import RaggedArray

__all__ = [
    "Allocator",
    "ArrayDataset",
    "ChainDataset",
    "ConcatDataset",
    "Dataset",
    "FileStream",
    "IterableDataset",
    "PackedList",
    "RaggedArray",
    "StackDataset",
    "Subset",
    "default_collate",
    "random_split",
    "shard",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "penstock.collate": ("default_collate",),
        ".combinators": (
            "ArrayDataset",
            "ChainDataset",
            "ConcatDataset",
            "StackDataset",
            "Subset",
            "random_split",
        ),
        ".file_stream": ("FileStream",),
        ".packed_list": ("PackedList",),
        ".ragged": ("RaggedArray",),
    },
    {
        "BatchReader": "a Callable in annotations: (indices, alloc) -> batch",
        "Empty": "Allocator",
        "batch_reader": "penstock.data.dataset.batch_reader",
        "register_batch_reader": "penstock.data.dataset.register_batch_reader",
    },
)
