# SPDX-License-Identifier: Apache-2.0
"""`AnnotationStore`: image files and what is marked in them, as records."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.faults import annotate
from penstock.images.headers import read_header
from penstock.stores.folder.reading import read_file
from penstock.stores.index import Index
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store
from penstock.vision.datasets.frame_votes import FrameVotes
from penstock.vision.datasets.frames import Frame, Orientation, in_frame
from penstock.vision.datasets.packed_sizes import SIZES, packed_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from penstock.vision.datasets.annotation_table import AnnotationTable

__all__ = ["AnnotationStore"]


class AnnotationStore(Store):
    """The images of a table. A sample is the dict that detection takes, its image still encoded.

    A label is the tuple of the objects' classes. Nothing is held open; the annotations are in
    memory, the files are read when they are asked for. Metadata have the names of landmarks and
    attributes, and the sizes that are known, so that a packed copy has them too.

    Concurrency:
        Any thread or process.
    """

    def __init__(
        self,
        table: AnnotationTable,
        orientation: Orientation,
        name: str,
        unreadable: Mapping[str, int] | None = None,
    ) -> None:
        """Keep the table.

        Args:
            table: What is marked; boxes float32.
            orientation: In which frame the pixels are.
            name: What errors call the store.
            unreadable: Paths of images whose size, which their objects are shares of, could not be
                read, and the number of these objects, which are left out.

        Raises:
            StoreError: two images have one key.
        """
        self.table = table
        self._orientation = orientation
        self._name = name
        self._unreadable = dict(unreadable or {})
        self.frame_votes = FrameVotes(table)
        twice = self.index.first_repeated()
        if twice is not None:
            raise StoreError(
                f"{name} has two images called {twice!r}. Leave one out, or give them other names."
            )

    @property
    def address(self) -> str:
        """What it was read from; not an address that `open_store` takes."""
        return self._name

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
            data = read_file(path)
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
    if table.attribute_names:
        found["attribute_names"] = {
            name: list(names) for name, names in table.attribute_names.items()
        }
    return found
