# SPDX-License-Identifier: Apache-2.0
"""`Mosaic`, `MixUp` and `CutMix`: datasets that make a sample of several of another dataset's.

The partners of a sample are drawn from the sample's own generator, uniformly over the dataset. So
they depend on (seed, epoch, position) alone, like everything else that is drawn for it.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, ClassVar

import cv2
import numpy as np

from penstock.data.dataset import Dataset, announce_epoch, read_each
from penstock.data.labels.known import known_labels
from penstock.data.names import describe_sample, fingerprint_of
from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.faults import UnreadSample, annotate, note_unread
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import checked_number, checked_optional, checked_whole
from penstock.vision.samples import image_of, joined, with_image, without_letterbox
from penstock.vision.transforms.geometry import Letterbox, clipped, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


class PartneredDataset(Dataset[Any]):
    """A dataset around another, each of whose samples is made of several of the other's.

    A subclass defines `_combined(index)` and `_alone(sample)`.

    Attributes:
        dataset: The other one.
        transform: Applied to what was made; None is nothing.
    """

    _shows = ("dataset", "length", "probability")
    _shows_unless: ClassVar = {"transform": None, "until_epoch": None}

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        *,
        probability: float,
        transform: Callable[[Any], Any] | None,
        until_epoch: int | None,
    ) -> None:
        """Keep the dataset."""
        self.dataset = dataset
        self.probability = checked_number("probability", probability, 0, 1)
        self.transform = transform
        self.until_epoch = checked_optional("until_epoch", until_epoch, 0)
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - as the other dataset's
        """Return sample `index` with what its partners add, or by itself."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for a dataset of {len(self)} samples.")
        index = operator.index(index) % len(self)
        is_on = self.until_epoch is None or self._epoch < self.until_epoch
        if sample_rng().random() < self.probability and is_on:
            sample = self._combined(index)
            return sample if self.transform is None else self.transform(sample)
        return self._whole(self.dataset[index])

    # `__getitems__` is there for subsets of other libraries, which read batches and know nothing of
    # streams. A loader had better read sample by sample, to say which one failed.
    reads_each = True

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices`, each made under its own random numbers."""
        return read_each(self, indices)

    def _combined(self, index: int) -> Any:  # noqa: ANN401
        raise NotImplementedError

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError

    def _whole(self, sample: Any) -> Any:  # noqa: ANN401
        """What is returned for a sample that gets no partners."""
        sample = self._alone(sample)
        return sample if self.transform is None else self.transform(sample)

    def _partners(self, count: int) -> list[int]:
        drawn: list[int] = sample_rng().integers(len(self), size=count).tolist()
        return drawn

    def _partner(self, partner: int, index: int) -> Any:  # noqa: ANN401
        """Read a sample of the other dataset that is to be joined with sample `index`."""
        try:
            return self.dataset[partner]
        except Exception as error:
            name, own = describe_sample(self.dataset, partner), self.describe(index)
            annotate(
                error,
                f"in sample {partner} ({name}), which {type(self).__name__} drew as a partner of "
                f"sample {index} ({own})",
            )
            note_unread(error, UnreadSample(partner, name, is_partner=True))
            raise

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch, here and in the other dataset; the loader calls it."""
        self._epoch = epoch
        announce_epoch(self.dataset, epoch)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class, as the other dataset has them; empty if it has none."""
        # No count of the labels, as `class_names_of` makes it: this is called for every sample.
        dataset = self.dataset
        while dataset is not None:
            if (names := getattr(dataset, "class_names", None)) is not None:
                return tuple(names)
            dataset = getattr(dataset, "dataset", None)
        return ()

    @property
    def labels(self) -> Any:  # noqa: ANN401 - an array, or a RaggedArray
        """The other dataset's labels, of each sample without its partners; None without any."""
        return known_labels(self.dataset)

    @property
    def fingerprint(self) -> str | None:
        """The other dataset's fingerprint; None without one."""
        return fingerprint_of(self.dataset)

    def describe(self, index: int) -> str | None:
        """Return what errors call a sample: as in the other dataset, partners left out."""
        return describe_sample(self.dataset, index)


class LabelMixing(PartneredDataset):
    """Knows how labels become soft: a share for each class."""

    _usual_alpha: ClassVar = 1.0

    @removed_arguments(p="probability=")
    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        probability: float = 1.0,
        alpha: float | None = None,
        *,
        num_classes: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        until_epoch: int | None = None,
    ) -> None:
        """Say how often, and how much.

        Args:
            dataset: Map-style, with a length; its images of one size.
            probability: Of a mixture, 0 to 1.
            alpha: Of the Beta distribution that the share is drawn from, above 0. 32: near to one
                half; 0.2: mostly near 0 or 1. None: 32 for `MixUp`, 1 for `CutMix`.
            num_classes: For pairs; None: as many as the dataset has `class_names`.
            transform: Applied to the result.
            until_epoch: Epochs from this one on have no mixture. None: all have.
        """
        super().__init__(
            dataset, probability=probability, transform=transform, until_epoch=until_epoch
        )
        self.alpha = checked_number("alpha", self._usual_alpha if alpha is None else alpha, 1e-6)
        self.num_classes = checked_optional("num_classes", num_classes, 1)

    def _share(self) -> float:
        return float(sample_rng().beta(self.alpha, self.alpha))

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        image, label = self._pair(sample)
        return image, self._soft(label)

    def _pair(self, sample: Any) -> tuple[Any, Any]:  # noqa: ANN401
        if isinstance(sample, (tuple, list)) and len(sample) == 2:
            image_of(sample[0])  # or it says what it is
            return sample[0], sample[1]
        raise ConfigError(
            f"{type(self).__name__} takes pairs (image, class); got a {type(sample).__name__}. "
            "Use Mosaic or MixUp for detection samples, which are dicts"
        )

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
                f"a sample has the class {label}, but classes go from 0 to {num_classes - 1}"
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


class MixUp(LabelMixing):
    """Samples that are a weighted mean of two.

        image = share * one + (1 - share) * other          share ~ Beta(alpha, alpha)

    Of detection samples (dicts) the objects of both are kept, as they are; "letterbox" is dropped.
    Of pairs (image, class) the labels are mixed as the images are: float32 (num_classes,); also
    those of samples that are not mixed, so that all samples are alike.

    Reference:
        Zhang and others, "mixup: Beyond Empirical Risk Minimization" (ICLR 2018), for
        classification, with alpha 0.1 to 0.4; Beta(32, 32) and detection as published with YOLOv5.

    Example:
        >>> pairs = [(np.full((2, 2, 3), 100 * n, np.uint8), n) for n in range(2)]
        >>> image, label = MixUp(pairs, alpha=0.2, num_classes=2)[1]
        >>> label.dtype, round(float(label.sum()), 5), int(image[0, 0, 0]) == round(100 * label[1])
        (dtype('float32'), 1.0, True)
    """

    _usual_alpha = 32.0

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        return without_letterbox(sample) if isinstance(sample, dict) else super()._alone(sample)

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


class CutMix(LabelMixing):
    """Pairs (image, class), a rectangle of each image from another one.

    The rectangle has the image's aspect ratio and (1 - share) of its area. The label is float32
    (num_classes,): the exact share of the pixels that each class has. Dicts are refused: a box over
    what is half covered would be wrong.

    Reference:
        Yun and others, "CutMix: Regularization Strategy to Train Strong Classifiers with
        Localizable Features" (ICCV 2019): share ~ Beta(1, 1).

    Example:
        >>> pairs = [(np.full((8, 8, 3), n, np.uint8), n) for n in range(2)]
        >>> image, label = CutMix(pairs, num_classes=2)[0]
        >>> bool(image.mean() == label[1])
        True
    """

    def _combined(self, index: int) -> Any:  # noqa: ANN401
        (partner,) = self._partners(1)
        rng, share = sample_rng(), self._share()
        place = rng.random(2)
        image, label = self._pair(self.dataset[index])
        other_image, other_label = self._pair(self._partner(partner, index))
        self._check_alike(image, other_image, (index, partner))
        side = math.sqrt(1 - share)
        rows, columns = (_span(image.shape[axis], side, place[axis]) for axis in (0, 1))
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
    half, middle = int(length * part) / 2, at * length
    return slice(max(0, round(middle - half)), min(length, round(middle + half)))


class Mosaic(PartneredDataset):
    """Samples of a detection dataset, each on one canvas with partners; the canvas is 2 s wide.

    `Mosaic(dataset, s)` alone gives images of 2 s x 2 s. To get s x s, as the recipe trains on, you
    must pass `transform=RandomPerspective(s)`, which moves the canvas at random and cuts it.

    A sample that gets no mosaic (`probability`, `until_epoch`) is letterboxed to s and handed to
    `transform`; without one it lies in the middle of a canvas of 2 s. A `whole_transform` takes the
    place of that. Objects are clipped with their image; "letterbox" is dropped.

    Attributes:
        dataset: Where the images come from: its samples are dicts.

    Reference:
        Bochkovskiy and others, "YOLOv4: Optimal Speed and Accuracy of Object Detection" (2020);
        canvas, centre, fill and the end of it in the last epochs as published with YOLOv5.

    Example:
        >>> cell = {
        ...     "image": np.full((30, 40, 3), 255, np.uint8),
        ...     "boxes": np.array([[10, 10, 20, 20]], np.float32),
        ...     "labels": np.array([3]),
        ... }
        >>> sample = Mosaic([cell, cell], size=64)[0]
        >>> sample["image"].shape, sample["boxes"].shape[1], set(sample["labels"].tolist())
        ((128, 128, 3), 4, {3})
    """

    @removed_arguments(p="probability=", img_scale="size=", tiles="nothing: four images are joined")
    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - anything with an index and a length
        size: int = 640,
        *,
        probability: float = 1.0,
        fill: int = 114,
        min_side_px: float = 1.0,
        transform: Callable[[Any], Any] | None = None,
        until_epoch: int | None = None,
        whole_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """Say how large, and how often.

        Args:
            dataset: Map-style, with a length.
            size: s, in pixels, at least 2: the longer side of each image on the canvas, which is
                2 s wide and high.
            probability: Of a mosaic, 0 to 1.
            fill: Value of the canvas in all channels, 0 to 255.
            min_side_px: Objects are dropped whose box, clipped, is not wider and higher than this.
            transform: Applied to the result: `RandomPerspective(size)`, or a chain that begins
                with it. None gives the whole canvas.
            until_epoch: Epochs from this one on have no mosaic: the recipe trains its last epochs
                (10 or 15) on whole images. None: all have. The loader sets the epoch.
            whole_transform: Applied to a sample that gets no mosaic, as the dataset has it, and all
                that is: it is neither letterboxed to s nor handed to `transform`. For sizes that
                are no squares: `Compose(Letterbox((480, 640)), ...)`. None: see above.
        """
        super().__init__(
            dataset, probability=probability, transform=transform, until_epoch=until_epoch
        )
        self.whole_transform = whole_transform
        self.size_px = checked_whole("size", size, 2)
        self.fill = checked_whole("fill", fill, 0, 255)
        self.min_side_px = checked_number("min_side_px", min_side_px, 0)
        self._letterbox = Letterbox(self.size_px, self.fill)
        self._middle = Letterbox(2 * self.size_px, self.fill, enlarge=False)

    def _alone(self, sample: Any) -> Any:  # noqa: ANN401
        boxed = self._letterbox(sample)
        # What comes after `transform` may well want images of one size: a batch, or MixUp.
        return without_letterbox(boxed if self.transform is not None else self._middle(boxed))

    def _whole(self, sample: Any) -> Any:  # noqa: ANN401
        if self.whole_transform is None:
            return super()._whole(sample)
        return self.whole_transform(sample)

    def _combined(self, index: int) -> dict[str, Any]:
        rng, side = sample_rng(), self.size_px
        partners = self._partners(3)
        centre = rng.uniform(side / 2, 3 * side / 2, 2).astype(int).tolist()
        places = rng.permutation(4).tolist()  # the sample itself is in any of the four
        own = self.dataset[index]
        first = image_of(own)
        canvas = np.full((2 * side, 2 * side, *first.shape[2:]), self.fill, first.dtype)
        placed = [self._placed(own, centre, places[0], canvas)]
        for partner, place in zip(partners, places[1:], strict=True):
            placed.append(self._placed(self._partner(partner, index), centre, place, canvas))
        return joined(placed, canvas)

    def _placed(
        self, sample: dict[str, Any], centre: list[int], place: int, canvas: NDArray[Any]
    ) -> dict[str, Any]:
        """Draw an image into its quadrant; return its objects, as they are on the canvas."""
        image = image_of(sample)
        if image.shape[2:] != canvas.shape[2:] or image.dtype != canvas.dtype:
            raise ConfigError(
                f"the images of a mosaic are {image.dtype} {image.shape} and {canvas.dtype} "
                f"(…, {canvas.shape[2:]}): decode all of them to uint8 RGB"
            )
        scale = self.size_px / max(image.shape[:2])
        height, width = (max(1, round(side * scale)) for side in image.shape[:2])
        # Tiles meet in the centre, and are cut at the canvas.
        left = centre[0] if place % 2 else centre[0] - width
        top = centre[1] if place >= 2 else centre[1] - height
        x1, y1 = max(left, 0), max(top, 0)
        x2, y2 = min(left + width, canvas.shape[1]), min(top + height, canvas.shape[0])

        def draw(image: NDArray[Any], canvas: NDArray[Any]) -> NDArray[Any]:
            if x2 > x1 and y2 > y1:
                scaled = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
                part = scaled[y1 - top : y2 - top, x1 - left : x2 - left]
                canvas[y1:y2, x1:x2] = part.reshape(y2 - y1, x2 - x1, *canvas.shape[2:])
            return canvas

        factors = width / image.shape[1], height / image.shape[0]
        objects = moved(sample, factors, (left, top))
        objects = clipped(objects, (x1, y1, x2, y2), self.min_side_px)
        blank = canvas.shape[:2]
        placed: dict[str, Any] = with_image(
            objects, draw(image, canvas), lambda mask: draw(mask, np.zeros(blank, np.uint8))
        )
        return placed
