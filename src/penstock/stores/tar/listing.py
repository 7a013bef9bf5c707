# SPDX-License-Identifier: Apache-2.0
"""What is in tar shards, and where: one pass over their headers, and over the small `.cls` files.

Reference:
    The naming of files in shards is WebDataset's: github.com/webdataset/webdataset.
"""

from __future__ import annotations

import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["Shard", "TarListing", "expand_braces", "list_shards", "shard_paths"]

_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)")
_MAX_SHARDS: Final = 1_000_000
# A name ends at its first dot after a character that is none: what follows says what it is.
_NAME: Final = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_COMPRESSED: Final = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zXZ", "xz", "unxz"),
)
_MAX_CLS_BYTES: Final = 32  # of a number


@dataclass(frozen=True, slots=True)
class Shard:
    """A tar file as it was when it was listed.

    Attributes:
        path: Where it lies.
        size_bytes: Its size.
        time_ns: When it was changed last.
    """

    path: str
    size_bytes: int
    time_ns: int


@dataclass(frozen=True, eq=False)
class TarListing:
    """Samples, and the files of each.

    Attributes:
        shards: The tar files, in order.
        keys: Name of each sample.
        labels: What its `.cls` file says; None if it has none.
        shard_of: Number of the shard that a sample is in, int64, shape (samples,).
        starts: Sample i has the files from `starts[i]` to `starts[i + 1]`; int64, shape
            (samples + 1,).
        offsets: Where each file begins within its shard, in bytes; int64, shape (files,).
        sizes: Size of each file in bytes; int64, shape (files,).
        extensions: Number of each file's extension; int64, shape (files,).
        extension_names: The extensions, in lower case, without a dot in front.
    """

    shards: tuple[Shard, ...]
    keys: PackedList[str]
    labels: list[int | None]
    shard_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    extensions: NDArray[np.int64]
    extension_names: tuple[str, ...]


def expand_braces(pattern: str) -> list[str]:
    """Return the paths that a pattern stands for.

    Raises:
        ConfigError: braces hold neither a range nor a list, or stand for too many.

    Example:
        >>> expand_braces("{a,b}-{08..10}.tar")
        ['a-08.tar', 'a-09.tar', 'a-10.tar', 'b-08.tar', 'b-09.tar', 'b-10.tar']
    """
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    tails = expand_braces(pattern[found.end() :])
    texts = _alternatives(found[1], pattern)
    if len(texts) * len(tails) > _MAX_SHARDS:
        raise ConfigError(f"{pattern!r} stands for more than {_MAX_SHARDS:,} files.")
    return [pattern[: found.start()] + text + tail for text in texts for tail in tails]


def _alternatives(inner: str, pattern: str) -> list[str]:
    span = _RANGE.fullmatch(inner)
    if span is None:
        if "," not in inner:
            raise ConfigError(f"braces in {pattern!r} hold a range, as {{000..015}}, or a list.")
        return inner.split(",")
    first, last = int(span[1]), int(span[2])
    if last < first or last - first >= _MAX_SHARDS:
        raise ConfigError(f"the range {{{inner}}} in {pattern!r} is empty or far too long.")
    return [f"{number:0{len(span[1])}}" for number in range(first, last + 1)]


def shard_paths(place: str) -> list[str]:
    """Return the tar files that a path, a folder, or a pattern with braces names.

    Raises:
        StoreError: there is none.
    """
    if "{" in place and not os.path.exists(place):
        return expand_braces(place)
    if os.path.isdir(place):
        found = sorted(str(path) for path in Path(place).glob("*.tar"))
        if not found:
            raise StoreError(f"{place} is a folder without a .tar file in it.")
        return found
    return [place]


def list_shards(place: str) -> TarListing:
    """Read the headers of all shards.

    Raises:
        StoreError: a shard is missing, compressed, truncated or damaged; a sample has two files of
            one name; a `.cls` file holds no number.
    """
    shards, lister = [], _Lister()
    for path in shard_paths(place):
        try:
            status = os.stat(path)
            shards.append(Shard(path, status.st_size, status.st_mtime_ns))
            lister.add(path)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}.") from error
    return lister.listing(tuple(shards))


