# SPDX-License-Identifier: Apache-2.0
"""What a writer leaves in a folder beside the records: files that begin with `.penstock`.

.penstock         JSON: that a writer made this folder, in which layout, from what, with which
                  metadata; and the fingerprint of the records for as long as no file changes
.penstock-files   a record: which files it wrote, so that no others are ever removed: see guard.py
.penstock-index   a record: keys, labels, class names, the path, kind and checksum of each; only
                  where a listing of the folder would not give the same
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.opening import open_file, read_file
from penstock.stores.index import Index
from penstock.stores.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "IMAGE",
    "INDEX_NAME",
    "MARKER_NAME",
    "OURS",
    "PAIR",
    "RECORD",
    "VOC",
    "Listing",
    "annotation_path",
    "file_stats",
    "is_safe",
    "names_fingerprint",
    "read_index",
    "read_marker",
    "stat_fingerprint",
    "write_index",
    "write_marker",
]

OURS: Final = ".penstock"  # what the names of our own files begin with
MARKER_NAME: Final = OURS
INDEX_NAME: Final = OURS + "-index"
_FORMAT: Final = "penstock folder"
_VERSION: Final = 1
_FIELDS: Final = {
    "layout": str, "num_records": int, "fingerprint": str, "files": str, "what": str,
}  # fmt: skip
_MAX_MARKER_BYTES: Final = 64 << 20  # metadata is small; what is larger is no marker

# What a file holds: an image that is a pair with its label, an image that is the sample, an image
# with annotations in a file of their own, an encoded record.
PAIR, IMAGE, VOC, RECORD = 0, 1, 2, 3

# Leaves the folder, means another place on another system, or is the name of a file of ours.
_UNSAFE: Final = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)|[\0\\]|^\.penstock")


def is_safe(path: str) -> bool:
    r"""Return whether a relative path stays in its folder, and clear of our own files.

    Example:
        >>> [is_safe(path) for path in ("cat/1.jpg", "../1.jpg", "/1.jpg", "a//b", "a\\b", "")]
        [True, False, False, False, False, False]
    """
    return _UNSAFE.search(path) is None


@dataclass(frozen=True, eq=False)
class Listing:
    """The records of a folder, and the files they are in.

    Attributes:
        keys: Name of each record.
        paths: Its file, relative to the folder; the same list where keys are paths.
        kinds: PAIR, IMAGE, VOC or RECORD for each, uint8, shape (records,).
        labels: As in `Index`.
        class_names: As in `Index`.
        checksums: XXH3-64 of each file but those of records, uint64; None if not known.
    """

    keys: PackedList[str]
    paths: PackedList[str]
    kinds: NDArray[np.uint8]
    labels: NDArray[np.int64] | RaggedArray | None = None
    class_names: tuple[str, ...] = ()
    checksums: NDArray[np.uint64] | None = field(default=None)

    def files(self) -> Iterator[str]:
        """Yield the paths of all files, those of annotations included."""
        for path, kind in zip(self.paths, self.kinds.tolist(), strict=True):
            yield path
            if kind == VOC:
                yield annotation_path(path)

    def equals(self, other: Listing) -> bool:
        """Return whether a reader of `other` would get the same; checksums aside."""
        return (
            self.keys == other.keys
            and self.paths == other.paths
            and np.array_equal(self.kinds, other.kinds)
            and self.class_names == other.class_names
            and _same_labels(self.labels, other.labels)
        )


def _same_labels(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and one == other


def annotation_path(image_path: str) -> str:
    """Return where the annotations of `JPEGImages/NAME.jpg` are.

    Example:
        >>> annotation_path("JPEGImages/2008_000123.jpg")
        'Annotations/2008_000123.xml'
    """
    name = image_path.rpartition("/")[2]
    return f"Annotations/{os.path.splitext(name)[0]}.xml"


def file_stats(root: Path, listing: Listing) -> NDArray[np.int64]:
    """Return size in bytes and time in ns of every file; int64, shape (files, 2).

    A file that is not there counts as one of size -1.
    """
    stats = [_size_and_time(f"{root}/{path}") for path in listing.files()]
    return np.array(stats, np.int64).reshape(-1, 2)


def stat_fingerprint(listing: Listing, stats: NDArray[np.int64]) -> str:
    """Return a hash of keys, labels, class names, and size and time of every file."""
    digest = _digest_of_names(listing)
    digest.update(stats.tobytes())
    return digest.hexdigest()


def names_fingerprint(listing: Listing) -> str:
    """Return a hash of keys, labels and class names; no file is asked for anything.

    The same wherever the folder is copied to.
    """
    return _digest_of_names(listing).hexdigest()


def _digest_of_names(listing: Listing) -> hashlib.blake2b:
    digest = hashlib.blake2b(digest_size=16)
    for names in (listing.keys, PackedList(listing.class_names)):
        text, offsets = names.to_utf8() if len(names) else (b"", np.zeros(1, np.int64))
        digest.update(bytes(offsets))
        digest.update(bytes(text))
    labels: Any = listing.labels
    parts = [labels.values, labels.offsets] if isinstance(labels, RaggedArray) else [labels]
    for part in parts:
        digest.update(b"" if part is None else part.tobytes())
    return digest


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


def write_marker(root: Path, facts: dict[str, Any]) -> None:
    """Leave the marker in a folder.

    Raises:
        StoreError: the metadata are no JSON.
    """
    marker = {"format": _FORMAT, "version": _VERSION, **facts}
    try:
        text = json.dumps(marker, indent=1)
    except (TypeError, ValueError) as error:
        raise StoreError(f"metadata of a folder are JSON, and these are not: {error}.") from error
    (root / MARKER_NAME).write_text(text + "\n", encoding="utf-8")


def read_marker(root: Path) -> dict[str, Any] | None:
    """Return what the marker of a folder says; None where no writer has left one.

    Raises:
        StoreError: it cannot be read, is damaged, or is of a later version.
    """
    path = root / MARKER_NAME
    try:
        if not path.is_file():
            return None
        with open_file(path) as file:
            marker = json.loads(file.read(_MAX_MARKER_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error
    if not isinstance(marker, dict) or marker.get("format") != _FORMAT:
        return None  # somebody else's file of that name
    if marker.get("version") != _VERSION or not isinstance(marker.get("metadata"), dict):
        raise StoreError(
            f"{path} has version {marker.get('version')!r} of the format, or no metadata; this "
            f"release of Penstock reads version {_VERSION}."
        )
    for name, kind in _FIELDS.items():
        if type(marker.get(name)) is not kind:
            raise StoreError(
                f"{path} is damaged: {name!r} is {marker.get(name)!r:.60}, and no {kind.__name__}. "
                "Restore it from a copy, or pack the folder anew."
            )
    return marker


def write_index(root: Path, listing: Listing) -> None:
    """Leave the index in a folder."""
    index = Index(listing.keys, listing.labels, listing.class_names)
    text, offsets = listing.paths.to_utf8()
    tree = {
        "index": index.to_tree(),
        "paths": {"text": text, "offsets": offsets},
        "kinds": listing.kinds,
        "checksums": listing.checksums,
    }
    (root / INDEX_NAME).write_bytes(encode_record("folder", tree).data)


def read_index(root: Path) -> Listing | None:
    """Return the listing that the index of a folder has; None where there is no index.

    Raises:
        StoreError: it is damaged, or names a file outside of the folder.
    """
    path = root / INDEX_NAME
    if not path.is_file():
        return None
    name = f"the index {path}"
    try:
        listing = _listing_of(decode_record(read_file(path, None), name).sample, name)
    except OSError as error:
        raise StoreError(f"{name} cannot be read: {error}.") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{name} is damaged: {error}.") from error
    unsafe = next((file for file in listing.paths if not is_safe(file)), None)
    if unsafe is not None:
        raise StoreError(f"{name} names a file outside of the folder, {unsafe!r}. Do not trust it.")
    return listing


def _listing_of(tree: Any, name: str) -> Listing:  # noqa: ANN401
    index = Index.from_tree(tree["index"], name)
    paths = PackedList.from_utf8(tree["paths"]["text"], tree["paths"]["offsets"])
    keys = PackedList(index.keys)
    kinds = _column(tree["kinds"], np.uint8, len(keys), "kinds")
    checksums = tree["checksums"]
    if checksums is not None:
        checksums = _column(checksums, np.uint64, len(keys), "checksums")
    if len(paths) != len(keys):
        raise ValueError(f"{len(keys)} keys, but {len(paths)} paths")
    for _ in (*keys, *paths):
        pass  # each is decoded, so that what is no UTF-8 is found now
    if len(kinds) and int(kinds.max()) > RECORD:
        raise ValueError(f"a record is of kind {int(kinds.max())}; {RECORD} is the last one known")
    _check_labels(index.labels, kinds)
    return Listing(keys, paths, kinds, index.labels, index.class_names, checksums)


def _column(value: Any, dtype: type, length: int, what: str) -> NDArray[Any]:  # noqa: ANN401
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != (length,):
        form = f"{value.dtype}, {value.shape}" if isinstance(value, np.ndarray) else repr(value)
        raise ValueError(f"{what} should be {np.dtype(dtype)}, ({length},), and are {form:.60}")
    return value


def _check_labels(labels: object, kinds: NDArray[np.uint8]) -> None:
    """Raise unless there is a label for each record, and one alone for each pair."""
    if labels is None:
        counts = np.zeros(len(kinds), np.int64)
    elif isinstance(labels, RaggedArray):
        counts = np.diff(labels.offsets)
    else:
        counts = np.ones(len(_column(labels, np.int64, len(kinds), "labels")), np.int64)
    if labels is not None and len(counts) != len(kinds):
        raise ValueError(f"{len(kinds)} keys, but {len(counts)} labels")
    (wrong,) = np.nonzero((kinds == PAIR) & (counts != 1))
    if len(wrong):
        number = int(wrong[0])
        raise ValueError(f"record {number} is an image with a class, and has {counts[number]}")
