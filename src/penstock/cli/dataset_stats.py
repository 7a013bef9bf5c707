# SPDX-License-Identifier: Apache-2.0
"""What `penstock stats` counts: classes, sizes of records, boxes. Each as JSON has it."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.labels.known import known_labels
from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError, StoreUnreachable
from penstock.stores.index import Index, labels_from
from penstock.stores.pack_source import pack_source
from penstock.stores.records import EncodedImage, decode_record
from penstock.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.stores.records import Record
    from penstock.vision.datasets.annotated import AnnotatedImages

__all__ = ["DatasetStore", "Objects", "Sizes", "count_classes", "count_objects", "histogram"]

_READ_RECORDS: Final = 64  # at a time
# Sides of squares, in pixels, between which COCO's evaluation calls objects medium.
_SMALL_PX, _LARGE_PX = 32, 96
_MOST_BINS: Final = 14
_WIDE: Final = 40.0  # largest to smallest, from which on bins grow with their values


class DatasetStore(Store):
    """The samples of a user's dataset as the store that `penstock pack` would make of it.

    Example:
        >>> store = DatasetStore([("a cat", 0), ("a dog", 1)], "mine:texts")
        >>> store.labels, store.get_many([1])
        (array([0, 1]), [Record(key='1', label=1, sample=('a dog', 1))])
    """

    def __init__(self, dataset: Any, name: str) -> None:  # noqa: ANN401
        """Take a dataset.

        Args:
            dataset: With `__len__` and `__getitem__`.
            name: As it was named on the command line.

        Raises:
            ConfigError: it has not both.
        """
        self._dataset = dataset
        self._name = name
        self._source = pack_source(dataset, resize=None, quality=None, limit=None)

    @property
    def address(self) -> str:
        """The name."""
        return self._name

    def _load_index(self) -> Index:
        """Return the labels that the dataset knows; otherwise all samples are read for them."""
        labels = known_labels(self._dataset)
        if isinstance(labels, RaggedArray):  # copies: an index's own are made read-only
            of_all: Any = RaggedArray(labels.values.copy(), labels.offsets.copy())
        elif labels is not None and labels.dtype.kind in "biu":
            of_all = np.array(labels, np.int64)
        else:
            of_all = labels_from([self._source[n].label for n in range(len(self._source))])
        keys = PackedList([str(n) for n in range(len(self._source))])
        return Index(keys, of_all, self._source.class_names, self._source.metadata)

    @contextlib.contextmanager
    def _read(self, positions: NDArray[Any], *, copy: bool) -> Iterator[list[Record]]:
        encoded = [self._source[position] for position in positions.tolist()]
        yield [decode_record(record.data, f"sample {record.key!r}") for record in encoded]


def count_classes(labels: Any, class_names: Sequence[str]) -> dict[str, Any]:  # noqa: ANN401
    """Return the counts of classes, the largest first; none if there are no labels.

    Equal counts are in order of the class numbers. Negative labels are classes without a name. Of
    labels that are a `RaggedArray`, objects and images are counted.

    Example:
        >>> count_classes(np.array([1, 0, 1]), ["cat", "dog"])["classes"][0]["count"]
        2
    """
    if labels is None:
        return {"num_classes": None}
    values = labels.values if isinstance(labels, RaggedArray) else labels
    ids = np.union1d(values, np.arange(len(class_names)))
    counts = _count(values, ids)
    shares = counts / max(1, counts.sum())
    rows = [
        {
            "class": number,
            "name": class_names[number] if 0 <= number < len(class_names) else str(number),
            "count": count,
            "share": share,
        }
        for number, count, share in zip(ids.tolist(), counts.tolist(), shares.tolist(), strict=True)
    ]
    there, parts = counts[counts > 0], shares[counts > 0]
    record: dict[str, Any] = {
        "num_classes": len(ids),
        "num_empty_classes": len(counts) - len(there),
        "largest_to_smallest": float(there.max() / there.min()) if len(there) else None,
        # Of as many equal classes the entropy is the same: from 1 to the number of classes.
        "effective_classes": math.exp(-float((parts * np.log(parts)).sum()))
        if len(there)
        else None,
    }
    if isinstance(labels, RaggedArray):
        per_image = np.diff(labels.offsets)
        image = np.repeat(np.arange(len(labels)), per_image)
        once = np.unique(np.stack((image, values)), axis=1)[1]
        for row, number in zip(rows, _count(once, ids).tolist(), strict=True):
            row["images"] = number
        record["objects_per_image"] = _spread(per_image)
        record["num_images_without_objects"] = int((per_image == 0).sum())
    record["classes"] = [rows[n] for n in np.lexsort((ids, -counts)).tolist()]
    return record


def _count(values: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(np.searchsorted(ids, values), minlength=len(ids)).astype(np.int64)


def _spread(values: NDArray[np.int64]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {
        "min": int(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "max": int(values.max()),
    }


@dataclass
class Sizes:
    """Sizes found in records spread evenly over a store.

    Attributes:
        num_records: Records of the store.
        num_bytes: Of each record looked at: its images, arrays, strings and bytes.
        shapes_px: Height and width of each image in them, as its header says.
        num_unreadable: Images whose header cannot be read.
        num_damaged: Records that cannot be read, of those that were to be looked at.
    """

    num_records: int
    num_bytes: list[int] = field(default_factory=list)
    shapes_px: list[tuple[int, int]] = field(default_factory=list)
    num_unreadable: int = 0
    num_damaged: int = 0

    @classmethod
    def measure(cls, store: Store, num_sampled: int, tell: Callable[[int, int], object]) -> Sizes:
        """Return the sizes of `num_sampled` records of a store; 0 is all.

        Args:
            store: The store.
            num_sampled: How many are read.
            tell: Called with the number read so far, and of all that will be.

        Raises:
            StoreUnreachable: its server went away. Records that are damaged are counted.
        """
        found = cls(len(store))
        num_read = min(num_sampled or len(store), len(store))
        positions = np.arange(num_read) * len(store) // max(1, num_read)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")  # only headers are read
            for start in range(0, num_read, _READ_RECORDS):
                found._look_at(store, positions[start : start + _READ_RECORDS])
                tell(min(start + _READ_RECORDS, num_read), num_read)
        return found

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it; the bytes of all are estimated unless all were looked at."""
        num_bytes = np.array(self.num_bytes, np.int64)
        shapes = np.array(self.shapes_px, np.int64).reshape(-1, 2)
        total = self.num_records * sum(self.num_bytes) / max(1, len(num_bytes))
        return {
            "num_sampled": len(num_bytes),
            "total_bytes": round(total),
            "is_total_estimated": len(num_bytes) < self.num_records,
            "record_bytes": _spread(num_bytes),
            "num_images": len(shapes),
            "num_unreadable": self.num_unreadable,
            "num_damaged": self.num_damaged,
            "height_px": _spread(shapes[:, 0]),
            "width_px": _spread(shapes[:, 1]),
        }

    def _look_at(self, store: Store, positions: NDArray[np.int64]) -> None:
        """Read records together; one by one if something is wrong with one of them."""
        try:
            with store.borrow(positions) as records:
                self.num_bytes += [self._num_bytes(record.sample) for record in records]
        except StoreUnreachable:
            raise
        except (StoreError, ValueError, OSError) as error:
            # Also of a file that its annotation does not fit; of the user's code it is an error.
            if isinstance(store, DatasetStore) and not isinstance(error, StoreError):
                raise
            if len(positions) == 1:
                self.num_damaged += 1
                return
            for position in positions:
                self._look_at(store, position[None])

    def _num_bytes(self, value: Any) -> int:  # noqa: ANN401
        """Return the bytes of a sample's leaves, and add the sizes of its images."""
        if isinstance(value, EncodedImage):
            self._add_image(value.data)
            return len(value.data)
        if isinstance(value, np.ndarray):
            return value.nbytes
        if isinstance(value, (bytes, memoryview)):
            return len(value)
        if isinstance(value, str):
            return len(value.encode("utf-8", "surrogatepass"))
        if isinstance(value, Mapping):
            value = list(value.values())
        return sum(map(self._num_bytes, value)) if isinstance(value, (tuple, list)) else 0

    def _add_image(self, data: bytes | memoryview) -> None:
        """Add the size that an image's header has; no pixel is decoded."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as image:
                self.shapes_px.append((image.height, image.width))
        except Exception:  # over damaged data Pillow raises nearly anything
            self.num_unreadable += 1


@dataclass(frozen=True, slots=True)
class Objects:
    """What annotations say of objects and images; no image is decoded.

    Attributes:
        sizes_px: Height and width of the images whose size is known, int64 (images, 2).
        boxes_per_image: int64 (images,); objects that have no box do not count.
        areas_px: Area of each box that has one, in square pixels; float64 (boxes,).
        num_without_area: Boxes that are empty, or end before they begin.
        bad_boxes: How many boxes are of each kind that cannot be right, by the names that
            `penstock.vision.datasets.rules` has for them.
    """

    sizes_px: NDArray[np.int64]
    boxes_per_image: NDArray[np.int64]
    areas_px: NDArray[np.float64]
    num_without_area: int
    bad_boxes: Mapping[str, int]

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        kinds = np.digitize(self.areas_px, (_SMALL_PX**2, _LARGE_PX**2))
        counts = np.bincount(kinds, minlength=3).tolist()
        return {
            "num_boxes": int(self.boxes_per_image.sum()),
            "num_boxes_without_area": self.num_without_area,
            "bad_boxes": dict(self.bad_boxes),
            "boxes_by_size": dict(zip(("small", "medium", "large"), counts, strict=True)),
            "boxes_per_image": histogram(self.boxes_per_image),
            "box_area_px": histogram(self.areas_px),
            "longer_side_px": histogram(self.sizes_px.max(axis=1, initial=0)),
        }


def count_objects(dataset: AnnotatedImages) -> Objects:
    """Return the counts of a dataset, from its annotations."""
    from penstock.vision.datasets.rules import judged  # stores alone need no OpenCV

    table = dataset.store.table
    boxes = np.asarray(table.boxes, np.float64).reshape(-1, 4)
    is_there = ~np.isnan(boxes).any(axis=1)
    boxes, images = boxes[is_there], table.images_of_objects[is_there]
    sides = boxes[:, 2:] - boxes[:, :2]
    has_area = (sides > 0).all(axis=1)
    sizes = dataset.sizes_px
    found = dataset.box_counts
    # What the data set has cut is inside by now; it knows the sizes in the files alone.
    num_outside = int(judged(boxes, sizes[images], "keep").outside.sum())
    return Objects(
        sizes[(sizes > 0).all(axis=1)],
        np.bincount(images, minlength=len(table)).astype(np.int64),
        sides[has_area].prod(axis=1),
        int((~has_area).sum()),
        {
            "zero_area": found.zero_area,
            "inverted": found.inverted,
            "outside": max(found.outside, num_outside),
        },
    )


def histogram(values: NDArray[Any]) -> dict[str, list[Any]]:
    """Return edges and counts of values not below 0; each bin has its lower edge, not its upper.

    One bin per number where these are few; otherwise equal ones, or for a wide range ones that grow
    by 1, 2, 5, 10, 20 …

    Example:
        >>> histogram(np.array([1, 1, 3]))
        {'edges': [1.0, 2.0, 3.0, 4.0], 'counts': [2, 0, 1]}
    """
    if not len(values):
        return {"edges": [0.0, 1.0], "counts": [0]}
    edges = _edges(float(values.min()), float(values.max()))
    places = np.searchsorted(np.array(edges), values, side="right") - 1
    return {"edges": edges, "counts": np.bincount(places, minlength=len(edges) - 1).tolist()}


def _edges(least: float, most: float) -> list[float]:
    steps = [factor * 10.0**power for power in range(16) for factor in (1, 2, 5)]
    if least > 0 and most / least > _WIDE and most - least >= _MOST_BINS:
        steps = [0.0, *steps]
        start = max(k for k, step in enumerate(steps) if step <= least)
        stop = min(k for k, step in enumerate(steps) if step > most)
        return steps[start : stop + 1]
    # The values may lie in one bin more than their range has.
    step = next(s for s in steps if (most - least) / s < _MOST_BINS - (s > 1))
    first, last = math.floor(least / step), math.floor(most / step)
    return [step * n for n in range(first, last + 2)]
