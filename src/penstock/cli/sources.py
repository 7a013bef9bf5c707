# SPDX-License-Identifier: Apache-2.0
"""Stores, datasets and loaders as they are named on the command line.

Stores are imported inside functions: `penstock --help` works without their libraries.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.options import option_of
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.stores.dataset import StoreDataset
    from penstock.stores.registry import Address
    from penstock.stores.store import Store

_OBJECT: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_LISTS: Final = ("landmarks", "image-list")


def parse(text: str) -> Address:
    """Return an address taken apart."""
    from penstock.stores.registry import Address

    return Address.parse(text)


def is_store(text: str) -> bool:
    """Return whether a text is a store's address, and not the path of a plain folder or file."""
    return parse(text).kind != "folder" or text.startswith("folder:")


def names_code(text: str) -> bool:
    """Return whether a text is `module:name`, and not an address or something on disk.

    Example:
        >>> names_code("my.data:photos"), names_code("lmdb:photos")
        (True, False)
    """
    if _OBJECT.fullmatch(text) is None or os.path.lexists(text):
        return False
    if text.lower().startswith("mongodb:"):  # half an address, most likely with a password
        return False
    try:
        return parse(text) == ("folder", text)
    except ConfigError:  # the module is no kind of store
        return True


def is_plain_path(text: str) -> bool:
    """Return whether a text is the path of a folder or file, and neither a store nor code."""
    return not names_code(text) and not is_store(text)


def open_named(
    text: str, fields: Mapping[str, str], *, split: str | None = None, trust_pickle: bool = False
) -> Store:
    """Return the store at an address or path; `fields` are by the names of `FIELD_OPTIONS`."""
    from penstock.stores.registry import open_store

    kind, place = parse(text)
    options: dict[str, Any] = {
        name.replace("field", "column") if kind == "arrow" else name: value
        for name, value in fields.items()
    }
    if split is not None:
        options["split"] = split
    if trust_pickle:
        options.update(layout="pickle", trusted=True)
    return open_store(place if kind == "mongodb" else f"{kind}:{place}", **options)


@contextlib.contextmanager
def source_named(
    text: str,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    *,
    is_described: bool = True,
    bad_boxes: Any = "fix",  # noqa: ANN401 - as `AnnotationRules` takes it
    attributes: Sequence[str] = (),
    fields: Mapping[str, str] | None = None,
    trust_pickle: bool = False,
) -> Iterator[Any]:
    """Return a dataset of annotated images, a store, or the dataset that `module:name` makes.

    See `described_dataset`, which is for annotated images, and `open_named`, which is for stores.
    """
    found = None
    if is_described:
        found = described_dataset(text, split, columns, bad_boxes=bad_boxes, attributes=attributes)
    fields = fields or {}
    if found is None and not names_code(text):
        with open_named(text, fields, split=split, trust_pickle=trust_pickle) as store:
            yield store
        return
    unfit = [*fields, *["trust_pickle"] * trust_pickle]
    unfit += ["split"] * (found is None and split is not None)
    if unfit:
        raise ConfigError(f"{option_of(unfit[0])} is for stores, and {text} is none.")
    yield object_made(text, "__getitem__", "__len__") if found is None else found


def object_made(text: str, *methods: str) -> Any:  # noqa: ANN401
    """Return what `module:name` is if it has these methods, or what a function or class makes.

    The current folder stays on the import path.
    """
    if _OBJECT.fullmatch(text) is None:
        raise ConfigError(f"{text} is not module:name.")
    module_name, _, name = text.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Otherwise it is a module that the user's own imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"there is no module {error.name} in {here}, and none is installed. SRC is the "
            "path of a folder, a store's address, or module:name of a dataset. A store of a "
            "kind of your own is named as module:dataset, too: its module registers it."
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{text}: {module_name} has no {name}.")
        found = getattr(found, part)
    if all(hasattr(found, name) for name in methods) and not isinstance(found, type):
        return found
    if not callable(found):
        raise ConfigError(
            f"{text} is of type {type(found).__qualname__} and cannot be called. Name a "
            "dataset or loader, or a function or a class that returns one."
        )
    return found()


