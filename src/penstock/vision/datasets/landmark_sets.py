# SPDX-License-Identifier: Apache-2.0
"""`LandmarkList` and `ImglabDetection`: images with landmarks, from a text file or dlib's XML."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from penstock.stores.transform_check import check_transform
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.landmark_list import (
    CLASS_COLUMN,
    read_landmark_list,
    samples_of_lines,
)
from penstock.vision.annotations.paths import folder_of
from penstock.vision.datasets.annotated import AnnotatedImages
from penstock.vision.datasets.annotation_rules import AnnotationRules, UnknownClasses
from penstock.vision.datasets.table_builder import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from penstock.stores.dataset import Decode
    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
    from penstock.vision.datasets.box_policy import BadBoxes
    from penstock.vision.datasets.frames import Orientation

__all__ = ["ImglabDetection", "LandmarkList"]

_FALSE: Final = ("", "0", "false")


class LandmarkList(AnnotatedImages):
    """A line for each object: `path x1 … xn y1 … yn`, maybe a box, maybe columns of classes.

    A sample is the dict of `AnnotatedImages`. An image that has several lines is one sample with
    several objects, in the place of its first line. A repeated line repeats the sample: an
    image is as many samples as its most frequent line has copies, each with all objects. Each class
    column is an array of that name; the first, or the one called "class", is "labels". In a
    column of numbers from 0 every number is its own class; texts are numbered in their order when
    sorted.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> import os, tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = cv2.imwrite(f"{folder.name}/1.jpg", np.zeros((30, 40, 3), np.uint8))
        >>> with open(f"{folder.name}/train.txt", "w") as file:
        ...     _ = file.write("1.jpg  10 20  5 6  man")
        >>> dataset = LandmarkList(f"{folder.name}/train.txt", classes=["gender"])
        >>> dataset[0]["landmarks"].tolist(), dataset[0]["boxes"].tolist(), dataset.class_names
        ([[[10.0, 5.0], [20.0, 6.0]]], [[10.0, 5.0, 21.0, 7.0]], ('man',))
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_landmarks: int | None = None,
        layout: Literal["xxyy", "xyxy"] = "xxyy",
        has_box: bool = False,
        box_format: Literal["xyxy", "xywh"] = "xyxy",
        box_at: Literal["before", "after"] = "after",
        classes: Sequence[str] = (),
        missing: float | None = None,
        origin: int = 0,
        root: str | Path | None = None,
        separator: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        class_names: Sequence[str] | None = None,
        attribute_names: Mapping[str, Sequence[str]] | None = None,
        unknown_classes: UnknownClasses = "raise",
        orientation: Orientation = "auto",
        bad_boxes: BadBoxes = "fix",
        decode: Decode = "rgb",
        repair: bool = False,
    ) -> None:
        """Read the list.

        Args:
            path: The text file.
            num_landmarks: Of each line. If not given, as many as the first line has numbers for:
                better say it, as a box or a column that was forgotten counts as landmarks then.
            layout: "xxyy": all x, then all y; "xyxy": in turn.
            has_box: Whether a line has a box.
            box_format: "xyxy" corners, "xywh" corner, width and height.
            box_at: Whether the box stands "before" or "after" the landmarks.
            classes: Names of the class columns, which end a line.
            missing: The number that stands for a coordinate that is not known.
            origin: Number of the first pixel; 1 where boxes include both ends, as VOC's do.
            root: Folder that paths are relative to; that of the list if not given.
            separator: What separates columns; blanks and tabs if not given.
            transform: Takes the sample.
            class_names: The texts of the first class column in their order.
            attribute_names: The texts of other class columns in their order.
            unknown_classes: What becomes of an object of another class: "raise" or "drop".
            orientation: In which frame the pixels are; "auto" is upright here.
            bad_boxes: "fix", "drop", "keep" or "raise": see
                `penstock.vision.datasets.box_policy`. Sizes are read from the headers of all files,
                unless it is "keep".
            decode: As for `StoreDataset`.
            repair: Whether JPEG files without an end are given one.

        Raises:
            StoreError: no such file; a line is damaged, or bad under these rules. The message names
                it.
            ConfigError: an argument is none of those.
        """
        classes = (classes,) if isinstance(classes, str) else tuple(classes)
        has_last_px = origin == 1 and box_format == "xyxy"  # see `LandmarkColumns.origin`
        rules = AnnotationRules(
            orientation, bad_boxes, unknown_classes, added_px=1 if has_last_px else 0
        )
        check_transform("transform", transform)
        images = read_landmark_list(
            path,
            num_landmarks=num_landmarks,
            layout=layout,
            has_box=has_box,
            box_format=box_format,
            box_at=box_at,
            classes=classes,
            missing=missing,
            origin=origin,
            root=root,
            separator=separator,
        )
        builder = TableBuilder(attributes=[name for name in classes if name != CLASS_COLUMN])
        for image in samples_of_lines(images):
            builder.add(_with_classes(image, classes))
        table = builder.table(class_names, has_numbers=True, attribute_names=attribute_names)
        self._is_counted = num_landmarks is None
        self._take(
            replace(table, is_bare=None),  # a line without box and landmarks is of the whole image
            rules,
            f"landmark list {path}",
            transform=transform,
            decode=decode,
            repair=repair,
            given_classes=class_names,
            root=folder_of(path) if root is None else root,
        )

    def _landmarks(self) -> str:
        # A box that was forgotten (`has_box`) looks like two landmarks more.
        counted = ", as the first line has them" if self._is_counted else ""
        return super()._landmarks() + counted


