# SPDX-License-Identifier: Apache-2.0
r"""Text files with a line for each image and its class, or for each object and its landmarks.

    photos/cat 1.jpg cat                                               an image and its class
    lfw\1.jpg  102.5 150 126 105.5 148  120 121 143 160 161  1 2       5 points, "xxyy", 2 classes
    1.jpg,12,30,40,31,5,5,50,60                                        2 points, "xyxy", a box

Lines end as they do on any system, blanks or tabs separate columns (or what `separator` says), and
lines that are empty or begin with "#" say nothing. The path may have blanks in it.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from penstock.errors import ConfigError, StoreError
from penstock.plural import counted
from penstock.stores.folder.annotated_folder import is_number
from penstock.stores.folder.listing import IMAGE_SUFFIXES
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    coordinate,
    coordinate_text,
    key_of,
    listed_path,
    numbered_lines,
    whole_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def read_image_list(
    path: str | Path, root: str | Path | None = None, *, separator: str | None = None
) -> list[tuple[Path, int | str]]:
    """Return the images of a list and their labels, in its order.

    The label is what comes after the last blank, so that a path may have blanks in it. Lines end as
    they do on any system; those that are empty or begin with "#" say nothing.

    Args:
        path: The list, in UTF-8.
        root: The folder that relative paths start from; None is that of the list.
        separator: What separates path and label; None is blanks and tabs.

    Returns:
        Pairs of path and label. Labels are ints if all of them are whole numbers, written as 1 or
        as 1.0; else texts.

    Raises:
        StoreError: the list cannot be read, has no lines, or one without a label or with several.
            The message names the line.
    """
    path = Path(path)
    folder = path.parent if root is None else Path(root)
    pairs = []
    for number, text, label in read_labelled_paths(path, separator, folder):
        try:
            pairs.append((listed_path(text, folder), label))
        except ValueError as error:
            raise StoreError(f"cannot read {path}, line {number}: {error}.") from error
    numbers = [whole_value(label) for _, label in pairs]
    if any(number is None for number in numbers):
        return list(pairs)
    return [
        (p, number) for (p, _), number in zip(pairs, numbers, strict=True) if number is not None
    ]


def read_labelled_paths(
    path: Path, separator: str | None = None, root: Path | None = None
) -> list[tuple[int, str, str]]:
    """Return number, path and label of each line, as they stand there.

    Args:
        path: The list.
        separator: What separates path and label.
        root: As in `read_image_list`.

    Raises:
        StoreError: see `read_image_list`.
    """
    found = []
    for number, line in numbered_lines(path):
        words = [word.strip() for word in line.rsplit(separator, 1)]
        if len(words) != 2 or not all(words):
            raise StoreError(f"cannot read {path}, line {number}: {line[:80]!r} has no label.")
        several = _columns_of_labels(words[0], separator, path.parent if root is None else root)
        if several:
            raise StoreError(
                f"cannot read {path}, line {number}: {words[0]!r:.80} is no image and is not "
                f"there; {several[0]!r:.80} would be one. Are {[*several[1:], words[1]]!r:.80} "
                "labels? A line has one. Leave one column, or read images of several labels with "
                "a dataset of your own."
            )
        found.append((number, words[0], words[1]))
    if not found:
        raise StoreError(f"{path} has no lines: it is no list of images.")
    return found


def _columns_of_labels(text: str, separator: str | None, root: Path) -> list[str]:
    """Return a path's columns, if it seems to end before the last of them; else nothing."""
    if text.lower().endswith(IMAGE_SUFFIXES):
        return []
    columns = [word.strip() for word in text.split(separator)]
    ends = [n for n, word in enumerate(columns) if word.lower().endswith(IMAGE_SUFFIXES)]
    if not ends or os.path.exists(root / text.replace("\\", "/").replace("\0", "")):
        return []
    first = (separator or " ").join(columns[: ends[0] + 1])
    return [first, *columns[ends[0] + 1 :]]


