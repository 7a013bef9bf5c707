# SPDX-License-Identifier: Apache-2.0
"""`AnnotatedImages`: images with objects marked in them, from files or from a packed store."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, StoreError
from penstock.faults import annotate
from penstock.images.headers import read_header
from penstock.opening import MAX_FILE_BYTES, FileState, fingerprint_of, read_file
from penstock.stores.dataset import StoreDataset
from penstock.stores.index import (
    COLUMNS,
    Index,
    from_metadata,
    packed_columns,
    packed_numbers,
    unpacked_numbers,
)
from penstock.stores.records import EncodedImage, Record
from penstock.stores.store import Store
from penstock.vision.annotations.coco import masks_of
from penstock.vision.datasets.rules import (
    AnnotationRules,
    Orientation,
    in_frame,
    settled,
    size_of_file,
    warn_of_absent,
)
from penstock.vision.datasets.table import FLAGS, TableBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.stores.dataset import Decode
    from penstock.vision.annotations.model import AnnotatedImage
    from penstock.vision.datasets.rules import BoxCounts
    from penstock.vision.datasets.table import AnnotationTable

SIZES: Final = "sizes_px"  # in metadata: 56 kB for 10,000 images of as many sizes
_NUM_TOGETHER: Final = 64  # records that are read for their headers


class DatasetOptions(TypedDict, total=False):
    """Arguments that all datasets of annotated images have."""

    transform: Callable[[Any], Any] | None
    rules: AnnotationRules | None
    decode: Decode
    repair: bool
    cache: str | Path | None


class AnnotationStore(Store):
    """The images of a table. A sample is the dict that detection takes, its image still encoded.

    A label is the tuple of the objects' classes.

    Attributes:
        max_file_size: Bytes of the largest image that is read; may be set.
    """

    def __init__(
        self,
        table: AnnotationTable,
        orientation: Orientation,
        name: str,
        root: str | Path | None = None,
    ) -> None:
        """Keep the table."""
        self.table = table
        self.max_file_size = MAX_FILE_BYTES
        self._orientation = orientation
        self._name = name
        self._root = root
        first: dict[str, int] = {}
        for position, key in enumerate(table.keys):
            other = first.setdefault(key, position)
            if other != position and _content(table, other) != _content(table, position):
                raise StoreError(
                    f"{name} has two images called {key!r}. Leave one out, or give them other "
                    "names."
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
        if (segmentation := self.table.segmentations_of(position)) is not None:
            sample["segmentation"] = segmentation
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
            return in_frame(data, self._orientation, (height, width) if height else None)
        except ValueError as error:
            annotate(error, f"while reading {path}, annotated in {source or 'a table'}")
            raise


def _content(table: AnnotationTable, position: int) -> tuple[object, ...]:
    """Return all that a table has of an image, to be compared."""
    arrays = table.objects_of(position).items()
    rows = tuple((name, array.tobytes()) for name, array in arrays)
    return table.paths[position], table.sizes_px[position].tolist(), rows


def _metadata(table: AnnotationTable) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if (table.sizes_px > 0).any():
        numbers = packed_numbers(table.sizes_px)
        found[SIZES] = {"num_images": len(table), "zlib_base64_u32": numbers}
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


class _MaskedImages(StoreDataset):
    """Makes masks of what a record says of them."""

    def _own_sample(self, sample: Any, position: int) -> Any:  # noqa: ANN401
        made = super()._own_sample(sample, position)
        if isinstance(made, dict) and isinstance(made.get("segmentation"), tuple):
            header = read_header(sample["image"].data)
            size = header.upright_height_px, header.upright_width_px
            made["masks"] = masks_of(made.pop("segmentation"), *size)
        return made


class AnnotatedImages(_MaskedImages):
    """Images with boxes, and landmarks where there are some; a sample is a dict.

        "image"         uint8 (height, width, 3), RGB
        "boxes"         float32 (N, 4): left, top, right, bottom; pixels, 0-based, half-open
        "labels"        int64 (N,): place of the class in `class_names`
        "landmarks"     float32 (N, K, 2): x, y; (0, 0) is the centre of the top left pixel; NaN
                        where a point is not marked
        "visibility"    int8 (N, K): 0 not marked, 1 hidden, 2 seen
        "difficult", "truncated", "occluded", "iscrowd"     bool (N,)
        "masks"         uint8 (N, height, width), 1 in an object; made by pycocotools
        "area"          float32 (N,), square pixels of the file's image; no transform changes it
        any attribute   int64 (N,): place of its text in `attribute_names[name]`
        "image_id"      str: what the image is called

    The first three and the last are always there; the others in all samples, if any file has them.
    Every array but the image has a row for each object. Arrays are the caller's own. Pixels and
    boxes are in one frame: see docs/detection.md on Exif, and on objects without a box.

    All annotations are read when the dataset is made, into arrays that workers share; of image
    files then only the header, where no annotation says a size that is needed.

    Attributes:
        box_counts: What was found about the boxes of the files, and done.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import cv2, numpy as np
        >>> from penstock.vision import AnnotatedImage, AnnotatedObject
        >>> folder = tempfile.TemporaryDirectory()
        >>> photo = Path(folder.name, "1.png")
        >>> _ = cv2.imwrite(str(photo), np.zeros((6, 8, 3), np.uint8))
        >>> objects = (AnnotatedObject("cat", (1, 1, 9, 4)), AnnotatedObject("dog", (5, 5, 5, 6)))
        >>> dataset = AnnotatedImages([AnnotatedImage(photo, "1", 8, 6, objects)])
        >>> dataset[0]["boxes"], dataset.class_names
        (array([[1., 1., 8., 4.]], dtype=float32), ('cat', 'dog'))
        >>> print(dataset.box_counts)
        2 objects, 1 kept (1 zero_area, 1 outside, 1 clipped, 1 dropped)
        >>> folder.cleanup()
    """

    store: AnnotationStore
    box_counts: BoxCounts

    def __init__(
        self,
        images: Iterable[AnnotatedImage],
        *,
        class_names: Sequence[str] | None = None,
        attributes: Sequence[str] | Mapping[str, Sequence[str]] | None = (),
        name: str = "annotated images",
        **options: Unpack[DatasetOptions],
    ) -> None:
        """Take over annotations.

        Args:
            images: What was read; gone through once.
            class_names: The classes in their order; those found, sorted, if not given. It is a
                warning if no object is of one of them.
            attributes: Which of the objects' `extra` (or "pose") become arrays; None takes all. A
                dict gives each its texts in their order.
            name: What errors call the dataset.
            **options: `transform` takes the sample. `rules`, an `AnnotationRules`, decides on
                frames, bad boxes, unknown classes, difficult objects and images without objects.
                `decode` and `cache` are as for `StoreDataset`. With `repair=True` JPEG files
                without an end are given one.

        Raises:
            StoreError: an annotation is wrong, or bad under these rules.
        """
        builder = TableBuilder(attributes)
        builder.add(images)
        self._take(builder.table(class_names), name, given_classes=class_names, **options)

    def _take(
        self,
        table: AnnotationTable,
        name: str,
        *,
        added_px: int | None = None,
        given_classes: Sequence[str] | None = None,
        num_unsized: int = 0,
        root: str | Path | None = None,
        rules: AnnotationRules | None = None,
        **options: Any,  # noqa: ANN401 - of StoreDataset
    ) -> None:
        """Become the dataset of a table as it was read; classes given are looked for in it."""
        transform = options.get("transform")
        if getattr(transform, "takes_files", False) is True:
            raise ConfigError(
                f"{type(transform).__name__} makes images alone, and would leave the boxes behind: "
                "give transforms of samples, such as Letterbox or RandomPerspective."
            )
        rules = rules or AnnotationRules()
        rules = rules if added_px is None else replace(rules, added_px=added_px)
        all_labels = table.labels
        table, counts = settled(table, rules)
        self.box_counts = replace(counts, total=counts.total + num_unsized, unsized=num_unsized)
        if given_classes is not None:
            warn_of_absent(table.class_names, all_labels)
        self._rules = rules
        store = AnnotationStore(table, rules.orientation, name, root)
        StoreDataset.__init__(self, store, **options)

    @property
    def _frames(self) -> str:
        files = []
        for path in self.store.table.paths:
            with contextlib.suppress(OSError):  # reading it says so
                files.append(FileState.of(path))
        return f"{self._rules.orientation} {fingerprint_of(files)}"

    @property
    def landmark_names(self) -> tuple[str, ...]:
        """Names of the landmarks, in their order; empty if they have none."""
        return self.store.table.landmark_names

    @property
    def num_landmarks(self) -> int:
        """Landmarks of an object; 0 if there are none."""
        return self.store.table.num_landmarks

    @functools.cached_property
    def sizes_px(self) -> NDArray[np.int64]:
        """Height and width of each image without decoding it; int64, shape (len, 2); read-only.

        Those that annotations do not say are read from the files' headers, once, when they are
        first asked for. 0 where a header cannot be read.
        """
        table = self.store.table
        sizes_px = table.sizes_px.copy()
        for position in np.flatnonzero((sizes_px <= 0).any(axis=1)).tolist():
            sizes_px[position] = size_of_file(table.paths[position], self._rules.orientation) or 0
        sizes_px.flags.writeable = False
        return sizes_px

    def annotation(self, index: int) -> AnnotatedImage:
        """Return what the dataset has of one image, without reading it."""
        return self.store.table.image(int(self.store.checked([index])[0]))

    def describe(self, index: int) -> str:
        """Return the path of an image: what errors call it."""
        return self.store.table.paths[index]

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield from super()._summary()
        if self.num_landmarks:
            yield "landmarks", f"{self.num_landmarks} each"
        yield "boxes", str(self.box_counts)


class PackedAnnotations(_MaskedImages):
    """What `pack` made of `AnnotatedImages`, with all that is known without an image being read.

    Samples are those of `StoreDataset`, with "masks" where it has the text "segmentation"; there
    are also the names of landmarks and attributes, and the sizes of images, for a
    `BucketBatchSampler` by aspect ratio.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import cv2
        >>> from penstock.stores import pack
        >>> from penstock.vision import AnnotatedImage, AnnotatedObject
        >>> folder = tempfile.TemporaryDirectory()
        >>> photo = Path(folder.name, "1.png")
        >>> _ = cv2.imwrite(str(photo), np.zeros((6, 8, 3), np.uint8))
        >>> nose = AnnotatedObject("face", (0, 0, 8, 6), ((3.0, 4.0),), ("nose",))
        >>> address = f"lmdb:{folder.name}/faces.lmdb"
        >>> _ = pack(AnnotatedImages([AnnotatedImage(photo, "1", 8, 6, (nose,))]), address)
        >>> packed = PackedAnnotations(address)
        >>> packed.sizes_px.tolist(), packed.landmark_names, packed.num_landmarks
        ([[6, 8]], ('nose',), 1)
        >>> packed.close(); folder.cleanup()
    """

    @property
    def landmark_names(self) -> tuple[str, ...]:
        """Names of the landmarks, in their order; empty if they have none."""
        return from_metadata(self.store.metadata, "landmark_names", tuple[str, ...], ())

    @property
    def num_landmarks(self) -> int:
        """Landmarks of an object; 0 if there are none."""
        default = len(self.landmark_names)
        return from_metadata(self.store.metadata, "num_landmarks", int, default)

    @functools.cached_property
    def sizes_px(self) -> NDArray[np.int64]:
        """Height and width of each image; int64, shape (len, 2); read-only.

        As they were when the store was packed. Where the store does not say them (samples were left
        out, or annotations did not say all sizes) records are read for their headers, once: 0 where
        one is damaged.

        Raises:
            StoreError: a record is missing or damaged, or its sample has no encoded image.
        """
        sizes_px = self._packed_sizes()
        (unknown,) = np.nonzero((sizes_px <= 0).any(axis=1))
        for start in range(0, len(unknown), _NUM_TOGETHER):
            positions = unknown[start : start + _NUM_TOGETHER]
            records = self.store.get_many(positions)
            sizes_px[positions] = [self._size_of(record) for record in records]
        sizes_px.flags.writeable = False
        return sizes_px

    def _packed_sizes(self) -> NDArray[np.int64]:
        """Return what the store says; 0 if it says nothing, or has more or fewer images by now."""
        packed = self.store.metadata.get(SIZES)
        if not isinstance(packed, dict) or packed.get("num_images") != len(self):
            return np.zeros((len(self), 2), np.int64)
        text = packed.get("zlib_base64_u32")
        return unpacked_numbers(text, 2 * len(self), SIZES).reshape(len(self), 2)

    def _size_of(self, record: Record) -> tuple[int, ...]:
        image = record.sample.get("image") if isinstance(record.sample, dict) else None
        if isinstance(image, np.ndarray):
            return tuple(image.shape[:2])
        if not isinstance(image, EncodedImage):
            raise StoreError(
                f"record {record.key!r} of {self.store.address} has no entry 'image' with an "
                "image: read this store with StoreDataset."
            )
        try:
            header = read_header(image.data)
        except ValueError:
            return 0, 0
        return header.upright_height_px, header.upright_width_px
