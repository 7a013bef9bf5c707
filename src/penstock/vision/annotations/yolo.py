# SPDX-License-Identifier: Apache-2.0
"""Data sets as YOLO's tools keep them: images, a text file of labels for each, a YAML file.

    data.yaml                   names, where the images of each split are, kpt_shape
    images/train/1.jpg          an image …
    labels/train/1.txt          … and its objects. Without the file it has none

The label file has the image's path with the last `images` made `labels`, or lies beside the image.
It has a line for each object, its numbers as fractions of width and height:

    CLASS CX CY W H                     the box: its centre and its size
    CLASS CX CY W H X1 Y1 X2 Y2 ..      and landmarks, `kpt_shape: [K, 2]`
    CLASS CX CY W H X1 Y1 V1 X2 Y2 V2   and their visibility, `kpt_shape: [K, 3]`
    CLASS X1 Y1 X2 Y2 X3 Y3 ..          a polygon, in data sets for segmentation

Pixels are rounded to a millionth, so that a box of whole pixels comes back whole.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml

from penstock.errors import ConfigError, StoreError
from penstock.stores.folder.listing import IMAGE_SUFFIXES, cannot_list, is_system_folder
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    coordinate,
    first_repeated,
    key_of,
    listed_path,
    numbered_lines,
    read_text,
    upright_size,
    whole_number,
    whole_value,
)
from penstock.vision.arguments import checked_choice
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Of a box's centre and sides, beyond 0 to 1. Boxes cut short after some digits, or of objects at
# the border that a tool moved or turned, are that far out at most; what is farther is no share of
# this image.
SLACK: Final = 0.05

_DIGITS: Final = 6  # of a pixel
_FARTHEST: Final = 2.0  # of width or height: what is farther out was never divided by them
_NAN: Final = (math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Labels:
    """What the label files of a data set hold.

    Attributes:
        class_names: By their numbers. Empty: any number is a class, and called by it.
        num_landmarks: K of `kpt_shape`.
        num_values: 2 or 3 for each landmark.
        polygons: "box" takes the box around a polygon, "error" refuses it.
        slack: How far beyond 0 to 1 a box's centre and sides may be.
    """

    class_names: Sequence[str] = ()
    num_landmarks: int = 0
    num_values: int = 3
    polygons: Literal["error", "box"] = "error"
    slack: float = SLACK

    @property
    def num_columns(self) -> int:
        """Columns of a line."""
        return 5 + self.num_landmarks * self.num_values


def read_label_line(line: str, labels: Labels, width_px: int, height_px: int) -> AnnotatedObject:
    """Return the object of a line."""
    words = line.split()
    if len(words) != labels.num_columns:
        return _polygon(words, labels, width_px, height_px)
    name = _class_name(words[0], labels)
    values = [_share(word, place, labels.slack) for place, word in enumerate(words[1:5], 2)]
    x, y, w, h = (v * side for v, side in zip(values, (width_px, height_px) * 2, strict=True))
    left, top = round(x - w / 2, _DIGITS), round(y - h / 2, _DIGITS)
    right, bottom = round(x + w / 2, _DIGITS), round(y + h / 2, _DIGITS)
    points, visibility = _points(words, labels, width_px, height_px)
    return AnnotatedObject(
        name, (left, top, right, bottom), landmarks_xy_px=points, visibility=visibility
    )


def _class_name(word: str, labels: Labels) -> str:
    number = whole_value(word)
    if number is None or number < 0:
        raise ValueError(f"column 1 is {word[:40]!r}, not the number of a class")
    if not labels.class_names:
        return str(number)
    if number >= len(labels.class_names):
        raise ValueError(
            f"its class is {number}, and the data set has {len(labels.class_names)}, from 0 to "
            f"{len(labels.class_names) - 1}"
        )
    return labels.class_names[number]


_COLUMNS: Final = {2: "centre x", 3: "centre y", 4: "width", 5: "height"}


def _share(word: str, place: int, slack: float) -> float:
    """Return a number of a box; one that is no share of the image's side is an error."""
    value = _fraction(word, place, max(_FARTHEST, 1 + slack))
    if not -slack <= value <= 1 + slack:
        raise ValueError(
            f"column {place}, the box's {_COLUMNS[place]}, is {word[:40]}: it is a share of the "
            f"image's side, from 0 to 1, and more than {slack:g} beyond is no slip of rounding. "
            "Correct the line, or give slack=1 and the like to have bad_boxes decide"
        )
    return value


