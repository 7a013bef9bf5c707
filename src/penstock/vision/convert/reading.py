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
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.plural import counted
from penstock.stores.folder.annotated_folder import YAML_SUFFIXES, annotated_folder
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import (
    LandmarkColumns,
    read_labelled_paths,
    read_landmark_list,
    samples_of_lines,
)
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import key_of, listed_path, numbered_lines, upright_size
from penstock.vision.annotations.voc_folder import keys_of_split, read_voc_folder
from penstock.vision.annotations.yolo import read_yolo, read_yolo_data
from penstock.vision.datasets.rules import BadBoxes, BoxCounts, judged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_INVENTED: Final = "\0"  # stands for `default_class` until a source has a better one


@dataclass(frozen=True, slots=True)
class Source:
    """Annotations that are converted.

    Attributes:
        path: The folder or the file.
        form: One of `FORMATS`; None finds it out, where the path says so.
        options: Arguments of its reader: `split` and `origin` of VOC, `split` and `polygons` of
            YOLO, all of `LandmarkColumns` and `root` of landmark lists, `root` and `separator` of
            image lists.
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
        splits: Keys of the images of each split, in the split's order.
        class_names: By their numbers; empty where they are numbered by their sorted names.
        num_repeats: How often lists name an image again, beyond the splits.
    """

    images: tuple[AnnotatedImage, ...]
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    num_repeats: int = 0


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
    return _settled(collection, bad_boxes, added_px)


def _form_of(path: Path) -> str:
    """Return the format of a file or folder; the images of a folder need not be there."""
    if not path.exists():
        raise StoreError(f"{path} is not there.")
    if path.suffix.lower() in YAML_SUFFIXES:
        return "yolo"
    if not path.is_dir():
        if path.suffix.lower() == ".xml":
            return "imglab"
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
        return Collection(images, {options["split"]: tuple(image.key for image in images)})
    known = {image.key for image in images}
    splits = {}
    for file in sorted((path / "ImageSets" / "Main").glob("*.txt")):
        if any(len(line.split()) > 1 and line not in known for _, line in numbered_lines(file)):
            continue  # which images have a class: the annotations say so
        splits[file.stem] = tuple(keys_of_split(path, file.stem, known))
    return Collection(images, splits)


def _read_yolo(path: Path, options: dict[str, Any]) -> Collection:
    wanted = options.pop("split", None)
    images: list[AnnotatedImage] = []
    key_at: dict[Path, str] = {}
    splits: dict[str, tuple[str, ...]] = {}
    class_names: tuple[str, ...] = ()
    for name in read_yolo_data(path).splits if wanted is None else [wanted]:
        of_split, of_classes = read_yolo(path, name, **options)
        class_names = max(class_names, of_classes, key=len)
        # One that is in two splits is no repeat; a list and a folder may call it differently.
        images += [image for image in of_split if image.path not in key_at]
        key_at |= {i.path: i.key for i in reversed(of_split) if i.path not in key_at}
        splits[name] = tuple(key_at[image.path] for image in of_split)
    if not images:
        raise StoreError(f"{path} names no images.")
    return Collection(tuple(images), splits, class_names)


def _read_image_list(path: Path, options: dict[str, Any]) -> Collection:
    folder = Path(options.get("root") or path.parent)
    images = []
    for number, text, label in read_labelled_paths(path, options.get("separator"), folder):
        source, place = f"{path}, line {number}", listed_path(text, folder)
        objects = (AnnotatedObject(label),)
        images.append(AnnotatedImage(place, key_of(text), None, None, objects, source))
    return Collection(tuple(samples_of_lines(images)))


_READERS: Final[dict[str, tuple[tuple[str, ...], Callable[[Path, dict[str, Any]], Collection]]]] = {
    "voc": (("split", "origin"), _read_voc),
    "imglab": ((), lambda path, _: Collection(tuple(read_imglab(path)))),
    "yolo": (("split", "polygons"), _read_yolo),
    "landmarks": (
        (*(item.name for item in fields(LandmarkColumns)), "root"),
        lambda path, options: Collection(
            tuple(samples_of_lines(read_landmark_list(path, **options)))
        ),
    ),
    "image-list": (("root", "separator"), _read_image_list),
}
FORMATS: Final = tuple(_READERS)
"""The formats of annotations that are read and written, by their names."""


