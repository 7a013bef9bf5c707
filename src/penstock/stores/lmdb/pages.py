# SPDX-License-Identifier: Apache-2.0
"""The pages of an LMDB file, verified without LMDB.

LMDB maps its file and follows the numbers in it: a page that is damaged, or that lies behind the
end, ends the process by SIGSEGV or SIGBUS. Here the file is read, not mapped, and every number is
compared with its bounds before it is used.

    pages 0, 1    meta pages: size of a page, root of the tree, last page, number of the transaction
    branch        keys and the pages below
    leaf          keys with their values, or with the page at which a long value begins
    overflow      a long value, over one page or several in a row
    behind them   a record: checksum of each meta, branch and leaf page (`pack` appends it)

LMDB ignores what lies behind the last page it knows of, and writes over it when the file grows. So
the checksums name the transaction that they belong to: those of an older one count no more.

Overflow pages are left out: what they hold has its own checksum, and LMDB follows no number there.

Reference:
    mdb.c of LMDB 0.9, `MDB_page`, `MDB_node`, `MDB_meta`; data version 1.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import xxhash

from penstock.errors import StoreError
from penstock.opening import open_file
from penstock.stores.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

    from numpy.typing import NDArray

LMDB_MAGIC: Final = (0xBEEFC0DE).to_bytes(4, sys.byteorder)
"""What an LMDB file has behind the 16 bytes of its first page's header."""

_PAGE: Final = np.dtype(
    [("number", "u8"), ("pad", "u2"), ("flags", "u2"), ("lower", "u2"), ("upper", "u2")]
)
_TREE: Final = np.dtype(
    [("pad", "u4"), ("flags", "u2"), ("depth", "u2"), ("counts", "u8", 4), ("root", "u8")]
)
_META: Final = np.dtype(
    [
        ("page", _PAGE),
        ("magic", "S4"),
        ("version", "u4"),
        ("address", "u8"),
        ("map_size", "u8"),
        ("free", _TREE),
        ("main", _TREE),
        ("last_page", "u8"),
        ("transaction", "u8"),
    ]
)
_BRANCH, _LEAF, _META_FLAG = 1, 2, 8
_LONG_VALUE, _NAMED_TREE = 1, 2  # flags of a node in a leaf
_VERSION: Final = 1
_HEADER_BYTES: Final = _PAGE.itemsize
_NODE_BYTES: Final = 8
_MAX_DEPTH: Final = 32  # LMDB's own stack
_PAGE_SIZES: Final = tuple(1 << bits for bits in range(8, 16))
_PART_PAGES: Final = 1024  # read and looked at together
_RECORD: Final = b"PNSK"


class _Meta(NamedTuple):
    """What the newer of the two meta pages says: the one that LMDB goes by."""

    path: Path
    file: FileIO
    page_bytes: int
    root: int
    depth: int
    last_page: int
    transaction: int
    is_regular: bool

    @property
    def end(self) -> int:
        """Where the last page ends, in bytes."""
        return (self.last_page + 1) * self.page_bytes


class _Nodes(NamedTuple):
    """Keys and values of some pages, each of them within its page."""

    row: NDArray[np.int64]
    key_stop: NDArray[np.int64]
    stop: NDArray[np.int64]
    size: NDArray[np.int64]
    is_long: NDArray[np.bool_]


def check_size(path: Path) -> None:
    """Raise StoreError if a file is truncated, or its meta pages are damaged; reads 8 KiB."""
    with open_file(path) as file:
        _read_meta(path, file)


def check_pages(path: Path) -> None:
    """Raise StoreError if a file is truncated, or its meta pages or its tree are damaged."""
    with open_file(path) as file:
        meta = _read_meta(path, file)
        sums = _read_checksums(meta)
        if sums is None:
            _tree_pages(meta)
            return
        changed = _checksums(meta, sums["pages"]) != sums["checksums"]
        # If only values have changed, LMDB can read the page, and the checksums of the records show
        # which record is damaged.
        numbers = sums["pages"][changed]
        is_tree = _checksums_without_values(meta, numbers) != sums["without_values"][changed]
        _refuse(meta, numbers, np.arange(len(numbers)), is_tree)


def check_unfinished(path: Path) -> None:
    """Raise StoreError if the tree of a file that LMDB has yet to complete is damaged."""
    with open_file(path) as file:
        meta = _read_meta(path, file, is_complete=False)
        there = os.fstat(file.fileno()).st_size // meta.page_bytes
        _tree_pages(meta._replace(last_page=min(meta.last_page, there - 1)))


def append_checksums(path: Path) -> None:
    """Write the checksums of a file's pages behind them, and bring the file to disk."""
    with path.open("r+b", buffering=0) as file:
        meta = _read_meta(path, file, is_complete=False)
        # Pages that were freed at the end may not be in the file; behind them may lie older sums.
        file.truncate(meta.end)
        numbers = np.concatenate([np.arange(2), np.sort(_tree_pages(meta))])
        sums = {
            "transaction": meta.transaction,
            "pages": numbers,
            "checksums": _checksums(meta, numbers),
            "without_values": _checksums_without_values(meta, numbers),
        }
        file.seek(meta.end)
        file.write(encode_record("pages", sums).data)
        os.fsync(file.fileno())


