# SPDX-License-Identifier: Apache-2.0
"""`FolderStore`: image files in a folder, as they are; or what `FolderWriter` put into one."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xxhash

from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_FILE_BYTES, MAX_TREE_BYTES, checked_max_file_size, read_file
from penstock.stores.folder.annotated_folder import refuse_annotated
from penstock.stores.folder.listing import IMAGE_SUFFIXES, list_classes, list_flat, scan
from penstock.stores.folder.marks import (
    IMAGE,
    INDEX_NAME,
    PAIR,
    RECORD,
    VOC,
    Listing,
    annotation_path,
    file_stats,
    names_fingerprint,
    read_index,
    read_marker,
    stat_fingerprint,
)
from penstock.stores.folder.voc import list_voc, looks_like_voc, xml_text
from penstock.stores.index import Index
from penstock.stores.records import EncodedImage, Record, decode_record
from penstock.stores.store import Store, missing_records
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["FolderStore", "Layout"]

Layout = Literal["auto", "classes", "flat", "voc"]
_LAYOUTS: Final = ("auto", "classes", "flat", "voc")
_GONE: Final = (errno.ENOENT, errno.ENOTDIR)


class FolderStore(Store):
    """Image files below a folder, read when they are asked for.

    Layouts:
        classes   ROOT/CLASS/**/NAME.jpg, as torchvision's ImageFolder has it and in its order. A
                  sample is (image, class), a key the path below ROOT. Empty class folders count,
                  hidden and system folders do not.
        flat      Images in ROOT itself. A sample is the image alone; there are no labels.
        voc       Pascal VOC: Annotations/NAME.xml and JPEGImages/NAME.jpg. A sample is (image, the
                  XML as text), a key NAME, a label the tuple of its objects' classes.

    A folder that `pack` made is read by its index, where one is needed: then a sample may be
    anything. Other files are passed over; a folder that cannot be listed is an error.

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
        layout: Layout = "auto",
        split: str | None = None,
        max_file_size: int = MAX_FILE_BYTES,
    ) -> None:
        """Name the folder; it is listed at first use.

        Args:
            path: The folder.
            layout: "auto" takes the index if there is one; "voc" if there are `Annotations` and
                `JPEGImages`; "classes" if there is a subfolder; otherwise "flat".
            split: Of Pascal VOC: the images that `ImageSets/Main/SPLIT.txt` names, in its order.
            max_file_size: Bytes of the largest image or record that is read; a larger one is an
                error.

        Raises:
            ConfigError: `layout` is none of these, `split` is given for another than VOC, or
                `max_file_size` is no number of bytes.
        """
        if layout not in _LAYOUTS:
            raise ConfigError(f"layout is one of {', '.join(_LAYOUTS)}, not {layout!r}.")
        if split is not None and layout not in ("auto", "voc"):
            raise ConfigError(f"split={split!r} is for Pascal VOC, and layout is {layout!r}.")
        self._path = Path(path)
        self._layout: Layout = layout
        self._split = split
        self.max_file_size = checked_max_file_size(max_file_size)
        # At most one; of two threads that list at the same time, the first one's is everybody's.
        self._listings: list[Listing] = []
        self._fingerprint: str | None = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def address(self) -> str:
        """`folder:` and the path."""
        return f"folder:{self._path}"

    @property
    def fingerprint(self) -> str:
        """A short text that changes if a file does; found when it is first asked for.

        That of the records, where a writer made the folder and nothing has changed since: the same
        in every kind of store.
        """
        if self._fingerprint is None:
            found = stat_fingerprint(self._listing, file_stats(self._path, self._listing))
            marker = read_marker(self._path) or {}
            is_as_made = marker.get("files") == found
            self._fingerprint = marker["fingerprint"] if is_as_made else found
        return self._fingerprint

    def own_files(self) -> tuple[str, Iterable[str]]:
        """As in `Store`."""
        return os.fspath(self._path), self._listing.files()

    def file_of(self, position: int) -> Path:
        """Return the file that a record, or its image, is in."""
        return self._path / self._listing.paths[position]

    @property
    def _listing(self) -> Listing:
        # Without a lock: listing may take minutes, and a child that was forked meanwhile would wait
        # for it for ever.
        if not self._listings:
            self._listings.append(self._listed())
        return self._listings[0]

    def _listed(self) -> Listing:
        if not self._path.is_dir():
            raise _no_folder(self._path)
        listing = read_index(self._path) if self._layout == "auto" and not self._split else None
        if listing is None:
            listing = self._list()
        if not len(listing.keys) and read_marker(self._path) is None:
            raise _no_image(self._path)
        return listing

    def _list(self) -> Listing:
        layout = self._layout if self._layout != "auto" else _found_layout(self._path)
        if self._split is not None and layout != "voc":
            raise ConfigError(
                f"split={self._split!r} is for Pascal VOC, and {self._path} lacks its folders "
                "Annotations and JPEGImages."
            )
        if layout == "voc":
            return list_voc(self._path, self._split)
        return _classes(self._path) if layout == "classes" else list_flat(self._path)

    def _load_index(self) -> Index:
        listing = self._listing
        marker = read_marker(self._path) or {}
        return Index(
            listing.keys,
            listing.labels,
            listing.class_names,
            marker.get("metadata", {}),
            names_fingerprint(listing),  # at once; `fingerprint` asks every file
            len(listing.keys) > 0 and bool(np.all(listing.kinds == PAIR)),
        )

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        files = self._files(positions)
        yield [
            self._record(position, data)
            for position, data in zip(positions.tolist(), files, strict=True)
        ]

    @contextlib.contextmanager
    def borrow_images(self, positions: NDArray[np.int64]) -> Iterator[list[bytes]]:
        """As in `Store`."""
        files = self._files(positions)
        for position, data in zip(positions.tolist(), files, strict=True):
            self._check(position, data)
        yield files

    def _files(self, positions: NDArray[np.int64]) -> list[bytes]:
        """Return the files of records; those that are not there are named together."""
        root, paths = os.fspath(self._path), self._listing.paths
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
            raise self._missing(absent)
        return files

    def _record(self, position: int, data: bytes) -> Record:
        kind = self._listing.kinds[position]
        name = f"record {position} ({self.keys[position]!r}) of {self.address}"
        if kind == RECORD:
            record = decode_record(data, name)
            if record.key != self.keys[position]:
                raise StoreError(f"{name} is another record, called {record.key!r}.")
            return record
        image = EncodedImage(data)
        label = self.label_at(position)
        if kind == VOC:
            path = os.fspath(self._path / annotation_path(self._listing.paths[position]))
            xml = self._annotation(position, path)
            self._check(position, data + xml)
            return Record(self.keys[position], label, (image, _decoded(xml, path)))
        self._check(position, data)
        return Record(self.keys[position], label, (image, label) if kind == PAIR else image)

    def label_at(self, position: int) -> int | tuple[int, ...] | None:
        """Return the label of a record, as far as it is known without reading one."""
        label = self.index.label_of(position)
        # Beside records of several labels, that of an image is a row of one.
        if isinstance(label, tuple) and self._listing.kinds[position] in (PAIR, IMAGE):
            return label[0] if label else None
        return label

    def _missing(self, positions: list[int], paths: Sequence[str] = ()) -> StoreError:
        """Return the error of files that are not there: those of records, or the `paths` given."""
        files = list(paths) or [str(self.file_of(position)) for position in positions]
        if read_marker(self._path) is not None:
            return missing_records(files, self.address)
        said = ""
        if self._listing.kinds[positions[0]] == VOC:
            image = self._listing.paths[positions[0]]
            said = f" Its annotation is {self._path / annotation_path(image)}."
            if paths:
                said = f" It is the annotation of {self._path / image}."
        more = f", and {len(files) - 1} more" if len(files) > 1 else ""
        return StoreError(
            f"a file of {self.address} is not there: {files[0]}{more}.{said} It was removed, "
            "renamed, or never there. Restore it, or leave out what lacks one with "
            "on_error='skip'."
        )

    def _annotation(self, position: int, path: str) -> bytes:
        try:
            return read_file(path, MAX_TREE_BYTES, remedy="split it")
        except OSError as error:
            if error.errno in _GONE:
                raise self._missing([position], [path]) from error
            raise StoreError(f"cannot read {path}: {error.strerror}.") from error

    def _check(self, position: int, data: bytes) -> None:
        """Compare the checksum, where the index has one."""
        checksums = self._listing.checksums
        if checksums is None:
            return
        found, expected = xxhash.xxh3_64_intdigest(data), int(checksums[position])
        if found != expected:
            raise StoreError(
                f"{self.file_of(position)} is damaged or was changed (record {position}, "
                f"{self.keys[position]!r}): its checksum was {expected:016x}, now it is "
                f"{found:016x}. Restore it from a copy, or pack the folder anew."
            )


