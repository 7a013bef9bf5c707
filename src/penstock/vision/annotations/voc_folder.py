# SPDX-License-Identifier: Apache-2.0
"""`VOCFolderStore`: the images of a Pascal VOC folder with the text of their annotations.

Reference:
    Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.opening import MAX_FILE_BYTES, MAX_TREE_BYTES, read_annotation
from penstock.stores.folder.listing import VOC, Listing, cannot_list, scan
from penstock.stores.folder.store import FolderStore
from penstock.stores.index import labels_from
from penstock.stores.records import EncodedImage, Record
from penstock.vision.annotations.voc import voc_root
from penstock.vision.annotations.voc_files import stems_of_split, warn_of_images_alone, xml_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["VOCFolderStore"]


class VOCFolderStore(FolderStore):
    """Images of `JPEGImages/` with their annotations in `Annotations/`.

    A sample is (image, the XML as text), a key NAME of `Annotations/NAME.xml`, a label the tuple of
    its objects' classes. Boxes are not looked at. Class names are those of all annotations,
    whatever the split: a class has the same number in each.

    Concurrency:
        Any thread or process. Nothing is held open.
    """

    def __init__(
        self, path: str | Path, *, split: str | None = None, max_file_size: int = MAX_FILE_BYTES
    ) -> None:
        """Name the folder; it is listed at first use.

        Args:
            path: The folder.
            split: `ImageSets/Main/SPLIT.txt` names the images and their order, some perhaps several
                times; None takes all that have annotations, sorted.
            max_file_size: Bytes of the largest image that is read.
        """
        super().__init__(path, max_file_size=max_file_size, layout="classes" if split else "auto")
        self._split = split

    def _listed(self) -> Listing:
        images = _images_by_stem(self.path)
        names = _names_by_stem(self.path)
        if self._split is None:
            keys = sorted(names)
            warn_of_images_alone(self.path / "JPEGImages", images.keys() - names.keys())
        else:
            keys = stems_of_split(self.path, self._split, names)
            absent = [key for key in keys if key not in names]
            if absent:
                raise StoreError(
                    f"the split {self._split!r} of {self.path} names {len(absent)} image(s) "
                    f"without annotations: Annotations/{absent[0]}.xml is not there."
                )
        class_names = sorted({name for of_image in names.values() for name in of_image})
        class_of = {name: number for number, name in enumerate(class_names)}
        return Listing(
            PackedList(keys),
            # What has no image is called .jpg: reading it says which file is missing.
            PackedList(f"JPEGImages/{images.get(key, key + '.jpg')}" for key in keys),
            np.full(len(keys), VOC, np.uint8),
            labels_from([tuple(class_of[name] for name in names[key]) for key in keys]),
            tuple(class_names),
        )

    def own_files(self) -> tuple[str, Iterable[str]]:
        """As in `Store`; annotations are among them."""
        return os.fspath(self.path), self._paths()

    def _paths(self) -> Iterator[str]:
        for path, kind in zip(self._listing.paths, self._listing.kinds.tolist(), strict=True):
            yield path
            if kind == VOC:
                yield _annotation_path(path)

    def _record(self, position: int, data: bytes) -> Record:
        if self._listing.kinds[position] != VOC:  # of a folder that was packed with an index
            return super()._record(position, data)
        path = self.path / _annotation_path(self._listing.paths[position])
        if not path.exists():
            image = self.file_of(position)
            raise self._missing(os.fspath(path), f" It is the annotation of {image}.")
        try:
            xml = xml_text(read_annotation(path, MAX_TREE_BYTES))
        except ValueError as error:
            raise StoreError(f"cannot read {path}: {error}.") from error
        sample = EncodedImage(data), xml
        return Record(self.keys[position], self.index.label_of(position), sample)

    def _partner_of(self, position: int) -> str:
        annotation = self.path / _annotation_path(self._listing.paths[position])
        return f" Its annotation is {annotation}."


def _annotation_path(image_path: str) -> str:
    name = image_path.rpartition("/")[2]
    return f"Annotations/{os.path.splitext(name)[0]}.xml"


def _images_by_stem(root: Path) -> dict[str, str]:
    images: dict[str, str] = {}
    for name in scan(os.fspath(root / "JPEGImages"))[1]:
        stem = os.path.splitext(name)[0]
        if stem in images:
            raise StoreError(
                f"{root / 'JPEGImages'} has {images[stem]!r} and {name!r}: which of them is "
                f"annotated by {stem}.xml? Move one away."
            )
        images[stem] = name
    return images


def _names_by_stem(root: Path) -> dict[str, list[str]]:
    folder = root / "Annotations"
    try:
        files = [name for name in os.listdir(folder) if name.endswith(".xml")]
    except OSError as error:
        raise cannot_list(error) from error
    found = {}
    for name in files:
        try:
            objects = voc_root(read_annotation(folder / name, MAX_TREE_BYTES)).findall("object")
            names = [(item.findtext("name") or "").strip() for item in objects]
            if "" in names:
                raise ValueError(f"object {names.index('')} has no name")
        except ValueError as error:
            raise StoreError(f"cannot read {folder / name}: {error}.") from error
        found[name.removesuffix(".xml")] = names
    return found
