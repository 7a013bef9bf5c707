# SPDX-License-Identifier: Apache-2.0
"""The files of Pascal VOC's folders, one by one: XML, and the lists in `ImageSets/Main`.

Annotations are other people's XML, so they are parsed without document types, and therefore without
entities: nothing in them can name another file, or grow when it is read.
"""

from __future__ import annotations

import codecs
import re
import warnings
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from defusedxml.common import DTDForbidden
from defusedxml.ElementTree import DefusedXMLParser

from penstock.errors import StoreError
from penstock.opening import read_annotation
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

__all__ = ["parse_xml", "stems_of_split", "warn_of_images_alone", "xml_text"]

_DECLARED: Final = re.compile(rb"""\A\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w.:-]{1,40})["']""")
# Those whose ASCII is ASCII, so that the declaration can be read: what annotation tools write.
_ENCODINGS: Final = frozenset(
    (
        "utf-8", "ascii", "iso8859-1", "iso8859-15", "cp1250", "cp1251", "cp1252",
        "gbk", "gb2312", "gb18030", "big5", "shift_jis", "cp932", "euc_jp", "euc_kr",
    )
)  # fmt: skip
_DEEPEST: Final = 64  # elements in one another; VOC needs 5


def _encoding(start: bytes) -> str:
    declared = _DECLARED.match(start.removeprefix(codecs.BOM_UTF8))
    name = declared[1].decode("ascii", "replace") if declared else "utf-8"
    try:
        known = codecs.lookup(name).name
    except LookupError:
        known = ""
    if known not in _ENCODINGS or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"its encoding ({name}, or UTF-16) is not supported; convert it to UTF-8")
    return known


def xml_text(data: bytes) -> str:
    """Return an XML file as text, in the encoding that it declares; UTF-8 if it declares none.

    Raises:
        ValueError: it is in another encoding than it says, or in one that is not supported.
    """
    return data.decode(_encoding(data[:512]))


def parse_xml(text: str) -> ElementTree.Element:
    """Return the root element of a document that somebody else wrote.

    Raises:
        ValueError: it is no XML, it has a DOCTYPE (entities need one), or it is too deep.

    Example:
        >>> parse_xml("<annotation><filename>1.jpg</filename></annotation>").findtext("filename")
        '1.jpg'
        >>> parse_xml("<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><a>&x;</a>")
        Traceback (most recent call last):
        ValueError: it has a DOCTYPE, which annotations have no use for; it is not read...
    """
    parser = DefusedXMLParser(target=_Builder(), forbid_dtd=True)
    try:
        parser.feed(text)
        root: ElementTree.Element = parser.close()
    except DTDForbidden as error:
        raise ValueError(
            "it has a DOCTYPE, which annotations have no use for; it is not read, as entities in "
            "it could name files or fill the memory"
        ) from error
    except ElementTree.ParseError as error:
        raise ValueError(f"not well-formed XML: {error}") from error
    return root


class _Builder:
    """Builds the tree, to a depth that no annotation has, and leaves namespaces out.

    Those who follow the elements down would otherwise have Python's stack grow with them.
    """

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


def stems_of_split(root: Path, split: str, names: Container[str] = ()) -> list[str]:
    """Return the names in `ImageSets/Main/SPLIT.txt`; StoreError if there is none.

    A line is one of `names`, or begins with one: in VOC's lists of a class, 1 or -1 comes after it.
    """
    folder = root / "ImageSets" / "Main"
    known = sorted(path.stem for path in folder.glob("*.txt"))
    if split not in known:
        has = ", ".join(map(repr, known)) or "none"
        raise StoreError(f"{root} has no split {split!r} in ImageSets/Main; it has {has}.")
    data = read_annotation(folder / f"{split}.txt")
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except ValueError as error:
        raise StoreError(f"cannot read {folder / split}.txt: {error}.") from error
    stripped = [line.strip() for line in lines if line.strip()]
    return [line if line in names else line.split()[0] for line in stripped]


def warn_of_images_alone(folder: Path, stems: set[str]) -> None:
    """Warn of images in `folder` that have no annotation; `stems` are their names."""
    if stems:
        warnings.warn(
            f"{len(stems)} image(s) in {folder} have no file in Annotations and are left out: "
            f"{min(stems)!r} is one.",
            UserWarning,
            stacklevel=users_level(),
        )
