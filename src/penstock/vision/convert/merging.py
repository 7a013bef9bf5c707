# SPDX-License-Identifier: Apache-2.0
"""Several collections made one: what they say of the same image file comes together.

Two objects of one image are the same object if each comes from another source, they have the same
box, or one of them has none and neither source has another object in that image; and if they do not
contradict each other. All others stay apart.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import StoreError
from penstock.vision.convert.sources import Collection

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

__all__ = ["merge"]


def merge(collections: Sequence[Collection]) -> tuple[Collection, int]:
    """Return the images of all collections, each file once, and how many objects became one.

    Raises:
        StoreError: two sources give an image another size.
    """
    found: dict[str, AnnotatedImage] = {}
    key_of: dict[tuple[int, str], str] = {}
    num_joined = 0
    for number, collection in enumerate(collections):
        for place, image in _by_file(collection.images).items():
            if place in found:
                found[place], joined = _merged(found[place], image)
                num_joined += joined
            else:
                found[place] = image
            key_of[number, image.key] = found[place].key
    splits: dict[str, dict[str, None]] = {}
    for number, collection in enumerate(collections):
        for name, keys in collection.splits.items():
            splits.setdefault(name, {}).update((key_of[number, key], None) for key in keys)
    names = _class_names(collections)
    listed = {name: tuple(keys) for name, keys in splits.items()}
    return Collection(tuple(found.values()), listed, names), num_joined


def _by_file(images: Iterable[AnnotatedImage]) -> dict[str, AnnotatedImage]:
    """Return the images of one source by their files: lists name one in a line for each object."""
    found: dict[str, AnnotatedImage] = {}
    for image in images:
        place = os.path.realpath(image.path)
        if place in found:
            _check_sizes(found[place], image)
            image = replace(found[place], objects=found[place].objects + image.objects)
        found[place] = image
    return found


def _class_names(collections: Sequence[Collection]) -> tuple[str, ...]:
    """Return the names in the order of those that number them; the others sorted behind them."""
    ordered = dict.fromkeys(name for c in collections for name in c.class_names)
    if not ordered:
        return ()
    used = {o.class_name for c in collections for i in c.images for o in i.objects} - {""}
    return (*ordered, *sorted(used - ordered.keys()))


def _check_sizes(one: AnnotatedImage, other: AnnotatedImage) -> None:
    sizes = [(image.width_px, image.height_px) for image in (one, other)]
    if None not in (*sizes[0], *sizes[1]) and sizes[0] != sizes[1]:
        (w, h), (other_w, other_h) = sizes
        raise StoreError(
            f"{one.source} gives {one.path} {w} x {h} px (width x height), and {other.source} "
            f"{other_w} x {other_h}: their boxes are not of one frame."
        )


def _merged(one: AnnotatedImage, other: AnnotatedImage) -> tuple[AnnotatedImage, int]:
    _check_sizes(one, other)
    objects, num_joined = list(one.objects), 0
    are_alone = len(one.objects) == 1 == len(other.objects)
    with_box: dict[object, list[int]] = {}
    for number, found in enumerate(objects):
        with_box.setdefault(found.box_xyxy_px, []).append(number)
    for found in other.objects:
        box = found.box_xyxy_px
        numbers = [0] if are_alone else with_box.get(box, []) if box is not None else []
        number = next((n for n in numbers if _can_be_one(objects[n], found)), -1)
        if number < 0:
            objects.append(found)
            continue
        if not are_alone:
            numbers.remove(number)  # each object of one source is one object of the other at most
        objects[number] = _joined(objects[number], found)
        num_joined += 1
    width_px, height_px = one.width_px or other.width_px, one.height_px or other.height_px
    merged = replace(one, objects=tuple(objects), width_px=width_px, height_px=height_px)
    return merged, num_joined


def _can_be_one(one: AnnotatedObject, other: AnnotatedObject) -> bool:
    """Return whether no field of two objects contradicts the other's."""
    pairs = zip(_values(one), _values(other), strict=True)
    return all(_is_empty(a) or _is_empty(b) or _agree(a, b) for a, b in pairs)


def _values(found: AnnotatedObject) -> list[Any]:
    return [getattr(found, field.name) for field in fields(found)]


def _is_empty(value: object) -> bool:
    return value is None or value in ("", (), {})


def _agree(one: Any, other: Any) -> bool:  # noqa: ANN401
    if isinstance(one, dict) and isinstance(other, dict):
        return all(one[key] == other[key] for key in one.keys() & other.keys())
    return bool(repr(one) == repr(other))  # NaN is NaN here


def _joined(one: AnnotatedObject, other: AnnotatedObject) -> AnnotatedObject:
    names = [field.name for field in fields(one)]
    pairs = zip(names, _values(one), _values(other), strict=True)
    values: dict[str, Any] = {name: b if _is_empty(a) else a for name, a, b in pairs}
    values["extra"] = {**other.extra, **one.extra}
    return replace(one, **values)
