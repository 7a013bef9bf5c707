# SPDX-License-Identifier: Apache-2.0
"""Collections written in each form, into a folder that is put in its place when it is whole."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from penstock.errors import StoreError
from penstock.opening import open_file
from penstock.stores.folder.listing import IMAGE_SUFFIXES
from penstock.stores.folder.paths import is_image
from penstock.vision.annotations.imglab import write_imglab
from penstock.vision.annotations.lists import LandmarkColumns, write_image_list, write_landmark_list
from penstock.vision.annotations.voc import write_voc
from penstock.vision.annotations.yolo import Labels, label_line, write_yolo_yaml
from penstock.vision.convert.names import names_of
from penstock.vision.convert.splits import has_repeats, one_split_each, splits_with_repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
    from penstock.vision.convert.sources import Collection

__all__ = ["Images", "Target", "landmark_columns", "write_target"]

Images = Literal["reference", "link", "copy"]
_MAGIC_BYTES: Final = 16
_LIST_NAMES: Final = {
    "imglab": "imglab.xml",
    "landmarks": "landmarks.txt",
    "image-list": "images.txt",
}


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


def write_target(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    """Write a collection as `made`, which does not exist yet.

    Returns:
        What to tell the user beside it.

    Raises:
        StoreError: an image is missing, or cannot be written in this form. The message names it.
        OSError: a file cannot be written.
    """
    if not target.is_file:
        made.mkdir()
    if target.form == "voc":
        return _write_voc(collection, target, made)
    if target.form == "yolo":
        return _write_yolo(collection, target, made)
    return _write_list(collection, target, made)


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


def _told(image: AnnotatedImage, write: Callable[[], bytes]) -> bytes:
    """Return what is written of an image; errors name it."""
    try:
        return write()
    except ValueError as error:
        raise StoreError(f"{image.source or image.path} cannot be written: {error}.") from error


def _write_voc(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    names = names_of(collection.images)
    (made / "Annotations").mkdir()
    (made / "JPEGImages").mkdir()
    for image in collection.images:
        name = names[image.key]
        place = made / "JPEGImages" / _file_name(image, names)
        _put_image(image, target, place)
        renamed = replace(image, path=place)
        xml = _told(image, partial(write_voc, renamed, origin=target.origin))
        (made / "Annotations" / f"{name}.xml").write_bytes(xml)
    splits, notes = splits_with_repeats(collection)
    _write_splits(splits, names, made)
    if target.images == "reference":
        return *notes, f"the images are not in it: put them into {target.place / 'JPEGImages'}"
    return notes


def _write_splits(
    splits: Mapping[str, Sequence[str]], names: Mapping[str, str], made: Path
) -> None:
    if not splits:
        return
    folder = made / "ImageSets" / "Main"
    folder.mkdir(parents=True)
    for split, keys in splits.items():
        _check_split(split)
        listed = "".join(f"{names[key]}\n" for key in keys)
        (folder / f"{split}.txt").write_bytes(listed.encode())


def _check_split(split: str) -> None:
    is_plain = split.isprintable() and "/" not in split and "\\" not in split and " " not in split
    if not split or not is_plain or split[0] == "." or len(split) > 100:
        raise StoreError(f"{split!r} is no name for the files of a split.")


def _write_yolo(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    names = names_of(collection.images)
    split_of, left_out = one_split_each(collection)
    for split in dict.fromkeys(split_of.values()):
        _check_split(split)
    class_names = collection.class_names or tuple(
        sorted({found.class_name for i in collection.images for found in i.objects})
    )
    numbers = {name: number for number, name in enumerate(class_names)}
    labels = _labels(collection, class_names)
    for image in collection.images:
        split, name = split_of[image.key], names[image.key]
        _put_image(image, target, made / "images" / split / _file_name(image, names))
        file = made / "labels" / split / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        boxed = [found for found in image.objects if found.box_xyxy_px is not None]
        text = _told(image, partial(_label_text, image, boxed, numbers, labels))
        file.write_bytes(text)
    places = {split: f"images/{split}" for split in split_of.values()}
    splits, notes = splits_with_repeats(collection)
    by_key = {image.key: image for image in collection.images}
    for split in places:
        if has_repeats(splits.get(split, ())):
            files = (f"images/{split}/{_file_name(by_key[key], names)}" for key in splits[split])
            (made / f"{split}.txt").write_text("".join(f"{file}\n" for file in files))
            places[split] = f"{split}.txt"
    data = write_yolo_yaml(
        class_names, places, num_landmarks=labels.num_landmarks, num_values=labels.num_values
    )
    (made / "data.yaml").write_bytes(data)
    why = "some of its images are in another one"
    return *(f"split {split!r} is left out: {why}" for split in left_out), *notes


def _label_text(
    image: AnnotatedImage,
    objects: list[AnnotatedObject],
    numbers: Mapping[str, int],
    labels: Labels,
) -> bytes:
    if image.width_px is None or image.height_px is None:
        raise ValueError("the size of its image is not known, and YOLO's numbers are parts of it")
    size = image.width_px, image.height_px
    lines = [label_line(found, numbers[found.class_name], labels, *size) for found in objects]
    return "".join(f"{line}\n" for line in lines).encode()


def _labels(collection: Collection, class_names: tuple[str, ...]) -> Labels:
    """Return as many landmarks as objects have, and whether visibility has to be written."""
    objects = [found for image in collection.images for found in image.objects]
    counts = {len(found.landmarks_xy_px) for found in objects} - {0}
    count = _same_count(counts)
    points = [point for found in objects for point in found.landmarks_xy_px]
    # Without it "0 0" is a landmark that is not marked; and so would be all of an object's without.
    is_needed = any(found.visibility for found in objects) or any(
        point == (0.0, 0.0) or math.isnan(point[0]) for point in points
    )
    return Labels(class_names, count, 3 if is_needed else 2)


def _same_count(counts: set[int]) -> int:
    if len(counts) > 1:
        few, *_, many = sorted(counts)
        raise StoreError(
            f"some objects have {few} landmarks and some {many}: this form has one number for all."
        )
    return counts.pop() if counts else 0


def _write_list(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    file = made if target.is_file else made / _LIST_NAMES[target.form]
    path_of = _paths_in_list(collection, target, made)
    columns = target.columns
    if target.form == "imglab":
        data = write_imglab(collection.sampled_images, name_of=path_of)
    elif target.form == "image-list":
        data = write_image_list(_labelled(collection, path_of))
    else:
        data = write_landmark_list(collection.sampled_images, columns, name_of=path_of)
    file.write_bytes(data)
    return (f"columns: {_described(columns)}",) if target.form == "landmarks" else ()


def _paths_in_list(
    collection: Collection, target: Target, made: Path
) -> Callable[[AnnotatedImage], str]:
    """Return how the list names an image: from its own folder, with "/"."""
    if target.images == "reference":
        folder = os.path.realpath(target.place.parent)
        return lambda image: os.path.relpath(_with_real_folder(image.path), folder)
    names = names_of(collection.images)
    for image in collection.images:
        _put_image(image, target, made / "images" / _file_name(image, names))
    return lambda image: f"images/{_file_name(image, names)}"


def _with_real_folder(path: Path) -> str:
    """Return a path whose ".." lead where they seem to; a link itself keeps its name."""
    return os.path.join(os.path.realpath(path.parent), path.name)


def _file_name(image: AnnotatedImage, names: Mapping[str, str]) -> str:
    """Return the name of an image file, with the suffix by which folders are listed."""
    suffix = image.path.suffix
    if suffix.lower() not in IMAGE_SUFFIXES:
        known = ", ".join(IMAGE_SUFFIXES)
        raise StoreError(f"{image.source}: {image.path} has no suffix of an image ({known}).")
    return names[image.key] + suffix


def _labelled(
    collection: Collection, path_of: Callable[[AnnotatedImage], str]
) -> list[tuple[str, str]]:
    found = []
    for image in collection.sampled_images:
        names = {o.class_name for o in image.objects if o.class_name}
        if len(names) == 1:
            found.append((path_of(image), names.pop()))
    return found


def landmark_columns(collection: Collection) -> LandmarkColumns:
    """Return columns that hold what all objects of a collection have."""
    objects = [found for image in collection.images for found in image.objects]
    first = objects[0].extra if objects else {}
    named = [name for name in first if all(name in found.extra for found in objects)]
    is_classed = bool(objects) and all(found.class_name for found in objects)
    return LandmarkColumns(
        num_landmarks=_same_count({len(found.landmarks_xy_px) for found in objects} - {0}),
        has_box=any(found.box_xyxy_px is not None for found in objects),
        classes=(*(("class",) if is_classed else ()), *(n for n in named if n != "class")),
    )


def _described(columns: LandmarkColumns) -> str:
    count = columns.num_landmarks or 0
    points = f"x1 .. x{count} y1 .. y{count}"
    if columns.layout == "xyxy":
        points = f"x1 y1 .. x{count} y{count}"
    right = "right bottom" if columns.box_format == "xyxy" else "width height"
    box = [f"left top {right}"] if columns.has_box else []
    middle = [*box, points] if columns.box_at == "before" else [points, *box]
    return " ".join(["path", *(middle if count else box), *columns.classes])
