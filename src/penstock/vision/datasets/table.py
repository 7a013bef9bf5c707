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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import MAX_ATTRIBUTES, MAX_LANDMARK_NAMES, MAX_LANDMARKS
from penstock.vision.datasets.rules import warn_of_absent_attribute

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

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
        for values in (self.sizes_px, self.offsets, self.boxes, self.labels, *arrays):
            digest.update(np.ascontiguousarray(values).data.cast("B") if values.size else b"")
        return digest.hexdigest()

    def image(self, position: int) -> AnnotatedImage:
        """Return what the table has of one image, in the form that files are read to.

        Example:
            >>> from penstock.vision.datasets.table import TableBuilder
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


_SEEN: Final = 2
_MANY_PLACES: Final = 1 << 26  # half a gigabyte
_SPARSE: Final = 100  # places for each point that is given


class LandmarkCollector:
    """Collects the landmarks of objects, one at a time.

    Points of one name are the same point, in whatever order an object has them. An object without
    landmarks has those of the others, not marked.

    Example:
        >>> from penstock.vision.annotations.model import AnnotatedObject
        >>> collector = LandmarkCollector()
        >>> eyes = ((1.0, 2.0), (3.0, 4.0))
        >>> face = AnnotatedObject("face", landmarks_xy_px=eyes, landmark_names=("left", "right"))
        >>> for item in (face, AnnotatedObject("face")):
        ...     collector.add(item, "a face")
        >>> names, columns = collector.columns(["right"])
        >>> names, columns["landmarks"].tolist()
        (('right',), [[[3.0, 4.0]], [[nan, nan]]])
    """

    def __init__(self) -> None:
        """Begin with no object."""
        self._xy, self._visibility = array("f"), array("b")
        self._counts = array("q")
        self._orders = _Orders()
        self._says_visibility = False

    def add(self, item: AnnotatedObject, where: str) -> None:
        """Add the landmarks of the next object; errors call it `where`.

        Raises:
            StoreError: they cannot be the same points as those before.
        """
        points = item.landmarks_xy_px
        for kind in ("landmark_names", "visibility"):
            given = getattr(item, kind)
            if given and len(given) != len(points):
                raise StoreError(f"{where}: {len(points)} landmarks, but {len(given)} {kind}.")
        self._orders.add(item.landmark_names, len(points), where)
        self._counts.append(len(points))
        for x, y in points:
            self._xy.append(x)
            self._xy.append(y)
        self._says_visibility = self._says_visibility or bool(item.visibility)
        self._visibility.extend(
            item.visibility or (0 if math.isnan(x + y) else _SEEN for x, y in points)
        )

    def columns(
        self, wanted: Sequence[str] | None
    ) -> tuple[tuple[str, ...], dict[str, NDArray[Any]]]:
        """Return the points' names, and the columns "landmarks" and "visibility" as far as said.

        Args:
            wanted: The points wanted, by name, in order; None takes all.

        Returns:
            Names, empty if points have none; float32, shape (objects, points, 2), and int8, shape
            (objects, points): see `AnnotationTable`.

        Raises:
            ConfigError: points are wanted by name, and have none.
        """
        num_points, names, places = self._orders.joined(wanted)
        if not num_points:
            return (), {}
        counts = int64_of(self._counts)
        owners = np.repeat(np.arange(len(counts)), counts)
        targets = places[self._orders.of_points()]
        is_wanted = targets >= 0
        owners, targets = owners[is_wanted], targets[is_wanted]
        _refuse_mostly_missing(len(counts), num_points, len(owners))
        landmarks = np.full((len(counts), num_points, 2), np.nan, np.float32)
        landmarks[owners, targets] = np.frombuffer(self._xy, np.float32).reshape(-1, 2)[is_wanted]
        landmarks[np.isnan(landmarks).any(axis=2)] = np.nan  # half a point is none
        columns: dict[str, NDArray[Any]] = {"landmarks": landmarks}
        if self._says_visibility:
            columns["visibility"] = np.zeros((len(counts), num_points), np.int8)
            said = np.frombuffer(self._visibility, np.int8)
            columns["visibility"][owners, targets] = said[is_wanted]
        return names, columns


def _refuse_mostly_missing(num_objects: int, num_points: int, num_given: int) -> None:
    num_places = num_objects * num_points
    if num_places > _MANY_PLACES and num_places > _SPARSE * max(1, num_given):
        raise StoreError(
            f"{num_objects:,} objects would have {num_points:,} landmarks each, and only "
            f"{num_given:,} are given in all. Choose those that you want by landmark_names, or "
            "leave out the objects that have very many."
        )


class _Orders:
    """In which order objects have their landmarks: few ways, mostly one."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, ...], int] = {}
        self._numbers = array("q")  # of each object: which order; -1 without landmarks
        self._unnamed: tuple[int, str] | None = None
        self._named = ""
        self._names: set[str] = set()

    def add(self, names: tuple[str, ...], num_points: int, where: str) -> None:
        if not num_points:
            self._numbers.append(-1)
            return
        if names and len(set(names)) < len(names):
            raise StoreError(f"{where}: two of its landmarks have one name.")
        if names:
            self._named = self._named or where
        elif self._unnamed is None:
            self._unnamed = num_points, where
        elif self._unnamed[0] != num_points:
            raise StoreError(
                f"{where} has {num_points} landmarks, and {self._unnamed[1]} has "
                f"{self._unnamed[0]}. Without names nobody can say which of them are missing."
            )
        if self._unnamed is not None and self._named:
            raise StoreError(
                f"the landmarks of {self._named} have names, those of {self._unnamed[1]} have "
                "none: nobody can say which belong together."
            )
        key = names or ("",) * num_points
        if key not in self._orders:
            self._check_number(names, num_points, where)
        self._numbers.append(self._orders.setdefault(key, len(self._orders)))

    def _check_number(self, names: tuple[str, ...], num_points: int, where: str) -> None:
        """Raise if every object would have room for very many points, as one may name them."""
        before = len(self._names)
        self._names.update(names)
        if len(self._names) > MAX_LANDMARK_NAMES:
            raise StoreError(
                f"{where}: with its landmarks, {names[0]!r:.80} for one, there are "
                f"{len(self._names):,} names, {before:,} of them before; {MAX_LANDMARK_NAMES:,} "
                "is the most. Is a number of the object part of each name?"
            )
        if num_points > MAX_LANDMARKS:
            raise StoreError(f"{where}: {num_points:,} landmarks; {MAX_LANDMARKS:,} is the most.")

    def joined(
        self, wanted: Sequence[str] | None
    ) -> tuple[int, tuple[str, ...], NDArray[np.int64]]:
        """Return the number of points, their names, and the place of each order's points."""
        if wanted is not None and not self._named:
            raise ConfigError("landmark_names is given, and no landmark has a name.")
        if self._unnamed is not None:
            return self._unnamed[0], (), np.arange(self._unnamed[0])
        names = tuple(wanted) if wanted is not None else self._all_names()
        place_of = {name: place for place, name in enumerate(names)}
        places = [place_of.get(name, -1) for order in self._orders for name in order]
        return len(names), names, np.array(places, np.int64)

    def _all_names(self) -> tuple[str, ...]:
        """Return the order of an object that has all points; sorted if none has."""
        every = {name for order in self._orders for name in order}
        whole = next((order for order in self._orders if len(order) == len(every)), None)
        return whole if whole is not None else tuple(sorted(every, key=natural_order))

    def of_points(self) -> NDArray[np.int64]:
        """Return for each point where the place of its kind is in what `joined` returned."""
        numbers = int64_of(self._numbers)
        numbers = numbers[numbers >= 0]
        lengths = np.array([len(order) for order in self._orders], np.int64)
        starts = np.cumsum(lengths) - lengths
        ends = np.cumsum(lengths[numbers])
        first = np.repeat(ends - lengths[numbers], lengths[numbers])
        within = np.arange(int(ends[-1]) if len(ends) else 0) - first
        return np.asarray(within + np.repeat(starts[numbers], lengths[numbers]))


def natural_order(name: str) -> tuple[bool, int, str]:
    """Return a key to sort names by: numbers first, 9 before 10."""
    is_number = name.isascii() and name.isdigit()
    return not is_number, int(name[:4000]) if is_number else 0, name


def int64_of(values: array[int]) -> NDArray[np.int64]:
    """Return the values of an array of type "q"; a view."""
    return np.frombuffer(values, np.int64) if len(values) else np.empty(0, np.int64)


UNNAMED: Final = "object"  # the class of objects of a file that has no classes
_NO_BOX: Final = (math.nan,) * 4
_TAKEN: Final = frozenset(("image", "boxes", "labels", "landmarks", "visibility", *FLAGS))
_MOST_NUMBERS: Final = 1000  # a column of greater ones holds no classes


class TableBuilder:
    """Collects images, one at a time; what it keeps of each is some bytes in arrays.

    Example:
        >>> from pathlib import Path
        >>> from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
        >>> builder = TableBuilder()
        >>> for name in ("dog", "cat"):
        ...     thing = AnnotatedObject(name, (0.0, 0.0, 8.0, 6.0))
        ...     builder.add(AnnotatedImage(Path(f"{name}.jpg"), name, 8, 6, (thing,)))
        >>> table = builder.table()
        >>> table.class_names, table.labels
        (('cat', 'dog'), array([1, 0]))
    """

    def __init__(self, attributes: Sequence[str] | None = ()) -> None:
        """Begin with no image.

        Args:
            attributes: Which of the objects' `extra` become columns, or "pose"; None takes all that
                there are.

        Raises:
            ConfigError: one is called like something else of a sample.
        """
        self._paths, self._keys, self._sources = _Texts(), _Texts(), _Texts()
        self._sizes, self._counts = array("q"), array("q")
        self._boxes = array("d")
        self._bare = array("b")
        self._classes = _Words()
        self._flags = {name: array("b") for name in FLAGS}
        self._points = LandmarkCollector()
        attributes = (attributes,) if isinstance(attributes, str) else attributes
        self._takes_all = attributes is None
        self._attributes = {name: _Words() for name in attributes or ()}
        self._there: set[str] = set()  # attributes of the objects so far
        for name in self._attributes:
            _check_name(name)

    @property
    def class_names(self) -> set[str]:
        """Classes of the objects so far."""
        return set(self._classes.names)

    def add(self, image: AnnotatedImage) -> None:
        """Add an image.

        Raises:
            StoreError: an object's number is not finite, or its landmarks are of another kind than
                those before.
        """
        for number, item in enumerate(image.objects):
            self._add_object(item, f"object {number} ({item.class_name}) of {_where(image)}")
        self._paths.add(os.fspath(image.path))
        self._keys.add(image.key)
        self._sources.add(image.source)
        self._sizes.extend((image.height_px or 0, image.width_px or 0))
        self._counts.append(len(image.objects))

    def _add_object(self, item: AnnotatedObject, where: str) -> None:
        box = item.box_xyxy_px
        if box is not None and not all(map(math.isfinite, box)):
            raise StoreError(f"{where}: its box is {box}, which no pixel has.")
        self._points.add(item, where)
        self._boxes.extend(_NO_BOX if box is None else box)
        self._bare.append(box is None and not item.landmarks_xy_px)
        if self._takes_all:
            self._take_new_attributes(item, where)
        if self._attributes and len(self._there) < MAX_ATTRIBUTES:
            self._there.update(item.extra, ("pose",) if item.pose else ())
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

    def _take_new_attributes(self, item: AnnotatedObject, where: str) -> None:
        for name in sorted(item.extra.keys() - self._attributes.keys()):
            _check_name(name)
            if len(self._attributes) >= MAX_ATTRIBUTES:
                raise StoreError(
                    f"{where}: {name!r:.80} is one attribute more than {MAX_ATTRIBUTES:,}, and "
                    "every object would have a number for each. Name those that you want: "
                    "attributes=[…]."
                )
            self._attributes[name] = words = _Words()
            for _ in range(len(self._classes.numbers)):  # those before had none
                words.add("")

    def table(
        self,
        class_names: Sequence[str] | None = None,
        *,
        has_numbers: bool = False,
        attribute_names: Mapping[str, Sequence[str]] | None = None,
        landmark_names: Sequence[str] | None = None,
    ) -> AnnotationTable:
        """Return the table; boxes are float64.

        Args:
            class_names: The classes, in order; those found, sorted, if not given. An object of
                another class gets -1 - n: see
                `AnnotationTable`.
            has_numbers: Whether classes that are numbers from 0 keep theirs: see `numbered_names`.
                Attributes always do.
            attribute_names: For an attribute the texts that count as 0, 1, 2 …; else those found.
            landmark_names: The points wanted, by name, in order; else those found.

        Raises:
            StoreError: an attribute has a value that its names lack; landmarks do not fit together.
            ConfigError: names are given twice, or there is nothing that they could name.
        """
        if isinstance(class_names, str):
            raise ConfigError(f"class_names is a list of names, not the text {class_names!r}.")
        sort = numbered_names if has_numbers else sorted
        names = tuple(sort(self._classes.names) if class_names is None else class_names)
        attributes, columns = self._attribute_columns(attribute_names or {})
        unknown = tuple(sorted(self._classes.names.keys() - set(names)))
        sizes_px = int64_of(self._sizes).reshape(-1, 2)
        points, columns_of_points = self._points.columns(landmark_names)
        return AnnotationTable(
            paths=self._paths.packed(),
            keys=self._keys.packed(),
            sources=self._sources.packed(),
            sizes_px=sizes_px,
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(int64_of(self._counts))]),
            boxes=np.frombuffer(self._boxes, np.float64).reshape(-1, 4),
            labels=self._classes.as_numbers_of(names, unknown),
            class_names=names,
            columns={**columns_of_points, **self._flag_columns(), **columns},
            landmark_names=points,
            attribute_names=attributes,
            unknown_classes=unknown,
            is_size_said=np.asarray((sizes_px > 0).all(axis=1)),
            is_bare=np.frombuffer(self._bare, np.bool_),
        )

    def _flag_columns(self) -> dict[str, NDArray[Any]]:
        flags = {name: np.frombuffer(said, np.int8) for name, said in self._flags.items()}
        return {name: said == 1 for name, said in flags.items() if (said >= 0).any()}

    def _attribute_columns(
        self, given: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, NDArray[Any]]]:
        unknown = given.keys() - self._attributes.keys()
        if unknown:
            has = ", ".join(map(repr, self._attributes)) or "none"
            raise ConfigError(f"there is no attribute {min(unknown)!r}; the data set has {has}.")
        names, columns = {}, {}
        for name, words in self._attributes.items():
            if words.names.keys() == {""} and name not in self._there:
                warn_of_absent_attribute(name, sorted({*self._there, *self._flag_columns()}))
            names[name] = tuple(given.get(name) or numbered_names(words.names))
            columns[name] = words.as_numbers_of(names[name])
            if (columns[name] < 0).any():
                lost = min(set(words.names) - set(names[name]))
                raise StoreError(
                    f"the attribute {name!r} is {lost!r} somewhere, which its names "
                    f"{names[name]!r:.200} lack."
                )
        return names, columns


class _Texts:
    """Strings in a row, as bytes."""

    def __init__(self) -> None:
        self._text, self._ends = bytearray(), array("q", [0])

    def add(self, text: str) -> None:
        self._text += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))

    def packed(self) -> PackedList[str]:
        return PackedList.from_utf8(
            np.frombuffer(bytes(self._text), np.uint8), int64_of(self._ends)
        )


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
        """Return for each the place of its text in `names`.

        -1 - n if it is not there, but `others[n]`; -1 if it is in neither.
        """
        elsewhere = {name: -1 - place for place, name in enumerate(others)}
        places = {name: place for place, name in enumerate(names)}
        if len(places) < len(names):
            raise ConfigError(f"a name is there twice: {list(names)!r:.200}.")
        table = np.array(
            [places.get(name, elsewhere.get(name, -1)) for name in self.names], np.int64
        )
        return table[int64_of(self.numbers)]


def numbered_names(names: Iterable[str]) -> list[str]:
    """Return names sorted; of numbers from 0 on, all up to the greatest, so that each is its own.

    A file whose lines happen to have the classes 1 and 3 alone has 0 and 2 as well: 3 stays 3.

    Example:
        >>> numbered_names(["3", "1"]), numbered_names(["hat", "cap"])
        (['0', '1', '2', '3'], ['cap', 'hat'])
    """
    found = set(names)
    said = found - {""}  # nothing said: the last of all
    if said and all(map(_is_number, said)) and (greatest := max(map(int, said))) < _MOST_NUMBERS:
        return [*map(str, range(greatest + 1)), *(found - said)]
    return sorted(found, key=natural_order)


def _text_of(item: AnnotatedObject, attribute: str) -> str:
    return item.extra.get(attribute, item.pose if attribute == "pose" else "")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text[:9])) == text


def _where(image: AnnotatedImage) -> str:
    return image.source or os.fspath(image.path)


def _check_name(name: str) -> None:
    if name in _TAKEN or name == "image_id":
        raise ConfigError(
            f"an attribute is called {name!r}, which is something else in a sample. Choose the "
            "ones you want by `attributes`, or give the column another name."
        )
