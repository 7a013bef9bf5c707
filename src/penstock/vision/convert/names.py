# SPDX-License-Identifier: Apache-2.0
"""What images are called in a data set that is written: names that stay in their folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from penstock.errors import StoreError
from penstock.stores.folder.listing import IMAGE_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vision.annotations.model import AnnotatedImage

__all__ = ["names_of"]

_MAX_NAME_BYTES: Final = 200  # Linux takes 255, with a suffix


def names_of(images: Sequence[AnnotatedImage]) -> dict[str, str]:
    """Return a file name without suffix for each key.

    That is the last part of the key, if those of all images differ; else the folders are before it,
    joined by "_", for all of them. A ".." is left out: no name leads anywhere.

    Raises:
        StoreError: two images would have one name, or a key is none that a file can have.
    """
    stems = {_parts(image)[-1].casefold() for image in images}
    first = -1 if len(stems) == len(images) else 0
    names: dict[str, str] = {}
    taken: dict[str, AnnotatedImage] = {}
    for image in images:
        name = _checked("_".join(_parts(image)[first:]), image)
        # On some systems Cat.jpg is cat.jpg: there the second would take the place of the first.
        folded = name.casefold()
        if folded in taken:
            raise StoreError(
                f"{taken[folded].path} and {image.path} would both be called {name!r}: rename one "
                "of them."
            )
        taken[folded] = image
        names[image.key] = name
    return names


def _parts(image: AnnotatedImage) -> list[str]:
    stem, suffix = os.path.splitext(image.key)
    key = stem if suffix.lower() in IMAGE_SUFFIXES else image.key
    return [part for part in key.split("/") if part not in ("", ".", "..")] or [""]


def _checked(name: str, image: AnnotatedImage) -> str:
    is_bad = not name.strip("._ ") or name[0] == "." or "\\" in name or "/" in name
    if is_bad or not name.isprintable() or name != name.strip():
        raise StoreError(f"{image.source}: {image.key!r} is no name that a file could be given.")
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise StoreError(f"{image.source}: {image.key[:80]!r} is too long a name for a file.")
    return name
