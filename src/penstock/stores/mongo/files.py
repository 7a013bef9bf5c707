# SPDX-License-Identifier: Apache-2.0
"""Files in GridFS, many at once: what is too large for a MongoDB document."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from gridfs import GridFSBucket

from penstock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bson import ObjectId
    from pymongo.database import Database

__all__ = ["read_files", "remove_other_files", "write_file"]

_CHUNK_BYTES: Final = 4 << 20  # GridFS' own 255 KiB would be 60 documents for the smallest of ours


def read_files(
    database: Database[Any], bucket: str, ids: Sequence[ObjectId]
) -> dict[ObjectId, bytes]:
    """Return the contents of files by id, those that are there. Two queries in all.

    Raises:
        StoreError: a file lacks a part.
    """
    asked = {"$in": list(dict.fromkeys(ids))}
    found = database[f"{bucket}.files"].find({"_id": asked}, {"length": 1})
    lengths = {file["_id"]: file.get("length") for file in found}
    parts: dict[ObjectId, list[bytes]] = defaultdict(list)
    order = [("files_id", 1), ("n", 1)]
    for chunk in database[f"{bucket}.chunks"].find({"files_id": asked}, sort=order):
        data = chunk.get("data")
        parts[chunk["files_id"]].append(data if isinstance(data, bytes) else b"")
    files = {file_id: b"".join(parts[file_id]) for file_id in lengths}
    for file_id, data in files.items():
        if len(data) != lengths[file_id]:
            raise StoreError(
                f"the GridFS file {file_id} in {database.name}.{bucket} lacks a part: it has "
                f"{len(data):,} of {lengths[file_id]!r:.40} bytes. Restore it from a copy."
            )
    return files


def write_file(
    database: Database[Any], bucket: str, file_id: ObjectId, key: str, data: bytes, pack: ObjectId
) -> None:
    """Write a file, over what an interrupted try left of it; `pack` says whose it is."""
    database[f"{bucket}.chunks"].delete_many({"files_id": file_id})
    database[f"{bucket}.files"].delete_one({"_id": file_id})
    files = GridFSBucket(database, bucket_name=bucket, chunk_size_bytes=_CHUNK_BYTES)
    files.upload_from_stream_with_id(file_id, key, data, metadata={"pack": pack})


def remove_other_files(database: Database[Any], bucket: str, keep: Iterable[ObjectId]) -> None:
    """Remove what earlier packs, and interrupted ones, left in a bucket of ours."""
    kept = list(keep)
    database[f"{bucket}.files"].delete_many({"_id": {"$nin": kept}})
    database[f"{bucket}.chunks"].delete_many({"files_id": {"$nin": kept}})
