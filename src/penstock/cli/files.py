# SPDX-License-Identifier: Apache-2.0
"""Files below a folder: those that are passed over, and annotations and what is wrong with them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree.ElementTree import Element

from penstock.cli.check import Broken
from penstock.cli.reasons import reason_of
from penstock.errors import StoreError
from penstock.lines import say
from penstock.opening import MAX_TREE_BYTES, read_file
from penstock.stores.folder.annotated_folder import FORM_OF_SUFFIX, annotated_folder, xml_root
from penstock.stores.folder.listing import (
    IMAGE_SUFFIXES,
    INDEX_NAME,
    is_system_folder,
    raise_unlisted,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_UNREAD: Final = (".avif", ".gif", ".heic", ".jp2", ".jxl", ".arrow", ".lmdb", ".parquet", ".tar")
_NUM_SHOWN: Final = 3  # names of files that are passed over


def iter_files(folder: Path) -> Iterator[str]:
    """Yield the files below a folder, broken links and pipes included, in no particular order.

    Links to folders are followed, as ImageFolder does it; hidden and system folders are left out.
    """
    entered = set()
    for place, subfolders, names in os.walk(folder, onerror=raise_unlisted, followlinks=True):
        status = os.stat(place)
        if (identity := (status.st_dev, status.st_ino)) in entered:
            subfolders.clear()
            continue
        entered.add(identity)
        # Sorted: which of two links to one folder gives the paths is always the same.
        subfolders[:] = sorted(name for name in subfolders if not is_system_folder(name))
        yield from (os.path.join(place, name) for name in names)


def is_passed_over(path: str) -> bool:
    """Return whether a file is an image of a format that is not read, or a store."""
    return path.lower().endswith(_UNREAD)


def passed_over_text(paths: Iterable[str], folder: Path) -> str:
    """Return a line that counts files and names the first; "" if there are none.

    Example:
        >>> passed_over_text(["a/1.gif", "a/2.avif", "a/3.gif"], Path("a"))
        '3 files not looked at: 1.gif, 2.avif, 3.gif'
    """
    names = sorted(os.path.relpath(path, folder) for path in paths)
    if not names:
        return ""
    shown = ", ".join([*names[:_NUM_SHOWN], *["…"] * (len(names) > _NUM_SHOWN)])
    return f"{len(names):,} file{'s' * (len(names) > 1)} not looked at: {shown}"


def say_passed_over(src: str) -> None:
    """Say on stderr which files of a folder are passed over, if SRC is a folder of files."""
    from penstock.cli.sources import is_plain_path

    path = Path(src)
    if not is_plain_path(src) or not path.is_dir() or (path / INDEX_NAME).exists():
        return
    if text := passed_over_text(filter(is_passed_over, iter_files(path)), path):
        say(text, err=True)


@dataclass
class Annotations:
    """What a check has found about annotations."""

    num_files: int = 0  # that were read
    broken: list[Broken] = field(default_factory=list)  # and images that are not there
    images: set[str] = field(default_factory=set)  # that are named and there
    pictures: dict[Path, dict[str, str]] = field(default_factory=dict)  # of folders of VOC's

    def add(self, path: Path, error: Exception | str) -> None:
        """Add a file that is broken."""
        said = error if isinstance(error, str) else reason_of(error)
        said = said.removeprefix("cannot read ").removeprefix(str(path)).lstrip(":, ")
        self.broken.append(Broken(str(path), said))

    def add_images(self, images: Iterable[str], named_in: Path) -> None:
        """Add images that a file names."""
        for image in dict.fromkeys(images):
            if os.path.lexists(image):  # a dead link is an image that cannot be decoded
                self.images.add(image)
            else:
                self.add(Path(image), f"is not there, and is named in {named_in}")


def check_annotations(folder: Path, images: Sequence[str], xml: Iterable[str]) -> Annotations:
    """Return what is wrong with annotations in a folder that has these images and XML files."""
    findings = Annotations()
    with_images = {os.path.dirname(image) for image in images}
    above = {place for inner in with_images for place in Path(inner).parents}
    roots: list[Path] = []
    for place in sorted({folder, *(place for place in above if folder in place.parents)}):
        found = None if any(root in place.parents for root in roots) else annotated_folder(place)
        if found is None or not (found.is_read_as_folder or found.form == "voc"):
            continue
        roots.append(place)
        check_folder = _check_yolo if found.form == "yolo" else _check_voc
        check_folder(found.root, findings)
    for file in map(Path, sorted(xml)):
        if any(root in file.parents for root in roots):
            continue
        root = xml_root(file)
        if root == "dataset":
            _check_listed(file, {}, findings)
        elif root == "annotation" and str(file.parent) in with_images:  # NAME.xml beside NAME.jpg
            findings.add_images([_check_xml(file, file.stem, file.parent, findings)], file)
    return findings


def check_annotated_file(path: Path, columns: Mapping[str, Any]) -> Annotations:
    """Return what is wrong with a file of annotations; a list has `columns`."""
    findings = Annotations()
    if FORM_OF_SUFFIX.get(path.suffix.lower()) == "yolo":
        _check_yolo(path, findings)
    else:
        _check_listed(path, columns, findings)
    return findings


def _check_listed(path: Path, columns: Mapping[str, Any], findings: Annotations) -> None:
    """Check a file that has the annotations of many images: imglab's, COCO's, or a list."""
    from penstock.cli.sources import described_dataset

    findings.num_files += 1
    try:
        dataset = described_dataset(str(path), None, columns, bad_boxes="keep")
    except StoreError as error:
        findings.add(path, error)
        return
    assert dataset is not None  # the suffix says what it is
    findings.add_images(map(dataset.describe, range(len(dataset))), path)


def _check_voc(root: Path, findings: Annotations) -> None:
    from penstock.vision.annotations.voc_folder import absent_images, stems_of_split, voc_places

    annotations, images = voc_places(root)
    files = [Path(file) for file in iter_files(annotations) if file.lower().endswith(".xml")]
    files = sorted(file for file in files if not file.name.startswith("."))
    known = {file.relative_to(annotations).with_suffix("").as_posix(): file for file in files}
    found = {file: _check_xml(file, stem, images, findings) for stem, file in known.items()}
    if (error := absent_images({str(f): Path(image) for f, image in found.items()})) is not None:
        findings.add(images, error)
        found.clear()
    for file, image in found.items():
        findings.add_images([image], file)
    for file in sorted((root / "ImageSets" / "Main").glob("*.txt")):
        try:
            absent = [s for s in stems_of_split(root, file.stem, set(known)) if s not in known]
        except StoreError as error:
            findings.add(file, error)
            continue
        if absent:
            findings.add(file, f"{len(absent):,} of its images have no annotation: {absent[0]!r}")


def _check_xml(file: Path, stem: str, images: Path, findings: Annotations) -> str:
    """Check a file of VOC's; return the path of its image, which need not be there."""
    from penstock.vision.annotations.reading import files_below
    from penstock.vision.annotations.voc import voc_image, voc_root
    from penstock.vision.annotations.voc_folder import picture_of, pictures_below

    if images not in findings.pictures:
        try:
            findings.pictures[images] = pictures_below(images)
        except StoreError as error:  # of two images of one name: any of them will do here
            findings.add(images, error)
            below = files_below(images, IMAGE_SUFFIXES)
            findings.pictures[images] = {os.path.splitext(path)[0]: path for path in below}
    findings.num_files += 1
    element = Element("annotation")
    try:
        element = voc_root(read_file(file, MAX_TREE_BYTES, remedy="split it"))
        voc_image(element, images, stem, 1, "")
    except (OSError, ValueError) as error:
        findings.add(file, error)
    return str(images / picture_of(element, stem, findings.pictures[images]))


