# SPDX-License-Identifier: Apache-2.0
"""Pascal VOC's XML as arrays: what a network that finds boxes is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.vision.annotations.voc import voc_root
from penstock.vision.annotations.voc_elements import (
    read_box,
    read_class_name,
    read_flag,
    read_length,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["VOCAnnotation", "parse_voc"]


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
    """Return the boxes of an annotation; `annotations.voc.read_voc` returns all that it says.

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
    root = voc_root(xml)
    objects = root.findall("object")
    names = [read_class_name(item, f"object {number}") for number, item in enumerate(objects)]
    where = [f"object {number} ({name})" for number, name in enumerate(names)]
    pairs = list(zip(objects, where, strict=True))
    boxes = np.array([read_box(item, place) for item, place in pairs], np.float32)
    flags = {
        flag: np.array([bool(read_flag(item, flag, place)) for item, place in pairs], np.bool_)
        for flag in ("difficult", "truncated")
    }
    return VOCAnnotation(
        (root.findtext("filename") or "").strip(),
        read_length(root, "width"),
        read_length(root, "height"),
        tuple(names),
        boxes.reshape(-1, 4),
        **flags,
    )
