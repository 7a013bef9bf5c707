# SPDX-License-Identifier: Apache-2.0
"""Several collections made one: what they say of the same image (`same_images`) comes together.

Two objects of one image are the same object if each comes from another source, they have the same
box, or one of them has none and neither source has another object in that image; and if they do not
contradict each other. All others stay apart.

A source whose objects are all of the class that stands for none ("object" mostly), as an earlier
`convert` writes them, has no classes: that one contradicts no other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.vision.convert.same_images import (
    Listed,
    aliases,
    check_sizes,
    copies,
    listed_once,
    matches,
)
from penstock.vision.convert.sources import Collection

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

__all__ = ["Merging", "merge"]

_INVENTED: Final = "\0"  # stands for the class that stands for none; no file has it


@dataclass(slots=True)
class Merging:
    """What came of putting sources together.

    Attributes:
        collection: All of them as one.
        num_joined: Objects that two sources told of.
        apart: Why objects of images that two sources tell of were not joined, and how many.
        num_images_apart: Images in which there are such.
        copies: Two paths of each image that may be one: of equal file name, in two sources.
        aliases: Two paths of each image that has its file in common with another of its source.
    """

    collection: Collection
    num_joined: int = 0
    apart: Counter[str] = field(default_factory=Counter)
    num_images_apart: int = 0
    copies: list[tuple[str, str]] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)

    def notes(self) -> tuple[str, ...]:
        """Return sentences on what may have gone wrong."""
        notes = []
        if self.apart:
            why = ", ".join(f"{count:,} {reason}" for reason, count in self.apart.items())
            notes.append(
                f"{self.apart.total():,} objects of {self.num_images_apart:,} images told of by "
                f"two sources were not joined: {why}"
            )
        if self.copies:
            one, other = self.copies[0]
            notes.append(
                f"{len(self.copies):,} images have the file name of one in another source, and "
                f"another path, {one} and {other} for one: if they are copies, let both sources "
                "name the same files, or nothing of theirs is joined"
            )
        if self.aliases:
            one, other = self.aliases[0]
            notes.append(
                f"{len(self.aliases):,} images are the same file as another one of their source, "
                f"{one} and {other} for one: they stay two images"
            )
        return tuple(notes)


def merge(collections: Sequence[Collection], default_class: str = "object") -> Merging:
    """Return the images of all collections, each file once, and what became of their objects.

    Args:
        collections: What was read.
        default_class: The class that stands for none.

    Raises:
        StoreError: two sources give an image another size.
    """
    merging = Merging(Collection(()))
    found: list[Listed] = []
    key_of: dict[tuple[int, str], str] = {}
    listed_keys: list[str] = []
    for number, collection in enumerate(_without_invented(collections, default_class)):
        images, samples = listed_once(collection.images)
        merged_key: dict[int, str] = {}
        merging.copies += copies(found, images)
        merging.aliases += aliases(images)
        for one, same in zip(images, matches(found, images), strict=True):
            if same is None:
                found.append(one)
            else:
                same.image = _merged(same.image, one.image, merging)
            merged_key[id(one)] = (same or one).image.key
            key_of |= dict.fromkeys(((number, key) for key in one.keys), merged_key[id(one)])
        _extend(listed_keys, (merged_key[id(one)] for one in samples))
    splits: dict[str, list[str]] = {}
    for number, collection in enumerate(collections):
        for name, keys in collection.splits.items():
            _extend(splits.setdefault(name, []), (key_of[number, key] for key in keys))
    listed = {name: tuple(keys) for name, keys in splits.items()}
    merged = tuple(_with_invented(one.image, default_class) for one in found)
    names = _class_names(collections, merged, default_class)
    repeated = tuple(listed_keys) if len(listed_keys) > len(merged) else ()
    merging.collection = Collection(merged, listed, names, repeated)
    return merging


def _extend(listed: list[str], keys: Iterable[str]) -> None:
    """Add keys: each is then listed as often as in the one of the two that has it more often."""
    have, seen = Counter(listed), Counter[str]()
    for key in keys:
        seen[key] += 1
        if seen[key] > have[key]:
            listed.append(key)


def _classes(images: Iterable[AnnotatedImage]) -> set[str]:
    return {found.class_name for image in images for found in image.objects} - {""}


def _without_invented(
    collections: Sequence[Collection], default_class: str
) -> Sequence[Collection]:
    """Return collections in which the class that stands for none is marked as such."""
    if len(collections) < 2:
        return collections
    return [
        _renamed(collection, default_class, _INVENTED)
        if _classes(collection.images) == {default_class}
        else collection
        for collection in collections
    ]


def _renamed(collection: Collection, before: str, after: str) -> Collection:
    images = tuple(_with_class(image, before, after) for image in collection.images)
    return replace(collection, images=images)


def _with_class(image: AnnotatedImage, before: str, after: str) -> AnnotatedImage:
    objects = (
        replace(found, class_name=after) if found.class_name == before else found
        for found in image.objects
    )
    return replace(image, objects=tuple(objects))


def _with_invented(image: AnnotatedImage, default_class: str) -> AnnotatedImage:
    is_there = any(found.class_name == _INVENTED for found in image.objects)
    return _with_class(image, _INVENTED, default_class) if is_there else image


def _class_names(
    collections: Sequence[Collection], merged: Sequence[AnnotatedImage], default_class: str
) -> tuple[str, ...]:
    """Return the names in the order of those that number them; the others sorted behind them."""
    used = _classes(merged)
    ordered = dict.fromkeys(name for c in collections for name in c.class_names)
    if (default_class,) in (c.class_names for c in collections) and default_class not in used:
        ordered.pop(default_class)  # an earlier `convert` invented it; all objects have better ones
    return (*ordered, *sorted(used - ordered.keys())) if ordered else ()


def _merged(one: AnnotatedImage, other: AnnotatedImage, merging: Merging) -> AnnotatedImage:
    check_sizes(one, other)
    objects, alone = list(one.objects), []
    are_alone = len(one.objects) == 1 == len(other.objects)
    unjoined = dict(enumerate(one.objects))
    with_box: dict[object, list[int]] = {}
    for number, found in enumerate(objects):
        with_box.setdefault(found.box_xyxy_px, []).append(number)
    for found in other.objects:
        box = found.box_xyxy_px
        numbers = [0] if are_alone else with_box.get(box, []) if box is not None else []
        number = next((n for n in numbers if _can_be_one(objects[n], found)), -1)
        if number < 0:
            alone.append(found)
            continue
        if not are_alone:
            numbers.remove(number)  # each object of one source is one object of the other at most
        objects[number] = _joined(objects[number], found)
        del unjoined[number]
        merging.num_joined += 1
    if unjoined and alone:  # nothing is told twice where one source has them all
        merging.num_images_apart += 1
        others = list(unjoined.values())
        merging.apart.update(_reason(found, others, are_alone=are_alone) for found in alone)
    width_px, height_px = one.width_px or other.width_px, one.height_px or other.height_px
    return replace(one, objects=(*objects, *alone), width_px=width_px, height_px=height_px)


def _reason(found: AnnotatedObject, others: Sequence[AnnotatedObject], *, are_alone: bool) -> str:
    """Return why an object is none of those of another source."""
    boxes = {found.box_xyxy_px, *(other.box_xyxy_px for other in others)}
    if not are_alone and (found.box_xyxy_px is None or boxes == {None, found.box_xyxy_px}):
        return "without a box"
    same = [o for o in others if o.box_xyxy_px == found.box_xyxy_px or are_alone]
    if not same or (are_alone and len(boxes - {None}) > 1):
        return "with another box"
    names = {found.class_name, *(other.class_name for other in same)} - {"", _INVENTED}
    return "of another class" if len(names) > 1 else "with other values"


def _can_be_one(one: AnnotatedObject, other: AnnotatedObject) -> bool:
    """Return whether no field of two objects contradicts the other's."""
    pairs = zip(_values(one), _values(other), strict=True)
    return all(_is_empty(a) or _is_empty(b) or _agree(a, b) for a, b in pairs)


def _values(found: AnnotatedObject) -> list[Any]:
    return [getattr(found, field.name) for field in fields(found)]


def _is_empty(value: object) -> bool:
    return value is None or value in ("", _INVENTED, (), {})


def _agree(one: Any, other: Any) -> bool:  # noqa: ANN401
    if isinstance(one, dict) and isinstance(other, dict):
        return all(one[key] == other[key] for key in one.keys() & other.keys())
    return bool(repr(one) == repr(other))  # NaN is NaN here


def _joined(one: AnnotatedObject, other: AnnotatedObject) -> AnnotatedObject:
    names = [field.name for field in fields(one)]
    pairs = zip(names, _values(one), _values(other), strict=True)
    values: dict[str, Any] = {
        name: a if not _is_empty(a) else b if not _is_empty(b) else a or b for name, a, b in pairs
    }
    values["extra"] = {**other.extra, **one.extra}
    return replace(one, **values)
