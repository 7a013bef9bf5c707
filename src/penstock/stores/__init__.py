# SPDX-License-Identifier: Apache-2.0
"""Stores: encoded samples in an LMDB file, MongoDB or a folder, and datasets over them.

`pack` puts any dataset, folder or other store into LMDB or MongoDB; `LMDBDataset`, `MongoDataset`
and, for any address, `StoreDataset` read it back, a batch at a time. `register_store` makes a kind
of store known.
"""

from __future__ import annotations

from penstock.deprecation import removed_names
from penstock.errors import MissingExtraError
from penstock.optional import install_command

try:
    import msgspec  # noqa: F401 - what every store needs
    import xxhash  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"stores need {error.name}, which is not installed. Install it with the extra of the store "
        f"you use (lmdb, mongo, arrow, or vision for folders): {install_command('lmdb')}"
    ) from error

from penstock.stores.dataset import LMDBDataset, MongoDataset, StoreDataset
from penstock.stores.index import Index
from penstock.stores.packing import pack
from penstock.stores.records import EncodedImage, Record
from penstock.stores.registry import create_store, open_store, register_store
from penstock.stores.store import Store, StoreWriter

__all__ = [
    "EncodedImage",
    "Index",
    "LMDBDataset",
    "MongoDataset",
    "Record",
    "Store",
    "StoreDataset",
    "StoreWriter",
    "create_store",
    "open_store",
    "pack",
    "register_store",
]

__getattr__ = removed_names(__name__, {"PackReport": "penstock.stores.packing.PackReport"})
