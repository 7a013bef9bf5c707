# SPDX-License-Identifier: Apache-2.0
"""Kinds of stores: what their addresses begin with, what reads them, and what writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.blobs.blobs import is_remote
from penstock.errors import ConfigError
from penstock.optional import call_registered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.stores.store import Store, StoreWriter


# Reader and writer: callables, or where these are found.
_kinds: dict[str, tuple[Callable[..., Store] | str, Callable[..., StoreWriter] | str | None]] = {}
_suffixes: dict[str, str] = {}


def register_store(
    scheme: str,
    reader: Callable[..., Store] | str,
    *,
    writer: Callable[..., StoreWriter] | str | None = None,
    suffixes: Sequence[str] = (),
) -> None:
    """Make a kind of store known to `open_store`, `create_store`, `pack` and `StoreDataset`.

    Args:
        scheme: What its addresses begin with: `SCHEME:PLACE`. A kind of this name is replaced.
        reader: Called with the place and the options of `open_store`; returns the `Store`. Or
            where it is found, as "package.module:name", to be imported at first use.
        writer: Called with the place and the arguments of `create_store` that its caller gives;
            returns the `StoreWriter`. None: stores of this kind can be read only.
        suffixes: Ends of paths, such as ".zip", that are of this kind without the scheme.

    Raises:
        ConfigError: the scheme is not a word.

    Example:
        >>> register_store("zip", "my_package.zips:ZipStore", suffixes=[".zip"])
        >>> Address.parse("photos.zip")
        Address(kind='zip', place='photos.zip')
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme):
        raise ConfigError(f"the scheme of an address is a word in lower case, not {scheme!r}.")
    _kinds[scheme] = (reader, writer)
    _suffixes.update(dict.fromkeys(suffixes, scheme))


register_store(
    "lmdb",
    "penstock.stores.lmdb.store:open_lmdb",
    writer="penstock.stores.lmdb.writer:LMDBWriter",
    suffixes=[".lmdb"],
)
register_store(
    "mongodb",
    "penstock.stores.mongo.store:MongoStore",
    writer="penstock.stores.mongo.writer:MongoWriter",
)
register_store(
    "shards",
    "penstock.stores.shards.store:ShardStore",
    writer="penstock.stores.shards.writer:ShardWriter",
)
register_store("tar", "penstock.stores.tar_objects:open_tar", suffixes=[".tar"])
register_store(
    "arrow",
    "penstock.stores.arrow_objects:open_arrow",
    suffixes=[".parquet", ".arrow", ".feather"],
)
register_store("mds", "penstock.stores.mds:MDSStore")
register_store("folder", "penstock.stores.folder.store:open_folder")
register_store("voc", "penstock.vision.annotations.voc_folder:VOCFolderStore")


