# SPDX-License-Identifier: Apache-2.0
"""`AnnotationRules`: what of the annotations in files becomes the annotations of a data set.

    kind        in the file's own numbers           fix                             drop    raise
    zero_area   begins and ends at one number       left out                        out     error
    inverted    ends before it begins               its ends are swapped            out     error
    outside     reaches beyond the image            cut to the image; left out      out     error
                                                    if it lies beyond altogether

An object of VOC's that has neither a box nor landmarks, but a polygon or a turned box, is bad too:
out under "fix" and "drop", an error under "raise". `unboxed` counts it. Under "keep" it is the
whole image.

Under "keep" all of them stay as the file has them; they are counted under every policy. A box may
be of two kinds. What was swapped is looked at again for the image's borders.

A file's own numbers matter where it includes both ends, as VOC's do: there xmin = xmax is a box of
one column if taken at its word, and in practice a click without a drag. Files of numbers cut short
after six digits miss the border by a hair; that much beyond it is no fault, and is cut off
silently.
"""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.vision.datasets.frames import ORIENTATIONS, Orientation, size_of_file
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.vision.datasets.table import AnnotationTable

BadBoxes = Literal["fix", "drop", "keep", "raise"]
BAD_BOXES: Final = ("fix", "drop", "keep", "raise")

# Of the image's side. Numbers of 0 to 1 printed with six digits are wrong by at most 5e-7 each; a
# centre and a half width add up to 7.5e-7. Ten times that: 0.006 of a pixel in 640.
_FARTHEST_PX: Final = 1e9  # no image is that large; float32 still tells pixels below 2^24
_SLACK: Final = 1e-5


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
        difficult: Objects left out as difficult ones.
        unknown: Objects left out because their class is none of those asked for.
        unboxed: Objects that have no box in the file. Those with landmarks were given one around
            them; those without were dropped, or under "keep" given the whole image.
        unsized: Objects left out because the size of their image, which they are shares of, could
            not be read.
        unchecked: Boxes of images whose size is not known: whether they reach beyond the right or
            the lower border nobody can say.

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
        """Return one line that leaves out what there was none of."""
        names = [item.name for item in fields(self)][2:]
        some = [f"{getattr(self, name):,} {name}" for name in names if getattr(self, name)]
        start = f"{self.total:,} objects, {self.kept:,} kept"
        return f"{start} ({', '.join(some)})" if some else start


@dataclass(frozen=True, eq=False)
class JudgedBoxes:
    """Boxes after a policy, and what it did to each.

    Attributes:
        boxes: float64, shape (boxes, 4): as they are now, those left out included; new memory.
        is_kept: bool, shape (boxes,).
        zero_area: bool, shape (boxes,).
        inverted: bool, shape (boxes,).
        outside: bool, shape (boxes,).
        clipped: bool, shape (boxes,): cut, and kept.
        swapped: bool, shape (boxes,): swapped, and kept.
    """

    boxes: NDArray[np.float64]
    is_kept: NDArray[np.bool_]
    zero_area: NDArray[np.bool_]
    inverted: NDArray[np.bool_]
    outside: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    swapped: NDArray[np.bool_]

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        """Which boxes are of one of the three kinds; bool, shape (boxes,)."""
        return self.zero_area | self.inverted | self.outside

    def kinds_of(self, number: int) -> str:
        """Return the kinds of one box, in words."""
        kinds = ("zero_area", "inverted", "outside")
        return " and ".join(kind for kind in kinds if getattr(self, kind)[number])


