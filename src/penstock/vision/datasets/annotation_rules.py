# SPDX-License-Identifier: Apache-2.0
"""What of the annotations in files becomes the annotations of a data set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.vision.datasets.box_policy import BAD_BOXES, BadBoxes, BoxCounts, JudgedBoxes, judged
from penstock.vision.datasets.class_check import refuse_unknown, warn_of_dropped
from penstock.vision.datasets.frames import ORIENTATIONS, Orientation, size_of_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.vision.datasets.annotation_table import AnnotationTable

__all__ = ["AnnotationRules", "UnknownClasses", "settled"]

UnknownClasses = Literal["raise", "drop"]
_UNKNOWN_CLASSES: Final = ("raise", "drop")
_NUM_SHOWN: Final = 3  # of many bad boxes, in an error


@dataclass(frozen=True, slots=True)
class AnnotationRules:
    """How the annotations of a data set are treated.

    Attributes:
        orientation: Whether pixels are turned as Exif says: see `penstock.vision.datasets.frames`.
        bad_boxes: What becomes of boxes that cannot be right: see
            `penstock.vision.datasets.box_policy`.
        unknown_classes: What becomes of an object whose class is none of the data set's.
        skip_difficult: Whether objects marked as difficult are left out.
        keep_empty: Whether images without an object are in the data set.
        added_px: What a box's side has more than in the file's own numbers: 1 where those include
            both ends.

    Raises:
        ConfigError: there is no such choice.
    """

    orientation: Orientation = "auto"
    bad_boxes: BadBoxes = "fix"
    unknown_classes: UnknownClasses = "raise"
    skip_difficult: bool = False
    keep_empty: bool = True
    added_px: int = 0

    def __post_init__(self) -> None:
        """Check the choices."""
        choices = {
            "orientation": ORIENTATIONS,
            "bad_boxes": BAD_BOXES,
            "unknown_classes": _UNKNOWN_CLASSES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                has = ", ".join(map(repr, allowed))
                raise ConfigError(f"{name} is one of {has}, not {getattr(self, name)!r}.")


def settled(table: AnnotationTable, rules: AnnotationRules) -> tuple[AnnotationTable, BoxCounts]:
    """Return the table that a data set has, its boxes float32, and what was done for it.

    Image files are opened only for their size, and only where the rules need one that the
    annotations do not say. One that cannot be read has no known size: reading it as a sample will
    say why.

    Raises:
        StoreError: a class is unknown, or a box bad, and the rules say that this is an error.
    """
    if rules.unknown_classes == "raise":
        refuse_unknown(table, lambda image: _source(table, image))
    else:
        warn_of_dropped(table)
    is_known = table.labels >= 0
    is_easy = np.ones(table.num_objects, np.bool_)
    if rules.skip_difficult and "difficult" in table.columns:
        is_easy = ~table.columns["difficult"]
    counts = BoxCounts(
        total=table.num_objects,
        unknown=int((~is_known).sum()),
        difficult=int((is_known & ~is_easy).sum()),
    )
    table = table.with_objects(is_known & is_easy)
    table, counts = _with_good_boxes(_with_sizes(table, rules), rules, counts)
    table = replace(table, unknown_classes=(), is_bare=None)
    return table if rules.keep_empty else table.without_empty(), counts


def _with_sizes(table: AnnotationTable, rules: AnnotationRules) -> AnnotationTable:
    """Return the table with the sizes that the rules need."""
    if rules.orientation == "auto":
        sizes_px = table.sizes_px.copy()
        wanted = (sizes_px <= 0).any(axis=1) & _needs_size(table, rules)
        sizes_px[(sizes_px <= 0).any(axis=1)] = 0
    else:  # that of an annotation may be of the other frame
        sizes_px = np.zeros_like(table.sizes_px)
        wanted = _needs_size(table, rules)
    for position in np.flatnonzero(wanted).tolist():
        sizes_px[position] = size_of_file(table.paths[position], rules.orientation) or 0
    is_said = table.is_size_said if rules.orientation == "auto" else None
    return replace(table, sizes_px=sizes_px, is_size_said=is_said)


def _needs_size(table: AnnotationTable, rules: AnnotationRules) -> NDArray[np.bool_]:
    """Return for which images boxes are compared with the image, or made of it."""
    if rules.bad_boxes != "keep":
        return np.diff(table.offsets) > 0
    needs = np.zeros(len(table), np.bool_)
    needs[table.images_of_objects[np.isnan(_extents(table)).any(axis=1)]] = True
    return needs


def _extents(table: AnnotationTable) -> NDArray[np.float64]:
    """Return boxes; those of objects without one around the pixels of their landmarks.

    NaN where there is neither.
    """
    boxes = np.array(table.boxes, np.float64)
    without = np.isnan(boxes).any(axis=1)
    if not without.any() or "landmarks" not in table.columns:
        return boxes
    points = table.columns["landmarks"][without].astype(np.float64)
    is_there = ~np.isnan(points)
    low = np.where(is_there, points, np.inf).min(axis=1)
    high = np.where(is_there, points, -np.inf).max(axis=1) + 1  # from centres to the far edges
    made = np.concatenate([low, high], axis=1)
    boxes[without] = np.where(np.isfinite(made).all(axis=1)[:, None], made, np.nan)
    return boxes


def _with_good_boxes(
    table: AnnotationTable, rules: AnnotationRules, counts: BoxCounts
) -> tuple[AnnotationTable, BoxCounts]:
    sizes_px = table.sizes_px[table.images_of_objects]
    is_without = np.isnan(table.boxes).any(axis=1)
    boxes = _extents(table)
    is_whole = np.isnan(boxes).any(axis=1)
    boxes[is_whole, :2] = 0
    boxes[is_whole, 2:] = sizes_px[is_whole, ::-1]
    is_bare = np.zeros(len(boxes), np.bool_)
    if table.is_bare is not None and rules.bad_boxes != "keep":
        is_bare = table.is_bare
    found = _verdict(boxes, sizes_px, rules, is_without)
    if rules.bad_boxes == "raise" and (found.is_bad | is_bare).any():
        raise _bad_boxes(table, found, is_bare)
    # Those around the whole image also where its size cannot be read.
    is_kept = (found.is_kept | is_whole) & ~is_bare
    kinds = ("zero_area", "inverted", "outside", "swapped", "clipped")
    counts = replace(
        counts,
        kept=int(is_kept.sum()),
        dropped=int((~is_kept).sum()),
        unboxed=int(is_without.sum()),
        unchecked=int((sizes_px <= 0).any(axis=1).sum()),
        **{kind: int(getattr(found, kind).sum()) for kind in kinds},
    )
    table = replace(table, boxes=found.boxes.astype(np.float32))
    return table.with_objects(is_kept), counts


def _verdict(
    boxes: NDArray[np.float64],
    sizes_px: NDArray[np.int64],
    rules: AnnotationRules,
    is_made: NDArray[np.bool_],
) -> JudgedBoxes:
    """Return what becomes of boxes; those that were made of landmarks are cut, and never bad."""
    found = judged(boxes, sizes_px, rules.bad_boxes, added_px=rules.added_px)
    if not is_made.any():
        return found
    made = judged(boxes, sizes_px, "keep" if rules.bad_boxes == "keep" else "fix")
    return JudgedBoxes(
        np.where(is_made[:, None], made.boxes, found.boxes),
        np.where(is_made, made.is_kept, found.is_kept),
        *(
            getattr(found, kind) & ~is_made
            for kind in ("zero_area", "inverted", "outside", "clipped", "swapped")
        ),
    )


def _bad_boxes(
    table: AnnotationTable, found: JudgedBoxes, is_bare: NDArray[np.bool_]
) -> StoreError:
    images = table.images_of_objects
    numbers = np.flatnonzero(found.is_bad | is_bare).tolist()
    shown = []
    for number in numbers[:_NUM_SHOWN]:
        image = int(images[number])
        height, width = table.sizes_px[image].tolist()
        size = f"{height} x {width} px (height x width)" if height else "of unknown size"
        box = ", ".join(f"{side:g}" for side in found.boxes[number])
        said = f"({box}) in an image of {size} is {found.kinds_of(number)}"
        shown.append(
            f"object {number - table.offsets[image]} "
            f"({table.class_names[table.labels[number]]}) of {_source(table, image)}: "
            f"{'it has neither a box nor landmarks' if is_bare[number] else said}"
        )
    more = f"; and {len(numbers) - _NUM_SHOWN} more" if len(numbers) > _NUM_SHOWN else ""
    return StoreError(
        f"{len(numbers)} bad box(es), in 0-based half-open pixels: {'; '.join(shown)}{more}. "
        "Correct the files, or choose bad_boxes='fix' or 'drop'."
    )


def _source(table: AnnotationTable, image: int) -> str:
    return table.sources[image] or table.paths[image]
