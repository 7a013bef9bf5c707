# SPDX-License-Identifier: Apache-2.0
"""`FolderStore`: image files in a folder, or in a list, as they are."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.blobs.blobs import is_remote
from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_FILE_BYTES, checked_max_file_size, read_file
from penstock.stores.folder.annotated_folder import looks_like_voc, refuse_annotated
from penstock.stores.folder.listing import (
    IMAGE_SUFFIXES,
    PAIR,
    RECORD,
    VOC,
    Listing,
    list_classes,
    list_flat,
    read_index,
    scan,
)
from penstock.stores.records import EncodedImage, Record, decode_record
from penstock.stores.registry import open_kind
from penstock.stores.store import Store
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.stores.index import Index

_GONE: Final = (errno.ENOENT, errno.ENOTDIR)


def open_folder(
    path: str | Path,
    *,
    layout: Literal["auto", "classes", "flat", "voc"] = "auto",
    **options: Any,  # noqa: ANN401
) -> Store:
    """Return the store of a folder.

    Args:
        path: The folder, or the address of one in object storage (`ObjectFolderStore`).
        layout: "auto" takes "voc" if there are `Annotations` and `JPEGImages`; "classes" if there
            is a subfolder; otherwise "flat". See `FolderStore`, and docs/folders.md.
        options: Of `FolderStore`; for Pascal VOC `split`: the images that
            `ImageSets/Main/SPLIT.txt` names, in its order.

    Raises:
        ConfigError: `layout` is none of these, or `split` is given for another than VOC.
    """
    if layout not in ("auto", "classes", "flat", "voc"):
        raise ConfigError(f"layout is 'auto', 'classes', 'flat' or 'voc', not {layout!r}.")
    if is_remote(str(path)):
        from penstock.stores.folder.objects import ObjectFolderStore

        return ObjectFolderStore(str(path), layout=layout, **options)
    if layout == "voc" or (layout == "auto" and looks_like_voc(Path(path))):
        return open_kind("voc", str(path), **options)
    if "split" in options:
        raise ConfigError(
            f"split={options['split']!r} is for Pascal VOC, a folder with Annotations and "
            f"JPEGImages in it; {path} is read as another layout."
        )
    return FolderStore(path, layout=layout, **options)


class FolderStore(Store):
    """Image files below a folder, read when they are asked for.

    Layouts:
        classes   ROOT/CLASS/**/NAME.jpg, as torchvision's ImageFolder has it and in its order. A
                  sample is (image, class), a key the path below ROOT. Empty class folders count,
                  hidden and system folders do not.
        flat      Images in ROOT itself. A sample is the image alone; there are no labels.

    Of a folder that release 0.1 packed with an index the index says what is in it. Other files are
    passed over; a folder that cannot be listed is an error.

    `fingerprint` is a hash over names, sizes and times. Files are asked for these when it is first
    wanted, not when they are listed: on network file systems that is most of the time. That of
    `index` is a hash over the names alone.

    Attributes:
        max_file_size: Bytes of the largest image or record that is read; may be set.

    Concurrency:
        Any thread or process. Nothing is held open.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("cat", "dog"):
        ...     os.mkdir(f"{folder.name}/{name}")
        ...     _ = Path(f"{folder.name}/{name}/1.jpg").write_bytes(b"...")
        >>> store = FolderStore(folder.name)
        >>> store.class_names, store.labels
        (('cat', 'dog'), array([0, 1]))
        >>> store.get_many([1])
        [Record(key='dog/1.jpg', label=1, sample=(<EncodedImage of 3 bytes>, 1))]
        >>> store.max_file_size = 2
        >>> store.get_many([1])
        Traceback (most recent call last):
        penstock.errors.StoreError: cannot read ...: it has 3 bytes, and 2 is the most ...
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        layout: Literal["auto", "classes", "flat"] = "auto",
        max_file_size: int = MAX_FILE_BYTES,
    ) -> None:
        """Name the folder; it is listed at first use.

        Args:
            path: The folder.
            layout: "auto" takes the index if there is one; "classes" if there is a subfolder;
                otherwise "flat".
            max_file_size: Bytes of the largest image or record that is read; a larger one is an
                error.

        Raises:
            ConfigError: `max_file_size` is no number of bytes.
        """
        self.path = Path(path)
        self._layout = layout
        self.max_file_size = checked_max_file_size(max_file_size)
        # At most one; of two threads that list at the same time, the first one's is everybody's.
        self._listings: list[Listing] = []
        self._fingerprint: str | None = None

    @property
    def address(self) -> str:
        """`folder:` and the path."""
        return f"folder:{self.path}"

    @property
    def fingerprint(self) -> str:
        """A short text that changes if a file does; found when it is first asked for."""
        if self._fingerprint is None:
            stats = [_size_and_time(f"{self.path}/{path}") for path in self.own_files()[1]]
            self._fingerprint = self._listing.fingerprint(np.array(stats, np.int64).tobytes())
        return self._fingerprint

    def own_files(self) -> tuple[str, Iterable[str]]:
        """As in `Store`."""
        return os.fspath(self.path), self._listing.paths

    def file_of(self, position: int) -> Path:
        """Return the file that a record, or its image, is in."""
        return self.path / self._listing.paths[position]

    @property
    def _listing(self) -> Listing:
        # Without a lock: listing may take minutes, and a child that was forked meanwhile would wait
        # for it for ever.
        if not self._listings:
            if not self.path.is_dir():
                if not self.path.exists():
                    raise StoreError(f"{self.path} does not exist (from {os.getcwd()}).")
                raise StoreError(
                    f"{self.path} is a file, not a folder. Files are named with their kind: "
                    "lmdb:PATH, tar:PATH, arrow:PATH; unpack a compressed tar file first."
                )
            listing = read_index(self.path) if self._layout == "auto" else None
            listing = listing or self._listed()
            if not len(listing.keys):
                raise no_image(self.path, *scan(os.fspath(self.path)))
            self._listings.append(listing)
        return self._listings[0]

    def _listed(self) -> Listing:
        """Return what listing the folder finds."""
        if self._layout == "flat" or (
            self._layout == "auto" and not has_classes(self.path, *scan(os.fspath(self.path)))
        ):
            return list_flat(self.path)
        listing = list_classes(self.path)
        labels = np.zeros(0, np.int64) if listing.labels is None else listing.labels
        counts = np.bincount(np.asarray(labels), minlength=len(listing.class_names)).tolist()
        refuse_annotated(self.path, dict(zip(listing.class_names, counts, strict=True)))
        return listing

    def _load_index(self) -> Index:
        # A hash of the names, at once; `fingerprint` asks every file.
        return self._listing.index(self._listing.fingerprint())

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        pairs = zip(positions.tolist(), self._files(positions), strict=True)
        yield [self._record(position, data) for position, data in pairs]

    @contextlib.contextmanager
    def borrow_images(self, positions: NDArray[np.int64]) -> Iterator[list[bytes]]:
        """As in `Store`."""
        yield self._files(positions)

    def _files(self, positions: NDArray[np.int64]) -> list[bytes]:
        """Return the files of records; those that are not there are named together."""
        root, paths = os.fspath(self.path), self._listing.paths
        files: list[bytes] = []
        absent: list[int] = []
        for position in positions.tolist():
            path = f"{root}/{paths[position]}"
            try:
                files.append(read_file(path, self.max_file_size))
            except OSError as error:
                if error.errno not in _GONE:
                    raise StoreError(f"cannot read {path}: {error.strerror}.") from error
                absent.append(position)
        if absent:
            more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise self._missing(f"{self.file_of(absent[0])}{more}", self._partner_of(absent[0]))
        return files

    def _record(self, position: int, data: bytes) -> Record:
        kind, key = self._listing.kinds[position], self.keys[position]
        if kind == RECORD:
            name = f"record {position} ({key!r}) of {self.address}"
            record = decode_record(data, name)
            if record.key != key:
                raise StoreError(f"{name} is another record, called {record.key!r}.")
            return record
        if kind == VOC:
            raise StoreError(f"{self.file_of(position)} is of Pascal VOC: read it by layout='voc'.")
        image, label = EncodedImage(data), self.index.one_label_of(position)
        return Record(key, label, (image, label) if kind == PAIR else image)

    def _missing(self, files: str, said: str) -> StoreError:
        """Return the error of files that are not there, for the caller to raise."""
        return StoreError(
            f"a file of {self.address} is not there: {files}.{said} It was removed, renamed, or "
            "never there. Restore it, or leave out what lacks one with on_error='skip'."
        )

    def _partner_of(self, position: int) -> str:
        """Return a sentence that names the other file of a record, if it has one."""
        return ""


