# SPDX-License-Identifier: Apache-2.0
"""Whether a folder is a data set with annotations, of which kind, and which class reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from penstock.errors import StoreError
from penstock.opening import open_file
from penstock.stores.folder.listing import IMAGE_SUFFIXES, INDEX_NAME, is_system_folder, scan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Form = Literal["voc", "yolo", "imglab", "coco", "landmarks", "image-list"]

FORM_OF_SUFFIX: Final[dict[str, Form]] = {  # of files, by their suffix
    ".yaml": "yolo", ".yml": "yolo", ".xml": "imglab", ".json": "coco",
}  # fmt: skip
_SUFFIXES: Final = (".xml", ".txt", ".json")
_SPLITS: Final = ("train", "val", "valid", "validation", "test")
# Names of class folders that may be something else although they hold images.
_SUSPECT: Final = frozenset((*_SPLITS, "labels"))
_ROOT: Final = re.compile(rb"<(annotation|dataset)\b")
_HEAD_BYTES: Final = 4096
_MAX_YAML_BYTES: Final = 1_000_000
_READERS: Final = {
    "voc": "VOCDetection({root!r}) reads the objects in the images",
    "yolo": "YOLODetection({root!r}) reads the objects in the images",
    "imglab": "ImglabDetection({file!r}) reads the objects in the images",
    "landmarks": "LandmarkList({file!r}) reads it; root= is the folder that its paths begin in",
    "image-list": "ImageList({file!r}) reads it; root= is the folder that its paths begin in",
    "coco": "COCODetection({file!r}, IMAGES) reads it if it is COCO's; IMAGES is the folder that "
    "its file names begin in. Else, if the other subfolders are classes, move this one away",
}
_ONCE: Final = {
    "voc": ", given the folder of these as images=",
    "yolo": ", once they are called labels and images",
}
_FEWEST_NUMBERS: Final = 2  # of a line with landmarks; one with fewer is `path label`


class AnnotatedFolder(NamedTuple):
    """A folder with annotations in one place and images in another."""

    form: Form
    root: Path
    annotations: Path
    images: Path | None = None

    @property
    def is_read_as_folder(self) -> bool:
        """Whether `VOCDetection(root)` or `YOLODetection(root)` reads it."""
        if self.form == "voc":
            return self.images is not None
        has_names = self.annotations.name == "labels" and self.images == self.root / "images"
        return self.form == "yolo" and (has_names or self.annotations == self.root)

    def error(self) -> StoreError:
        """Return the error that names the class to use, for the caller to raise."""
        what = os.path.relpath(self.annotations, self.root)
        beside = f" beside the images in {self.images.name}" if self.images else ""
        once = "" if self.is_read_as_folder else _ONCE.get(self.form, "")
        reader = _READERS[self.form].format(root=str(self.root), file=str(self.annotations))
        return StoreError(
            f"{self.root} is a data set with annotations ({what}{beside}), and its subfolders are "
            f"no classes. {reader}{once}."
        )


def looks_like_voc(root: Path) -> bool:
    """Return whether a folder has both of VOC's subfolders."""
    return (root / "Annotations").is_dir() and (root / "JPEGImages").is_dir()


def annotated_folder(root: Path) -> AnnotatedFolder | None:
    """Return what kind of data set with annotations a folder is; None if it is none."""
    if (root / INDEX_NAME).is_file():
        return None
    names, _ = scan(os.fspath(root))
    if {"Annotations", "JPEGImages"} <= set(names):
        return AnnotatedFolder("voc", root, root / "Annotations", root / "JPEGImages")
    if {"images", "labels"} <= set(names):
        labels = root / "labels"
        has_text = any(next(labels.glob(pattern), None) for pattern in ("*.txt", "*/*.txt"))
        if has_text or not any(_images(labels)):
            return AnnotatedFolder("yolo", root, labels, root / "images")
    if any(map(_is_yolo_yaml, root.iterdir())):
        return AnnotatedFolder("yolo", root, root)
    without = [name for name in names if not any(_images(root / name))]
    pictures = [name for name in names if name not in without]
    if not pictures:
        return None
    images = root / ("images" if "images" in pictures else pictures[0])
    for suffix in _SUFFIXES:
        for name in without:
            files = sorted(file for file in _files(root / name) if file.lower().endswith(suffix))
            form, place = _form_of(files, suffix, root / name, map(root.joinpath, pictures))
            if form is not None:
                is_one = len(pictures) == 1 or images.name == "images"
                return AnnotatedFolder(form, root, place, images if is_one else None)
    return None


