# SPDX-License-Identifier: Apache-2.0
"""`TarStore`: samples in tar shards of WebDataset's layout, read in any order.

What is in the shards, and where, is found by one pass over their headers and small `.cls` files.

Reference:
    The naming of files in shards is WebDataset's: github.com/webdataset/webdataset.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
import threading
import weakref
from array import array
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_FILE_BYTES, checked_max_file_size, open_descriptor, open_file
from penstock.stores.filesystems import FileState
from penstock.stores.index import Index
from penstock.stores.lending import Lending
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["TarStore"]

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
_RECORD_BYTES: Final = tarfile.RECORDSIZE  # of GNU tar, bsdtar and Python, unless told otherwise
_MAX_RECORD_BYTES: Final = 1 << 20  # of tapes
_MAX_HEADER_BYTES: Final = 1 << 24  # long names take 4 KB, extended attributes up to some MB
_NUMBER: Final = re.compile(rb"\s*[+-]?\d+\s*")


@dataclass(frozen=True, eq=False)
class TarListing:
    """Samples, and the files of each.

    Attributes:
        shards: The tar files, in order.
        keys: Name of each sample.
        labels: What their `.cls` files say, as in `Index`.
        shard_of: Number of the shard that a sample is in, int64, shape (samples,).
        starts: Sample i has the files from `starts[i]` to `starts[i + 1]`; int64, shape
            (samples + 1,).
        offsets: Where each file begins within its shard, in bytes; int64, shape (files,).
        sizes: Size of each file in bytes; int64, shape (files,).
        extensions: Number of each file's extension; int64, shape (files,).
        extension_names: The extensions, in lower case, without a dot in front.
    """

    shards: tuple[FileState, ...]
    keys: PackedList[str]
    labels: NDArray[np.int64] | RaggedArray | None
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


def _shard_paths(place: str) -> list[str]:
    """Return the tar files that a path, a folder, or a pattern with braces names."""
    if "{" in place and not os.path.exists(place):
        return expand_braces(place)
    if not os.path.isdir(place):
        return [place]
    found = sorted(str(path) for path in Path(place).glob("*.tar"))
    if not found:
        raise StoreError(f"{place} is a folder without a .tar file in it.")
    return found


def list_shards(place: str) -> TarListing:
    """Read the headers of all shards.

    Raises:
        StoreError: a shard is missing, compressed, truncated or damaged; a sample has two files of
            one name, or one whose name has a part `..`; a `.cls` file holds no number; there is no
            sample.
    """
    shards, lister = [], _Lister()
    for path in _shard_paths(place):
        try:
            shards.append(FileState.of(path))
            lister.add(path)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}.") from error
    listing = lister.listing(tuple(shards))
    if not len(listing.keys):
        raise StoreError(f"{place} has no sample in {len(shards):,} tar file(s).")
    return listing


class _Lister:
    """Collects the samples of one shard after the other, in arrays: there may be millions."""

    def __init__(self) -> None:
        self._names: list[PackedList[str]] = []  # of the samples of each shard
        self._classes = array("q")  # of the samples that have one
        self._num_classes = array("q")  # of each sample: 0 or 1
        self._files = array("q")  # offset, size, extension; offset, size, extension; …
        self._num_files = array("q")  # of each sample
        self._extensions: dict[str, int] = {}

    def add(self, path: str) -> None:
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        for name, offset, size in _members(path):
            named = _NAME.fullmatch(name)
            if named is None:  # no extension, or hidden: nothing of a sample
                continue
            if ".." in name.split("/"):
                raise StoreError(
                    f"{path} has a file {name!r}, which would lie outside of the folder that it is "
                    "unpacked into. Do not trust it."
                )
            files = samples.setdefault(named[1], {})
            extension = named[2].lower()
            if extension in files:
                raise StoreError(
                    f"{path} has two files {named[1]}.{extension}: which of them is the sample's?"
                )
            files[extension] = offset, size
        with open_file(path) as file:
            for name, files in samples.items():
                self._add_sample(path, name, files, file.fileno())
        self._names.append(PackedList(samples))

    def _add_sample(self, path: str, name: str, files: dict[str, tuple[int, int]], fd: int) -> None:
        for extension, (offset, size) in files.items():
            number = self._extensions.setdefault(extension, len(self._extensions))
            self._files.extend((offset, size, number))
            if extension == "cls":
                data = os.pread(fd, min(size, _MAX_CLS_BYTES + 1), offset)
                self._classes.append(_class_in(data, path, name))
        self._num_classes.append("cls" in files)
        self._num_files.append(len(files))

    def _labels(self) -> NDArray[np.int64] | RaggedArray | None:
        if not self._classes:
            return None
        classes = np.array(self._classes, np.int64)
        if len(classes) == len(self._num_classes):
            return classes
        return RaggedArray(classes, _starts(self._num_classes))

    def _keys(self, shards: Sequence[FileState]) -> Iterator[str]:
        """Yield names; where shards share some, with what their paths differ by in front of all."""
        count = sum(map(len, self._names))
        if len({name for names in self._names for name in names}) == count:
            for names in self._names:
                yield from names
            return
        for prefix, names in zip(_prefixes(shards), self._names, strict=True):
            yield from (f"{prefix}/{name}" for name in names)

    def listing(self, shards: tuple[FileState, ...]) -> TarListing:
        files = np.array(self._files, np.int64).reshape(-1, 3)
        offsets, sizes, extensions = (np.ascontiguousarray(files[:, k]) for k in range(3))
        return TarListing(
            shards,
            PackedList(self._keys(shards)),
            self._labels(),
            np.repeat(np.arange(len(shards)), [len(names) for names in self._names]),
            _starts(self._num_files),
            offsets,
            sizes,
            extensions,
            tuple(self._extensions),
        )


def _starts(counts: Sequence[int]) -> NDArray[np.int64]:
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.array(counts, np.int64), out=starts[1:])
    return starts


def _prefixes(shards: Sequence[FileState]) -> list[str]:
    """Return as many of the last parts of each path as it takes to tell the shards apart."""
    paths = [PurePath(shard.path).with_suffix("").parts for shard in shards]
    for depth in range(1, max(map(len, paths)) + 1):
        prefixes = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(prefixes)) == len(prefixes):
            return prefixes
    seen: set[str] = set()
    twice = next(s.path for s in shards if s.path in seen or seen.add(s.path))  # type: ignore[func-returns-value]
    raise StoreError(f"{twice} is named twice, so each of its samples would be there twice.")


def _class_in(data: bytes, path: str, name: str) -> int:
    is_number = len(data) <= _MAX_CLS_BYTES and _NUMBER.fullmatch(data) is not None
    if is_number and -(2**63) <= int(data) < 2**63:
        return int(data)
    hint = " That is more than 64 bits." if is_number else ""
    raise StoreError(
        f"{name}.cls in {path} should hold the number of a class, and holds {data!r:.60}.{hint}"
    )


def _members(path: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each file of a tar file, which may be damaged in any way.

    Tar files that were put one behind the other, as `cat` does it, are read to the last one's end.
    """
    with open_file(path) as file:
        _refuse_compressed(path, file.read(8))
        size_bytes = os.fstat(file.fileno()).st_size
        start, stop = 0, -1
        while stop != size_bytes:
            file.seek(start)
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
                raise StoreError(
                    f"{path} is truncated, damaged, or no tar file: {error}. Restore it from a "
                    "copy."
                ) from error
            start = stop = _stop(path, file, start, end)


