# SPDX-License-Identifier: Apache-2.0
"""Layouts of token files: Penstock's own folder, and the files of Megatron-LM and datatrove.

Penstock's folder, all numbers little-endian:

    header.json    format, version, dtype, counts, checksums (CRC-32), the tokenizer's digest
    tokens         uint16 or uint32, all documents one after the other
    offsets        int64, documents + 1: document i is tokens[offsets[i] : offsets[i + 1]]
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.errors import StoreError
from penstock.opening import FileState, open_file, read_annotation

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

FORMAT: Final = "penstock tokens"
VERSION: Final = 1
_MAX_HEADER_BYTES: Final = 1 << 20
_PART_BYTES: Final = 16 << 20
DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_MEGATRON_MAGIC: Final = b"MMIDIDX\0\0"
_MEGATRON_HEAD: Final = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Mapped(NamedTuple):
    """The tokens of a file and where its documents are; read-only, in mapped memory.

    Attributes:
        tokens: Integers of the file's own type, shape (tokens,).
        offsets: int64, shape (documents + 1,), from 0 to the number of tokens.
        header: The header of Penstock's own layout; empty for other layouts.
        files: The states of the files when they were opened.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    header: dict[str, Any]
    files: tuple[FileState, ...]


def open_tokens(path: Path, known: tuple[FileState, ...] = ()) -> Mapped:
    """Map a file of tokens.

    Args:
        path: A folder in Penstock's own layout, Megatron's `.bin` or datatrove's `.ds`.
        known: The states of the files when they were opened before. If these are still the same,
            a folder's offsets are not checked again.

    Raises:
        StoreError: `path` is not a file of tokens; it is damaged or cut off; or it was changed
            since it was `known`.
    """
    try:
        suffix = "" if path.is_dir() else path.suffix  # a folder of ours may have any name
        if suffix == ".bin":
            return _megatron(path, known)
        if suffix == ".ds":
            return _datatrove(path, known)
        return _own(path, known)
    except OSError as error:
        raise StoreError(f"cannot read {error.filename or path}: {error.strerror}.") from error


def _own(path: Path, known: tuple[FileState, ...]) -> Mapped:
    if not path.is_dir():
        there = "is not a folder" if path.exists() else "does not exist"
        raise StoreError(
            f"{path} {there}. Name a folder that `penstock pack SRC tokens:FOLDER` made, a .bin "
            "file of Megatron's, or a .ds file of datatrove's."
        )
    header = read_header(path)
    dtype, num_documents, num_tokens = _facts(path, header)
    files = _unchanged([path / "tokens", path / "offsets"], known)
    tokens = map_file(path / "tokens", dtype, num_tokens)
    offsets = map_file(path / "offsets", "<i8", num_documents + 1)
    if not known:
        if zlib.crc32(offsets.data) != header["crc32"]["offsets"]:
            raise damaged(path / "offsets", "its checksum is not that of the header")
        _check_offsets(path / "offsets", offsets, num_tokens)
    return Mapped(tokens, offsets, header, files)


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a folder; StoreError if there is none, or it cannot be read."""
    file = path / "header.json"
    if not file.exists():
        partial = ""
        if (path / "journal.json").exists():
            partial = " An interrupted run wrote it: the same command with --resume goes on."
        raise StoreError(f"{path} is no folder of tokens: it has no header.json.{partial}")
    header = read_json(file)
    if header.get("format") != FORMAT:
        raise StoreError(f"{file} is not the header of a folder of tokens.")
    if header.get("version") != VERSION:
        raise StoreError(
            f"{path} is of version {header.get('version')!r} of the layout, and this release reads "
            f"{VERSION}. Install a newer Penstock, or pack it again."
        )
    return header


def _facts(path: Path, header: dict[str, Any]) -> tuple[np.dtype[Any], int, int]:
    counts = header.get("num_documents"), header.get("num_tokens")
    sums = header.get("crc32")
    known = str(header.get("dtype")) in DTYPES and isinstance(sums, dict) and "offsets" in sums
    if not (known and all(type(count) is int and count >= 0 for count in counts)):
        raise damaged(path / "header.json", "its dtype, counts or checksums are missing or wrong")
    return DTYPES[header["dtype"]], *counts  # type: ignore[return-value]  # integers, as checked


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; StoreError if there is none."""
    try:
        found = json.loads(read_annotation(file, _MAX_HEADER_BYTES))
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from error
    if not isinstance(found, dict):
        raise damaged(file, "it is not a JSON object")
    return found


