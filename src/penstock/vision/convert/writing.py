# SPDX-License-Identifier: Apache-2.0
"""A collection written in each format, and what that format has no place for."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from penstock.errors import StoreError
from penstock.opening import open_file
from penstock.stores.folder.listing import IMAGE_SUFFIXES, is_image
from penstock.vision.annotations.imglab import can_be_attribute, whole_px, write_imglab
from penstock.vision.annotations.lists import (
    CLASS_COLUMN,
    LandmarkColumns,
    write_image_list,
    write_landmark_list,
)
from penstock.vision.annotations.voc import write_voc
from penstock.vision.annotations.yolo import Labels, label_line, write_yolo_yaml
from penstock.vision.convert.merging import classes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
    from penstock.vision.convert.reading import Collection

__all__ = ["Images", "Target", "count_losses", "landmark_columns", "write_target"]

Images = Literal["reference", "link", "copy"]
_MAGIC_BYTES: Final = 16
_MAX_NAME_BYTES: Final = 200  # Linux takes 255, with a suffix
_LIST_NAMES: Final = {
    "imglab": "imglab.xml",
    "landmarks": "landmarks.txt",
    "image-list": "images.txt",
}
_FLAGS: Final = ("difficult", "truncated", "occluded")
# What each format has a place for, as `_said` calls it. A landmark list has the columns that it
# has; YOLO numbers classes itself.
_HAS: Final = {
    "voc": {
        "box", "object without a box", "class", "landmarks", "names of landmarks", *_FLAGS, "pose",
        "visibility of landmarks", "attribute", "parts", "split",
    },
    "imglab": {"box", "class", "landmarks", "names of landmarks", *_FLAGS, "attribute"},
    "yolo": {
        "box", "class", "landmarks", "visibility of landmarks", "split", "number of a class",
        "class without objects",
    },
    "landmarks": {"object without a box", "landmarks"},
    "image-list": {"object without a box", "class"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What is written, and how.

    Attributes:
        form: One of `FORMATS`.
        place: Where it will be; paths in lists start from there.
        images: Whether image files are left where they are, linked to, or copied.
        columns: Of a landmark list.
        origin: Of VOC's numbers.
    """

    form: str
    place: Path
    images: Images
    columns: LandmarkColumns
    origin: int = 1

    @property
    def is_file(self) -> bool:
        """Whether it is one file, and no folder."""
        return self.form in _LIST_NAMES and self.images == "reference"


def count_losses(collection: Collection, target: Target) -> dict[str, int]:
    """Return what is lost, and how many objects, images, splits or classes lose it.

    A flag that is false is not counted: without it, it means the same.
    """
    form, columns = target.form, target.columns
    has = set(_HAS[form])
    if form == "landmarks":
        has |= {"box"} if columns.has_box else set()
        has |= {"class"} if CLASS_COLUMN in columns.classes else set()
    losses: Counter[str] = Counter()
    for image in collection.images:
        for found in image.objects:
            losses.update(what for what in _said(found) if what not in has)
            losses.update(
                f"attribute {name!r}"
                for name in found.extra
                if "attribute" not in has and name not in columns.classes
            )
            if form == "imglab":
                losses.update(_lost_in_imglab(found))
        if form == "image-list":
            is_one = len(classes_of([image])) == 1
            losses["image without a class, or with several"] += not is_one
        losses["image without objects"] += form == "landmarks" and not image.objects
    if "split" not in has:
        losses["split"] = len(collection.splits)
    if form == "yolo":
        losses["split that shares images with another"] = len(_one_split_each(collection)[1])
    used = sorted(classes_of(collection.images))
    for number, name in enumerate(collection.class_names if form != "yolo" else ()):
        if name not in used:
            losses["class without objects"] += 1
        elif used.index(name) != number:  # others number them by their sorted names
            losses["number of a class"] += 1
    return {name: count for name, count in losses.items() if count}


