# SPDX-License-Identifier: Apache-2.0
"""`TarStore`: samples in tar shards of WebDataset's layout, read in any order.

What is in the shards, and where, is found by one pass over their headers and small `.cls` files.

Reference:
    The naming of files in shards is WebDataset's: github.com/webdataset/webdataset.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import tarfile
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import numpy as np

from penstock.data.file_formats import SAMPLE_NAME
from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.opening import (
    MAX_FILE_BYTES,
    FileState,
    checked_max_file_size,
    fingerprint_of,
    open_descriptor,
    open_file,
    read_at,
)
from penstock.sharing import Lease, Pool
from penstock.stores.braces import expand_braces
from penstock.stores.index import Index
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_COMPRESSED: Final = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
_MAX_CLS_BYTES: Final = 32  # of a number
_MAX_RECORD_BYTES: Final = 1 << 20  # what a program writes at once, and fills up with zeros
_MAX_HEADER_BYTES: Final = 1 << 24  # long names take 4 KB, extended attributes up to some MB
_IMAGES: Final = frozenset(
    ("bmp", "gif", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp")
)
_MAX_OPEN: Final = 128  # files kept open; of 1,024 that a process mostly may have
_descriptors: Pool[int] = Pool(os.close, is_local=True)


@dataclass(frozen=True, eq=False)
class ShardListing:
    """The samples of one tar file.

    Attributes:
        names: Of the samples.
        counts: Files of each; int64, shape (samples,).
        files: First byte, size, number of the extension; int64, shape (files, 3).
        extension_names: By number.
        classes: Of the samples that have a `.cls` file, in their order; int64.
    """

    names: PackedList[str]
    counts: NDArray[np.int64]
    files: NDArray[np.int64]
    extension_names: tuple[str, ...]
    classes: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TarListing:
    """Samples of several tar files, and the files of each."""

    keys: PackedList[str]
    labels: NDArray[np.int64] | RaggedArray | None
    shard_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    files: NDArray[np.int64]
    extension_names: tuple[str, ...]
    are_pairs: bool

    def index(self, fingerprint: str, address: str) -> Index:
        """Return the index of a store of these samples."""
        index = Index(self.keys, self.labels, fingerprint=fingerprint, are_pairs=self.are_pairs)
        twice = index.first_repeated()
        if twice is not None:  # x/y.tar with a sample z, and x.tar with one y/z
            raise StoreError(
                f"two samples of {address} would be called {twice!r}. Is a shard named twice?"
            )
        return index

    def record(
        self,
        position: int,
        label: int | None,
        path: str,
        read: Callable[[int, int, str], bytes],
        max_file_size: float,
    ) -> Record:
        """Return a record; `read` returns bytes by offset and size, and is told their name."""
        key = self.keys[position]
        values = {}
        total = 0
        for offset, size, number in self.files[
            self.starts[position] : self.starts[position + 1]
        ].tolist():
            extension = self.extension_names[number]
            name = f"{key}.{extension} in {path}"
            total += size
            if total > max_file_size:
                raise StoreError(
                    f"cannot read {name}: up to its end the sample has {total:,} bytes, and "
                    f"{max_file_size:,} is the most that is read: raise max_file_size of its "
                    "store."
                )
            data = read(offset, size, name)
            values[extension] = label if extension == "cls" else _value(extension, data, name)
        return Record(key, label, _sample(values))


def _shard_paths(place: str) -> list[str]:
    """Return the tar files that a path, a folder, or a pattern with braces names."""
    paths = [place]
    if "{" in place and not os.path.exists(place):
        paths = expand_braces(place)
    elif os.path.isdir(place):
        paths = sorted(str(path) for path in Path(place).glob("*.tar"))
    if not paths:
        raise StoreError(f"{place} is a folder without a .tar file in it.")
    return paths


def list_shards(place: str) -> tuple[list[FileState], TarListing]:
    """Read the headers of all shards."""
    shards, listings = [], []
    for path in _shard_paths(place):
        try:
            shards.append(FileState.of(path))
            with open_file(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                listings.append(list_shard(path, file, size_bytes))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}.") from error
    return shards, joined_shards(place, [shard.path for shard in shards], listings)


def list_shard(path: str, file: BinaryIO, size_bytes: int) -> ShardListing:
    """Read the headers of a tar file, which may be damaged in any way; `path` is for errors."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    classes: dict[str, int] = {}
    for name, offset, size in _members(path, file, size_bytes):
        named = SAMPLE_NAME.fullmatch(name)
        if named is None:  # no extension, or hidden: nothing of a sample
            continue
        if ".." in name.split("/"):
            raise StoreError(f"{path} has a file {name!r}, outside of its folder. Do not trust it.")
        parts = samples.setdefault(named[1], {})
        extension = named[2].lower()
        if extension in parts:
            raise StoreError(f"{path} has two files {named[1]}.{extension}: which is the sample's?")
        parts[extension] = offset, size
        if extension == "cls":
            file.seek(offset)
            data = file.read(min(size, _MAX_CLS_BYTES + 1))
            classes[named[1]] = _class_in(data, path, named[1])
    files = array("q")
    extensions: dict[str, int] = {}
    for parts in samples.values():
        for extension, (offset, size) in parts.items():
            files.extend((offset, size, extensions.setdefault(extension, len(extensions))))
    return ShardListing(
        PackedList(samples),
        np.fromiter(map(len, samples.values()), np.int64, len(samples)),
        np.array(files, np.int64).reshape(-1, 3),
        tuple(extensions),
        np.array([classes[name] for name in samples if name in classes], np.int64),
    )


