# SPDX-License-Identifier: Apache-2.0
"""Images with rare classes come more than once in an epoch: LVIS's repeat factor sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.labels.known import class_names_of, labels_given_or_known
from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.sampling.class_items import ClassItems
from penstock.sampling.samplers import CountedSampler, check_bool, checked_positive, digest

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RepeatFactorSampler(CountedSampler):
    """Every image once, and those with rare classes more often.

    With f(c) the share of images in which class c occurs at least once:

        r(c)     = max(1, sqrt(threshold / f(c)))        root=False: max(1, threshold / f(c))
        r(image) = max of r(c) over its classes; 1 for an image without any

    An epoch has image i floor(r_i) times, and once more with probability r_i - floor(r_i), drawn
    anew in each epoch. Classes in a share `threshold` of the images or more are left as they are.
    To double the threshold is to repeat a rare class sqrt(2) = 1.41 times as often, not twice; only
    with `root=False` it is twice.

    All epochs are equally long: round(sum of r_i). For that the images that come once more are
    drawn together, by systematic sampling from a random order.

    Attributes:
        labels: As given or found; not a copy.
        class_names: Of the dataset that was given, by class number; None if it has none.
        classes: The classes that occur, ascending; shape (classes,).
        class_frequencies: f(c), float64 of shape (classes,).
        class_repeat_factors: r(c), likewise.
        repeat_factors: r of each image, float64 of shape (samples,).
        num_samples: Indices in an epoch.

    Example:
        >>> boxes = [[0, 0], [0], [0, 1], [0], [], [0], [0], [0], [0]]  # classes of their boxes
        >>> sampler = RepeatFactorSampler(boxes, threshold=0.5, seed=1)
        >>> sampler.class_frequencies.round(3), sampler.class_repeat_factors.round(3)
        (array([0.889, 0.111]), array([1.   , 2.121]))
        >>> sorted(sampler)
        [0, 1, 2, 2, 3, 4, 5, 6, 7, 8]

    Reference:
        Gupta, Dollar and Girshick, "LVIS: A Dataset for Large Vocabulary Instance Segmentation",
        CVPR 2019, appendix. Systematic sampling: Madow, 1949.
    """

    @removed_arguments(shuffle="numpy.sort of indices()")
    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - labels in many forms, or a dataset that has them
        threshold: float,
        seed: int | None = None,
        *,
        root: bool = True,
        num_samples: int | None = None,
        column: str | int | None = None,
    ) -> None:
        """Count the classes, and set the repeat factors.

        Args:
            labels: The classes of each image: a list of lists, a `RaggedArray`, a 2-D array of 0
                and 1 (samples, classes), or one class each; or a dataset that has them. A class
                that an image has twice counts once.
            threshold: The share of images, 0 to 1, from which on a class is not repeated; 0.5 for
                50 %. LVIS has 0.001, with 1,200 classes. Choose it by `class_frequencies`: below
                the smallest of them nothing is repeated.
            seed: Decides the orders; None: that of the loader.
            root: Whether to take the root.
            num_samples: Indices in an epoch; None is round(sum of r_i). More than that is as many
                whole epochs, each with draws of its own, and the beginning of another; a part of an
                epoch is a random one, so that the images' ratios stay what they are.
            column: Which field of the annotations, column or attribute of a dataset the labels are:
                as for `penstock.labels_of`.

        Raises:
            ConfigError: no samples, labels that are not known, or an argument out of range.
        """
        super().__init__(seed)
        if not 0 <= threshold <= 1:
            raise ConfigError(
                "threshold should be a share of the images, 0 to 1 (0.5 for 50 %), from which on a "
                f"class is not repeated; but got threshold={threshold!r}."
            )
        check_bool("root", root)
        if num_samples is not None:
            checked_positive("num_samples", num_samples)
        self.threshold = float(threshold)
        self.root = root
        self.labels = labels_given_or_known(labels, type(self).__name__, column)
        self.class_names = class_names_of(labels, column)
        if not len(self.labels):
            raise ConfigError("RepeatFactorSampler got labels of 0 samples: there is no epoch.")
        self.source_length = len(self.labels)
        items = ClassItems(self.labels)
        self.classes: NDArray[Any] = items.classes
        self.class_frequencies: NDArray[np.float64] = items.counts / items.num_samples
        ratios = self.threshold / self.class_frequencies
        self.class_repeat_factors: NDArray[np.float64] = np.maximum(
            1.0, np.sqrt(ratios) if self.root else ratios
        )
        self.repeat_factors: NDArray[np.float64] = np.ones(items.num_samples, np.float64)
        for position in np.flatnonzero(self.class_repeat_factors > 1).tolist():
            images, factor = items.items_of(position), self.class_repeat_factors[position]
            self.repeat_factors[images] = np.maximum(self.repeat_factors[images], factor)
        self._epoch_size = round(float(self.repeat_factors.sum()))
        self.num_samples = self._epoch_size if num_samples is None else int(num_samples)

    def indices(self) -> NDArray[np.int64]:
        """Return the order of the current epoch, of shape (num_samples,); a fresh array."""
        rng, wanted = self.rng(), self.num_samples
        sizes = [self._epoch_size] * (wanted // self._epoch_size)
        if rest := wanted % self._epoch_size:
            sizes.append(rest)
        passes = [self._one_pass(rng)[:size] for size in sizes]
        return passes[0] if len(passes) == 1 else np.concatenate(passes)

    def _one_pass(self, rng: np.random.Generator) -> NDArray[np.int64]:
        times = self.repeat_factors.astype(np.int64)
        several = np.flatnonzero(times > 1)  # mostly few, and np.repeat of all would be slow
        again = np.repeat(several, times[several] - 1)
        num_always = len(times) + len(again)
        order = np.empty(self._epoch_size, np.int64)
        order[: len(times)] = np.arange(len(times))
        order[len(times) : num_always] = again
        fractions = self.repeat_factors - times
        order[num_always:] = _systematic(fractions, self._epoch_size - num_always, rng)
        rng.shuffle(order)
        return order

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on; the repeat factors by their digest."""
        factors = digest(self.repeat_factors)
        chosen = {"threshold": self.threshold, "root": self.root, "shuffle": True}
        return {**super().settings(), "repeat_factors": factors, **chosen}


def _systematic(
    fractions: NDArray[np.float64], num_drawn: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return `num_drawn` different positions, each drawn with about its fraction as probability."""
    # The positions with a fraction are laid out in random order on a line, each as long as its
    # probability; those on which the points u, u + 1, u + 2 … fall are drawn. `num_drawn` is the
    # sum of the fractions, rounded.
    candidates = np.flatnonzero(fractions)
    if not num_drawn:
        return candidates[:0]
    rng.shuffle(candidates)
    ends = np.cumsum(_with_sum(fractions[candidates], num_drawn))
    points = np.arange(1, num_drawn + 1) - rng.random()  # in (k, k + 1]: no length of 0 is hit
    drawn = np.searchsorted(ends, points)
    return candidates[np.minimum(drawn, len(candidates) - 1)]  # rounding may have cut the last end


def _with_sum(fractions: NDArray[np.float64], wanted: int) -> NDArray[np.float64]:
    """Return the fractions, changed a little so that they sum to a whole number of them."""
    # A sum that is too large is scaled down. For one that is too small the complements are: scaled
    # up, a fraction might get above 1, and its image would have to come twice more.
    total, most = float(fractions.sum()), len(fractions)
    if wanted <= total:
        return fractions * (wanted / total)
    return 1 - (1 - fractions) * ((most - wanted) / (most - total))
