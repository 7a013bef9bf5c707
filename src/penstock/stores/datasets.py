# SPDX-License-Identifier: Apache-2.0
"""`LMDBDataset` and `MongoDataset`: a store's samples, named for where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.stores.address import open_store
from penstock.stores.dataset import StoreDataset
from penstock.stores.filesystems import copy_to_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.stores.dataset import Decode

__all__ = ["LMDBDataset", "MongoDataset"]


class LMDBDataset(StoreDataset):
    """The samples of an LMDB file.

    Example:
        >>> import tempfile
        >>> from penstock.stores import pack
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = pack([("a cat", 0), ("a dog", 1)], f"lmdb:{folder.name}/texts.lmdb")
        >>> dataset = LMDBDataset(f"{folder.name}/texts.lmdb", transform=str.upper)
        >>> dataset[0], len(dataset)
        (('A CAT', 0), 2)
        >>> dataset.close(); folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: Decode = "rgb",
        repair: bool = False,
        layout: Literal["records", "pickle"] = "records",
        trusted: bool = False,
        verify: Literal["once", "always", "never"] = "once",
        verify_tree: Literal["first", "open", "never"] = "first",
        readahead: bool = False,
        copy_local: str | Path | None = None,
    ) -> None:
        """Read the index of an LMDB file.

        Args:
            path: What `penstock pack` made: a file, or the folder of its shards.
            transform: As for `StoreDataset`, like the three that follow.
            target_transform: For the second of a pair.
            decode: What becomes of images.
            repair: Whether JPEG files without an end are given one.
            layout: "pickle" for files of pickled `(bytes, label)` made by other scripts.
            trusted: Whether such pickles may be decoded. They can run any program.
            verify: When checksums of records are compared: the first time that a process reads one,
                every time, or never.
            verify_tree: When the pages are verified in which LMDB looks for records: once for this
                dataset and its workers, each time that a process opens the file, or never. Over a
                damaged one LMDB may end the process.
            readahead: Whether the system reads ahead: for reading in order.
            copy_local: A folder on a local disk, into which the file is copied once and read from
                there: for files on a network file system.

        Raises:
            StoreError: there is no such file, it is damaged, or no store.
            ConfigError: an option is none of those named, or `trusted` is missing for pickles.
        """
        place = str(path).removeprefix("lmdb:")
        if copy_local is not None:
            place = str(copy_to_local(Path(place), Path(copy_local)))
        options: dict[str, Any] = {} if layout == "pickle" else {"verify": verify}
        super().__init__(
            open_store(
                f"lmdb:{place}",
                layout=layout,
                trusted=trusted,
                verify_tree=verify_tree,
                readahead=readahead,
                **options,
            ),
            transform=transform,
            target_transform=target_transform,
            decode=decode,
            repair=repair,
        )
        self.store.close()  # processes that are forked from here on inherit no connection


class MongoDataset(StoreDataset):
    """The samples of a MongoDB collection, of `penstock pack` or anybody else's."""

    def __init__(
        self,
        uri: str,
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: Decode = "rgb",
        repair: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Read the index of a collection.

        Args:
            uri: `mongodb://USER:PASSWORD@HOST/DB.COLLECTION`, options of MongoDB's included. The
                password is kept to connect with, and shown nowhere.
            transform: As for `StoreDataset`, like the three that follow.
            target_transform: For the second of a pair.
            decode: What becomes of images.
            repair: Whether JPEG files without an end are given one.
            options: Of `MongoStore`: the fields of a collection that Penstock did not make, a
                manifest, options of the client.

        Raises:
            StoreError: the server cannot be reached, or there is no such collection.
            ConfigError: the URI or an option is wrong.
        """
        super().__init__(
            open_store(uri, **options),
            transform=transform,
            target_transform=target_transform,
            decode=decode,
            repair=repair,
        )
        self.store.close()  # processes that are forked from here on inherit no connection