def joined_shards(place: str, paths: list[str], shards: list[ShardListing]) -> TarListing:
    """Return one listing of several tar files."""
    extensions: dict[str, int] = {}
    files = []
    for shard in shards:
        numbers = [extensions.setdefault(e, len(extensions)) for e in shard.extension_names]
        files.append(shard.files.copy())
        files[-1][:, 2] = np.array(numbers, np.int64)[shard.files[:, 2]]
    all_files = np.concatenate(files)
    counts = np.concatenate([shard.counts for shard in shards])
    classes = np.concatenate([shard.classes for shard in shards])
    num_samples = len(counts)
    if not num_samples:
        raise StoreError(f"{place} has no sample in {len(shards):,} tar file(s).")
    starts = np.concatenate(([0], np.cumsum(counts)))
    labels: NDArray[np.int64] | RaggedArray | None = classes if len(classes) else None
    if 0 < len(classes) < num_samples:
        has_class = np.add.reduceat(all_files[:, 2] == extensions["cls"], starts[:-1])
        labels = RaggedArray(classes, np.concatenate(([0], np.cumsum(has_class))))
    images = [number for name, number in extensions.items() if name in _IMAGES]
    return TarListing(
        PackedList(_keys(paths, [shard.names for shard in shards])),
        labels,
        np.repeat(np.arange(len(shards)), [len(shard.names) for shard in shards]),
        starts,
        all_files,
        tuple(extensions),
        # No sample has two .cls files.
        len(classes) == num_samples == np.isin(all_files[:, 2], images).sum()
        and bool((counts == 2).all()),
    )


def _keys(paths: list[str], names: list[PackedList[str]]) -> Iterator[str]:
    """Yield names; where shards share some, with the path below their common folder in front."""
    if len({name for of_shard in names for name in of_shard}) == sum(map(len, names)):
        for of_shard in names:
            yield from of_shard
        return
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    for path, of_shard in zip(paths, names, strict=True):
        prefix = os.path.splitext(os.path.relpath(path, folder))[0]
        yield from (f"{prefix}/{name}" for name in of_shard)


def _class_in(data: bytes, path: str, name: str) -> int:
    with contextlib.suppress(ValueError):
        if len(data) <= _MAX_CLS_BYTES and b"_" not in data and -(2**63) <= int(data) < 2**63:
            return int(data)
    raise StoreError(f"{name}.cls in {path} should hold a 64-bit integer, not {data!r:.60}.")