def _settled(
    collection: Collection, policy: BadBoxes, added_px: int
) -> tuple[Collection, BoxCounts]:
    """Return a collection whose bad boxes `policy` has treated; the others keep all digits."""
    counts: Counter[str] = Counter()
    images, wrong = [], []
    for image in collection.images:
        boxed = [n for n, one in enumerate(image.objects) if one.box_xyxy_px is not None]
        size_px = _size_px(image) if boxed else (0, 0)
        boxes = [image.objects[n].box_xyxy_px for n in boxed]
        found = judged(
            np.array(boxes, np.float64).reshape(-1, 4),
            np.array([size_px] * len(boxed), np.int64).reshape(-1, 2),
            policy,
            added_px=added_px,
        )
        objects = dict(enumerate(image.objects))
        for k in np.flatnonzero(found.is_bad).tolist():
            one = objects.pop(boxed[k]) if not found.is_kept[k] else objects[boxed[k]]
            wrong.append((image, one, found.kinds_of(k)))
            if policy == "fix" and found.is_kept[k]:
                left, top, right, bottom = found.boxes[k].tolist()
                objects[boxed[k]] = replace(one, box_xyxy_px=(left, top, right, bottom))
        images.append(replace(image, objects=tuple(objects.values())))
        counts.update(found.counts())
        counts["total"] += len(image.objects)
        counts["kept"] += len(objects)
        counts["unchecked"] += len(boxed) if 0 in size_px else 0
    if policy == "raise" and wrong:
        image, one, kinds = wrong[0]
        box = ", ".join(f"{side:g}" for side in one.box_xyxy_px or ())
        raise StoreError(
            f"{len(wrong):,} bad box(es). The first, ({box}) in 0-based half-open pixels, of a "
            f"{one.class_name or 'nameless'!r} in {image.source or image.path}, is {kinds}. "
            "Correct the files, or choose bad_boxes 'keep', 'fix' or 'drop' (--bad-boxes)."
        )
    return replace(collection, images=tuple(images)), BoxCounts(
        **counts, dropped=counts["total"] - counts["kept"]
    )


def _size_px(image: AnnotatedImage) -> tuple[int, int]:
    """Return height and width of the image that was annotated; zeros if they are not known."""
    if image.width_px and image.height_px:
        return image.height_px, image.width_px
    try:
        return upright_size(image.path)
    except (OSError, ValueError):  # it may be elsewhere; the writers that need it raise
        return 0, 0


@dataclass(slots=True)
class _Listed:
    """An image of a source, or of several; `seen` are the sets of objects that its entries had."""

    image: AnnotatedImage
    path: str
    keys: list[str]
    seen: set[str]


