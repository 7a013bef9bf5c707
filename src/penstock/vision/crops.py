# SPDX-License-Identifier: Apache-2.0
"""Which part of an image is taken, and at which size: geometry alone, no pixels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.vision.arguments import ShownByArguments, checked_size, shown

if TYPE_CHECKING:
    import numpy as np

_TRIES: Final = 10


class Cut(NamedTuple):
    """A part of an image, in pixels, and what becomes of it.

    The part is resized to `resized_height` x `resized_width`; of that, the rows from `row_offset`
    and the columns from `column_offset` are kept, as many as the output has.
    """

    top: int
    left: int
    height: int
    width: int
    resized_height: int
    resized_width: int
    row_offset: int = 0
    column_offset: int = 0


class Crop(Protocol):
    """Decides a `Cut`.

    Attributes:
        size: Height and width of what is kept, in pixels.
        is_drawless: Whether no random number is drawn.
    """

    size: tuple[int, int]
    is_drawless: bool

    def cut(self, height: int, width: int, rng: np.random.Generator | None) -> Cut:
        """Return the part of an image of this size, in pixels; `rng` only if it draws."""


def checked_crop(crop: Any) -> Crop:  # noqa: ANN401 - it is being checked
    """Return a crop."""
    if isinstance(crop, type) or not (hasattr(crop, "cut") and hasattr(crop, "size")):
        raise ConfigError(
            "crop decides which part of an image is taken and at which size: "
            "RandomResizedCrop(224), or an object of your own with `size`, `is_drawless` and "
            f"`cut(height, width, rng)`; got {shown(crop)}"
        )
    found: Crop = crop
    return found


class RandomResizedCrop(ShownByArguments):
    """A part of random area and shape, resized: the crop of torchvision's ImageNet recipe.

    Area and width : height (log-uniform) are drawn within bounds, the place is uniform. If ten such
    parts do not fit, the largest one in the middle is taken whose ratio is within bounds.

    Reference:
        Szegedy et al., Going deeper with convolutions (2014), section 6; torchvision's
        `RandomResizedCrop`, whose distribution this is.

    Example:
        >>> import numpy as np
        >>> RandomResizedCrop(224).cut(480, 640, np.random.default_rng(0))
        Cut(top=213, left=434, height=219, width=165, resized_height=224, resized_width=224, ...)
    """

    is_drawless = False

    @removed_arguments(area="scale=")
    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        """Crop to `size`.

        Args:
            size: Height and width of the output, in pixels; one number for both.
            scale: Least and greatest share of the image's area, 0 < least <= greatest <= 1.
            ratio: Least and greatest width : height.
        """
        self.size = checked_size(size)
        self.scale = _checked_bounds("scale", scale, 1.0)
        self.ratio = _checked_bounds("ratio", ratio, math.inf)
        self._log_ratio = math.log(ratio[0]), math.log(ratio[1])

    def cut(self, height: int, width: int, rng: np.random.Generator | None) -> Cut:
        """Draw a part of an image of `height` x `width` pixels from `rng`."""
        assert rng is not None
        low, high = self.scale
        log_low, log_high = self._log_ratio
        for _ in range(_TRIES):
            area_px = height * width * (low + (high - low) * rng.random())
            ratio = math.exp(log_low + (log_high - log_low) * rng.random())
            cut_width = round(math.sqrt(area_px * ratio))
            cut_height = round(math.sqrt(area_px / ratio))
            if 0 < cut_width <= width and 0 < cut_height <= height:
                # Not rng.integers, which takes ten times as long. Both are below 2^53.
                top = int(rng.random() * (height - cut_height + 1))
                left = int(rng.random() * (width - cut_width + 1))
                return Cut(top, left, cut_height, cut_width, *self.size)
        return self._middle(height, width)

    def _middle(self, height: int, width: int) -> Cut:
        narrowest, widest = self.ratio
        cut_height, cut_width = height, width
        if width < narrowest * height:
            cut_height = max(1, round(width / narrowest))
        elif width > widest * height:
            cut_width = max(1, round(height * widest))
        top, left = (height - cut_height) // 2, (width - cut_width) // 2
        return Cut(top, left, cut_height, cut_width, *self.size)


class CenterCropResize(ShownByArguments):
    """The image resized to a given length of its shorter side, and the middle of that.

    With `size=224, resize=256` it is torchvision's `Resize(256)` and `CenterCrop(224)`, the numbers
    rounded as there.

    Example:
        >>> CenterCropResize(224, resize=256).cut(480, 640, None)
        Cut(top=0, left=0, height=480, width=640, resized_height=256, resized_width=341, ...)
    """

    is_drawless = True

    def __init__(self, size: int | tuple[int, int], resize: int) -> None:
        """Crop to `size`.

        Args:
            size: Height and width of the output, in pixels; one number for both.
            resize: Length of the shorter side before, in pixels; at least that of `size`'s longer.
        """
        self.size = checked_size(size)
        if resize < max(self.size):
            raise ConfigError(f"resize={resize} px is smaller than the crop, {self.size} px.")
        self.resize = resize

    def cut(self, height: int, width: int, rng: np.random.Generator | None = None) -> Cut:
        """Return the middle of an image of `height` x `width` pixels."""
        shorter = min(height, width)
        resized_height = self.resize if height <= width else int(self.resize * height / shorter)
        resized_width = self.resize if width <= height else int(self.resize * width / shorter)
        top = round((resized_height - self.size[0]) / 2)
        left = round((resized_width - self.size[1]) / 2)
        return Cut(0, 0, height, width, resized_height, resized_width, top, left)


class Resize(ShownByArguments):
    """The whole image, resized to one size whatever its shape.

    It is torchvision's `Resize((height, width))`. One number is both sides, not the shorter one.

    Example:
        >>> Resize((2, 4)).cut(480, 640, None)
        Cut(top=0, left=0, height=480, width=640, resized_height=2, resized_width=4, ...)
    """

    is_drawless = True

    def __init__(self, size: int | tuple[int, int]) -> None:
        """Resize to `size`: height and width in pixels; one number for both."""
        self.size = checked_size(size)

    def cut(self, height: int, width: int, rng: np.random.Generator | None = None) -> Cut:
        """Return all of an image of `height` x `width` pixels."""
        return Cut(0, 0, height, width, *self.size)


def _checked_bounds(name: str, bounds: tuple[float, float], most: float) -> tuple[float, float]:
    low, high = bounds
    if not 0 < low <= high <= most:
        raise ConfigError(f"{name} is (least, greatest), 0 < least <= greatest <= {most}: {bounds}")
    return float(low), float(high)
