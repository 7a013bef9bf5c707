# SPDX-License-Identifier: Apache-2.0
"""Splits where an image can be in one only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.vision.convert.sources import Collection

__all__ = ["one_split_each"]


def one_split_each(collection: Collection) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the split of each image by its key, and the splits that have to be left out.

    "train", "val" and "test" come first. What overlaps those before it, as VOC's "trainval" does,
    is left out. Images in no split are of "train" if there are no splits at all, else of "rest".
    """
    split_of: dict[str, str] = {}
    left_out = []
    usual = [name for name in ("train", "val", "test") if name in collection.splits]
    for split in (*usual, *(name for name in collection.splits if name not in usual)):
        keys = collection.splits[split]
        if any(key in split_of for key in keys):
            left_out.append(split)
        else:
            split_of |= dict.fromkeys(keys, split)
    rest = "rest" if split_of else "train"
    for image in collection.images:
        split_of.setdefault(image.key, rest)
    return split_of, tuple(left_out)
