# SPDX-License-Identifier: Apache-2.0
"""Splits where an image can be in one only, or is named several times."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.vision.convert.sources import Collection

__all__ = ["has_repeats", "one_split_each", "splits_with_repeats"]


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


def splits_with_repeats(
    collection: Collection,
) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the splits to write, and notes about images that are several samples.

    A folder has each file once, and the list of a split can name it several times. Where there are
    no splits at all, that is the list of "train".
    """
    count = len(collection.samples) - len(collection.images)
    if count <= 0 or any(map(has_repeats, collection.splits.values())):
        return collection.splits, ()
    if collection.splits:
        return collection.splits, (f"{count:,} repeats of images are left out: no split has them",)
    return {"train": collection.samples}, (
        f"{count:,} repeats of images: each file is there once, and the list of the split 'train' "
        "names it as often as the source",
    )


def has_repeats(keys: Sequence[str]) -> bool:
    """Return whether one of them comes again."""
    return len(set(keys)) < len(keys)
