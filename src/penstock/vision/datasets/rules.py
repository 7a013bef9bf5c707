# SPDX-License-Identifier: Apache-2.0
"""`AnnotationRules`: what of the annotations in files becomes the annotations of a data set.

    kind        in the file's own numbers           fix                             drop    raise
    zero_area   begins and ends at one number       left out                        out     error
    inverted    ends before it begins               its ends are swapped            out     error
    outside     reaches beyond the image            cut to the image; left out      out     error
                                                    if it lies beyond altogether

Under "keep" all of them stay as the file has them; they are counted under every policy. A box may
be of two kinds. What was swapped is looked at again for the image's borders. Rounding after six
digits is no fault.

A camera stores what its sensor saw, and a tag (Exif) that says how to turn it. Viewers turn; many
annotation tools do not. Boxes of the one frame are nonsense in the other, so the size that an
annotation names decides:

    the annotation's size is ...    the pixels are
    that of the upright image       upright, also where both are equal (square, mirrored, 180)
    that of the stored image        as stored: the tag is taken off
    neither                         an error
    not there                       upright
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Literal

import cv2
import numpy as np

from penstock.errors import StoreError
from penstock.images import decode_image, read_header, without_orientation
from penstock.vision.annotations.reading import header_of
from penstock.vision.arguments import checked_choice
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.vision.annotations.model import AnnotatedImage
    from penstock.vision.datasets.table import AnnotationTable

Orientation = Literal["auto", "upright", "stored"]
_AMBIGUOUS: Final = (
    "some photos are turned by Exif, and their annotation's size fits both the stored and the "
    "turned pixels: they are taken as turned. If the annotation tool does not turn photos, give "
    "AnnotationRules(orientation='stored'); else 'upright'."
)
BadBoxes = Literal["fix", "drop", "keep", "raise"]
BAD_BOXES: Final = ("fix", "drop", "keep", "raise")

_KINDS: Final = ("zero_area", "inverted", "outside")
_FARTHEST_PX: Final = 1e9  # no image is that large; float32 still tells pixels below 2^24
# Of the image's side. Numbers of 0 to 1 printed with six digits are wrong by at most 5e-7 each; a
# centre and a half width add up to 7.5e-7. Ten times that: 0.006 of a pixel in 640.
_SLACK: Final = 1e-5
_REMEDY: Final = (
    "Correct the files, or choose bad_boxes='fix', 'drop' or 'keep' (AnnotationRules, --bad-boxes)."
)


@dataclass(frozen=True, slots=True)
class AnnotationRules:
    """How the annotations of a data set are treated.

    Attributes:
        orientation: "auto": the size in the annotation decides whether pixels are turned as Exif
            says. "upright" or "stored" whatever the annotation says.
        bad_boxes: What becomes of boxes that begin and end at one number, end before they begin, or
            reach beyond the image: "fix" swaps and cuts them, "drop" leaves them out, "keep" leaves
            them as they are, "raise" makes an error of them.
        unknown_classes: "raise" or "drop": what becomes of an object whose class is none of the
            data set's.
        skip_difficult: Whether objects marked as difficult, or as COCO's crowds, are left out.
        keep_empty: Whether images without an object are in the data set.
        added_px: What a box's side has more than in the file's own numbers: 1 where those include
            both ends, so that equal ends are a box without area. Readers of files set it.

    Raises:
        ConfigError: there is no such choice.
    """

    orientation: Orientation = "auto"
    bad_boxes: BadBoxes = "fix"
    unknown_classes: Literal["raise", "drop"] = "raise"
    skip_difficult: bool = False
    keep_empty: bool = True
    added_px: int = 0

    def __post_init__(self) -> None:
        checked_choice("orientation", self.orientation, ("auto", "upright", "stored"))
        checked_choice("bad_boxes", self.bad_boxes, BAD_BOXES)
        checked_choice("unknown_classes", self.unknown_classes, ("raise", "drop"))


@dataclass(frozen=True, slots=True)
class BoxCounts:
    """What was found about the objects of a data set, and done.

    Attributes:
        total: Objects in the files.
        kept: Objects in the data set.
        zero_area: Boxes that begin and end at one number.
        inverted: Boxes that end before they begin.
        outside: Boxes that reach beyond their image, or lie beyond it.
        swapped: Inverted boxes whose ends were swapped.
        clipped: Boxes that were cut to their image.
        dropped: Objects left out because of their box.
        difficult: Objects left out as difficult ones, or crowds.
        unknown: Objects left out because their class is none of those asked for.
        unboxed: Objects that have no box in the file. Those with landmarks were given one around
            them; those without were dropped, or under "keep" given the whole image.
        unsized: Objects left out because the size of their image, which they are shares of, could
            not be read.
        unchecked: Boxes of images whose size is not known, which may reach beyond the right or the
            lower border.

    Example:
        >>> print(BoxCounts(total=4888, kept=4886, zero_area=2, dropped=2))
        4,888 objects, 4,886 kept (2 zero_area, 2 dropped)
    """

    total: int = 0
    kept: int = 0
    zero_area: int = 0
    inverted: int = 0
    outside: int = 0
    swapped: int = 0
    clipped: int = 0
    dropped: int = 0
    difficult: int = 0
    unknown: int = 0
    unboxed: int = 0
    unsized: int = 0
    unchecked: int = 0

    def __str__(self) -> str:
        names = [item.name for item in fields(self)][2:]
        some = [f"{getattr(self, name):,} {name}" for name in names if getattr(self, name)]
        start = f"{self.total:,} objects, {self.kept:,} kept"
        return f"{start} ({', '.join(some)})" if some else start


@dataclass(frozen=True, eq=False)
class JudgedBoxes:
    """Boxes after a policy, and what it did to each.

    Attributes:
        boxes: float64, shape (boxes, 4): as they are now, those left out included; new memory.
        is_kept: bool, shape (boxes,), as are all below.
        zero_area: Begins and ends at one number.
        inverted: Ends before it begins.
        outside: Reaches beyond the image.
        is_fixed: Whether those that are kept were swapped and cut.
    """

    boxes: NDArray[np.float64]
    is_kept: NDArray[np.bool_]
    zero_area: NDArray[np.bool_]
    inverted: NDArray[np.bool_]
    outside: NDArray[np.bool_]
    is_fixed: bool

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        """Which boxes are of one of the three kinds; bool, shape (boxes,)."""
        return self.zero_area | self.inverted | self.outside

    def counts(self) -> dict[str, int]:
        """Return how many boxes are of each kind, as `BoxCounts` has them."""
        counts = {kind: int(getattr(self, kind).sum()) for kind in _KINDS}
        is_changed = self.is_kept & self.is_fixed
        counts["swapped"] = int((self.inverted & is_changed).sum())
        counts["clipped"] = int((self.outside & is_changed).sum())
        return counts

    def check(self, name_of: Callable[[int], str]) -> None:
        """Raise StoreError if a box is bad; `name_of` says which object has the box of a number."""
        bad = np.flatnonzero(self.is_bad).tolist()
        if bad:
            box = ", ".join(f"{side:g}" for side in self.boxes[bad[0]])
            kinds = " and ".join(kind for kind in _KINDS if getattr(self, kind)[bad[0]])
            raise StoreError(
                f"{len(bad):,} bad box(es). The first, ({box}) in 0-based half-open pixels, of "
                f"{name_of(bad[0])}, is {kinds}. {_REMEDY}"
            )


def judged(
    boxes: NDArray[np.float64], sizes_px: NDArray[np.int64], policy: BadBoxes, *, added_px: int = 0
) -> JudgedBoxes:
    """Return what `policy` makes of boxes. Under "raise" bad ones stay; raising is the caller's.

    Args:
        boxes: 0-based, half-open xyxy in pixels; shape (boxes, 4), finite.
        sizes_px: Height and width of the image of each box; shape (boxes, 2). 0: not known.
        policy: "fix", "drop", "keep" or "raise".
        added_px: What a side has here more than in the file's own numbers: 1 for files that include
            both ends.
    """
    checked_choice("bad_boxes", policy, BAD_BOXES)
    # As samples will have them: in float32 two sides may fall together, or leave all bounds.
    boxes = np.clip(boxes, -_FARTHEST_PX, _FARTHEST_PX).astype(np.float32).astype(np.float64)
    sides = boxes[:, 2:] - boxes[:, :2] - added_px
    zero_area: NDArray[np.bool_] = np.any(sides == 0, axis=1)
    inverted: NDArray[np.bool_] = np.any(sides < 0, axis=1)
    # Ends are swapped in the file's own numbers, not in ours.
    low = np.where(sides < 0, boxes[:, 2:] - added_px, boxes[:, :2])
    high = np.where(sides < 0, boxes[:, :2] + added_px, boxes[:, 2:])
    limits = sizes_px[:, ::-1].astype(np.float64)
    limits[limits <= 0] = np.inf
    slack = np.where(np.isinf(limits), 0, limits * _SLACK)
    cut = np.concatenate([np.clip(low, 0, limits), np.clip(high, 0, limits)], axis=1)
    has_area: NDArray[np.bool_] = np.all(cut[:, 2:] > cut[:, :2], axis=1)
    # A box of which nothing lies within is outside, however little it misses the border.
    outside = np.any((low < -slack) | (high > limits + slack), axis=1) | (~zero_area & ~has_area)
    if policy in ("keep", "raise"):
        is_as_said = zero_area | inverted | outside | (policy == "keep")
        cut, is_kept = np.where(is_as_said[:, None], boxes, cut), np.ones(len(boxes), np.bool_)
    else:
        is_kept = ~zero_area & has_area if policy == "fix" else ~(zero_area | inverted | outside)
    return JudgedBoxes(cut, is_kept, zero_area, inverted, outside, policy == "fix")


def settled_images(
    images: Sequence[AnnotatedImage], policy: BadBoxes, added_px: int
) -> tuple[tuple[AnnotatedImage, ...], BoxCounts]:
    """Return images whose bad boxes `policy` has treated; the others keep all digits."""
    boxed = [(i, one) for i in images for one in i.objects if one.box_xyxy_px is not None]
    sizes = {image.path: (image.height_px, image.width_px) for image, _ in boxed}
    for path, size in sizes.items():
        if not all(size):  # as upright as it is read; 0 if it is elsewhere
            sizes[path] = size_of_file(os.fspath(path), "upright") or (0, 0)
    boxes = np.array([one.box_xyxy_px for _, one in boxed], np.float64).reshape(-1, 4)
    sizes_px = np.array([sizes[image.path] for image, _ in boxed], np.int64).reshape(-1, 2)
    found = judged(boxes, sizes_px, policy, added_px=added_px)
    if policy == "raise":
        found.check(
            lambda n: f"{boxed[n][1].class_name!r} in {boxed[n][0].source or boxed[n][0].path}"
        )
    is_changed, numbers = found.is_bad & (policy in ("fix", "drop")), itertools.count()
    settled = []
    for image in images:
        objects = []
        for one in image.objects:
            number = next(numbers) if one.box_xyxy_px is not None else None
            if number is None or not is_changed[number]:
                objects.append(one)
            elif found.is_kept[number]:
                left, top, right, bottom = found.boxes[number].tolist()
                objects.append(replace(one, box_xyxy_px=(left, top, right, bottom)))
        settled.append(replace(image, objects=tuple(objects)))
    total, kept = (sum(len(image.objects) for image in of) for of in (images, settled))
    num_unchecked = int((sizes_px <= 0).any(axis=1).sum())
    return tuple(settled), BoxCounts(
        total, kept, dropped=total - kept, unchecked=num_unchecked, **found.counts()
    )


def settled(table: AnnotationTable, rules: AnnotationRules) -> tuple[AnnotationTable, BoxCounts]:
    """Return the table that a data set has, its boxes float32, and what was done for it."""
    is_known = table.labels >= 0
    if not is_known.all():
        _report_unknown(table, rules)
    is_difficult = np.zeros(table.num_objects, np.bool_)
    for name in ("difficult", "iscrowd") if rules.skip_difficult else ():
        is_difficult = is_difficult | table.columns.get(name, False)
    counts = BoxCounts(
        total=table.num_objects,
        unknown=int((~is_known).sum()),
        difficult=int((is_known & is_difficult).sum()),
    )
    table = table.with_objects(is_known & ~is_difficult)
    table = _with_sizes(table, rules)
    table, counts = _with_good_boxes(table, rules, counts)
    table = replace(table, unknown_classes=(), is_bare=None)
    return table if rules.keep_empty else table.without_empty(), counts


def _with_sizes(table: AnnotationTable, rules: AnnotationRules) -> AnnotationTable:
    """Return the table with the sizes that the rules need: to compare boxes, or to make them."""
    needed = np.diff(table.offsets) > 0
    if rules.bad_boxes == "keep":
        needed[:] = False
        needed[table.images_of_objects[np.isnan(_extents(table)).any(axis=1)]] = True
    # That of an annotation may be of the other frame.
    sizes_px = table.sizes_px.copy() if rules.orientation == "auto" else table.sizes_px * 0
    is_missing = (sizes_px <= 0).any(axis=1)
    sizes_px[is_missing] = 0
    for position in np.flatnonzero(is_missing & needed).tolist():
        sizes_px[position] = size_of_file(table.paths[position], rules.orientation) or 0
    return replace(table, sizes_px=sizes_px)


def _extents(table: AnnotationTable) -> NDArray[np.float64]:
    """Return boxes; those of objects without one around their landmarks, NaN without any."""
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
    policy, sizes_px = rules.bad_boxes, table.sizes_px[table.images_of_objects]
    is_made = np.isnan(table.boxes).any(axis=1)
    boxes = _extents(table)
    is_whole = np.isnan(boxes).any(axis=1)
    boxes[is_whole, :2] = 0
    boxes[is_whole, 2:] = sizes_px[is_whole, ::-1]
    is_bare = table.is_bare
    if is_bare is None or policy == "keep":
        is_bare = np.zeros(len(boxes), np.bool_)
    found = judged(boxes, sizes_px, policy, added_px=rules.added_px)
    if is_made.any():  # of landmarks: cut, and never bad
        made = judged(boxes, sizes_px, "keep" if policy == "keep" else "fix")
        found = replace(
            found,
            boxes=np.where(is_made[:, None], made.boxes, found.boxes),
            is_kept=np.where(is_made, made.is_kept, found.is_kept),
            **{kind: getattr(found, kind) & ~is_made for kind in _KINDS},
        )
    if policy == "raise":
        for number in np.flatnonzero(is_bare).tolist():
            raise StoreError(
                f"{_name_of(table, number)} has neither a box nor landmarks. {_REMEDY}"
            )
        found.check(functools.partial(_name_of, table))
    # Those around the whole image also where its size cannot be read.
    is_kept = (found.is_kept | is_whole) & ~is_bare
    counts = replace(
        counts,
        kept=int(is_kept.sum()),
        dropped=int((~is_kept).sum()),
        unboxed=int(is_made.sum()),
        unchecked=int((sizes_px <= 0).any(axis=1).sum()),
        **found.counts(),
    )
    table = replace(table, boxes=found.boxes.astype(np.float32))
    return table.with_objects(is_kept), counts


def _name_of(table: AnnotationTable, number: int) -> str:
    """Return what errors call an object."""
    image = int(table.images_of_objects[number])
    place, label = number - int(table.offsets[image]), int(table.labels[number])
    name = table.class_names[label] if label >= 0 else table.unknown_classes[-1 - label]
    height, width = table.sizes_px[image].tolist()
    size = f", an image of {height} x {width} px (height x width)" if height else ""
    source = table.sources[image] or table.paths[image]
    return f"object {place} ({name}) of {source}{size}"


def _report_unknown(table: AnnotationTable, rules: AnnotationRules) -> None:
    """Raise or warn of objects whose class is none of the table's."""
    (numbers,) = np.nonzero(table.labels < 0)
    unknown = [table.unknown_classes[-1 - label] for label in table.labels[numbers].tolist()]
    if rules.unknown_classes == "raise":
        raise StoreError(
            f"the class of {_name_of(table, int(numbers[0]))} is none of the "
            f"{len(table.class_names)} given: {table.class_names!r:.200}. Add it to class_names, "
            "or leave such objects out by AnnotationRules(unknown_classes='drop')."
        )
    counts = Counter(sorted(unknown)).most_common()
    parts = [f"{count:,} {name!r:.80}" for name, count in counts]
    warn_user(
        f"{len(unknown):,} of {table.num_objects:,} objects are of none of the classes asked for, "
        f"and are left out: {', '.join(parts):.500}."
    )