def _fraction(word: str, place: int, farthest: float = _FARTHEST) -> float:
    try:
        value = coordinate(word)
    except ValueError as error:
        raise ValueError(f"column {place} {error}") from None
    if abs(value) > farthest:
        raise ValueError(
            f"column {place} is {word[:40]}, and a fraction of width or height is at most 1: these "
            "may be pixels"
        )
    return value


def _points(
    words: list[str], labels: Labels, width_px: int, height_px: int
) -> tuple[tuple[tuple[float, float], ...], tuple[int, ...]]:
    points, visibility = [], []
    for place in range(5, labels.num_columns, labels.num_values):
        x, y = (_fraction(words[place + side], place + side + 1) for side in (0, 1))
        is_marked = bool(x or y)  # without visibility, 0 0 says that a point is not marked
        if labels.num_values == 3:
            number = whole_value(words[place + 2])
            if number not in (0, 1, 2):
                raise ValueError(
                    f"column {place + 3} is {words[place + 2][:40]!r}, and visibility is 0, 1 or 2"
                )
            visibility.append(number)
            is_marked = number > 0
        point = (round(x * width_px, _DIGITS), round(y * height_px, _DIGITS))
        points.append(point if is_marked else _NAN)
    return tuple(points), tuple(visibility)


def _polygon(words: list[str], labels: Labels, width_px: int, height_px: int) -> AnnotatedObject:
    """Return the box around a polygon, if that is wanted and it is one."""
    needed = f"it has {len(words)} columns, not {labels.num_columns}"
    if labels.num_landmarks:
        k, n = labels.num_landmarks, labels.num_values
        raise ValueError(f"{needed}: class, box, and {k} x {n} of kpt_shape")
    if len(words) == 6:
        raise ValueError(f"{needed}: class and box. A sixth is the score of a prediction")
    if len(words) < 7 or len(words) % 2 == 0:
        raise ValueError(f"{needed}: class and box")
    if labels.polygons == "error":
        raise ValueError(
            f'{needed}: it may be a polygon (polygons="box" takes the box around it), or have '
            "landmarks, whose number the data set's YAML says as kpt_shape"
        )
    name = _class_name(words[0], labels)
    values = [_fraction(word, place) for place, word in enumerate(words[1:], 2)]
    xs = [round(value * width_px, _DIGITS) for value in values[::2]]
    ys = [round(value * height_px, _DIGITS) for value in values[1::2]]
    return AnnotatedObject(name, (min(xs), min(ys), max(xs), max(ys)))


def label_line(
    found: AnnotatedObject, number: int, labels: Labels, width_px: int, height_px: int
) -> str:
    """Return the line of an object of class `number`."""
    if found.box_xyxy_px is None:
        raise ValueError("it has no box, and YOLO's objects have one")
    left, top, right, bottom = found.box_xyxy_px
    words = [
        str(number),
        repr((left + right) / 2 / width_px),
        repr((top + bottom) / 2 / height_px),
        repr((right - left) / width_px),
        repr((bottom - top) / height_px),
    ]
    points = found.landmarks_xy_px or (_NAN,) * labels.num_landmarks
    if len(points) != labels.num_landmarks:
        raise ValueError(f"it has {len(points)} landmarks, and others {labels.num_landmarks}")
    for place, (x, y) in enumerate(points):
        is_marked = not (math.isnan(x) or math.isnan(y))
        seen = found.visibility[place] if found.visibility else 2
        words += [repr(x / width_px), repr(y / height_px)] if is_marked else ["0", "0"]
        if labels.num_values == 3:
            words.append(str(seen if is_marked else 0))
    return " ".join(words)