def _read_meta(path: Path, file: FileIO, *, is_complete: bool = True) -> _Meta:
    size_bytes = os.fstat(file.fileno()).st_size
    first = _read_one_meta(path, file, 0, 0)
    second = _read_one_meta(path, file, 1, int(first["free"]["pad"]))
    newest = second if second["transaction"] > first["transaction"] else first
    main = newest["main"]
    if main["flags"]:
        raise StoreError(
            f"{path} is an LMDB file that Penstock did not write, or its meta pages are damaged: "
            f"its keys are of another kind (flags {int(main['flags']):#x})."
        )
    meta = _Meta(
        path,
        file,
        int(newest["free"]["pad"]),
        int(main["root"]),
        int(main["depth"]),
        int(newest["last_page"]),
        int(newest["transaction"]),
        second["transaction"] % 2 == 1
        and abs(int(second["transaction"]) - int(first["transaction"])) == 1,
    )
    is_empty = meta.depth == 0 and meta.root == 2**64 - 1
    if not is_empty and not (2 <= meta.root <= meta.last_page and 1 <= meta.depth < _MAX_DEPTH):
        raise _damaged(meta.path, int(newest is second), meta.page_bytes)
    if is_complete and size_bytes < meta.end:
        raise StoreError(
            f"{path} is truncated: it has {size_bytes:,} bytes, its header accounts for "
            f"{meta.end:,}. Was it copied while the disk was full? Copy it again. (A file of other "
            "making may lack free pages at its end: `mdb_copy -c` makes it whole.)"
        )
    return meta


def _read_one_meta(path: Path, file: FileIO, number: int, page_bytes: int) -> Any:  # noqa: ANN401
    file.seek(number * page_bytes)
    data = file.read(_META.itemsize)
    if len(data) < _META.itemsize or (number == 0 and data[16:20] != LMDB_MAGIC):
        raise StoreError(f"cannot open {path} as LMDB file: it is none, or its start is damaged.")
    meta = np.frombuffer(data, _META)[0]
    if (
        meta["magic"] != LMDB_MAGIC
        or meta["version"] != _VERSION
        or meta["page"]["flags"] != _META_FLAG
        or meta["free"]["pad"] not in _PAGE_SIZES
        or (number and meta["free"]["pad"] != page_bytes)
    ):
        raise _damaged(path, number, page_bytes)
    return meta


def _read_checksums(meta: _Meta) -> dict[str, Any] | None:
    """Return the record behind the pages; None if there is none of this transaction."""
    meta.file.seek(meta.end)
    if meta.file.read(len(_RECORD)) != _RECORD:
        return None
    name = f"{meta.path}, in the checksums behind its pages,"
    sums: dict[str, Any] = decode_record(_RECORD + meta.file.read(), name).sample
    written = sums["transaction"]
    if written < meta.transaction and meta.is_regular:  # LMDB was used to write to the file since
        return None
    if written != meta.transaction:
        raise _damaged(meta.path, max(written, meta.transaction) % 2, meta.page_bytes)
    return sums