class _Lister:
    """Collects the samples of one shard after the other."""

    def __init__(self) -> None:
        self._names: list[list[str]] = []  # of the samples of each shard
        self._stems: list[str] = []
        self._labels: list[int | None] = []
        self._files: list[tuple[int, int, int]] = []  # offset, size, extension
        self._starts = [0]
        self._extensions: dict[str, int] = {}

    def add(self, path: str) -> None:
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        for name, offset, size in _members(path):
            named = _NAME.fullmatch(name)
            if named is None:  # no extension, or hidden: nothing of a sample
                continue
            files = samples.setdefault(named[1], {})
            extension = named[2].lower()
            if extension in files:
                raise StoreError(
                    f"{path} has two files {named[1]}.{extension}: which of them is the sample's?"
                )
            files[extension] = offset, size
        with open(path, "rb") as file:
            for name, files in samples.items():
                self._add_sample(path, name, files, file.fileno())
        self._names.append(list(samples))
        self._stems.append(Path(path).stem)

    def _add_sample(self, path: str, name: str, files: dict[str, tuple[int, int]], fd: int) -> None:
        label = None
        for extension, (offset, size) in files.items():
            number = self._extensions.setdefault(extension, len(self._extensions))
            self._files.append((offset, size, number))
            if extension == "cls":
                label = _class_in(os.pread(fd, min(size, _MAX_CLS_BYTES + 1), offset), path, name)
        self._labels.append(label)
        self._starts.append(len(self._files))

    def _keys(self) -> Iterator[str]:
        """Yield names; where shards share some, with their shard's name in front of all."""
        count = sum(map(len, self._names))
        is_prefixed = len({name for names in self._names for name in names}) < count
        for stem, names in zip(self._stems, self._names, strict=True):
            yield from (f"{stem}/{name}" for name in names) if is_prefixed else names

    def listing(self, shards: tuple[Shard, ...]) -> TarListing:
        files = np.array(self._files, np.int64).reshape(-1, 3)
        offsets, sizes, extensions = (np.ascontiguousarray(files[:, k]) for k in range(3))
        return TarListing(
            shards,
            PackedList(self._keys()),
            self._labels,
            np.repeat(np.arange(len(shards)), [len(names) for names in self._names]),
            np.array(self._starts, np.int64),
            offsets,
            sizes,
            extensions,
            tuple(self._extensions),
        )


def _class_in(data: bytes, path: str, name: str) -> int:
    try:
        if len(data) > _MAX_CLS_BYTES:
            raise ValueError
        return int(data)
    except ValueError:
        raise StoreError(
            f"{name}.cls in {path} should hold the number of a class, and holds {data!r:.60}."
        ) from None


def _members(path: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each file of a tar file."""
    with open(path, "rb") as file:
        _refuse_compressed(path, file.read(8))
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # 1 KB each, of every file
                    if member.issym() or member.islnk() or member.issparse():
                        raise StoreError(
                            f"{path} has a link or a sparse file, {member.name!r}: pack the shard "
                            "with `tar --dereference --hard-dereference`."
                        )
                    if member.isreg():
                        yield member.name, member.offset_data, member.size
                end = tar.offset
        except tarfile.TarError as error:
            raise StoreError(
                f"{path} is truncated, damaged, or no tar file: {error}. Restore it from a copy."
            ) from error
        file.seek(end)
        _check_end(path, end, file.read(tarfile.BLOCKSIZE))


def _check_end(path: str, end: int, block: bytes) -> None:
    """Raise unless the pass ended at the mark that a whole tar file has, and no sooner."""
    if block == bytes(tarfile.BLOCKSIZE):
        return
    what = "is damaged" if len(block) == tarfile.BLOCKSIZE else "is truncated"
    raise StoreError(
        f"{path} {what}: at byte {end:,} there is neither a file's header nor the end mark of a "
        "tar file. Restore it from a copy."
    )


def _refuse_compressed(path: str, start: bytes) -> None:
    for magic, kind, program in _COMPRESSED:
        if start.startswith(magic):
            raise StoreError(
                f"{path} is compressed by {kind}, so no sample can be read without all before it. "
                f"Unpack it once to a plain tar file: {program} --keep {path}"
            )
