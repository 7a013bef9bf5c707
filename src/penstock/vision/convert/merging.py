# SPDX-License-Identifier: Apache-2.0
"""Several collections made one: what they say of the same image comes together.

Within a source, an image is what has one path: two links to one file are two images, with names and
annotations of their own. Between sources, it is the file that counts, whatever path leads to it.

Two objects of one image are the same object if each comes from another source, they have the same
box, or one of them has none and neither source has another object in that image; and if they do not
contradict each other. All others stay apart.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import StoreError
from penstock.plural import counted
from penstock.vision.convert.reading import Collection

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

__all__ = ["Merged", "classes_of", "merge", "with_class"]

# Stands for the class that stands for none. A source all of whose objects are of that class, as an
# earlier `convert` writes them, has no classes: this one contradicts no other. No file has it.
_INVENTED: Final = "\0"


class Merged(NamedTuple):
    """All sources as one.

    Attributes:
        collection: Their images, each once.
        num_joined: Objects that two sources have.
        notes: Sentences on what may have gone wrong.
    """

    collection: Collection
    num_joined: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Listed:
    """An image of a source, or of several.

    Attributes:
        image: What is said of it.
        path: Where it is listed, absolute; links are not followed.
        file: The file behind all links.
        keys: What its source calls it.
        said: The objects of its first entry.
        sources: The annotations that were read for it.
    """

    image: AnnotatedImage
    path: str
    file: str
    keys: list[str]
    said: str
    sources: set[str]


def merge(collections: Sequence[Collection], default_class: str) -> Merged:
    """Return the images of all collections, each once, and what became of their objects.

    Args:
        collections: What was read.
        default_class: The class that stands for none.

    Raises:
        StoreError: two sources give an image another size.
    """
    found: list[_Listed] = []
    key_of: dict[tuple[int, str], str] = {}
    samples: list[str] = []
    joined, apart, num_shared = 0, [], 0
    for number, collection in enumerate(collections):
        given = collection.images
        if len(collections) > 1 and classes_of(given) == {default_class}:
            given = with_class(given, default_class, _INVENTED)
        images, sampled = _listed_once(given)
        for one, same in zip(images, _matches(found, images), strict=True):
            if same is None:
                found.append(same := one)
            else:
                same.image, num_joined, num_apart = _merged(same.image, one.image)
                joined += num_joined
                apart += [num_apart] if num_apart else []
                num_shared += 1
            key_of |= dict.fromkeys(((number, key) for key in one.keys), same.image.key)
        _extend(samples, (key_of[number, one.image.key] for one in sampled))
    splits: dict[str, list[str]] = {}
    for number, collection in enumerate(collections):
        for name, keys in collection.splits.items():
            _extend(splits.setdefault(name, []), (key_of[number, key] for key in keys))
    merged = with_class((one.image for one in found), _INVENTED, default_class)
    notes = []
    if apart:
        notes.append(
            f"not joined: {counted(sum(apart), 'object')} of {counted(len(apart), 'image')} that "
            "two sources have; their boxes, classes or other values differ"
        )
    if len(collections) > 1 and not num_shared:
        notes.append(
            "the sources have no image in common, so nothing of theirs is joined: where they are "
            "of the same photos, let them name the same files, and not copies"
        )
    whole = Collection(
        merged,
        {name: tuple(keys) for name, keys in splits.items()},
        _class_names(collections, merged, default_class),
        tuple(samples) if len(samples) > len(merged) else (),
    )
    return Merged(whole, joined, tuple(notes))


def classes_of(images: Iterable[AnnotatedImage]) -> set[str]:
    """Return the classes of all objects that have one."""
    return {found.class_name for image in images for found in image.objects} - {""}


def with_class(
    images: Iterable[AnnotatedImage], before: str, after: str
) -> tuple[AnnotatedImage, ...]:
    """Return images whose objects of class `before` are of class `after`."""

    def changed(image: AnnotatedImage) -> AnnotatedImage:
        if all(found.class_name != before for found in image.objects):
            return image
        objects = (
            replace(found, class_name=after) if found.class_name == before else found
            for found in image.objects
        )
        return replace(image, objects=tuple(objects))

    return tuple(map(changed, images))


def _extend(listed: list[str], keys: Iterable[str]) -> None:
    """Add keys: each is then listed as often as in the one of the two that has it more often."""
    have, seen = Counter(listed), Counter[str]()
    for key in keys:
        seen[key] += 1
        if seen[key] > have[key]:
            listed.append(key)


def _listed_once(images: Iterable[AnnotatedImage]) -> tuple[list[_Listed], list[_Listed]]:
    """Return the images of one source, each once, and the image of each of its samples.

    An image that comes again with the same objects is another sample of it.
    """
    by_path: dict[str, _Listed] = {}
    by_key: dict[tuple[str, str], _Listed] = {}
    samples: list[_Listed] = []
    for image in images:
        path, said = os.path.abspath(image.path), repr(image.objects)
        file = os.path.realpath(path)
        one = by_path.get(path)
        linked = by_key.get((file, image.key))
        if one is not None:
            _check_sizes(one.image, image)
            one.keys.append(image.key)
            if said == one.said:
                samples.append(one)
            elif not image.source or image.source not in one.sources:
                one.sources.add(image.source)
                one.image = replace(one.image, objects=one.image.objects + image.objects)
        elif linked is not None and said == repr(linked.image.objects):
            by_path[path] = linked
        else:
            one = by_path[path] = by_key[file, image.key] = _Listed(
                image, path, file, [image.key], said, {image.source}
            )
            samples.append(one)
    return list({id(one): one for one in by_path.values()}.values()), samples


def _matches(found: Sequence[_Listed], images: Sequence[_Listed]) -> list[_Listed | None]:
    """Return which of those `found` each image of another source is; None: it is new.

    The one of equal path is, or else the next of its file.
    """
    by_path = {one.path: one for one in found}
    same = [by_path.get(image.path) for image in images]
    taken = {id(one) for one in same}
    by_file: dict[str, list[_Listed]] = {}
    for one in found:
        if id(one) not in taken:
            by_file.setdefault(one.file, []).append(one)
    return [
        by_file[image.file].pop(0) if one is None and by_file.get(image.file) else one
        for image, one in zip(images, same, strict=True)
    ]


def _check_sizes(one: AnnotatedImage, other: AnnotatedImage) -> None:
    (w, h), (other_w, other_h) = ((image.width_px, image.height_px) for image in (one, other))
    if None not in (w, h, other_w, other_h) and (w, h) != (other_w, other_h):
        raise StoreError(
            f"{one.source} gives {one.path} {w} x {h} px (width x height), and {other.source} "
            f"{other_w} x {other_h}: their boxes are not of one frame."
        )


def _class_names(
    collections: Sequence[Collection], merged: Sequence[AnnotatedImage], default_class: str
) -> tuple[str, ...]:
    """Return the names in the order of those that number them; the others sorted behind them."""
    used = classes_of(merged)
    ordered = dict.fromkeys(name for c in collections for name in c.class_names)
    if (default_class,) in (c.class_names for c in collections) and default_class not in used:
        ordered.pop(default_class)  # an earlier `convert` invented it; all objects have better ones
    return (*ordered, *sorted(used - ordered.keys())) if ordered else ()


def _merged(one: AnnotatedImage, other: AnnotatedImage) -> tuple[AnnotatedImage, int, int]:
    """Return an image of two sources, the number of joined objects, and of those kept apart."""
    _check_sizes(one, other)
    objects = list(one.objects)
    are_alone = len(one.objects) == 1 == len(other.objects)
    # Each object of one source is one object of the other at most.
    free: dict[object, list[int]] = {}
    for number, found in enumerate(objects):
        free.setdefault("any" if are_alone else found.box_xyxy_px, []).append(number)
    alone = []
    for found in other.objects:
        box = "any" if are_alone else found.box_xyxy_px
        numbers = free.get(box, []) if box is not None else []
        same = next((n for n in numbers if _can_be_one(objects[n], found)), None)
        if same is None:
            alone.append(found)
        else:
            numbers.remove(same)
            objects[same] = _joined(objects[same], found)
    width_px, height_px = one.width_px or other.width_px, one.height_px or other.height_px
    image = replace(one, objects=(*objects, *alone), width_px=width_px, height_px=height_px)
    is_doubtful = any(free.values())  # where one source has all objects, nothing is
    return image, len(other.objects) - len(alone), len(alone) * is_doubtful


def _can_be_one(one: AnnotatedObject, other: AnnotatedObject) -> bool:
    """Return whether no field of two objects contradicts the other's."""
    pairs = ((getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    return all(_is_empty(a) or _is_empty(b) or _agree(a, b) for a, b in pairs)


def _is_empty(value: object) -> bool:
    return value is None or value in ("", _INVENTED, (), {})


def _agree(one: Any, other: Any) -> bool:  # noqa: ANN401
    if isinstance(one, dict) and isinstance(other, dict):
        return all(one[key] == other[key] for key in one.keys() & other.keys())
    return bool(repr(one) == repr(other))  # NaN is NaN here


def _joined(one: AnnotatedObject, other: AnnotatedObject) -> AnnotatedObject:
    values: dict[str, Any] = {}
    for item in fields(one):
        a, b = getattr(one, item.name), getattr(other, item.name)
        values[item.name] = a if not _is_empty(a) else b if not _is_empty(b) else a or b
    return replace(one, **{**values, "extra": {**other.extra, **one.extra}})
