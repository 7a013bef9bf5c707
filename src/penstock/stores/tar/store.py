# SPDX-License-Identifier: Apache-2.0
"""`TarStore`: samples in tar shards of WebDataset's layout, read in any order."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import StoreError
from penstock.opening import MAX_FILE_BYTES, checked_max_file_size, open_descriptor
from penstock.stores.index import Index
from penstock.stores.lending import Lending
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store
from penstock.stores.tar.listing import TarListing, list_shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.stores.filesystems import FileState

__all__ = ["TarStore"]

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