_MAX_YAML_BYTES: Final = 1_000_000  # a thousand classes take 20 kB
_MAX_CLASSES: Final = 1_000_000
_NO_SPLITS: Final = frozenset(
    [
        "path",
        "names",
        "nc",
        "kpt_shape",
        "flip_idx",
        "download",
        "kpt_names",
        "roboflow",
        "yaml_file",
    ]
)


@dataclass(frozen=True, slots=True)
class YoloData:
    """What a data set's YAML file says; or its folders, where it has none.

    Attributes:
        source: The file or folder.
        root: Where relative paths start from.
        class_names: By their numbers; empty where the data set does not say.
        splits: For each split, the folders or lists of its images.
        num_landmarks: K of `kpt_shape`; 0 without.
        num_values: 2 or 3 for each landmark.
    """

    source: Path
    root: Path
    class_names: tuple[str, ...]
    splits: dict[str, tuple[str, ...]]
    num_landmarks: int = 0
    num_values: int = 3


def read_yolo(
    yaml_or_folder: str | Path,
    split: str = "train",
    *,
    polygons: Literal["error", "box"] = "error",
    slack: float = SLACK,
    unreadable: dict[str, int] | None = None,
) -> tuple[list[AnnotatedImage], tuple[str, ...]]:
    """Return the images of a split, and the names of all classes.

    The header of each image is read, for its size: pixels are those of the image as a viewer shows
    it. Landmarks are fractions of width and height as well, and taken as they are: 0 is pixel 0.

    Args:
        yaml_or_folder: The YAML file; or a folder with `data.yaml`, or with `images` and `labels`
            and perhaps `classes.txt`.
        split: One of the YAML file's, or of the folders in `images`.
        polygons: What to do with a line that has a polygon: "box" takes the box around it.
        slack: How far beyond 0 to 1 a box's centre and sides may be: 0.05 unless given. What is
            farther is an error.
        unreadable: Given an empty dict, an image whose size cannot be read is returned without size
            and objects, and put into it: its path, and how many objects that are. Otherwise it is
            an error, and so it is if none can be read.

    Returns:
        The images, sorted by path within each folder, in the order of a list; `key` is the path
        below the split's folder, without suffix. And the names, by the classes' numbers; where the
        data set has none, "0", "1" and so on, to the highest that comes up.

    Raises:
        ConfigError: `polygons` is none of the two; `slack` is negative.
        StoreError: something cannot be read, or is not as it has to be. The message names the file
            and the line.
    """
    checked_choice("polygons", polygons, ("error", "box"))
    if not slack >= 0:
        raise ConfigError(f"slack is at least 0, not {slack!r}.")
    data = read_yolo_data(yaml_or_folder)
    labels = Labels(data.class_names, data.num_landmarks, data.num_values, polygons, slack)
    files = files_of_split(data, split)
    missing = 0
    images = []
    for path, key in files:
        file = label_file(path)
        missing += not os.path.isfile(file)
        images.append(_image(path, key, file, labels, unreadable))
    if unreadable and len(unreadable) == len({path for path, _ in files}):
        # The wrong folder, sooner than all damaged.
        path, key = files[0]
        _image(path, key, label_file(path), labels, None)
    if images and missing == len(images):
        warnings.warn(
            f"no image of split {split!r} of {data.source} has labels: {label_file(files[0][0])} "
            "is not there, for one. All count as images without objects.",
            UserWarning,
            stacklevel=users_level(),
        )
    if data.class_names:
        return images, data.class_names
    highest = max((int(found.class_name) for i in images for found in i.objects), default=-1)
    if highest >= _MAX_CLASSES:
        raise StoreError(f"an object is of class {highest}: no data set has that many classes.")
    return images, tuple(map(str, range(highest + 1)))


