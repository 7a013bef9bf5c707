# SPDX-License-Identifier: Apache-2.0
"""Dataset stats of a store: classes from its index, sizes from a sample of its records."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError, StoreUnreachable
from penstock.stores.records import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.stores.index import Index
    from penstock.stores.store import Store

__all__ = ["Classes", "Sizes", "count_classes", "measure"]

_READ_RECORDS: Final = 64  # at a time


@dataclass(frozen=True, slots=True)
class Classes:
    """How many records, or objects, each class has; classes in order of their counts.

    Attributes:
        ids: Number of each class, int64 of shape (classes,), the largest class first.
        names: Name of each; its number as text where it has none.
        counts: Records of each; where records have several labels: objects. int64.
        num_images: Records in which each occurs, int64; None where each record has one label.
        objects_per_image: Objects of each record, int64 of shape (records,); None likewise.
    """

    ids: NDArray[np.int64]
    names: list[str]
    counts: NDArray[np.int64]
    num_images: NDArray[np.int64] | None
    objects_per_image: NDArray[np.int64] | None

    @property
    def shares(self) -> NDArray[np.float64]:
        """Part of all that each class has, from 0 to 1."""
        shares: NDArray[np.float64] = self.counts / max(1, self.counts.sum())
        return shares

    @property
    def num_empty(self) -> int:
        """Number of classes that have a name and nothing else."""
        return int((self.counts == 0).sum())

    @property
    def imbalance(self) -> float | None:
        """Largest class to smallest, empty ones left out; None if all are empty."""
        there = self.counts[self.counts > 0]
        return float(there[0] / there[-1]) if len(there) else None

    @property
    def effective_classes(self) -> float | None:
        """Number of equal classes of the same entropy: exp(-sum(p ln p)); None if all are empty.

        From 1, where one class has everything, to the number of classes, where all are equal.
        """
        shares = self.shares[self.counts > 0]
        return math.exp(-float((shares * np.log(shares)).sum())) if len(shares) else None


def count_classes(index: Index) -> Classes | None:
    """Return what an index says of its classes; None if records have no labels.

    Equal counts are in order of the class numbers. Negative labels are classes without a name.
    """
    labels = index.labels
    if labels is None:
        return None
    values = labels.values if isinstance(labels, RaggedArray) else labels
    ids = np.union1d(values, np.arange(len(index.class_names)))
    counts = _count(values, ids)
    order = np.lexsort((ids, -counts))
    num_images = objects = None
    if isinstance(labels, RaggedArray):
        objects = np.diff(labels.offsets)
        row = np.repeat(np.arange(len(labels)), objects)
        once = np.unique(np.stack((row, values)), axis=1)[1]
        num_images = _count(once, ids)[order]
    names = [_name(index.class_names, number) for number in ids[order].tolist()]
    return Classes(ids[order], names, counts[order], num_images, objects)


def _count(values: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(np.searchsorted(ids, values), minlength=len(ids)).astype(np.int64)


def _name(class_names: tuple[str, ...], number: int) -> str:
    return class_names[number] if 0 <= number < len(class_names) else str(number)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes found in a sample of records.

    Attributes:
        num_records: Records of the store.
        num_bytes: Of each record looked at: its images, arrays, strings and bytes. int64.
        heights_px: Of each image in them, as its header says; int64.
        widths_px: Likewise.
        num_unreadable: Images whose header cannot be read.
        num_damaged: Records that cannot be read, of those that were to be looked at.
    """

    num_records: int
    num_bytes: NDArray[np.int64]
    heights_px: NDArray[np.int64]
    widths_px: NDArray[np.int64]
    num_unreadable: int
    num_damaged: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all records, estimated from their mean unless all were looked at."""
        if not len(self.num_bytes):
            return 0
        return round(int(self.num_bytes.sum()) * self.num_records / len(self.num_bytes))


def measure(store: Store, num_sampled: int, tell: Callable[[int, int], object]) -> Sizes:
    """Read records spread evenly over a store, and return their sizes.

    Args:
        store: The store.
        num_sampled: How many are read; 0 is all.
        tell: Called with the number read so far, and of all that will be.

    Raises:
        StoreUnreachable: its server went away. Records that are damaged are counted.
    """
    length = len(store)
    num_read = min(num_sampled or length, length)
    positions = np.arange(num_read) * length // max(1, num_read)
    found = _FoundSizes([], [])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # only headers are read
        for start in range(0, num_read, _READ_RECORDS):
            _look_at(store, positions[start : start + _READ_RECORDS], found)
            tell(min(start + _READ_RECORDS, num_read), num_read)
    return found.sizes(length)


@dataclass
class _FoundSizes:
    """What has been found so far."""

    num_bytes: list[int]
    shapes: list[tuple[int, int] | None]
    num_damaged: int = 0

    def sizes(self, num_records: int) -> Sizes:
        """Return it in arrays."""
        known = [shape for shape in self.shapes if shape is not None]
        pairs = np.array(known, np.int64).reshape(-1, 2)
        return Sizes(
            num_records,
            np.array(self.num_bytes, np.int64),
            pairs[:, 0],
            pairs[:, 1],
            len(self.shapes) - len(known),
            self.num_damaged,
        )


def _look_at(store: Store, positions: NDArray[np.int64], found: _FoundSizes) -> None:
    """Read records together; one by one if something is wrong with one of them."""
    try:
        with store.borrow(positions) as records:
            for record in records:
                found.num_bytes.append(_num_bytes(record.sample, found.shapes))
        return
    except StoreUnreachable:
        raise
    except StoreError:
        if len(positions) == 1:
            found.num_damaged += 1
            return
    for position in positions:
        _look_at(store, position[None], found)


def _num_bytes(value: Any, shapes: list[tuple[int, int] | None]) -> int:  # noqa: ANN401
    """Return the bytes of a sample's leaves, and add the sizes of its images to `shapes`."""
    if isinstance(value, EncodedImage):
        shapes.append(_shape(value.data))
        return len(value.data)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (bytes, memoryview)):
        return len(value)
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        return _num_bytes(list(value.values()), shapes)
    if isinstance(value, (tuple, list)):
        return sum(_num_bytes(item, shapes) for item in value)
    return 0


def _shape(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return height and width as the file's header has them; no pixel is decoded."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.height, image.width
    except Exception:  # over damaged data Pillow raises nearly anything; the caller counts them
        return None
