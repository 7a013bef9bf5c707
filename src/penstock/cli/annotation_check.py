# SPDX-License-Identifier: Apache-2.0
"""Annotations as `penstock check` reads them: which are damaged, and which lack their image."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.decoding import Broken, iter_files
from penstock.cli.reasons import reason_of
from penstock.errors import StoreError
from penstock.opening import MAX_TREE_BYTES, read_file
from penstock.stores.folder.annotated_folder import YAML_SUFFIXES, annotated_folder, xml_root
from penstock.stores.folder.listing import IMAGE_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.vision.annotations.yolo import Labels, YoloData

__all__ = ["AnnotationFindings", "check_annotated_file", "check_annotations"]


@dataclass
class AnnotationFindings:
    """What a check has found about annotations.

    Attributes:
        num_files: Annotation files that were read.
        broken: Those that are damaged, and the images of others that are not there.
        images: Images that they name and that are there.
    """

    num_files: int = 0
    broken: list[Broken] = field(default_factory=list)
    images: set[str] = field(default_factory=set)

    def add(self, path: str | Path, reason: str) -> None:
        """Add a file that is broken."""
        self.broken.append(Broken(str(path), reason))


def check_annotations(
    folder: Path, images: Iterable[str], xml: Iterable[str]
) -> AnnotationFindings:
    """Return what is wrong with the annotations of a folder, and of those below it with images.

    Args:
        folder: Where files were looked for.
        images: Paths of all images that were found there.
        xml: Paths of all XML files.

    Raises:
        StoreError: a folder cannot be listed.
    """
    findings = AnnotationFindings()
    with_images = {os.path.dirname(image) for image in images}
    roots: list[str] = []
    for place in sorted({os.fspath(folder), *_between(with_images, os.fspath(folder))}):
        found = None if _is_below(place, roots) else annotated_folder(Path(place))
        if found is None or not found.is_read_as_folder:
            continue
        roots.append(place)
        if found.form == "yolo":
            _check_yolo(found.root, findings)
        elif found.images is not None:
            _check_voc(found.root, found.annotations, found.images, findings)
    beside: dict[str, list[str]] = {}
    for file in sorted(xml):
        if _is_below(file, roots):
            continue
        place, name = os.path.split(file)
        root = xml_root(file)
        if root == "dataset":
            _check_listed(Path(file), {}, findings)
        elif root == "annotation" and place in with_images:  # NAME.xml beside NAME.jpg
            beside.setdefault(place, []).append(name)
    for place, names in beside.items():
        _check_voc_files(Path(place), Path(place), names, findings)
    return findings


def _between(places: Iterable[str], folder: str) -> set[str]:
    """Return the folders between `folder` and each of `places`, without these."""
    found: set[str] = set()
    for place in places:
        above = os.path.dirname(place)
        while len(above) > len(folder) and above not in found:
            found.add(above)
            above = os.path.dirname(above)
    return found


def _is_below(path: str, roots: Iterable[str]) -> bool:
    return any(path.startswith(os.path.join(root, "")) for root in roots)


def check_annotated_file(path: Path, columns: Mapping[str, Any]) -> AnnotationFindings:
    """Return what is wrong with one file of annotations: VOC's or imglab's XML, a YAML, a list.

    Args:
        path: The file.
        columns: Of a landmark list.

    Raises:
        ConfigError: a column is for a file of another kind.
    """
    findings = AnnotationFindings()
    if path.suffix.lower() in YAML_SUFFIXES:
        _check_yolo(path, findings)
    elif path.suffix.lower() == ".xml" and xml_root(path) != "dataset":
        found = annotated_folder(path.parent.parent)
        images = path.parent if found is None or found.images is None else found.images
        _check_voc_files(path.parent, images, [path.name], findings)
    else:
        _check_listed(path, columns, findings)
    return findings


def _check_listed(path: Path, columns: Mapping[str, Any], findings: AnnotationFindings) -> None:
    """Check a file that has the annotations of many images: imglab's, or a list."""
    from penstock.cli.sources import described_dataset

    findings.num_files += 1
    try:
        dataset = described_dataset(str(path), None, columns, bad_boxes="keep")
    except StoreError as error:
        findings.add(path, _said(error, path))
        return
    assert dataset is not None  # the suffix says what it is
    _check_images(map(dataset.describe, range(len(dataset))), path, findings)


def _said(error: StoreError, file: Path) -> str:
    """Return what an error says, without the name of its file."""
    return reason_of(error).removeprefix("cannot read ").removeprefix(str(file)).lstrip(":, ")