def read_yolo_data(yaml_or_folder: str | Path) -> YoloData:
    """Return what a YAML file or a folder says of its data set; no image is looked at."""
    source = Path(yaml_or_folder)
    if not source.is_dir():
        return _from_yaml(source)
    found = sorted(p for p in source.iterdir() if p.suffix.lower() in (".yaml", ".yml"))
    usual = [p for p in found if p.stem in ("data", "dataset")] or found
    if len(usual) > 1:
        names = ", ".join(p.name for p in usual)
        raise StoreError(f"{source} has several YAML files ({names}): name one of them.")
    return _from_yaml(usual[0]) if usual else _from_folder(source)


def _from_folder(root: Path) -> YoloData:
    images = root / "images"
    if not images.is_dir():
        raise StoreError(f"{root} has neither a YAML file nor a folder 'images': no YOLO data set.")
    names_of_splits = sorted(
        path.name for path in images.iterdir() if path.is_dir() and not is_system_folder(path.name)
    )
    splits: dict[str, tuple[str, ...]] = {name: (f"images/{name}",) for name in names_of_splits}
    lists = [root / "classes.txt", root / "labels" / "classes.txt"]
    names = next((read_text(p).strip() for p in lists if p.exists()), "")
    class_names = tuple(name.strip() for name in names.split("\n")) if names else ()
    return YoloData(root, root, class_names, splits or {"train": ("images",)})


def _from_yaml(path: Path) -> YoloData:
    said = _load(path)
    try:
        names = _names(said.get("names"), said.get("nc"))
        num_landmarks, num_values = _kpt_shape(said.get("kpt_shape"))
        splits = {
            name: places
            for name, value in said.items()
            if name not in _NO_SPLITS and value and (places := _places(name, value))
        }
        # From the YAML file's folder, or from the current one.
        roots = [
            listed_path(_text(said.get("path", ""), "path"), folder)
            for folder in (path.parent, Path())
        ]
        root = next(filter(os.path.isdir, roots), roots[0])
    except ValueError as error:
        raise StoreError(f"cannot read {path}: {error}.") from error
    return YoloData(path, root, names, splits, num_landmarks, num_values)


def _load(path: Path) -> dict[str, Any]:
    text = read_text(path, _MAX_YAML_BYTES)
    try:
        # All scalars stay text: a class called "no" is no False. Nothing is built but lists and
        # dicts, and what an alias repeats is not copied.
        said = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot read {path}: it is no YAML: {error}.") from error
    if not isinstance(said, dict) or not all(isinstance(key, str) for key in said):
        raise StoreError(f"cannot read {path}: it is no mapping of names to values.")
    return said


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is a {type(value).__name__}, not a text")
    return value


def _names(value: object, count: object) -> tuple[str, ...]:
    match value:
        case list():
            names = tuple(_text(name, "a class name") for name in value)
        case dict():
            names = _names_by_number(value)
        case None | "":
            names = ()
        case _:
            raise ValueError("names is neither a list nor a mapping of numbers to names")
    number = None if count is None else whole_number(_text(count, "nc"))
    if number is not None and names and number != len(names):
        raise ValueError(f"nc is {number}, and names has {len(names)}")
    twice = first_repeated(names)
    if twice is not None:
        raise ValueError(f"two classes are called {twice!r}")
    if "" in names:
        raise ValueError(f"class {names.index('')} has an empty name")
    return names


def _names_by_number(value: dict[Any, Any]) -> tuple[str, ...]:
    by_number = {whole_number(str(key)): _text(name, "a class name") for key, name in value.items()}
    if set(by_number) != set(range(len(value))):
        raise ValueError(f"names has {len(value)} classes, and not each number from 0 to that")
    return tuple(by_number[number] for number in range(len(value)))


def _kpt_shape(value: object) -> tuple[int, int]:
    if value is None:
        return 0, 3
    shape = [whole_number(str(number)) for number in value] if isinstance(value, list) else []
    match shape:
        case [int() as count, 2 | 3 as values] if 0 < count <= 10_000:
            return count, values
    raise ValueError("kpt_shape is the number of landmarks and 2 or 3, as in [17, 3]")


def _places(name: str, value: object) -> tuple[str, ...]:
    """Return the folders or lists that a split names; none of a value that is no split's."""
    places = tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(place, str) for place in places):
        return ()
    if any("\0" in place for place in places):
        raise ValueError(f"{name} is no path: it has a null character")
    return places


