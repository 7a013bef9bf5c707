# SPDX-License-Identifier: Apache-2.0
"""Paths of images as lists of them have it: of any system, from the list's own folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["folder_of", "key_of", "listed_path"]

_DRIVE: Final = re.compile(r"\A[A-Za-z]:(?=/)")


def folder_of(annotations: str | Path) -> Path:
    """Return the folder that images are expected in: the one given, or that of a file."""
    path = Path(annotations)
    return path if path.is_dir() else path.parent


def listed_path(text: str, root: str | Path) -> Path:
    r"""Return the file that a list means.

    Args:
        text: As the list has it; backslashes separate folders.
        root: The folder that relative paths start from.

    Raises:
        ValueError: it is no path.

    Example:
        >>> listed_path("faces\\1.jpg", "/data"), listed_path("/photos/1.jpg", "/data")
        (PosixPath('/data/faces/1.jpg'), PosixPath('/photos/1.jpg'))
    """
    if "\0" in text:
        raise ValueError(f"{text[:80]!r} is no path: it has a null character")
    return Path(root) / text.replace("\\", "/")


def key_of(text: str) -> str:
    r"""Return what an image is called: its path in the list, with "/".

    Example:
        >>> key_of("faces\\1.jpg"), key_of("./1.jpg"), key_of("C:\\faces\\1.jpg")
        ('faces/1.jpg', '1.jpg', 'faces/1.jpg')
    """
    path = _DRIVE.sub("", text.replace("\\", "/"))
    return "/".join(part for part in path.split("/") if part not in ("", "."))
