# SPDX-License-Identifier: Apache-2.0
"""`convert`: annotations of one form, or of several, written in another."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError, StoreError
from penstock.opening import open_file
from penstock.stores.folder.listing import IMAGE_SUFFIXES, is_image
from penstock.stores.pack_source import refuse_outside
from penstock.vision.annotations.coco import write_coco
from penstock.vision.annotations.imglab import can_be_attribute, whole_px, write_imglab
from penstock.vision.annotations.lists import (
    CLASS_COLUMN,
    IMAGE_LIST_COLUMNS,
    LandmarkColumns,
    columns_of,
    num_landmarks_of,
    write_landmark_list,
)
from penstock.vision.annotations.model import AnnotatedObject
from penstock.vision.annotations.reading import folder_of, upright_size
from penstock.vision.annotations.voc import write_voc
from penstock.vision.annotations.yolo import Labels, label_file, label_line, write_yolo_yaml
from penstock.vision.arguments import checked_choice
from penstock.vision.convert.reading import (
    ALL_OPTIONS,
    FORMATS,
    Collection,
    Source,
    classes_of,
    merge,
    place_of,
    read_source,
)
from penstock.vision.datasets.rules import BoxCounts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.vision.annotations.model import AnnotatedImage
    from penstock.vision.datasets.rules import BadBoxes

Images = Literal["reference", "link", "copy"]
_MAGIC_BYTES: Final = 16
_WITH_SIZES: Final = ("voc", "imglab", "coco")
_IMAGES: Final[Mapping[str, tuple[Images, ...]]] = {
    "voc": ("copy", "link", "reference"),
    "yolo": ("copy", "link"),  # labels are found by the place of the images
}


def _fractions(found: AnnotatedObject, _: LandmarkColumns) -> bool:
    points = [value for point in found.landmarks_xy_px for value in point]
    values = (value for value in (*points, *(found.box_xyxy_px or ())) if not math.isnan(value))
    return any(whole_px(value) != value for value in values)


_ALL_BUT_VOC: Final = "yolo coco imglab landmarks image-list"
_IsLost = Callable[[AnnotatedObject, LandmarkColumns], object]
# What an object may have, and the formats that have no place for it; columns are those of a
# landmark list.
_LOSSES: Final[tuple[tuple[str, _IsLost, str], ...]] = (
    ("difficult", lambda o, _: o.difficult, "yolo coco landmarks image-list"),
    ("truncated", lambda o, _: o.truncated, "yolo coco landmarks image-list"),
    ("occluded", lambda o, _: o.occluded, "yolo coco landmarks image-list"),
    ("iscrowd", lambda o, _: o.iscrowd, "voc yolo imglab landmarks image-list"),
    ("mask", lambda o, _: o.segmentation, "voc yolo imglab landmarks image-list"),
    ("pose", lambda o, _: o.pose not in ("", "Unspecified"), _ALL_BUT_VOC),
    ("parts", lambda o, _: o.parts, _ALL_BUT_VOC),
    ("names of landmarks", lambda o, _: o.landmark_names, "yolo landmarks image-list"),
    ("visibility of landmarks", lambda o, _: o.visibility, "imglab landmarks image-list"),
    ("object without a box", lambda o, _: o.box_xyxy_px is None, "yolo imglab coco"),
    ("box", lambda o, c: o.box_xyxy_px is not None and not c.has_box, "landmarks image-list"),
    ("class", lambda o, c: o.class_name and CLASS_COLUMN not in c.classes, "landmarks"),
    ("landmarks", lambda o, _: o.landmarks_xy_px, "image-list"),
    ("fraction of a pixel", _fractions, "imglab"),
    ("order of landmarks", lambda o, _: [*o.landmark_names] != sorted(o.landmark_names), "imglab"),
)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was written.

    Attributes:
        path: Where it is.
        form: Its form.
        num_images: Images in it.
        num_objects: Objects of the sources, after those that are the same were joined.
        num_joined: Objects that two sources have.
        losses: What the form has no place for, and how many objects, splits or classes lost it.
        notes: What else there is to say, a sentence each.
        box_counts: What was found about the boxes of the sources, and done.
    """

    path: Path
    form: str
    num_images: int
    num_objects: int
    num_joined: int
    losses: Mapping[str, int]
    notes: tuple[str, ...]
    box_counts: BoxCounts


@dataclass(frozen=True, slots=True)
class Target:
    """What is written: `place` will be a folder of VOC or YOLO, or a list with its `columns`."""

    form: str
    place: Path
    images: Images
    columns: LandmarkColumns


