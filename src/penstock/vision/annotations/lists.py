# SPDX-License-Identifier: Apache-2.0
r"""Text files with a line for each image and its class, or for each object and its landmarks.

    photos/cat 1.jpg cat                                               an image and its class
    lfw\1.jpg  102.5 150 126 105.5 148  120 121 143 160 161  1 2       5 points, "xxyy", 2 classes
    1.jpg,12,30,40,31,5,5,50,60                                        2 points, "xyxy", a box

Lines end as they do on any system, blanks or tabs separate columns (or what `separator` says), and
lines that are empty or begin with "#" say nothing. The path may have blanks in it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from penstock.errors import ConfigError, StoreError
from penstock.stores.folder.annotated_folder import is_number
from penstock.stores.folder.listing import IMAGE_SUFFIXES
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    coordinate,
    coordinate_text,
    key_of,
    listed_path,
    numbered_lines,
    reading,
    whole_value,
)
from penstock.vision.arguments import checked_choice, checked_optional

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CLASS_COLUMN: Final = "class"  # the column of this name is the object's class; others are `extra`
_NAN: Final = (math.nan, math.nan)
IMAGE_LIST_COLUMNS: Final[dict[str, Any]] = {"num_landmarks": 0, "classes": (CLASS_COLUMN,)}
"""What a list of images with a class is as a landmark list."""


def read_image_list(
    path: str | Path, root: str | Path | None = None, *, separator: str | None = None
) -> list[tuple[Path, int | str]]:
    """Return path and label of each image of a list, in its order."""
    lines = landmark_lines(path, root=root, separator=separator, **IMAGE_LIST_COLUMNS)
    pairs = [(line.path, line.objects[0].class_name) for line in lines]
    numbers = [whole_value(label) for _, label in pairs]
    if None in numbers:
        return list(pairs)
    found = zip(pairs, numbers, strict=True)
    return [(place, number) for (place, _), number in found if number is not None]


@dataclass(frozen=True, slots=True)
class LandmarkColumns:
    """What the columns of a landmark list are, after the path.

    Attributes:
        num_landmarks: Points in a line; None takes as many as the first line has numbers for.
            Better say it, as a box or a column that was forgotten counts as landmarks then.
        layout: "xxyy" is x1 .. xn y1 .. yn, "xyxy" is x1 y1 x2 y2 ..
        has_box: Whether four columns are a box.
        box_format: "xyxy" is left, top, right, bottom; "xywh" left, top, width, height.
        box_at: Whether the box comes "before" or "after" the points.
        classes: What the columns at the end are called. "class" is the object's class, or else the
            first of them.
        missing: A point with this for x and y is not marked, as is one with "nan"; often -1.
        origin: Number of the first pixel. 1 is taken from points, and from left and top of boxes,
            which include both ends then.
        separator: What separates columns; None is blanks and tabs, any number of them.

    Raises:
        ConfigError: there is no such choice.

    Example:
        >>> LandmarkColumns(num_landmarks=5, has_box=True, classes=["gender"]).num_columns
        15
    """

    num_landmarks: int | None = None
    layout: Literal["xxyy", "xyxy"] = "xxyy"
    has_box: bool = False
    box_format: Literal["xyxy", "xywh"] = "xyxy"
    box_at: Literal["before", "after"] = "after"
    classes: Sequence[str] = ()
    missing: float | None = None
    origin: int = 0
    separator: str | None = None

    def __post_init__(self) -> None:
        classes = (self.classes,) if isinstance(self.classes, str) else tuple(self.classes)
        object.__setattr__(self, "classes", classes)
        checked_choice("layout", self.layout, ("xxyy", "xyxy"))
        checked_choice("box_format", self.box_format, ("xyxy", "xywh"))
        checked_choice("box_at", self.box_at, ("before", "after"))
        checked_choice("origin", self.origin, (0, 1))
        checked_optional("num_landmarks", self.num_landmarks, 0)
        if len(set(classes)) < len(classes):
            raise ConfigError(f"classes are names of columns, each another: {classes}.")

    @property
    def num_columns(self) -> int:
        """Columns after the path."""
        return 2 * (self.num_landmarks or 0) + 4 * self.has_box + len(self.classes)


def landmark_lines(
    path: str | Path,
    *,
    root: str | Path | None = None,
    **columns: Any,  # noqa: ANN401 - of LandmarkColumns
) -> Iterator[AnnotatedImage]:
    """Yield an image for each line: one that has several lines comes several times."""
    form = LandmarkColumns(**columns)
    path = Path(path)
    folder = path.parent if root is None else Path(root)
    number = 0
    for number, line in numbered_lines(path):
        source = f"{path}, line {number}"
        with reading(source):
            if form.num_landmarks is None:
                form = _with_number(form, line)
            found = _image(line, form, folder, source)
        yield found
    if not number:
        raise StoreError(f"{path} has no lines: it is no list of images.")


def samples_of_lines(lines: Iterable[AnnotatedImage]) -> list[AnnotatedImage]:
    """Return an image for each sample of a list that has a line for each object."""
    counts: Counter[object] = Counter()
    samples: Counter[str] = Counter()
    objects: dict[str, list[AnnotatedObject]] = {}
    first_lines = []
    for line in lines:
        (found,) = line.objects
        marks = found.class_name, found.box_xyxy_px, found.landmarks_xy_px, *found.extra.items()
        counts[line.key, marks] += 1
        if counts[line.key, marks] == 1:
            objects.setdefault(line.key, []).append(found)
        if counts[line.key, marks] > samples[line.key]:
            samples[line.key] += 1
            first_lines.append(line)
    return [replace(line, objects=tuple(objects[line.key])) for line in first_lines]


def _with_number(columns: LandmarkColumns, line: str) -> LandmarkColumns:
    """Return the columns with as many landmarks as a line has."""
    words = [word.strip() for word in line.split(columns.separator)]
    numbers = words[1 : len(words) - len(columns.classes)]
    # The path may have blanks: numbers are counted from the end.
    texts = [position for position, word in enumerate(numbers) if not is_number(word)]
    count = len(numbers) - (texts[-1] + 1 if texts else 0) - 4 * columns.has_box
    if count < 0 or count % 2 or (count == 0 and not columns.num_columns):
        raise ValueError(
            f"it has {max(0, count)} numbers at its end, {words[-1]!r:.80}, for landmarks, and x "
            "and y of each make an even number. Say which columns there are: has_box, classes, "
            "num_landmarks, separator"
        )
    return replace(columns, num_landmarks=count // 2)


def _image(line: str, columns: LandmarkColumns, folder: Path, source: str) -> AnnotatedImage:
    words = [word.strip() for word in line.rsplit(columns.separator, columns.num_columns)]
    is_long = _has_columns(words[0], columns.separator)
    if len(words) != 1 + columns.num_columns or (
        is_long and not os.path.exists(listed_path(words[0], folder))
    ):
        raise ValueError(
            f"it has {len(line.split(columns.separator))} columns, not {1 + columns.num_columns}: "
            f"a path, 2 x {columns.num_landmarks} for landmarks, {4 * columns.has_box} for a box, "
            f"{len(columns.classes)} for {', '.join(columns.classes) or 'classes'}"
        )
    if not words[0]:
        raise ValueError("it has no path")
    num_points, num_box = 2 * (columns.num_landmarks or 0), 4 * columns.has_box
    is_before = columns.box_at == "before"
    extra = dict(zip(columns.classes, words[1 + num_points + num_box :], strict=True))
    found = AnnotatedObject(
        class_name=extra.pop(CLASS_COLUMN, ""),
        box_xyxy_px=_box(words, 1 if is_before else 1 + num_points, columns) if num_box else None,
        landmarks_xy_px=_points(words, 1 + (num_box if is_before else 0), columns),
        extra=extra,
    )
    path = listed_path(words[0], folder)
    return AnnotatedImage(path, key_of(words[0]), None, None, (found,), source)


def _has_columns(path: str, separator: str | None) -> bool:
    """Return whether a path ends with columns too many: a number, or words behind its suffix."""
    words = path.lower().split(separator)
    is_ended = any(word.endswith(IMAGE_SUFFIXES) for word in words[:-1])
    return (len(words) > 1 and is_number(words[-1])) or (
        is_ended and not words[-1].endswith(IMAGE_SUFFIXES)
    )


def _points(
    words: list[str], first: int, columns: LandmarkColumns
) -> tuple[tuple[float, float], ...]:
    count, origin, missing = columns.num_landmarks or 0, columns.origin, columns.missing
    step, beside = (1, count) if columns.layout == "xxyy" else (2, 1)
    points = []
    for at in range(first, first + step * count, step):
        x, y = _number(words, at, origin), _number(words, at + beside, origin)
        is_missing = missing is not None and x + origin == missing == y + origin
        points.append(_NAN if is_missing or math.isnan(x + y) else (x, y))
    return tuple(points)


def _number(words: list[str], place: int, minus: int) -> float:
    if words[place].lower() == "nan":
        return math.nan
    return coordinate(words[place], f"column {place + 1}", minus)


def _box(
    words: list[str], first: int, columns: LandmarkColumns
) -> tuple[float, float, float, float] | None:
    left, top = (_number(words, first + place, columns.origin) for place in (0, 1))
    third, fourth = (_number(words, first + place, 0) for place in (2, 3))
    if math.isnan(left + top + third + fourth):
        return None
    if columns.box_format == "xywh":
        return left, top, left + third, top + fourth
    return left, top, third, fourth


def columns_of(objects: Sequence[AnnotatedObject]) -> LandmarkColumns:
    """Return columns that hold what all of some objects have."""
    first = objects[0].extra if objects else {}
    named = [name for name in first if all(name in found.extra for found in objects)]
    is_classed = bool(objects) and all(found.class_name for found in objects)
    return LandmarkColumns(
        num_landmarks=num_landmarks_of(objects),
        has_box=any(found.box_xyxy_px is not None for found in objects),
        classes=(*((CLASS_COLUMN,) * is_classed), *(n for n in named if n != CLASS_COLUMN)),
    )


def num_landmarks_of(objects: Iterable[AnnotatedObject]) -> int:
    """Return how many landmarks each object has that has some."""
    counts = sorted({len(found.landmarks_xy_px) for found in objects} - {0})
    if len(counts) > 1:
        raise StoreError(
            f"some objects have {counts[0]} landmarks and some {counts[-1]}: this form has one "
            "number for all."
        )
    return counts[0] if counts else 0


def write_landmark_list(images: Iterable[AnnotatedImage], columns: LandmarkColumns) -> bytes:
    """Return a landmark list, in UTF-8: a line for each object, in their order."""
    lines = []
    for image in images:
        for number, found in enumerate(image.objects):
            try:
                lines.append(_line(os.fspath(image.path), found, columns))
            except ValueError as error:
                raise ValueError(f"{image.key}, object {number}: {error}") from None
    return "".join(f"{line}\n" for line in lines).encode()


def _line(name: str, found: AnnotatedObject, columns: LandmarkColumns) -> str:
    is_plain = name.isprintable() and name == name.strip() and "\\" not in name
    if not is_plain or not name or name[0] in "#\ufeff" or _has_columns(name, columns.separator):
        raise ValueError(f"a list cannot have the path {name!r}")
    count, origin = columns.num_landmarks or 0, columns.origin
    points = found.landmarks_xy_px or (_NAN,) * count
    if len(points) != count:
        raise ValueError(f"it has {len(points)} landmarks, and others {count}")
    missing = coordinate_text(math.nan if columns.missing is None else columns.missing)
    pairs = [
        (missing, missing)
        if math.isnan(x + y)
        else (coordinate_text(x, origin), coordinate_text(y, origin))
        for x, y in points
    ]
    if columns.layout == "xxyy":
        numbers = [pair[side] for side in (0, 1) for pair in pairs]
    else:
        numbers = [word for pair in pairs for word in pair]
    if columns.has_box:
        left, top, right, bottom = found.box_xyxy_px or (math.nan,) * 4
        if columns.box_format == "xywh":
            right, bottom = right - left, bottom - top
        corner = [coordinate_text(value, origin) for value in (left, top)]
        box = [*corner, coordinate_text(right), coordinate_text(bottom)]
        numbers = [*box, *numbers] if columns.box_at == "before" else [*numbers, *box]
    words = [name, *numbers]
    values = {**found.extra, CLASS_COLUMN: found.class_name}
    for column in columns.classes:
        value = values.get(column)
        if value is None:
            raise ValueError(f"it has no {column!r}")
        if not value.isprintable() or value.split(columns.separator) != [value.strip()]:
            raise ValueError(f"{column} {value!r} does not stay in a column")
        words.append(value)
    return (columns.separator or " ").join(words)
