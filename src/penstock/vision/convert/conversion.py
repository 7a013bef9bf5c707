# SPDX-License-Identifier: Apache-2.0
"""`convert`: annotations of one form, or of several, written in another."""

from __future__ import annotations

import math
import operator
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from penstock.errors import ConfigError, StoreError
from penstock.opening import open_file
from penstock.stores.folder.listing import IMAGE_SUFFIXES, is_image
from penstock.stores.pack_source import refuse_outside
from penstock.vision.annotations.imglab import can_be_attribute, whole_px, write_imglab
from penstock.vision.annotations.lists import (
    CLASS_COLUMN,
    LandmarkColumns,
    write_image_list,
    write_landmark_list,
)
from penstock.vision.annotations.reading import folder_of, header_of
from penstock.vision.annotations.voc import write_voc
from penstock.vision.annotations.yolo import Labels, label_line, write_yolo_yaml
from penstock.vision.convert.reading import (
    FORMATS,
    Collection,
    Source,
    classes_of,
    merge,
    read_source,
    with_class,
)
from penstock.vision.datasets.rules import BoxCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
    from penstock.vision.datasets.rules import BadBoxes

Images = Literal["reference", "link", "copy"]
_MAGIC_BYTES: Final = 16
_MAX_NAME_BYTES: Final = 200  # Linux takes 255, with a suffix
_LIST_NAMES: Final = {
    "imglab": "imglab.xml",
    "landmarks": "landmarks.txt",
    "image-list": "images.txt",
}
_FLAGS: Final = ("difficult", "truncated", "occluded")


def _fractions(found: AnnotatedObject) -> bool:
    points = [value for point in found.landmarks_xy_px for value in point]
    values = (value for value in (*points, *(found.box_xyxy_px or ())) if not math.isnan(value))
    return any(whole_px(value) != value for value in values)


