# SPDX-License-Identifier: Apache-2.0
"""Stores and datasets as they are named on the command line."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.list_options import option_of
from penstock.cli.reasons import errors_in_code
from penstock.errors import ConfigError, StoreError
from penstock.stores.registry import Address, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.cli.arguments import ClassOf
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.store import Store
    from penstock.vision.datasets.rules import BadBoxes

__all__ = [
    "attributes_for",
    "dataset_named",
    "dataset_of",
    "described_dataset",
    "described_form",
    "errors_of_code",
    "is_landmark_list",
    "is_plain_path",
    "is_store",
    "labels_by",
    "names_a_dataset",
    "object_named",
    "open_named",
    "parse",
    "source_named",
]

_PARTIAL: Final = ".partial"
_FIELD_ENDS: Final = {"mongodb": "field", "arrow": "column"}  # as their stores call them
_OBJECT: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_LISTS: Final = ("landmarks", "image-list")


def parse(text: str) -> Address:
    """Return an address taken apart; an unfinished file is of the kind that it will be.

    Raises:
        ConfigError: it is empty, or of a kind that is not known.

    Example:
        >>> parse("photos.lmdb.partial")
        Address(kind='lmdb', place='photos.lmdb.partial')
    """
    address = Address.parse(text)
    if address.kind == "folder" and text.endswith(_PARTIAL):
        kind = Address.parse(text.removesuffix(_PARTIAL) or text).kind
        return Address(kind, address.place)
    return address


def is_store(text: str) -> bool:
    """Return whether a text is a store's address, and not the path of a plain folder or file."""
    return parse(text).kind != "folder" or text.startswith("folder:")


def names_a_dataset(text: str) -> bool:
    """Return whether a text is `module:name`, and not an address or something on disk.

    Example:
        >>> names_a_dataset("my.data:photos"), names_a_dataset("lmdb:photos")
        (True, False)
    """
    if _OBJECT.fullmatch(text) is None or os.path.lexists(text):
        return False
    if text.lower().startswith("mongodb:"):  # half an address, most likely with a password
        return False
    try:
        return Address.parse(text) == Address("folder", text)
    except ConfigError:  # the module is no kind of store
        return True


def is_plain_path(text: str) -> bool:
    """Return whether a text is the path of a folder or file, and neither a store nor code."""
    return not names_a_dataset(text) and not is_store(text)


def open_named(
    text: str,
    *,
    split: str | None = None,
    trust_pickle: bool = False,
    copy_local: Path | None = None,
    image_field: str | None = None,
    label_field: str | None = None,
    key_field: str | None = None,
    **options: Any,  # noqa: ANN401
) -> Store:
    """Return the store that a text names.

    Args:
        text: An address, or a path.
        split: Which part of a folder.
        trust_pickle: Whether it is an LMDB file of pickles, which may be decoded.
        copy_local: A folder into which an LMDB file is copied, to be read from there.
        image_field: The field or column of images, in MongoDB, Parquet and Arrow.
        label_field: That of classes.
        key_field: That of keys.
        options: Of `open_store`.

    Raises:
        ConfigError: an option does not fit this kind of store.
        StoreError: it is unfinished.
        MissingExtraError: what it needs is not installed.
    """
    kind, place = parse(text)
    for option, value, of_kind, kinds in (
        ("--split", split, "folder", "folders"),
        ("--trust-pickle", trust_pickle, "lmdb", "LMDB files"),
        ("--copy-local", copy_local, "lmdb", "LMDB files"),
    ):
        if value and kind != of_kind:
            raise ConfigError(f"{option} is for {kinds}; SRC is of the kind {kind!r}.")
    for what, name in (("image", image_field), ("label", label_field), ("key", key_field)):
        if name is not None and kind not in _FIELD_ENDS:
            raise ConfigError(
                f"--{what}-field is for MongoDB collections, Parquet and Arrow; this is of the "
                f"kind {kind!r}."
            )
        if name is not None:
            options[f"{what}_{_FIELD_ENDS[kind]}"] = name
    if kind == "lmdb":
        _refuse_unfinished(Path(place))
        if copy_local is not None:
            from penstock.stores.filesystems import copy_to_local

            place = str(copy_to_local(Path(place), copy_local))
    if split is not None:
        options["split"] = split
    if trust_pickle:
        options.update(layout="pickle", trusted=True)
    return open_store(place if kind == "mongodb" else f"{kind}:{place}", **options)


