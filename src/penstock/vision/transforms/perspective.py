# SPDX-License-Identifier: Apache-2.0
"""Images turned, scaled, sheared, shifted and seen from the side, with their boxes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np

from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number, checked_size, checked_whole
from penstock.vision.samples import image_of, kept, with_image
from penstock.vision.transforms.coordinates import areas_px, clipped, warped

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RandomPerspective"]

# From edges of pixels, which boxes count, to their centres, which OpenCV counts.
_TO_CENTRES: Final = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
_TO_EDGES: Final = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])


class RandomPerspective:
    """Moves an image at random, and cuts the result to a size.

        edge in the result = shift . shear . turn and scale . perspective . centre . edge

    The image's centre comes to a random place near the centre of the result. So the canvas of
    `Mosaic`, 2 s wide, is cut to s around its middle, and an image of s is only moved.

    A box becomes the bounds of its four corners, clipped to the result. Objects are dropped of
    which too little is left, by the three limits. Landmarks beyond the result become NaN,
    their visibility 0. "letterbox" is dropped.

    Concurrency:
        Any thread or process; it pickles.

    Reference:
        The order of the maps, their distributions and the limits are those published with YOLOv5:
        degrees 0, translate 0.1, scale 0.5, shear 0, perspective 0 are its table for training from
        scratch.

    Example:
        >>> sample = {
        ...     "image": np.zeros((200, 200, 3), np.uint8),
        ...     "boxes": np.array([[90, 80, 110, 120], [0, 0, 9, 9]], np.float32),
        ... }
        >>> RandomPerspective(100, translate=0, scale=0)(sample)["boxes"]
        array([[40., 30., 60., 70.]], dtype=float32)
    """

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        *,
        degrees: float = 0.0,
        translate: float = 0.1,
        scale: float = 0.5,
        shear: float = 0.0,
        perspective: float = 0.0,
        fill: int = 114,
        min_side_px: float = 2.0,
        min_area_ratio: float = 0.1,
        max_aspect: float = 100.0,
    ) -> None:
        """Say how far.

        Args:
            size: Of the result in pixels, one int or (height, width); None: as the image.
            degrees: The angle is uniform in [-degrees, degrees].
            translate: A share of the result's size, 0 to 1: the image's centre is uniform in
                [0.5 - translate, 0.5 + translate] of width and of height.
            scale: The factor is uniform in [1 - scale, 1 + scale]; 0 to 1, 1 excluded.
            shear: Angles of x and y are uniform in [-shear, shear], in degrees below 90.
            perspective: Both coefficients are uniform in [-perspective, perspective], per pixel
                from the centre; 0 to 0.001.
            fill: Value of what lies beyond the image, in all channels, 0 to 255.
            min_side_px: An object's clipped box is wider and higher than this.
            min_area_ratio: Its area is more than this share of its area before, scaled.
            max_aspect: Its longer side is less than this many times the shorter one. 100 in the
                recipe, 20 in its first releases.

        Raises:
            ConfigError: an argument is out of its range.
        """
        self.size_px = None if size is None else checked_size(size)
        self.degrees = checked_number("degrees", degrees, 0, 180)
        self.translate = checked_number("translate", translate, 0, 1)
        self.scale = checked_number("scale", scale, 0, 0.999)
        self.shear = checked_number("shear", shear, 0, 89)
        self.perspective = checked_number("perspective", perspective, 0, 0.001)
        self.fill = checked_whole("fill", fill, 0, 255)
        self.min_side_px = checked_number("min_side_px", min_side_px, 0)
        self.min_area_ratio = checked_number("min_area_ratio", min_area_ratio, 0, 1)
        self.max_aspect = checked_number("max_aspect", max_aspect, 1)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample moved; a bare image likewise.

        Returns:
            A new dict with new arrays; or a new image.
        """
        image = image_of(sample)
        height, width = self.size_px or image.shape[:2]
        matrix, scale = self._drawn(image.shape[:2], (height, width))
        if isinstance(sample, dict):
            sample = self._with_objects(sample, matrix, scale, (height, width))
        return with_image(sample, self._pixels(image, matrix, (height, width)))

    def _drawn(
        self, before: tuple[int, ...], after: tuple[int, int]
    ) -> tuple[NDArray[np.float64], float]:
        """The map of edges, and the scale in it."""
        draw = sample_rng().uniform(-1, 1, 8)
        scale = 1 + self.scale * draw[3]
        centre, seen, turned, sheared, shifted = (np.eye(3) for _ in range(5))
        centre[:2, 2] = -before[1] / 2, -before[0] / 2
        seen[2, :2] = self.perspective * draw[:2]
        angle = math.radians(self.degrees * draw[2])
        turned[:2, :2] = scale * np.array(
            [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        )
        sheared[0, 1], sheared[1, 0] = np.tan(np.radians(self.shear * draw[4:6]))
        shifted[:2, 2] = (0.5 + self.translate * draw[6:8]) * [after[1], after[0]]
        return shifted @ sheared @ turned @ seen @ centre, scale

    def _pixels(
        self, image: NDArray[Any], matrix: NDArray[np.float64], size: tuple[int, int]
    ) -> NDArray[Any]:
        matrix = _TO_CENTRES @ matrix @ _TO_EDGES
        dsize, colour = (size[1], size[0]), (self.fill,) * 4
        if self.perspective:
            moved = cv2.warpPerspective(image, matrix, dsize, borderValue=colour)
        else:
            moved = cv2.warpAffine(image, matrix[:2], dsize, borderValue=colour)
        return np.asarray(moved).reshape(*size, *image.shape[2:])  # one channel stays an axis

    def _with_objects(
        self,
        sample: dict[str, Any],
        matrix: NDArray[np.float64],
        scale: float,
        size: tuple[int, int],
    ) -> dict[str, Any]:
        region = (0, 0, size[1], size[0])
        result = warped(sample, matrix)
        if "boxes" not in result:
            return clipped(result, region)
        areas = areas_px(sample["boxes"]) * scale**2
        is_finite = np.isfinite(result["boxes"]).all(axis=1)
        result["boxes"] = np.clip(result["boxes"], 0, [*region[2:]] * 2).astype(np.float32)
        with np.errstate(invalid="ignore", divide="ignore"):
            is_kept = is_finite & (areas > 0) & self._is_enough(result["boxes"], areas)
        return clipped(kept(result, is_kept), region)

    def _is_enough(
        self, boxes: NDArray[np.float32], areas_before: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        sides = (boxes[:, 2:] - boxes[:, :2]).astype(np.float64)
        short, long = sides.min(axis=1), sides.max(axis=1)
        is_large = (short > self.min_side_px) & (
            sides.prod(axis=1) > self.min_area_ratio * areas_before
        )
        return np.asarray(is_large & (long < self.max_aspect * short))

    def __repr__(self) -> str:
        """Return the call that makes it, limits left out."""
        return (
            f"RandomPerspective({self.size_px}, degrees={self.degrees:g}, "
            f"translate={self.translate:g}, scale={self.scale:g}, shear={self.shear:g}, "
            f"perspective={self.perspective:g})"
        )