# What an object may have, and the formats that have no place for it. A landmark list may have
# columns of boxes and classes.
_LOSSES: Final[tuple[tuple[str, Callable[[AnnotatedObject], object], str], ...]] = (
    *((flag, operator.attrgetter(flag), "yolo landmarks image-list") for flag in _FLAGS),
    ("pose", lambda o: o.pose not in ("", "Unspecified"), "yolo imglab landmarks image-list"),
    ("parts", lambda o: o.parts, "yolo imglab landmarks image-list"),
    ("names of landmarks", lambda o: o.landmark_names, "yolo landmarks image-list"),
    ("visibility of landmarks", lambda o: o.visibility, "imglab landmarks image-list"),
    ("object without a box", lambda o: o.box_xyxy_px is None, "yolo imglab"),
    ("box", lambda o: o.box_xyxy_px is not None, "landmarks image-list"),
    ("class", lambda o: o.class_name, "landmarks"),
    ("landmarks", lambda o: o.landmarks_xy_px, "image-list"),
    ("fraction of a pixel", _fractions, "imglab"),
    ("order of landmarks", lambda o: [*o.landmark_names] != sorted(o.landmark_names), "imglab"),
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
    """What is written, and how.

    Attributes:
        form: One of `FORMATS`.
        place: Where it will be; paths in lists start from there.
        images: Whether image files are left where they are, linked to, or copied.
        columns: Of a landmark list.
    """

    form: str
    place: Path
    images: Images
    columns: LandmarkColumns

    @property
    def is_file(self) -> bool:
        """Whether it is one file, and no folder."""
        return self.form in _LIST_NAMES and self.images == "reference"


def convert(
    src: str | Path | Source | Sequence[str | Path | Source],
    dst: str | Path,
    *,
    target_format: str,
    source_format: str | None = None,
    images: Images | None = None,
    strict: bool = False,
    columns: LandmarkColumns | None = None,
    default_class: str = "object",
    bad_boxes: BadBoxes = "keep",
    follow_links: bool = False,
    **options: Any,  # noqa: ANN401
) -> ConvertReport:
    """Read annotations, and write them in another form.

    Several sources become one data set: what they say of the same image file is put together, see
    `reading`. What is at `dst` appears in one step, when it is whole; nothing is ever replaced.

    Args:
        src: Folder or file, or several; a `Source` says its form and options itself.
        dst: A file for lists and imglab whose images stay where they are; else a folder.
        target_format: "voc", "imglab", "yolo", "landmarks" or "image-list".
        source_format: Form of the sources that are no `Source`. None finds it out, but for text
            files.
        images: "copy" copies image files into `dst`; "link" makes symbolic links to them;
            "reference" leaves them where they are, and lists name them from the list's folder.
            None is "copy" for VOC and YOLO, and "reference" for the others. YOLO has no
            "reference".
        strict: Whether anything that the form has no place for is an error.
        columns: Of a landmark list that is written; None takes what all objects have.
        default_class: What an object without a class is called in VOC and YOLO. A source all of
            whose objects are called so has no classes.
        bad_boxes: What becomes of boxes that cannot be right: "keep" leaves them as they are;
            "drop", "fix" and "raise" as for `AnnotationRules`. They are counted always.
        follow_links: Whether image files that lie outside of the sources' folders are copied.
        options: See `Source`. Each goes to the sources that have it, unless they say it themselves.

    Returns:
        What was written, and what was lost.

    Raises:
        ConfigError: an argument is none of those allowed; `dst` lies in a source.
        StoreError: a source cannot be read, or files outside of it would be copied without
            `follow_links`; a box is bad and `bad_boxes` forbids it; `dst` is there and not empty;
            two images would have one name; something would be lost, and `strict` forbids it. Then
            nothing is written.
    """
    sources = _sources(src, source_format, options)
    target = _target(Path(dst), target_format, images)
    _check_place(target, sources)
    read = [read_source(source, bad_boxes) for source in sources]
    if target.images == "copy" and not follow_links:
        here = os.getcwd()
        paths = (os.path.join(here, image.path) for found, _ in read for image in found.images)
        roots = [Path(s.options.get("root") or folder_of(s.path)) for s in sources]
        refuse_outside(roots, paths)
    merged, num_joined, notes = merge([collection for collection, _ in read], default_class)
    collection, more = _completed(merged, target.form, default_class)
    if target.form == "landmarks":
        usual = landmark_columns(collection)
        if columns is not None and columns.num_landmarks is None:
            columns = replace(columns, num_landmarks=usual.num_landmarks)
        target = replace(target, columns=columns or usual)
    losses = _count_losses(collection, target)
    if strict and losses:
        listed = ", ".join(f"{name} ({count:,})" for name, count in losses.items())
        raise StoreError(f"{target.form} has no place for some of it: {listed}.")
    notes = (*notes, *more, *_write(collection, target))
    counts = [asdict(counts) for _, counts in read]
    return ConvertReport(
        target.place,
        target.form,
        len(collection.images),
        sum(len(image.objects) for image in collection.images),
        num_joined,
        losses,
        notes,
        BoxCounts(**{name: sum(one[name] for one in counts) for name in counts[0]}),
    )


def _sources(
    src: str | Path | Source | Sequence[str | Path | Source],
    form: str | None,
    options: Mapping[str, Any],
) -> list[Source]:
    given = [src] if isinstance(src, (str, Path, Source)) else list(src)
    if not given:
        raise ConfigError("src names nothing to convert.")
    sources = [one if isinstance(one, Source) else Source(one, form) for one in given]
    for name in options:
        if not any(source.takes(name) for source in sources):
            raise ConfigError(f"no source has an option {name!r}.")
    return [
        replace(one, options={**{n: v for n, v in options.items() if one.takes(n)}, **one.options})
        for one in sources
    ]


def _target(dst: Path, form: str, images: Images | None) -> Target:
    if form not in FORMATS:
        raise ConfigError(f"target_format is one of {', '.join(FORMATS)}, not {form!r}.")
    if images not in (None, "reference", "link", "copy"):
        raise ConfigError(f"images is 'reference', 'link' or 'copy', not {images!r}.")
    if form == "yolo" and images == "reference":
        raise ConfigError(
            "YOLO finds labels by the place of the images, so these have to be in the folder: "
            "images='link' or 'copy'."
        )
    usual: Images = "copy" if form in ("voc", "yolo") else "reference"
    return Target(form, dst, images or usual, LandmarkColumns())


def _check_place(target: Target, sources: Sequence[Source]) -> None:
    place = target.place
    if os.path.lexists(place) and (target.is_file or not place.is_dir() or any(place.iterdir())):
        raise StoreError(f"{place} is there already, and is not replaced: name another place.")
    real = Path(os.path.realpath(place))
    for source in sources:
        folder = Path(os.path.realpath(source.path))
        if folder.is_dir() and real.is_relative_to(folder):
            raise ConfigError(f"{place} would be in {source.path}, which is read: name another.")


def _completed(
    collection: Collection, form: str, default_class: str
) -> tuple[Collection, tuple[str, ...]]:
    """Return a collection with the sizes and classes that the form needs."""
    images = tuple(_with_size(image, form) for image in collection.images)
    names = collection.class_names
    nameless = sum(not found.class_name for image in images for found in image.objects)
    if not nameless or form not in ("voc", "yolo"):
        return replace(collection, images=images), ()
    if names and default_class not in names:
        names = (*names, default_class)
    whole = replace(collection, images=with_class(images, "", default_class), class_names=names)
    return whole, (f"{nameless:,} objects had no class, and are called {default_class!r}",)


def _with_size(image: AnnotatedImage, form: str) -> AnnotatedImage:
    """Return an image with its size, from its header where the annotation does not say."""
    said = image.width_px, image.height_px
    is_enough = None not in said and form in ("voc", "imglab")
    if form == "image-list" or is_enough or not os.path.isfile(image.path):
        return image
    try:
        header = header_of(image.path)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read the size of {image.path}: {error}.") from error
    seen = header.upright_width_px, header.upright_height_px
    if None in said:
        return replace(image, width_px=seen[0], height_px=seen[1])
    is_turned = header.orientation >= 5 and said == seen[::-1]
    if is_turned or (form == "landmarks" and said != seen):
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
        notes = _write_target(collection, target, made)
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
    in_columns = {"box"} if columns.has_box else set()
    in_columns |= {"class"} if CLASS_COLUMN in columns.classes else set()
    table = [
        (what, is_said)
        for what, is_said, forms in _LOSSES
        if form in forms.split() and not (form == "landmarks" and what in in_columns)
    ]
    losses = Counter({"repeat of an image": collection.num_repeats})
    if form != "voc":
        losses["repeat of an image"] += sum(
            len(k) - len(set(k)) for k in collection.splits.values()
        )
    for image in collection.images:
        for found in image.objects:
            losses.update(what for what, is_said in table if is_said(found))
            for name in found.extra if form != "voc" else ():
                is_kept = can_be_attribute(name) if form == "imglab" else name in columns.classes
                losses[f"attribute {name!r}"] += not is_kept
        if form == "image-list":
            is_one = len(classes_of([image])) == 1
            losses["image without a class, or with several"] += not is_one
        losses["image without objects"] += form == "landmarks" and not image.objects
    if form not in ("voc", "yolo"):
        losses["split"] = len(collection.splits)
    if form == "yolo":
        losses["split that shares images with another"] = len(_one_split_each(collection)[1])
    used = sorted(classes_of(collection.images))
    for number, name in enumerate(collection.class_names if form != "yolo" else ()):
        if name not in used:
            losses["class without objects"] += 1
        elif used.index(name) != number:  # others number them by their sorted names
            losses["number of a class"] += 1
    return {name: count for name, count in losses.items() if count}


def _write_target(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    """Write a collection as `made`, which does not exist yet; return notes for the user."""
    if target.form in _LIST_NAMES:
        return _write_list(collection, target, made)
    return (_write_voc if target.form == "voc" else _write_yolo)(collection, target, made)


def _write_voc(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    files = _files_of(collection.images)
    for folder in ("Annotations", "JPEGImages"):
        (made / folder).mkdir(parents=True)
    for image in collection.images:
        place = made / "JPEGImages" / files[image.key]
        _put_image(image, target, place)
        try:
            xml = write_voc(replace(image, path=place))
        except ValueError as error:
            raise _cannot_write(image, error) from error
        _write_file(made / "Annotations" / f"{place.stem}.xml", xml)
    for split, keys in collection.splits.items():
        lines = "".join(f"{Path(files[key]).stem}\n" for key in keys)
        _write_file(made / "ImageSets" / "Main" / f"{_checked_split(split)}.txt", lines.encode())
    if target.images == "reference":
        return (f"the images are not in it: put them into {target.place / 'JPEGImages'}",)
    return ()


def _write_yolo(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    split_of, left_out = _one_split_each(collection)
    files = {
        key: f"images/{_checked_split(split_of[key])}/{name}"
        for key, name in _files_of(collection.images).items()
    }
    class_names = collection.class_names or tuple(sorted(classes_of(collection.images)))
    numbers = {name: number for number, name in enumerate(class_names)}
    objects = [found for image in collection.images for found in image.objects]
    labels = Labels(class_names, _num_landmarks(objects), num_values=3)
    for image in collection.images:
        place = made / files[image.key]
        _put_image(image, target, place)
        width_px, height_px = image.width_px or 0, image.height_px or 0
        try:
            if not width_px * height_px:
                raise ValueError("its size is not known, and YOLO's numbers are parts of it")
            lines = [
                label_line(found, numbers[found.class_name], labels, width_px, height_px)
                for found in image.objects
                if found.box_xyxy_px is not None
            ]
        except ValueError as error:
            raise _cannot_write(image, error) from error
        text = "".join(f"{line}\n" for line in lines)
        _write_file(made / "labels" / place.parent.name / f"{place.stem}.txt", text.encode())
    places = {split: f"images/{split}" for split in split_of.values()}
    data = write_yolo_yaml(
        class_names, places, num_landmarks=labels.num_landmarks, num_values=labels.num_values
    )
    _write_file(made / "data.yaml", data)
    why = "some of its images are in another one"
    return tuple(f"split {split!r} is left out: {why}" for split in left_out)


def _write_list(collection: Collection, target: Target, made: Path) -> tuple[str, ...]:
    """Write a list that names images from its own folder, with "/"."""
    files = {} if target.is_file else _files_of(collection.images)
    folder = os.path.realpath(target.place.parent)

    def path_of(image: AnnotatedImage) -> str:
        if files:
            return f"images/{files[image.key]}"
        # So that ".." leads where it seems to; a link itself keeps its name.
        path = os.path.join(os.path.realpath(image.path.parent), image.path.name)
        return os.path.relpath(path, folder)

    for image in collection.images if files else ():
        _put_image(image, target, made / path_of(image))
    images = collection.images
    notes: tuple[str, ...] = ()
    if target.form == "imglab":
        data = write_imglab(images, name_of=path_of)
    elif target.form == "landmarks":
        data = write_landmark_list(images, target.columns, name_of=path_of)
        notes = (f"columns: {target.columns}",)
    else:
        classed = ((image, classes_of([image])) for image in images)
        data = write_image_list(
            (path_of(i), names.pop()) for i, names in classed if len(names) == 1
        )
    _write_file(made if target.is_file else made / _LIST_NAMES[target.form], data)
    return notes


def landmark_columns(collection: Collection) -> LandmarkColumns:
    """Return columns that hold what all objects of a collection have."""
    objects = [found for image in collection.images for found in image.objects]
    first = objects[0].extra if objects else {}
    named = [name for name in first if all(name in found.extra for found in objects)]
    is_classed = bool(objects) and all(found.class_name for found in objects)
    return LandmarkColumns(
        num_landmarks=_num_landmarks(objects),
        has_box=any(found.box_xyxy_px is not None for found in objects),
        classes=(*((CLASS_COLUMN,) * is_classed), *(n for n in named if n != CLASS_COLUMN)),
    )


def _num_landmarks(objects: Sequence[AnnotatedObject]) -> int:
    counts = sorted({len(found.landmarks_xy_px) for found in objects} - {0})
    if len(counts) > 1:
        raise StoreError(
            f"some objects have {counts[0]} landmarks and some {counts[-1]}: this form has one "
            "number for all."
        )
    return counts[0] if counts else 0


def _cannot_write(image: AnnotatedImage, error: Exception) -> StoreError:
    return StoreError(f"{image.source or image.path} cannot be written: {error}.")


def _write_file(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _put_image(image: AnnotatedImage, target: Target, place: Path) -> None:
    """Copy an image, or make a link to it."""
    if target.images == "reference":
        return
    source = Path(os.path.realpath(image.path))
    if not os.path.isfile(source):
        raise StoreError(
            f"{image.source or image.key}: its image {image.path} is not there, or is no file. "
            "With images='reference' (--images reference) none is needed."
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    if target.images == "link":
        place.symlink_to(source)
        return
    with open_file(source) as file:
        if not is_image(file.read(_MAGIC_BYTES)):
            raise StoreError(
                f"{image.source or image.key}: {image.path} is not an image by its first bytes, "
                "and is not copied."
            )
    shutil.copyfile(source, place)


def _files_of(images: Sequence[AnnotatedImage]) -> dict[str, str]:
    """Return a file name for each key; none leads out of its folder."""
    parts = {image.key: _parts(image) for image in images}
    first = -1 if len({of[-1].casefold() for of in parts.values()}) == len(images) else 0
    names: dict[str, str] = {}
    taken: dict[str, AnnotatedImage] = {}
    for image in images:
        name = "_".join(parts[image.key][first:])
        is_plain = name.isprintable() and name == name.strip() and not set(name) & set("/\\")
        is_long = len(os.fsencode(name)) > _MAX_NAME_BYTES
        if not name.strip("._ ") or name[0] == "." or not is_plain or is_long:
            raise StoreError(
                f"{image.source}: {image.key[:80]!r} is no name that a file could be given."
            )
        # On some systems Cat.jpg is cat.jpg: there the second would take the place of the first.
        other = taken.setdefault(name.casefold(), image)
        if other is not image:
            raise StoreError(
                f"{other.path} and {image.path} would both be called {name!r}: rename one of them."
            )
        suffix = image.path.suffix  # by which folders are listed
        if suffix.lower() not in IMAGE_SUFFIXES:
            known = ", ".join(IMAGE_SUFFIXES)
            raise StoreError(f"{image.source}: {image.path} has no suffix of an image ({known}).")
        names[image.key] = name + suffix
    return names


def _parts(image: AnnotatedImage) -> list[str]:
    stem, suffix = os.path.splitext(image.key)
    key = stem if suffix.lower() in IMAGE_SUFFIXES else image.key
    return [part for part in key.split("/") if part not in ("", ".", "..")] or [""]


def _checked_split(split: str) -> str:
    is_plain = split.isprintable() and not set(split) & set("/\\ ")
    if not split or not is_plain or split[0] == "." or len(split) > 100:
        raise StoreError(f"{split!r} is no name for the files of a split.")
    return split


def _one_split_each(collection: Collection) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the split of each image by its key, and the splits that have to be left out."""
    split_of: dict[str, str] = {}
    left_out = []
    usual = [name for name in ("train", "val", "test") if name in collection.splits]
    for split in dict.fromkeys((*usual, *collection.splits)):
        keys = collection.splits[split]
        if any(key in split_of for key in keys):
            left_out.append(split)
        else:
            split_of |= dict.fromkeys(keys, split)
    rest = "rest" if split_of else "train"
    return {i.key: split_of.get(i.key, rest) for i in collection.images}, tuple(left_out)
