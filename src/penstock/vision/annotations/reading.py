# SPDX-License-Identifier: Apache-2.0
"""What all annotation formats share: numbers, paths, lines of text, XML, sizes of images."""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from defusedxml.common import DTDForbidden
from defusedxml.ElementTree import DefusedXMLParser

from penstock.errors import StoreError
from penstock.images import read_header
from penstock.opening import MAX_ANNOTATION_BYTES, open_file, read_annotation, read_file
from penstock.stores.folder.listing import is_system_folder, raise_unlisted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.images.headers import ImageHeader

MAX_LANDMARK_NAMES: Final = 2_000  # of all objects together; faces have 68 to 478
MAX_LANDMARKS: Final = 10_000  # of an object, without names: meshes have more than sketches
MAX_ATTRIBUTES: Final = 1_000  # that are taken because they are there, and not asked for

# In px. What is larger is damage; and float32, which training uses, would make infinity of some.
_FARTHEST: Final = 1e9
_NUM_SHOWN: Final = 40  # characters of a text that is no number


def coordinate(text: str, where: str, minus: int = 0) -> float:
    """Return a coordinate in pixels; errors call it `where`."""
    try:
        number = math.nan if "_" in text else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} is {text.strip()[:_NUM_SHOWN]!r}, not a number")
    if abs(number) > _FARTHEST:
        raise ValueError(f"{where} is {text.strip()[:_NUM_SHOWN]!r}: no image is that large")
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


def length_px(text: str | None, where: str) -> int | None:
    """Return the width or height of an image in pixels; None where it is missing or 0."""
    length = 0 if not (text or "").strip() else whole_value(text or "")
    if length is None or length < 0:
        raise ValueError(
            f"{where} is {(text or '').strip()[:_NUM_SHOWN]!r}, not a number of pixels"
        )
    return length or None


# "Unspecified" is what old tools write into fields that were not filled in.
_FLAGS: Final = {
    "": None, "unspecified": None, "0": False, "false": False, "1": True, "true": True,
}  # fmt: skip


def flag(text: str | None, where: str) -> bool | None:
    """Return a flag; None where it is missing, or not filled in."""
    said = (text or "").strip().lower()
    if said not in _FLAGS:
        raise ValueError(f"{where} is {said[:_NUM_SHOWN]!r}, not 0 or 1")
    return _FLAGS[said]


def folder_of(annotations: str | Path) -> Path:
    """Return the folder that images are expected in: the one given, or that of a file."""
    path = Path(annotations)
    return path if path.is_dir() else path.parent


def listed_path(text: str, root: str | Path) -> Path:
    """Return the file that a list means."""
    if "\0" in text:
        raise ValueError(f"{text[:80]!r} is no path: it has a null character")
    return Path(root) / text.replace("\\", "/")


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the sorted paths of files below a folder, from there on, with "/"."""
    found: list[str] = []
    for above, subfolders, names in os.walk(folder, onerror=raise_unlisted):
        subfolders[:] = (name for name in subfolders if not is_system_folder(name))
        # "._cat.xml" beside cat.xml is what macOS leaves on foreign disks.
        wanted = (n for n in names if n.lower().endswith(suffixes) and not n.startswith("."))
        found += (os.path.relpath(os.path.join(above, name), folder) for name in wanted)
    return sorted(path.replace(os.sep, "/") for path in found)


_DRIVE: Final = re.compile(r"\A[A-Za-z]:(?=/)")


def key_of(text: str) -> str:
    """Return what an image is called: its path in the list, with "/"."""
    path = _DRIVE.sub("", text.replace("\\", "/"))
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def first_repeated(names: Iterable[str]) -> str | None:
    """Return a name that is there twice; None if each is another."""
    counts = Counter(names)
    return next((name for name, count in counts.items() if count > 1), None)


@contextlib.contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Make a ValueError in the block the StoreError that says what cannot be read."""
    try:
        yield
    except ValueError as error:
        raise StoreError(f"cannot read {place}: {error}.") from error


