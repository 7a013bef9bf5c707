# SPDX-License-Identifier: Apache-2.0
"""Stores and datasets as they are named on the command line."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError, StoreError
from penstock.stores.registry import Address, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.stores.store import Store

__all__ = [
    "dataset_of",
    "is_store",
    "names_a_dataset",
    "object_named",
    "open_named",
    "parse",
    "source_named",
]

_PARTIAL: Final = ".partial"
_FIELD_ENDS: Final = {"mongodb": "field", "arrow": "column"}  # as their stores call them
_OBJECT: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")


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
    for option, is_given, of_kind in (
        ("--split", split is not None, "folder"),
        ("--trust-pickle", trust_pickle, "lmdb"),
        ("--copy-local", copy_local is not None, "lmdb"),
    ):
        if is_given and kind != of_kind:
            kinds = {"folder": "folders", "lmdb": "LMDB files"}
            raise ConfigError(f"{option} is for {kinds[of_kind]}; SRC is of the kind {kind!r}.")
    options.update(_fields(kind, image=image_field, label=label_field, key=key_field))
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


def _fields(kind: str, **named: str | None) -> dict[str, str]:
    """Return the options of the store that say which field or column is what."""
    given = {what: name for what, name in named.items() if name is not None}
    if given and kind not in _FIELD_ENDS:
        raise ConfigError(
            f"--{next(iter(given))}-field is for MongoDB collections, Parquet and Arrow; this is "
            f"of the kind {kind!r}."
        )
    return {f"{what}_{_FIELD_ENDS[kind]}": name for what, name in given.items()}


def _refuse_unfinished(path: Path) -> None:
    """Raise where `penstock pack` has not ended; a file by itself the store finds out."""
    partial = path if path.name.endswith(_PARTIAL) else path.with_name(path.name + _PARTIAL)
    if (partial == path and path.is_dir()) or (partial.exists() and not path.exists()):
        raise StoreError(
            f"{partial} is unfinished: its packing was interrupted, or is still under way. "
            "`penstock pack --resume` with the same source and destination finishes it."
        )


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
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{given[0]} is not for {text}, which makes its dataset itself.")
    with object_named(text) as found:
        yield dataset_of(found, text)


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


def _import(name: str, here: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Otherwise it is a module that the user's own imports.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"there is no module {error.name} in {here}, and none is installed. SRC is the path of "
            "a folder, a store's address, or module:name of a dataset."
        ) from error