@removed_arguments(
    source_format="Source(path, format)",
    **dict.fromkeys(ALL_OPTIONS, "Source(path, format, {option: value})"),
)
def convert(
    src: str | Path | Source | Sequence[str | Path | Source],
    dst: str | Path,
    *,
    target_format: str,
    images: Images | None = None,
    strict: bool = False,
    columns: LandmarkColumns | None = None,
    default_class: str = "object",
    bad_boxes: BadBoxes = "keep",
    follow_links: bool = False,
) -> ConvertReport:
    """Read annotations, and write them in another form.

    Several sources become one data set: what they say of the same image file is put together, see
    `reading`. What is at `dst` appears in one step, when it is whole; nothing is ever replaced.

    Args:
        src: Folder or file, or several; a `Source` also says its form and options.
        dst: A folder for VOC and YOLO, a file for the others.
        target_format: "voc", "imglab", "yolo", "coco", "landmarks" or "image-list".
        images: For VOC and YOLO: "copy" (the default) copies image files into `dst`, "link" makes
            symbolic links to them. "reference" leaves them where they are: VOC then has only
            annotations; lists name them from their own folder, and take nothing else.
        strict: Whether anything that the form has no place for is an error.
        columns: Of a landmark list that is written; None takes what all objects have.
        default_class: What an object without a class is called in VOC, YOLO and COCO. A source all
            of whose objects are called so has no classes.
        bad_boxes: What becomes of boxes that cannot be right: "keep" leaves them as they are;
            "drop", "fix" and "raise" as for `AnnotationRules`. They are counted always.
        follow_links: Whether image files that lie outside of the sources' folders are copied.

    Returns:
        What was written, and what was lost.

    Raises:
        ConfigError: an argument is none of those allowed; `dst` lies in a source's folder.
        StoreError: a source cannot be read, or files outside of it would be copied without
            `follow_links`; a box is bad and `bad_boxes` forbids it; `dst` is there and not empty;
            two images would have one name; something would be lost, and `strict` forbids it. Then
            nothing is written.
    """
    given = [src] if isinstance(src, (str, Path, Source)) else list(src)
    if not given:
        raise ConfigError("src names nothing to convert.")
    sources = [one if isinstance(one, Source) else Source(one) for one in given]
    checked_choice("target_format", target_format, FORMATS)
    choices = _IMAGES.get(target_format, ("reference",))
    checked_choice(f"images for {target_format}", images or choices[0], choices)
    place, is_file = Path(dst), target_format not in _IMAGES
    if target_format == "coco" and place.suffix.lower() != ".json":
        raise ConfigError(f"COCO is one file: name one that ends in .json, not {place}.")
    if os.path.lexists(place) and (is_file or not place.is_dir() or any(place.iterdir())):
        raise StoreError(f"{place} is there already, and is not replaced: name another place.")
    for folder in (os.path.realpath(source.path) for source in sources):
        if os.path.isdir(folder) and Path(os.path.realpath(place)).is_relative_to(folder):
            raise ConfigError(f"{place} would be in {folder}, which is read: name another place.")
    read = [read_source(source, bad_boxes) for source in sources]
    if (images or choices[0]) == "copy" and not follow_links:
        here = os.getcwd()
        paths = (os.path.join(here, image.path) for found, _ in read for image in found.images)
        roots = [Path(s.options.get("root") or folder_of(s.path)) for s in sources]
        refuse_outside(roots, paths)
    merged, num_joined, notes = merge(
        [one for one, _ in read], default_class, needs_class=not is_file or target_format == "coco"
    )
    sized = tuple(_with_size(image, target_format) for image in merged.images)
    collection = replace(merged, images=sized)
    written = LandmarkColumns()
    if target_format == "landmarks":
        usual = columns_of([found for image in collection.images for found in image.objects])
        written = columns or usual
        if written.num_landmarks is None:
            written = replace(written, num_landmarks=usual.num_landmarks)
    target = Target(target_format, place, images or choices[0], written)
    losses = _count_losses(collection, target)
    if strict and losses:
        listed = ", ".join(f"{name} ({count:,})" for name, count in losses.items())
        raise StoreError(f"{target.form} has no place for some of it: {listed}.")
    notes += _write(collection, target)
    counts = [asdict(counts) for _, counts in read]
    return ConvertReport(
        target.place,
        target.form,
        len(collection.images),
        sum(len(image.objects) for image in collection.images),
        num_joined,
        losses,
        tuple(notes),
        BoxCounts(**{name: sum(one[name] for one in counts) for name in counts[0]}),
    )


def _with_size(image: AnnotatedImage, form: str) -> AnnotatedImage:
    """Return an image with its size, from its header where the annotation does not say."""
    said = image.width_px, image.height_px
    is_enough = form == "image-list" or (None not in said and form in _WITH_SIZES)
    if is_enough or not os.path.isfile(image.path):
        return image
    _check_first_bytes(image, image.path)
    try:
        seen = upright_size(image.path)[::-1]
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read the size of {image.path}: {error}.") from error
    if None in said:
        return replace(image, width_px=seen[0], height_px=seen[1])
    if said != seen and (form == "landmarks" or said == seen[::-1]):
        raise StoreError(
            f"{image.source} is of {said[0]} x {said[1]} px (width x height), and {image.path} is "
            f"{seen[0]} x {seen[1]} as it is seen: {form} cannot say so."
        )
    return image


