# SPDX-License-Identifier: Apache-2.0
"""Datasets with annotations, by their name on the command line."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.list_options import option_of
from penstock.cli.sources import is_store, names_a_dataset, source_named
from penstock.errors import ConfigError, StoreError
from penstock.stores.folder.annotated_folder import YAML_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.cli.arguments import ClassOf
    from penstock.stores.dataset import StoreDataset
    from penstock.vision.datasets.rules import BadBoxes

__all__ = [
    "attributes_for",
    "dataset_named",
    "described_dataset",
    "folder_form",
    "is_landmark_list",
    "labels_by",
]


def described_dataset(
    text: str,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    *,
    bad_boxes: BadBoxes = "fix",
    attributes: Sequence[str] = (),
) -> StoreDataset | None:
    """Return the dataset that a path names; None if it is one of class folders, or no path.

    Args:
        text: A VOC or YOLO folder, YOLO's yaml file, imglab's XML file, a list of landmarks or of
            images with a class.
        split: Which part of it.
        columns: Of a landmark list, as `LandmarkList` takes them; `origin` is VOC's as well.
        bad_boxes: What becomes of boxes that cannot be right.
        attributes: Fields of objects that are to be in samples, where it is XML.

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
        return _of_folder(path, split, columns, bad_boxes, attributes)
    if path.suffix.lower() in YAML_SUFFIXES:
        _refuse(text, columns)
        return _of_yolo(path, split, bad_boxes)
    if path.suffix.lower() not in (".xml", ".txt") or not path.is_file():
        _refuse(text, columns)
        return None
    if split is not None:
        raise ConfigError(f"--split is for folders and YOLO's yaml files; {text} is one list.")
    return _of_file(path, columns, bad_boxes, attributes)


def attributes_for(column: str | None) -> tuple[str, ...]:
    """Return what a dataset has to be told to have a column: nothing of flags and classes."""
    from penstock.vision.datasets.table import FLAGS

    return () if column in (None, "name", "labels", *FLAGS) else (str(column),)


def _refuse(text: str, columns: Mapping[str, Any], *but: str) -> None:
    """Raise where columns are told of what has none."""
    others = [name for name in columns if name not in but]
    if others:
        raise ConfigError(f"{option_of(others[0])} is for text lists, and {text} is none.")


@contextlib.contextmanager
def _absent_refused() -> Iterator[None]:
    """Make an error of the warning that no object has the field that was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no object has the attribute", UserWarning)
        try:
            yield
        except UserWarning as absent:
            raise ConfigError(str(absent)) from None


def labels_by(dataset: Any, column: str | None, class_of: ClassOf) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the labels of a dataset by a field of its objects, and the classes' names.

    Args:
        dataset: Any that knows its labels.
        column: The field; None is the class.
        class_of: Which objects of a sample say its class.

    Raises:
        ConfigError: there is no such field, or labels are not known.
    """
    from penstock.data.labels.known import class_names_of
    from penstock.labels import labels_of
    from penstock.stores.dataset import StoreDataset

    if column is not None and isinstance(dataset, StoreDataset):
        dataset.column(column)  # says in a line what is wrong
    labels = labels_of(dataset, column=column, objects=class_of.value)
    return labels, class_names_of(dataset, column)


def _of_folder(
    path: Path,
    split: str | None,
    columns: Mapping[str, Any],
    bad_boxes: BadBoxes,
    attributes: Sequence[str],
) -> StoreDataset | None:
    form = folder_form(path)
    _refuse(str(path), columns, *(("origin",) if form == "voc" else ()))
    if form == "yolo":
        return _of_yolo(path, split, bad_boxes)
    if form is None and not (attributes and any(path.glob("*.xml"))):  # beside the images
        return None
    from penstock.vision import AnnotationRules, VOCDetection

    with _absent_refused():
        rules = AnnotationRules(bad_boxes=bad_boxes)
        return VOCDetection(path, split, rules=rules, attributes=attributes, **columns)


def folder_form(path: Path) -> str | None:
    """Return "voc" or "yolo" for a folder of annotated images that is read as such; else None."""
    from penstock.stores.folder.annotated_folder import annotated_folder

    found = annotated_folder(path)
    return found.form if found is not None and found.is_read_as_folder else None


def _of_yolo(path: Path, split: str | None, bad_boxes: BadBoxes) -> StoreDataset:
    from penstock.vision import AnnotationRules, YOLODetection

    return YOLODetection(path, split or "train", rules=AnnotationRules(bad_boxes=bad_boxes))


def _of_file(
    path: Path, columns: Mapping[str, Any], bad_boxes: BadBoxes, attributes: Sequence[str]
) -> StoreDataset:
    from penstock.vision import AnnotationRules, ImglabDetection, LandmarkColumns, LandmarkList

    rules = AnnotationRules(bad_boxes=bad_boxes)
    if path.suffix.lower() == ".xml":
        _refuse(str(path), columns)
        with _absent_refused():
            return ImglabDetection(path, rules=rules, attributes=attributes)
    if is_landmark_list(path, columns):
        root = columns.get("root")
        form = {name: value for name, value in columns.items() if name != "root"}
        return LandmarkList(path, LandmarkColumns(**form), root=root, rules=rules)
    from penstock.vision.datasets.classification import ImageList

    return ImageList(path, **columns)


def is_landmark_list(path: Path, columns: Mapping[str, Any]) -> bool:
    """Return whether a text list is one of landmarks: it has their columns, or was said to.

    The first line has the numbers of a point after its path then, which may have blanks.
    """
    if not columns.keys() <= {"root", "separator"}:
        return True
    from penstock.stores.folder.annotated_folder import list_form
    from penstock.vision.annotations.reading import numbered_lines

    _, line = next(numbered_lines(path), (0, ""))
    return list_form(line, columns.get("separator")) == "landmarks"


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
