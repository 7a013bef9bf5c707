# SPDX-License-Identifier: Apache-2.0
"""Annotations of any format, read as one collection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.stores.folder.annotated_folder import YAML_SUFFIXES, annotated_folder
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import (
    LandmarkColumns,
    read_labelled_paths,
    read_landmark_list,
    samples_of_lines,
)
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import key_of, listed_path, numbered_lines, upright_size
from penstock.vision.annotations.voc import read_voc_folder
from penstock.vision.annotations.voc_files import stems_of_split
from penstock.vision.annotations.yolo import read_yolo, read_yolo_data
from penstock.vision.datasets.rules import BadBoxes, BoxCounts, judged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FORMATS", "Collection", "Source", "read_source"]

_KINDS: Final = ("zero_area", "inverted", "outside", "swapped", "clipped")


@dataclass(frozen=True, slots=True)
class Source:
    """Annotations that are converted.

    Attributes:
        path: The folder or the file.
        form: One of `FORMATS`; None finds it out, where the path says so.
        options: Arguments of its reader: `split` and `origin` of VOC, `split` and `polygons` of
            YOLO, all of `LandmarkColumns` and `root` of landmark lists, `root` and `separator` of
            image lists.
    """

    path: str | Path
    form: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def checked_form(self) -> str:
        """Return its format, found out if need be; raises as `convert` does."""
        form = self.form or _form_of(Path(self.path))
        if form not in FORMATS:
            raise ConfigError(f"the format is one of {', '.join(FORMATS)}, not {form!r}.")
        return form

    def takes(self, option: str) -> bool:
        """Return whether its format has an option; raises as `convert` does."""
        return option in _READERS[self.checked_form()].options


@dataclass(frozen=True, slots=True)
class Collection:
    """Annotated images.

    Attributes:
        images: In their order.
        splits: Keys of the images of each split, in the split's order.
        class_names: By their numbers; empty where they are numbered by their sorted names.
        samples: Keys of the samples in their order, where some images are several; else empty.
    """

    images: tuple[AnnotatedImage, ...]
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()

    @property
    def sampled_images(self) -> tuple[AnnotatedImage, ...]:
        """The image of each sample."""
        if not self.samples:
            return self.images
        by_key = {image.key: image for image in self.images}
        return tuple(by_key[key] for key in self.samples)


def read_source(source: Source, bad_boxes: BadBoxes) -> tuple[Collection, BoxCounts]:
    """Return what a source holds, and what was found about its boxes.

    Raises:
        ConfigError: its format or `bad_boxes` is unknown, or the format has no such option.
        StoreError: it cannot be read; a box is bad, and `bad_boxes` is "raise".
    """
    form = source.checked_form()
    options, read = _READERS[form]
    for name in sorted(source.options.keys() - set(options)):
        has = ", ".join(options) or "none"
        raise ConfigError(f"{form} has no option {name!r}; it has {has}.")
    collection = read(Path(source.path), dict(source.options))
    return _settled(collection, bad_boxes, _added_px(form, source.options))


def _form_of(path: Path) -> str:
    """Return the format of a file or folder; the images of a folder need not be there."""
    if not path.exists():
        raise StoreError(f"{path} is not there.")
    suffixes = {path.suffix.lower()}
    is_folder = path.is_dir()
    if is_folder:
        found = annotated_folder(path)
        if found is not None and found.is_read_as_folder:
            return found.form
        names = {child.name for child in path.iterdir()}
        if names & {"Annotations", "annotations"}:
            return "voc"
        suffixes = {Path(name).suffix.lower() for name in names}
    if suffixes & set(YAML_SUFFIXES):
        return "yolo"
    if ".xml" in suffixes:
        return "voc" if is_folder else "imglab"
    if is_folder:
        raise StoreError(
            f"{path} is no data set of a form that is known here: it has neither 'Annotations', "
            "nor a YAML file, nor 'images' and 'labels', nor XML files."
        )
    raise ConfigError(
        f"{path} may be a list of landmarks or of images with a class: name the format, "
        "'landmarks' or 'image-list'."
    )


def _read_voc(path: Path, options: dict[str, Any]) -> Collection:
    images = tuple(read_voc_folder(path, **options))
    if options.get("split") is not None:
        return Collection(images, {options["split"]: tuple(image.key for image in images)})
    known = {image.key for image in images}
    splits = {}
    for file in sorted((path / "ImageSets" / "Main").glob("*.txt")):
        lines = [line for _, line in numbered_lines(file)]
        if any(len(line.split()) > 1 and line not in known for line in lines):
            continue  # which images have a class: the annotations say so
        keys = tuple(stems_of_split(path, file.stem, known))
        absent = next((key for key in keys if key not in known), None)
        if absent is not None:
            raise StoreError(f"{file} names {absent!r}, which has no annotation.")
        splits[file.stem] = keys
    return Collection(images, splits)


def _read_yolo(path: Path, options: dict[str, Any]) -> Collection:
    wanted = options.pop("split", None)
    images: list[AnnotatedImage] = []
    splits: dict[str, tuple[str, ...]] = {}
    class_names: tuple[str, ...] = ()
    for name in read_yolo_data(path).splits if wanted is None else [wanted]:
        of_split, of_classes = read_yolo(path, name, **options)
        class_names = max(class_names, of_classes, key=len)
        known = {image.path for image in images}  # one that is in two splits is no repeat
        images += [image for image in of_split if image.path not in known]
        splits[name] = tuple(image.key for image in of_split)
    if not images:
        raise StoreError(f"{path} names no images.")
    return Collection(tuple(images), splits, class_names)


def _read_imglab(path: Path, options: dict[str, Any]) -> Collection:
    return Collection(tuple(read_imglab(path, **options)))


def _read_landmarks(path: Path, options: dict[str, Any]) -> Collection:
    return Collection(tuple(samples_of_lines(read_landmark_list(path, **options))))


def _read_image_list(path: Path, options: dict[str, Any]) -> Collection:
    folder = Path(options.get("root") or path.parent)
    images = []
    for number, text, label in read_labelled_paths(path, options.get("separator")):
        source = f"{path}, line {number}"
        try:
            place = listed_path(text, folder)
        except ValueError as error:
            raise StoreError(f"cannot read {source}: {error}.") from error
        objects = (AnnotatedObject(label),)
        images.append(AnnotatedImage(place, key_of(text), None, None, objects, source))
    return Collection(tuple(samples_of_lines(images)))


class _Reader(NamedTuple):
    options: tuple[str, ...]
    read: Callable[[Path, dict[str, Any]], Collection]


_READERS: Final = {
    "voc": _Reader(("split", "origin"), _read_voc),
    "imglab": _Reader((), _read_imglab),
    "yolo": _Reader(("split", "polygons"), _read_yolo),
    "landmarks": _Reader((*(f.name for f in fields(LandmarkColumns)), "root"), _read_landmarks),
    "image-list": _Reader(("root", "separator"), _read_image_list),
}
FORMATS: Final = tuple(_READERS)
"""The formats of annotations that are read and written, by their names."""


def _added_px(form: str, options: Mapping[str, Any]) -> int:
    """Return what a box's side has here more than in the file's own numbers: see `judged`."""
    if form == "voc":
        return int(options.get("origin", 1))
    is_corners = options.get("box_format", "xyxy") == "xyxy"
    return int(form == "landmarks" and options.get("origin") == 1 and is_corners)


def _settled(
    collection: Collection, policy: BadBoxes, added_px: int
) -> tuple[Collection, BoxCounts]:
    """Return a collection whose bad boxes `policy` has treated; the others keep all digits."""
    images = collection.images
    objects = [list(image.objects) for image in images]
    places = [
        (row, number)
        for row, of_image in enumerate(objects)
        for number, found in enumerate(of_image)
        if found.box_xyxy_px is not None and all(map(math.isfinite, found.box_xyxy_px))
    ]
    sizes = {row: _size_px(images[row]) for row in dict.fromkeys(row for row, _ in places)}
    sizes_px = np.array([sizes[row] for row, _ in places], np.int64).reshape(-1, 2)
    boxes = np.array([objects[row][n].box_xyxy_px for row, n in places], np.float64).reshape(-1, 4)
    found = judged(boxes, sizes_px, policy, added_px=added_px)
    bad = np.flatnonzero(found.is_bad).tolist()
    if policy == "raise" and bad:
        row, n = places[bad[0]]
        box = ", ".join(f"{side:g}" for side in objects[row][n].box_xyxy_px or ())
        raise StoreError(
            f"{len(bad):,} bad box(es). The first, ({box}) in 0-based half-open pixels, of a "
            f"{objects[row][n].class_name or 'nameless'!r} in "
            f"{images[row].source or images[row].path}, is {found.kinds_of(bad[0])}. Correct the "
            "files, or choose bad_boxes 'keep', 'fix' or 'drop' (--bad-boxes)."
        )
    total, dropped = sum(map(len, objects)), int((~found.is_kept).sum())
    counts = BoxCounts(
        total=total,
        kept=total - dropped,
        dropped=dropped,
        unchecked=int((sizes_px == 0).any(axis=1).sum()),
        **{kind: int(getattr(found, kind).sum()) for kind in _KINDS},
    )
    if policy in ("keep", "raise") or not bad:
        return collection, counts
    for k in reversed(bad):  # from the last one: the numbers of those before it stay
        row, n = places[k]
        left, top, right, bottom = found.boxes[k].tolist()
        mended = replace(objects[row][n], box_xyxy_px=(left, top, right, bottom))
        objects[row][n : n + 1] = [mended] if found.is_kept[k] else []
    settled = (replace(i, objects=tuple(o)) for i, o in zip(images, objects, strict=True))
    return replace(collection, images=tuple(settled)), counts


def _size_px(image: AnnotatedImage) -> tuple[int, int]:
    """Return height and width of the image that was annotated; zeros if they are not known."""
    if image.width_px and image.height_px:
        return image.height_px, image.width_px
    try:
        return upright_size(image.path)
    except (OSError, ValueError):  # it may be elsewhere; the writers that need it raise
        return 0, 0