def _form_of(
    files: list[str], suffix: str, folder: Path, pictures: Iterable[Path]
) -> tuple[Form | None, Path]:
    """Return what files of one suffix are, and where: the folder, or the file that has it all."""
    if not files:
        return None, folder
    if suffix == ".json":
        return "coco", Path(files[0])
    if suffix == ".xml":
        roots = {xml_root(file) for file in files[:8]} - {""}
        return ("imglab", Path(files[0])) if roots == {"dataset"} else ("voc", folder)
    stems = {Path(file).stem for file in files}
    for place in pictures:
        if any(Path(image).stem in stems for image in _images(place)):
            return "yolo", folder
    for file in files[:8]:
        line = _first_line(Path(file))
        if any(word.lower().endswith(IMAGE_SUFFIXES) for word in line.replace(",", " ").split()):
            return list_form(line), Path(file)
    return None, folder


def xml_root(file: str | Path) -> str:
    """Return "annotation" for a file of VOC's, "dataset" for one of imglab's, else ""."""
    found = _ROOT.search(_head(file))
    return found[1].decode() if found else ""


def list_form(line: str, separator: str | None = None) -> Literal["landmarks", "image-list"]:
    """Return what a line of a list has: landmarks, or an image and its class."""
    if separator is None:
        line = line.replace(",", " ")  # its reader will say what is missing
    words = [word.strip().lower() for word in line.split(separator)]
    ends = [place for place, word in enumerate(words) if word.endswith(IMAGE_SUFFIXES)]
    after = words[ends[-1] + 1 if ends else 1 :]
    return "landmarks" if sum(map(is_number, after)) >= _FEWEST_NUMBERS else "image-list"


def is_number(word: str) -> bool:
    """Return whether a word of a list is a number; "nan" is one."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def refuse_annotated(root: Path, num_images: Mapping[str, int]) -> None:
    """Raise if class folders with no images, or with such names, are annotations."""
    if all(num_images.values()) and not _SUSPECT & num_images.keys():
        return
    for place in (root, *(root / name for name in _SPLITS if name in num_images)):
        found = annotated_folder(place)
        if found is not None:
            raise found.error()


def _files(folder: Path) -> Iterator[str]:
    """Yield the files below a folder, hidden ones left out, in no order; links to folders too."""
    waiting = [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting += () if is_system_folder(entry.name) else (entry.path,)
                elif not entry.name.startswith("."):
                    yield entry.path


def _images(folder: Path) -> Iterator[str]:
    return (file for file in _files(folder) if file.lower().endswith(IMAGE_SUFFIXES))


def _head(file: str | Path) -> bytes:
    try:
        with open_file(file) as opened:
            return opened.read(_HEAD_BYTES) or b""
    except OSError:  # what reads the data set says so
        return b""


def _first_line(file: Path) -> str:
    lines = _head(file).decode("utf-8-sig", "replace").splitlines()
    said = (line.strip() for line in lines)
    return next((line for line in said if line and not line.startswith("#")), "")


def _is_yolo_yaml(file: Path) -> bool:
    """Return whether a file names classes and where the images of a split are."""
    if FORM_OF_SUFFIX.get(file.suffix.lower()) != "yolo" or not file.is_file():
        return False
    try:
        import yaml
    except ModuleNotFoundError:  # then YOLO's files cannot be read either
        return False
    try:
        with open_file(file) as opened:
            said = yaml.load(opened.read(_MAX_YAML_BYTES), Loader=yaml.BaseLoader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return False
    places = [said.get(name) for name in _SPLITS] if isinstance(said, dict) else []
    return any(isinstance(place, (str, list)) for place in places) and bool(said.get("names"))
