# SPDX-License-Identifier: Apache-2.0
"""Boxes that cannot be right, counted in what is converted, and treated as data sets treat them."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.reading import upright_size
from penstock.vision.datasets.rules import BAD_BOXES, BadBoxes, BoxCounts, JudgedBoxes, judged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
    from penstock.vision.convert.sources import Collection

__all__ = ["added_px", "total_counts", "with_good_boxes"]

_KINDS: Final = ("zero_area", "inverted", "outside", "swapped", "clipped")
_NUM_SHOWN: Final = 3  # of many bad boxes, in an error
_NO_SIZE: Final = (0, 0)


def added_px(form: str, options: Mapping[str, Any]) -> int:
    """Return what a box's side has here more than in the file's own numbers: see `judged`.

    Example:
        >>> added_px("voc", {}), added_px("voc", {"origin": 0}), added_px("yolo", {})
        (1, 0, 0)
    """
    if form == "voc":
        return int(options.get("origin", 1))
    is_corners = options.get("box_format", "xyxy") == "xyxy"
    return int(form == "landmarks" and options.get("origin") == 1 and is_corners)


def with_good_boxes(
    collection: Collection, policy: BadBoxes, more_px: int
) -> tuple[Collection, BoxCounts]:
    """Return what `policy` makes of the objects of one source, and what there was to do.

    Boxes that are not bad stay exactly as they are; under "keep" all do.

    Args:
        collection: As it was read.
        policy: "keep", "drop", "fix" or "raise".
        more_px: See `added_px`.

    Raises:
        ConfigError: there is no such policy.
        StoreError: a box is bad, and the policy is "raise".
    """
    if policy not in BAD_BOXES:
        raise ConfigError(f"bad_boxes is one of {', '.join(BAD_BOXES)}, not {policy!r}.")
    images, counts, wrong = [], [], []
    for image in collection.images:
        found, of_image = _judged(image, policy, more_px)
        counts.append(of_image)
        if found is not None and policy == "raise":
            wrong += _told(image, found)
        is_as_read = found is None or policy in ("keep", "raise")
        images.append(image if is_as_read else _settled(image, cast("JudgedBoxes", found)))
    if wrong:
        raise _bad_boxes(wrong)
    return replace(collection, images=tuple(images)), total_counts(counts)


def total_counts(counts: Iterable[BoxCounts]) -> BoxCounts:
    """Return the sum of counts."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update({field.name: getattr(one, field.name) for field in fields(one)})
    return BoxCounts(**total)


def _boxed(image: AnnotatedImage) -> list[AnnotatedObject]:
    return [found for found in image.objects if found.box_xyxy_px is not None]


def _judged(
    image: AnnotatedImage, policy: BadBoxes, more_px: int
) -> tuple[JudgedBoxes | None, BoxCounts]:
    """Return what becomes of the boxes of an image, None if nothing does; and its counts."""
    boxed, num_objects = _boxed(image), len(image.objects)
    boxes = np.array([found.box_xyxy_px for found in boxed], np.float64).reshape(-1, 4)
    if not np.isfinite(boxes).all() or not len(boxes):  # writers refuse it, and name it
        return None, BoxCounts(total=num_objects, kept=num_objects)
    size_px = _size_px(image)
    sizes_px = np.tile(np.array(size_px, np.int64), (len(boxes), 1))
    found = judged(boxes, sizes_px, policy, added_px=more_px)
    num_dropped = int((~found.is_kept).sum())
    counts = BoxCounts(
        total=num_objects,
        kept=num_objects - num_dropped,
        dropped=num_dropped,
        unchecked=0 if size_px != _NO_SIZE else len(boxes),
        **{kind: int(getattr(found, kind).sum()) for kind in _KINDS},
    )
    return found if found.is_bad.any() else None, counts


def _size_px(image: AnnotatedImage) -> tuple[int, int]:
    """Return height and width of the image that was annotated; zeros if nobody can say."""
    if image.width_px and image.height_px:
        return image.height_px, image.width_px
    try:
        return upright_size(image.path)
    except (OSError, ValueError):  # it may be elsewhere; where it is needed, that is told
        return _NO_SIZE


def _settled(image: AnnotatedImage, found: JudgedBoxes) -> AnnotatedImage:
    """Return an image with what becomes of its boxes."""
    verdicts = zip(found.boxes.tolist(), found.is_kept.tolist(), found.is_bad.tolist(), strict=True)
    objects = []
    for item in image.objects:
        if item.box_xyxy_px is None:
            objects.append(item)
            continue
        (left, top, right, bottom), is_kept, is_bad = next(verdicts)
        if is_kept:
            box = (left, top, right, bottom) if is_bad else item.box_xyxy_px
            objects.append(replace(item, box_xyxy_px=box))
    return replace(image, objects=tuple(objects))


def _told(image: AnnotatedImage, found: JudgedBoxes) -> list[str]:
    boxed = _boxed(image)
    return [
        f"({', '.join(f'{side:g}' for side in boxed[n].box_xyxy_px or ())}) of a "
        f"{boxed[n].class_name or 'nameless'!r} in {image.source or image.path} is "
        f"{found.kinds_of(n)}"
        for n in np.flatnonzero(found.is_bad).tolist()
    ]


def _bad_boxes(wrong: list[str]) -> StoreError:
    more = f"; and {len(wrong) - _NUM_SHOWN:,} more" if len(wrong) > _NUM_SHOWN else ""
    return StoreError(
        f"{len(wrong):,} bad box(es), in 0-based half-open pixels: "
        f"{'; '.join(wrong[:_NUM_SHOWN])}{more}. Correct the files, or choose bad_boxes 'keep', "
        "'fix' or 'drop' (--bad-boxes)."
    )
