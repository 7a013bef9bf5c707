# SPDX-License-Identifier: Apache-2.0
"""Which files below a folder are images, and which of those can be decoded."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from penstock.cli.reasons import reason_of
from penstock.errors import ConfigError
from penstock.images import decode_image
from penstock.images.decode import check_image
from penstock.opening import read_file
from penstock.stores.folder.listing import IMAGE_SUFFIXES, is_system_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

__all__ = [
    "BrokenFile",
    "count_pixels",
    "find_images",
    "iter_files",
    "iter_image_paths",
    "read_image",
    "sort_out_broken",
]


@dataclass(frozen=True, slots=True)
class BrokenFile:
    """A file that cannot be decoded.

    Attributes:
        path: Where it lies.
        reason: What the decoder says of it.
    """

    path: Path
    reason: str


def iter_files(folder: Path) -> Iterator[str]:
    """Yield the files below a folder, in no particular order.

    Links to folders are followed, as ImageFolder does it; no folder is entered twice, and hidden
    and system folders are not. Broken links and pipes are files, too: they may have an
    image's name.

    Raises:
        ConfigError: there is no such folder, or one in it cannot be listed.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}. Name a folder with images in it.")
    entered = set()
    for place, subfolders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        status = os.stat(place)
        if (identity := (status.st_dev, status.st_ino)) in entered:
            subfolders.clear()
            continue
        entered.add(identity)
        # Sorted: which of two links to one folder gives the paths is always the same.
        subfolders[:] = sorted(name for name in subfolders if not is_system_folder(name))
        yield from (os.path.join(place, name) for name in names)


def iter_image_paths(folder: Path) -> Iterator[str]:
    """Yield the files below a folder that have an image's extension; see `iter_files`."""
    return (path for path in iter_files(folder) if path.lower().endswith(IMAGE_SUFFIXES))


def _cannot_list(error: OSError) -> NoReturn:
    raise ConfigError(
        f"cannot list {error.filename}: {error.strerror}. Its images would be passed over; allow "
        "it to be read, or name another folder."
    ) from error


def find_images(folder: Path) -> list[Path]:
    """Return the image files below a folder, known by their extension, in order of their paths.

    Raises:
        ConfigError: there is no such folder, one in it cannot be listed, or no image is in it.
    """
    paths = sorted(map(Path, iter_image_paths(folder)))
    if not paths:
        raise no_image_in(folder)
    return paths


def no_image_in(folder: Path, passed_over: str = "") -> ConfigError:
    """Return the error that says so, and what else is there, for the caller to raise."""
    known = ", ".join(IMAGE_SUFFIXES)
    also = f" {passed_over}." if passed_over else ""
    return ConfigError(
        f"no image in {folder} or below it. Looked for files ending in {known}.{also}"
    )


def sort_out_broken(paths: Sequence[Path], num_threads: int) -> tuple[list[Path], list[BrokenFile]]:
    """Decode every file once; return those that can be decoded, and the others with the reasons.

    Besides, it brings the files into the page cache, so that no loader pays for being the first.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        reasons = list(pool.map(_reason_not_to_read, paths))
    pairs = list(zip(paths, reasons, strict=True))
    good = [path for path, reason in pairs if reason is None]
    return good, [BrokenFile(path, reason) for path, reason in pairs if reason is not None]


def _reason_not_to_read(path: Path) -> str | None:
    try:
        count_pixels(path)
    except Exception as error:  # over damaged data Pillow raises nearly anything
        return reason_of(error)
    return None


def count_pixels(path: Path | str) -> int:
    """Decode a file, strictly, and return the number of its pixels; see `check_image`.

    Raises:
        ValueError: the file is damaged, too large, empty, or in no form that the decoders know.
        OSError: it cannot be read, or is damaged.
        Exception: nearly any, from Pillow: damaged data lead it astray.
    """
    return check_image(read_file(path))


def read_image(path: Path | str) -> npt.NDArray[np.uint8]:
    """Return an image file's pixels, shape (height, width, 3), RGB.

    Raises:
        ValueError: the file is damaged, or in no form that the decoders know.
        OSError: it cannot be read.
    """
    return decode_image(read_file(path))
