# SPDX-License-Identifier: Apache-2.0
"""`BalancedBatchSampler`: batches of P classes with K samples each, for metric learning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.labels.known import labels_given_or_known
from penstock.errors import ConfigError
from penstock.sampling.batches import BatchSampler, Layout
from penstock.sampling.class_items import ClassItems, grouped
from penstock.sampling.distributed import chosen_rank
from penstock.sampling.samplers import IndexSampler, check_positive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["BalancedBatchSampler"]

_BLOCK: Final = 1 << 22  # numbers shuffled or compared at a time


class BalancedBatchSampler(BatchSampler):
    """Batches of `p_classes` different classes with `k_samples` samples of each.

    As losses over pairs and triplets want them: every sample has others of its class beside it, and
    others that are not. A batch is class after class: its samples 0 to K - 1 are of one class, the
    next K of another.

    Classes take turns: all come once, in random order, before any comes again. Where P does not
    divide their number, each turn leaves out some, at random. Within a class the samples take turns
    likewise: all come once before any comes again. None is twice in a batch for its class, unless
    the class has fewer than K: then all of them are, some more often. A sample with several labels
    belongs to each of its classes; one without any is never drawn.

    An epoch is `num_batches` of all ranks together. With ranks, each has whole batches of P x K,
    and takes turns with the others: batches k of all ranks are one piece of the order that one rank
    would have. Where their number does not divide evenly, the first ones come twice.

    For a loader's `batch_sampler`; a Penstock loader resumes in it at once.

    Attributes:
        labels: As given or found, shape (samples,), or a `RaggedArray`.
        num_batches: Of an epoch, over all ranks.

    Example:
        >>> labels = ["cat"] * 5 + ["dog"] * 3 + ["fox"] * 2
        >>> batches = BalancedBatchSampler(labels, p_classes=2, k_samples=2)
        >>> [len(batch) for batch in batches]
        [4, 4]
        >>> [len({labels[index] for index in batch}) for batch in batches]
        [2, 2]

    Reference:
        Hermans, Beyer and Leibe, "In Defense of the Triplet Loss for Person Re-Identification",
        2017, section 2: batches of P persons with K images each.
    """

    def __init__(
        self,
        labels: Any,  # noqa: ANN401 - labels, or a dataset that knows them
        p_classes: int,
        k_samples: int,
        num_batches: int | None = None,
        seed: int = 0,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Find the samples of each class.

        Args:
            labels: One label per sample, or several of each; or a dataset that knows them. See
                `penstock.labels_of`.
            p_classes: Classes in a batch, at least 1.
            k_samples: Samples of each, at least 1.
            num_batches: Batches of an epoch, over all ranks; at least 1. None: as many as the
                samples make up, at least 1.
            seed: Decides the orders. The same on all ranks.
            num_replicas: Number of ranks that share an epoch; None asks as
                `DistributedSampler` does.
            rank: This one; None asks likewise.

        Raises:
            ConfigError: one of the above does not hold, there are fewer than `p_classes` classes,
                or the labels are not known.
        """
        check_positive("p_classes", p_classes)
        check_positive("k_samples", k_samples)
        chosen = chosen_rank(rank, num_replicas)
        self.labels = labels_given_or_known(labels, type(self).__name__)
        items = ClassItems.of(self.labels)
        if p_classes > len(items.classes):
            raise ConfigError(
                f"a batch should have p_classes={p_classes} different classes, but the labels of "
                f"{items.num_samples} samples have {len(items.classes)}. Lower p_classes; for "
                f"batches of the same size raise k_samples."
            )
        if num_batches is None:
            num_batches = max(items.num_samples // (p_classes * k_samples), 1)
        check_positive("num_batches", num_batches)
        self.num_batches = num_batches
        self.p_classes = p_classes
        self.k_samples = k_samples
        order = _BalancedOrder(items, p_classes, k_samples, num_batches, seed)
        order.rank, order.num_replicas = chosen
        super().__init__(order, p_classes * k_samples, drop_last=False)

    def layout(self) -> Layout:
        """Return where the batches of the current epoch lie."""
        order, size = self.sampler, self.batch_size
        assert isinstance(order, _BalancedOrder)
        return Layout(order.rank * size, size * order.world_size, 1)


class _BalancedOrder(IndexSampler):
    """The batches of one rank in a row."""

    num_replicas: int = 1

    def __init__(
        self, items: ClassItems, p_classes: int, k_samples: int, num_batches: int, seed: int
    ) -> None:
        super().__init__(seed)
        self._items = items
        self._p_classes = p_classes
        self._k_samples = k_samples
        self._num_batches = num_batches

    def _public_name(self) -> str:
        return "BalancedBatchSampler"

    @property
    def world_size(self) -> int:
        return self.num_replicas

    @property
    def total_size(self) -> int:
        return len(self) * self.num_replicas

    @property
    def source_length(self) -> int:
        return self._items.num_samples

    def __len__(self) -> int:
        num_batches = -(-self._num_batches // self.num_replicas)
        return num_batches * self._p_classes * self._k_samples

    def _num_items(self) -> int:
        return self._num_batches * self._p_classes * self._k_samples

    def indices(self) -> NDArray[np.int64]:
        rng = self.rng()
        classes = self._class_turns(rng)
        drawn = drawn_together(self._items, classes, self._k_samples, rng)
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
        rows = _shuffled_rows(turns, num_classes, rng)
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


def drawn_together(
    items: ClassItems, sequence: NDArray[np.integer[Any]], together: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return `together` items for each entry of `sequence`, by turns.

    A class goes through all of its items, in random order, before one comes again. The items of one
    entry differ, as long as the class has so many.

    Args:
        items: Of each class.
        sequence: Positions of classes, shape (draws,).
        together: At least 1.
        rng: Decides the orders.

    Returns:
        Indices of samples, shape (draws, together); a fresh array.
    """
    num_entries = np.bincount(sequence, minlength=len(items.counts))
    stops = np.cumsum(num_entries)
    by_class = np.empty((len(sequence), together), np.int64)  # those of the first class first
    for size, alike in items.alike(num_entries):
        for which in _in_blocks(alike, size, num_entries[alike] * together):
            entries = num_entries[which]
            numbers = _turns_of(size, entries, together, rng)
            rows = _ranges(stops[which] - entries, entries)
            by_class[rows] = items.at(np.repeat(which, entries)[:, None], numbers)
    drawn = np.empty_like(by_class)
    drawn[grouped(sequence, len(items.counts))] = by_class
    return drawn


def _in_blocks(
    alike: NDArray[np.int64], size: int, wanted: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Parts of the classes that are shuffled at a time, so that few numbers are held at once."""
    numbers = np.cumsum(-(-wanted // size) * size)
    cuts = np.flatnonzero(np.diff(numbers // _BLOCK)) + 1
    yield from np.split(alike, cuts)


def _turns_of(
    size: int, entries: NDArray[np.int64], together: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Numbers of items, `together` for each entry, of some classes that have `size` each.

    Returns:
        Shape (entries.sum(), together), those of the first class first.
    """
    wanted = entries * together
    turns = -(-wanted // size)
    rows = _shuffled_rows(int(turns.sum()), size, rng)
    if min(together, size) > 1:
        _keep_apart(rows, _ranges(np.zeros_like(turns), turns), together)
    if len(wanted) == 1:
        return rows.ravel()[: wanted[0]].reshape(-1, together).astype(np.int64)
    starts = (np.cumsum(turns) - turns) * size
    return rows.ravel()[_ranges(starts, wanted)].reshape(-1, together).astype(np.int64)


def _shuffled_rows(num_rows: int, size: int, rng: np.random.Generator) -> NDArray[Any]:
    """0 to `size` - 1 in random order, many times; of the smallest type."""
    rows = np.tile(np.arange(size, dtype=np.min_scalar_type(size)), (num_rows, 1))
    if size > 1:
        rng.permuted(rows, axis=1, out=rows)
    return rows


def _keep_apart(rows: NDArray[Any], turn: NDArray[np.int64], together: int) -> None:
    """Let no group of `together` numbers have one more often than it must.

    A group may begin at the end of one row, and end at the beginning of another. There, the numbers
    that the first row had in it give way to the next ones of their row; the rest stays in random
    order. So a row depends on one before it. But every so many rows a group ends with a row: all
    that are as many rows behind such an end can be done at once.

    Args:
        rows: Shuffled; changed in place.
        turn: Which row of its class each one is.
        together: At least 1.
    """
    size = rows.shape[1]
    period = together // math.gcd(size, together)
    for behind in range(1, min(period, int(turn.max(initial=0)) + 1)):
        num_before = behind * size % together
        num_here, num_first = together - num_before, num_before % size
        if num_first and num_here < size:  # else the row, or the first, is in the group as a whole
            which = np.flatnonzero(turn % period == behind)
            first = rows[which - 1 - num_before // size, size - num_first :]
            _give_way(rows, which, first, num_here)


def _give_way(
    rows: NDArray[Any], which: NDArray[np.int64], first: NDArray[Any], num_here: int
) -> None:
    """Let some rows begin with `num_here` numbers that are not in `first`, if they have so many."""
    is_shared = _are_in(rows[which, :num_here], first).any(axis=1)
    which, first = which[is_shared], first[is_shared]
    step = max(_BLOCK // rows.shape[1], 1)
    for start in range(0, len(which), step):
        part = which[start : start + step]
        is_new = ~_are_in(rows[part], first[start : start + step])
        is_new &= np.cumsum(is_new, axis=1) <= num_here
        new_order = np.argsort(~is_new, axis=1, kind="stable")
        rows[part] = np.take_along_axis(rows[part], new_order, axis=1)


def _are_in(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers of each row are in the same row of others."""
    found = np.zeros(rows.shape, bool)
    for column in others.T:
        found |= rows == column[:, None]
    return found


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`starts[i]`, `starts[i]` + 1, …, `lengths[i]` numbers of each, in a row."""
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return first + np.arange(len(first))