def warn_of_absent(class_names: Sequence[str], labels: NDArray[np.int64]) -> None:
    """Warn of classes that were asked for, and that no object is of."""
    counts = np.bincount(labels[labels >= 0], minlength=len(class_names))
    absent = [class_names[number] for number in np.flatnonzero(counts == 0).tolist()]
    if absent:
        warn_user(
            f"no object is of {len(absent)} of the {len(class_names)} classes given: "
            f"{', '.join(map(repr, absent)):.500}. They keep their numbers."
        )


def in_frame(
    data: bytes, orientation: Orientation, annotated_hw_px: tuple[int, int] | None
) -> bytes:
    """Return an image file that decodes to pixels in the annotation's frame."""
    if orientation == "upright" or (orientation == "auto" and annotated_hw_px is None):
        return data
    header = read_header(data)
    upright = header.upright_height_px, header.upright_width_px
    stored = header.height_px, header.width_px
    if orientation == "auto":
        if annotated_hw_px == upright:
            if upright == stored and header.orientation != 1:
                warn_user(_AMBIGUOUS)
            return data
        if annotated_hw_px != stored:
            height, width = annotated_hw_px or (0, 0)
            turned = f", or {upright[0]} x {upright[1]} px when turned as its Exif says"
            raise ValueError(
                f"the annotation is of an image of {height} x {width} px (height x width), and the "
                f"file has {stored[0]} x {stored[1]} px{turned if upright != stored else ''}. It "
                "was replaced or resized since, or the annotation's size is wrong: correct one of "
                "them, or, if the boxes fit all the same, choose "
                "AnnotationRules(orientation='upright') or 'stored'"
            )
    changed = without_orientation(data)
    if read_header(changed).orientation == 1:
        return changed
    pixels = cv2.cvtColor(decode_image(data, orientation="stored"), cv2.COLOR_RGB2BGR)
    is_done, file = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    assert is_done  # of any uint8 image
    return file.tobytes()


def size_of_file(path: str, orientation: Orientation) -> tuple[int, int] | None:
    """Return height and width of an image file's pixels; None if it cannot be read."""
    try:
        header = header_of(path)
    except (OSError, ValueError):
        return None
    if orientation == "stored":
        return header.height_px, header.width_px
    return header.upright_height_px, header.upright_width_px