def _check_yolo(place: Path, findings: Annotations) -> None:
    from penstock.vision.annotations.yolo import files_of_split, label_file, read_yolo_data

    try:
        data = read_yolo_data(place)
    except StoreError as error:
        findings.add(place, error)
        return
    labels = replace(data.labels, polygons="box")
    images: dict[Path, Path] = {}
    for split in data.splits:
        try:
            images |= {label_file(path): path for path, _ in files_of_split(data, split)}
        except StoreError as error:
            findings.add(data.source, error)
    findings.add_images(map(str, images.values()), data.source)
    folders = {file.parent for file in images if "labels" in file.parts} | {data.root / "labels"}
    below = {path for folder in folders for path in folder.rglob("*.txt")}
    below = {path for path in below if path.name != "classes.txt" and path.name[0] != "."}
    for file in sorted(below | set(filter(os.path.isfile, images))):
        findings.num_files += 1
        if file in images:
            _check_labels(file, labels, findings)
        else:
            findings.add(file, "is of no image: none is called like it in the folder of images")


def _check_labels(file: Path, labels: Any, findings: Annotations) -> None:  # noqa: ANN401
    """Check a label file. Its numbers are relative, so the image's size does not matter."""
    from penstock.vision.annotations.reading import numbered_lines
    from penstock.vision.annotations.yolo import read_label_line

    try:
        for number, line in numbered_lines(file):
            try:
                read_label_line(line, labels, 1, 1)
            except ValueError as error:
                findings.add(file, f"line {number}: {reason_of(error)}")
                return
    except StoreError as error:
        findings.add(file, error)
