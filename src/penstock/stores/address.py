# SPDX-License-Identifier: Apache-2.0
"""Addresses of stores: what kind they name, and the same without secrets.

lmdb:PATH, PATH.lmdb                         an LMDB file, or a folder of its shards
mongodb://USER:PASSWORD@HOST/DB.COLLECTION   a MongoDB collection (mongodb+srv:// as well)
tar:PATH, PATH.tar, SHARD-{000..015}.tar     tar files in WebDataset's layout, to read
arrow:PATH, PATH.parquet, PATH.arrow         Parquet or Arrow files, to read
folder:PATH, PATH                            a folder
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from penstock.errors import ConfigError
from penstock.optional import missing_extra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.stores.store import Store, StoreWriter

__all__ = ["Address", "create_store", "open_store"]

Kind = Literal["lmdb", "mongodb", "tar", "arrow", "folder"]

_PREFIXES: Final[dict[str, Kind]] = {
    "lmdb:": "lmdb",
    "mongodb://": "mongodb",
    "mongodb+srv://": "mongodb",
    "tar:": "tar",
    "arrow:": "arrow",
    "folder:": "folder",
}
_SUFFIXES: Final[dict[str, Kind]] = {
    ".lmdb": "lmdb",
    ".tar": "tar",
    ".parquet": "arrow",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_LAYOUTS: Final[dict[str, tuple[str, ...]]] = {
    "lmdb": ("records", "pickle"),
    "folder": ("auto", "classes", "flat", "voc"),
}


class Address(NamedTuple):
    """A store's address, taken apart.

    Attributes:
        kind: What lies there.
        place: The path; for MongoDB the whole URI, which may hold a password: never to be shown.
    """

    kind: Kind
    place: str

    @classmethod
    def parse(cls, text: str | Path) -> Address:
        """Take an address apart.

        Raises:
            ConfigError: it is empty, or of a kind that is not known.

        Example:
            >>> Address.parse("lmdb:photos.lmdb"), Address.parse("photos")
            (Address(kind='lmdb', place='photos.lmdb'), Address(kind='folder', place='photos'))
        """
        text = str(text)
        for prefix, kind in _PREFIXES.items():
            if text[: len(prefix)].lower() == prefix:
                rest = text[len(prefix) :]
                if not rest:
                    raise ConfigError(f"the address {prefix!r} names no place: {prefix}PATH.")
                return cls(kind, prefix + rest if kind == "mongodb" else rest)
        if text[:7].lower() == "mongodb":  # not quoted: a password may be in it
            raise ConfigError(
                "an address that begins with mongodb has the form "
                "mongodb://USER:PASSWORD@HOST/DB.COLLECTION (or mongodb+srv://…). Name a folder "
                "that is called so as ./mongodb…"
            )
        scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(//)?", text)
        if scheme is not None and not os.path.exists(text):
            raise ConfigError(
                f"addresses that begin with {scheme[0]} are not known. Known are a folder, "
                "lmdb:PATH, mongodb://HOST/DB.COLLECTION, tar:PATH and arrow:PATH; a path with a "
                "colon is named as ./PATH."
            )
        if not text:
            raise ConfigError("the address of a store is empty.")
        return cls(_SUFFIXES.get(Path(text).suffix.lower(), "folder"), text)


def open_store(
    address: str | Path,
    *,
    layout: str | None = None,
    trusted: bool = False,
    **options: Any,  # noqa: ANN401
) -> Store:
    """Return the store at an address. It is opened at first use.

    Args:
        address: `lmdb:PATH`, `mongodb://HOST/DB.COLLECTION`, `tar:PATH`, `arrow:PATH`, or a folder.
        layout: For LMDB files, "records" is what `pack` writes, the default; "pickle" is what many
            scripts make by hand: pickled `(bytes, label)` under the ascii number, with `__len__` or
            `__keys__`. For folders see `FolderStore`.
        trusted: Whether pickles may be decoded, which can run any program that whoever wrote them
            wanted to be run.
        options: For that kind of store: see `LMDBStore`, `MongoStore`, `TarStore`, `ArrowStore`,
            `FolderStore`.

    Raises:
        ConfigError: the address is of no known kind, or an option does not fit.
        MissingExtraError: what it needs is not installed; the message names the extra.

    Example:
        >>> open_store("lmdb:photos.lmdb")
        <LMDBStore lmdb:photos.lmdb>
    """
    kind, place = Address.parse(address)
    if layout is not None and kind in _LAYOUTS:
        if layout not in _LAYOUTS[kind]:
            known = " or ".join(map(repr, _LAYOUTS[kind]))
            raise ConfigError(f"layout of {kind} stores is {known}, not {layout!r}.")
    elif layout is not None:
        raise ConfigError(f"{kind} stores have no option 'layout'.")
    try:
        return _open(kind, place, layout, options, trusted=trusted)
    except ModuleNotFoundError as error:
        raise missing_extra(error, "this store") from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        name = str(error).rpartition("argument ")[2]
        raise ConfigError(f"{kind} stores have no option {name}.") from error


def _open(
    kind: Kind, place: str, layout: str | None, options: dict[str, Any], *, trusted: bool
) -> Store:
    if kind == "lmdb" and layout == "pickle":
        from penstock.stores.lmdb.pickled import PickledLMDBStore

        return PickledLMDBStore(place, trusted=trusted, **options)
    if kind == "lmdb":
        from penstock.stores.lmdb.store import LMDBStore

        return LMDBStore(place, **options)
    if kind == "mongodb":
        from penstock.stores.mongo.store import MongoStore

        return MongoStore(place, **options)
    if kind == "tar":
        from penstock.stores.tar.store import TarStore

        return TarStore(place, **options)
    if kind == "arrow":
        from penstock.stores.arrow.store import ArrowStore

        return ArrowStore(place, **options)
    from penstock.stores.folder.store import FolderStore

    options = options if layout is None else {"layout": layout, **options}
    return FolderStore(place, **options)


def create_store(
    address: str | Path,
    *,
    class_names: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    what: str = "",
    resume: bool = False,
    overwrite: bool = True,
    num_shards: int = 1,
    num_records: int | None = None,
    **options: Any,  # noqa: ANN401
) -> StoreWriter:
    """Return a writer that makes a store at an address, in place of one that may be there.

    A path that ends in letters after a dot and is no folder yet has to say its kind: it may be a
    slip of the pen.

    Args:
        address: `lmdb:PATH`, `mongodb://HOST/DB.COLLECTION`, or a folder.
        class_names: Name of class 0, 1, 2 …
        metadata: Any JSON, to be kept in the index.
        what: Says what is being packed, and how; a resumed writer has to be given the same.
        resume: Whether to go on with what an interrupted writer left, if it left anything.
        overwrite: Whether a store that is there may be replaced.
        num_shards: Number of files, for LMDB.
        num_records: How many there will be; needed with shards.
        options: For that kind of store.

    Raises:
        ConfigError: stores of this kind cannot be written, or not in shards, or the path's suffix
            is of none.
        StoreError: another writer is at it, what it left is of another source, or there is a store
            that may not be replaced.
        MissingExtraError: what it needs is not installed; the message names the extra.
    """
    kind, place = Address.parse(address)
    if kind in ("tar", "arrow"):
        raise ConfigError(
            f"{kind} stores can be read, not written: pack into LMDB, MongoDB, a folder."
        )
    _refuse_unknown_suffix(str(address))
    if num_shards < 1 or (num_shards > 1 and (kind != "lmdb" or num_records is None)):
        raise ConfigError(f"num_shards={num_shards}: LMDB files alone can be sharded, from 1 on.")
    facts: dict[str, Any] = {
        "class_names": class_names,
        "metadata": metadata,
        "what": what,
        "resume": resume,
        "overwrite": overwrite,
        **options,
    }
    try:
        return _create(kind, place, num_shards, num_records or 0, facts)
    except ModuleNotFoundError as error:
        raise missing_extra(error, "this store") from error


def _refuse_unknown_suffix(text: str) -> None:
    """Raise where a folder would be made of a name that looks like that of a file.

    Raises:
        ConfigError: it does.
    """
    suffix = Path(text).suffix
    is_plain = Address.parse(text) == Address("folder", text) and not text.endswith(os.sep)
    if is_plain and suffix[1:].isalpha() and not os.path.isdir(text):
        raise ConfigError(
            f"{text} would be a folder, and {suffix} looks like the end of a file's name. Did you "
            f"mean lmdb:{text}, or a path that ends in .lmdb? folder:{text} makes the folder."
        )


def _create(
    kind: Kind, place: str, num_shards: int, num_records: int, facts: dict[str, Any]
) -> StoreWriter:
    if kind == "mongodb":
        from penstock.stores.mongo.writer import MongoWriter

        return MongoWriter(place, **facts)
    if kind == "folder":
        from penstock.stores.folder.writer import FolderWriter

        return FolderWriter(place, **facts)
    from penstock.stores.lmdb.writer import LMDBWriter, ShardedLMDBWriter

    if num_shards > 1:
        return ShardedLMDBWriter(place, num_shards, num_records, **facts)
    return LMDBWriter(place, **facts)