class ListedStore(FolderStore):
    """Images with a class, as a list has them, wherever they lie; read like those of a folder.

    A sample is (image, class). A key is the path below the folder, or the whole path where it is
    not below. No file is opened before it is read.

    Concurrency:
        Any thread or process. Nothing is held open.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = Path(f"{folder.name}/1.jpg").write_bytes(b"...")
        >>> store = ListedStore(folder.name, [f"{folder.name}/1.jpg"], [1], ("cat", "dog"))
        >>> store.get_many([0])
        [Record(key='1.jpg', label=1, sample=(<EncodedImage of 3 bytes>, 1))]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        root: str | Path,
        paths: Iterable[str | Path],
        labels: ArrayLike,
        class_names: Sequence[str] = (),
        *,
        name: str = "",
    ) -> None:
        """Take over a list.

        Args:
            root: The folder that keys are relative to.
            paths: The image files.
            labels: Class of each; integers, shape (images,).
            class_names: Name of each class.
            name: The file that the list was read from, for errors.
        """
        super().__init__(root)
        self._name = name
        keys = PackedList(_keys(root, paths))
        relative = PackedList(
            os.path.relpath(key, root) if os.path.isabs(key) else key for key in keys
        )
        numbers = np.array(labels, np.int64) if len(keys) else None
        kinds = np.full(len(keys), PAIR, np.uint8)
        found = Listing(
            keys, keys if keys == relative else relative, kinds, numbers, tuple(class_names)
        )
        self._listings.append(found)

    @property
    def address(self) -> str:
        """The list's name; not an address that `open_store` takes."""
        return self._name or super().address


