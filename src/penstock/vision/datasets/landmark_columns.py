# SPDX-License-Identifier: Apache-2.0
"""The landmarks of all objects as one column: the same points in the same order for each."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.limits import MAX_LANDMARK_NAMES, MAX_LANDMARKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vision.annotations.model import AnnotatedObject

__all__ = ["LandmarkCollector", "int64_of", "natural_order"]

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
