# SPDX-License-Identifier: Apache-2.0
"""`VOCDetection`, `YOLODetection`, `COCODetection`, `LandmarkList`, `ImglabDetection`: readers."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Unpack

from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError, StoreError
from penstock.vision.annotations.coco import mask_library, read_coco
from penstock.vision.annotations.imglab import read_imglab
from penstock.vision.annotations.lists import (
    CLASS_COLUMN,
    LandmarkColumns,
    landmark_lines,
    samples_of_lines,
)
from penstock.vision.annotations.reading import folder_of
from penstock.vision.annotations.voc_folder import absent_images, keys_of_split, read_voc_folder
from penstock.vision.annotations.yolo import read_yolo
from penstock.vision.datasets.annotated import AnnotatedImages, DatasetOptions
from penstock.vision.datasets.table import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject

    Attributes = Sequence[str] | Mapping[str, Sequence[str]] | None

_FALSE: Final = ("", "0", "false")
_in_rules = removed_arguments(
    bad_boxes="rules=AnnotationRules(bad_boxes=...)",
    orientation="rules=AnnotationRules(orientation=...)",
    unknown_classes="rules=AnnotationRules(unknown_classes=...)",
    skip_difficult="rules=AnnotationRules(skip_difficult=...)",
    keep_empty="rules=AnnotationRules(keep_empty=...)",
    attribute_names="attributes={name: texts}",
)


class VOCDetection(AnnotatedImages):
    """`Annotations/NAME.xml` and `JPEGImages/NAME.jpg`, with splits in `ImageSets/Main`.

    A sample is the dict of `AnnotatedImages`, with landmarks where the files have some. Classes are
    numbered by the sorted names in *all* annotations, whatever the split, and so are the texts of
    attributes, unless `class_names` or the texts are given.

    VOC includes both ends of a box, so xmin = xmax is a box of one column if taken at its word; it
    counts as `zero_area` all the same, and is left out unless `bad_boxes` is "keep".

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

    @_in_rules
    def __init__(
        self,
        root: str | Path,
        split: str | None = None,
        *,
        class_names: Sequence[str] | None = None,
        attributes: Attributes = (),
        landmark_names: Sequence[str] | None = None,
        origin: Literal[0, 1] = 1,
        annotations: str | Path | None = None,
        images: str | Path | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        """Read the annotations.

        Args:
            root: The folder of `Annotations` and `JPEGImages`, or `annotations` and `images`; or of
                two subfolders of other names, one with the XML files alone, the other with the
                images; or of XML files beside their images.
            split: `ImageSets/Main/SPLIT.txt` names the images and their order; a repeated name
                repeats the sample. None takes all, sorted.
            class_names: The classes in their order. Then only the split's files are read, and the
                texts of attributes are those found there.
            attributes: Which other fields of the objects become arrays, and can be balanced by:
                "pose", CVAT's attributes, any element by its path ("colour/hair"). A dict gives
                each its texts in their order; otherwise those found are sorted. None takes all.
            landmark_names: Which landmarks, and in which order; those found if not given.
            origin: 1 where coordinates count from 1 and include both ends, as VOC's do; 0 for tools
                that write a box's edges, counted from 0.
            annotations: The folder of XML files, from `root` or absolute, where it is not found.
            images: The folder of images, likewise. An image goes with the annotation that is called
                like it; where there is none, with the one whose `<filename>` names it.
            **options: Those of `AnnotatedImages`: `transform`, `rules`, `decode`, `repair`.

        Raises:
            StoreError: no such folder or split; an annotation is missing or damaged, or bad under
                these rules; none of the images is there. The message names the file.
        """
        part = split if class_names is not None else None
        read = found = read_voc_folder(
            root, part, origin=origin, annotations=annotations, images=images
        )
        names = class_names
        if names is None:
            names = sorted({item.class_name for image in read for item in image.objects})
            if split is not None:
                by_key = {image.key: image for image in read}
                found = [by_key[key] for key in keys_of_split(Path(root), split, by_key)]
        if (error := absent_images({image.source: image.path for image in found})) is not None:
            raise error
        builder = TableBuilder(attributes)
        builder.add(found)
        if read is not found:
            builder.add_texts(read)
        self._take(
            builder.table(names, landmark_names=landmark_names),
            f"VOC {root}" if split is None else f"VOC {root}, split {split}",
            added_px=origin,
            **options,
            given_classes=class_names,
            root=root if images is None else Path(root, images),
        )


class YOLODetection(AnnotatedImages):
    """YOLO's text files: `class centre-x centre-y width height`, as shares of the image's sides.

    A sample is the dict of `AnnotatedImages`, with landmarks where the files have keypoints. Class
    names and their order are those of the yaml file. Shares become pixels of the upright image, the
    one that a viewer shows; its size is read from each file's header. An image whose header cannot
    be read has no objects, and reading it raises.

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

    @_in_rules
    @removed_arguments(slack="nothing: AnnotationRules(bad_boxes=...) decides")
    def __init__(
        self,
        yaml_or_folder: str | Path,
        split: str = "train",
        *,
        class_names: Sequence[str] | None = None,
        polygons: Literal["error", "box"] = "error",
        **options: Unpack[DatasetOptions],
    ) -> None:
        """Read the annotations.

        Args:
            yaml_or_folder: The yaml file, or the folder of `images` and `labels`.
            split: Which images of it.
            class_names: The classes in their order: some of those in the yaml file; or, where that
                names none, the names of classes 0, 1, 2 …
            polygons: What becomes of lines that outline an object: "error", or the "box" around it.
            **options: Those of `AnnotatedImages`: `transform`, `rules`, `decode`, `repair`.

        Raises:
            StoreError: no such file, folder or split; a line is damaged, or bad under these rules.
        """
        unreadable: dict[str, int] = {}
        images, names = read_yolo(yaml_or_folder, split, polygons=polygons, unreadable=unreadable)
        builder = TableBuilder()
        builder.add(_with_different_keys(images))
        table = builder.table(names)
        if class_names is not None and names == tuple(map(str, range(len(names)))):
            if len(class_names) < len(names):
                raise ConfigError(
                    f"class_names are {len(class_names)}, and {yaml_or_folder} has objects of "
                    f"class {len(names) - 1}; the first class is 0."
                )
            # Names for numbers, of which not all have to come up.
            table, class_names = replace(table, class_names=tuple(class_names)), None
        elif class_names is not None:
            table = builder.table(class_names)
        self._take(
            table,
            f"YOLO {yaml_or_folder}, split {split}",
            **options,
            given_classes=class_names,
            num_unsized=sum(unreadable.values()),
            root=folder_of(yaml_or_folder),
        )


def _with_different_keys(images: Sequence[AnnotatedImage]) -> Iterator[AnnotatedImage]:
    """Yield images, their paths as keys where two of them are called the same."""
    if len({image.key for image in images}) == len({image.path for image in images}):
        yield from images
        return
    above = os.path.commonpath([os.path.dirname(os.path.abspath(image.path)) for image in images])
    for image in images:
        yield replace(image, key=Path(os.path.relpath(image.path, above)).as_posix())


class COCODetection(AnnotatedImages):
    """COCO's JSON: one file with the boxes, classes and outlines of all images.

    A sample is the dict of `AnnotatedImages`, with landmarks where the file has keypoints. Classes
    are numbered from 0 by the rising ids of the categories, those without objects too.

    "image_id" is COCO's id as text, and `category_ids` are those of the classes: with both, results
    are written back as pycocotools reads them. Regions around many objects have "iscrowd";
    `AnnotationRules(skip_difficult=True)` leaves them out.

    Attributes:
        category_ids: COCO's id of each category, by its name.

    Example:
        >>> import json, tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = cv2.imwrite(f"{folder.name}/1.jpg", np.zeros((30, 40, 3), np.uint8))
        >>> said = {
        ...     "images": [{"id": 7, "file_name": "1.jpg", "width": 40, "height": 30}],
        ...     "categories": [{"id": 18, "name": "dog"}],
        ...     "annotations": [{"id": 1, "image_id": 7, "category_id": 18, "iscrowd": 0,
        ...                      "bbox": [2, 3, 20, 10], "segmentation": [[2, 3, 22, 3, 2, 13]]}],
        ... }
        >>> _ = Path(folder.name, "dogs.json").write_text(json.dumps(said))
        >>> dataset = COCODetection(f"{folder.name}/dogs.json", folder.name)
        >>> dataset[0]["boxes"], dataset[0]["image_id"], dataset.category_ids
        (array([[ 2.,  3., 22., 13.]], dtype=float32), '7', {'dog': 18})
        >>> folder.cleanup()
    """

    @_in_rules
    def __init__(
        self,
        annotations: str | Path,
        images: str | Path | None = None,
        *,
        class_names: Sequence[str] | None = None,
        masks: bool = False,
        area: bool = False,
        landmark_names: Sequence[str] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        """Read the file.

        Args:
            annotations: The JSON file.
            images: The folder that its file names start from; its own folder if not given.
            class_names: The categories in another order, or some of them.
            masks: Whether samples have "masks"; they need pycocotools, of the extra "coco". Until a
                sample is made they stay as short as in the file.
            area: Whether samples have "area", as the file says it; a box's where it does not.
            landmark_names: Which keypoints, and in which order; those found if not given.
            **options: Those of `AnnotatedImages`: `transform`, `rules`, `decode`, `repair`.

        Raises:
            StoreError: no such file; it is damaged, or bad under these rules; no object has a mask,
                and `masks` is true. The message names the image.
            MissingExtraError: pycocotools is not installed, and `masks` is true.
        """
        if masks:
            mask_library()
        found, self.category_ids = read_coco(annotations, images, by_id=True, masks=masks)
        builder = TableBuilder()
        builder.add(found)
        names = tuple(self.category_ids) if class_names is None else class_names
        table = builder.table(names, landmark_names=landmark_names)
        if len(table) and not any(map(os.path.lexists, table.paths)):
            raise StoreError(
                f"none of the {len(table)} images of {annotations} is there, {table.paths[0]} for "
                "one: give images=, the folder that its file names start from."
            )
        if masks and table.segmentations is None:
            raise StoreError(f"no object of {annotations} has a segmentation: leave out masks.")
        if not area:
            columns = {name: c for name, c in table.columns.items() if name != "area"}
            table = replace(table, columns=columns)
        self._take(
            table,
            f"COCO {annotations}",
            **options,
            given_classes=class_names,
            root=folder_of(annotations) if images is None else images,
        )


class LandmarkList(AnnotatedImages):
    """A line for each object: `path x1 … xn y1 … yn`, maybe a box, maybe columns of classes.

    A sample is the dict of `AnnotatedImages`. An image that has several lines is one sample with
    several objects; a repeated line repeats the sample. Each class column is an array of that name;
    the first, or the one called "class", is "labels". In a column of numbers from 0 every number is
    its own class; texts are numbered in their order when sorted.

    Example:
        >>> import os, tempfile
        >>> import cv2, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = cv2.imwrite(f"{folder.name}/1.jpg", np.zeros((30, 40, 3), np.uint8))
        >>> with open(f"{folder.name}/train.txt", "w") as file:
        ...     _ = file.write("1.jpg  10 20  5 6  man")
        >>> columns = LandmarkColumns(num_landmarks=2, classes=["gender"])
        >>> dataset = LandmarkList(f"{folder.name}/train.txt", columns)
        >>> dataset[0]["landmarks"].tolist(), dataset[0]["boxes"].tolist(), dataset.class_names
        ([[[10.0, 5.0], [20.0, 6.0]]], [[10.0, 5.0, 21.0, 7.0]], ('man',))
        >>> folder.cleanup()
    """

    @_in_rules
    @removed_arguments(
        **{name: f"LandmarkColumns({name}=...)" for name in LandmarkColumns.__slots__}
    )
    def __init__(
        self,
        path: str | Path,
        columns: LandmarkColumns | None = None,
        *,
        root: str | Path | None = None,
        class_names: Sequence[str] | None = None,
        attributes: Mapping[str, Sequence[str]] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        """Read the list.

        Args:
            path: The text file.
            columns: What its columns are; without it all numbers of the first line are landmarks.
            root: Folder that paths are relative to; that of the list if not given.
            class_names: The texts of the first class column in their order.
            attributes: The texts of other class columns in their order.
            **options: Those of `AnnotatedImages`: `transform`, `rules`, `decode`, `repair`.

        Raises:
            StoreError: no such file; a line is damaged, or bad under these rules. The message names
                it.
        """
        columns = LandmarkColumns() if columns is None else columns
        lines = landmark_lines(path, root=root, **asdict(columns))
        others = [name for name in columns.classes if name != CLASS_COLUMN]
        builder = TableBuilder({**dict.fromkeys(others, ()), **(attributes or {})})
        builder.add(_with_classes(image, columns.classes) for image in samples_of_lines(lines))
        table = builder.table(class_names, has_numbers=True)
        self._take(
            replace(table, is_bare=None),  # a line without box and landmarks is of the whole image
            f"landmark list {path}",
            added_px=int(columns.origin == 1 and columns.box_format == "xyxy"),
            **options,
            given_classes=class_names,
            root=folder_of(path) if root is None else root,
        )


def _with_classes(image: AnnotatedImage, classes: Sequence[str]) -> AnnotatedImage:
    """Return an image whose objects are of the class that their first class column says."""
    if not classes or CLASS_COLUMN in classes:
        return image
    objects = (replace(item, class_name=item.extra[classes[0]]) for item in image.objects)
    return replace(image, objects=tuple(objects))


class ImglabDetection(AnnotatedImages):
    """The XML file of dlib's imglab: boxes, and their parts as landmarks.

    A sample is the dict of `AnnotatedImages`. A part that a box lacks is a landmark that is not
    marked. Boxes without a label are of the class "object"; those that imglab has marked to be
    ignored are "difficult".

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

    @_in_rules
    def __init__(
        self,
        path: str | Path,
        *,
        class_names: Sequence[str] | None = None,
        attributes: Attributes = (),
        landmark_names: Sequence[str] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        """Read the file.

        Args:
            path: The XML file; images are relative to its folder.
            class_names: The labels of boxes in their order; those found, sorted, if not given.
            attributes: Which attributes of a box become arrays, "gender" for one, as for
                `VOCDetection`.
            landmark_names: Which parts, and in which order; those found if not given.
            **options: Those of `AnnotatedImages`: `transform`, `rules`, `decode`, `repair`.

        Raises:
            StoreError: no such file; it is damaged, or bad under these rules. The message names the
                image.
        """
        builder = TableBuilder(attributes)
        builder.add(
            replace(image, objects=tuple(map(_with_ignored, image.objects)))
            for image in read_imglab(path)
        )
        self._take(
            builder.table(class_names, landmark_names=landmark_names),
            f"imglab {path}",
            **options,
            given_classes=class_names,
            root=folder_of(path),
        )


def _with_ignored(item: AnnotatedObject) -> AnnotatedObject:
    """Return a box that says of being ignored what VOC says by `difficult`: both mean the same."""
    if "ignore" not in item.extra:
        return item
    is_ignored = item.extra["ignore"].lower() not in _FALSE
    return replace(item, difficult=is_ignored or bool(item.difficult))
