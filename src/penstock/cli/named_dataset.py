# SPDX-License-Identifier: Apache-2.0
"""Datasets with annotations as they are named on the command line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.list_options import option_of
from penstock.cli.sources import is_store, names_a_dataset, source_named
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.stores.dataset import StoreDataset
    from penstock.vision.datasets.box_policy import BadBoxes

__all__ = ["dataset_named", "described_dataset", "folder_form"]

_FEWEST_NUMBERS: Final = 2  # of a line with landmarks; one with fewer is `path label`
_YAML: Final = (".yaml", ".yml")


def described_dataset(
    text: str,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    *,
    bad_boxes: BadBoxes = "fix",
) -> StoreDataset | None:
    """Return the dataset that a path names; None if it is one of class folders, or no path.

    Args:
        text: A VOC or YOLO folder, YOLO's yaml file, imglab's XML file, a list of landmarks or of
            images with a class.
        split: Which part of it.
        columns: Of a landmark list, as `LandmarkList` takes them; `origin` is VOC's as well.
        bad_boxes: What becomes of boxes that cannot be right.

    Raises:
        StoreError: the annotations cannot be read.
        ConfigError: `split` or a column is for a file of another kind.
    """
    columns = columns or {}
    if names_a_dataset(text) or is_store(text):
        _refuse(text, columns)
        return None
    path = Path(text)
    if path.is_dir():
        return _of_folder(path, split, columns, bad_boxes)
    if path.suffix.lower() in _YAML:
        _refuse(text, columns)
        return _of_yolo(path, split, bad_boxes)
    if path.suffix.lower() not in (".xml", ".txt") or not path.is_file():
        _refuse(text, columns)
        return None
    if split is not None:
        raise ConfigError(f"--split is for folders and YOLO's yaml files; {text} is one list.")
    return _of_file(path, columns, bad_boxes)


def _refuse(text: str, columns: Mapping[str, Any], *but: str) -> None:
    """Raise where columns are told of what has none."""
    others = [name for name in columns if name not in but]
    if others:
        raise ConfigError(f"{option_of(others[0])} is for text lists, and {text} is none.")


def _of_folder(
    path: Path, split: str | None, columns: Mapping[str, Any], bad_boxes: BadBoxes
) -> StoreDataset | None:
    form = folder_form(path)
    _refuse(str(path), columns, *(("origin",) if form == "voc" else ()))
    if form == "yolo":
        return _of_yolo(path, split, bad_boxes)
    if form is None:
        return None
    from penstock.vision.datasets.voc_detection import VOCDetection

    return VOCDetection(path, split, bad_boxes=bad_boxes, **columns)


def folder_form(path: Path) -> str | None:
    """Return "voc" or "yolo" for a folder of annotated images; None for any other.

    What `pack` made of whatever it was is read by its index, and is none of the two.
    """
    from penstock.stores.folder.marks import INDEX_NAME
    from penstock.stores.folder.voc import looks_like_voc

    if (path / INDEX_NAME).is_file():
        return None
    if looks_like_voc(path):
        return "voc"
    if _looks_like_yolo(path):
        return "yolo"
    has_both = (path / "annotations").is_dir() and (path / "images").is_dir()
    return "voc" if has_both and any((path / "annotations").glob("*.xml")) else None


def _looks_like_yolo(path: Path) -> bool:
    """Return whether a folder has YOLO's subfolders, or a yaml file that names classes and places.

    Images below "labels" are those of a class called so, or masks.
    """
    if (path / "images").is_dir() and (path / "labels").is_dir():
        from penstock.cli.decoding import iter_image_paths

        return next(iter_image_paths(path / "labels"), None) is None
    files = [child for child in path.iterdir() if child.suffix.lower() in _YAML]
    return any(map(_names_classes, files))


def _names_classes(file: Path) -> bool:
    from penstock.vision.annotations.yolo import read_yolo_data

    try:
        data = read_yolo_data(file)
    except StoreError:  # the settings of some tool
        return False
    return bool(data.class_names and data.splits)


def _of_yolo(path: Path, split: str | None, bad_boxes: BadBoxes) -> StoreDataset:
    from penstock.vision.datasets.yolo_detection import YOLODetection

    return YOLODetection(path, split or "train", bad_boxes=bad_boxes)


def _of_file(path: Path, columns: Mapping[str, Any], bad_boxes: BadBoxes) -> StoreDataset:
    from penstock.vision.datasets.landmark_sets import ImglabDetection, LandmarkList

    if path.suffix.lower() == ".xml":
        _refuse(str(path), columns)
        return ImglabDetection(path, bad_boxes=bad_boxes)
    if not columns.keys() <= {"root", "separator"} or _has_landmarks(path, columns):
        return LandmarkList(path, bad_boxes=bad_boxes, **columns)
    from penstock.vision.datasets.image_list import ImageList

    return ImageList(path, **columns)


def _has_landmarks(path: Path, columns: Mapping[str, Any]) -> bool:
    """Return whether the first line has the numbers of a point after its path, which has blanks."""
    from penstock.stores.folder.listing import IMAGE_SUFFIXES
    from penstock.vision.annotations.text_lines import numbered_lines

    _, line = next(numbered_lines(path), (0, ""))
    separator = columns.get("separator")
    if separator is None:
        line = line.replace(",", " ")  # its reader will say what is missing
    words = [word.strip().lower() for word in line.split(separator)]
    ends = [place for place, word in enumerate(words) if word.endswith(IMAGE_SUFFIXES)]
    after = words[ends[-1] + 1 if ends else 1 :]
    return sum(map(_is_number, after)) >= _FEWEST_NUMBERS


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def dataset_named(
    text: str,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    *,
    bad_boxes: BadBoxes = "fix",
) -> Iterator[Any]:
    """Return a dataset whose samples hold decoded images.

    Args:
        text: What `described_dataset` takes; a folder of images, a store's address, or
            `module:name`.
        split: Which part of it.
        columns: Of a landmark list.
        bad_boxes: What becomes of boxes that cannot be right.

    Raises:
        ConfigError: there is no such module or dataset, or an option does not fit.
        StoreError: it cannot be read.
        Exception: what the user's code raises.
    """
    found = described_dataset(text, split, columns, bad_boxes=bad_boxes)
    if found is not None:
        yield found
        return
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.store import Store

    if not names_a_dataset(text) and not is_store(text) and not Path(text).exists():
        raise StoreError(f"{text} does not exist.")
    with source_named(text, split=split) as source:
        yield StoreDataset(source) if isinstance(source, Store) else source
