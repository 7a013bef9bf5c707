# SPDX-License-Identifier: Apache-2.0
"""Folders of Pascal VOC: `Annotations/`, `JPEGImages/`, and splits in `ImageSets/Main`.

Reference:
    Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
"""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.opening import MAX_FILE_BYTES, MAX_TREE_BYTES, read_annotation
from penstock.stores.folder.annotated_folder import annotated_folder
from penstock.stores.folder.listing import IMAGE_SUFFIXES, VOC, Listing
from penstock.stores.folder.store import FolderStore
from penstock.stores.index import labels_from
from penstock.stores.records import EncodedImage, Record
from penstock.vision.annotations.reading import files_below, read_text, reading, xml_text
from penstock.vision.annotations.voc import voc_image, voc_root
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from xml.etree.ElementTree import Element

    from penstock.vision.annotations.model import AnnotatedImage

_FOLDERS_SHOWN: Final = 5  # in an error


def read_voc_folder(
    root: str | Path, split: str | None = None, *, origin: int = 1
) -> list[AnnotatedImage]:
    """Return the images of a folder that have an annotation.

    The folder holds `Annotations/NAME.xml` and `JPEGImages/NAME.*`, or `annotations/` and
    `images/`, or two subfolders of other names, or NAME.xml beside NAME.jpg. An image goes with the
    annotation of its name, whatever `<filename>` says; that counts where no image has the name.
    Images without an annotation are left out, with a warning.

    Raises:
        StoreError: there are no annotations, or no such split; one is missing or damaged; two
            images have one name. The message names the file and the object.
    """
    root = Path(root)
    annotations, images = voc_places(root)
    files = _by_stem(annotations, (".xml",))
    if not files:
        raise StoreError(f"{annotations} has no XML files: it is no folder of VOC annotations.")
    pictures = _by_stem(images, IMAGE_SUFFIXES) if images.is_dir() else {}
    keys = _keys(root, split, images, files, pictures)
    found = {}
    for key in dict.fromkeys(keys):
        file = annotations / files[key]
        with reading(file):
            element = voc_root(read_annotation(file, MAX_TREE_BYTES))
            path = images / _picture(element, key, pictures)
            found[key] = voc_image(element, path, key, origin, str(file))
    return [found[key] for key in keys]


def voc_places(root: Path) -> tuple[Path, Path]:
    """Return the folders of annotations and of images."""
    for of_xml, of_images in (("Annotations", "JPEGImages"), ("annotations", "images")):
        if (root / of_xml).is_dir():
            return root / of_xml, root / of_images
    if not root.is_dir():
        what = "a file, not a folder" if root.exists() else "not there"
        raise StoreError(f"{root} is {what}: looked for {os.path.abspath(root)}.")
    below = sorted(root.glob("VOCdevkit/*/Annotations"))
    if below:  # torchvision's `root`
        names = ", ".join(str(folder.parent) for folder in below[:_FOLDERS_SHOWN])
        raise StoreError(f"{root} has no Annotations of its own. Name one of these: {names}.")
    found = annotated_folder(root)
    if found is not None and found.form == "voc" and found.images is not None:
        return found.annotations, found.images
    return root, root


