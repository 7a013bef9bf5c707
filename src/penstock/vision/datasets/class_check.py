# SPDX-License-Identifier: Apache-2.0
"""Classes of objects against those that were asked for: what is none of them, what never comes."""

from __future__ import annotations

import difflib
import warnings
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import StoreError
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.vision.datasets.annotation_table import AnnotationTable

__all__ = [
    "near_name",
    "refuse_unknown",
    "warn_of_absent",
    "warn_of_absent_attribute",
    "warn_of_dropped",
]

_NUM_SHOWN: Final = 10  # classes, in a warning
_MAX_COMPARED: Final = 2_000  # names; to compare two takes some microseconds


def near_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that may have been meant; None if none is near.

    Example:
        >>> near_name("Platelets", ["RBC", "Platelet"]), near_name("dog", ["DOG"])
        ('Platelet', 'DOG')
    """
    by_form = {known.strip().casefold(): known for known in list(names)[:_MAX_COMPARED]}
    found = difflib.get_close_matches(name.strip().casefold(), by_form, 1, 0.7)
    return by_form[found[0]] if found else None


def refuse_unknown(table: AnnotationTable, source_of: Callable[[int], str]) -> None:
    """Raise if an object's class is none of the table's.

    Args:
        table: As it was built.
        source_of: What errors call an image.

    Raises:
        StoreError: one is; the message names it, its object, and a class that is called almost so.
    """
    (unknown,) = np.nonzero(table.labels < 0)
    if not len(unknown):
        return
    number = int(unknown[0])
    image = int(table.images_of_objects[number])
    name = table.unknown_classes[-1 - int(table.labels[number])]
    near = near_name(name, table.class_names)
    hint = "" if near is None else f" Is {near!r} meant?"
    raise StoreError(
        f"{source_of(image)}: the class of its object {number - table.offsets[image]}, "
        f"{name!r:.80}, is none of the {len(table.class_names)} given: "
        f"{table.class_names!r:.200}.{hint} Add it to class_names, or leave such objects out by "
        "unknown_classes='drop'."
    )


def warn_of_dropped(table: AnnotationTable) -> None:
    """Warn of objects that are left out as none of the classes asked for."""
    unknown = -1 - table.labels[table.labels < 0]
    if not len(unknown):
        return
    counts = np.bincount(unknown, minlength=len(table.unknown_classes)).tolist()
    pairs = sorted(zip(counts, table.unknown_classes, strict=True), key=lambda p: (-p[0], p[1]))
    parts = [_dropped(name, count, table.class_names) for count, name in pairs[:_NUM_SHOWN]]
    more = f", and of {len(pairs) - _NUM_SHOWN} more classes" if len(pairs) > _NUM_SHOWN else ""
    warnings.warn(
        f"{len(unknown):,} of {table.num_objects:,} objects are of none of the classes asked for, "
        f"and are left out: {', '.join(parts)}{more}.",
        UserWarning,
        stacklevel=users_level(),
    )


def _dropped(name: str, count: int, class_names: Sequence[str]) -> str:
    near = near_name(name, class_names)
    return f"{count:,} {name!r:.80}" + ("" if near is None else f" (is {near!r} meant?)")


def warn_of_absent(class_names: Sequence[str], labels: NDArray[np.int64]) -> None:
    """Warn of classes that were asked for, and that no object is of."""
    counts = np.bincount(labels[labels >= 0], minlength=len(class_names))
    absent = [class_names[number] for number in np.flatnonzero(counts == 0).tolist()]
    if not absent:
        return
    shown = ", ".join(map(repr, absent[:_NUM_SHOWN]))
    more = f", and {len(absent) - _NUM_SHOWN} more" if len(absent) > _NUM_SHOWN else ""
    warnings.warn(
        f"no object is of {len(absent)} of the {len(class_names)} classes given: {shown}{more}. "
        "They keep their numbers.",
        UserWarning,
        stacklevel=users_level(),
    )


def warn_of_absent_attribute(name: str, there: Sequence[str]) -> None:
    """Warn of an attribute that was asked for, and that no object has."""
    near = near_name(name, there)
    hint = "" if near is None else f" (is {near!r} meant?)"
    shown = ", ".join(map(repr, there[:_NUM_SHOWN])) or "none"
    more = f", and {len(there) - _NUM_SHOWN} more" if len(there) > _NUM_SHOWN else ""
    warnings.warn(
        f"no object has the attribute {name!r:.80}{hint}; there are: {shown}{more}.",
        UserWarning,
        stacklevel=users_level(),
    )
