# SPDX-License-Identifier: Apache-2.0
"""Annotations of any form, read as one collection."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError, StoreError
from penstock.stores.folder.annotated_folder import YAML_SUFFIXES, annotated_folder
from penstock.stores.folder.voc import stems_of_split
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import (
    read_labelled_paths,
    read_landmark_list,
    samples_of_lines,
)
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import key_of, listed_path, numbered_lines
from penstock.vision.annotations.voc import read_voc_folder
from penstock.vision.annotations.yolo import read_yolo, read_yolo_data

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FORMATS", "Collection", "Source", "read_source"]

FORMATS: Final = ("voc", "imglab", "yolo", "landmarks", "image-list")
"""The forms of annotations that are read and written, by their names."""
_COLUMNS: Final = (
    "num_landmarks", "layout", "has_box", "box_format", "box_at", "classes", "missing", "origin",
    "root", "separator",
)  # fmt: skip
_OPTIONS: Final = {
    "voc": ("split", "origin"),
    "imglab": (),
    "yolo": ("split", "polygons"),
    "landmarks": _COLUMNS,
    "image-list": ("root", "separator"),
}


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

    def takes(self, option: str) -> bool:
        """Return whether its form has an option; raises as `read_source` does."""
        return option in _OPTIONS[_checked_form(self)]

    def checked_form(self) -> str:
        """Return its form, found out if need be; raises as `read_source` does."""
        return _checked_form(self)


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


def read_source(source: Source) -> Collection:
    """Return what a source holds.

    Raises:
        ConfigError: its form is unknown, or has no such option.
        StoreError: it cannot be read.
    """
    form = _checked_form(source)
    unknown = sorted(set(source.options) - set(_OPTIONS[form]))
    if unknown:
        has = ", ".join(_OPTIONS[form]) or "none"
        raise ConfigError(f"{form} has no option {unknown[0]!r}; it has {has}.")
    return _READERS[form](Path(source.path), dict(source.options))


def _checked_form(source: Source) -> str:
    form = source.form or _form_of(Path(source.path))
    if form not in FORMATS:
        raise ConfigError(f"the format is one of {', '.join(FORMATS)}, not {form!r}.")
    return form


def _form_of(path: Path) -> str:
    """Return the form of a file or folder."""
    if path.is_dir():
        return _form_of_folder(path)
    if not path.exists():
        raise StoreError(f"{path} is not there.")
    suffix = path.suffix.lower()
    if suffix in YAML_SUFFIXES:
        return "yolo"
    if suffix == ".xml":
        return "imglab"
    raise ConfigError(
        f"{path} may be a list of landmarks or of images with a class: name the format, "
        "'landmarks' or 'image-list'."
    )


def _form_of_folder(path: Path) -> str:
    """Return the form of a folder; here its images need not be there."""
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
        return "voc"
    raise StoreError(
        f"{path} is no data set of a form that is known here: it has neither 'Annotations', nor a "
        "YAML file, nor 'images' and 'labels', nor XML files."
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
    names = list(read_yolo_data(path).splits) if wanted is None else [wanted]
    images: list[AnnotatedImage] = []
    splits: dict[str, tuple[str, ...]] = {}
    class_names: tuple[str, ...] = ()
    for name in names:
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
    root = options.get("root")
    folder = path.parent if root is None else Path(root)
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


_READERS: Final[dict[str, Callable[[Path, dict[str, Any]], Collection]]] = {
    "voc": _read_voc,
    "imglab": _read_imglab,
    "yolo": _read_yolo,
    "landmarks": _read_landmarks,
    "image-list": _read_image_list,
}
