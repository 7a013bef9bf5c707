# SPDX-License-Identifier: Apache-2.0
"""COCO's JSON: one file for all images.

    images        id, file_name, width, height
    annotations   image_id, category_id, bbox, area, iscrowd, segmentation, keypoints
    categories    id, name; keypoints: the names of its points

A `bbox` is [left, top, width, height] of pixels' edges, from 0. `keypoints` are x, y and visibility
of each point in turn. A `segmentation` is a list of polygons, each [x1, y1, x2, y2, ..], or run
lengths down the columns of the image: {"size": [height, width], "counts": numbers or a text}. It
stays the JSON text of the file until `masks_of` makes pixels of it.

Reference:
    Lin and others, "Microsoft COCO: Common Objects in Context" (ECCV 2014); the data format and the
    mask API at https://cocodataset.org.
"""

from __future__ import annotations

import importlib
import math
from codecs import BOM_UTF8
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from penstock.opening import read_annotation
from penstock.optional import missing_extra
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import first_repeated, key_of, listed_path, reading

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_MAX_BYTES: Final = 4 << 30  # reading takes three times as much: segmentations become no tree
_DIGITS: Final = 6  # of a pixel, so that left + width - left is the width again
_MOST_DIGITS: Final = 7  # of five bits: no image has 2^40 pixels
_LONGEST_PX: Final = 1e7  # of a polygon's outline, for which pycocotools takes 80 bytes a pixel


class _Image(msgspec.Struct, gc=False):
    id: int | str
    file_name: str
    width: float | None = None  # some tools write 640.0
    height: float | None = None


class _Annotation(msgspec.Struct, gc=False):
    image_id: int | str
    category_id: int
    bbox: tuple[float, float, float, float] | None = None
    area: float | None = None
    iscrowd: int | bool | None = None
    segmentation: msgspec.Raw = msgspec.Raw(b"null")
    keypoints: list[float] | None = None


class _Category(msgspec.Struct):
    id: int
    name: str
    keypoints: tuple[str, ...] = ()


class _File(msgspec.Struct):
    images: list[_Image]
    categories: list[_Category] = []
    annotations: list[_Annotation] = []


class _Runs(msgspec.Struct):
    size: tuple[int, int]
    counts: str | list[int]


def read_coco(
    path: str | Path, root: str | Path | None = None, *, by_id: bool, masks: bool = True
) -> tuple[Iterator[AnnotatedImage], dict[str, int]]:
    """Return the images in the file's order, and the id of each category by its name, ids rising.

    Args:
        path: The file.
        root: The folder that file names are relative to; that of the file if not given.
        by_id: Whether keys are the images' ids, as text; otherwise their file names.
        masks: Whether objects have their segmentation.
    """
    path = Path(path)
    with reading(path):
        said = _decoded(read_annotation(path, _MAX_BYTES).removeprefix(BOM_UTF8), _File)
        said.categories.sort(key=lambda category: category.id)
        categories = {category.id: category for category in said.categories}
        objects: dict[int | str, list[_Annotation]] = {image.id: [] for image in said.images}
        ids = {category.name: category.id for category in said.categories}
        for what, values in (
            ("images have the id", [image.id for image in said.images]),
            ("categories have the id", [category.id for category in said.categories]),
            ("categories are called", [category.name for category in said.categories]),
        ):
            if (twice := first_repeated(map(repr, values))) is not None:
                raise ValueError(f"two {what} {twice}: change one in the file")
        for number, item in enumerate(said.annotations):
            for what, one, known in (
                ("image", item.image_id, objects),
                ("category", item.category_id, categories),
            ):
                if one not in known:
                    raise ValueError(f"annotation {number} is of {what} {one!r}, not a listed one")
            objects[item.image_id].append(item)
    folder = path.parent if root is None else Path(root)

    def images() -> Iterator[AnnotatedImage]:
        for image in said.images:
            source = f"{path}, image {image.id}"
            with reading(source):
                yield AnnotatedImage(
                    listed_path(image.file_name, folder),
                    str(image.id) if by_id else key_of(image.file_name),
                    int(image.width or 0) or None,
                    int(image.height or 0) or None,
                    tuple(
                        _object(item, categories[item.category_id], masks)
                        for item in objects.pop(image.id)
                    ),
                    source,
                )

    return images(), ids