def _with_classes(image: AnnotatedImage, classes: Sequence[str]) -> AnnotatedImage:
    """Return an image whose objects are of the class that their first class column says."""
    if not classes or CLASS_COLUMN in classes:
        return image

    def classed(item: AnnotatedObject) -> AnnotatedObject:
        return replace(item, class_name=item.extra[classes[0]])

    return replace(image, objects=tuple(map(classed, image.objects)))


def _with_ignored(item: AnnotatedObject) -> AnnotatedObject:
    """Return a box that says of being ignored what VOC says by `difficult`: both mean the same."""
    if "ignore" not in item.extra:
        return item
    is_ignored = item.extra["ignore"].lower() not in _FALSE
    return replace(item, difficult=is_ignored or bool(item.difficult))


class ImglabDetection(AnnotatedImages):
    """The XML file of dlib's imglab: boxes, and their parts as landmarks.

    A sample is the dict of `AnnotatedImages`. A part that a box lacks is a landmark that is not
    marked. Boxes without a label are of the class "object"; those that imglab has marked to be
    ignored are "difficult".

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> import os, tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = cv2.imwrite(f"{folder.name}/1.jpg", np.zeros((30, 40, 3), np.uint8))
        >>> with open(f"{folder.name}/faces.xml", "w") as file:
        ...     _ = file.write(
        ...         "<dataset><images><image file='1.jpg'><box left='2' top='3' width='9' "
        ...         "height='8'><part name='nose' x='6' y='7'/></box></image></images></dataset>"
        ...     )
        >>> dataset = ImglabDetection(f"{folder.name}/faces.xml")
        >>> dataset[0]["boxes"].tolist(), dataset[0]["landmarks"].tolist(), dataset.landmark_names
        ([[2.0, 3.0, 11.0, 11.0]], [[[6.0, 7.0]]], ('nose',))
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        transform: Callable[[Any], Any] | None = None,
        class_names: Sequence[str] | None = None,
        unknown_classes: UnknownClasses = "raise",
        attributes: Sequence[str] | None = (),
        attribute_names: Mapping[str, Sequence[str]] | None = None,
        landmark_names: Sequence[str] | None = None,
        orientation: Orientation = "auto",
        bad_boxes: BadBoxes = "fix",
        skip_difficult: bool = False,
        keep_empty: bool = True,
        decode: Decode = "rgb",
        repair: bool = False,
    ) -> None:
        """Read the file.

        Args:
            path: The XML file; images are relative to its folder.
            transform: Takes the sample.
            class_names: The labels of boxes in their order; those found, sorted, if not given.
            unknown_classes: What becomes of an object of another class: "raise" or "drop".
            attributes: Which attributes of a box become arrays, "gender" for one; None takes all.
            attribute_names: The texts of attributes in their order; those found if not given.
            landmark_names: Which parts, and in which order; those found if not given.
            orientation: In which frame the pixels are; "auto": the size in the file decides.
            bad_boxes: "fix", "drop", "keep" or "raise": see `penstock.vision.datasets.box_policy`.
            skip_difficult: Whether boxes marked as difficult, or to be ignored, are left out.
            keep_empty: Whether images without an object are there.
            decode: As for `StoreDataset`.
            repair: Whether JPEG files without an end are given one.

        Raises:
            StoreError: no such file; it is damaged, or bad under these rules. The message names the
                image.
            ConfigError: an argument is none of those.
        """
        check_transform("transform", transform)
        rules = AnnotationRules(orientation, bad_boxes, unknown_classes, skip_difficult, keep_empty)
        builder = TableBuilder(attributes)
        for image in read_imglab(path):
            builder.add(replace(image, objects=tuple(map(_with_ignored, image.objects))))
        table = builder.table(
            class_names, attribute_names=attribute_names, landmark_names=landmark_names
        )
        self._take(
            table,
            rules,
            f"imglab {path}",
            transform=transform,
            decode=decode,
            repair=repair,
            given_classes=class_names,
            root=folder_of(path),
        )