def _check_images(
    images: Iterable[str], named_in: Path, findings: AnnotationFindings, how: str = "listed"
) -> None:
    for image in dict.fromkeys(images):
        if os.path.lexists(image):  # a link that leads nowhere is an image that cannot be decoded
            findings.images.add(image)
        else:
            findings.add(image, f"is not there, and is {how} in {named_in}")


def _check_voc(root: Path, annotations: Path, images: Path, findings: AnnotationFindings) -> None:
    from penstock.vision.annotations.voc_folder import stems_of_split

    names = sorted(_below(annotations, (".xml",)))
    _check_voc_files(annotations, images, names, findings)
    known = {os.path.splitext(name)[0] for name in names}
    for file in sorted((root / "ImageSets" / "Main").glob("*.txt")):
        try:
            absent = [s for s in stems_of_split(root, file.stem, known) if s not in known]
        except StoreError as error:
            findings.add(file, _said(error, file))
            continue
        if absent:
            findings.add(file, f"{len(absent):,} of its images have no annotation: {absent[0]!r}")


def _check_voc_files(
    annotations: Path, images: Path, names: Sequence[str], findings: AnnotationFindings
) -> None:
    from penstock.vision.annotations.voc import read_voc, voc_root

    of_stem = {os.path.splitext(name)[0]: name for name in _below(images, IMAGE_SUFFIXES)}
    for name in names:
        file, stem, said = annotations / name, os.path.splitext(name)[0], ""
        findings.num_files += 1
        try:
            data = read_file(file, MAX_TREE_BYTES, remedy="split it")
            read_voc(data, path=images / stem, key=stem)
            said = (voc_root(data).findtext("filename") or "").strip().replace("\\", "/")
        except (OSError, ValueError) as error:
            findings.add(file, reason_of(error))
        image = of_stem.get(stem, "")
        by_name = os.path.join(os.path.dirname(stem), said.rpartition("/")[2])
        if not image and said and os.path.lexists(images / by_name):
            image = by_name
        absent = stem + (os.path.splitext(said)[1] or ".jpg")
        _check_images([str(images / (image or absent))], file, findings, "annotated")


def _below(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return paths of visible files below a folder, from there on."""
    found = (os.path.relpath(path, folder) for path in iter_files(folder))
    visible = (path for path in found if not os.path.basename(path).startswith("."))
    return [path for path in visible if path.lower().endswith(suffixes)]


def _check_yolo(place: Path, findings: AnnotationFindings) -> None:
    from penstock.vision.annotations.yolo import Labels, files_of_split, label_file, read_yolo_data

    try:
        data = read_yolo_data(place)
    except StoreError as error:
        findings.add(place, _said(error, place))
        return
    labels = Labels(data.class_names, data.num_landmarks, data.num_values, polygons="box")
    images: dict[Path, Path] = {}
    for split in data.splits:
        try:
            files = files_of_split(data, split)
        except StoreError as error:
            findings.add(data.source, _said(error, data.source))
            continue
        images |= {label_file(path): path for path, _ in files}
    _check_images(map(str, images.values()), data.source, findings)
    for file in images:
        if os.path.isfile(file):
            _check_labels(file, labels, findings)
    for file in sorted(_label_files(data, images) - images.keys()):
        findings.num_files += 1
        findings.add(file, "is of no image: none is called like it in the folder of images")


def _label_files(data: YoloData, known: Iterable[Path]) -> set[Path]:
    """Return the text files in folders called labels, where those of the images lie."""
    folders = {file.parent for file in known if "labels" in file.parts}
    folders.add(data.root / "labels")
    below = {path for folder in folders if folder.is_dir() for path in folder.rglob("*.txt")}
    return {path for path in below if path.name != "classes.txt" and path.name[0] != "."}


def _check_labels(file: Path, labels: Labels, findings: AnnotationFindings) -> None:
    """Check a label file. Its numbers are relative, so the image's size does not matter."""
    from penstock.vision.annotations.reading import numbered_lines
    from penstock.vision.annotations.yolo import read_label_line

    findings.num_files += 1
    wrong = []
    try:
        for number, line in numbered_lines(file):
            try:
                read_label_line(line, labels, 1, 1)
            except ValueError as error:
                wrong.append(f"line {number}: {reason_of(error)}")
    except StoreError as error:
        wrong.append(_said(error, file))
    if wrong:
        more = f"; and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
        findings.add(file, wrong[0] + more)