def files_of_split(data: YoloData, split: str) -> list[tuple[Path, str]]:
    """Return path and key of each image of a split."""
    if split not in data.splits:
        has = ", ".join(map(repr, data.splits)) or "none"
        raise StoreError(f"{data.source} has no split {split!r}; it has {has}.")
    found: list[tuple[Path, str]] = []
    for place in data.splits[split]:
        path = listed_path(place, data.root)
        if not os.path.exists(path) and place.startswith("../"):
            # Some sites write paths from a folder further down than the file that has them.
            path = listed_path(place.removeprefix("../"), data.root)
        if os.path.isdir(path):
            known = {image for image, _ in found}
            found += [pair for pair in _in_folder(path) if pair[0] not in known]
        elif os.path.isfile(path):
            found += _in_list(path, data.root)  # a line that comes again is another sample
        else:
            raise StoreError(f"{data.source}: {split} is {place!r}, and {path} is not there.")
    if not found:
        raise StoreError(f"split {split!r} of {data.source} has no images.")
    return found


def _in_folder(folder: Path) -> Iterator[tuple[Path, str]]:
    def refuse(error: OSError) -> None:
        raise cannot_list(error) from error

    paths: list[str] = []
    for above, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not is_system_folder(name)]
        images = (n for n in names if n.lower().endswith(IMAGE_SUFFIXES) and n[0] != ".")
        paths += (os.path.relpath(os.path.join(above, name), folder) for name in images)
    for path in sorted(path.replace(os.sep, "/") for path in paths):
        yield folder / path, os.path.splitext(path)[0]


def _in_list(file: Path, root: Path) -> Iterator[tuple[Path, str]]:
    for number, line in numbered_lines(file):
        try:
            places = [listed_path(line, folder) for folder in (file.parent, root)]
            path = next(filter(os.path.exists, places), places[0])
            if not path.name:
                raise ValueError(f"{line[:80]!r} names no file")
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {file}, line {number}: {error}.") from error
        key = os.path.splitext(key_of(line))[0]
        yield path, key.removeprefix("images/")


def label_file(image: Path) -> Path:
    """Return where the labels of an image are; the file need not be there."""
    beside = image.with_name(os.path.splitext(image.name)[0] + ".txt")
    folders = image.parent.parts
    if "images" not in folders:
        return beside
    last = len(folders) - 1 - folders[::-1].index("images")
    usual = Path(*folders[:last], "labels", *folders[last + 1 :], beside.name)
    return beside if os.path.exists(beside) and not os.path.exists(usual) else usual


def _image(
    path: Path, key: str, file: Path, labels: Labels, unreadable: dict[str, int] | None
) -> AnnotatedImage:
    lines = list(numbered_lines(file)) if os.path.isfile(file) else []
    try:
        height_px, width_px = upright_size(path)
    except (OSError, ValueError) as error:
        if unreadable is None:
            raise StoreError(f"cannot read the size of {path}: {error}.") from error
        unreadable[os.fspath(path)] = len(lines)
        return AnnotatedImage(path, key, None, None, (), str(file))
    objects = []
    for number, line in lines:
        try:
            objects.append(read_label_line(line, labels, width_px, height_px))
        except ValueError as error:
            raise StoreError(f"cannot read {file}, line {number}: {error}.") from error
    return AnnotatedImage(path, key, width_px, height_px, tuple(objects), str(file))


def write_yolo_yaml(
    class_names: Sequence[str],
    places: Mapping[str, str],
    *,
    num_landmarks: int = 0,
    num_values: int = 3,
) -> bytes:
    """Return the YAML file of a data set: where the images of each split are, and the names."""
    said: dict[str, Any] = dict(places)
    if num_landmarks:
        said["kpt_shape"] = [num_landmarks, num_values]
    said["names"] = dict(enumerate(class_names))
    text: str = yaml.safe_dump(said, sort_keys=False, allow_unicode=True)
    return text.encode()
