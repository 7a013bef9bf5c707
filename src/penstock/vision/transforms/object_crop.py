# SPDX-License-Identifier: Apache-2.0
"""A crop of an image with its objects: any of the crops for classification, boxes taken along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number
from penstock.vision.crops import checked_crop
from penstock.vision.samples import image_of, kept, with_image
from penstock.vision.transforms.coordinates import areas_px, clipped, moved

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.vision.crops import Crop, Cut

__all__ = ["ObjectCrop"]


class ObjectCrop:
    """Cuts a part out of an image, resizes it, and takes the objects along that are seen in it.

    Boxes are clipped to the part; landmarks beyond it become NaN, their visibility 0. What
    `Letterbox` noted is dropped.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> from penstock.vision.crops import ResizedCenterCrop
        >>> sample = {
        ...     "image": np.zeros((100, 100, 3), np.uint8),
        ...     "boxes": np.array([[40, 40, 60, 60], [0, 40, 30, 60]], np.float32),
        ... }
        >>> ObjectCrop(ResizedCenterCrop(50, resize=100), min_visibility=0.5)(sample)["boxes"]
        array([[15., 15., 35., 35.]], dtype=float32)
    """

    def __init__(
        self, crop: Crop, *, min_visibility: float = 0.25, min_side_px: float = 2.0
    ) -> None:
        """Say which part.

        Args:
            crop: Which part, and how large: `RandomResizedCrop(…)`, say.
            min_visibility: Objects are dropped of which less than this share of the box's area is
                in the part, 0 to 1.
            min_side_px: And those whose box, clipped, is not wider and higher than this in the
                result.

        Raises:
            ConfigError: an argument is out of its range, or `crop` is none.
        """
        self.crop = checked_crop(crop)
        self.min_visibility = checked_number("min_visibility", min_visibility, 0, 1)
        self.min_side_px = checked_number("min_side_px", min_side_px, 0)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the part; of a bare image likewise.

        Returns:
            A new dict with new arrays; or a new image.
        """
        image = image_of(sample)
        rng = None if self.crop.is_drawless else sample_rng()
        height, width = image.shape[:2]
        cut = self.crop.cut(height, width, rng)
        part = _pixels(image, cut, self.crop.size)
        if isinstance(sample, dict):
            sample = self._objects(sample, cut, part.shape[:2])
        return with_image(sample, part)

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
        return f"ObjectCrop({self.crop!r}, min_visibility={self.min_visibility:g})"


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