def _refuse_unfinished(path: Path) -> None:
    """Raise where `penstock pack` has not ended; a file by itself the store finds out."""
    partial = path if path.name.endswith(_PARTIAL) else path.with_name(path.name + _PARTIAL)
    if (partial == path and path.is_dir()) or (partial.exists() and not path.exists()):
        raise StoreError(
            f"{partial} is unfinished: its packing was interrupted, or is still under way. "
            "`penstock pack --resume` with the same source and destination finishes it."
        )


@contextlib.contextmanager
def source_named(text: str, **options: Any) -> Iterator[Any]:  # noqa: ANN401
    """Return a store, or the dataset that `module:name` is or makes.

    Args:
        text: As it was typed.
        options: Of `open_named`; those that are not given are None or false.

    Raises:
        ConfigError: an option does not fit, or there is no such module or dataset in it.
        StoreError: the store is unfinished.
        Exception: what the user's code raises.
    """
    if not names_a_dataset(text):
        with open_named(text, **options) as store:
            yield store
        return
    given = [option_of(name) for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{given[0]} is not for {text}, which makes its dataset itself.")
    with object_named(text) as found:
        yield dataset_of(found, text)


def errors_of_code(text: str) -> contextlib.AbstractContextManager[None]:
    """Let an error of the user's module be said in a line, if the text names one."""
    return errors_in_code(text) if names_a_dataset(text) else contextlib.nullcontext()


@contextlib.contextmanager
def object_named(text: str) -> Iterator[Any]:
    """Return what `module:name` names, the current folder being on the import path meanwhile.

    Raises:
        ConfigError: it is no such text, or there is no such module, or nothing of the name in it.
        Exception: what the module raises.
    """
    if _OBJECT.fullmatch(text) is None:
        raise ConfigError(f"{text} is not module:name.")
    module_name, _, name = text.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = _import(module_name, here)
        for part in name.split("."):
            if not hasattr(found, part):
                raise ConfigError(f"{text}: {module_name} has no {name}.")
            found = getattr(found, part)
        yield found
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _import(name: str, here: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Otherwise it is a module that the user's own imports.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"there is no module {error.name} in {here}, and none is installed. SRC is the path of "
            "a folder, a store's address, or module:name of a dataset. A store of a kind of your "
            "own is named as module:dataset, too: its module registers it."
        ) from error


def dataset_of(found: Any, text: str) -> Any:  # noqa: ANN401
    """Return a dataset, or what a function or a class makes.

    Raises:
        ConfigError: it is neither a dataset nor can it be called.
    """
    is_dataset = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    if is_dataset and not isinstance(found, type):
        return found
    if not callable(found):
        raise ConfigError(
            f"{text} is of type {type(found).__qualname__} and cannot be called. Name a dataset, "
            "or a function or a class that returns one."
        )
    return found()


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

    if is_plain_path(text) and not Path(text).exists():
        raise StoreError(f"{text} does not exist.")
    with source_named(text, split=split) as source:
        yield StoreDataset(source) if isinstance(source, Store) else source


def described_form(text: str, columns: Mapping[str, Any] | None = None) -> str | None:
    """Return the format of a folder or file of annotated images; None for all else.

    Args:
        text: A VOC or YOLO folder, YOLO's yaml file, imglab's XML file, a list of landmarks or of
            images with a class.
        columns: Of a landmark list.
    """
    from penstock.stores.folder.annotated_folder import YAML_SUFFIXES, annotated_folder

    path = Path(text)
    if not is_plain_path(text):
        return None
    if path.is_dir():
        found = annotated_folder(path)
        return found.form if found is not None and found.is_read_as_folder else None
    suffix = path.suffix.lower()
    if suffix in YAML_SUFFIXES:
        return "yolo"
    if suffix == ".xml" and path.is_file():
        return "imglab"
    if suffix == ".txt" and path.is_file():
        return "landmarks" if is_landmark_list(path, columns or {}) else "image-list"
    return None


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


def described_dataset(
    text: str,
    split: str | None = None,
    columns: Mapping[str, Any] | None = None,
    *,
    bad_boxes: BadBoxes = "fix",
    attributes: Sequence[str] = (),
    stores_only: Mapping[str, Any] | None = None,
) -> StoreDataset | None:
    """Return the dataset that a path names; None if it is one of class folders, or no path.

    Args:
        text: See `described_form`.
        split: Which part of it.
        columns: Of a landmark list, as `LandmarkList` takes them; `origin` is VOC's as well.
        bad_boxes: What becomes of boxes that cannot be right.
        attributes: Fields of objects that are to be in samples, where it is XML.
        stores_only: Options that are not for such a dataset; those not given are None or false.

    Raises:
        StoreError: the annotations cannot be read.
        ConfigError: an option is for a file of another kind.
    """
    columns = columns or {}
    path, form = Path(text), described_form(text, columns)
    if form is None and attributes and is_plain_path(text) and any(path.glob("*.xml")):
        form = "voc"  # beside the images
    for name in columns:
        if form not in _LISTS and (form, name) != ("voc", "origin"):
            raise ConfigError(f"{option_of(name)} is for text lists, and {text} is none.")
    if split is not None and form in ("imglab", *_LISTS):
        raise ConfigError(f"--split is for folders and YOLO's yaml files; {text} is one list.")
    if form is None:
        return None
    for name, value in (stores_only or {}).items():
        if value:
            raise ConfigError(f"{option_of(name)} is for stores, and {text} is none.")
    from penstock import vision

    rules = vision.AnnotationRules(bad_boxes=bad_boxes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no object has the attribute", UserWarning)
        try:
            match form:
                case "voc":
                    return vision.VOCDetection(
                        path, split, rules=rules, attributes=attributes, **columns
                    )
                case "yolo":
                    return vision.YOLODetection(path, split or "train", rules=rules)
                case "imglab":
                    return vision.ImglabDetection(path, rules=rules, attributes=attributes)
                case "landmarks":
                    form_of_lines = {k: v for k, v in columns.items() if k != "root"}
                    return vision.LandmarkList(
                        path,
                        vision.LandmarkColumns(**form_of_lines),
                        root=columns.get("root"),
                        rules=rules,
                    )
            return vision.ImageList(path, **columns)
        except UserWarning as absent:
            raise ConfigError(str(absent)) from None


def attributes_for(column: str | None) -> tuple[str, ...]:
    """Return what a dataset has to be told to have a column: nothing of flags and classes."""
    from penstock.vision.datasets.table import FLAGS

    return () if column in (None, "name", "labels", *FLAGS) else (str(column),)


def labels_by(dataset: Any, column: str | None, class_of: ClassOf) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the labels of a dataset by a field of its objects, and the classes' names.

    Args:
        dataset: Any that knows its labels.
        column: The field; None is the class.
        class_of: Which objects of a sample say its class.

    Raises:
        ConfigError: there is no such field, or labels are not known.
    """
    from penstock.data.labels.known import class_names_of, labels_of
    from penstock.stores.dataset import StoreDataset

    if column is not None and isinstance(dataset, StoreDataset):
        dataset.column(column)  # says in a line what is wrong
    labels = labels_of(dataset, column=column, objects=class_of.value)
    return labels, class_names_of(dataset, column)