def _check_member(path: str, member: tarfile.TarInfo, size_bytes: int) -> None:
    if member.issym() or member.islnk() or member.issparse():
        raise StoreError(
            f"{path} has a link or a sparse file, {member.name!r}: pack the shard with "
            "`tar --dereference --hard-dereference`."
        )
    stop = member.offset_data + member.size
    # A negative size would lead back to this same header, for ever.
    if member.size < 0 or stop > size_bytes:
        raise StoreError(
            f"{path} is truncated or damaged: {member.name!r} should go from byte "
            f"{member.offset_data:,} to {stop:,}, and the file ends at byte {size_bytes:,}. "
            "Restore it from a copy."
        )


class _Headers:
    """The file that tarfile reads headers from.

    A long name, or PAX's fields, are read whole, as many bytes as their header says.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise ValueError(
                f"a header of {size:,} bytes, where {_MAX_HEADER_BYTES:,} is the most that is read"
            )
        return self._file.read(size)


def _stop(path: str, file: BinaryIO, start: int, end: int) -> int:
    """Return where the tar file from `start` on stops, if the pass ended at its end mark.

    The mark is two blocks of zeros; more zeros fill up the last record, which is what a program
    writes at once: 10,240 bytes, or a power of two. More than that, or a header alone that is all
    zeros, is what a disk or a download has lost.
    """
    file.seek(end)
    data = file.read(_MAX_RECORD_BYTES + 4 * tarfile.BLOCKSIZE)
    rest = data.lstrip(b"\0")
    num_zeros = len(data) - len(rest)
    if rest:
        num_zeros -= num_zeros % tarfile.BLOCKSIZE  # the rest of a block belongs to a header
    stop = end + num_zeros
    if num_zeros < tarfile.BLOCKSIZE:
        what = "is damaged" if len(data) >= tarfile.BLOCKSIZE else "is truncated"
        raise StoreError(
            f"{path} {what}: at byte {end:,} there is neither a file's header nor the end mark of "
            "a tar file. Restore it from a copy."
        )
    if rest and num_zeros == tarfile.BLOCKSIZE:
        raise StoreError(
            f"{path} is damaged: at byte {end:,} a header is all zeros, and more follows at byte "
            f"{stop:,}. Restore it from a copy."
        )
    record_bytes = _RECORD_BYTES
    if end > start:
        size_bytes = stop - start
        record_bytes = max(record_bytes, min(size_bytes & -size_bytes, _MAX_RECORD_BYTES))
    if num_zeros - 2 * tarfile.BLOCKSIZE >= record_bytes:
        raise StoreError(
            f"{path} is damaged, or cut off: from byte {end:,} on more of it is all zeros than the "
            "end of a tar file is. Restore it from a copy, or write it anew if it is whole."
        )
    return stop


def _refuse_compressed(path: str, start: bytes) -> None:
    for magic, kind, program in _COMPRESSED:
        if start.startswith(magic):
            raise StoreError(
                f"{path} is compressed by {kind}, so no sample can be read without all before it. "
                f"Unpack it once to a plain tar file: {program} --keep {path}"
            )


_IMAGES: Final = frozenset(
    ("bmp", "gif", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp")
)
_MAX_OPEN: Final = 128  # files kept open; of 1,024 that a process mostly may have


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
    name, all keys begin with the name of their shard, and with as many of the folders it is in as
    it takes to tell the shards apart: `a/000/1` and `b/000/1`.

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
        self._listings: list[TarListing] = []
        self._open: Lending[_OpenShards] = Lending()

    @property
    def address(self) -> str:
        """`tar:` and the path, or pattern."""
        return f"tar:{self._place}"

    def close(self) -> None:
        """Close the files that are open, those that a thread is reading when it has read."""
        self._open.close()

    @property
    def _listing(self) -> TarListing:
        if not self._listings:
            self._listings.append(list_shards(self._place))
        return self._listings[0]

    def _load_index(self) -> Index:
        listing = self._listing
        digest = hashlib.blake2b(digest_size=16)
        for shard in listing.shards:
            name = os.path.basename(shard.path)
            digest.update(f"{name}\0{shard.size_bytes}\0{shard.time_ns}\0".encode())
        index = Index(
            listing.keys,
            listing.labels,
            fingerprint=digest.hexdigest(),
            are_pairs=len(listing.keys) > 0 and _are_pairs(listing),
        )
        twice = index.first_repeated()
        if twice is not None:  # x/y.tar with a sample z, and x.tar with one y/z
            raise StoreError(f"two samples of {self.address} would be called {twice!r}.")
        return index

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        records: list[Any] = [None] * len(positions)
        of_shard = self._listing.shard_of[positions]
        with self._open.lent(self._opened) as shards:
            for place in np.lexsort((positions, of_shard)).tolist():
                with shards.descriptor(int(of_shard[place])) as fd:
                    records[place] = self._record(int(positions[place]), fd)
        yield records

    def _opened(self) -> _OpenShards:
        return _OpenShards(self._listing.shards)

    def _record(self, position: int, fd: int) -> Record:
        listing = self._listing
        key, label = listing.keys[position], self.index.one_label_of(position)
        values = {}
        size_bytes = 0
        for number in range(int(listing.starts[position]), int(listing.starts[position + 1])):
            extension = listing.extension_names[int(listing.extensions[number])]
            shard = listing.shards[int(listing.shard_of[position])]
            name = f"{key}.{extension} in {shard.path}"
            size = int(listing.sizes[number])
            size_bytes += size
            if size_bytes > self.max_file_size:
                raise StoreError(
                    f"cannot read {name}: up to its end the sample has {size_bytes:,} bytes, and "
                    f"{self.max_file_size:,} is the most that is read: raise max_file_size of its "
                    "store."
                )
            data = _pread(fd, size, int(listing.offsets[number]), name)
            values[extension] = label if extension == "cls" else _value(extension, data, name)
        return Record(key, label, _sample(values))


class _OpenShards:
    """The files of one store, open in one process."""

    def __init__(self, shards: tuple[FileState, ...]) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        self._kept: dict[int, int] = {}  # file descriptors, by shard
        # For a store that is dropped without being closed. It takes no lock, as it may be called in
        # the middle of anything, and closes nothing in a forked child.
        self.close = weakref.finalize(self, _close_in, os.getpid(), self._kept)

    @contextlib.contextmanager
    def descriptor(self, number: int) -> Iterator[int]:
        """Lend the file descriptor of a shard. What is beyond those kept is closed at the end."""
        with self._lock:
            fd = self._kept.get(number)
            if fd is None:
                fd = self._opened(self._shards[number])
                if len(self._kept) < _MAX_OPEN:
                    self._kept[number] = fd
            is_kept = self._kept.get(number) == fd
        try:
            yield fd
        finally:
            if not is_kept:
                os.close(fd)

    def _opened(self, shard: FileState) -> int:
        try:
            fd, status = open_descriptor(shard.path)
        except OSError as error:
            raise StoreError(f"cannot open {shard.path}: {error.strerror}.") from error
        if (status.st_size, status.st_mtime_ns) != (shard.size_bytes, shard.time_ns):
            os.close(fd)
            raise StoreError(
                f"{shard.path} was changed since it was listed. Open the store again, in a new "
                "TarStore or dataset."
            )
        return fd


def _close_in(pid: int, kept: dict[int, int]) -> None:
    if pid == os.getpid():
        while kept:
            os.close(kept.popitem()[1])


def _are_pairs(listing: TarListing) -> bool:
    """Return whether every sample has two files, an image and a class."""
    names = listing.extension_names
    is_image = np.array([name in _IMAGES for name in names], np.bool_)
    is_class = np.array([name == "cls" for name in names], np.bool_)
    if not bool(np.all(np.diff(listing.starts) == 2)):
        return False
    pairs = listing.extensions.reshape(-1, 2)
    return bool(np.all(is_image[pairs].sum(axis=1) + is_class[pairs].sum(axis=1) * 4 == 5))


def _pread(fd: int, size: int, offset: int, name: str) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(fd, size, offset)
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
    if extension in _IMAGES or kind in _IMAGES:
        return EncodedImage(data)
    try:
        if kind == "cls":
            return int(data)
        if kind == "json":
            return json.loads(data)
        if kind == "txt":
            return data.decode()
        return _array(data) if kind == "npy" else data
    except Exception as error:  # over a damaged header of an array numpy raises nearly anything
        raise StoreError(f"{name} cannot be read: {error}.") from error


def _array(data: bytes) -> NDArray[Any]:
    """Return the array of a `.npy` file; sizes are checked before any memory is taken."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read:
        raise ValueError(f"version {version} of numpy's format is not read here")
    shape, is_fortran, dtype = read[version](file)
    if dtype.hasobject:
        raise ValueError("it is an array of objects, which are pickles and can run any program")
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"an array of shape {shape}, dtype {dtype}, does not fit its bytes")
    array = np.frombuffer(data, dtype, count, file.tell()) if count else np.empty(0, dtype)
    return array.reshape(shape, order="F" if is_fortran else "C").copy()