def _decoded(data: bytes | str, form: Any) -> Any:  # noqa: ANN401 - an instance of `form`
    """Return what JSON says."""
    try:
        return msgspec.json.decode(data, type=form)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no JSON of COCO's: {error}") from error


def _object(item: _Annotation, category: _Category, masks: bool) -> AnnotatedObject:
    box = area = None
    if item.bbox is not None:
        left, top, width, height = item.bbox
        box = left, top, round(left + width, _DIGITS), round(top + height, _DIGITS)
        area = width * height
    values = item.keypoints or []
    points = [tuple(values[n : n + 3]) for n in range(0, len(values), 3)]
    names = category.keypoints if len(category.keypoints) == len(points) else ()
    if len(values) % 3 or not {point[2] for point in points} <= {0, 1, 2}:
        raise ValueError(f"keypoints of a {category.name} are not x, y and 0, 1 or 2 of each point")
    text = b"".join(bytes(item.segmentation).split()).decode() if masks else ""
    return AnnotatedObject(
        category.name,
        box,
        tuple((x, y) if seen else (math.nan, math.nan) for x, y, seen in points),
        names,
        tuple(int(seen) for *_, seen in points),
        iscrowd=None if item.iscrowd is None else bool(item.iscrowd),
        area_px=area if item.area is None else item.area,
        segmentation="" if text in ("null", "[]") else text,
    )


def mask_library() -> Any:  # noqa: ANN401 - it has no types
    """Return pycocotools' module of masks."""
    try:
        return importlib.import_module("pycocotools.mask")
    except ModuleNotFoundError as error:
        raise missing_extra(error, "making masks of COCO's segmentations") from error


def masks_of(segmentations: Sequence[str], height_px: int, width_px: int) -> NDArray[np.uint8]:
    """Return masks as uint8 (objects, height, width), 1 in an object; all 0 where there is none."""
    masks = np.zeros((len(segmentations), height_px, width_px), np.uint8)
    for number, text in enumerate(segmentations):
        try:
            said = _decoded(text or "[]", list[list[float]] | _Runs)
            if isinstance(said, _Runs):
                masks[number] = _of_runs(said, height_px, width_px)
            elif said:
                masks[number] = _of_polygons(said, height_px, width_px)
        except ValueError as error:
            raise ValueError(
                f"the segmentation of object {number}, which is a list of polygons "
                f"[[x1, y1, ...], ...] or run lengths: {error}"
            ) from error
    return masks


def _of_polygons(polygons: list[list[float]], height_px: int, width_px: int) -> NDArray[np.uint8]:
    for polygon in polygons:
        if len(polygon) < 6 or len(polygon) % 2:
            raise ValueError(f"a polygon has {len(polygon)} numbers, not x and y of 3 points")
        points = np.clip(polygon, -_LONGEST_PX, _LONGEST_PX).reshape(-1, 2)
        if np.abs(np.diff(points, axis=0, prepend=0)).sum() >= _LONGEST_PX:
            raise ValueError(f"a polygon is longer than {_LONGEST_PX:,.0f} pixels")
    library = mask_library()
    runs = library.merge(library.frPyObjects(polygons, height_px, width_px))
    return np.asarray(library.decode(runs), np.uint8)