def _megatron(path: Path, known: tuple[FileState, ...]) -> Mapped:
    """Map what Megatron-LM's preprocessing writes: PREFIX.bin and PREFIX.idx.

    Reference: `megatron/core/datasets/indexed_dataset.py`, layout version 1.
    """
    index = path.with_suffix(".idx")
    files = _unchanged([path, index], known)
    with open_file(index) as file:
        head = file.read(_MEGATRON_HEAD.size)
    if len(head) < _MEGATRON_HEAD.size or not head.startswith(_MEGATRON_MAGIC):
        raise StoreError(f"{index} is not an index of Megatron's: its first bytes are others.")
    _, version, code, num_sequences, num_bounds = _MEGATRON_HEAD.unpack(head)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise StoreError(
            f"{index} is of version {version}, with values of type {code}. Penstock reads version "
            f"1 with integers, types {sorted(_MEGATRON_DTYPES)}."
        )
    # An index of multi-modal data ends with a mode per sequence.
    size_bytes = _MEGATRON_HEAD.size + 12 * num_sequences + 8 * num_bounds
    if files[1].size_bytes not in (size_bytes, size_bytes + num_sequences):
        raise wrong_size(index, files[1].size_bytes, size_bytes)
    memory = map_file(index, "u1", files[1].size_bytes)
    places = np.cumsum([_MEGATRON_HEAD.size, 4 * num_sequences, 8 * num_sequences])
    lengths = np.frombuffer(memory, "<i4", num_sequences, places[0])
    pointers = np.frombuffer(memory, "<i8", num_sequences, places[1])
    bounds = np.frombuffer(memory, "<i8", num_bounds, places[2])
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    stops = np.zeros(num_sequences + 1, np.int64)
    np.cumsum(lengths, out=stops[1:])
    if not np.array_equal(pointers, stops[:-1] * dtype.itemsize):
        raise StoreError(f"{index}: its sequences do not lie one after the other in {path}.")
    _check_offsets(index, bounds, num_sequences)
    _check_offsets(index, stops, int(stops[-1]))
    return Mapped(map_file(path, dtype, int(stops[-1])), stops[bounds], {}, files)


def _datatrove(path: Path, known: tuple[FileState, ...]) -> Mapped:
    """Map what datatrove's DocumentTokenizer writes: NAME.ds and NAME.ds.index.

    The index has the end of each document, in tokens, as uint64. Whether a token takes 2 or 4 bytes
    follows from the sizes of both files. Reference: `datatrove/pipeline/tokens/tokenizer.py`.
    """
    index = path.with_name(f"{path.name}.index")
    files = _unchanged([path, index], known)
    if files[1].size_bytes % 8:
        raise wrong_size(index, files[1].size_bytes, files[1].size_bytes // 8 * 8)
    offsets = np.zeros(files[1].size_bytes // 8 + 1, np.int64)
    offsets[1:] = map_file(index, "<u8", len(offsets) - 1)
    num_tokens, size_bytes = int(offsets[-1]), files[0].size_bytes
    _check_offsets(index, offsets, num_tokens)
    sizes = {dtype.itemsize * num_tokens: dtype for dtype in DTYPES.values()}
    if size_bytes not in sizes:
        raise StoreError(
            f"{path} has {size_bytes:,} bytes, and its index says {num_tokens:,} tokens of 2 or 4 "
            "bytes each: one of them is cut off. Copy both again."
        )
    return Mapped(map_file(path, sizes[size_bytes], num_tokens), offsets, {}, files)


def _unchanged(paths: list[Path], known: tuple[FileState, ...]) -> tuple[FileState, ...]:
    files = tuple(map(FileState.of, paths))
    if known and files != known:
        raise StoreError(f"{paths[0]} was changed since it was opened. Open it again.")
    return files


def map_file(path: Path, dtype: DTypeLike, count: int) -> NDArray[Any]:
    """Map a file as an array of `count` numbers; StoreError if it has another size."""
    with open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != count * np.dtype(dtype).itemsize:
            raise wrong_size(path, size_bytes, count * np.dtype(dtype).itemsize)
        if not size_bytes:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, dtype)


def _check_offsets(path: Path, offsets: NDArray[np.int64], last: int) -> None:
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != last:
        ends = offsets[[0, -1]].tolist() if len(offsets) else []
        raise damaged(path, f"its offsets should run from 0 to {last}, not {ends}")
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        place = int(falls.argmax())
        raise damaged(
            path,
            f"its offsets do not ascend: {offsets[place]} is followed by {offsets[place + 1]}, at "
            f"document {place}",
        )


def wrong_size(path: Path, size_bytes: int, right_bytes: int) -> StoreError:
    """Return the error, to be raised, for a file that is cut off or too long."""
    what = "is cut off" if size_bytes < right_bytes else "is too long"
    return StoreError(
        f"{path} {what}: it has {size_bytes:,} bytes and should have {right_bytes:,}. Copy it "
        "again, or pack it again."
    )


def damaged(path: Path, why: str) -> StoreError:
    """Return the error, to be raised, for a file that is not what was written."""
    return StoreError(f"{path} is damaged: {why}. Copy it again, or pack it again.")


def check_tokens(mapped: Mapped) -> None:
    """Read all tokens of Penstock's own layout; StoreError if their checksum is another."""
    path = Path(mapped.files[0].path)
    if checksum_of(mapped.tokens.view(np.uint8)) != mapped.header["crc32"].get("tokens"):
        raise damaged(path, "its checksum is not that of the header")


def checksum_of(data: NDArray[np.uint8]) -> int:
    """Return the CRC-32 of bytes, computed in parts, as they may exceed the memory."""
    start = 0
    for first in range(0, len(data), _PART_BYTES):
        start = zlib.crc32(data[first : first + _PART_BYTES].data, start)
    return start
