# SPDX-License-Identifier: Apache-2.0
"""Files with images, and stores, that commands pass over because of their suffix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.lines import say
from penstock.opening import open_file
from penstock.stores.folder.listing import IMAGE_SUFFIXES, INDEX_NAME, image_suffix

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["is_passed_over", "passed_over_text", "tell_passed_over"]

_UNREAD: Final = (
    ".avif", ".gif", ".heic", ".heif", ".j2k", ".jp2", ".jxl",
    ".arrow", ".feather", ".lmdb", ".mdb", ".parquet", ".tar",
)  # fmt: skip
_NO_IMAGES: Final = (".csv", ".json", ".md", ".py", ".tsv", ".txt", ".xml", ".yaml", ".yml")
_HEAD_BYTES: Final = 16
_NUM_SHOWN: Final = 2  # names of each suffix


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
            return image_suffix(file.read(_HEAD_BYTES) or b"") is not None
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
    if not by_suffix:
        return ""
    parts = []
    for suffix, names in sorted(by_suffix.items(), key=lambda item: (-len(item[1]), item[0])):
        more = ", …" if len(names) > _NUM_SHOWN else ""
        parts.append(f"{len(names):,} {suffix} ({', '.join(names[:_NUM_SHOWN])}{more})")
    count = sum(map(len, by_suffix.values()))
    were = "file was" if count == 1 else "files were"
    return f"{count:,} {were} not looked at: {', '.join(parts)}"


def tell_passed_over(src: str) -> None:
    """Say on stderr which files of a folder are passed over, if SRC is a folder of files."""
    from penstock.cli.decoding import iter_files
    from penstock.cli.sources import is_store, names_a_dataset

    path = Path(src)
    if names_a_dataset(src) or is_store(src) or not path.is_dir() or (path / INDEX_NAME).exists():
        return
    text = passed_over_text(filter(is_passed_over, iter_files(path)), path)
    if text:
        say(text, err=True)