def _checksums(meta: _Meta, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    found = (xxhash.xxh3_64_intdigest(page) for _, pages in _parts(meta, numbers) for page in pages)
    return np.fromiter(found, np.uint64, len(numbers))


def _checksums_without_values(meta: _Meta, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the checksums of pages with their values set to zero: records have checksums."""
    found: list[int] = []
    for part, pages in _parts(meta, numbers):
        (leaves,) = np.nonzero(_heads(pages)["flags"] == _LEAF)
        nodes = _nodes(meta, part[leaves], pages[leaves], _LEAF)
        is_here = ~nodes.is_long
        values = leaves[nodes.row[is_here]], nodes.key_stop[is_here], nodes.stop[is_here]
        for row, start, stop in zip(*(of_all.tolist() for of_all in values), strict=True):
            pages[row, start:stop] = 0
        found += map(xxhash.xxh3_64_intdigest, pages)
    return np.array(found, np.uint64)


def _parts(
    meta: _Meta, numbers: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield some of the numbers with their pages: uint8, shape (pages, bytes of a page)."""
    for start in range(0, len(numbers), _PART_PAGES):
        part = numbers[start : start + _PART_PAGES]
        pages = np.empty((len(part), meta.page_bytes), np.uint8)
        runs = np.split(np.arange(len(part)), np.flatnonzero(np.diff(part) != 1) + 1)
        for run in runs:  # all are asked for first: a disk has many at work at once
            place, size_bytes = part[run[0]] * meta.page_bytes, len(run) * meta.page_bytes
            if hasattr(os, "posix_fadvise"):  # Linux
                os.posix_fadvise(meta.file.fileno(), place, size_bytes, os.POSIX_FADV_WILLNEED)
        for run in runs:  # pages in a row are read at once
            wanted = pages[run[0] : run[-1] + 1].data
            meta.file.seek(int(part[run[0]]) * meta.page_bytes)
            if meta.file.readinto(wanted) != wanted.nbytes:
                raise StoreError(f"{meta.path} became shorter while it was read.")
        yield part, pages


def _tree_pages(meta: _Meta) -> NDArray[np.int64]:
    """Return the numbers of the tree's pages, level by level, all numbers in them verified."""
    levels = _levels(meta)
    for part, pages in _parts(meta, levels[-1]):
        _check_long_values(meta, part, pages, _nodes(meta, part, pages, _LEAF))
    return np.concatenate(levels)


def _levels(meta: _Meta) -> list[NDArray[np.int64]]:
    """Return the tree's pages, level by level; the last one's are leaves."""
    level = np.array([meta.root] if meta.depth else [], np.int64)
    levels = [level]
    for _ in range(1, meta.depth):
        below = []
        for part, pages in _parts(meta, level):
            nodes = _nodes(meta, part, pages, _BRANCH)
            _refuse(meta, part, nodes.row, _is_outside(meta, nodes.size, nodes.size))
            below.append(nodes.size)
        level = np.sort(np.concatenate(below))
        (repeated,) = np.nonzero(np.diff(level) == 0)
        if len(repeated):  # a cycle among them
            raise _damaged(meta.path, int(level[repeated[0]]), meta.page_bytes)
        levels.append(level)
    return levels


def _check_long_values(
    meta: _Meta, numbers: NDArray[np.int64], pages: NDArray[np.uint8], nodes: _Nodes
) -> None:
    row, size = nodes.row[nodes.is_long], nodes.size[nodes.is_long]
    places = row * meta.page_bytes + nodes.key_stop[nodes.is_long]
    text = pages.reshape(-1)[places[:, None] + np.arange(8)]
    first = text.view(np.int64)[:, 0]
    last = first + (_HEADER_BYTES + size - 1) // meta.page_bytes
    _refuse(meta, numbers, row, _is_outside(meta, first, last))


def _is_outside(
    meta: _Meta, first: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.bool_]:
    # A first page near 2**63 makes `last` negative.
    return (first < 2) | (last < first) | (last > meta.last_page)


def _nodes(meta: _Meta, numbers: NDArray[np.int64], pages: NDArray[np.uint8], flag: int) -> _Nodes:
    """Return where the keys and values lie in pages of one kind."""
    heads = _heads(pages)
    lower, upper = heads["lower"].astype(np.int64), heads["upper"].astype(np.int64)
    counts = (lower - _HEADER_BYTES) // 2
    _refuse(
        meta,
        numbers,
        np.arange(len(numbers)),
        (heads["number"] != numbers.astype(np.uint64))
        | (heads["flags"] != flag)
        | (counts < (2 if flag == _BRANCH else 1))  # LMDB aborts over a branch to one page
        | (lower % 2 == 1)
        | (lower > upper)
        | (upper > meta.page_bytes),
    )
    row = np.repeat(np.arange(len(numbers)), counts)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    words = pages.view(np.uint16)
    start = words[row, _HEADER_BYTES // 2 + slot].astype(np.int64)
    is_outside = (start < upper[row]) | (start + _NODE_BYTES > meta.page_bytes) | (start % 2 == 1)
    _refuse(meta, numbers, row, is_outside)
    low, high, flags, key_bytes = (words[row, start // 2 + k].astype(np.int64) for k in range(4))
    size = low | high << 16
    key_stop = start + _NODE_BYTES + key_bytes
    if flag == _BRANCH:
        size |= flags << 32
        is_long, stop = np.zeros(len(row), np.bool_), key_stop
        is_odd = is_long
    else:
        is_long = flags & _LONG_VALUE != 0
        stop = key_stop + np.where(is_long, 8, size)
        is_odd = flags & ~(_LONG_VALUE | _NAMED_TREE) != 0
    _refuse(meta, numbers, row, (stop > meta.page_bytes) | is_odd)
    return _Nodes(row, key_stop, stop, size, is_long)


def _heads(pages: NDArray[np.uint8]) -> NDArray[np.void]:
    return np.ascontiguousarray(pages[:, :_HEADER_BYTES]).view(_PAGE)[:, 0]


def _refuse(
    meta: _Meta, numbers: NDArray[np.int64], row: NDArray[np.int64], is_bad: NDArray[np.bool_]
) -> None:
    if is_bad.any():
        raise _damaged(meta.path, int(numbers[row[is_bad.argmax()]]), meta.page_bytes)


def _damaged(path: Path, number: int, page_bytes: int) -> StoreError:
    """Return the error of a damaged page, for the caller to raise."""
    return StoreError(
        f"{path} is damaged: page {number}, at byte {number * page_bytes:,}, is not as it was "
        "written, and LMDB could end the process over it. Restore a copy, or pack it anew."
    )
