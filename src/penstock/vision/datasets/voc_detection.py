# SPDX-License-Identifier: Apache-2.0
"""`VOCDetection`: a folder of images and Pascal VOC's XML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.stores.transform_check import check_transform
from penstock.vision.annotations.voc import read_voc_folder
from penstock.vision.annotations.voc_files import stems_of_split
from penstock.vision.datasets.annotated import AnnotatedImages
from penstock.vision.datasets.annotation_rules import AnnotationRules, UnknownClasses
from penstock.vision.datasets.table_builder import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.stores.dataset import Decode
    from penstock.vision.annotations.model import AnnotatedImage
    from penstock.vision.datasets.box_policy import BadBoxes
    from penstock.vision.datasets.frames import Orientation

__all__ = ["VOCDetection"]


class VOCDetection(AnnotatedImages):
    """`Annotations/NAME.xml` and `JPEGImages/NAME.jpg`, with splits in `ImageSets/Main`.

    A sample is the dict of `AnnotatedImages`, with landmarks where the files have some. Classes are
    numbered by the sorted names in *all* annotations, whatever the split, and so are the texts of
    attributes, unless `class_names` or `attribute_names` are given.

    VOC includes both ends of a box, so xmin = xmax is a box of one column if taken at its word; it
    counts as `zero_area` all the same, and is left out unless `bad_boxes` is "keep".

    torchvision's `image_set` is `split` here, its `year` is part of `root` (VOCdevkit/VOC2012), and
    its `target_transform` and `transforms` are `transform`, which takes the whole sample. See
    docs/detection.md.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> import os, tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("Annotations", "JPEGImages"):
        ...     os.mkdir(f"{folder.name}/{name}")
        >>> _ = cv2.imwrite(f"{folder.name}/JPEGImages/1.jpg", np.zeros((30, 40, 3), np.uint8))
        >>> with open(f"{folder.name}/Annotations/1.xml", "w") as file:
        ...     _ = file.write(
        ...         "<annotation><size><width>40</width><height>30</height></size><object>"
        ...         "<name>cell</name><bndbox><xmin>1</xmin><ymin>11</ymin><xmax>20</xmax>"
        ...         "<ymax>30</ymax></bndbox></object></annotation>"
        ...     )
        >>> dataset = VOCDetection(folder.name)
        >>> dataset[0]["boxes"], dataset[0]["image_id"], dataset.labels[0]
        (array([[ 0., 10., 20., 30.]], dtype=float32), '1', array([0]))
        >>> folder.cleanup()

    Reference:
        Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
    """

    def __init__(
        self,
        root: str | Path,
        split: str | None = None,
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
        origin: int = 1,
        decode: Decode = "rgb",
        repair: bool = False,
    ) -> None:
        """Read the annotations.

        Args:
            root: The folder of `Annotations` and `JPEGImages`; or of two subfolders of other names,
                one with the XML files alone, the other with the images.
            split: `ImageSets/Main/SPLIT.txt` names the images and their order; a repeated name
                repeats the sample. None takes all, sorted.
            transform: Takes the sample.
            class_names: The classes in their order. Then only the split's files are read, and the
                texts of attributes are those found there.
            unknown_classes: What becomes of an object of another class: "raise" or "drop".
            attributes: Which other fields of the objects become arrays, and can be balanced by:
                "pose", CVAT's attributes, any element by its path ("colour/hair").
            attribute_names: The texts of attributes in their order; those found if not given.
            landmark_names: Which landmarks, and in which order; those found if not given.
            orientation: "auto": `<size>` decides whether pixels are turned as Exif says.
            bad_boxes: "fix", "drop", "keep" or "raise": see `penstock.vision.datasets.box_policy`.
            skip_difficult: Whether objects marked as difficult are left out.
            keep_empty: Whether images without an object are there.
            origin: 1 where coordinates count from 1 and include both ends, as VOC's do; 0 for tools
                that write a box's edges, counted from 0.
            decode: As for `StoreDataset`.
            repair: Whether JPEG files without an end are given one.

        Raises:
            StoreError: no such folder or split; an annotation is missing or damaged, or bad under
                these rules. The message names the file.
            ConfigError: an argument is none of those.
        """
        rules = AnnotationRules(
            orientation, bad_boxes, unknown_classes, skip_difficult, keep_empty, added_px=origin
        )
        check_transform("transform", transform)
        images = read_voc_folder(root, split if class_names is not None else None, origin=origin)
        names = class_names
        read = images
        if names is None:
            names = sorted({found.class_name for one in read for found in one.objects})
            if split is not None:
                images = _of_split(read, root, split, origin)
        builder = TableBuilder(attributes)
        for image in images:
            builder.add(image)
        if read is not images:
            builder.add_texts(read)
        table = builder.table(names, attribute_names=attribute_names, landmark_names=landmark_names)
        name = f"VOC {root}" if split is None else f"VOC {root}, split {split}"
        self._take(
            table,
            rules,
            name,
            transform=transform,
            decode=decode,
            repair=repair,
            given_classes=class_names,
            root=root,
        )


def _of_split(
    images: list[AnnotatedImage], root: str | Path, split: str, origin: int
) -> list[AnnotatedImage]:
    by_key = {image.key: image for image in images}
    keys = stems_of_split(Path(root), split, by_key)
    if not by_key.keys() >= set(keys):
        return read_voc_folder(root, split, origin=origin)  # says what is wrong with it
    return [by_key[key] for key in keys]