def _said(found: AnnotatedObject) -> Iterator[str]:
    """Yield what is said of an object, besides its attributes."""
    yield from (name for name in _FLAGS if getattr(found, name))
    for what, is_said in (
        ("pose", found.pose not in ("", "Unspecified")),
        ("parts", found.parts),
        ("names of landmarks", found.landmark_names),
        ("visibility of landmarks", found.visibility),
        ("object without a box", found.box_xyxy_px is None),
        ("box", found.box_xyxy_px is not None),
        ("class", found.class_name),
        ("landmarks", found.landmarks_xy_px),
    ):
        if is_said:
            yield what


def _lost_in_imglab(found: AnnotatedObject) -> Iterator[str]:
    points = [value for point in found.landmarks_xy_px for value in point]
    values = [value for value in (*points, *(found.box_xyxy_px or ())) if not math.isnan(value)]
    if any(whole_px(value) != value for value in values):
        yield "fraction of a pixel"
    if list(found.landmark_names) != sorted(found.landmark_names):
        yield "order of landmarks"
    if points and all(map(math.isnan, points)):
        yield "landmarks of which none is marked"
    yield from (f"attribute {name!r}" for name in found.extra if not can_be_attribute(name))


def write_target(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    """Write a collection as `made`, which does not exist yet.

    Returns:
        What else the user should know, a sentence each.

    Raises:
        StoreError: an image is missing, or cannot be written in this form. The message names it.
        OSError: a file cannot be written.
    """
    if not target.is_file:
        made.mkdir()
    return _WRITERS[target.form](collection, target, made)


def _write_voc(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    names = _names_of(collection.images)
    (made / "Annotations").mkdir()
    (made / "JPEGImages").mkdir()
    for image in collection.images:
        name = names[image.key]
        place = made / "JPEGImages" / _file_name(image, names)
        _put_image(image, target, place)
        with _errors_of(image):
            xml = write_voc(replace(image, path=place), origin=target.origin)
        (made / "Annotations" / f"{name}.xml").write_bytes(xml)
    splits, notes = _splits_with_repeats(collection)
    for split, keys in splits.items():
        _check_split(split)
        folder = made / "ImageSets" / "Main"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}.txt").write_bytes("".join(f"{names[k]}\n" for k in keys).encode())
    if target.images == "reference":
        return *notes, f"the images are not in it: put them into {target.place / 'JPEGImages'}"
    return notes


def _write_yolo(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    names = _names_of(collection.images)
    split_of, left_out = _one_split_each(collection)
    class_names = collection.class_names or tuple(sorted(classes_of(collection.images)))
    numbers = {name: number for number, name in enumerate(class_names)}
    labels = _labels(collection, class_names)
    files: dict[str, str] = {}
    for image in collection.images:
        split = split_of[image.key]
        _check_split(split)
        files[image.key] = f"images/{split}/{_file_name(image, names)}"
        _put_image(image, target, made / files[image.key])
        with _errors_of(image):
            lines = _label_lines(image, numbers, labels)
        file = made / "labels" / split / f"{names[image.key]}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes("".join(f"{line}\n" for line in lines).encode())
    places = {split: f"images/{split}" for split in split_of.values()}
    splits, notes = _splits_with_repeats(collection)
    for split in places:
        keys = splits.get(split, ())
        if len(set(keys)) < len(keys):
            places[split] = f"{split}.txt"
            (made / places[split]).write_text("".join(f"{files[key]}\n" for key in keys))
    data = write_yolo_yaml(
        class_names, places, num_landmarks=labels.num_landmarks, num_values=labels.num_values
    )
    (made / "data.yaml").write_bytes(data)
    why = "some of its images are in another one"
    return *(f"split {split!r} is left out: {why}" for split in left_out), *notes


def _label_lines(image: AnnotatedImage, numbers: Mapping[str, int], labels: Labels) -> list[str]:
    if image.width_px is None or image.height_px is None:
        raise ValueError("the size of its image is not known, and YOLO's numbers are parts of it")
    return [
        label_line(found, numbers[found.class_name], labels, image.width_px, image.height_px)
        for found in image.objects
        if found.box_xyxy_px is not None
    ]


def _labels(collection: Collection, class_names: tuple[str, ...]) -> Labels:
    """Return how many landmarks an object has, and whether visibility has to be written."""
    objects = [found for image in collection.images for found in image.objects]
    # Without it "0 0" is a landmark that is not marked; and so would be all of an object's without.
    is_needed = any(found.visibility for found in objects) or any(
        point == (0.0, 0.0) or math.isnan(point[0])
        for found in objects
        for point in found.landmarks_xy_px
    )
    return Labels(class_names, _num_landmarks(objects), 3 if is_needed else 2)


def _num_landmarks(objects: Sequence[AnnotatedObject]) -> int:
    counts = sorted({len(found.landmarks_xy_px) for found in objects} - {0})
    if len(counts) > 1:
        raise StoreError(
            f"some objects have {counts[0]} landmarks and some {counts[-1]}: this form has one "
            "number for all."
        )
    return counts[0] if counts else 0


def _write_list(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    """Write a list that names images from its own folder, with "/"."""
    file = made if target.is_file else made / _LIST_NAMES[target.form]
    names = {} if target.is_file else _names_of(collection.images)
    folder = os.path.realpath(target.place.parent)

    def path_of(image: AnnotatedImage) -> str:
        if not target.is_file:
            return f"images/{_file_name(image, names)}"
        # So that ".." leads where it seems to; a link itself keeps its name.
        path = os.path.join(os.path.realpath(image.path.parent), image.path.name)
        return os.path.relpath(path, folder)

    for image in () if target.is_file else collection.images:
        _put_image(image, target, made / path_of(image))
    images = collection.sampled_images
    notes: tuple[str, ...] = ()
    if target.form == "imglab":
        data = write_imglab(images, name_of=path_of)
    elif target.form == "landmarks":
        data = write_landmark_list(images, target.columns, name_of=path_of)
        notes = (f"columns: {_described(target.columns)}",)
    else:
        classed = ((image, classes_of([image])) for image in images)
        data = write_image_list(
            (path_of(i), found.pop()) for i, found in classed if len(found) == 1
        )
    file.write_bytes(data)
    return notes


_WRITERS: Final[dict[str, Callable[[Collection, Target, Path], tuple[str, ...]]]] = {
    "voc": _write_voc,
    "yolo": _write_yolo,
    "imglab": _write_list,
    "landmarks": _write_list,
    "image-list": _write_list,
}


def landmark_columns(collection: Collection) -> LandmarkColumns:
    """Return columns that hold what all objects of a collection have."""
    objects = [found for image in collection.images for found in image.objects]
    first = objects[0].extra if objects else {}
    named = [name for name in first if all(name in found.extra for found in objects)]
    is_classed = bool(objects) and all(found.class_name for found in objects)
    return LandmarkColumns(
        num_landmarks=_num_landmarks(objects),
        has_box=any(found.box_xyxy_px is not None for found in objects),
        classes=(*((CLASS_COLUMN,) * is_classed), *(n for n in named if n != CLASS_COLUMN)),
    )


def _described(columns: LandmarkColumns) -> str:
    count = columns.num_landmarks or 0
    pairs = columns.layout == "xyxy"
    points = f"x1 y1 .. x{count} y{count}" if pairs else f"x1 .. x{count} y1 .. y{count}"
    right = "right bottom" if columns.box_format == "xyxy" else "width height"
    parts = [points] * (count > 0)
    if columns.has_box:
        parts.insert(0 if columns.box_at == "before" else len(parts), f"left top {right}")
    return " ".join(["path", *parts, *columns.classes])


@contextlib.contextmanager
def _errors_of(image: AnnotatedImage) -> Iterator[None]:
    """Let an error of what is written of an image name it."""
    try:
        yield
    except ValueError as error:
        raise StoreError(f"{image.source or image.path} cannot be written: {error}.") from error


def _put_image(image: AnnotatedImage, target: Target, place: Path) -> None:
    """Copy an image, or make a link to it."""
    if target.images == "reference":
        return
    source = Path(os.path.realpath(image.path))
    if not os.path.isfile(source):
        raise StoreError(
            f"{image.source or image.key}: its image {image.path} is not there, or is no file. "
            "With images='reference' (--images reference) none is needed."
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    if target.images == "link":
        place.symlink_to(source)
        return
    with open_file(source) as file:
        if not is_image(file.read(_MAGIC_BYTES)):
            raise StoreError(
                f"{image.source or image.key}: {image.path} is not an image by its first bytes, "
                "and is not copied."
            )
    shutil.copyfile(source, place)


def _names_of(images: Sequence[AnnotatedImage]) -> dict[str, str]:
    """Return a file name without suffix for each key; none leads out of its folder.

    That is the last part of the key, if those of all images differ; else the folders are before it,
    joined by "_", for all of them.
    """
    parts = {image.key: _parts(image) for image in images}
    first = -1 if len({of[-1].casefold() for of in parts.values()}) == len(images) else 0
    names: dict[str, str] = {}
    taken: dict[str, AnnotatedImage] = {}
    for image in images:
        name = names[image.key] = "_".join(parts[image.key][first:])
        is_plain = name.isprintable() and name == name.strip() and not set(name) & set("/\\")
        is_long = len(os.fsencode(name)) > _MAX_NAME_BYTES
        if not name.strip("._ ") or name[0] == "." or not is_plain or is_long:
            raise StoreError(
                f"{image.source}: {image.key[:80]!r} is no name that a file could be given."
            )
        # On some systems Cat.jpg is cat.jpg: there the second would take the place of the first.
        other = taken.setdefault(name.casefold(), image)
        if other is not image:
            raise StoreError(
                f"{other.path} and {image.path} would both be called {name!r}: rename one of them."
            )
    return names


def _parts(image: AnnotatedImage) -> list[str]:
    stem, suffix = os.path.splitext(image.key)
    key = stem if suffix.lower() in IMAGE_SUFFIXES else image.key
    return [part for part in key.split("/") if part not in ("", ".", "..")] or [""]


def _file_name(image: AnnotatedImage, names: Mapping[str, str]) -> str:
    """Return the name of an image file, with the suffix by which folders are listed."""
    suffix = image.path.suffix
    if suffix.lower() not in IMAGE_SUFFIXES:
        known = ", ".join(IMAGE_SUFFIXES)
        raise StoreError(f"{image.source}: {image.path} has no suffix of an image ({known}).")
    return names[image.key] + suffix


def _check_split(split: str) -> None:
    is_plain = split.isprintable() and not set(split) & set("/\\ ")
    if not split or not is_plain or split[0] == "." or len(split) > 100:
        raise StoreError(f"{split!r} is no name for the files of a split.")


def _one_split_each(collection: Collection) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the split of each image by its key, and the splits that have to be left out.

    "train", "val" and "test" come first. What overlaps those before it, as VOC's "trainval" does,
    is left out. Images in no split are of "train" if there are no splits at all, else of "rest".
    """
    split_of: dict[str, str] = {}
    left_out = []
    usual = [name for name in ("train", "val", "test") if name in collection.splits]
    for split in dict.fromkeys((*usual, *collection.splits)):
        keys = collection.splits[split]
        if any(key in split_of for key in keys):
            left_out.append(split)
        else:
            split_of |= dict.fromkeys(keys, split)
    rest = "rest" if split_of else "train"
    return {i.key: split_of.get(i.key, rest) for i in collection.images}, tuple(left_out)


def _splits_with_repeats(
    collection: Collection,
) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]:
    """Return the splits to write, and notes about images that are several samples.

    A folder has each file once, and the list of a split can name it several times. Where there are
    no splits at all, that is the list of "train".
    """
    count = len(collection.samples) - len(collection.images)
    splits = collection.splits
    if count <= 0 or any(len(set(keys)) < len(keys) for keys in splits.values()):
        return splits, ()
    if splits:
        return splits, (f"{count:,} repeats of images are left out: no split has them",)
    return {"train": collection.samples}, (
        f"{count:,} repeats of images: each file is there once, and the list of the split 'train' "
        "names it as often as the source",
    )
