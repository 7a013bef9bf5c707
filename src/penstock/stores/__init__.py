# SPDX-License-Identifier: Apache-2.0
"""Stores: encoded samples in a folder, an LMDB file or MongoDB, and datasets over them.

`pack` puts any dataset, folder or other store into one; `LMDBDataset`, `MongoDataset` and
`penstock.vision.ImageFolder` read it back, a batch at a time.
"""

from __future__ import annotations

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

from penstock.stores.address import create_store, open_store
from penstock.stores.dataset import StoreDataset
from penstock.stores.datasets import LMDBDataset, MongoDataset
from penstock.stores.packing import PackReport, pack
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store, StoreWriter

__all__ = [
    "EncodedImage",
    "LMDBDataset",
    "MongoDataset",
    "PackReport",
    "Record",
    "Store",
    "StoreDataset",
    "StoreWriter",
    "create_store",
    "open_store",
    "pack",
]