def _decoded(xml: bytes, path: str) -> str:
    try:
        return xml_text(xml)
    except ValueError as error:
        raise StoreError(f"cannot read {path}: {error}.") from error


def _classes(root: Path) -> Listing:
    """Return the images of class folders; StoreError if the folders are those of annotations."""
    listing = list_classes(root)
    num_packed = (read_marker(root) or {}).get("num_records", 0)
    if len(listing.keys) < num_packed:  # up to 0.1.0 a system folder was a class, and was packed
        listing = list_classes(root, with_system=True)
    labels = np.zeros(0, np.int64) if listing.labels is None else listing.labels
    counts = np.bincount(np.asarray(labels), minlength=len(listing.class_names)).tolist()
    refuse_annotated(root, dict(zip(listing.class_names, counts, strict=True)))
    return listing


def _found_layout(root: Path) -> str:
    marker: dict[str, Any] = read_marker(root) or {}
    if marker.get("layout") in _LAYOUTS[1:]:
        return str(marker["layout"])
    if marker.get("layout") == "index":
        raise StoreError(
            f"{root / INDEX_NAME} is missing: the folder was packed with an index, which has keys, "
            "labels and checksums. Copy the folder again with the files whose names begin with a "
            'dot, or read its images without them: layout="flat" or "classes".'
        )
    if looks_like_voc(root):
        return "voc"
    subfolders, images = scan(os.fspath(root))
    if subfolders and images:
        warnings.warn(
            f"{len(images)} image(s) lie in {root} itself, beside its class folders, and are left "
            f"out: {images[0]!r} is one. Move them into a class, or away.",
            UserWarning,
            stacklevel=users_level(),
        )
    return "classes" if subfolders or not images else "flat"


def _no_image(path: Path) -> StoreError:
    subfolders, images = scan(os.fspath(path))
    if not images:
        known = ", ".join(IMAGE_SUFFIXES)
        return StoreError(f"no image in {path}. Looked for files ending in {known}.")
    where = "no image in its subfolders" if subfolders else "no class folders"
    above = os.path.dirname(os.path.abspath(path))
    flat = f'StoreDataset("{path}")'
    if subfolders:
        flat = f'StoreDataset(open_store("{path}", layout="flat"))'
    return StoreError(
        f"{path} has {len(images):,} image(s) in itself, {images[0]!r} for one, but {where}. If it "
        f"is the folder of one class, name the one above it: {above}. If its images have no "
        f"classes, {flat} reads them without."
    )


def _no_folder(path: Path) -> StoreError:
    if not path.exists():
        return StoreError(f"{path} does not exist. Name a folder with images in it.")
    hint = ""
    if path.name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")):
        hint = " It is a compressed tar file: unpack it to a .tar file, and name that."
    return StoreError(
        f"{path} is a file, not a folder.{hint} Files are named with their kind: lmdb:PATH, "
        "tar:PATH, arrow:PATH."
    )