def _keys(root: str | Path, paths: Iterable[str | Path]) -> Iterator[str]:
    below = os.path.join(os.path.abspath(root), "")
    for path in paths:
        whole = os.path.abspath(path)
        yield whole.removeprefix(below).replace(os.sep, "/") if whole.startswith(below) else whole


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


def has_classes(root: str | Path, subfolders: Sequence[str], images: Sequence[str]) -> bool:
    """Return whether a folder of these is one of class folders; warn of images left out."""
    if subfolders and images:
        warn_user(
            f"{len(images)} image(s) lie in {root} itself, beside its class folders, and are left "
            f"out: {images[0]!r} is one. Move them into a class, or away."
        )
    return bool(subfolders) or not images


def no_image(path: str | Path, subfolders: Sequence[str], images: Sequence[str]) -> StoreError:
    """Return the error of a folder of these in which no image was found, to be raised."""
    if not images:
        known = ", ".join(IMAGE_SUFFIXES)
        return StoreError(f"no image in {path}. Looked for files ending in {known}.")
    where = "no image in its subfolders" if subfolders else "no class folders"
    return StoreError(
        f"{path} has {len(images):,} image(s) in itself, {images[0]!r} for one, but {where}. If it "
        "is the folder of one class, name the one above it. If its images have no classes, "
        f'StoreDataset(open_store("{path}", layout="flat")) reads them without.'
    )
