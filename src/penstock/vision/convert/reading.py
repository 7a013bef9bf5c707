# SPDX-License-Identifier: Apache-2.0
"""Annotations of any format read as one collection, and several collections made one.

Within a source, an image is what has one path: two links to one file are two images, with names and
annotations of their own. Between sources, it is the file that counts, whatever path leads to it.

Two objects of one image are the same object if each comes from another source, they have the same
box, or one of them has none and neither source has another object in that image; and if they do not
contradict each other. All others stay apart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError, StoreError
from penstock.lines import counted
from penstock.stores.folder.annotated_folder import FORM_OF_SUFFIX, annotated_folder
from penstock.vision.annotations.coco import read_coco
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import (
    IMAGE_LIST_COLUMNS,
    LandmarkColumns,
    landmark_lines,
    samples_of_lines,
)
from penstock.vision.annotations.reading import numbered_lines
from penstock.vision.annotations.voc_folder import keys_of_split, read_voc_folder
from penstock.vision.annotations.yolo import read_yolo, read_yolo_data
from penstock.vision.datasets.rules import BadBoxes, BoxCounts, settled_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

_INVENTED: Final = "\0"  # stands for `default_class` until a source has a better one


@dataclass(frozen=True, slots=True)
class Source:
    """Annotations that are converted.

    Attributes:
        path: The folder or the file.
        form: One of `FORMATS`; None finds it out, where the path says so.
        options: Arguments of its reader: `split` and `origin` of VOC, `split` and `polygons` of
            YOLO, `root` of COCO, all of `LandmarkColumns` and `root` of landmark lists, `root` and
            `separator` of image lists.
    """

    path: str | Path
    form: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def checked_form(self) -> str:
        """Return its format, found out if need be; raises as `convert` does."""
        form = self.form or _form_of(Path(self.path))
        if form not in FORMATS:
            raise ConfigError(f"the format is one of {', '.join(FORMATS)}, not {form!r}.")
        return form

    def takes(self, option: str) -> bool:
        """Return whether its format has an option; raises as `convert` does."""
        return option in _READERS[self.checked_form()][0]


@dataclass(frozen=True, slots=True)
class Collection:
    """Annotated images.

    Attributes:
        images: In their order.
        splits: The `place_of` the images of each split, in the split's order.
        class_names: By their numbers; empty where they are numbered by their sorted names.
        num_repeats: How often lists name an image again, beyond the splits.
    """

    images: tuple[AnnotatedImage, ...]
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    num_repeats: int = 0


def place_of(image: AnnotatedImage) -> str:
    """Return the absolute path of an image, by which it is identified within its source."""
    return os.path.abspath(image.path)


def read_source(source: Source, bad_boxes: BadBoxes) -> tuple[Collection, BoxCounts]:
    """Return what a source holds, and what was found about its boxes; raises as `convert` does."""
    form = source.checked_form()
    names, read = _READERS[form]
    for name in sorted(source.options.keys() - set(names)):
        raise ConfigError(f"{form} has no option {name!r}; it has {', '.join(names) or 'none'}.")
    collection = read(Path(source.path), dict(source.options))
    # See `judged`: what a side has here more than in the file's own numbers.
    added_px = 0
    if form == "voc" or (form == "landmarks" and source.options.get("box_format") != "xywh"):
        added_px = int(source.options.get("origin", form == "voc"))
    images, counts = settled_images(collection.images, bad_boxes, added_px)
    return replace(collection, images=images), counts


def _form_of(path: Path) -> str:
    """Return the format of a file or folder; the images of a folder need not be there."""
    of_file = FORM_OF_SUFFIX.get(path.suffix.lower())
    if of_file is not None and not path.is_dir():
        return of_file
    if not path.exists():
        raise StoreError(f"{path} is not there.")
    if not path.is_dir():
        raise ConfigError(
            f"{path} may be a list of landmarks or of images with a class: name the format, "
            "'landmarks' or 'image-list'."
        )
    found = annotated_folder(path)
    if found is not None and found.is_read_as_folder:
        return found.form
    if next(path.rglob("*.xml"), None) is not None:
        return "voc"
    raise StoreError(
        f"{path} is no data set of a form that is known here: it has neither 'Annotations', "
        "nor a YAML file, nor 'images' and 'labels', nor XML files."
    )


def _read_voc(path: Path, options: dict[str, Any]) -> Collection:
    images = tuple(read_voc_folder(path, **options))
    if options.get("split") is not None:
        return Collection(images, {options["split"]: tuple(map(place_of, images))})
    places = {image.key: place_of(image) for image in images}
    splits = {}
    for file in sorted((path / "ImageSets" / "Main").glob("*.txt")):
        if any(len(line.split()) > 1 and line not in places for _, line in numbered_lines(file)):
            continue  # which images have a class: the annotations say so
        splits[file.stem] = tuple(places[key] for key in keys_of_split(path, file.stem, places))
    return Collection(images, splits)


def _read_yolo(path: Path, options: dict[str, Any]) -> Collection:
    wanted = options.pop("split", None)
    images: dict[str, AnnotatedImage] = {}
    splits: dict[str, tuple[str, ...]] = {}
    class_names: tuple[str, ...] = ()
    for name in read_yolo_data(path).splits if wanted is None else [wanted]:
        of_split, of_classes = read_yolo(path, name, **options)
        class_names = max(class_names, of_classes, key=len)
        splits[name] = tuple(map(place_of, of_split))
        # One that is in two splits is no repeat, and its boxes are counted once.
        images |= {p: i for p, i in zip(splits[name], of_split, strict=True) if p not in images}
    if not images:
        raise StoreError(f"{path} names no images.")
    return Collection(tuple(images.values()), splits, class_names)


def _read_coco(path: Path, options: dict[str, Any]) -> Collection:
    images, category_ids = read_coco(path, **options, by_id=False)
    return Collection(tuple(images), class_names=tuple(category_ids))


def _read_lines(path: Path, options: dict[str, Any]) -> Collection:
    return Collection(tuple(samples_of_lines(landmark_lines(path, **options))))


_READERS: Final[dict[str, tuple[tuple[str, ...], Callable[[Path, dict[str, Any]], Collection]]]] = {
    "voc": (("split", "origin"), _read_voc),
    "imglab": ((), lambda path, _: Collection(tuple(read_imglab(path)))),
    "yolo": (("split", "polygons"), _read_yolo),
    "coco": (("root",), _read_coco),
    "landmarks": ((*(item.name for item in fields(LandmarkColumns)), "root"), _read_lines),
    "image-list": (
        ("root", "separator"),
        lambda path, options: _read_lines(path, {**options, **IMAGE_LIST_COLUMNS}),
    ),
}
FORMATS: Final = tuple(_READERS)
"""The formats of annotations that are read and written, by their names."""
ALL_OPTIONS: Final = tuple(name for names, _ in _READERS.values() for name in names)


def merge(
    collections: Sequence[Collection], default_class: str, *, needs_class: bool = False
) -> tuple[Collection, int, list[str]]:
    """Return all images, each once; the number of objects that two sources have; and notes.

    With `needs_class`, objects without a class are of `default_class`.
    """
    found: dict[str, AnnotatedImage] = {}  # by place
    place_of_file: dict[str, str] = {}
    splits: dict[str, list[str]] = {}
    num_joined, num_shared, num_repeats, apart = 0, 0, 0, []
    for collection in collections:
        given = collection.images
        if len(collections) > 1 and classes_of(given) == {default_class}:
            given = with_class(given, default_class, _INVENTED)
        images = _listed_once(given)
        num_repeats += 0 if collection.splits else len(given) - len(images)
        files = {place: os.path.realpath(place) for place in images}
        # Before any is added: within a source, two links to one file are two images.
        same = {p: p if p in found else place_of_file.get(files[p], p) for p in images}
        num_shared += sum(place in found for place in same.values())
        for place, image in images.items():
            if same[place] not in found:
                found[place] = image
                place_of_file.setdefault(files[place], place)
                continue
            found[same[place]], joined, left = _merged(found[same[place]], image)
            num_joined += joined
            apart += [left] if left else []
        for name, places in collection.splits.items():
            before = set(splits.setdefault(name, []))
            splits[name] += [same[place] for place in places if same[place] not in before]
    merged = with_class(found.values(), _INVENTED, default_class)
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
    nameless = sum(not one.class_name for image in merged for one in image.objects)
    if nameless and needs_class:
        merged = with_class(merged, "", default_class)
        notes.append(f"{nameless:,} objects had no class, and are called {default_class!r}")
    # Names in the order of those sources that number them; the others sorted behind them.
    used = classes_of(merged)
    ordered = dict.fromkeys(name for c in collections for name in c.class_names)
    if default_class not in used and (default_class,) in (c.class_names for c in collections):
        ordered.pop(default_class)
    whole = Collection(
        merged,
        {name: tuple(places) for name, places in splits.items()},
        (*ordered, *sorted(used - ordered.keys())) if ordered else (),
        num_repeats,
    )
    return whole, num_joined, notes


def classes_of(images: Iterable[AnnotatedImage]) -> set[str]:
    """Return the classes of all objects that have one."""
    return {found.class_name for image in images for found in image.objects} - {""}


def with_class(
    images: Iterable[AnnotatedImage], before: str, after: str
) -> tuple[AnnotatedImage, ...]:
    """Return images whose objects of class `before` are of class `after`."""

    def changed(found: AnnotatedObject) -> AnnotatedObject:
        return replace(found, class_name=after) if found.class_name == before else found

    return tuple(replace(image, objects=tuple(map(changed, image.objects))) for image in images)


def _listed_once(images: Iterable[AnnotatedImage]) -> dict[str, AnnotatedImage]:
    """Return the images of one source by their place, each once with the objects of all entries."""
    found: dict[str, AnnotatedImage] = {}
    for image in images:
        one = found.setdefault(place_of(image), image)
        _check_sizes(one, image)
        known = set(map(repr, one.objects))  # NaN is NaN here
        more = tuple(item for item in image.objects if one is not image and repr(item) not in known)
        if more:
            found[place_of(image)] = replace(one, objects=one.objects + more)
    return found


def _check_sizes(one: AnnotatedImage, other: AnnotatedImage) -> None:
    (w, h), (other_w, other_h) = ((image.width_px, image.height_px) for image in (one, other))
    if None not in (w, h, other_w, other_h) and (w, h) != (other_w, other_h):
        raise StoreError(
            f"{one.source} gives {one.path} {w} x {h} px (width x height), and {other.source} "
            f"{other_w} x {other_h}: their boxes are not of one frame."
        )


def _merged(one: AnnotatedImage, other: AnnotatedImage) -> tuple[AnnotatedImage, int, int]:
    """Return an image of two sources, the number of joined objects, and of those kept apart."""
    _check_sizes(one, other)
    objects, alone = list(one.objects), []
    are_alone = len(one.objects) == 1 == len(other.objects)
    free = list(range(len(objects)))  # an object of one source is one of the other at most
    for found in other.objects:
        box = found.box_xyxy_px
        for number in free:
            is_near = are_alone or (box and objects[number].box_xyxy_px == box)
            whole = _joined(objects[number], found) if is_near else None
            if whole is not None:
                objects[number] = whole
                free.remove(number)
                break
        else:
            alone.append(found)
    width_px, height_px = one.width_px or other.width_px, one.height_px or other.height_px
    image = replace(one, objects=(*objects, *alone), width_px=width_px, height_px=height_px)
    # Where one source has all objects, nothing is doubtful.
    return image, len(other.objects) - len(alone), len(alone) if free else 0


def _joined(one: AnnotatedObject, other: AnnotatedObject) -> AnnotatedObject | None:
    """Return one object with what two say; None if a field of one contradicts the other's."""
    shared = one.extra.keys() & other.extra.keys()
    if any(one.extra[name] != other.extra[name] for name in shared):
        return None
    values: dict[str, Any] = {"extra": {**other.extra, **one.extra}}
    for name in (item.name for item in fields(one) if item.name != "extra"):
        a, b = getattr(one, name), getattr(other, name)
        if not (_is_empty(a) or _is_empty(b) or repr(a) == repr(b)):  # NaN is NaN here
            return None
        values[name] = b if _is_empty(a) and not _is_empty(b) else a
    return replace(one, **values)


def _is_empty(value: object) -> bool:
    return value is None or value in ("", (), _INVENTED)
