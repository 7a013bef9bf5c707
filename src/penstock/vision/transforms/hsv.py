# SPDX-License-Identifier: Apache-2.0
"""Colours changed at random: hue, saturation and value of all pixels by a factor each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number
from penstock.vision.samples import image_of, with_image

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RandomHSV"]

_LEVELS: Final = np.arange(256, dtype=np.float64)
_HUES: Final = 180  # OpenCV counts a circle of hues in steps of two degrees, in a byte


class RandomHSV:
    """Multiplies hue, saturation and value by factors drawn for each image.

    Each factor is uniform in [1 - gain, 1 + gain]. Hue goes round the circle; saturation and value
    stop at 255.

    Concurrency:
        Any thread or process; it pickles.

    Reference:
        The gains are those of YOLOv5's published table of hyperparameters (hsv_h, hsv_s, hsv_v).

    Example:
        >>> grey = np.full((2, 2, 3), 100, np.uint8)
        >>> RandomHSV(hue=0.5, saturation=0.5, value=0)(grey)[0, 0]  # no colour to be changed
        array([100, 100, 100], dtype=uint8)
    """

    def __init__(self, hue: float = 0.015, saturation: float = 0.7, value: float = 0.4) -> None:
        """Say how much each may change.

        Args:
            hue: Gain, a share of the hue itself, 0 to 1.
            saturation: Gain, likewise.
            value: Gain, likewise.

        Raises:
            ConfigError: a gain is out of its range.
        """
        self.hue = checked_number("hue", hue, 0, 1)
        self.saturation = checked_number("saturation", saturation, 0, 1)
        self.value = checked_number("value", value, 0, 1)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample with new colours; a bare image likewise.

        Raises:
            ConfigError: the image is not uint8 (H, W, 3).
        """
        image = image_of(sample)
        if image.dtype != np.uint8 or image.shape[2:] != (3,):
            raise ConfigError(
                f"RandomHSV takes uint8 (H, W, 3), RGB; got {image.dtype} {image.shape}. Put it "
                "before what normalises the image"
            )
        gains = np.array([self.hue, self.saturation, self.value])
        if not gains.any():
            return sample
        factors = 1 + gains * sample_rng().uniform(-1, 1, 3)
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
        changed = cv2.LUT(hsv, _table(factors))
        return with_image(sample, np.asarray(cv2.cvtColor(changed, cv2.COLOR_HSV2RGB)))

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"RandomHSV({self.hue:g}, {self.saturation:g}, {self.value:g})"


def _table(factors: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The new value of each of 256, for hue, saturation and value: shape (1, 256, 3)."""
    hue = (_LEVELS * factors[0]) % _HUES
    others = [np.minimum(_LEVELS * factor, 255) for factor in factors[1:]]
    return np.stack([hue, *others], axis=1).astype(np.uint8)[None]
