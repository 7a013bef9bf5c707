# SPDX-License-Identifier: Apache-2.0
"""`AnnotationTable`: what is marked in all images of a data set, in arrays that workers share.

A million objects as Python objects take a gigabyte, once for each worker; here a box and its class
take 24 bytes, once.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["FLAGS", "AnnotationTable"]

FLAGS: Final = ("difficult", "truncated", "occluded")


@dataclass(frozen=True, eq=False)
class AnnotationTable:
    """The annotations of many images.

    Image i has the objects `offsets[i]` to `offsets[i + 1]` (not included).

    Attributes:
        paths: Image files.
        keys: What the images are called.
        sources: Where each image's annotation was read.
        sizes_px: Height and width of each image as it was annotated; int64, shape (images, 2). 0
            where it is not known.
        offsets: int64, shape (images + 1,).
        boxes: 0-based, half-open xyxy in pixels; shape (objects, 4). NaN: an object without a box.
        labels: Number of each object's class; int64, shape (objects,). -1 - n: it is none of
            `class_names`, but `unknown_classes[n]`.
        class_names: Name of each class.
        columns: What else there is of each object, by the name that it has in a sample:
            "landmarks", float32, shape (objects, points, 2); "visibility", int8, shape
            (objects, points); "difficult", "truncated", "occluded", bool, shape (objects,);
            attributes, int64, shape (objects,). What no file says is not there.
        landmark_names: Names of the points; empty if they have none.
        attribute_names: For each attribute the texts that its numbers stand for.
        unknown_classes: Classes of objects that are none of `class_names`.
        is_size_said: bool, shape (images,): whether an annotation says the size, and not the image
            file; None for nowhere.
        is_bare: bool, shape (objects,): which have neither a box nor landmarks, not even missing
            ones; None for none.
    """

    paths: PackedList[str]
    keys: PackedList[str]
    sources: PackedList[str]
    sizes_px: NDArray[np.int64]
    offsets: NDArray[np.int64]
    boxes: NDArray[Any]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    landmark_names: tuple[str, ...] = ()
    attribute_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown_classes: tuple[str, ...] = ()
    is_size_said: NDArray[np.bool_] | None = None
    is_bare: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.offsets) - 1

    @property
    def num_objects(self) -> int:
        """Objects of all images together."""
        return len(self.labels)

    @property
    def num_landmarks(self) -> int:
        """Points of an object; 0 if there are none."""
        return int(self.columns["landmarks"].shape[1]) if "landmarks" in self.columns else 0

    @property
    def images_of_objects(self) -> NDArray[np.int64]:
        """Number of the image of each object; int64, shape (objects,); new memory."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def objects_of(self, position: int) -> dict[str, NDArray[Any]]:
        """Return boxes, labels and all columns of one image; views."""
        start, stop = self.offsets[position : position + 2].tolist()
        rows = {"boxes": self.boxes[start:stop], "labels": self.labels[start:stop]}
        rows.update((name, column[start:stop]) for name, column in self.columns.items())
        return rows

    def with_objects(self, is_kept: NDArray[np.bool_]) -> AnnotationTable:
        """Return the table with some of its objects, and all images; this one if all are kept."""
        if is_kept.all():
            return self
        numbers = np.concatenate([[0], np.cumsum(is_kept)])
        return replace(
            self,
            offsets=numbers[self.offsets],
            boxes=self.boxes[is_kept],
            labels=self.labels[is_kept],
            columns={name: column[is_kept] for name, column in self.columns.items()},
            is_bare=None if self.is_bare is None else self.is_bare[is_kept],
        )

    def without_empty(self) -> AnnotationTable:
        """Return the table without the images that have no object."""
        counts = np.diff(self.offsets)
        (chosen,) = np.nonzero(counts)
        if len(chosen) == len(self):
            return self
        return replace(
            self,
            paths=PackedList(self.paths[chosen]),
            keys=PackedList(self.keys[chosen]),
            sources=PackedList(self.sources[chosen]),
            sizes_px=self.sizes_px[chosen],
            offsets=np.concatenate([[0], np.cumsum(counts[chosen])]),
            is_size_said=None if self.is_size_said is None else self.is_size_said[chosen],
        )

    def fingerprint(self) -> str:
        """Return a hash of all but paths and sources: the same wherever the files are moved to."""
        digest = hashlib.blake2b(digest_size=16)
        names = (self.class_names, self.landmark_names, sorted(self.attribute_names.items()))
        digest.update(repr((names, sorted(self.columns))).encode("utf-8", "surrogatepass"))
        if len(self.keys):
            for part in self.keys.to_utf8():
                digest.update(part.tobytes())
        arrays = [self.columns[name] for name in sorted(self.columns)]
        for array in (self.sizes_px, self.offsets, self.boxes, self.labels, *arrays):
            digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        return digest.hexdigest()

    def image(self, position: int) -> AnnotatedImage:
        """Return what the table has of one image, in the form that files are read to.

        Example:
            >>> from penstock.vision.datasets.table_builder import TableBuilder
            >>> builder = TableBuilder()
            >>> cat = AnnotatedObject("cat", (0.0, 0.0, 8.0, 6.0))
            >>> builder.add(AnnotatedImage(Path("1.jpg"), "1", 8, 6, (cat,)))
            >>> builder.table().image(0).objects[0].class_name
            'cat'
        """
        rows = self.objects_of(position)
        height, width = self.sizes_px[position].tolist()
        objects = (self._object(rows, number) for number in range(len(rows["labels"])))
        return AnnotatedImage(
            path=Path(self.paths[position]),
            key=self.keys[position],
            width_px=width or None,
            height_px=height or None,
            objects=tuple(objects),
            source=self.sources[position],
        )

    def _object(self, rows: Mapping[str, NDArray[Any]], number: int) -> AnnotatedObject:
        box = rows["boxes"][number].tolist()
        points = rows["landmarks"][number].tolist() if "landmarks" in rows else []
        flags = {name: bool(rows[name][number]) for name in FLAGS if name in rows}
        return AnnotatedObject(
            class_name=self.class_names[rows["labels"][number]],
            box_xyxy_px=None if math.isnan(box[0]) else (box[0], box[1], box[2], box[3]),
            landmarks_xy_px=tuple((x, y) for x, y in points),
            landmark_names=self.landmark_names,
            visibility=tuple(rows["visibility"][number].tolist()) if "visibility" in rows else (),
            extra={name: names[rows[name][number]] for name, names in self.attribute_names.items()},
            difficult=flags.get("difficult"),
            truncated=flags.get("truncated"),
            occluded=flags.get("occluded"),
        )