def merge(
    collections: Sequence[Collection], default_class: str
) -> tuple[Collection, int, tuple[str, ...]]:
    """Return all images, each once; the number of objects that two sources have; and notes."""
    found: dict[str, _Listed] = {}  # by path
    by_file: dict[str, _Listed] = {}
    key_of: dict[tuple[int, str], str] = {}
    num_joined, num_shared, num_repeats, apart = 0, 0, 0, []
    for number, collection in enumerate(collections):
        given = collection.images
        if len(collections) > 1 and classes_of(given) == {default_class}:
            given = with_class(given, default_class, _INVENTED)
        images = _listed_once(given)
        num_repeats += 0 if collection.splits else len(given) - len(images)
        new = []
        for one in images:
            same = found.get(one.path) or by_file.get(os.path.realpath(one.path))
            if same is None:
                new.append(same := one)
            else:
                same.image, joined, left = _merged(same.image, one.image)
                num_joined, num_shared = num_joined + joined, num_shared + 1
                apart += [left] if left else []
            key_of |= dict.fromkeys(((number, key) for key in one.keys), same.image.key)
        for one in new:  # only now: within a source, two links to one file are two images
            found[one.path] = one
            by_file.setdefault(os.path.realpath(one.path), one)
    splits: dict[str, list[str]] = {}
    for number, collection in enumerate(collections):
        for name, of_split in collection.splits.items():
            before = set(splits.setdefault(name, []))
            keys = (key_of[number, key] for key in of_split)
            splits[name] += [key for key in keys if key not in before]
    merged = with_class((one.image for one in found.values()), _INVENTED, default_class)
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
    # Names in the order of those sources that number them; the others sorted behind them.
    used = classes_of(merged)
    ordered = dict.fromkeys(name for c in collections for name in c.class_names)
    if default_class not in used and (default_class,) in (c.class_names for c in collections):
        ordered.pop(default_class)
    whole = Collection(
        merged,
        {name: tuple(keys) for name, keys in splits.items()},
        (*ordered, *sorted(used - ordered.keys())) if ordered else (),
        num_repeats,
    )
    return whole, num_joined, tuple(notes)


def classes_of(images: Iterable[AnnotatedImage]) -> set[str]:
    """Return the classes of all objects that have one."""
    return {found.class_name for image in images for found in image.objects} - {""}


def with_class(
    images: Iterable[AnnotatedImage], before: str, after: str
) -> tuple[AnnotatedImage, ...]:
    """Return images whose objects of class `before` are of class `after`."""

    def changed(found: AnnotatedObject) -> AnnotatedObject:
        return replace(found, class_name=after) if found.class_name == before else found

    return tuple(
        replace(image, objects=tuple(changed(found) for found in image.objects)) for image in images
    )


def _listed_once(images: Iterable[AnnotatedImage]) -> list[_Listed]:
    """Return the images of one source, each once; other objects of the same image are added."""
    found: dict[str, _Listed] = {}
    for image in images:
        path, said = os.path.abspath(image.path), repr(image.objects)
        one = found.setdefault(path, _Listed(image, path, [], {said}))
        _check_sizes(one.image, image)
        one.keys.append(image.key)
        if said not in one.seen:
            one.seen.add(said)
            one.image = replace(one.image, objects=one.image.objects + image.objects)
    return list(found.values())


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
    objects = list(one.objects)
    are_alone = len(one.objects) == 1 == len(other.objects)
    free = list(range(len(objects)))  # an object of one source is one of the other at most
    alone = []
    for found in other.objects:
        box = found.box_xyxy_px
        numbers = [n for n in free if are_alone or (box and objects[n].box_xyxy_px == box)]
        made = ((n, _joined(objects[n], found)) for n in numbers)
        number, whole = next((pair for pair in made if pair[1] is not None), (-1, None))
        if whole is None:
            alone.append(found)
        else:
            free.remove(number)
            objects[number] = whole
    width_px, height_px = one.width_px or other.width_px, one.height_px or other.height_px
    image = replace(one, objects=(*objects, *alone), width_px=width_px, height_px=height_px)
    # Where one source has all objects, nothing is doubtful.
    return image, len(other.objects) - len(alone), len(alone) if free else 0


def _joined(one: AnnotatedObject, other: AnnotatedObject) -> AnnotatedObject | None:
    """Return one object with what two say; None if a field of one contradicts the other's."""
    values: dict[str, Any] = {}
    for name in (item.name for item in fields(one)):
        a, b = getattr(one, name), getattr(other, name)
        if name == "extra":
            if any(a[key] != b[key] for key in a.keys() & b.keys()):
                return None
            values[name] = {**b, **a}
        elif _is_empty(a) or _is_empty(b) or repr(a) == repr(b):  # NaN is NaN here
            values[name] = b if _is_empty(a) and not _is_empty(b) else a
        else:
            return None
    return replace(one, **values)


def _is_empty(value: object) -> bool:
    return value is None or value in ("", (), _INVENTED)
