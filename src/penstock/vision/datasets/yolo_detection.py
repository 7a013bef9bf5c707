# SPDX-License-Identifier: Apache-2.0
"""`YOLODetection`: images, a text file of boxes for each, a yaml file of names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError
from penstock.stores.transform_check import check_transform
from penstock.vision.annotations.paths import folder_of
from penstock.vision.annotations.yolo import read_yolo
from penstock.vision.annotations.yolo_labels import SLACK
from penstock.vision.datasets.annotated import AnnotatedImages
from penstock.vision.datasets.annotation_rules import AnnotationRules, UnknownClasses
from penstock.vision.datasets.table_builder import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.stores.dataset import Decode
    from penstock.vision.annotations.model import AnnotatedImage
    from penstock.vision.datasets.annotation_table import AnnotationTable
    from penstock.vision.datasets.box_policy import BadBoxes
    from penstock.vision.datasets.frames import Orientation

__all__ = ["YOLODetection"]


class YOLODetection(AnnotatedImages):
    """YOLO's text files: `class centre-x centre-y width height`, as shares of the image's sides.

    A sample is the dict of `AnnotatedImages`, with landmarks where the files have keypoints. Class
    names and their order are those of the yaml file. Shares become pixels of the upright image, the
    one that a viewer shows; its size is read from each file's header. An image whose header cannot
    be read has no objects, and reading it raises.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> import tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("images", "labels"):
        ...     Path(folder.name, name).mkdir()
        >>> _ = cv2.imwrite(f"{folder.name}/images/1.jpg", np.zeros((30, 40, 3), np.uint8))
        >>> _ = Path(folder.name, "labels/1.txt").write_text("1 0.25 0.5 0.5 1")
        >>> _ = Path(folder.name, "data.yaml").write_text("{names: [cat, dog], train: images}")
        >>> dataset = YOLODetection(f"{folder.name}/data.yaml")
        >>> dataset[0]["boxes"], dataset.labels[0], dataset.class_names
        (array([[ 0.,  0., 20., 30.]], dtype=float32), array([1]), ('cat', 'dog'))
        >>> folder.cleanup()
    """

    def __init__(
        self,
        yaml_or_folder: str | Path,
        split: str = "train",
        *,
        transform: Callable[[Any], Any] | None = None,
        class_names: Sequence[str] | None = None,
        unknown_classes: UnknownClasses = "raise",
        polygons: Literal["error", "box"] = "error",
        slack: float = SLACK,
        orientation: Orientation = "auto",
        bad_boxes: BadBoxes = "fix",
        keep_empty: bool = True,
        decode: Decode = "rgb",
        repair: bool = False,
    ) -> None:
        """Read the annotations.

        Args:
            yaml_or_folder: The yaml file, or the folder of `images` and `labels`.
            split: Which images of it.
            transform: Takes the sample.
            class_names: The classes in their order: some of those in the yaml file; or, where that
                names none, the names of classes 0, 1, 2 …
            unknown_classes: What becomes of an object of another class: "raise" or "drop".
            polygons: What becomes of lines that outline an object: "error", or the "box" around it.
            slack: How far beyond 0 to 1 a box's centre and sides may be; what is farther is an
                error, and no box of this image. `bad_boxes` decides on what is nearer.
            orientation: In which frame the pixels are; "auto" is upright here.
            bad_boxes: "fix", "drop", "keep" or "raise": see `penstock.vision.datasets.box_policy`.
            keep_empty: Whether images without an object are there.
            decode: As for `StoreDataset`.
            repair: Whether JPEG files without an end are given one.

        Raises:
            StoreError: no such file, folder or split; a line is damaged, or bad under these rules.
            ConfigError: an argument is none of those.
        """
        rules = AnnotationRules(orientation, bad_boxes, unknown_classes, keep_empty=keep_empty)
        check_transform("transform", transform)
        unreadable: dict[str, int] = {}
        images, names = read_yolo(
            yaml_or_folder, split, polygons=polygons, slack=slack, unreadable=unreadable
        )
        builder = TableBuilder()
        for image in _with_different_keys(images):
            builder.add(image)
        if class_names is not None and names == tuple(map(str, range(len(names)))):
            table = _named(builder.table(names), class_names, yaml_or_folder)
            class_names = None  # names for numbers, of which not all have to come up
        else:
            table = builder.table(names if class_names is None else class_names)
        # The sizes are those of the files, and say nothing of the frame.
        table = replace(table, is_size_said=None)
        name = f"YOLO {yaml_or_folder}, split {split}"
        self._take(
            table,
            rules,
            name,
            transform=transform,
            decode=decode,
            repair=repair,
            given_classes=class_names,
            unreadable=unreadable,
            root=folder_of(yaml_or_folder),
        )


def _with_different_keys(images: Sequence[AnnotatedImage]) -> Iterator[AnnotatedImage]:
    """Yield images, their paths as keys where two of them are called the same.

    So it is in a split of several folders, each with its own 1.jpg.
    """
    if len({image.key for image in images}) == len({image.path for image in images}):
        yield from images
        return
    above = os.path.commonpath([os.path.dirname(os.path.abspath(image.path)) for image in images])
    for image in images:
        yield replace(image, key=Path(os.path.relpath(image.path, above)).as_posix())


def _named(
    table: AnnotationTable, class_names: Sequence[str], source: str | Path
) -> AnnotationTable:
    """Return a table whose classes had numbers only, with names for them."""
    if len(class_names) < len(table.class_names):
        raise ConfigError(
            f"class_names are {len(class_names)}, and {source} has objects of class "
            f"{len(table.class_names) - 1}; the first class is 0."
        )
    return replace(table, class_names=tuple(class_names))
