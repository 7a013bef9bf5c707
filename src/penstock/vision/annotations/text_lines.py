# SPDX-License-Identifier: Apache-2.0
"""Lines of a text file that somebody's tool, on some system, has written."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

from penstock.errors import StoreError
from penstock.opening import MAX_ANNOTATION_BYTES, read_annotation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["numbered_lines", "read_text"]

_OTHER_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path, max_bytes: int = MAX_ANNOTATION_BYTES) -> str:
    """Return a file in UTF-8, without its byte order mark.

    Raises:
        StoreError: it cannot be read, is larger than `max_bytes`, or is in another encoding.
    """
    data = read_annotation(path, max_bytes)
    if data.startswith(_OTHER_MARKS):
        raise StoreError(f"cannot read {path}: it is in UTF-16; convert it to UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise StoreError(
            f"cannot read {path}, line {line}: {error}; convert it to UTF-8."
        ) from error


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield the lines of a file with their numbers, from 1; empty ones and comments left out.

    A line ends with \n, \r\n or \r; a comment begins with "#". Blanks at both ends are cut off.

    Raises:
        StoreError: see `read_text`.
    """
    text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped
