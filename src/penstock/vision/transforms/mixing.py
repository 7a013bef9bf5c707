# SPDX-License-Identifier: Apache-2.0
"""`MixUp` and `CutMix`: two images in one, and a label that says how much of each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number, checked_whole, named_here
from penstock.vision.samples import image_of, joined, without_letterbox
from penstock.vision.transforms.partners import PartneredDataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["CutMix", "MixUp"]


class _LabelMixing(PartneredDataset):
    """Knows how labels become soft: a share for each class."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        probability: float,
        alpha: float,
        *,
        num_classes: int | None,
        transform: Callable[[Any], Any] | None,
        until_epoch: int | None,
    ) -> None:
        super().__init__(
            dataset, probability=probability, transform=transform, until_epoch=until_epoch
        )
        self.alpha = checked_number("alpha", alpha, 1e-6)
        self.num_classes = (
            None if num_classes is None else checked_whole("num_classes", num_classes, 1)
        )

    def _share(self) -> float:
        return float(sample_rng().beta(self.alpha, self.alpha))

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        if isinstance(sample, dict):
            return without_letterbox(sample)
        image, label = self._pair(sample)
        return image, self._soft(label)

    def _pair(self, sample: Any) -> tuple[Any, Any]:  # noqa: ANN401
        if isinstance(sample, (tuple, list)) and len(sample) == 2:
            image_of(sample[0])  # or it says what it is
            return sample[0], sample[1]
        raise ConfigError(
            f"{type(self).__name__} takes pairs (image, class){self._also()}; got a "
            f"{type(sample).__name__}"
        )

    def _also(self) -> str:
        return ""

    def _soft(self, label: Any) -> NDArray[np.float32]:  # noqa: ANN401
        """The share of each class: 1 for the label; or the label itself where it is one already."""
        if np.ndim(label) == 1:
            return np.asarray(label, np.float32)
        num_classes = self.num_classes or len(self.class_names)
        if not num_classes:
            raise ConfigError(
                f"{type(self).__name__} needs to know how many classes there are, as its dataset "
                "has no class_names: give num_classes"
            )
        if not 0 <= int(label) < num_classes:
            raise ConfigError(
                f"a sample has the class {label}, but there are {num_classes} classes, numbered "
                f"from 0 to {num_classes - 1}"
            )
        soft = np.zeros(num_classes, np.float32)
        soft[int(label)] = 1
        return soft

    def _mixed_labels(self, one: Any, other: Any, share: float) -> NDArray[np.float32]:  # noqa: ANN401
        return (share * self._soft(one) + (1 - share) * self._soft(other)).astype(np.float32)

    def _check_alike(self, one: NDArray[Any], other: NDArray[Any], names: tuple[int, int]) -> None:
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ConfigError(
                f"{type(self).__name__} joins images of one size and type; sample {names[0]} is "
                f"{one.dtype} {one.shape}, its partner, sample {names[1]}, {other.dtype} "
                f"{other.shape}. Bring all images to one size first, by Letterbox or a crop as "
                "the dataset's transform, or by Mosaic with RandomPerspective"
            )


class MixUp(_LabelMixing):
    """Samples that are a weighted mean of two.

        image = share * one + (1 - share) * other          share ~ Beta(alpha, alpha)

    Of detection samples (dicts) the objects of both are kept, as they are; "letterbox" is dropped.
    Of pairs (image, class) the labels are mixed as the images are: float32 (num_classes,); also
    those of samples that are not mixed, so that all samples are alike.

    Concurrency:
        As the dataset and the transform. Partners come from the sample's own generator.

    Reference:
        Zhang and others, "mixup: Beyond Empirical Risk Minimization" (ICLR 2018), for
        classification, with alpha 0.1 to 0.4; Beta(32, 32) and detection as published with YOLOv5.

    Example:
        >>> pairs = [(np.full((2, 2, 3), 100 * n, np.uint8), n) for n in range(2)]
        >>> image, label = MixUp(pairs, alpha=0.2, num_classes=2)[1]
        >>> label.dtype, round(float(label.sum()), 5), int(image[0, 0, 0]) == round(100 * label[1])
        (dtype('float32'), 1.0, True)
    """

    @named_here(p="probability")
    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        probability: float = 1.0,
        alpha: float = 32.0,
        *,
        num_classes: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        until_epoch: int | None = None,
    ) -> None:
        """Say how often, and how evenly.

        Args:
            dataset: Map-style, with a length; its images of one size.
            probability: Of a mixture, 0 to 1.
            alpha: Of the Beta distribution that the share is drawn from, above 0. 32: near to one
                half; 0.2: mostly near 0 or 1.
            num_classes: For pairs; None: as many as the dataset has `class_names`.
            transform: Applied to the result.
            until_epoch: Epochs from this one on have no mixture. None: all have.

        Raises:
            ConfigError: an argument is out of its range, or the dataset is not map-style.
        """
        super().__init__(
            dataset,
            probability,
            alpha,
            num_classes=num_classes,
            transform=transform,
            until_epoch=until_epoch,
        )

    def _combined(self, index: int) -> Any:  # noqa: ANN401
        (partner,) = self._partners(1)
        share = self._share()
        one, other = self.dataset[index], self._partner(partner, index)
        if isinstance(one, dict) and isinstance(other, dict):
            images = image_of(one), image_of(other)
            self._check_alike(*images, (index, partner))
            return joined([one, other], _mean(*images, share))
        (image, label), (other_image, other_label) = self._pair(one), self._pair(other)
        self._check_alike(image, other_image, (index, partner))
        return _mean(image, other_image, share), self._mixed_labels(label, other_label, share)

    def _also(self) -> str:
        return ', or dicts with "image" and "boxes"'


