# SPDX-License-Identifier: Apache-2.0
"""A class first, every one as often, and then a sample that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.sampling.class_sampler import ClassSampler
from penstock.sampling.samplers import check_positive

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ClassAwareSampler"]


class ClassAwareSampler(ClassSampler):
    """Classes in turn, all of them before one comes again, and of each a sample that has it.

    The sampler of Open Images' detectors, where a sample has labels of several classes. Samples
    without a label never come. Within a class they come in turn too, in random order: all before
    one comes again in the epoch.

    Classes are drawn equally often, not shown so: a class that comes along with others is shown
    more.

    `ClassBalancedSampler` with `alpha=1` has the same shares; there the classes of draws follow
    each other as chance has it, and samples without a label keep their share.

    Attributes:
        labels: As they were given or found.
        classes: The labels' values, ascending, shape (classes,).
        counts: Samples that have each class, int64 of shape (classes,).
        class_names: Of the dataset that was given, by class number; None if it has none.
        num_samples: Indices in an epoch.
        samples_per_class: Draws in a row of one class. Of a class that ends its turn among them, a
            sample may come twice in the row; `BalancedBatchSampler` keeps them apart, and together
            on one rank.

    Reference:
        Gao et al.: Solution for Large-Scale Hierarchical Object Detection Datasets with Incomplete
        Annotation and Data Imbalance. 2018 (class-aware sampling, after Shen et al. 2016).

    Example:
        >>> labels = [[0], [0, 1], [0], [2], []]
        >>> drawn = ClassAwareSampler(labels, num_samples=300).indices()
        >>> np.bincount(drawn, minlength=5)[3:]
        array([100,   0])
    """

    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - labels in many forms, or anybody's dataset
        num_samples: int | None = None,
        samples_per_class: int = 1,
        seed: int = 0,
        *,
        column: str | int | None = None,
    ) -> None:
        """Set the labels and the size of an epoch.

        Args:
            labels: Of each sample, one or more; or a dataset that knows them, see
                `penstock.labels_of`.
            num_samples: Indices in an epoch, at least 1; None means as many as there are samples.
            samples_per_class: Draws of one class in a row, at least 1.
            seed: Decides the orders. The same on all ranks.
            column: Which field of the annotations, column or attribute of a dataset the labels are:
                as for `penstock.labels_of`.

        Raises:
            ConfigError: one of the above does not hold, or there are no labels.
        """
        super().__init__(labels, seed, column)
        check_positive("samples_per_class", samples_per_class)
        self.num_samples = self._items.num_samples if num_samples is None else num_samples
        check_positive("num_samples", self.num_samples)
        self.num_samples = int(self.num_samples)
        self.samples_per_class = samples_per_class

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of the draws made for each class: all the same; a fresh array."""
        return np.full(len(self.classes), 1.0 / len(self.classes))

    def indices(self) -> NDArray[np.int64]:
        """Return the draws of the current epoch, shape (num_samples,); a fresh array."""
        rng = self.rng()
        num_turns = -(-self.num_samples // self.samples_per_class)
        num_cycles = -(-num_turns // len(self.classes))
        classes = np.arange(len(self.classes), dtype=self._items.code_dtype)
        cycles = rng.permuted(np.tile(classes, (num_cycles, 1)), axis=1)
        sequence = np.repeat(cycles.ravel()[:num_turns], self.samples_per_class)
        return self._items.cycled(sequence[: self.num_samples], rng)

    def settings(self) -> dict[str, Any]:
        """Return what the draws depend on; the labels by their digest."""
        settings = {"labels": self._items.digest, "samples_per_class": self.samples_per_class}
        return {**super().settings(), **settings}