def _write(collection: Collection, target: Target) -> tuple[str, ...]:
    """Write everything beside its place, and then put it there."""
    place = target.place
    work = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name[:50]}.", dir=place.parent))
        made = work / "made"
        write = {"voc": _write_voc, "yolo": _write_yolo}.get(target.form, _write_list)
        notes = write(collection, target, made)
        if not made.is_dir():
            place.open("xb").close()  # a file that has come there in the meantime stays
        os.rename(made, place)  # an empty folder gives way, one with anything in it does not
    except ValueError as error:
        raise StoreError(f"cannot write {place}: {error}.") from error
    except OSError as error:
        raise StoreError(f"cannot write {place}: {error.strerror} ({error.filename}).") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return notes


def _count_losses(collection: Collection, target: Target) -> dict[str, int]:
    """Return what is lost, and how many objects, images, splits or classes lose it."""
    form, columns = target.form, target.columns
    table = [(what, is_lost) for what, is_lost, forms in _LOSSES if form in forms.split()]
    splits = collection.splits.values() if form != "voc" else ()
    num_repeats = sum(len(places) - len(set(places)) for places in splits)
    losses = Counter({"repeat of an image": collection.num_repeats + num_repeats})
    for image in collection.images:
        for found in image.objects:
            losses.update(what for what, is_lost in table if is_lost(found, columns))
            for name in found.extra if form != "voc" else ():
                is_kept = can_be_attribute(name) if form == "imglab" else name in columns.classes
                losses[f"attribute {name!r}"] += not is_kept
        if form == "image-list":
            is_one = len(classes_of([image])) == 1
            losses["image without a class, or with several"] += not is_one
        losses["image without objects"] += form == "landmarks" and not image.objects
        is_sized = image.width_px and image.height_px
        losses["size of a missing image"] += form in _WITH_SIZES and not is_sized
    if form not in ("voc", "yolo"):
        losses["split"] = len(collection.splits)
    if form == "yolo":
        losses["split that shares images with another"] = len(_one_split_each(collection)[1])
    used = sorted(classes_of(collection.images))
    for number, name in enumerate(collection.class_names if form not in ("yolo", "coco") else ()):
        if name not in used:
            losses["class without objects"] += 1
        elif used.index(name) != number:  # others number them by their sorted names
            losses["number of a class"] += 1
    return {name: count for name, count in losses.items() if count}