@contextlib.contextmanager
def dataset_named(text: str, **given: Any) -> Iterator[Any]:  # noqa: ANN401
    """Return a dataset whose samples hold decoded images; `given` is as for `source_named`."""
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.store import Store

    if is_plain_path(text) and not Path(text).exists():
        raise StoreError(f"{text} does not exist.")
    with source_named(text, **given) as source:
        yield StoreDataset(source) if isinstance(source, Store) else source


def described_form(text: str, columns: Mapping[str, Any] | None = None) -> str | None:
    """Return the format of a folder or file of annotated images; None for all else.

    A text list is one of landmarks if options name their columns, or if its first line has the
    numbers of a point.
    """
    from penstock.stores.folder.annotated_folder import FORM_OF_SUFFIX, annotated_folder, list_form

    if not is_plain_path(text):
        return None
    path, columns = Path(text), columns or {}
    if path.is_dir():
        found = annotated_folder(path)
        return found.form if found is not None and found.is_read_as_folder else None
    suffix = path.suffix.lower()
    if suffix != ".txt" or not path.is_file():
        return FORM_OF_SUFFIX.get(suffix)
    if not columns.keys() <= {"root", "separator"}:
        return "landmarks"
    from penstock.vision.annotations.reading import numbered_lines

    _, line = next(numbered_lines(path), (0, ""))
    return list_form(line, columns.get("separator"))


def described_dataset(
    text: str,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    *,
    bad_boxes: Any = "fix",  # noqa: ANN401 - as `AnnotationRules` takes it
    attributes: Sequence[str] = (),
) -> StoreDataset | None:
    """Return the dataset of annotated images that a path names; None for all else.

    `columns` are of a landmark list, as `LandmarkList` takes them; `origin` is VOC's as well, and
    `root` COCO's.
    """
    columns = dict(columns or {})
    path, form = Path(text), described_form(text, columns)
    if form is None and attributes and is_plain_path(text) and any(path.glob("*.xml")):
        form = "voc"  # beside the images
    for name in columns:
        if form not in _LISTS and (form, name) not in (("voc", "origin"), ("coco", "root")):
            raise ConfigError(f"{option_of(name)} is for text lists, and {text} is none.")
    if split is not None and form in ("imglab", "coco", *_LISTS):
        raise ConfigError(f"--split is for folders and YOLO's yaml files; {text} is one list.")
    if form is None:
        return None
    from penstock import vision

    rules = vision.AnnotationRules(bad_boxes=bad_boxes)
    match form:
        case "voc":
            return vision.VOCDetection(path, split, rules=rules, attributes=attributes, **columns)
        case "yolo":
            return vision.YOLODetection(path, split or "train", rules=rules)
        case "coco":
            return vision.COCODetection(path, columns.get("root"), rules=rules)
        case "imglab":
            return vision.ImglabDetection(path, rules=rules, attributes=attributes)
        case "landmarks":
            root = columns.pop("root", None)
            of_lines = vision.LandmarkColumns(**columns)
            return vision.LandmarkList(path, of_lines, root=root, rules=rules)
    return vision.ImageList(path, **columns)


def attributes_for(column: str | None) -> tuple[str, ...]:
    """Return the attributes that a dataset needs for a column: none for flags and classes."""
    from penstock.vision.datasets.table import FLAGS

    return () if column in (None, "name", "labels", *FLAGS) else (str(column),)


def labels_by(dataset: Any, column: str | None, class_of: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the labels of a dataset by a field of its objects (None: the class), and the names."""
    from penstock.data.labels.known import class_names_of, labels_of
    from penstock.stores.dataset import StoreDataset

    if column is not None and isinstance(dataset, StoreDataset):
        dataset.column(column)  # its error names the columns that there are
    labels = labels_of(dataset, column=column, objects=class_of.value)
    return labels, class_names_of(dataset, column)
