# SPDX-License-Identifier: Apache-2.0
"""Datasets with annotations as they are named on the command line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.sources import is_store, names_a_dataset, source_named
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.vision.datasets.annotated import AnnotatedImages

__all__ = ["annotated_named", "dataset_named"]

_FEWEST_NUMBERS: Final = 4  # of a line with landmarks; one with fewer columns is `path label`


def annotated_named(
    text: str, split: str | None, *, as_it_is: bool = False
) -> AnnotatedImages | None:
    """Return the detection dataset that a path names; None if it is of another kind.

    Args:
        text: A VOC folder, YOLO's yaml file, imglab's XML file, or a list of landmarks.
        split: Which part of it.
        as_it_is: Whether boxes stay as the file has them, bad ones too.

    Raises:
        StoreError: the annotations cannot be read.
        ConfigError: `split` is for a file without.
    """
    if names_a_dataset(text) or is_store(text):
        return None
    path = Path(text)
    options: dict[str, Any] = {"bad_boxes": "keep" if as_it_is else "fix"}
    if path.suffix in (".yaml", ".yml"):
        from penstock.vision.datasets.yolo_detection import YOLODetection

        return YOLODetection(path, split or "train", **options)
    if path.is_dir():
        return _of_voc(path, split, options)
    if path.suffix not in (".xml", ".txt") or not path.is_file():
        return None
    if split is not None:
        raise ConfigError(f"--split is for folders and YOLO's yaml files; {text} is one list.")
    from penstock.vision.datasets.landmark_sets import ImglabDetection, LandmarkList

    if path.suffix == ".xml":
        return ImglabDetection(path, **options)
    return LandmarkList(path, **options) if _has_landmarks(path) else None


def _of_voc(path: Path, split: str | None, options: dict[str, Any]) -> AnnotatedImages | None:
    from penstock.stores.folder.marks import INDEX_NAME
    from penstock.stores.folder.voc import looks_like_voc

    if (path / INDEX_NAME).is_file() or not looks_like_voc(path):
        return None
    from penstock.vision.datasets.voc_detection import VOCDetection

    return VOCDetection(path, split, **options)


def _has_landmarks(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        first = next((line for line in lines if line.strip()), "")
    return len(first.replace(",", " ").split()) > _FEWEST_NUMBERS


@contextlib.contextmanager
def dataset_named(text: str, split: str | None = None) -> Iterator[Any]:
    """Return a dataset whose samples hold decoded images.

    Args:
        text: What `annotated_named` takes; a text file of `path label`; a folder of images, a
            store's address, or `module:name`.
        split: Which part of it.

    Raises:
        ConfigError: there is no such module or dataset, or an option does not fit.
        StoreError: it cannot be read.
    """
    if (annotated := annotated_named(text, split)) is not None:
        yield annotated
        return
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.store import Store

    path = Path(text)
    if not is_store(text) and path.suffix == ".txt" and path.is_file():
        from penstock.vision.datasets.image_list import ImageList

        yield ImageList(path)
        return
    if not names_a_dataset(text) and not is_store(text) and not path.exists():
        raise StoreError(f"{text} does not exist.")
    with source_named(text, split=split) as source:
        yield StoreDataset(source) if isinstance(source, Store) else source
