# SPDX-License-Identifier: Apache-2.0
"""What samplers that draw by class have in common: labels, and the samples of each class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.data.labels.known import class_names_of, labels_given_or_known
from penstock.sampling.class_items import ClassItems
from penstock.sampling.samplers import IndexSampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ClassSampler"]


class ClassSampler(IndexSampler):
    """A sampler that draws a class, and then a sample that has it.

    Subclasses define `indices`, and set `num_samples`.

    Attributes:
        labels: As they were given or found.
        class_names: Of the dataset that was given, by class number; None if it has none.
        num_samples: Indices in an epoch.
    """

    num_samples: int

    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - in many forms
        seed: int,
        column: str | int | None = None,
    ) -> None:
        """Find the samples of each class.

        Args:
            labels: Of each sample, one or more; or a dataset that knows them.
            seed: Decides the orders.
            column: What a dataset calls them, as for `penstock.labels_of`.

        Raises:
            ConfigError: there are no labels.
        """
        super().__init__(seed)
        self.labels = labels_given_or_known(labels, type(self).__name__, column)
        self.class_names = class_names_of(labels, column)
        self._items = ClassItems.of(self.labels)

    @property
    def classes(self) -> NDArray[Any]:
        """The labels' values, ascending; do not write to it."""
        return self._items.classes

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples that have each class; do not write to it."""
        return self._items.counts

    @property
    def source_length(self) -> int:
        """Samples of the dataset that it was made for."""
        return self._items.num_samples

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples
