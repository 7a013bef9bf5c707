# SPDX-License-Identifier: Apache-2.0
"""`TableBuilder`: makes one `AnnotationTable` of the images that files were read to."""

from __future__ import annotations

import math
import os
from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.limits import MAX_ATTRIBUTES
from penstock.vision.datasets.annotation_table import FLAGS, AnnotationTable
from penstock.vision.datasets.class_check import warn_of_absent_attribute
from penstock.vision.datasets.landmark_columns import LandmarkCollector, int64_of, natural_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

__all__ = ["UNNAMED", "TableBuilder", "numbered_names"]

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