def _of_runs(said: _Runs, height_px: int, width_px: int) -> NDArray[np.uint8]:
    # Not by pycocotools, which leaves pixels uninitialised where runs end before the image.
    if said.size != (height_px, width_px):
        raise ValueError(
            f"it is of {said.size[0]} x {said.size[1]} px (height x width), and the image has "
            f"{height_px} x {width_px}"
        )
    counts = _counts(said.counts) if isinstance(said.counts, str) else np.array(said.counts)
    num_pixels = height_px * width_px
    if ((counts < 0) | (counts > num_pixels)).any() or counts.sum() != num_pixels:
        raise ValueError(f"its counts are not those of {num_pixels:,} pixels")
    values = (np.arange(len(counts)) % 2).astype(np.uint8)
    return np.repeat(values, counts.astype(np.int64)).reshape(width_px, height_px).T


def _counts(text: str) -> NDArray[np.int64]:
    """Return the lengths of runs that a text stands for.

    A character holds five bits, those of the lowest value first; 32 says that more follow, and 16
    in the last that the number is negative. From the fourth on they are differences, each to the
    length two before.
    """
    digits = np.frombuffer(text.encode(), np.uint8).astype(np.int64) - ord("0")
    is_last = (digits & 32) == 0
    if not text or not is_last[-1] or (digits & ~63).any():
        raise ValueError("its counts are no text of COCO's")
    starts = np.flatnonzero(np.append(True, is_last[:-1]))
    places = np.arange(len(digits)) - starts[np.cumsum(is_last) - is_last]
    if places.max() > _MOST_DIGITS:
        raise ValueError("its counts are no text of COCO's")
    lengths = np.add.reduceat((digits & 31) << (5 * places), starts)
    lengths -= (digits[is_last] & 16) << (5 * places[is_last] + 1)
    for first in (1, 2):
        lengths[first::2] = np.cumsum(lengths[first::2])
    return lengths


def write_coco(images: Sequence[AnnotatedImage], class_names: Sequence[str]) -> bytes:
    """Return the file; images and categories count from 1. Objects without a box are left out."""
    numbers = {name: number for number, name in enumerate(class_names, 1)}
    objects = [(number, o) for number, image in enumerate(images, 1) for o in image.objects]
    objects = [(number, found) for number, found in objects if found.box_xyxy_px is not None]
    points: dict[str, dict[str, None]] = {name: {} for name in numbers}  # names in their order
    for _, found in objects:
        points[found.class_name].update(dict.fromkeys(found.landmark_names))
    said = {
        "images": [
            {"id": number, "file_name": image.path.as_posix(),
             "width": image.width_px, "height": image.height_px}
            for number, image in enumerate(images, 1)
        ],
        "annotations": [
            {"id": number, "image_id": image_id, "category_id": numbers[found.class_name],
             **_said(found, tuple(points[found.class_name]))}
            for number, (image_id, found) in enumerate(objects, 1)
        ],
        "categories": [
            {"id": number, "name": name, "keypoints": tuple(points[name])}
            for name, number in numbers.items()
        ],
    }  # fmt: skip
    return msgspec.json.encode(said)


def _said(found: AnnotatedObject, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of an object; `names` are those of the points of its class."""
    assert found.box_xyxy_px is not None  # the caller leaves others out
    left, top, right, bottom = found.box_xyxy_px
    width, height = round(right - left, _DIGITS), round(bottom - top, _DIGITS)
    said: dict[str, Any] = {
        "bbox": (left, top, width, height),
        "area": width * height if found.area_px is None else found.area_px,
        "iscrowd": int(found.iscrowd or False),
        "segmentation": msgspec.Raw((found.segmentation or "[]").encode()),
    }
    if found.landmarks_xy_px:
        seen = found.visibility or (2,) * len(found.landmarks_xy_px)
        pairs = zip(found.landmarks_xy_px, seen, strict=True)
        triples = [(0, 0, 0) if math.isnan(x + y) else (x, y, v) for (x, y), v in pairs]
        if found.landmark_names:
            by_name = dict(zip(found.landmark_names, triples, strict=True))
            triples = [by_name.get(name, (0, 0, 0)) for name in names]
        said["keypoints"] = [value for triple in triples for value in triple]
        said["num_keypoints"] = sum(v > 0 for *_, v in triples)
    return said
