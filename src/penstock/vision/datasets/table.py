# SPDX-License-Identifier: Apache-2.0
"""`AnnotationTable`: what is marked in all images of a data set, in arrays that workers share.

A million objects as Python objects take a gigabyte, once for each worker; here a box and its class
take 24 bytes, once. `TableBuilder` makes the table of `AnnotatedImage`s.
"""

from __future__ import annotations

import hashlib
import math
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import MAX_ATTRIBUTES, MAX_LANDMARK_NAMES, MAX_LANDMARKS
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

FLAGS: Final = ("difficult", "truncated", "occluded", "iscrowd")
UNNAMED: Final = "object"  # the class of objects of a file that has no classes
_NO_BOX: Final = (math.nan,) * 4
_TAKEN: Final = frozenset(
    ("image", "image_id", "boxes", "labels", "landmarks", "visibility", "area", "masks", *FLAGS)
)
_MOST_NUMBERS: Final = 1000  # a column of greater ones holds no classes
_SEEN: Final = 2


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
            (objects, points); "difficult", "truncated", "occluded", "iscrowd", bool, shape
            (objects,); "area", float32, shape (objects,); attributes, int64, shape (objects,). What
            no file says is not there.
        landmark_names: Names of the points; empty if they have none.
        attribute_names: For each attribute the texts that its numbers stand for.
        unknown_classes: Classes of objects that are none of `class_names`.
        is_bare: bool, shape (objects,): which have neither a box nor landmarks, not even missing
            ones; None for none.
        segmentations: The `segmentation` of each object; None where no object has one.
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
    is_bare: NDArray[np.bool_] | None = None
    segmentations: PackedList[str] | None = None

    def __len__(self) -> int:
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

    def segmentations_of(self, position: int) -> tuple[str, ...] | None:
        """Return the segmentation of each object of one image; None where no object has one."""
        start, stop = self.offsets[position : position + 2].tolist()
        return None if self.segmentations is None else tuple(self.segmentations[start:stop])

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
            segmentations=None if self.segmentations is None else self.segmentations[is_kept],
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
        )

    def fingerprint(self) -> str:
        """Return a hash of all but paths and sources: the same wherever the files are moved to."""
        digest = hashlib.blake2b(digest_size=16)
        names = (self.class_names, self.landmark_names, sorted(self.attribute_names.items()))
        digest.update(repr((names, sorted(self.columns))).encode("utf-8", "surrogatepass"))
        for texts in (self.keys, self.segmentations):
            for part in texts.to_utf8() if texts else ():
                digest.update(part.data.cast("B"))
        arrays = [self.columns[name] for name in sorted(self.columns)]
        for values in (self.sizes_px, self.offsets, self.boxes, self.labels, *arrays):
            digest.update(np.ascontiguousarray(values).data.cast("B") if values.size else b"")
        return digest.hexdigest()

    def image(self, position: int) -> AnnotatedImage:
        """Return what the table has of one image, in the form that files are read to."""
        rows = self.objects_of(position)
        masks = self.segmentations_of(position) or ("",) * len(rows["labels"])
        height, width = self.sizes_px[position].tolist()
        objects = (self._object(rows, number, mask) for number, mask in enumerate(masks))
        return AnnotatedImage(
            path=Path(self.paths[position]),
            key=self.keys[position],
            width_px=width or None,
            height_px=height or None,
            objects=tuple(objects),
            source=self.sources[position],
        )

    def _object(
        self, rows: Mapping[str, NDArray[Any]], number: int, segmentation: str
    ) -> AnnotatedObject:
        box = rows["boxes"][number].tolist()
        points = rows["landmarks"][number].tolist() if "landmarks" in rows else []
        flags: Any = {name: bool(rows[name][number]) for name in FLAGS if name in rows}
        return AnnotatedObject(
            class_name=self.class_names[rows["labels"][number]],
            box_xyxy_px=None if math.isnan(box[0]) else (box[0], box[1], box[2], box[3]),
            landmarks_xy_px=tuple((x, y) for x, y in points),
            landmark_names=self.landmark_names,
            visibility=tuple(rows["visibility"][number].tolist()) if "visibility" in rows else (),
            area_px=float(rows["area"][number]) if "area" in rows else None,
            extra={name: names[rows[name][number]] for name, names in self.attribute_names.items()},
            segmentation=segmentation,
            **flags,
        )


class TableBuilder:
    """Collects images and makes their table."""

    def __init__(self, attributes: Sequence[str] | Mapping[str, Sequence[str]] | None = ()) -> None:
        """Begin with no image."""
        self._paths: list[str] = []
        self._keys: list[str] = []
        self._sources: list[str] = []
        self._sizes, self._counts = array("q"), array("q")
        self._boxes, self._bare = array("d"), array("b")
        self._areas, self._says_areas = array("f"), False
        self._segmentations, self._ends = bytearray(), array("q", [0])
        self._classes = _Words()
        self._flags = {name: array("b") for name in FLAGS}
        self._points = _Landmarks()
        attributes = (attributes,) if isinstance(attributes, str) else attributes
        self._takes_all = attributes is None
        self._texts = attributes if isinstance(attributes, Mapping) else {}
        self._attributes = {name: _Words() for name in attributes or ()}
        self._there: set[str] = set()  # those that an object has
        for name in self._attributes:
            _check_name(name)

    def add(self, images: Iterable[AnnotatedImage]) -> None:
        """Add images."""
        for image in images:
            path = os.fspath(image.path)
            for number, item in enumerate(image.objects):
                self._add(item, f"object {number} ({item.class_name}) of {image.source or path}")
            self._paths.append(path)
            self._keys.append(image.key)
            self._sources.append(image.source)
            self._sizes.extend((image.height_px or 0, image.width_px or 0))
            self._counts.append(len(image.objects))

    def _add(self, item: AnnotatedObject, where: str) -> None:
        box = item.box_xyxy_px
        if box is not None and not all(map(math.isfinite, box)):
            raise StoreError(f"{where}: its box is {box}, which no pixel has.")
        self._points.add(item, where)
        self._boxes.extend(_NO_BOX if box is None else box)
        self._bare.append(box is None and not item.landmarks_xy_px)
        self._areas.append(math.nan if item.area_px is None else item.area_px)
        self._says_areas = self._says_areas or item.area_px is not None
        self._segmentations += item.segmentation.encode()
        self._ends.append(len(self._segmentations))
        for name in sorted(item.extra.keys() - self._attributes.keys()) if self._takes_all else ():
            _check_name(name)
            if len(self._attributes) >= MAX_ATTRIBUTES:
                raise StoreError(
                    f"{where}: {name!r:.80} is one attribute more than {MAX_ATTRIBUTES:,}. Name "
                    "those that you want: attributes=[…]."
                )
            self._attributes[name] = words = _Words()
            for _ in range(len(self._classes.numbers)):  # those before had none
                words.add("")
        self._there.update(self._attributes.keys() & item.extra.keys())
        for name, words in self._attributes.items():
            words.add(_text_of(item, name))
        self._classes.add(item.class_name or UNNAMED)
        for name, flags in self._flags.items():
            value = getattr(item, name)
            flags.append(-1 if value is None else int(value))

    def add_texts(self, images: Iterable[AnnotatedImage]) -> None:
        """Number the attributes' texts of other images as well, so that all parts do alike."""
        for image in images:
            for item in image.objects:
                for name, words in self._attributes.items():
                    words.number_of(_text_of(item, name))

    def table(
        self,
        class_names: Sequence[str] | None = None,
        *,
        has_numbers: bool = False,
        landmark_names: Sequence[str] | None = None,
    ) -> AnnotationTable:
        """Return the table; boxes are float64."""
        if isinstance(class_names, str):
            raise ConfigError(f"class_names is a list of names, not the text {class_names!r}.")
        sort = numbered_names if has_numbers else sorted
        names = tuple(sort(self._classes.names) if class_names is None else class_names)
        flags = {name: np.frombuffer(said, np.int8) for name, said in self._flags.items()}
        flags = {name: said == 1 for name, said in flags.items() if (said >= 0).any()}
        attributes, columns = self._attribute_columns()
        if self._says_areas:
            columns["area"] = np.frombuffer(self._areas, np.float32)
        masks = np.frombuffer(self._segmentations, np.uint8)
        ends = np.frombuffer(self._ends, np.int64)
        unknown = tuple(sorted(self._classes.names.keys() - set(names)))
        points, columns_of_points = self._points.columns(landmark_names)
        return AnnotationTable(
            paths=PackedList(self._paths),
            keys=PackedList(self._keys),
            sources=PackedList(self._sources),
            sizes_px=np.frombuffer(self._sizes, np.int64).reshape(-1, 2),
            offsets=np.concatenate(
                [np.zeros(1, np.int64), np.cumsum(np.frombuffer(self._counts, np.int64))]
            ),
            boxes=np.frombuffer(self._boxes, np.float64).reshape(-1, 4),
            labels=self._classes.as_numbers_of(names, unknown),
            class_names=names,
            columns={**columns_of_points, **flags, **columns},
            landmark_names=points,
            attribute_names=attributes,
            unknown_classes=unknown,
            is_bare=np.frombuffer(self._bare, np.bool_),
            segmentations=PackedList.from_utf8(masks, ends) if len(masks) else None,
        )

    def _attribute_columns(self) -> tuple[dict[str, tuple[str, ...]], dict[str, NDArray[Any]]]:
        names, columns = {}, {}
        for name, words in self._attributes.items():
            if words.names.keys() == {""} and name not in self._there:
                warn_user(f"no object has the attribute {name!r:.80}.")
            names[name] = tuple(self._texts.get(name) or numbered_names(words.names))
            columns[name] = words.as_numbers_of(names[name])
            if (columns[name] < 0).any():
                lost = min(set(words.names) - set(names[name]))
                raise StoreError(
                    f"the attribute {name!r} is {lost!r} somewhere, which its names "
                    f"{names[name]!r:.200} lack."
                )
        return names, columns


class _Words:
    """Texts of which there are few, each time as a number."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.numbers = array("q")

    def add(self, name: str) -> None:
        self.numbers.append(self.number_of(name))

    def number_of(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def as_numbers_of(self, names: Sequence[str], others: Sequence[str] = ()) -> NDArray[np.int64]:
        """Return for each the place of its text in `names`; -1 - n: it is `others[n]`."""
        places = {name: -1 - place for place, name in enumerate(others)}
        places |= {name: place for place, name in enumerate(names)}
        if len(places) < len(names) + len(others):
            raise ConfigError(f"a name is there twice: {list(names)!r:.200}.")
        table = np.array([places.get(name, -1) for name in self.names], np.int64)
        return table[np.frombuffer(self.numbers, np.int64)]


class _Landmarks:
    """The landmarks of all objects as one column: the same points in the same order for each."""

    def __init__(self) -> None:
        # The names of an object's points, "" for each without one: few tuples, mostly one.
        self._orders: dict[tuple[str, ...], int] = {}
        self._order_of = array("q")
        self._xy, self._seen = array("f"), array("b")  # of all points in turn
        self._says_visibility = False
        self._first = ""

    def add(self, item: AnnotatedObject, where: str) -> None:
        """Add those of the next object; errors call it `where`."""
        points = item.landmarks_xy_px
        for kind in ("landmark_names", "visibility"):
            given = getattr(item, kind)
            if given and len(given) != len(points):
                raise StoreError(f"{where}: {len(points)} landmarks, but {len(given)} {kind}.")
        names = item.landmark_names or ("",) * len(points)
        if names not in self._orders:
            self._check_order(names, where)
            self._orders[names] = len(self._orders)
        self._order_of.append(self._orders[names])
        for point in points:
            self._xy.extend(point)
        self._seen.extend(item.visibility or (0 if math.isnan(x + y) else _SEEN for x, y in points))
        self._says_visibility = self._says_visibility or bool(item.visibility)

    def _check_order(self, names: tuple[str, ...], where: str) -> None:
        others = [order for order in self._orders if order]
        self._first = self._first or (where if names else "")
        if any(names) and len(set(names)) < len(names):
            raise StoreError(f"{where}: two of its landmarks have one name.")
        if names and others and not (any(names) and any(others[0])):
            raise StoreError(
                f"{where} has {len(names)} landmarks, and {self._first} has {len(others[0])}, and "
                "not both of them name theirs: which belong together?"
            )
        num_names = len({*names, *(name for order in others for name in order)} - {""})
        for count, most in ((num_names, MAX_LANDMARK_NAMES), (len(names), MAX_LANDMARKS)):
            if count > most:  # each object would have all of them
                raise StoreError(
                    f"{where}: with its landmarks there are {count:,}; {most:,} is the most. Is a "
                    "number of the object part of each name?"
                )

    def columns(
        self, wanted: Sequence[str] | None
    ) -> tuple[tuple[str, ...], dict[str, NDArray[Any]]]:
        """Return the points' names, and the columns "landmarks" and "visibility" as far as said."""
        orders = [order for order in self._orders if order]
        found = {name for order in orders for name in order} - {""}
        if wanted is not None and not found:
            raise ConfigError("landmark_names is given, and no landmark has a name.")
        if not found:
            names: tuple[str, ...] = orders[0] if orders else ()
        elif wanted is not None:
            names = tuple(wanted)
        else:  # the order of an object that has all points; sorted if none has
            whole = (order for order in orders if len(order) == len(found))
            names = next(whole, tuple(sorted(found, key=_natural_order)))
        if not names:
            return (), {}
        order_of = np.frombuffer(self._order_of, np.int64)
        lengths = np.array([len(order) for order in self._orders], np.int64)
        starts = np.cumsum(lengths[order_of]) - lengths[order_of]
        xy = np.frombuffer(self._xy, np.float32).reshape(-1, 2)
        seen = np.frombuffer(self._seen, np.int8)
        landmarks = np.full((len(order_of), len(names), 2), np.nan, np.float32)
        visibility = np.zeros(landmarks.shape[:2], np.int8)
        place_of = {name: place for place, name in enumerate(names)}
        for order in orders:
            places = [place_of.get(n, -1) for n in order] if found else list(range(len(order)))
            given = [k for k, place in enumerate(places) if place >= 0]
            rows = np.flatnonzero(order_of == self._orders[order])
            to = np.ix_(rows, np.array([places[k] for k in given], np.int64))
            at = starts[rows][:, None] + np.array(given, np.int64)
            landmarks[to], visibility[to] = xy[at], seen[at]
        landmarks[np.isnan(landmarks).any(axis=2)] = np.nan  # half a point is none
        columns: dict[str, NDArray[Any]] = {"landmarks": landmarks}
        if self._says_visibility:
            columns["visibility"] = visibility
        return names if found else (), columns


def numbered_names(names: Iterable[str]) -> list[str]:
    """Return names sorted; of numbers from 0 on, all up to the greatest."""
    found = set(names)
    said = found - {""}  # nothing said: the last of all
    are_numbers = all(name.isascii() and name.isdigit() for name in said)
    if said and are_numbers and all(str(int(name[:9])) == name for name in said):
        greatest = max(map(int, said))
        if greatest < _MOST_NUMBERS:
            return [*map(str, range(greatest + 1)), *(found - said)]
    return sorted(found, key=_natural_order)


def _natural_order(name: str) -> tuple[bool, int, str]:
    """Return a key to sort names by: numbers first, 9 before 10."""
    is_number = name.isascii() and name.isdigit()
    return not is_number, int(name[:4000]) if is_number else 0, name


def _text_of(item: AnnotatedObject, attribute: str) -> str:
    return item.extra.get(attribute, item.pose if attribute == "pose" else "")


def _check_name(name: str) -> None:
    if name in _TAKEN:
        raise ConfigError(
            f"an attribute is called {name!r}, which is something else in a sample. Choose the "
            "ones you want by `attributes`, or give the column another name."
        )
