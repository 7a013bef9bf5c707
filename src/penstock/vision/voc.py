# SPDX-License-Identifier: Apache-2.0
"""Pascal VOC's annotations: the objects of an image, and their boxes.

VOC counts pixels from 1 and includes both ends: a box over the whole of a 640 x 480 image is
xmin=1, ymin=1, xmax=640, ymax=480. Here boxes are 0-based and half-open, so that the same box is
(0, 0, 640, 480), its width 640 - 0, and its pixels `image[0:480, 0:640]`:

    x1, y1, x2, y2 = xmin - 1, ymin - 1, xmax, ymax

Reference:
    Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.stores.folder.voc import parse_xml, xml_text

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from numpy.typing import NDArray

__all__ = ["VOCAnnotation", "parse_voc"]

_SIDES: Final = ("xmin", "ymin", "xmax", "ymax")
_FLAGS: Final = {"": False, "0": False, "1": True}


@dataclass(frozen=True, eq=False)
class VOCAnnotation:
    """The annotation of one image; its arrays have a row for each object, in the file's order.

    Attributes:
        filename: As the annotation says it; empty if it does not. It need not be true.
        width_px: Width of the image; None where it is missing or 0.
        height_px: Height of the image; None where it is missing or 0.
        class_names: Class of each object.
        boxes_xyxy_px: float32, shape (objects, 4): left, top, right, bottom; 0-based, half-open.
        difficult: bool, shape (objects,): objects that VOC's own evaluation does not count.
        truncated: bool, shape (objects,): objects that go on beyond their box.
    """

    filename: str
    width_px: int | None
    height_px: int | None
    class_names: tuple[str, ...]
    boxes_xyxy_px: NDArray[np.float32]
    difficult: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    @property
    def is_degenerate(self) -> NDArray[np.bool_]:
        """Which boxes begin and end in one column or row, or end before they begin.

        In VOC's form xmin >= xmax or ymin >= ymax: taken at its word one pixel wide or less, in
        practice a click without a drag. They are kept, as training code has to decide.
        """
        sizes = self.boxes_xyxy_px[:, 2:] - self.boxes_xyxy_px[:, :2]
        return np.asarray((sizes <= 1).any(axis=1))


def parse_voc(xml: str | bytes) -> VOCAnnotation:
    """Return what an annotation says.

    Nothing outside of `xml` is read: a DOCTYPE, which entities need, is an error. `difficult` and
    `truncated` may be missing and are then false, as in many tools' files.

    Args:
        xml: The file, as bytes or as text.

    Returns:
        The annotation, with arrays of its own.

    Raises:
        ValueError: it is no XML, or no annotation; a field is missing or is no number. The message
            names the object.

    Example:
        >>> found = parse_voc(
        ...     "<annotation><size><width>640</width><height>480</height></size><object>"
        ...     "<name>cell</name><bndbox><xmin>1</xmin><ymin>11</ymin><xmax>20</xmax>"
        ...     "<ymax>480</ymax></bndbox></object></annotation>"
        ... )
        >>> found.class_names, found.boxes_xyxy_px
        (('cell',), array([[  0.,  10.,  20., 480.]], dtype=float32))
    """
    root = parse_xml(xml if isinstance(xml, str) else xml_text(bytes(xml)))
    if root.tag != "annotation":
        raise ValueError(f"the root element is <{root.tag}>, not <annotation>")
    objects = root.findall("object")
    names = [_class_name(item, number) for number, item in enumerate(objects)]
    where = [f"object {number} ({name})" for number, name in enumerate(names)]
    pairs = list(zip(objects, where, strict=True))
    boxes = np.array([_box(item, place) for item, place in pairs], np.float32)
    return VOCAnnotation(
        (root.findtext("filename") or "").strip(),
        _length(root, "width"),
        _length(root, "height"),
        tuple(names),
        boxes.reshape(-1, 4),
        np.array([_flag(item, "difficult", place) for item, place in pairs], np.bool_),
        np.array([_flag(item, "truncated", place) for item, place in pairs], np.bool_),
    )


def _class_name(item: Element, number: int) -> str:
    name = (item.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"object {number} has no name")
    return name


def _box(item: Element, where: str) -> tuple[float, float, float, float]:
    box = item.find("bndbox")
    if box is None:
        raise ValueError(f"{where} has no bndbox")
    left, top, right, bottom = (_number(box.findtext(side), f"{where}: {side}") for side in _SIDES)
    return left - 1, top - 1, right, bottom


def _number(text: str | None, where: str) -> float:
    if text is None:
        raise ValueError(f"{where} is missing")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} is {text.strip()[:40]!r}, not a number")
    return number


def _flag(item: Element, name: str, where: str) -> bool:
    text = (item.findtext(name) or "").strip()
    if text not in _FLAGS:
        raise ValueError(f"{where}: {name} is {text[:40]!r}, not 0 or 1")
    return _FLAGS[text]


def _length(root: Element, name: str) -> int | None:
    text = root.findtext(f"size/{name}")
    if text is None:
        return None
    number = _number(text, f"size: {name}")
    if number < 0 or number != int(number):
        raise ValueError(f"size: {name} is {text.strip()[:40]!r}, not a number of pixels")
    return int(number) or None
