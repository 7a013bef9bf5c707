# SPDX-License-Identifier: Apache-2.0
"""VOC's annotations compared with the images beside them: which lack one, which cannot be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.decoding import BrokenFile
from penstock.cli.reasons import reason_of
from penstock.stores.folder.listing import IMAGE_SUFFIXES
from penstock.stores.folder.voc import looks_like_voc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["broken_annotations", "voc_folders"]

_IMAGES: Final = "JPEGImages"


def voc_folders(folder: Path, images: Iterable[str]) -> list[Path]:
    """Return the VOC folders among a folder and those below it that have images.

    Args:
        folder: Where images were looked for.
        images: Paths of all that were found there.
    """
    above = {os.path.dirname(path) for path in images}
    roots = {Path(place).parent for place in above if os.path.basename(place) == _IMAGES}
    return sorted(root for root in roots | {folder} if looks_like_voc(root))


def broken_annotations(root: Path) -> tuple[int, list[BrokenFile]]:
    """Return how many annotations a VOC folder has, and what is wrong with them.

    An annotation that cannot be read is broken; so is the image that one is of, and that is not
    there.

    Raises:
        StoreError: the folder cannot be listed.
    """
    files = sorted(_below(root / "Annotations", (".xml",)))
    stems = {os.path.splitext(name)[0] for name in _below(root / _IMAGES, IMAGE_SUFFIXES)}
    broken = [found for name in files for found in _wrong(root, name, stems)]
    return len(files), broken


def _below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yield paths of files below a folder, from there on; hidden ones are left out."""
    from penstock.stores.folder.listing import cannot_list

    def refuse(error: OSError) -> None:
        raise cannot_list(error) from error

    for place, _, names in os.walk(folder, onerror=refuse, followlinks=True):
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield os.path.relpath(os.path.join(place, name), folder)


def _wrong(root: Path, name: str, stems: set[str]) -> Iterator[BrokenFile]:
    from penstock.vision.annotations.voc import read_voc, voc_root

    file, stem = root / "Annotations" / name, os.path.splitext(name)[0]
    said = ""
    try:
        data = file.read_bytes()
        read_voc(data, path=root / _IMAGES / stem, key=stem)
        said = (voc_root(data).findtext("filename") or "").strip().replace("\\", "/")
    except (OSError, ValueError) as error:
        yield BrokenFile(file, reason_of(error))
    by_name = os.path.join(os.path.dirname(stem), said.rpartition("/")[2])
    if stem in stems or (said and os.path.lexists(root / _IMAGES / by_name)):
        return  # a link that leads nowhere is an image that cannot be decoded
    suffix = os.path.splitext(said)[1] or ".jpg"
    image = root / _IMAGES / f"{stem}{suffix}"
    yield BrokenFile(image, f"is not there, and is annotated in {file}")
