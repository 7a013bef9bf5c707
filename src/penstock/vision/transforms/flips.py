# SPDX-License-Identifier: Apache-2.0
"""Mirror images: left and right, or top and bottom, exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number
from penstock.vision.samples import image_of, with_image
from penstock.vision.transforms.coordinates import moved

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HorizontalFlip", "VerticalFlip"]

_BY_LANDMARK: Final = ("landmarks", "visibility")  # arrays (N, K, …)


class _Flip:
    """Along one axis of the image, x or y."""

    is_across: bool  # along x

    def __init__(
        self, probability: float = 0.5, landmark_order: Sequence[int] | None = None
    ) -> None:
        """Say how often to mirror.

        Args:
            probability: Of a mirror image, 0 to 1.
            landmark_order: What each landmark is in the mirror image: landmark k of the result is
                landmark `landmark_order[k]` of the source. A left eye becomes a right eye: for
                (left eye, right eye, nose) it is (1, 0, 2). None: the order stays. "visibility",
                (N, K), goes along.

        Raises:
            ConfigError: an argument is out of its range, or the order is no permutation.
        """
        self.probability = checked_number("probability", probability, 0, 1)
        self.landmark_order = None if landmark_order is None else tuple(landmark_order)
        if self.landmark_order and sorted(self.landmark_order) != list(
            range(len(self.landmark_order))
        ):
            raise ConfigError(
                "landmark_order has each number from 0 to the number of landmarks - 1 once; got "
                f"{self.landmark_order!r}"
            )

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample, or its mirror image; a bare image likewise.

        Returns:
            A new dict with new arrays; or the same sample where it is not mirrored.
        """
        if sample_rng().random() >= self.probability:
            return sample
        image = image_of(sample)
        mirrored = np.ascontiguousarray(image[:, ::-1] if self.is_across else image[::-1])
        if isinstance(sample, dict):
            height, width = image.shape[:2]
            scale, shift = ((-1, 1), (width, 0)) if self.is_across else ((1, -1), (0, height))
            sample = self._reordered(moved(sample, scale, shift))
        return with_image(sample, mirrored)

    def _reordered(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.landmark_order is None or "landmarks" not in sample:
            return sample
        num_landmarks = sample["landmarks"].shape[1]
        if num_landmarks != len(self.landmark_order) and len(sample["landmarks"]):
            raise ConfigError(
                f"landmark_order has {len(self.landmark_order)} numbers, but the sample has "
                f"{num_landmarks} landmarks for each object"
            )
        order = list(self.landmark_order)
        by_landmark = [key for key in _BY_LANDMARK if key in sample]
        return {**sample, **{key: sample[key][:, order] for key in by_landmark}}

    def __repr__(self) -> str:
        """Return the call that makes it."""
        order = "" if self.landmark_order is None else f", {self.landmark_order!r}"
        return f"{type(self).__name__}({self.probability:g}{order})"


class HorizontalFlip(_Flip):
    """Exchanges left and right, now and then.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> sample = {"image": np.zeros((4, 10, 3), np.uint8), "boxes": np.array([[0, 0, 2, 4]])}
        >>> HorizontalFlip(probability=1)(sample)["boxes"]
        array([[ 8.,  0., 10.,  4.]], dtype=float32)
    """

    is_across = True


class VerticalFlip(_Flip):
    """Exchanges top and bottom, now and then.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> VerticalFlip(probability=1)(np.array([[1], [2]], np.uint8)).ravel()
        array([2, 1], dtype=uint8)
    """

    is_across = False
