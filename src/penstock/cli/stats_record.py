# SPDX-License-Identifier: Apache-2.0
"""What `penstock stats` found, as JSON has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cli.dataset_stats import Classes, Sizes
    from penstock.cli.object_stats import Objects

__all__ = ["record_of"]


def record_of(
    address: str,
    classes: Classes | None,
    sizes: Sizes,
    objects: Objects | None = None,
    why_none: str | None = None,
) -> dict[str, Any]:
    """Return what was found of a folder or store, as JSON has it.

    Args:
        address: Of the store, or the name of the dataset.
        classes: None where records have no labels.
        sizes: Of the records.
        objects: None where there are no boxes.
        why_none: Why boxes that are there cannot be read.
    """
    record = {
        "address": address,
        "num_records": sizes.num_records,
        "num_classes": None if classes is None else len(classes.ids),
        **({} if classes is None else _record_of_classes(classes)),
        "sizes": _record_of_sizes(sizes),
    }
    if objects is not None:
        record["objects"] = objects.record()
    if why_none is not None:
        record["objects_error"] = why_none
    return record


def _record_of_classes(classes: Classes) -> dict[str, Any]:
    rows = [
        {
            "class": int(classes.ids[row]),
            "name": name,
            "count": int(classes.counts[row]),
            "share": float(classes.shares[row]),
        }
        for row, name in enumerate(classes.names)
    ]
    record: dict[str, Any] = {
        "classes": rows,
        "num_empty_classes": classes.num_empty,
        "largest_to_smallest": classes.imbalance,
        "effective_classes": classes.effective_classes,
    }
    if classes.num_images is not None:
        for row, number in zip(rows, classes.num_images.tolist(), strict=True):
            row["images"] = number
    if classes.objects_per_image is not None:
        record["objects_per_image"] = _spread(classes.objects_per_image)
        record["num_images_without_objects"] = int((classes.objects_per_image == 0).sum())
    return record


def _record_of_sizes(sizes: Sizes) -> dict[str, Any]:
    return {
        "num_sampled": len(sizes.num_bytes),
        "total_bytes": sizes.total_bytes,
        "is_total_estimated": len(sizes.num_bytes) < sizes.num_records,
        "record_bytes": _spread(sizes.num_bytes),
        "num_images": len(sizes.heights_px),
        "num_unreadable": sizes.num_unreadable,
        "num_damaged": sizes.num_damaged,
        "height_px": _spread(sizes.heights_px),
        "width_px": _spread(sizes.widths_px),
    }


def _spread(values: NDArray[np.int64]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {
        "min": int(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "max": int(values.max()),
    }
