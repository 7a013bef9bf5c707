# SPDX-License-Identifier: Apache-2.0
"""`ColorJitter` and `RandomHSV`: colours changed at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np

from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import ShownByArguments, checked_number
from penstock.vision.samples import colour_image_of, with_image

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEVELS: Final = np.arange(256, dtype=np.float32)
_HALF_TURN: Final = 90  # OpenCV counts hue from 0 to 180 in 8 bits


class ColorJitter(ShownByArguments):
    """Changes brightness, contrast, saturation and hue by random amounts, in random order.

    Brightness, contrast and saturation are each multiplied by a factor uniform in [1 - x, 1 + x],
    not below 0: towards black, towards the mean grey of the image, towards its own grey. Hue is
    turned by an angle uniform in [-h, h], in turns.

    Reference:
        torchvision's `ColorJitter` on Pillow's images, whose meaning and distributions these are;
        hue is turned in OpenCV's 8 bits, in steps of 2 degrees.

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
        """
        self.brightness = checked_number("brightness", brightness, 0)
        self.contrast = checked_number("contrast", contrast, 0)
        self.saturation = checked_number("saturation", saturation, 0)
        self.hue = checked_number("hue", hue, 0, 0.5)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample with new colours; a bare image likewise."""
        image = colour_image_of(sample, "ColorJitter")
        return with_image(sample, self.apply(image, sample_rng()))

    def apply(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return a changed copy of an image, with numbers drawn from `rng`."""
        names = [name for name in _CHANGES if getattr(self, name)]
        rng.shuffle(names)
        for name in names:
            amount = getattr(self, name)
            drawn = amount * (2 * rng.random() - 1)
            image = _CHANGES[name](image, drawn if name == "hue" else max(0.0, 1 + drawn))
        return image


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
    return np.asarray(np.clip(levels + np.float32(0.5), 0, 255), np.uint8)


_CHANGES: Final = {
    "brightness": _brightened,
    "contrast": _contrasted,
    "saturation": _saturated,
    "hue": _turned,
}
_HSV_LEVELS: Final = np.arange(256, dtype=np.float64)


class RandomHSV(ShownByArguments):
    """Multiplies hue, saturation and value by factors drawn for each image.

    Each factor is uniform in [1 - gain, 1 + gain]. Hue goes round the circle; saturation and value
    stop at 255.

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
        """
        self.hue = checked_number("hue", hue, 0, 1)
        self.saturation = checked_number("saturation", saturation, 0, 1)
        self.value = checked_number("value", value, 0, 1)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample with new colours; a bare image likewise."""
        image = colour_image_of(sample, "RandomHSV")
        gains = np.array([self.hue, self.saturation, self.value])
        if not gains.any():
            return sample
        factors = 1 + gains * sample_rng().uniform(-1, 1, 3)
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
        changed = cv2.LUT(hsv, _hsv_table(factors))
        return with_image(sample, np.asarray(cv2.cvtColor(changed, cv2.COLOR_HSV2RGB)))


def _hsv_table(factors: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The new value of each of 256, for hue, saturation and value: shape (1, 256, 3)."""
    hue = (_HSV_LEVELS * factors[0]) % (2 * _HALF_TURN)
    others = [np.minimum(_HSV_LEVELS * factor, 255) for factor in factors[1:]]
    return np.stack([hue, *others], axis=1).astype(np.uint8)[None]