_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(//)?")


class Address(NamedTuple):
    """A store's address, taken apart."""

    kind: str
    place: str

    @classmethod
    def parse(cls, text: str | Path) -> Address:
        """Take an address apart."""
        text = str(text)
        if re.match(r"mongodb(\+srv)?://.", text, re.IGNORECASE):
            scheme, _, rest = text.partition("://")
            return cls("mongodb", f"{scheme.lower()}://{rest}")
        if text[:7].lower() == "mongodb":  # not quoted: a password may be in it
            raise ConfigError(
                "an address that begins with mongodb has the form "
                "mongodb://USER:PASSWORD@HOST/DB.COLLECTION (or mongodb+srv://…). Name a folder "
                "that is called so as ./mongodb…"
            )
        if is_remote(text):
            return cls("shards", text)
        scheme, colon, place = text.partition(":")
        if colon and scheme.lower() in _kinds:
            text = place
            if text:
                return cls(scheme.lower(), text)
        elif (found := _SCHEME.match(text)) and not os.path.exists(text):
            raise ConfigError(
                f"addresses that begin with {found[0]} are not known. Known are "
                f"{', '.join(f'{kind}:PATH' for kind in _kinds)}, s3://, gs://, az:// and "
                "https://; a path with a colon is named as ./PATH. For a kind of your own, import "
                "the module that registers it, or name module:dataset on the command line."
            )
        if not text:
            raise ConfigError("the address of a store names no place: KIND:PATH, or PATH.")
        return cls(_suffixes.get(Path(text).suffix.lower(), "folder"), text)


def open_store(
    address: str | Path,
    *,
    layout: str | None = None,
    trusted: bool = False,
    **options: Any,  # noqa: ANN401
) -> Store:
    """Return the store at an address. It is opened at first use.

    Args:
        address: `lmdb:PATH`, `mongodb://HOST/DB.COLLECTION`, `tar:PATH`, `arrow:PATH`, `mds:PATH`,
            a folder, or of a kind that `register_store` has made known.
        layout: For LMDB files, "records" is what `pack` writes, the default; "pickle" is what many
            scripts make by hand: pickled `(bytes, label)` under the ascii number, with `__len__` or
            `__keys__`. For folders "auto", the default, "classes", "flat" or "voc".
        trusted: Whether pickles may be decoded, which can run any program that their writer wanted
            to be run.
        options: Of that kind of store: see its page.

    Raises:
        ConfigError: the address is of no known kind, or an option does not fit.
        MissingExtraError: what it needs is not installed; the message names the extra.

    Example:
        >>> open_store("lmdb:photos.lmdb")
        <LMDBStore lmdb:photos.lmdb>
    """
    if layout is not None:
        options["layout"] = layout
    if trusted:
        options["trusted"] = trusted
    return open_kind(*Address.parse(address), **options)


def open_kind(kind: str, place: str, **options: Any) -> Store:  # noqa: ANN401
    """Return the store of a kind at a place; raises as `open_store` does."""
    if kind in ("lmdb", "voc") and is_remote(place):
        raise ConfigError(
            f"{kind}:{place}: {kind} is read on this machine alone. In object storage lie stores "
            "that `penstock pack SRC s3://BUCKET/PREFIX` made, and tar:, folder:, mds: and arrow:."
        )
    store: Store = _called(kind, _kinds[kind][0], place, options)
    return store


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

    Args:
        address: `lmdb:PATH`, a path that ends in `.lmdb`, or `mongodb://HOST/DB.COLLECTION`.
        class_names: Name of class 0, 1, 2 …
        metadata: Any JSON, to be kept in the index.
        what: Says what is being packed, and how; a resumed writer has to be given the same.
        resume: Whether to go on with what an interrupted writer left, if it left anything.
        overwrite: Whether a store that is there may be replaced.
        num_shards: Number of files, for LMDB.
        num_records: How many there will be; needed with shards.
        options: For that kind of store.

    Raises:
        ConfigError: stores of this kind cannot be written, or not in shards.
        StoreError: another writer is at it, what it left is of another source, or there is a store
            that may not be replaced.
        MissingExtraError: what it needs is not installed; the message names the extra.
    """
    kind, place = Address.parse(address)
    writer = _kinds[kind][1]
    if writer is None:
        raise ConfigError(
            f"{kind} stores can be read, not written, as {place} would be. Pack into an LMDB file, "
            "lmdb:PATH or a path that ends in .lmdb, or into mongodb://HOST/DB.COLLECTION."
        )
    if num_shards < 1 or (num_shards > 1 and num_records is None):
        raise ConfigError(f"{num_shards=}: it is 1 or more, and more than 1 needs num_records.")
    if num_shards > 1:
        options |= {"num_shards": num_shards, "num_records": num_records}
    facts = {
        "class_names": class_names,
        "metadata": metadata,
        "what": what,
        "resume": resume,
        "overwrite": overwrite,
    }
    made: StoreWriter = _called(kind, writer, place, facts | options)
    return made


def _called(kind: str, make: Callable[..., Any] | str, place: str, options: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return what a reader or writer makes; MissingExtraError and ConfigError as `open_store`."""
    return call_registered(make, place, options, "this store", f"{kind} stores have")
