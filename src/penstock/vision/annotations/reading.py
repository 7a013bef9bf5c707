# SPDX-License-Identifier: Apache-2.0
"""What all annotation formats share: numbers, paths, lines of text, XML text, sizes of images."""

from __future__ import annotations

import codecs
import contextlib
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from penstock.errors import StoreError
from penstock.images import read_header
from penstock.opening import MAX_ANNOTATION_BYTES, open_file, read_annotation, read_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.images.headers import ImageHeader

MAX_LANDMARK_NAMES: Final = 2_000  # of all objects together; faces have 68 to 478
MAX_LANDMARKS: Final = 10_000  # of an object, without names: meshes have more than sketches
MAX_ATTRIBUTES: Final = 1_000  # that are taken because they are there, and not asked for

# In px. What is larger is damage; and float32, which training uses, would make infinity of some.
_FARTHEST: Final = 1e9
_NUM_SHOWN: Final = 40  # characters of a text that is no number


def coordinate(text: str, minus: int = 0) -> float:
    """Return a coordinate in pixels."""
    try:
        number = math.nan if "_" in text else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"is {text.strip()[:_NUM_SHOWN]!r}, not a number")
    if abs(number) > _FARTHEST:
        raise ValueError(f"is {text.strip()[:_NUM_SHOWN]!r}: no image is that large")
    if not minus or number.is_integer():
        return number - minus
    return float(Decimal(text.strip()) - minus)


def coordinate_text(number: float, plus: int = 0) -> str:
    """Return the text that `coordinate` reads as `number`; "nan" for NaN."""
    if math.isnan(number):
        return "nan"
    if float(number).is_integer():
        return str(int(number) + plus)
    return f"{Decimal(repr(float(number))) + plus:f}"


def whole_number(text: str) -> int | None:
    """Return a whole number; None if the text is none, or has more digits than any that counts."""
    text = text.strip()
    digits = text[1:] if text[:1] in ("-", "+") else text
    is_whole = digits.isascii() and digits.isdigit() and len(digits) <= 18
    return int(text) if is_whole else None


def whole_value(text: str) -> int | None:
    """Return a whole number, also where a tool wrote it with a point; None for a fraction."""
    text = text.strip()
    return whole_number(text.rstrip("0").removesuffix(".") if "." in text else text)


_DRIVE: Final = re.compile(r"\A[A-Za-z]:(?=/)")


def folder_of(annotations: str | Path) -> Path:
    """Return the folder that images are expected in: the one given, or that of a file."""
    path = Path(annotations)
    return path if path.is_dir() else path.parent


def listed_path(text: str, root: str | Path) -> Path:
    """Return the file that a list means."""
    if "\0" in text:
        raise ValueError(f"{text[:80]!r} is no path: it has a null character")
    return Path(root) / text.replace("\\", "/")


def key_of(text: str) -> str:
    """Return what an image is called: its path in the list, with "/"."""
    path = _DRIVE.sub("", text.replace("\\", "/"))
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before; None if each is another."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


_OTHER_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path, max_bytes: int = MAX_ANNOTATION_BYTES) -> str:
    """Return a file in UTF-8, without its byte order mark."""
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
    """Yield the lines of a file with their numbers, from 1; empty ones and comments left out."""
    text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


# XML 1.0 has no way to say these, escaped or not; lone surrogates are no characters.
_UNSAYABLE: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")
# Parsers make line feeds of carriage returns, and blanks of all of these in attributes.
_ENTITIES: Final = {"\r": "&#13;", "\n": "&#10;", "\t": "&#9;", '"': "&quot;", "'": "&apos;"}


def xml_escaped(text: str) -> str:
    """Return text as an element or an attribute can hold it."""
    unsayable = _UNSAYABLE.search(text)
    if unsayable:
        raise ValueError(f"{text[:80]!r} has {unsayable[0]!r}, which XML cannot hold")
    return escape(text, _ENTITIES)


def element_line(tag: str, text: str) -> str:
    """Return the line of an element that holds text alone, indented by a tab."""
    return f"\t<{tag}>{xml_escaped(text)}</{tag}>"


# The headers of nearly all JPEG files, thumbnails and colour profiles included, are shorter. Other
# forms may have the orientation behind the pixels.
_HEAD_BYTES: Final = 131_072


def header_of(path: str | Path) -> ImageHeader:
    """Return what an image file says of itself; of a JPEG file mostly the beginning is read."""
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        return read_header(head)
    if head.startswith(b"\xff\xd8\xff"):
        with contextlib.suppress(ValueError):  # its header may be longer
            return read_header(head)
    return read_header(read_file(path))


def upright_size(path: str | Path) -> tuple[int, int]:
    """Return height and width of an image as a viewer shows it; raises as `header_of` does."""
    header = header_of(path)
    return header.upright_height_px, header.upright_width_px
