# SPDX-License-Identifier: Apache-2.0
"""Images of all sizes brought to one, without distortion: scaled, then padded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from penstock.vision.arguments import checked_size, checked_whole
from penstock.vision.samples import image_of, with_image
from penstock.vision.transforms.coordinates import moved

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Letterbox"]


class Letterbox:
    """Scales an image until it fits, and pads what is left, half on either side.

    A sample gets an entry "letterbox", a tuple that `undo` takes: what a detector finds in the
    padded image is brought back by it.

    Concurrency:
        Any thread or process; it pickles. No random number is drawn.

    Example:
        >>> sample = {
        ...     "image": np.zeros((240, 320, 3), np.uint8),
        ...     "boxes": np.array([[10, 20, 30, 40]], np.float32),
        ... }
        >>> padded = Letterbox(640)(sample)
        >>> padded["image"].shape, padded["boxes"].tolist(), padded["letterbox"]
        ((640, 640, 3), [[20.0, 120.0, 60.0, 160.0]], (2.0, 2.0, 0, 80, 240, 320))
        >>> Letterbox.undo(padded["boxes"], padded["letterbox"]).tolist()
        [[10.0, 20.0, 30.0, 40.0]]
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        fill: int = 114,
        *,
        enlarge: bool = True,
        stride: int | None = None,
    ) -> None:
        """Say how large.

        Args:
            size: Of the result in pixels, one int or (height, width).
            fill: Value of the padding in all channels, 0 to 255. 114 is that of the YOLO recipes.
            enlarge: Whether smaller images are enlarged; otherwise they are only padded.
            stride: In pixels. If given, height and width are padded only to the next multiple of
                it, `size` being the most that the image itself takes: less to compute for one
                image at a time.

        Raises:
            ConfigError: an argument is out of its range.
        """
        self.height_px, self.width_px = checked_size(size)
        self.fill = checked_whole("fill", fill, 0, 255)
        self.enlarge = bool(enlarge)
        self.stride = None if stride is None else checked_whole("stride", stride, 1)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample in its new size; a bare image likewise.

        Returns:
            A new dict with new arrays; or a new image.
        """
        image = image_of(sample)
        height, width = image.shape[:2]
        scaled = _scaled(image, self._scale(height, width))
        rows, columns = scaled.shape[:2]
        top, left = ((whole - part) // 2 for whole, part in self._padded(rows, columns))
        canvas = self._on_canvas(scaled, top, left)
        if isinstance(sample, dict):
            scale = columns / width, rows / height
            sample = moved(sample, scale, (left, top))
            sample["letterbox"] = (*scale, left, top, height, width)
        return with_image(sample, canvas)

    def _scale(self, height: int, width: int) -> float:
        scale = min(self.height_px / height, self.width_px / width)
        return scale if self.enlarge else min(scale, 1.0)

    def _padded(self, rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The length to pad to, and the length there is, of height and width."""
        if self.stride is None:
            return (self.height_px, rows), (self.width_px, columns)
        return (_up(rows, self.stride), rows), (_up(columns, self.stride), columns)

    def _on_canvas(self, image: NDArray[Any], top: int, left: int) -> NDArray[Any]:
        rows, columns = image.shape[:2]
        (height, _), (width, _) = self._padded(rows, columns)
        canvas = np.full((height, width, *image.shape[2:]), self.fill, image.dtype)
        canvas[top : top + rows, left : left + columns] = image
        return canvas

    @staticmethod
    def undo(
        boxes: NDArray[Any], letterbox: tuple[float, float, int, int, int, int]
    ) -> NDArray[np.float32]:
        """Return boxes as they are in the image before `Letterbox`.

        Args:
            boxes: Shape (N, 4), left, top, right, bottom in pixels of the padded image.
            letterbox: What the sample has under that name: scale along x and y, padding at the left
                and the top in pixels, height and width of the image before. That of the last
                Letterbox, and only true if nothing moved the image after it.

        Returns:
            float32, shape (N, 4), clipped to the image; a new array.
        """
        scale_x, scale_y, left, top, height, width = letterbox
        shift = np.array([left, top, left, top])
        back = (np.asarray(boxes, np.float64).reshape(-1, 4) - shift) / np.array(
            [scale_x, scale_y, scale_x, scale_y]
        )
        inside: NDArray[np.float64] = np.clip(back, 0, [width, height, width, height])
        return inside.astype(np.float32)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        stride = "" if self.stride is None else f", stride={self.stride}"
        return (
            f"Letterbox(({self.height_px}, {self.width_px}), {self.fill}, "
            f"enlarge={self.enlarge}{stride})"
        )


def _scaled(image: NDArray[Any], scale: float) -> NDArray[Any]:
    height, width = image.shape[:2]
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    if (rows, columns) == (height, width):
        return image
    # Averages of areas, or what shrinks by more than 2 would skip pixels between the four it reads.
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    scaled = cv2.resize(image, (columns, rows), interpolation=method)
    return np.asarray(scaled).reshape(rows, columns, *image.shape[2:])  # one channel stays an axis


def _up(length: int, stride: int) -> int:
    return -(-length // stride) * stride
