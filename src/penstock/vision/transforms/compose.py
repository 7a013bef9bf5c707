# SPDX-License-Identifier: Apache-2.0
"""Transforms one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.vision.arguments import checked_transform

if TYPE_CHECKING:
    from collections.abc import Callable


class Compose:
    """Applies transforms in turn, each to what the one before it gave.

    Attributes:
        transforms: The transforms.

    Example:
        >>> import numpy as np
        >>> from penstock.vision.transforms.geometry import HorizontalFlip, VerticalFlip
        >>> half_turn = Compose(HorizontalFlip(1), VerticalFlip(1))
        >>> half_turn(np.arange(4, dtype=np.uint8).reshape(2, 2))
        array([[3, 2],
               [1, 0]], dtype=uint8)
    """

    def __init__(self, *transforms: Any) -> None:  # noqa: ANN401 - they are being checked
        """Keep the transforms.

        Args:
            *transforms: Functions of a sample that return one.

        Raises:
            ConfigError: one of them cannot be called, is a class, or is of Albumentations and not
                wrapped.
        """
        for number, transform in enumerate(transforms):
            checked_transform(f"transform {number} of Compose is", transform)
        self.transforms: tuple[Callable[[Any], Any], ...] = transforms

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - of any kind
        """Return the sample after all transforms."""
        for transform in self.transforms:
            sample = transform(sample)
        return sample

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"