def read_text(path: Path, max_bytes: int = MAX_ANNOTATION_BYTES) -> str:
    """Return a file in UTF-8, without its byte order mark."""
    data = read_annotation(path, max_bytes)
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


_DECLARED: Final = re.compile(rb"""\A\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w.:-]{1,40})["']""")
# Those whose ASCII is ASCII, so that the declaration can be read: what annotation tools write.
_ENCODINGS: Final = frozenset(
    (
        "utf-8", "ascii", "iso8859-1", "iso8859-15", "cp1250", "cp1251", "cp1252",
        "gbk", "gb2312", "gb18030", "big5", "shift_jis", "cp932", "euc_jp", "euc_kr",
    )
)  # fmt: skip
_DEEPEST: Final = 64  # elements in one another; VOC needs 5
# XML 1.0 has no way to say these, escaped or not; lone surrogates are no characters.
_UNSAYABLE: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def xml_text(data: bytes) -> str:
    """Return an XML file as text, in the encoding that it declares; UTF-8 if it declares none."""
    declared = _DECLARED.match(data[:512].removeprefix(codecs.BOM_UTF8))
    name = declared[1].decode("ascii", "replace") if declared else "utf-8"
    try:
        known = codecs.lookup(name).name
    except LookupError:
        known = ""
    if known not in _ENCODINGS:
        raise ValueError(f"its encoding ({name}) is not supported; convert it to UTF-8")
    return data.decode(known)


def parse_xml(data: bytes | str, tag: str) -> ElementTree.Element:
    """Return the root element, a `tag`, of a document of unknown origin.

    It is parsed without document types, and therefore without entities: nothing in it can name
    another file, or grow when it is read.

    Raises:
        ValueError: it is no XML, it has a DOCTYPE, it is too deep, or its root is another element.

    Example:
        >>> parse_xml("<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><a>&x;</a>", "a")
        Traceback (most recent call last):
        ValueError: it has a DOCTYPE, which annotations have no use for; it is not read...
    """
    parser = DefusedXMLParser(target=_Builder(), forbid_dtd=True)
    try:
        parser.feed(data if isinstance(data, str) else xml_text(data))
        root: ElementTree.Element = parser.close()
    except DTDForbidden as error:
        raise ValueError(
            "it has a DOCTYPE, which annotations have no use for; it is not read, as entities in "
            "it could name files or fill the memory"
        ) from error
    except ElementTree.ParseError as error:
        raise ValueError(f"not well-formed XML: {error}") from error
    if root.tag != tag:
        raise ValueError(f"the root element is <{root.tag}>, not <{tag}>; VOC takes its folder")
    return root


class _Builder:
    """Builds the tree, to a depth at which recursion is safe, and leaves namespaces out."""

    def __init__(self) -> None:
        builder = ElementTree.TreeBuilder()
        self._start, self._end, self._depth = builder.start, builder.end, 0
        self.data, self.close = builder.data, builder.close

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} elements in one another")
        self._start(tag.rpartition("}")[2], attributes)

    def end(self, tag: str) -> None:
        self._depth -= 1
        self._end(tag.rpartition("}")[2])


def add_element(
    parent: ElementTree.Element,
    tag: str,
    text: str = "",
    attributes: Mapping[str, str] = MappingProxyType({}),
) -> ElementTree.Element:
    """Add an element; ValueError for text that XML cannot hold."""
    for value in (text, *attributes.values()):
        unsayable = _UNSAYABLE.search(value)
        if unsayable:
            raise ValueError(f"{value[:80]!r} has {unsayable[0]!r}, which XML cannot hold")
    child = ElementTree.SubElement(parent, tag, dict(attributes))
    child.text = text
    return child


def xml_bytes(root: ElementTree.Element) -> bytes:
    """Return a document in UTF-8, indented."""
    ElementTree.indent(root)
    data: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return data


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