class CutMix(_LabelMixing):
    """Pairs (image, class), a rectangle of each image from another one.

    The rectangle has the image's aspect ratio and (1 - share) of its area, its centre is uniform
    over the image, and it is cut at the image's border. The label is float32 (num_classes,): the
    exact share of the pixels that each class has; also for samples that are not mixed. Detection
    samples are refused: a box over what was half covered would be wrong; use Mosaic or MixUp.

    Concurrency:
        As the dataset and the transform. Partners come from the sample's own generator.

    Reference:
        Yun and others, "CutMix: Regularization Strategy to Train Strong Classifiers with
        Localizable Features" (ICCV 2019): share ~ Beta(1, 1).

    Example:
        >>> pairs = [(np.full((8, 8, 3), n, np.uint8), n) for n in range(2)]
        >>> image, label = CutMix(pairs, num_classes=2)[0]
        >>> bool(image.mean() == label[1])
        True
    """

    @named_here(p="probability")
    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        probability: float = 1.0,
        alpha: float = 1.0,
        *,
        num_classes: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        until_epoch: int | None = None,
    ) -> None:
        """Say how often, and how much.

        Args:
            dataset: Map-style, with a length; its samples are pairs, its images of one size.
            probability: Of a mixture, 0 to 1.
            alpha: Of the Beta distribution that the share is drawn from, above 0.
            num_classes: As for `MixUp`.
            transform: Applied to the result.
            until_epoch: Epochs from this one on have no mixture. None: all have.

        Raises:
            ConfigError: an argument is out of its range, or the dataset is not map-style.
        """
        super().__init__(
            dataset,
            probability,
            alpha,
            num_classes=num_classes,
            transform=transform,
            until_epoch=until_epoch,
        )

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        image, label = self._pair(sample)
        return image, self._soft(label)

    def _pair(self, sample: Any) -> tuple[Any, Any]:  # noqa: ANN401
        if isinstance(sample, dict):
            raise ConfigError(
                "CutMix takes pairs (image, class), not detection samples: a box over what is "
                "half covered would be wrong. Use Mosaic or MixUp for those"
            )
        return super()._pair(sample)

    def _combined(self, index: int) -> Any:  # noqa: ANN401
        (partner,) = self._partners(1)
        rng, share = sample_rng(), self._share()
        place = rng.random(2)
        image, label = self._pair(self.dataset[index])
        other_image, other_label = self._pair(self._partner(partner, index))
        self._check_alike(image, other_image, (index, partner))
        rows, columns = (
            _span(length, math.sqrt(1 - share), at)
            for length, at in zip(image.shape[:2], place, strict=True)
        )
        mixed = image.copy()
        mixed[rows, columns] = other_image[rows, columns]
        pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
        share = 1 - pasted / (image.shape[0] * image.shape[1])
        return mixed, self._mixed_labels(label, other_label, share)


def _mean(one: NDArray[Any], other: NDArray[Any], share: float) -> NDArray[Any]:
    mixed = cv2.addWeighted(one, share, other, 1 - share, 0)
    return np.asarray(mixed).reshape(one.shape)


def _span(length: int, part: float, at: float) -> slice:
    """A part of a length, in pixels, whose middle lies at a share of it; cut at both ends."""
    half = int(length * part) / 2
    middle = at * length
    return slice(max(0, round(middle - half)), min(length, round(middle + half)))
