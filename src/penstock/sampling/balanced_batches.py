# SPDX-License-Identifier: Apache-2.0
"""`BalancedBatchSampler`: batches of P classes with K samples each, for metric learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.labels.known import class_names_of, labels_given_or_known
from penstock.errors import ConfigError
from penstock.sampling.class_items import ClassItems, shuffled_rows
from penstock.sampling.distributed import chosen_rank
from penstock.sampling.samplers import BatchLayout, BatchOrder, BatchSampler, checked_positive

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BalancedBatchSampler(BatchSampler):
    """Batches of `p_classes` different classes with `k_samples` samples of each.

    As losses over pairs and triplets want them: every sample has others of its class beside it, and
    others that are not. A batch is class after class: its samples 0 to K - 1 are of one class, the
    next K of another.

    Classes take turns: all come once, in random order, before any comes again. Where P does not
    divide their number, each turn leaves out some, at random. Within a class the samples take turns
    likewise. None is twice in a batch for its class, unless the class has fewer than K: then all of
    them are, some more often. A sample with several labels belongs to each of its classes; one
    without any is never drawn.

    An epoch is `num_batches` of all ranks together. With ranks, each has whole batches of P x K,
    and takes turns with the others. Where their number does not divide evenly, the first ones come
    twice.

    Attributes:
        labels: As given or found, shape (samples,), or a `RaggedArray`.
        class_names: Of the dataset that was given, by class number; None if it has none.
        p_classes: As given, and the next.
        k_samples: Of each class in a batch.
        num_batches: Of an epoch, over all ranks.

    Example:
        >>> labels = ["cat"] * 5 + ["dog"] * 3 + ["fox"] * 2
        >>> batches = BalancedBatchSampler(labels, p_classes=2, k_samples=2)
        >>> [len(batch) for batch in batches]
        [4, 4]
        >>> [len({labels[index] for index in batch}) for batch in batches]
        [2, 2]
    """

    _shows = ("p_classes", "k_samples", "num_batches")

    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - labels, or a dataset that has them
        p_classes: int,
        k_samples: int,
        num_batches: int | None = None,
        seed: int | None = None,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        column: str | int | None = None,
    ) -> None:
        """Find the samples of each class.

        Args:
            labels: One label per sample, or several of each; or a dataset that has them. See
                `penstock.labels_of`.
            p_classes: Classes in a batch, at least 1.
            k_samples: Samples of each, at least 1.
            num_batches: Batches of an epoch, over all ranks; at least 1. None: as many as the
                samples with a label make up, at least 1.
            seed: Decides the orders. The same on all ranks. None: that of the loader.
            num_replicas: Number of ranks that share an epoch; None asks as
                `DistributedSampler` does.
            rank: This one; None asks likewise.
            column: Which field of the annotations, column or attribute of a dataset the labels are:
                as for `penstock.labels_of`.

        Raises:
            ConfigError: one of the above does not hold, there are fewer than `p_classes` classes,
                or the labels are not known.
        """
        self.p_classes = checked_positive("p_classes", p_classes)
        self.k_samples = checked_positive("k_samples", k_samples)
        chosen = chosen_rank(rank, num_replicas)
        self.labels = labels_given_or_known(labels, type(self).__name__, column)
        self.class_names = class_names_of(labels, column)
        items = ClassItems(self.labels)
        if p_classes > len(items.classes):
            raise ConfigError(
                f"a batch should have p_classes={p_classes} different classes, but the labels of "
                f"{items.num_samples} samples have {len(items.classes)}. Lower p_classes; for "
                f"batches of the same size raise k_samples."
            )
        if num_batches is None:
            num_labelled = items.num_samples - len(items.unlabelled)
            num_batches = max(num_labelled // (p_classes * k_samples), 1)
        self.num_batches = checked_positive("num_batches", num_batches)
        order = _BalancedOrder(items, self.p_classes, self.k_samples, self.num_batches, seed)
        order.rank, order.num_replicas = chosen
        super().__init__(order, self.p_classes * self.k_samples, drop_last=False)

    def layout(self) -> BatchLayout:
        """Return where the batches of the current epoch lie."""
        order, size = self.sampler, self.batch_size
        assert isinstance(order, _BalancedOrder)
        return BatchLayout(order.rank * size, size * order.world_size, 1)


class _BalancedOrder(BatchOrder):
    """The batches of one rank in a row."""

    def __init__(
        self, items: ClassItems, p_classes: int, k_samples: int, num_batches: int, seed: int | None
    ) -> None:
        super().__init__(seed)
        self._items = items
        self.source_length = items.num_samples
        self._p_classes = p_classes
        self._k_samples = k_samples
        self._num_batches = num_batches

    def __len__(self) -> int:
        num_batches = -(-self._num_batches // self.num_replicas)
        return num_batches * self._p_classes * self._k_samples

    def _num_items(self) -> int:
        return self._num_batches * self._p_classes * self._k_samples

    def indices(self) -> NDArray[np.int64]:
        rng = self.rng()
        classes = self._class_turns(rng)
        drawn = self._items.cycled(classes, rng, self._k_samples)
        batches = drawn.reshape(self._num_batches, -1)
        if self.num_replicas > 1:
            num_batches = len(self) // batches.shape[1]
            turns = np.arange(num_batches) * self.num_replicas + self.rank
            batches = batches[turns % self._num_batches]
        return batches.ravel()

    def _class_turns(self, rng: np.random.Generator) -> NDArray[np.integer[Any]]:
        """Positions of the classes of all batches in a row."""
        num_classes = len(self._items.classes)
        per_turn = num_classes // self._p_classes  # batches, none of which share a class
        turns = -(-self._num_batches // per_turn)
        rows = shuffled_rows(turns, num_classes, rng)
        used = rows[:, : per_turn * self._p_classes].ravel()
        return used[: self._num_batches * self._p_classes]

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on: not the number of ranks."""
        return {
            "kind": "BalancedBatchSampler",
            "seed": self.seed,
            "items": self._items.digest,
            "p_classes": self._p_classes,
            "k_samples": self._k_samples,
            "num_batches": self._num_batches,
        }