def _members(path: str, file: BinaryIO, size_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each file of a tar file, which may be damaged in any way."""
    start = file.read(8)
    if start.startswith(_COMPRESSED):
        raise StoreError(
            f"{path} is compressed, so no sample can be read without all before it. Unpack it "
            "once to a plain tar file, by gunzip --keep, unzstd, bunzip2 or unxz."
        )
    stop = 0
    while stop != size_bytes or not size_bytes:
        file.seek(stop)
        try:
            # It asks for no more than read, seek and tell.
            headers = cast("BinaryIO", _Headers(file))
            with tarfile.open(fileobj=headers, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # 1 KB each, of every file
                    _check_member(path, member, size_bytes)
                    if member.isreg():
                        yield member.name, member.offset_data, member.size
                end = int(tar.offset)
        except (OSError, StoreError):
            raise
        except Exception as error:  # sizes and maps that are no numbers raise nearly anything
            raise _damaged(path, f"it is no tar file, or truncated: {error}") from error
        stop = _stop(path, file, stop, end)


def _damaged(path: str, what: str) -> StoreError:
    return StoreError(f"{path} is truncated or damaged: {what}. Restore it from a copy.")


def _check_member(path: str, member: tarfile.TarInfo, size_bytes: int) -> None:
    if member.issym() or member.islnk() or member.issparse():
        raise StoreError(
            f"{path} has a link or a sparse file, {member.name!r}: pack the shard with "
            "`tar --dereference --hard-dereference`."
        )
    stop = member.offset_data + member.size
    # A negative size would lead back to this same header, for ever.
    if member.size < 0 or stop > size_bytes:
        raise _damaged(
            path,
            f"{member.name!r} should go from byte {member.offset_data:,} to {stop:,}, and the file "
            f"ends at byte {size_bytes:,}",
        )


class _Headers:
    """The file that tarfile reads headers from."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size:,} bytes; at most {_MAX_HEADER_BYTES:,} are read")
        return self._file.read(size)


def _stop(path: str, file: BinaryIO, start: int, end: int) -> int:
    """Return where the end mark of a tar file stops, which begins at `end`."""
    file.seek(end)
    data = file.read(_MAX_RECORD_BYTES + 4 * tarfile.BLOCKSIZE)
    num_zeros = len(data) - len(data.lstrip(b"\0"))
    if num_zeros < len(data):
        num_zeros -= num_zeros % tarfile.BLOCKSIZE  # the rest of a block belongs to a header
    if num_zeros < tarfile.BLOCKSIZE or num_zeros == tarfile.BLOCKSIZE < len(data):
        raise _damaged(
            path,
            f"at byte {end:,} there is neither a file's header nor the end mark of a tar file",
        )
    record_bytes = tarfile.RECORDSIZE
    if end > start:
        size_bytes = end + num_zeros - start
        record_bytes = max(record_bytes, min(size_bytes & -size_bytes, _MAX_RECORD_BYTES))
    if num_zeros - 2 * tarfile.BLOCKSIZE >= record_bytes:
        raise _damaged(path, f"from byte {end:,} on more is zeros than a tar file ends with")
    return end + num_zeros