def write_image_list(pairs: Iterable[tuple[str | Path, int | str]]) -> bytes:
    r"""Return a list, in UTF-8, of paths and labels.

    Raises:
        ValueError: a path or a label would not stay in its place.

    Example:
        >>> write_image_list([("cat 1.jpg", "cat"), ("2.jpg", "dog")])
        b'cat 1.jpg cat\n2.jpg dog\n'
    """
    return "".join(
        f"{_image_line(os.fspath(path), str(label))}\n" for path, label in pairs
    ).encode()


def _image_line(path: str, label: str) -> str:
    is_plain = path.isprintable() and path == path.strip() and path and path[0] not in "#\ufeff"
    if not is_plain or "\\" in path:
        raise ValueError(f"a list cannot have the path {path!r}")
    if label.split() != [label]:
        raise ValueError(f"{path}: the label {label!r} does not stay in a column")
    return f"{path} {label}"


CLASS_COLUMN: Final = "class"  # the column of this name is the object's class; others are `extra`
_NAN: Final = (math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class LandmarkColumns:
    """What the columns of a landmark list are, after the path.

    Attributes:
        num_landmarks: Points in a line; None takes what the first line has.
        layout: "xxyy" is x1 .. xn y1 .. yn, "xyxy" is x1 y1 x2 y2 ..
        has_box: Whether four columns are a box.
        box_format: "xyxy" is left, top, right, bottom; "xywh" left, top, width, height.
        box_at: Whether the box comes "before" or "after" the points.
        classes: What the columns at the end are called. "class" is the object's class.
        missing: A point with this for x and y is not marked, as is one with "nan"; often -1.
        origin: Number of the first pixel. 1 is taken from points, and from left and top of boxes:
            see `voc_elements`.
        separator: What separates columns; None is blanks and tabs, any number of them.
    """

    num_landmarks: int | None = None
    layout: Literal["xxyy", "xyxy"] = "xxyy"
    has_box: bool = False
    box_format: Literal["xyxy", "xywh"] = "xyxy"
    box_at: Literal["before", "after"] = "after"
    classes: tuple[str, ...] = ()
    missing: float | None = None
    origin: int = 0
    separator: str | None = None

    def __post_init__(self) -> None:
        """Check that each is what it may be."""
        choices = {
            "layout": ("xxyy", "xyxy"),
            "box_format": ("xyxy", "xywh"),
            "box_at": ("before", "after"),
            "origin": (0, 1),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                either = " or ".join(map(repr, allowed))
                raise ConfigError(f"{name} is {either}, not {getattr(self, name)!r}.")
        if self.num_landmarks is not None and self.num_landmarks < 0:
            raise ConfigError(f"num_landmarks is at least 0, not {self.num_landmarks}.")
        if len(self.classes) == 1 and "," in self.classes[0]:
            names = self.classes[0].split(",")
            raise ConfigError(f"classes is a list of names: classes={names!r}.")
        if len(set(self.classes)) < len(self.classes):
            raise ConfigError(f"classes are names of columns, each another: {self.classes}.")
        if self.separator == "":
            raise ConfigError("separator is a text such as ',', or None for blanks; not ''.")

    @property
    def num_columns(self) -> int:
        """Columns after the path."""
        return 2 * (self.num_landmarks or 0) + 4 * self.has_box + len(self.classes)


def read_landmark_list(
    path: str | Path,
    *,
    num_landmarks: int | None = None,
    layout: Literal["xxyy", "xyxy"] = "xxyy",
    has_box: bool = False,
    box_format: Literal["xyxy", "xywh"] = "xyxy",
    box_at: Literal["before", "after"] = "after",
    classes: Sequence[str] = (),
    missing: float | None = None,
    origin: int = 0,
    root: str | Path | None = None,
    separator: str | None = None,
) -> list[AnnotatedImage]:
    """Return an image for each line: one that has several lines comes several times.

    Each has one object. Numbers are returned as the file has them, also those outside of the image.

    Args:
        path: The list, in UTF-8.
        num_landmarks: See `LandmarkColumns`, as for all that is not told here.
        layout: Likewise.
        has_box: Likewise.
        box_format: Likewise.
        box_at: Likewise.
        classes: Likewise.
        missing: Likewise.
        origin: Likewise.
        root: The folder that relative paths start from; None is that of the list.
        separator: Likewise.

    Returns:
        The images; `key` is the path in the list, with "/".

    Raises:
        ConfigError: an argument is none of those allowed.
        StoreError: the list cannot be read, has no lines, or one with too many or too few columns,
            or a text where a number has to be. The message names the line.
    """
    columns = LandmarkColumns(
        num_landmarks=num_landmarks,
        layout=layout,
        has_box=has_box,
        box_format=box_format,
        box_at=box_at,
        classes=(classes,) if isinstance(classes, str) else tuple(classes),
        missing=missing,
        origin=origin,
        separator=separator,
    )
    path = Path(path)
    folder = path.parent if root is None else Path(root)
    found: list[AnnotatedImage] = []
    for number, line in numbered_lines(path):
        try:
            if columns.num_landmarks is None:
                columns = _with_number(columns, line)
            found.append(_image(line, columns, folder, f"{path}, line {number}"))
        except ValueError as error:
            raise StoreError(f"cannot read {path}, line {number}: {error}.") from error
    if not found:
        raise StoreError(f"{path} has no lines: it is no list of landmarks.")
    return found


def samples_of_lines(lines: Iterable[AnnotatedImage]) -> list[AnnotatedImage]:
    """Return an image for each sample of a list that has a line for each object.

    Lines of one image are its objects; a repeated line repeats the sample. An image is as many
    samples as its most frequent line has copies, each with all objects, in the order of their first
    lines. A sample has the place of its first line.

    Args:
        lines: What `read_landmark_list` returns.

    Example:
        >>> cat, dog = (AnnotatedObject(name) for name in ("cat", "dog"))
        >>> lines = [AnnotatedImage(Path("1.jpg"), "1.jpg", None, None, (o,)) for o in (cat, dog)]
        >>> [len(image.objects) for image in samples_of_lines([*lines, *lines])]
        [2, 2]
    """
    counts: dict[str, dict[object, int]] = {}
    objects: dict[str, list[AnnotatedObject]] = {}
    samples: dict[str, int] = {}
    first_lines = []
    for line in lines:
        (found,) = line.objects
        times = counts.setdefault(line.key, {})
        said = (*_said(found), *found.extra.items())
        times[said] = times.get(said, 0) + 1
        if times[said] == 1:
            objects.setdefault(line.key, []).append(found)
        if times[said] > samples.get(line.key, 0):
            samples[line.key] = times[said]
            first_lines.append(line)
    return [replace(line, objects=tuple(objects[line.key])) for line in first_lines]


def _said(found: AnnotatedObject) -> tuple[object, ...]:
    return found.class_name, found.box_xyxy_px, found.landmarks_xy_px


def _with_number(columns: LandmarkColumns, line: str) -> LandmarkColumns:
    """Return the columns with as many landmarks as a line has."""
    words = [word.strip() for word in line.split(columns.separator)]
    numbers = words[1 : len(words) - len(columns.classes)]
    # The path may have blanks: numbers are counted from the end.
    texts = [position for position, word in enumerate(numbers) if not is_number(word)]
    count = len(numbers) - (texts[-1] + 1 if texts else 0) - 4 * columns.has_box
    if count < 0 or count % 2 or (count == 0 and not columns.num_columns):
        what = f"{max(0, count)} numbers for landmarks"
        said = f"it has {what}, and x and y of each make an even number"
        count, others = _numbers_and_others(words)
        if count and others:
            said = (
                f"behind {counted(count, 'number')} it has {counted(len(others), 'column')} "
                f"({', '.join(map(repr, others)):.80}): each needs a name"
            )
        raise ValueError(
            f"{said}. Say which columns there are: has_box, classes, num_landmarks, separator"
        )
    return replace(columns, num_landmarks=count // 2)


def _numbers_and_others(words: list[str]) -> tuple[int, list[str]]:
    """Return how many numbers come after the path, and the columns after these."""
    ends = (place for place, word in enumerate(words) if word.lower().endswith(IMAGE_SUFFIXES))
    after = words[max(ends, default=0) + 1 :]
    count = sum(1 for _ in itertools.takewhile(is_number, after))
    return count, after[count:]


def _image(line: str, columns: LandmarkColumns, folder: Path, source: str) -> AnnotatedImage:
    words = [word.strip() for word in line.rsplit(columns.separator, columns.num_columns)]
    # What is left of the path when it has numbers at its end are columns too many.
    ends = words[0].split(columns.separator)[1:]
    if len(words) != 1 + columns.num_columns or (ends and is_number(ends[-1])):
        raise ValueError(
            f"it has {len(line.split(columns.separator))} columns, not {1 + columns.num_columns}: "
            f"{_described(columns)}"
        )
    if not words[0]:
        raise ValueError("it has no path")
    path, key = listed_path(words[0], folder), key_of(words[0])
    return AnnotatedImage(path, key, None, None, (_object(words, columns),), source)


def _described(columns: LandmarkColumns) -> str:
    parts = ["a path", f"2 x {columns.num_landmarks} for landmarks"]
    if columns.has_box:
        parts.append("4 for the box")
    if columns.classes:
        parts.append(f"{len(columns.classes)} for {', '.join(columns.classes)}")
    return ", ".join(parts)


def _object(words: list[str], columns: LandmarkColumns) -> AnnotatedObject:
    num_points, num_box = 2 * (columns.num_landmarks or 0), 4 * columns.has_box
    first = 1 + (num_box if columns.box_at == "before" else 0)
    box = 1 if columns.box_at == "before" else 1 + num_points
    extra = dict(zip(columns.classes, words[1 + num_points + num_box :], strict=True))
    return AnnotatedObject(
        class_name=extra.pop(CLASS_COLUMN, ""),
        box_xyxy_px=_box(words, box, columns) if num_box else None,
        landmarks_xy_px=_points(words, first, columns),
        extra=extra,
    )


def _points(
    words: list[str], first: int, columns: LandmarkColumns
) -> tuple[tuple[float, float], ...]:
    count, origin = columns.num_landmarks or 0, columns.origin
    values = [_number(words, place, 0) for place in range(first, first + 2 * count)]
    if columns.layout == "xxyy":
        pairs = zip(range(count), range(count, 2 * count), strict=True)
    else:
        pairs = zip(range(0, 2 * count, 2), range(1, 2 * count, 2), strict=True)
    points = []
    for at_x, at_y in pairs:
        x, y = values[at_x], values[at_y]
        is_missing = math.isnan(x) or math.isnan(y) or (x == columns.missing == y)
        shifted = (_number(words, first + at_x, origin), _number(words, first + at_y, origin))
        points.append(_NAN if is_missing else shifted)
    return tuple(points)


def _number(words: list[str], place: int, minus: int) -> float:
    if words[place].lower() == "nan":
        return math.nan
    try:
        return coordinate(words[place], minus)
    except ValueError as error:
        raise ValueError(f"column {place + 1} {error}") from None


def _box(
    words: list[str], first: int, columns: LandmarkColumns
) -> tuple[float, float, float, float] | None:
    minus = (columns.origin, columns.origin, 0, 0)
    left, top, third, fourth = (
        _number(words, first + place, less) for place, less in enumerate(minus)
    )
    if any(map(math.isnan, (left, top, third, fourth))):
        return None
    if columns.box_format == "xywh":
        return left, top, left + third, top + fourth
    return left, top, third, fourth


def write_landmark_list(
    images: Iterable[AnnotatedImage],
    columns: LandmarkColumns,
    *,
    name_of: Callable[[AnnotatedImage], str] | None = None,
) -> bytes:
    """Return a landmark list, in UTF-8: a line for each object, in their order.

    Points that are not marked are "nan", or `columns.missing`; a box that is missing is four times
    "nan". What else an object has and a list has no column for is left out:
    `penstock.vision.convert` says what.

    Args:
        images: What is written; those without objects have no line.
        columns: What the columns are. `num_landmarks` has to be given.
        name_of: The path of an image as the list is to give it; None gives `image.path`.

    Raises:
        ConfigError: `columns.num_landmarks` is None.
        ValueError: an object has another number of landmarks (none at all is allowed, and all are
            then not marked), lacks a class column, or a text does not stay in its column.
    """
    if columns.num_landmarks is None:
        raise ConfigError("num_landmarks has to be given for a list that is written.")
    lines = []
    for image in images:
        name = os.fspath(image.path) if name_of is None else name_of(image)
        for number, found in enumerate(image.objects):
            try:
                lines.append(_line(name, found, columns))
            except ValueError as error:
                raise ValueError(f"{image.key}, object {number}: {error}") from None
    return "".join(f"{line}\n" for line in lines).encode()


def _line(name: str, found: AnnotatedObject, columns: LandmarkColumns) -> str:
    words = [_checked_path(name, columns)]
    box = _box_words(found, columns) if columns.has_box else []
    points = _point_words(found, columns)
    words += box + points if columns.box_at == "before" else points + box
    values = {**found.extra, CLASS_COLUMN: found.class_name}
    words += [_checked_value(values.get(column), column, columns) for column in columns.classes]
    return (columns.separator or " ").join(words)


def _checked_path(name: str, columns: LandmarkColumns) -> str:
    ends = name.split(columns.separator)[1:]
    is_plain = name.isprintable() and name == name.strip() and name and not name.startswith("#")
    if not is_plain or "\\" in name or name.startswith("\ufeff") or (ends and is_number(ends[-1])):
        raise ValueError(f"a list cannot have the path {name!r}")
    return name


def _checked_value(value: str | None, column: str, columns: LandmarkColumns) -> str:
    if value is None:
        raise ValueError(f"it has no {column!r}")
    if not value.isprintable() or value.split(columns.separator) != [value.strip()]:
        raise ValueError(f"{column} {value!r} does not stay in a column")
    return value


def _point_words(found: AnnotatedObject, columns: LandmarkColumns) -> list[str]:
    count = columns.num_landmarks or 0
    points = found.landmarks_xy_px or (_NAN,) * count
    if len(points) != count:
        raise ValueError(f"it has {len(points)} landmarks, and others {count}")
    xs, ys = ([_word(point, side, columns) for point in points] for side in (0, 1))
    if columns.layout == "xxyy":
        return [*xs, *ys]
    return [word for pair in zip(xs, ys, strict=True) for word in pair]


def _word(point: tuple[float, float], side: int, columns: LandmarkColumns) -> str:
    if math.isnan(point[0]) or math.isnan(point[1]):
        return "nan" if columns.missing is None else coordinate_text(columns.missing)
    return coordinate_text(point[side], columns.origin)


def _box_words(found: AnnotatedObject, columns: LandmarkColumns) -> list[str]:
    if found.box_xyxy_px is None:
        return ["nan"] * 4
    left, top, right, bottom = found.box_xyxy_px
    if columns.box_format == "xywh":
        right, bottom = right - left, bottom - top
    plus = (columns.origin, columns.origin, 0, 0)
    values = zip((left, top, right, bottom), plus, strict=True)
    return [coordinate_text(value, more) for value, more in values]
