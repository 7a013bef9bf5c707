# SPDX-License-Identifier: Apache-2.0
"""Which images that sources tell of are one.

Within a source, an image is what has one path: two links to one file are two images, with names and
annotations of their own. Between sources, it is the file that counts, whatever path leads to it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.vision.annotations.model import AnnotatedImage

__all__ = ["Listed", "aliases", "check_sizes", "copies", "listed_once", "matches"]


@dataclass(slots=True)
class Listed:
    """An image of a source, or of several.

    Attributes:
        image: What is said of it.
        path: Where it is listed, absolute; links are not followed.
        file: The file behind all links.
        keys: What its source calls it.
        sources: The annotations that were read for it.
        said: The objects that the first of them has.
    """

    image: AnnotatedImage
    path: str
    file: str
    keys: list[str] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    said: str = ""

    def add(self, other: AnnotatedImage) -> bool:
        """Add the objects of another entry of this image; return whether it has the same ones."""
        check_sizes(self.image, other)
        self.keys.append(other.key)
        if repr(other.objects) == self.said:
            return True
        if not other.source or other.source not in self.sources:
            self.sources.add(other.source)
            self.image = replace(self.image, objects=self.image.objects + other.objects)
        return False


def listed_once(images: Iterable[AnnotatedImage]) -> tuple[list[Listed], list[Listed]]:
    """Return the images of one source, each once, and the image of each of its samples.

    An image that comes again with the same objects is another sample of it.

    Raises:
        StoreError: it is given two sizes.
    """
    by_path: dict[str, Listed] = {}
    by_key: dict[tuple[str, str], Listed] = {}
    samples: list[Listed] = []
    for image in images:
        path = os.path.abspath(image.path)
        if path in by_path:
            if by_path[path].add(image):
                samples.append(by_path[path])
            continue
        file = os.path.realpath(path)
        one = by_key.get((file, image.key))
        if one is not None and repr(one.image.objects) == repr(image.objects):  # a link to it
            by_path[path] = one
            continue
        found = Listed(image, path, file, [image.key], {image.source}, repr(image.objects))
        by_path[path] = by_key[file, image.key] = found
        samples.append(found)
    return list({id(found): found for found in by_path.values()}.values()), samples


def aliases(images: Sequence[Listed]) -> list[tuple[str, str]]:
    """Return pairs of paths that lead to one file, and are two images of one source."""
    first: dict[str, Listed] = {}
    pairs = []
    for image in images:
        other = first.setdefault(image.file, image)
        if other is not image:
            pairs.append((other.path, image.path))
    return pairs


def matches(found: Sequence[Listed], images: Sequence[Listed]) -> list[Listed | None]:
    """Return which of those `found` each image of another source is; None: it is new.

    No two images are the same of those found. The one of equal path is, or else the next of its
    file.
    """
    by_path = {one.path: one for one in found}
    same = [by_path.get(image.path) for image in images]
    taken = {id(one) for one in same}
    by_file: dict[str, list[Listed]] = {}
    for one in found:
        if id(one) not in taken:
            by_file.setdefault(one.file, []).append(one)
    for number, image in enumerate(images):
        left = by_file.get(image.file)
        if same[number] is None and left:
            same[number] = left.pop(0)
    return same


def copies(found: Sequence[Listed], images: Sequence[Listed]) -> list[tuple[str, str]]:
    """Return pairs of paths of equal file name, of files that are not the same."""
    before, after = _by_file(found), _by_file(images)
    file_of = {os.path.basename(file): file for file in before}
    pairs = []
    for file in after.keys() - before.keys():
        other = file_of.get(os.path.basename(file))
        if other is not None and other not in after:
            pairs.append((str(before[other].image.path), str(after[file].image.path)))
    return sorted(pairs)


def _by_file(images: Iterable[Listed]) -> Mapping[str, Listed]:
    return {one.file: one for one in images}


def check_sizes(one: AnnotatedImage, other: AnnotatedImage) -> None:
    """Raise StoreError if an image is given two sizes."""
    sizes = [(image.width_px, image.height_px) for image in (one, other)]
    if None not in (*sizes[0], *sizes[1]) and sizes[0] != sizes[1]:
        (w, h), (other_w, other_h) = sizes
        raise StoreError(
            f"{one.source} gives {one.path} {w} x {h} px (width x height), and {other.source} "
            f"{other_w} x {other_h}: their boxes are not of one frame."
        )