class TarStore(Store):
    """Samples in uncompressed tar files, as WebDataset's tools write them; to be read only.

    The first use reads the headers of all files, some 30,000 in a second. After that any sample
    is one read away: nothing is read in order, and shuffling needs no buffer.

    Files are one sample if their names are equal up to the first dot of the last part. A sample of
    an image and a `.cls` file is the pair (image, class). Any other is a dict from extensions to
    values, by the last part of the extension:

        .cls      int           .json     what it says
        .txt      str           .npy      array; one of objects is refused
        .jpg …    image         any other bytes, those of .pkl, .pyd and .pth too: none is run

    Names that begin with a dot, or have none, are no samples. Where two shards have samples of one
    name, all keys begin with the path of their shard below the folder of all: `a/000/1`.

    Attributes:
        max_file_size: Bytes of the largest sample that is read; may be set.

    Concurrency:
        Any thread or process; each process opens the files for itself. Closed while another thread
        reads, they stay open until it has read.

    Example:
        >>> import tarfile, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with tarfile.open(f"{folder.name}/a.tar", "w") as tar:
        ...     for name, data in (("1.jpg", b"..."), ("1.cls", b"4")):
        ...         member = tarfile.TarInfo(name)
        ...         member.size = len(data)
        ...         tar.addfile(member, io.BytesIO(data))
        >>> with TarStore(f"{folder.name}/a.tar") as store:
        ...     store.get_many([0])
        [Record(key='1', label=4, sample=(<EncodedImage of 3 bytes>, 4))]
        >>> folder.cleanup()
    """

    def __init__(self, path: str | Path, *, max_file_size: int = MAX_FILE_BYTES) -> None:
        """Name the files; they are opened at first use.

        Args:
            path: A tar file, a folder of such, or a pattern as `shard-{000..015}.tar`.
            max_file_size: Bytes of the largest sample that is read, all of its files together; a
                larger one is an error. A tar file may have any size.

        Raises:
            ConfigError: `max_file_size` is no number of bytes.
        """
        self.max_file_size = checked_max_file_size(max_file_size)
        self._place = str(path)
        # At most one; of two threads that list at the same time, the first one's is everybody's.
        self._listings: list[tuple[list[FileState], TarListing]] = []
        self._open: dict[int, Lease[int]] = {}

    @property
    def address(self) -> str:
        """`tar:` and the path, or pattern."""
        return f"tar:{self._place}"

    @property
    def shard_lengths(self) -> NDArray[np.int64]:
        """Number of samples of each tar file, int64 (files,)."""
        shards, listing = self._listing
        return np.bincount(listing.shard_of, minlength=len(shards)).astype(np.int64)

    def close(self) -> None:
        """Close the files that are open, those that a thread is reading when it has read."""
        leases, self._open = self._open, {}
        for lease in tuple(leases.values()):
            lease.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind."""
        return {**self.__dict__, "_open": {}}

    @property
    def _listing(self) -> tuple[list[FileState], TarListing]:
        if not self._listings:
            self._listings.append(list_shards(self._place))
        return self._listings[0]

    def _load_index(self) -> Index:
        shards, listing = self._listing
        return listing.index(fingerprint_of(shards), self.address)

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        records: list[Any] = [None] * len(positions)
        numbers = self._listing[1].shard_of[positions]
        for place in np.lexsort((positions, numbers)).tolist():
            with self._descriptor(int(numbers[place])) as fd:
                records[place] = self._record(int(positions[place]), fd)
        yield records

    def _descriptor(self, number: int) -> contextlib.AbstractContextManager[int]:
        files = self._open
        lease = files.get(number)
        if lease is None or not lease.is_usable:
            shard = self._listing[0][number]
            lease = _descriptors.acquire(shard, functools.partial(_opened, shard))
            if number in files or len(files) < _MAX_OPEN:
                files[number] = lease
        return lease.using()

    def _record(self, position: int, fd: int) -> Record:
        shards, listing = self._listing
        label = self.index.one_label_of(position)
        path = shards[int(listing.shard_of[position])].path
        return listing.record(
            position, label, path, functools.partial(_pread, fd), self.max_file_size
        )


def _opened(shard: FileState) -> int:
    try:
        fd, status = open_descriptor(shard.path)
    except OSError as error:
        raise StoreError(f"cannot open {shard.path}: {error.strerror}.") from error
    if (status.st_size, status.st_mtime_ns) != shard[1:]:
        os.close(fd)
        raise StoreError(f"{shard.path} was changed since it was listed. Open a new store.")
    return fd


def _pread(fd: int, offset: int, size: int, name: str) -> bytes:
    parts = []
    while size > 0:
        part = read_at(fd, size, offset)
        if not part:
            raise StoreError(f"{name} is truncated: {size:,} bytes of it are missing.")
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sample(values: dict[str, Any]) -> Any:  # noqa: ANN401
    if len(values) == 2 and "cls" in values:
        (other,) = (value for extension, value in values.items() if extension != "cls")
        if isinstance(other, EncodedImage):
            return other, values["cls"]
    return values


def _value(extension: str, data: bytes, name: str) -> Any:  # noqa: ANN401
    kind = extension.rpartition(".")[2]
    if kind in _IMAGES:
        return EncodedImage(data)
    try:
        if kind == "cls":
            return int(data)
        if kind == "json":
            return json.loads(data)
        if kind == "txt":
            return data.decode()
        if kind == "npy":
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return data
    except Exception as error:  # over a damaged header of an array numpy raises nearly anything
        raise StoreError(f"{name} cannot be read: {error}.") from error