def judged(
    boxes: NDArray[np.float64],
    sizes_px: NDArray[np.int64],
    policy: BadBoxes,
    *,
    added_px: int = 0,
) -> JudgedBoxes:
    """Return what `policy` makes of boxes. Under "raise" bad ones stay; raising is the caller's.

    Args:
        boxes: 0-based, half-open xyxy in pixels; shape (boxes, 4), finite.
        sizes_px: Height and width of the image of each box; shape (boxes, 2). 0: not known.
        policy: "fix", "drop", "keep" or "raise".
        added_px: What a side has here more than in the file's own numbers: 1 for files that include
            both ends.

    Raises:
        ConfigError: there is no such policy.

    Example:
        >>> boxes = np.array([[-3.0, 2, 5, 9], [7, 7, 7, 8], [9, 1, 4, 5]])
        >>> found = judged(boxes, np.full((3, 2), 20), "fix")
        >>> found.boxes[found.is_kept].tolist()
        [[0.0, 2.0, 5.0, 9.0], [4.0, 1.0, 9.0, 5.0]]
    """
    if policy not in BAD_BOXES:
        raise ConfigError(f"bad_boxes is one of {', '.join(BAD_BOXES)}, not {policy!r}.")
    # As samples will have them: in float32 two sides may fall together, or leave all bounds.
    boxes = np.clip(boxes, -_FARTHEST_PX, _FARTHEST_PX).astype(np.float32).astype(np.float64)
    sides = boxes[:, 2:] - boxes[:, :2] - added_px
    zero_area: NDArray[np.bool_] = np.any(sides == 0, axis=1)
    inverted: NDArray[np.bool_] = np.any(sides < 0, axis=1)
    upright = _swapped(boxes, sides < 0, added_px)
    cut = _cut(upright, sizes_px)
    # A box of which nothing lies within is outside, however little it misses the border.
    is_gone = ~zero_area & np.any(cut[:, 2:] <= cut[:, :2], axis=1)
    outside = _is_outside(upright, sizes_px) | is_gone
    if policy in ("keep", "raise"):
        none, every = np.zeros(len(boxes), np.bool_), np.ones(len(boxes), np.bool_)
        is_as_said = zero_area | inverted | outside | (policy == "keep")
        said = np.where(is_as_said[:, None], boxes, cut)
        return JudgedBoxes(said, every, zero_area, inverted, outside, none, none)
    if policy == "fix":
        is_kept = ~zero_area & (cut[:, 2:] > cut[:, :2]).all(axis=1)
    else:
        is_kept = ~(zero_area | inverted | outside)
    return JudgedBoxes(
        cut, is_kept, zero_area, inverted, outside, outside & is_kept, inverted & is_kept
    )


def _swapped(
    boxes: NDArray[np.float64], is_inverted: NDArray[np.bool_], added_px: int
) -> NDArray[np.float64]:
    """Return boxes whose ends are in order; swapped in the file's own numbers, not in ours."""
    low = np.where(is_inverted, boxes[:, 2:] - added_px, boxes[:, :2])
    high = np.where(is_inverted, boxes[:, :2] + added_px, boxes[:, 2:])
    return np.concatenate([low, high], axis=1)


def _limits(sizes_px: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return width, height of each box's image; infinite where it is not known."""
    limits = sizes_px[:, ::-1].astype(np.float64)
    limits[limits <= 0] = np.inf
    return limits


def _is_outside(boxes: NDArray[np.float64], sizes_px: NDArray[np.int64]) -> NDArray[np.bool_]:
    limits = _limits(sizes_px)
    slack = np.where(np.isinf(limits), 0, limits * _SLACK)
    return np.asarray(((boxes[:, :2] < -slack) | (boxes[:, 2:] > limits + slack)).any(axis=1))


def _cut(boxes: NDArray[np.float64], sizes_px: NDArray[np.int64]) -> NDArray[np.float64]:
    limits = _limits(sizes_px)
    return np.concatenate(
        [np.clip(boxes[:, :2], 0, limits), np.clip(boxes[:, 2:], 0, limits)], axis=1
    )


_CLASSES_SHOWN: Final = 10  # classes, in a warning
_MAX_COMPARED: Final = 2_000  # names; to compare two takes some microseconds


def near_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that may have been meant; None if none is near.

    Example:
        >>> near_name("Platelets", ["RBC", "Platelet"]), near_name("dog", ["DOG"])
        ('Platelet', 'DOG')
    """
    by_form = {known.strip().casefold(): known for known in list(names)[:_MAX_COMPARED]}
    found = difflib.get_close_matches(name.strip().casefold(), by_form, 1, 0.7)
    return by_form[found[0]] if found else None


def refuse_unknown(table: AnnotationTable, source_of: Callable[[int], str]) -> None:
    """Raise if an object's class is none of the table's.

    Args:
        table: As it was built.
        source_of: What errors call an image.

    Raises:
        StoreError: one is; the message names it, its object, and a class that is called almost so.
    """
    (unknown,) = np.nonzero(table.labels < 0)
    if not len(unknown):
        return
    number = int(unknown[0])
    image = int(table.images_of_objects[number])
    name = table.unknown_classes[-1 - int(table.labels[number])]
    near = near_name(name, table.class_names)
    hint = "" if near is None else f" Is {near!r} meant?"
    raise StoreError(
        f"{source_of(image)}: the class of its object {number - table.offsets[image]}, "
        f"{name!r:.80}, is none of the {len(table.class_names)} given: "
        f"{table.class_names!r:.200}.{hint} Add it to class_names, or leave such objects out by "
        "unknown_classes='drop'."
    )


def warn_of_dropped(table: AnnotationTable) -> None:
    """Warn of objects that are left out as none of the classes asked for."""
    unknown = -1 - table.labels[table.labels < 0]
    if not len(unknown):
        return
    counts = np.bincount(unknown, minlength=len(table.unknown_classes)).tolist()
    pairs = sorted(zip(counts, table.unknown_classes, strict=True), key=lambda p: (-p[0], p[1]))
    parts = [_dropped(name, count, table.class_names) for count, name in pairs[:_CLASSES_SHOWN]]
    more = (
        f", and of {len(pairs) - _CLASSES_SHOWN} more classes"
        if len(pairs) > _CLASSES_SHOWN
        else ""
    )
    warnings.warn(
        f"{len(unknown):,} of {table.num_objects:,} objects are of none of the classes asked for, "
        f"and are left out: {', '.join(parts)}{more}.",
        UserWarning,
        stacklevel=users_level(),
    )


def _dropped(name: str, count: int, class_names: Sequence[str]) -> str:
    near = near_name(name, class_names)
    return f"{count:,} {name!r:.80}" + ("" if near is None else f" (is {near!r} meant?)")


def warn_of_absent(class_names: Sequence[str], labels: NDArray[np.int64]) -> None:
    """Warn of classes that were asked for, and that no object is of."""
    counts = np.bincount(labels[labels >= 0], minlength=len(class_names))
    absent = [class_names[number] for number in np.flatnonzero(counts == 0).tolist()]
    if not absent:
        return
    shown = ", ".join(map(repr, absent[:_CLASSES_SHOWN]))
    more = f", and {len(absent) - _CLASSES_SHOWN} more" if len(absent) > _CLASSES_SHOWN else ""
    warnings.warn(
        f"no object is of {len(absent)} of the {len(class_names)} classes given: {shown}{more}. "
        "They keep their numbers.",
        UserWarning,
        stacklevel=users_level(),
    )


def warn_of_absent_attribute(name: str, there: Sequence[str]) -> None:
    """Warn of an attribute that was asked for, and that no object has."""
    near = near_name(name, there)
    hint = "" if near is None else f" (is {near!r} meant?)"
    shown = ", ".join(map(repr, there[:_CLASSES_SHOWN])) or "none"
    more = f", and {len(there) - _CLASSES_SHOWN} more" if len(there) > _CLASSES_SHOWN else ""
    warnings.warn(
        f"no object has the attribute {name!r:.80}{hint}; there are: {shown}{more}.",
        UserWarning,
        stacklevel=users_level(),
    )


UnknownClasses = Literal["raise", "drop"]
_UNKNOWN_CLASSES: Final = ("raise", "drop")
_NUM_SHOWN: Final = 3  # of many bad boxes, in an error


@dataclass(frozen=True, slots=True)
class AnnotationRules:
    """How the annotations of a data set are treated.

    Attributes:
        orientation: Whether pixels are turned as Exif says: see `penstock.vision.datasets.frames`.
        bad_boxes: What becomes of boxes that cannot be right: see
            `penstock.vision.datasets.rules`.
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
