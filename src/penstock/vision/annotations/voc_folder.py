# SPDX-License-Identifier: Apache-2.0
"""Folders of Pascal VOC: `Annotations/`, `JPEGImages/`, and splits in `ImageSets/Main`.

Reference:
    Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.lines import counted
from penstock.opening import MAX_FILE_BYTES, MAX_TREE_BYTES, read_annotation
from penstock.stores.folder.annotated_folder import annotated_folder
from penstock.stores.folder.listing import IMAGE_SUFFIXES, VOC, Listing, scan
from penstock.stores.folder.store import FolderStore
from penstock.stores.index import labels_from
from penstock.stores.records import EncodedImage, Record
from penstock.vision.annotations.reading import files_below, key_of, read_text, reading, xml_text
from penstock.vision.annotations.voc import voc_image, voc_root
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping
    from xml.etree.ElementTree import Element

    from penstock.vision.annotations.model import AnnotatedImage

_FOLDERS_SHOWN: Final = 5  # in an error
_USUAL: Final = (("Annotations", "JPEGImages"), ("annotations", "images"))


def read_voc_folder(
    root: str | Path,
    split: str | None = None,
    *,
    origin: int = 1,
    annotations: str | Path | None = None,
    images: str | Path | None = None,
) -> list[AnnotatedImage]:
    """Return the images of a folder that have an annotation.

    The folder holds `Annotations/NAME.xml` and `JPEGImages/NAME.*`, or `annotations/` and
    `images/`, or two subfolders of other names, or NAME.xml beside NAME.jpg; or the two that are
    given. See `picture_of` on which image goes with an annotation. Images without an annotation
    are left out, with a warning.

    Raises:
        StoreError: there are no annotations, or no such split; one is missing or damaged; two
            images have one name. The message names the file and the object.
    """
    root = Path(root)
    annotations, images = voc_places(root, annotations, images)
    files = _by_stem(annotations, (".xml",))
    if not files:
        raise StoreError(f"{annotations} has no XML files: it is no folder of VOC annotations.")
    pictures = pictures_below(images)
    keys = sorted(files) if split is None else keys_of_split(root, split, files)
    found, used = {}, set()
    for key in dict.fromkeys(keys):
        file = annotations / files[key]
        with reading(file):
            element = voc_root(read_annotation(file, MAX_TREE_BYTES))
            picture = picture_of(element, key, pictures)
            used.add(picture)
            found[key] = voc_image(element, images / picture, key, origin, str(file))
    if split is None and not used.isdisjoint(pictures.values()):  # else no name fits at all
        _warn_of_others(images, pictures, used)
    return [found[key] for key in keys]


def voc_places(
    root: Path, annotations: str | Path | None = None, images: str | Path | None = None
) -> tuple[Path, Path]:
    """Return the folders of annotations and of images; those given start from `root`."""
    if annotations is not None and images is not None:
        return root / annotations, root / images
    of_xml, of_images = _usual_places(root, images)
    if images is not None:
        return of_xml, root / images
    return of_xml if annotations is None else root / annotations, of_images


def _usual_places(root: Path, given_images: str | Path | None) -> tuple[Path, Path]:
    """Return the folders that are there: by their usual names, else by what is in them."""
    usual = [(root / xml, root / images) for xml, images in _USUAL if (root / xml).is_dir()]
    for places in usual:
        if places[1].is_dir():
            return places
    if not root.is_dir():
        what = "a file, not a folder" if root.exists() else "not there"
        raise StoreError(f"{root} is {what}: looked for {os.path.abspath(root)}.")
    below = sorted(root.glob("VOCdevkit/*/Annotations"))
    if below:  # torchvision's `root`
        names = ", ".join(str(folder.parent) for folder in below[:_FOLDERS_SHOWN])
        raise StoreError(f"{root} has no Annotations of its own. Name one of these: {names}.")
    found = annotated_folder(root)
    if found is not None and found.form == "voc" and (found.images or given_images):
        return found.annotations, found.images or root
    return usual[0] if usual else (root, root)


def pictures_below(folder: Path) -> dict[str, str]:
    """Return the paths of images below a folder by what they are called without their suffix."""
    return _by_stem(folder, IMAGE_SUFFIXES) if folder.is_dir() else {}


def picture_of(root: Element, key: str, pictures: Mapping[str, str]) -> str:
    """Return the path of an annotation's image, from the folder of images.

    It is the image that is called as the annotation. Without one `<filename>` counts: as a path
    from the folder of images, else its last name, whatever suffix the image has. It is looked up
    among the images, so that it leads to no other file. If none is there, the path is that of the
    missing one.
    """
    said = key_of((root.findtext("filename") or "").strip())
    stem, suffix = os.path.splitext(said)
    if suffix.lower() not in IMAGE_SUFFIXES:
        stem, suffix = said, ".jpg"
    name = stem.rpartition("/")[2]
    for place in (key, stem, f"{key.rpartition('/')[0]}/{name}", name):
        if place in pictures:
            return pictures[place]
    return key + suffix


def absent_images(images: Mapping[str, Path]) -> StoreError | None:
    """Return one error if no image of a data set is there, given by their annotations' files."""
    if not images or any(map(os.path.lexists, images.values())):
        return None
    source, path = next(iter(images.items()))
    folder, has = path.parent, "is not there"
    if folder.is_dir():
        _, names = scan(os.fspath(folder))
        has = f"has {counted(len(names), 'image')}"
        has += f", {names[0]!r} for one" if names else ""
    return StoreError(
        f"none of {counted(len(images), 'annotated image')} is there: {source}, for one, "
        f"needs an image called {path.stem!r}, or as its <filename> says, in {folder}, which "
        f"{has}. Give the folders, from the root or absolute: VOCDetection(root, annotations=..., "
        "images=...)."
    )


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