def _by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Return the paths of files below a folder by what they are called without their suffix."""
    found: dict[str, str] = {}
    for path in files_below(folder, suffixes):
        stem = os.path.splitext(path)[0]
        if stem in found:
            raise StoreError(
                f"{folder} has {found[stem]!r} and {path!r}: which of them is meant by {stem!r}? "
                "Move one away."
            )
        found[stem] = path
    return found


def _keys(
    root: Path,
    split: str | None,
    images: Path,
    files: dict[str, str],
    pictures: dict[str, str],
) -> list[str]:
    """Return the names of the images of a split, or all; warn of images without an annotation."""
    if split is None:
        alone = pictures.keys() - files.keys()
        if alone:
            message = f"{len(alone)} image(s) in {images} have no file in Annotations and are left "
            message += f"out: {min(alone)!r} is one."
            warnings.warn(message, UserWarning, stacklevel=users_level())
        return sorted(files)
    return keys_of_split(root, split, files)


def keys_of_split(root: Path, split: str, names: Container[str]) -> list[str]:
    """Return those of `names` that a split lists; StoreError if it lists others."""
    keys = stems_of_split(root, split, names)
    absent = [key for key in keys if key not in names]
    if absent:
        raise StoreError(
            f"the split {split!r} of {root} names {len(absent)} image(s) without annotations: "
            f"{absent[0]}.xml is not there."
        )
    return keys


def stems_of_split(root: Path, split: str, names: Container[str] = ()) -> list[str]:
    """Return the names in `ImageSets/Main/SPLIT.txt`; StoreError if there is none."""
    folder = root / "ImageSets" / "Main"
    known = sorted(path.stem for path in folder.glob("*.txt"))
    if split not in known:
        has = ", ".join(map(repr, known)) or "none"
        raise StoreError(f"{root} has no split {split!r} in ImageSets/Main; it has {has}.")
    lines = [line.strip() for line in read_text(folder / f"{split}.txt").splitlines()]
    return [line if line in names else line.split()[0] for line in lines if line]


def _picture(root: Element, key: str, pictures: dict[str, str]) -> str:
    """Return the image's path; where there is none, one that says which is missing."""
    if key in pictures:
        return pictures[key]
    said = (root.findtext("filename") or "").strip().replace("\\", "/").rpartition("/")[2]
    by_name = f"{key.rpartition('/')[0]}/{said}".lstrip("/")
    return by_name if pictures.get(os.path.splitext(by_name)[0]) == by_name else f"{key}.jpg"


class VOCFolderStore(FolderStore):
    """Images of `JPEGImages/` with their annotations in `Annotations/`.

    A sample is (image, the XML as text), a key NAME of `Annotations/NAME.xml`, a label the tuple of
    its objects' classes. Boxes are not looked at. Class names are those of all annotations,
    whatever the split: a class has the same number in each.
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
        images, annotations = self.path / "JPEGImages", self.path / "Annotations"
        files, pictures = _by_stem(annotations, (".xml",)), _by_stem(images, IMAGE_SUFFIXES)
        keys = _keys(self.path, self._split, images, files, pictures)
        classes_of = {key: _classes_of(annotations / file) for key, file in files.items()}
        class_names = sorted({name for names in classes_of.values() for name in names})
        number_of = {name: number for number, name in enumerate(class_names)}
        return Listing(
            PackedList(keys),
            # What has no image is called .jpg: reading it says which file is missing.
            PackedList(f"JPEGImages/{pictures.get(key, key + '.jpg')}" for key in keys),
            np.full(len(keys), VOC, np.uint8),
            labels_from([tuple(number_of[name] for name in classes_of[key]) for key in keys]),
            tuple(class_names),
        )

    def own_files(self) -> tuple[str, Iterable[str]]:
        """As in `Store`; annotations are among them."""
        listed = zip(self._listing.paths, self._listing.kinds.tolist(), strict=True)
        annotations = (_annotation_path(path) for path, kind in listed if kind == VOC)
        return os.fspath(self.path), itertools.chain(self._listing.paths, annotations)

    def _record(self, position: int, data: bytes) -> Record:
        if self._listing.kinds[position] != VOC:  # of a folder that was packed with an index
            return super()._record(position, data)
        path = self.path / _annotation_path(self._listing.paths[position])
        if not path.exists():
            image = self.file_of(position)
            raise self._missing(os.fspath(path), f" It is the annotation of {image}.")
        with reading(path):
            xml = xml_text(read_annotation(path, MAX_TREE_BYTES))
        return Record(self.keys[position], self.index.label_of(position), (EncodedImage(data), xml))

    def _partner_of(self, position: int) -> str:
        annotation = self.path / _annotation_path(self._listing.paths[position])
        return f" Its annotation is {annotation}."


def _annotation_path(image_path: str) -> str:
    return f"Annotations/{os.path.splitext(image_path)[0].removeprefix('JPEGImages/')}.xml"


def _classes_of(file: Path) -> list[str]:
    with reading(file):
        objects = voc_root(read_annotation(file, MAX_TREE_BYTES)).findall("object")
        names = [(item.findtext("name") or "").strip() for item in objects]
        if "" in names:
            raise ValueError(f"object {names.index('')} has no name")
    return names
