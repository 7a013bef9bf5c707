# SPDX-License-Identifier: Apache-2.0
"""`AnnotationStore`: image files and what is marked in them, as records."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.faults import annotate
from penstock.images.headers import read_header
from penstock.opening import MAX_FILE_BYTES, checked_max_file_size, read_file
from penstock.stores.index import Index
from penstock.stores.label_columns import COLUMNS, packed_columns
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store
from penstock.vision.datasets.annotation_table import FLAGS
from penstock.vision.datasets.frame_votes import FrameVotes
from penstock.vision.datasets.frames import Frame, Orientation, in_frame
from penstock.vision.datasets.packed_sizes import SIZES, packed_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.vision.datasets.annotation_table import AnnotationTable

__all__ = ["AnnotationStore"]


class AnnotationStore(Store):
    """The images of a table. A sample is the dict that detection takes, its image still encoded.

    A label is the tuple of the objects' classes. Nothing is held open; the annotations are in
    memory, the files are read when they are asked for. Metadata have the names of landmarks and
    attributes, the classes by each of these, and the sizes that are known, so that a packed copy
    has them too.

    Attributes:
        max_file_size: Bytes of the largest image that is read; may be set.

    Concurrency:
        Any thread or process.
    """

    def __init__(
        self,
        table: AnnotationTable,
        orientation: Orientation,
        name: str,
        unreadable: Mapping[str, int] | None = None,
        root: str | Path | None = None,
        *,
        max_file_size: int = MAX_FILE_BYTES,
    ) -> None:
        """Keep the table.

        Args:
            table: What is marked; boxes float32.
            orientation: In which frame the pixels are.
            name: What errors call the store.
            unreadable: Paths of images whose size, which their objects are shares of, could not be
                read, and the number of these objects, which are left out.
            root: The folder that images are expected in; None if they may be anywhere.
            max_file_size: Bytes of the largest image that is read.

        Raises:
            ConfigError: `max_file_size` is no number of bytes.
            StoreError: two images have one key. The same image may be there several times.
        """
        self.table = table
        self.max_file_size = checked_max_file_size(max_file_size)
        self._orientation = orientation
        self._name = name
        self._unreadable = dict(unreadable or {})
        self._root = root
        self.frame_votes = FrameVotes(table)
        if self.index.first_repeated() is not None:
            self._check_repeated()

    def _check_repeated(self) -> None:
        """Raise if two samples of one key are not of the same image, with the same objects."""
        first: dict[str, int] = {}
        for position, key in enumerate(self.table.keys):
            other = first.setdefault(key, position)
            if other != position and _said(self.table, other) != _said(self.table, position):
                raise StoreError(
                    f"{self._name} has two images called {key!r}. Leave one out, or give them "
                    "other names."
                )

    @property
    def address(self) -> str:
        """What it was read from; not an address that `open_store` takes."""
        return self._name

    def own_files(self) -> tuple[str, Iterable[str]] | None:
        """As in `Store`."""
        if self._root is None:
            return None
        here = os.getcwd()
        return os.fspath(self._root), (os.path.join(here, path) for path in self.table.paths)

    def _load_index(self) -> Index:
        table = self.table
        return Index(
            table.keys,
            RaggedArray(table.labels, table.offsets),
            table.class_names,
            _metadata(table),
            table.fingerprint(),
        )

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        yield [self._record(position, copy=copy) for position in positions.tolist()]

    def _record(self, position: int, *, copy: bool) -> Record:
        image = EncodedImage(self._file(position))
        arrays = self.table.objects_of(position)
        if copy:
            arrays = {name: array.copy() for name, array in arrays.items()}
        key = self.keys[position]
        sample = {"image": image, **arrays, "image_id": key}
        return Record(key, self.index.label_of(position), sample)

    def _file(self, position: int) -> bytes:
        path, source = self.table.paths[position], self.table.sources[position]
        try:
            data = read_file(path, self.max_file_size)
        except OSError as error:
            said = f" It is annotated in {source}." if source else ""
            raise StoreError(f"cannot read {path}: {error.strerror}.{said}") from error
        height, width = self.table.sizes_px[position].tolist()
        try:
            if path in self._unreadable:
                self._refuse(path, data)
            size = (height, width) if height else None
            return in_frame(data, self._orientation, size, self._either(position))
        except ValueError as error:
            annotate(error, f"while reading {path}, annotated in {source or 'a table'}")
            raise

    def _either(self, position: int) -> Callable[[], Frame]:
        """Return what to ask where an image's size fits both frames."""
        is_said = self.table.is_size_said
        return self.frame_votes.frame if is_said is not None and is_said[position] else _upright

    def _refuse(self, path: str, data: bytes) -> None:
        """Raise for an image whose objects could not be placed."""
        num_objects = self._unreadable[path]
        said = f"its {num_objects} object(s) are shares of its size, and are left out"
        try:
            read_header(data)
        except ValueError as error:
            raise ValueError(f"{error}; {said}") from error
        raise ValueError(
            f"its size can be read now, and could not when the data set was made; {said}. Make the "
            "data set anew"
        )


def _said(table: AnnotationTable, position: int) -> tuple[object, ...]:
    """Return all that a table says of an image, to be compared."""
    arrays = table.objects_of(position).items()
    rows = tuple((name, array.tobytes()) for name, array in arrays)
    return table.paths[position], table.sizes_px[position].tolist(), rows


def _upright() -> Frame:
    return "upright"


def _metadata(table: AnnotationTable) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if (table.sizes_px > 0).any():
        found[SIZES] = packed_sizes(table.sizes_px)
    if table.num_landmarks:
        found["num_landmarks"] = table.num_landmarks
    if table.landmark_names:
        found["landmark_names"] = list(table.landmark_names)
    # An attribute that no object has gives no classes.
    attributes = {name for name, texts in table.attribute_names.items() if any(texts)}
    columns = [name for name in table.columns if name in FLAGS or name in attributes]
    found[COLUMNS] = packed_columns({name: table.columns[name] for name in columns})
    if table.attribute_names:
        found["attribute_names"] = {
            name: list(names) for name, names in table.attribute_names.items()
        }
    return found