def _warn_of_others(images: Path, pictures: Mapping[str, str], used: Container[str]) -> None:
    """Warn of images without an annotation."""
    alone = [stem for stem, path in pictures.items() if path not in used]
    if alone:
        warn_user(
            f"{len(alone)} image(s) in {images} have no file in Annotations and are left out: "
            f"{min(alone)!r} is one."
        )


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
        split = self._split
        keys = sorted(files) if split is None else keys_of_split(self.path, split, files)
        classes_of, path_of = {}, {}
        for key, file in files.items():
            with reading(annotations / file):
                element = voc_root(read_annotation(annotations / file, MAX_TREE_BYTES))
                classes_of[key] = _classes_of(element)
                path_of[key] = picture_of(element, key, pictures)
        if split is None:
            _warn_of_others(images, pictures, set(path_of.values()))
        class_names = sorted({name for names in classes_of.values() for name in names})
        number_of = {name: number for number, name in enumerate(class_names)}
        return Listing(
            PackedList(keys),
            PackedList(f"JPEGImages/{path_of[key]}" for key in keys),
            np.full(len(keys), VOC, np.uint8),
            labels_from([tuple(number_of[name] for name in classes_of[key]) for key in keys]),
            tuple(class_names),
        )

    def own_files(self) -> tuple[str, Iterable[str]]:
        """As in `Store`; annotations are among them."""
        listed = zip(self._listing.keys, self._listing.kinds.tolist(), strict=True)
        annotations = (f"Annotations/{key}.xml" for key, kind in listed if kind == VOC)
        return os.fspath(self.path), itertools.chain(self._listing.paths, annotations)

    def _record(self, position: int, data: bytes) -> Record:
        if self._listing.kinds[position] != VOC:  # of a folder that was packed with an index
            return super()._record(position, data)
        path = self.path / f"Annotations/{self.keys[position]}.xml"
        if not path.exists():
            image = self.file_of(position)
            raise self._missing(os.fspath(path), f" It is the annotation of {image}.")
        with reading(path):
            xml = xml_text(read_annotation(path, MAX_TREE_BYTES))
        return Record(self.keys[position], self.index.label_of(position), (EncodedImage(data), xml))

    def _partner_of(self, position: int) -> str:
        return f" Its annotation is {self.path}/Annotations/{self.keys[position]}.xml."


def _classes_of(root: Element) -> list[str]:
    names = [(item.findtext("name") or "").strip() for item in root.findall("object")]
    if "" in names:
        raise ValueError(f"object {names.index('')} has no name")
    return names