def _write_voc(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    files = {at: f"JPEGImages/{name}" for at, name in _files_of(collection.images).items()}
    (made / "JPEGImages").mkdir(parents=True)

    def annotate(image: AnnotatedImage) -> None:
        file = made / "Annotations" / f"{image.path.stem}.xml"
        _write_file(file, write_voc(image))

    _put_images(collection, target, made, files, annotate)
    for split, places in collection.splits.items():
        lines = "".join(f"{Path(files[at]).stem}\n" for at in places)
        name = _checked_name(split, "a split")
        _write_file(made / "ImageSets" / "Main" / f"{name}.txt", lines.encode())
    if target.images == "reference":
        return (f"the images are not in it: put them into {target.place / 'JPEGImages'}",)
    return ()


def _write_yolo(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    split_of, left_out = _one_split_each(collection)
    names = _files_of(collection.images)
    files = {at: f"images/{_checked_name(split_of[at], 'a split')}/{names[at]}" for at in names}
    class_names = _class_names(collection)
    numbers = {name: number for number, name in enumerate(class_names)}
    objects = [found for image in collection.images for found in image.objects]
    labels = Labels(class_names, num_landmarks_of(objects))

    def annotate(image: AnnotatedImage) -> None:
        if not image.width_px or not image.height_px:
            raise ValueError("its size cannot be read, and YOLO's numbers are parts of it")
        lines = [
            label_line(found, numbers[found.class_name], labels, image.width_px, image.height_px)
            for found in image.objects
            if found.box_xyxy_px is not None
        ]
        _write_file(label_file(image.path), "".join(f"{line}\n" for line in lines).encode())

    _put_images(collection, target, made, files, annotate)
    places = {split: f"images/{split}" for split in split_of.values()}
    _write_file(made / "data.yaml", write_yolo_yaml(labels, places))
    why = "some of its images are in another one"
    return tuple(f"split {split!r} is left out: {why}" for split in left_out)


def _class_names(collection: Collection) -> tuple[str, ...]:
    """Return the classes by their numbers."""
    return collection.class_names or tuple(sorted(classes_of(collection.images)))


def _write_list(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    """Write a list that names images from its own folder, with "/"."""
    images = []
    folder = os.path.realpath(target.place.parent)
    for image in collection.images:
        # So that ".." leads where it seems to; a link itself keeps its name.
        path = os.path.join(os.path.realpath(image.path.parent), image.path.name)
        images.append(replace(image, path=Path(os.path.relpath(path, folder))))
    notes: tuple[str, ...] = ()
    if target.form == "imglab":
        data = write_imglab(images)
    elif target.form == "coco":
        data = write_coco(images, _class_names(collection))
    elif target.form == "landmarks":
        data = write_landmark_list(images, target.columns)
        notes = (f"columns: {target.columns}",)
    else:
        classed = [
            replace(image, objects=(AnnotatedObject(names.pop()),))
            for image in images
            if len(names := classes_of([image])) == 1
        ]
        data = write_landmark_list(classed, LandmarkColumns(**IMAGE_LIST_COLUMNS))
    _write_file(made, data)
    return notes


def _write_file(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _put_images(
    collection: Collection,
    target: Target,
    made: Path,
    files: Mapping[str, str],
    annotate: Callable[[AnnotatedImage], None],
) -> None:
    """Put the image of each place where `files` says, and annotate it there."""
    for image in collection.images:
        place = made / files[place_of(image)]
        if target.images != "reference":
            _put_image(image, target.images, place)
        try:
            annotate(replace(image, path=place))
        except ValueError as error:
            source = image.source or image.path
            raise StoreError(f"{source} cannot be written: {error}.") from error


def _put_image(image: AnnotatedImage, how: Images, place: Path) -> None:
    """Copy an image, or make a link to it."""
    source = Path(os.path.realpath(image.path))
    if not os.path.isfile(source):
        raise StoreError(
            f"{image.source or image.key}: its image {image.path} is not there, or is no file. "
            "With images='reference' (--images reference) none is needed."
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    if how == "link":
        place.symlink_to(source)
        return
    _check_first_bytes(image, source)
    shutil.copyfile(source, place)


def _check_first_bytes(image: AnnotatedImage, path: str | Path) -> None:
    """Refuse what is no image without a word of its content: a link may lead anywhere."""
    with open_file(path) as file:
        if not is_image(file.read(_MAGIC_BYTES)):
            raise StoreError(
                f"{image.source or image.key}: {image.path} is not an image by its first bytes."
            )


def _files_of(images: Sequence[AnnotatedImage]) -> dict[str, str]:
    """Return a file name for the image at each place; none leads out of its folder."""
    parts = [_parts(image) for image in images]
    first = -1 if len({of[-1].casefold() for of in parts}) == len(images) else 0
    names: dict[str, str] = {}
    taken: dict[str, AnnotatedImage] = {}
    for image, of_image in zip(images, parts, strict=True):
        name = _checked_name("_".join(of_image[first:]), image.source)
        # On some systems Cat.jpg is cat.jpg: there the second would take the place of the first.
        other = taken.setdefault(name.casefold(), image)
        if other is not image:
            raise StoreError(
                f"{other.path} and {image.path} would both be called {name!r}: rename one of them."
            )
        if image.path.suffix.lower() not in IMAGE_SUFFIXES:  # by which folders are listed
            raise StoreError(f"{image.source}: {image.path} has no suffix of an image.")
        names[place_of(image)] = name + image.path.suffix
    return names


def _parts(image: AnnotatedImage) -> list[str]:
    stem, suffix = os.path.splitext(image.key)
    key = stem if suffix.lower() in IMAGE_SUFFIXES else image.key
    return [part for part in key.split("/") if part not in ("", ".", "..")] or [""]


def _checked_name(name: str, where: str) -> str:
    """Return a name of a file; StoreError if it is hidden, or means anything else somewhere."""
    is_plain = name.isprintable() and name == name.strip() and not set(name) & set("/\\")
    if not name.strip("._ ") or name[0] == "." or not is_plain:
        raise StoreError(f"{where}: {name[:80]!r} is no name that a file could be given.")
    return name


def _one_split_each(collection: Collection) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the split of each image by its place, and the splits that have to be left out."""
    split_of: dict[str, str] = {}
    left_out = []
    usual = [name for name in ("train", "val", "test") if name in collection.splits]
    for split in dict.fromkeys((*usual, *collection.splits)):
        places = collection.splits[split]
        if any(place in split_of for place in places):
            left_out.append(split)
        else:
            split_of |= dict.fromkeys(places, split)
    rest = "rest" if split_of else "train"
    of_all = {at: split_of.get(at, rest) for at in map(place_of, collection.images)}
    return of_all, tuple(left_out)
