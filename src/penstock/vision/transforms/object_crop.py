# SPDX-License-Identifier: Apache-2.0
"""A crop of an image with its objects: any of the crops for classification, boxes taken along."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number, shown
from penstock.vision.crops import checked_crop
from penstock.vision.samples import image_of, kept, with_image
from penstock.vision.transforms.coordinates import areas_px, clipped, moved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vision.crops import Crop, Cut

__all__ = ["ObjectCrop"]


class ObjectCrop:
    """Cuts a part out of an image, resizes it, and takes the objects along that are seen in it.

    Boxes are clipped to the part; landmarks beyond it become NaN, their visibility 0. What
    `Letterbox` noted is dropped.

    With `class_weights` the part is moved to an object of the image, so that rare classes are shown
    more often than their images have them: the object is drawn by the weight of its class, and the
    part, as large as `crop` says, is placed at random where all of that object is in it; or within
    the object, where that is larger.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> from penstock.vision.crops import CenterCropResize
        >>> sample = {
        ...     "image": np.zeros((100, 100, 3), np.uint8),
        ...     "boxes": np.array([[40, 40, 60, 60], [0, 40, 30, 60]], np.float32),
        ... }
        >>> ObjectCrop(CenterCropResize(50, resize=100), min_visibility=0.5)(sample)["boxes"]
        array([[15., 15., 35., 35.]], dtype=float32)
    """

    def __init__(
        self,
        crop: Crop,
        *,
        min_visibility: float = 0.25,
        min_side_px: float = 2.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        """Say which part.

        Args:
            crop: Which part, and how large: `RandomResizedCrop(…)`, say.
            min_visibility: Objects are dropped of which less than this share of the box's area is
                in the part, 0 to 1.
            min_side_px: And those whose box, clipped, is not wider and higher than this in the
                result.
            class_weights: The weight of each class, 0 or more, in the order of the dataset's
                `class_names`; None does not move the part. An image that has no object of a weight
                above 0 is cut as without.

        Raises:
            ConfigError: an argument is out of its range, or `crop` is none; weights for a crop that
                draws nothing.
        """
        self.crop = checked_crop(crop)
        self.min_visibility = checked_number("min_visibility", min_visibility, 0, 1)
        self.min_side_px = checked_number("min_side_px", min_side_px, 0)
        self.class_weights = None if class_weights is None else _checked(class_weights, self.crop)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the part; of a bare image likewise.

        Returns:
            A new dict with new arrays; or a new image.
        """
        image = image_of(sample)
        rng = None if self.crop.is_drawless else sample_rng()
        height, width = image.shape[:2]
        cut = self.crop.cut(height, width, rng)
        if self.class_weights is not None and isinstance(sample, dict) and rng is not None:
            cut = self._aimed(cut, sample, rng)
        part = _pixels(image, cut, self.crop.size)
        if isinstance(sample, dict):
            sample = self._objects(sample, cut, part.shape[:2])
        return with_image(sample, part)

    def _aimed(self, cut: Cut, sample: dict[str, Any], rng: np.random.Generator) -> Cut:
        """Return the cut moved to one of the objects, drawn by the weights of their classes."""
        labels, weights = np.asarray(sample["labels"]), np.asarray(self.class_weights)
        if len(labels) and int(labels.max()) >= len(weights):
            raise ValueError(
                f"an object is of class {labels.max()}, and class_weights has {len(weights)} "
                "weights, from class 0 on."
            )
        ends = np.cumsum(weights[labels])
        if not len(ends) or not ends[-1]:
            return cut
        chosen = int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))
        x1, y1, x2, y2 = sample["boxes"][chosen].tolist()
        height, width = sample["image"].shape[:2]
        return cut._replace(
            top=_start(y1, y2, cut.height, height, rng),
            left=_start(x1, x2, cut.width, width, rng),
        )

    def _objects(self, sample: dict[str, Any], cut: Cut, size: tuple[int, ...]) -> dict[str, Any]:
        scale = cut.resized_width / cut.width, cut.resized_height / cut.height
        shift = (
            -cut.left * scale[0] - cut.column_offset,
            -cut.top * scale[1] - cut.row_offset,
        )
        whole, region = moved(sample, scale, shift), (0, 0, size[1], size[0])
        if "boxes" in whole:
            seen = np.clip(whole["boxes"], 0, [size[1], size[0]] * 2)
            is_seen = areas_px(seen) >= self.min_visibility * areas_px(whole["boxes"])
            whole = kept(whole, is_seen)
        return clipped(whole, region, self.min_side_px)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        weights = "" if self.class_weights is None else f", class_weights={self.class_weights}"
        return f"ObjectCrop({self.crop!r}, min_visibility={self.min_visibility:g}{weights})"


def _checked(weights: Sequence[float], crop: Crop) -> list[float]:
    if crop.is_drawless:
        raise ConfigError(
            f"class_weights move a random part to an object, and {crop!r} is always the same part: "
            "give RandomResizedCrop(…), or leave them out."
        )
    values = np.empty(0) if isinstance(weights, Mapping) else np.asarray(weights, np.float64)
    is_good = values.ndim == 1 and len(values) and bool((np.isfinite(values) & (values >= 0)).all())
    if not is_good or not values.any():
        raise ConfigError(
            "class_weights are numbers from 0 on, one for each class, and not all of them 0, in "
            f"the order of the dataset's class_names; got {shown(weights)}"
        )
    return list(map(float, values))


def _start(low: float, high: float, length: int, whole: int, rng: np.random.Generator) -> int:
    """Return where a part of `length` pixels begins: around `low` to `high`, or within."""
    first, last = sorted((math.ceil(high) - length, math.floor(low)))
    most = whole - length
    return int(rng.integers(min(max(first, 0), most), min(max(last, 0), most) + 1))


def _pixels(image: NDArray[Any], cut: Cut, size: tuple[int, int]) -> NDArray[Any]:
    part = image[cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    resized = (cut.resized_width, cut.resized_height)
    shrinks = cut.resized_height < cut.height or cut.resized_width < cut.width
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    scaled = np.asarray(cv2.resize(part, resized, interpolation=method))
    scaled = scaled.reshape(*scaled.shape[:2], *image.shape[2:])  # one channel stays an axis
    rows = slice(cut.row_offset, cut.row_offset + size[0])
    columns = slice(cut.column_offset, cut.column_offset + size[1])
    return np.ascontiguousarray(scaled[rows, columns])
