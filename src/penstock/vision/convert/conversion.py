# SPDX-License-Identifier: Apache-2.0
"""`convert`: annotations of one form, or of several, written in another."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, StoreError
from penstock.stores.folder.links import refuse_outside
from penstock.vision.annotations.reading import folder_of, header_of
from penstock.vision.convert.merging import merge, with_class
from penstock.vision.convert.reading import FORMATS, Collection, Source, read_source
from penstock.vision.convert.writing import (
    Images,
    Target,
    count_losses,
    landmark_columns,
    write_target,
)
from penstock.vision.datasets.rules import BoxCounts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.vision.annotations.lists import LandmarkColumns
    from penstock.vision.annotations.model import AnnotatedImage
    from penstock.vision.datasets.rules import BadBoxes

__all__ = ["ConvertReport", "convert"]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was written.

    Attributes:
        path: Where it is.
        form: Its form.
        num_images: Images in it.
        num_objects: Objects of the sources, after those that are the same were joined.
        num_joined: Objects that two sources told of.
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


def convert(
    src: str | Path | Source | Sequence[str | Path | Source],
    dst: str | Path,
    *,
    target_format: str,
    source_format: str | None = None,
    images: Images | None = None,
    strict: bool = False,
    columns: LandmarkColumns | None = None,
    target_origin: int = 1,
    default_class: str = "object",
    bad_boxes: BadBoxes = "keep",
    follow_links: bool = False,
    **options: Any,  # noqa: ANN401
) -> ConvertReport:
    """Read annotations, and write them in another form.

    Several sources become one data set: what they say of the same image file is put together, see
    `merging`. What is at `dst` appears in one step, when it is whole; nothing is ever replaced.

    Args:
        src: Folder or file, or several; a `Source` says its form and options itself.
        dst: A file for lists and imglab whose images stay where they are; else a folder.
        target_format: "voc", "imglab", "yolo", "landmarks" or "image-list".
        source_format: Form of the sources that are no `Source`. None finds it out; text files have
            to be told.
        images: "copy" copies image files into `dst`; "link" makes symbolic links to them;
            "reference" leaves them where they are, and lists name them from the list's folder.
            None is "copy" for VOC and YOLO, so that the folder is a data set, and "reference" for
            the others. YOLO finds labels by the place of images, and has no "reference".
        strict: Whether anything that the form has no place for is an error.
        columns: Of a landmark list that is written; None takes what all objects have.
        target_origin: VOC's number of the first pixel, in what is written.
        default_class: What an object without a class is called in VOC and YOLO. A source all of
            whose objects are called so has no classes.
        bad_boxes: What becomes of boxes that cannot be right, see
            `penstock.vision.datasets.rules`: "keep" leaves them as they are, and what VOC says
            of one column is one column elsewhere; "drop", "fix" and "raise". They are counted
            always.
        follow_links: Whether image files that lie outside of the sources' folders are copied: links
            and names with ".." lead to them. What is copied has to be an image by its first bytes.
        options: See `Source`. Each goes to the sources that have it, unless they say it themselves.

    Returns:
        What was written, and what was lost.

    Raises:
        ConfigError: an argument is none of those allowed; `dst` lies in a source.
        StoreError: a source cannot be read, or files outside of it would be copied without
            `follow_links`; a box is bad and `bad_boxes` forbids it; `dst` is
            there and not empty; two images would have one name; something would be lost, and
            `strict` forbids it. Then nothing is written.
    """
    sources = _sources(src, source_format, options)
    target = _target(Path(dst), target_format, images, target_origin)
    _check_place(target, sources)
    read = [read_source(source, bad_boxes) for source in sources]
    if target.images == "copy" and not follow_links:
        here = os.getcwd()
        paths = (os.path.join(here, image.path) for found, _ in read for image in found.images)
        roots = [Path(s.options.get("root") or folder_of(s.path)) for s in sources]
        refuse_outside(roots, paths)
    merged = merge([collection for collection, _ in read], default_class)
    collection, notes = _completed(merged.collection, target, default_class)
    if target.form == "landmarks":
        usual = landmark_columns(collection)
        if columns is not None and columns.num_landmarks is None:
            columns = replace(columns, num_landmarks=usual.num_landmarks)
        target = replace(target, columns=columns or usual)
    losses = count_losses(collection, target)
    if strict and losses:
        listed = ", ".join(f"{name} ({count:,})" for name, count in losses.items())
        raise StoreError(f"{target.form} has no place for some of it: {listed}.")
    notes = (*merged.notes, *notes, *_write(collection, target))
    counts = [asdict(counts) for _, counts in read]
    return ConvertReport(
        target.place,
        target.form,
        len(collection.images),
        sum(len(image.objects) for image in collection.images),
        merged.num_joined,
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
    unknown = [name for name in options if not any(source.takes(name) for source in sources)]
    if unknown:
        raise ConfigError(f"no source has an option {unknown[0]!r}.")
    return [
        replace(one, options={**{n: v for n, v in options.items() if one.takes(n)}, **one.options})
        for one in sources
    ]


def _target(dst: Path, form: str, images: Images | None, origin: int) -> Target:
    if form not in FORMATS:
        raise ConfigError(f"target_format is one of {', '.join(FORMATS)}, not {form!r}.")
    if images not in (None, "reference", "link", "copy"):
        raise ConfigError(f"images is 'reference', 'link' or 'copy', not {images!r}.")
    if form == "yolo" and images == "reference":
        raise ConfigError(
            "YOLO finds labels by the place of the images, so these have to be in the folder: "
            "images='link' or 'copy'."
        )
    if origin not in (0, 1):
        raise ConfigError(f"target_origin is 0 or 1, not {origin!r}.")
    usual: Images = "copy" if form in ("voc", "yolo") else "reference"
    return Target(form, dst, images or usual, landmark_columns(Collection(())), origin)


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
    collection: Collection, target: Target, default_class: str
) -> tuple[Collection, tuple[str, ...]]:
    """Return a collection with the sizes and classes that the form needs."""
    images = tuple(_with_size(image, target) for image in collection.images)
    names = collection.class_names
    notes: tuple[str, ...] = ()
    nameless = sum(not found.class_name for image in images for found in image.objects)
    if nameless and target.form in ("voc", "yolo"):
        images = with_class(images, "", default_class)
        notes = (f"{nameless:,} objects had no class, and are called {default_class!r}",)
        if names and default_class not in names:
            names = (*names, default_class)
    return replace(collection, images=images, class_names=names), notes


def _with_size(image: AnnotatedImage, target: Target) -> AnnotatedImage:
    """Return an image with its size, from its header where the annotation does not say.

    Lists have no size, and YOLO's numbers are of the image as it is seen: there an annotation of
    another frame would come to mean another thing.
    """
    if target.form == "image-list" or not os.path.isfile(image.path):
        return image
    said = image.width_px, image.height_px
    if None not in said and target.form in ("voc", "imglab"):
        return image
    try:
        header = header_of(image.path)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read the size of {image.path}: {error}.") from error
    seen = header.upright_width_px, header.upright_height_px
    if None in said:
        return replace(image, width_px=seen[0], height_px=seen[1])
    is_turned = header.orientation >= 5 and said == seen[::-1]
    if is_turned or (target.form == "landmarks" and said != seen):
        raise StoreError(
            f"{image.source} is of {said[0]} x {said[1]} px (width x height), and {image.path} is "
            f"{seen[0]} x {seen[1]} as it is seen: {target.form} cannot say so."
        )
    return image


def _write(collection: Collection, target: Target) -> tuple[str, ...]:
    """Write everything beside its place, and then put it there."""
    place = target.place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name[:50]}.", dir=place.parent))
    except OSError as error:
        raise StoreError(f"cannot write {place}: {error.strerror}.") from error
    try:
        made = work / "made"
        notes = write_target(collection, target, made)
        _put(made, place)
    except ValueError as error:
        raise StoreError(f"cannot write {place}: {error}.") from error
    except OSError as error:
        raise StoreError(f"cannot write {place}: {error.strerror} ({error.filename}).") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return notes


def _put(made: Path, place: Path) -> None:
    """Give what was made its name, unless something has come there in the meantime."""
    if made.is_dir():
        os.rename(made, place)  # an empty folder gives way, one with anything in it does not
        return
    try:
        os.link(made, place)  # unlike a rename it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from None
        os.rename(made, place)
