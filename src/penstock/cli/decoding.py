# SPDX-License-Identifier: Apache-2.0
"""Files below a folder: which are images, which of those can be decoded, which are passed over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from penstock.errors import ConfigError
from penstock.images.decode import check_image
from penstock.lines import say
from penstock.opening import open_file, read_file
from penstock.stores.folder.listing import (
    IMAGE_SUFFIXES,
    INDEX_NAME,
    is_image,
    is_system_folder,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


__all__ = [
    "Broken",
    "count_pixels",
    "is_passed_over",
    "iter_files",
    "no_image_in",
    "passed_over_text",
    "tell_passed_over",
]

_UNREAD: Final = (
    ".avif", ".gif", ".heic", ".heif", ".j2k", ".jp2", ".jxl",
    ".arrow", ".feather", ".lmdb", ".mdb", ".parquet", ".tar",
)  # fmt: skip
_NO_IMAGES: Final = (".csv", ".json", ".md", ".py", ".tsv", ".txt", ".xml", ".yaml", ".yml")
_HEAD_BYTES: Final = 16
_NUM_SHOWN: Final = 2  # names of each suffix


class Broken(NamedTuple):
    """A file or a record that is broken.

    Attributes:
        name: Its path or key; of a store as a whole the address.
        reason: What is wrong with it.
        position: Of a record.
    """

    name: str
    reason: str
    position: int | None = None


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


def _cannot_list(error: OSError) -> NoReturn:
    raise ConfigError(
        f"cannot list {error.filename}: {error.strerror}. Its images would be passed over; allow "
        "it to be read, or name another folder."
    ) from error


def no_image_in(folder: Path, passed_over: str = "") -> ConfigError:
    """Return the error that says so, and what else is there, for the caller to raise."""
    known = ", ".join(IMAGE_SUFFIXES)
    also = f" {passed_over}." if passed_over else ""
    return ConfigError(
        f"no image in {folder} or below it. Looked for files ending in {known}.{also}"
    )


def count_pixels(path: Path | str) -> int:
    """Decode a file, strictly, and return the number of its pixels; see `check_image`.

    Raises:
        ValueError: the file is damaged, too large, empty, or in no form that the decoders know.
        OSError: it cannot be read, or is damaged.
        Exception: nearly any, from Pillow: damaged data lead it astray.
    """
    return check_image(read_file(path))


def is_passed_over(path: str) -> bool:
    """Return whether a file holds an image or is a store, and has no suffix of an image.

    Only files of unknown suffixes are opened, for their first bytes.
    """
    name = os.path.basename(path).lower()
    if name.endswith((*IMAGE_SUFFIXES, *_NO_IMAGES)) or name.startswith(".penstock"):
        return False
    if name.endswith(_UNREAD):
        return True
    try:
        with open_file(path) as file:
            return is_image(file.read(_HEAD_BYTES) or b"")
    except OSError:
        return False


def passed_over_text(paths: Iterable[str], folder: Path) -> str:
    """Return a line that counts files by suffix and names the first of each; "" if there are none.

    Example:
        >>> passed_over_text(["a/1.gif", "a/2.avif", "a/3.gif", "a/4.gif"], Path("a"))
        '4 files were not looked at: 3 .gif (1.gif, 3.gif, …), 1 .avif (2.avif)'
    """
    by_suffix: dict[str, list[str]] = {}
    for path in sorted(paths):
        suffix = os.path.splitext(path)[1].lower() or "without a suffix"
        by_suffix.setdefault(suffix, []).append(os.path.relpath(path, folder))
    parts = []
    for suffix, names in sorted(by_suffix.items(), key=lambda item: (-len(item[1]), item[0])):
        more = ", …" if len(names) > _NUM_SHOWN else ""
        parts.append(f"{len(names):,} {suffix} ({', '.join(names[:_NUM_SHOWN])}{more})")
    count = sum(map(len, by_suffix.values()))
    were = "file was" if count == 1 else "files were"
    return f"{count:,} {were} not looked at: {', '.join(parts)}" if parts else ""


def tell_passed_over(src: str) -> None:
    """Say on stderr which files of a folder are passed over, if SRC is a folder of files."""
    from penstock.cli.sources import is_plain_path

    path = Path(src)
    if is_plain_path(src) and path.is_dir() and not (path / INDEX_NAME).exists():
        text = passed_over_text(filter(is_passed_over, iter_files(path)), path)
        if text:
            say(text, err=True)
