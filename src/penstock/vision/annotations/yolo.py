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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml

from penstock.errors import StoreError
from penstock.stores.folder.listing import IMAGE_SUFFIXES, is_system_folder
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    coordinate,
    files_below,
    first_repeated,
    key_of,
    listed_path,
    numbered_lines,
    read_text,
    reading,
    upright_size,
    whole_number,
    whole_value,
)
from penstock.vision.arguments import checked_choice
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    """

    class_names: tuple[str, ...] = ()
    num_landmarks: int = 0
    num_values: int = 3
    polygons: Literal["error", "box"] = "error"

    @property
    def num_columns(self) -> int:
        """Columns of a line."""
        return 5 + self.num_landmarks * self.num_values


def read_label_line(line: str, labels: Labels, width_px: int, height_px: int) -> AnnotatedObject:
    """Return the object of a line."""
    words = line.split()
    if len(words) != labels.num_columns:
        _check_polygon(words, labels)
    name = _class_name(words[0], labels)
    if len(words) != labels.num_columns:
        points = [_point(words, place, width_px, height_px) for place in range(1, len(words), 2)]
        xs, ys = zip(*points, strict=True)
        return AnnotatedObject(name, (min(xs), min(ys), max(xs), max(ys)))
    x, y = _share(words, 1, width_px), _share(words, 2, height_px)
    w, h = _share(words, 3, width_px), _share(words, 4, height_px)
    left, top = round(x - w / 2, _DIGITS), round(y - h / 2, _DIGITS)
    right, bottom = round(x + w / 2, _DIGITS), round(y + h / 2, _DIGITS)
    landmarks, visibility = [], []
    for place in range(5, labels.num_columns, labels.num_values):
        point = _point(words, place, width_px, height_px)
        is_marked = any(point)  # without visibility, 0 0 says that a point is not marked
        if labels.num_values == 3:
            number = whole_value(words[place + 2])
            if number not in (0, 1, 2):
                raise ValueError(
                    f"column {place + 3} is {words[place + 2][:40]!r}, and visibility is 0, 1 or 2"
                )
            visibility.append(number)
            is_marked = number > 0
        landmarks.append(point if is_marked else _NAN)
    return AnnotatedObject(
        name,
        (left, top, right, bottom),
        landmarks_xy_px=tuple(landmarks),
        visibility=tuple(visibility),
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


def _share(words: list[str], place: int, side_px: int) -> float:
    """Return pixels for a share of the image's side."""
    value = coordinate(words[place], f"column {place + 1}")
    if abs(value) > _FARTHEST:
        raise ValueError(
            f"column {place + 1} is {words[place][:40]}, no share of the image's side, from 0 to "
            "1: these may be pixels"
        )
    return value * side_px


def _point(words: list[str], place: int, width_px: int, height_px: int) -> tuple[float, float]:
    x, y = _share(words, place, width_px), _share(words, place + 1, height_px)
    return round(x, _DIGITS), round(y, _DIGITS)


def _check_polygon(words: list[str], labels: Labels) -> None:
    """Raise unless a line is a polygon, and polygons are wanted."""
    if labels.polygons == "error" or labels.num_landmarks or len(words) < 7 or not len(words) % 2:
        raise ValueError(
            f"it has {len(words)} columns, not {labels.num_columns}: class, box, and "
            f"{labels.num_landmarks} x {labels.num_values} of the YAML's kpt_shape. (A sixth is a "
            'prediction\'s score; of polygons, polygons="box" takes the box around)'
        )


def label_line(
    found: AnnotatedObject, number: int, labels: Labels, width_px: int, height_px: int
) -> str:
    """Return the line of an object of class `number`."""
    assert found.box_xyxy_px is not None  # the caller leaves others out
    left, top, right, bottom = found.box_xyxy_px
    words = [
        str(number),
        repr((left + right) / 2 / width_px),
        repr((top + bottom) / 2 / height_px),
        repr((right - left) / width_px),
        repr((bottom - top) / height_px),
    ]
    points = found.landmarks_xy_px or (_NAN,) * labels.num_landmarks
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
    ("path", "names", "nc", "kpt_shape", "flip_idx", "download", "kpt_names", "roboflow",
     "yaml_file")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class YoloData:
    """What a data set's YAML file says; or its folders, where it has none.

    Attributes:
        source: The file or folder.
        root: Where relative paths start from.
        splits: For each split, the folders or lists of its images.
        labels: What its label files hold; class names only where the data set says them.
    """

    source: Path
    root: Path
    splits: dict[str, tuple[str, ...]]
    labels: Labels


def read_yolo(
    yaml_or_folder: str | Path,
    split: str = "train",
    *,
    polygons: Literal["error", "box"] = "error",
    unreadable: dict[str, int] | None = None,
) -> tuple[list[AnnotatedImage], tuple[str, ...]]:
    """Return the images of a split, and the names of all classes.

    The header of each image is read, for its size: pixels are those of the image as a viewer shows
    it. Landmarks are fractions of width and height as well, and taken as they are: 0 is pixel 0.

    Given an empty dict as `unreadable`, an image whose size cannot be read is returned without size
    and objects, and put into it: its path, and how many objects that are. Otherwise it is an error,
    and so it is if none can be read. Keys are the paths below the split's folder, without suffix.
    Where the data set has no names, they are "0", "1" and so on, to the highest that comes up.

    Raises:
        ConfigError: `polygons` is none of the two.
        StoreError: something cannot be read, or is not as it has to be. The message names the file
            and the line.
    """
    checked_choice("polygons", polygons, ("error", "box"))
    data = read_yolo_data(yaml_or_folder)
    labels = replace(data.labels, polygons=polygons)
    files = files_of_split(data, split)
    missing = 0
    images = []
    for path, key in files:
        file = label_file(path)
        missing += not os.path.isfile(file)
        images.append(_image(path, key, file, labels, unreadable))
    if unreadable and len(unreadable) == len({path for path, _ in files}):
        _image(*files[0], label_file(files[0][0]), labels, None)  # sooner than all damaged: raises
    if images and missing == len(images):
        first = label_file(files[0][0])
        warn_user(f"no image of split {split!r} of {data.source} has labels: {first} is not there.")
    if labels.class_names:
        return images, labels.class_names
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
    return YoloData(root, root, splits or {"train": ("images",)}, Labels(class_names))


def _from_yaml(path: Path) -> YoloData:
    text = read_text(path, _MAX_YAML_BYTES)
    try:
        # All scalars stay text: a class called "no" is no False. Nothing is built but lists and
        # dicts, and what an alias repeats is not copied.
        said = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot read {path}: it is no YAML: {error}.") from error
    with reading(path):
        if not isinstance(said, dict) or not all(isinstance(key, str) for key in said):
            raise ValueError("it is no mapping of names to values")
        names = _names(said.get("names") or [], said.get("nc"))
        labels = Labels(names, *_kpt_shape(said.get("kpt_shape")))
        splits = {
            name: places
            for name, value in said.items()
            if name not in _NO_SPLITS and value and (places := _places(value))
        }
        for place in (place for places in splits.values() for place in places):
            listed_path(place, "")  # ValueError for what is no path
        # From the YAML file's folder, or from the current one.
        roots = [listed_path(str(said.get("path", "")), f) for f in (path.parent, Path())]
        root = next(filter(os.path.isdir, roots), roots[0])
    return YoloData(path, root, splits, labels)


def _names(value: object, count: object) -> tuple[str, ...]:
    if isinstance(value, dict):
        by_number = {whole_number(str(key)): name for key, name in value.items()}
        if set(by_number) != set(range(len(value))):
            raise ValueError(f"names has {len(value)} classes, and not each number from 0 to that")
        value = [by_number[number] for number in range(len(value))]
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("names is neither a list of names nor a mapping of numbers to names")
    number = whole_number(str(count))
    if number is not None and value and number != len(value):
        raise ValueError(f"nc is {number}, and names has {len(value)}")
    twice = first_repeated(value)
    if twice is not None:
        raise ValueError(f"two classes are called {twice!r}")
    return tuple(value)


def _kpt_shape(value: object) -> tuple[int, int]:
    if value is None:
        return 0, 3
    shape = [whole_number(str(number)) for number in value] if isinstance(value, list) else []
    match shape:
        case [int() as count, 2 | 3 as values] if 0 < count <= 10_000:
            return count, values
    raise ValueError("kpt_shape is the number of landmarks and 2 or 3, as in [17, 3]")


def _places(value: object) -> tuple[str, ...]:
    """Return the folders or lists that a split names; none of a value that is no split's."""
    places = tuple(value) if isinstance(value, list) else (value,)
    return places if all(isinstance(place, str) for place in places) else ()


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
            pairs = ((path / n, os.path.splitext(n)[0]) for n in files_below(path, IMAGE_SUFFIXES))
            found += [pair for pair in pairs if pair[0] not in known]
        elif os.path.isfile(path):
            found += _in_list(path, data.root)  # a line that comes again is another sample
        else:
            raise StoreError(f"{data.source}: {split} is {place!r}, and {path} is not there.")
    if not found:
        raise StoreError(f"split {split!r} of {data.source} has no images.")
    return found


def _in_list(file: Path, root: Path) -> Iterator[tuple[Path, str]]:
    for number, line in numbered_lines(file):
        with reading(f"{file}, line {number}"):
            places = [listed_path(line, folder) for folder in (file.parent, root)]
            path = next(filter(os.path.exists, places), places[0])
            if not path.name:
                raise ValueError(f"{line[:80]!r} names no file")
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
        with reading(f"{file}, line {number}"):
            objects.append(read_label_line(line, labels, width_px, height_px))
    return AnnotatedImage(path, key, width_px, height_px, tuple(objects), str(file))


def write_yolo_yaml(labels: Labels, places: Mapping[str, str]) -> bytes:
    """Return the YAML file of a data set: where the images of each split are, and the names."""
    said: dict[str, Any] = dict(places)
    if labels.num_landmarks:
        said["kpt_shape"] = [labels.num_landmarks, labels.num_values]
    said["names"] = dict(enumerate(labels.class_names))
    text: str = yaml.safe_dump(said, sort_keys=False, allow_unicode=True)
    return text.encode()
