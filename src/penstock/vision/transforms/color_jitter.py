# SPDX-License-Identifier: Apache-2.0
"""`ColorJitter`: random brightness, contrast, saturation and hue."""

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

__all__ = ["ColorJitter"]

_LEVELS: Final = np.arange(256, dtype=np.float32)
_HALF_TURN: Final = 90  # OpenCV counts hue from 0 to 180 in 8 bits


class ColorJitter:
    """Changes brightness, contrast, saturation and hue by random amounts, in random order.

    Brightness, contrast and saturation are each multiplied by a factor uniform in [1 - x, 1 + x],
    not below 0: towards black, towards the mean grey of the image, towards its own grey. Hue is
    turned by an angle uniform in [-h, h], in turns.

    Reference:
        torchvision's `ColorJitter` on Pillow's images, whose meaning and distributions these are;
        hue is turned in OpenCV's 8 bits, in steps of 2 degrees.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> grey = np.full((4, 4, 3), 100, np.uint8)
        >>> bool((ColorJitter(saturation=0.5, hue=0.2)(grey) == grey).all())
        True
    """

    def __init__(
        self,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
    ) -> None:
        """Set the amounts; 0 leaves one as it is.

        Args:
            brightness: At least 0.
            contrast: At least 0.
            saturation: At least 0.
            hue: From 0 to 0.5, in turns.

        Raises:
            ConfigError: out of range.
        """
        amounts = {
            "brightness": checked_number("brightness", brightness, 0),
            "contrast": checked_number("contrast", contrast, 0),
            "saturation": checked_number("saturation", saturation, 0),
            "hue": checked_number("hue", hue, 0, 0.5),
        }
        self.amounts = {name: amount for name, amount in amounts.items() if amount}

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample with new colours; a bare image likewise.

        Returns:
            A new dict with a new image; or a new image, uint8 (H, W, 3).

        Raises:
            ConfigError: the image is not uint8 (H, W, 3).
        """
        image = image_of(sample)
        if image.dtype != np.uint8 or image.shape[2:] != (3,):
            raise ConfigError(
                f"ColorJitter takes uint8 (H, W, 3), RGB; got {image.dtype} {image.shape}. Put it "
                "before what normalises the image"
            )
        return with_image(sample, self.apply(image, sample_rng()))

    def apply(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return a changed copy of an image, with numbers drawn from `rng`."""
        names = list(self.amounts)
        rng.shuffle(names)
        for name in names:
            amount = self.amounts[name]
            drawn = amount * (2 * rng.random() - 1)
            image = _CHANGES[name](image, drawn if name == "hue" else max(0.0, 1 + drawn))
        return image

    def __repr__(self) -> str:
        """Return the call that makes it."""
        amounts = ", ".join(f"{name}={amount}" for name, amount in self.amounts.items())
        return f"ColorJitter({amounts})"


def _brightened(image: NDArray[np.uint8], factor: float) -> Any:  # noqa: ANN401 - cv2's own types
    return cv2.LUT(image, _table(_LEVELS * factor))


def _contrasted(image: NDArray[np.uint8], factor: float) -> Any:  # noqa: ANN401
    mean = float(np.floor(cv2.mean(_grey(image))[0] + 0.5))
    return cv2.LUT(image, _table(mean + (_LEVELS - mean) * factor))


def _saturated(image: NDArray[np.uint8], factor: float) -> Any:  # noqa: ANN401
    grey = cv2.cvtColor(_grey(image), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(image, factor, grey, 1 - factor, 0)


def _turned(image: NDArray[np.uint8], turns: float) -> Any:  # noqa: ANN401
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    hue = np.mod(_LEVELS + np.float32(round(turns * 2 * _HALF_TURN)), 2 * _HALF_TURN)
    hsv[..., 0] = cv2.LUT(hsv[..., 0], hue.astype(np.uint8))
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)


def _grey(image: NDArray[np.uint8]) -> Any:  # noqa: ANN401
    return cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)


def _table(levels: NDArray[np.float32]) -> NDArray[np.uint8]:
    table: NDArray[np.uint8] = np.clip(levels + np.float32(0.5), 0, 255).astype(np.uint8)
    return table


_CHANGES: Final = {
    "brightness": _brightened,
    "contrast": _contrasted,
    "saturation": _saturated,
    "hue": _turned,
}
