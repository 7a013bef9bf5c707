# SPDX-License-Identifier: Apache-2.0
"""`PackingSampler`: documents packed into rows of a fixed number of tokens."""
# Rejected: *windows of documents, drawn and packed anew in each epoch*. The lengths alone decide
# what is packed tightly, so little randomness is gained. But each epoch has another number of rows.
# That number, and the place to resume at, are known only once the whole epoch is packed.
# *First fit*: it leaves more padding, and cannot pack all documents of one length at once.

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.keys import Purpose, checked_epoch, seed_sequence
from penstock.sampling.costs import checked_costs, dealt
from penstock.sampling.distributed import chosen_rank
from penstock.sampling.permutation import Permutation
from penstock.sampling.row_plan import RowPlan
from penstock.sampling.samplers import (
    BatchLayout,
    BatchOrder,
    BatchSampler,
    Resumable,
    check_bool,
    checked_positive,
    digest,
    pieces_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    from penstock.distributed import Rank
    from penstock.sampling.permutation import GroupShuffle

_WINDOW: Final = 1024  # steps that are sorted together
_BLOCK: Final = 1 << 14  # documents that are looked up at a time, about


class PackingSampler(BatchSampler):
    """Batches of documents that fill a number of rows, each of at most `max_tokens` tokens.

    Documents are packed once: the longest first, each into the row where it leaves least room. So
    every epoch has the same number of rows, and `len()` is exact. In each epoch, documents of one
    length change places, and rows come in another order. Two documents of a row stay together if no
    other document has their lengths. An epoch has every document once, but for its last step (see
    `drop_last`). Empty documents are left out. None is ever cut.

    A batch is the list of the documents of `rows` rows, in descending length within each row. A new
    row begins where a document does not fit: with lengths 5 3 | 4 4 | 3 2 and rows of 8 tokens, the
    batch is 5 3 4 4 3 2. `penstock.text.PackedCollate` finds the rows in this way.

    With several ranks, each gets `rows` rows in every step, dealt so that the ranks' costs are
    about equal. Which rows a step has depends on how many these are, not on the number of ranks. So
    a run may resume with another number of ranks if ranks times `rows` stays the same. (A dataset
    that draws random numbers for a document then draws others.)

    Packing 10 million documents takes some 0.6 s, and the plan some 50 MB of memory. An epoch takes
    no more, and begins at any step in milliseconds.

    Attributes:
        max_tokens: Most tokens in a row.
        num_rows: Rows in an epoch, over all ranks.
        padding: Share of padding in all rows, 0 to 1.
        dropped: Indices of the documents that are left out, ascending, int64: those that are empty,
            and with `too_long="drop"` those longer than a row.

    Example:
        >>> lengths = [5, 3, 4, 2, 4, 3]
        >>> batches = PackingSampler(lengths, max_tokens=8, rows=2, seed=7)
        >>> [[lengths[i] for i in batch] for batch in batches]
        [[4, 4, 3, 2], [5, 3]]
        >>> batches.num_rows, round(batches.padding, 3)
        (3, 0.125)
    """

    _shows = ("length", "max_tokens", "batch_size", "num_rows", "padding", "epoch")

    def __init__(
        self,
        lengths: ArrayLike,
        max_tokens: int,
        rows: int = 1,
        drop_last: bool = False,
        *,
        too_long: Literal["error", "drop"] = "error",
        cost: ArrayLike | None = None,
        window: int = _WINDOW,
        shuffle: bool = True,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Pack all documents.

        Args:
            lengths: Tokens of each document, integers, 0 or more, shape (n,).
            max_tokens: Most tokens in a row, at least 1.
            rows: Rows in a batch of this rank, at least 1.
            drop_last: Whether to leave out a last step that has fewer rows than the others; which
                rows these are differs from epoch to epoch. Otherwise, ranks may differ by one row
                in it; if it has fewer rows than there are ranks, some rows come twice.
            too_long: What happens if a document is longer than a row: "error" raises, "drop" leaves
                it out. Only the dataset can cut it, as an index always means the same sample.
            cost: What a document costs to compute, 0 or more, shape (n,), such as `lengths**2`. The
                cost of a row is the sum over its documents. None: the number of tokens.
            window: Number of steps whose rows are sorted by cost together, at least 1, so that the
                rows of a step have similar costs. A larger one makes the ranks more equal, and
                epochs more alike.
            shuffle: Whether orders are random. Otherwise rows come in the order of packing.
            seed: Decides the orders. The same on all ranks. None: that of the loader.
            num_replicas: Number of ranks that share an epoch; None asks as
                `DistributedSampler` does.
            rank: This one; None asks likewise.

        Raises:
            ConfigError: an argument is not as said above, a document is longer than a row, or there
                are fewer rows than ranks.
        """
        self.max_tokens = checked_positive("max_tokens", max_tokens)
        rows = checked_positive("rows", rows)
        window = checked_positive("window", window)
        check_bool("drop_last", drop_last)
        check_bool("shuffle", shuffle)
        if too_long not in ("error", "drop"):
            raise ConfigError(f"too_long should be 'error' or 'drop', but got {too_long=}.")
        chosen = chosen_rank(rank, num_replicas)
        numbers = _checked_lengths(lengths)
        is_long = numbers > self.max_tokens
        if too_long == "error" and is_long.any():
            which = int(is_long.argmax())
            raise ConfigError(
                f"document {which} has {numbers[which]} tokens, more than max_tokens={max_tokens} "
                f"({np.count_nonzero(is_long)} such of {len(numbers)}). Only a dataset can cut "
                f"documents: penstock.text.TokenFile(..., max_tokens={max_tokens}) does. Then give "
                "the lengths of that dataset. Or leave such documents out: too_long='drop'."
            )
        self.dropped: NDArray[np.int64] = np.flatnonzero(is_long | (numbers == 0))
        plan = RowPlan(numbers, self.max_tokens)
        self.num_rows = plan.num_rows
        if plan.num_rows < chosen.world_size:
            raise ConfigError(
                f"{len(numbers)} documents, {len(self.dropped)} of them empty or left out, fill "
                f"{plan.num_rows} rows of max_tokens={max_tokens}, fewer than the "
                f"{chosen.world_size} ranks. Lower max_tokens, or start fewer ranks."
            )
        num_tokens = int(numbers.sum()) - int(numbers[self.dropped].sum())
        self.padding: float = 1 - num_tokens / (self.num_rows * self.max_tokens)
        costs = None if cost is None else checked_costs(cost, len(numbers))
        settings = {
            "lengths": digest(numbers.astype(np.int64)),
            "max_tokens": self.max_tokens,
            "cost": None if costs is None else digest(costs),
            "window": window,
            "shuffle": shuffle,
        }
        self._order = _RowOrder(plan, costs, settings, chosen, rows, seed)
        self._order.source_length = len(numbers)
        self._order.is_cut = drop_last
        super().__init__(self._order, rows, drop_last)

    def layout(self) -> BatchLayout:
        """Return where the batches of the current epoch lie."""
        per_rank = self.batch_size * self._order.plan.max_documents
        return BatchLayout(self._order.rank * per_rank, per_rank * self._order.world_size, 1)

    def rows(self, epoch: int | None = None) -> Iterator[list[int]]:
        """Iterate over the documents of each row of this rank; None is the current epoch."""
        blocks = self._order.in_epoch(epoch).blocks(0)
        return (row.tolist() for found, counts in blocks for row in _pieces(found, counts.ravel()))

    def _counter(self) -> Resumable:
        return self  # batches: the sampler inside would count rows

    def _ordered(self, layout: BatchLayout, start: int = 0) -> Iterator[NDArray[np.int64]]:
        return self._order.in_epoch(None).batches(start)


class _RowOrder(BatchOrder):
    """The rows of one rank, step after step; within a step, in ascending order of number."""

    is_cut = False

    def __init__(
        self,
        plan: RowPlan,
        costs: NDArray[np.float64] | None,
        settings: dict[str, Any],
        chosen: Rank,
        rows: int,
        seed: int | None,
    ) -> None:
        super().__init__(seed)
        self.plan = plan
        self._costs = costs
        self._settings = settings
        self._rows = rows  # of a rank in a step
        self.rank, self.num_replicas = chosen

    @property
    def _step_size(self) -> int:
        return self._rows * self.num_replicas

    @property
    def _num_left(self) -> int:
        """Rows of a last step that has fewer."""
        return 0 if self.is_cut else self.plan.num_rows % self._step_size

    def __len__(self) -> int:
        """Rows of a rank, of which some have one less in the last step."""
        return self.plan.num_rows // self._step_size * self._rows + -(
            -self._num_left // self.num_replicas
        )

    @property
    def total_size(self) -> int:
        whole = self.plan.num_rows // self._step_size * self._step_size
        return whole + (max(self._num_left, self.num_replicas) if self._num_left else 0)

    def settings(self) -> dict[str, Any]:
        return {"kind": "PackingSampler", "seed": self.seed, **self._settings}

    def in_epoch(self, epoch: int | None) -> _RowOrder:
        """Return a copy that stays in an epoch; None is the current one."""
        order = copy.copy(self)
        order.epoch = self.epoch if epoch is None else checked_epoch(epoch)
        return order

    def indices(self) -> NDArray[np.int64]:
        steps = [window.ravel() for window in self._windows(0)]
        return np.concatenate(steps) if steps else np.empty(0, np.int64)

    def batches(self, start: int) -> Iterator[NDArray[np.int64]]:
        """Yield the documents of this rank's steps, from step `start` on."""
        for documents, counts in self.blocks(start):
            yield from _pieces(documents, counts.sum(axis=1))

    def blocks(self, start: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the documents of some steps at a time, and each row's count, (steps, rows)."""
        shuffle = self._shuffle()
        size = max(self._block // self._rows, 1)
        for window in self._windows(start):
            for first in range(0, len(window), size):
                rows = window[first : first + size]
                documents, counts = self.plan.documents(rows.ravel(), shuffle)
                yield documents, counts.reshape(rows.shape)

    @property
    def _block(self) -> int:
        """Rows whose documents are looked up at a time."""
        return max(_BLOCK * self.plan.num_rows // self.plan.num_documents, 1)

    def _shuffle(self) -> GroupShuffle | None:
        is_shuffled = self._settings["shuffle"]
        return self.plan.group_shuffle(self.seed, self.epoch, 1) if is_shuffled else None

    def _windows(self, start: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of this rank's steps from `start` on, ascending: (steps, rows) arrays."""
        is_shuffled, size = self._settings["shuffle"], self._settings["window"]
        num_rows = self.plan.num_rows
        order = Permutation(num_rows, (self.seed, self.epoch)) if is_shuffled else None
        num_steps = num_rows // self._step_size
        for first in range(start - start % size, num_steps, size):
            stop = min(first + size, num_steps)
            rows = np.arange(first * self._step_size, stop * self._step_size)
            shape = (stop - first, self._step_size)
            rows, costs, begins = self._drawn(rows, shape, order, first // size)
            skipped = max(start - first, 0)
            yield self._share(rows[skipped:], costs[skipped:], begins[skipped:])
        if self._num_left and start <= num_steps:
            rows = np.arange(num_rows - self._num_left, num_rows)
            # If there are fewer rows than ranks, the first rows of the epoch come once more.
            rows = np.append(rows, np.arange(self.num_replicas - len(rows)))
            yield self._share(*self._drawn(rows, (1, len(rows)), order, -(-num_steps // size)))

    def _drawn(
        self,
        rows: NDArray[np.int64],
        shape: tuple[int, int],
        order: Permutation | None,
        window: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Return the rows of a window's steps, their costs, and the rank that is dealt to first."""
        shuffle = self._shuffle()
        if order is None:
            costs = self._costs_of(rows, None)
            return rows.reshape(shape), costs.reshape(shape), np.zeros(shape[0], np.int64)
        rows = order[rows]
        costs = self._costs_of(rows, shuffle)
        sequence = seed_sequence(self.seed, Purpose.ORDER, self.epoch, 2, window)
        rng = np.random.Generator(np.random.Philox(sequence))
        turns = rng.permutation(np.argsort(-costs, kind="stable").reshape(shape))
        return rows[turns], costs[turns], rng.integers(self.num_replicas, size=shape[0])

    def _costs_of(
        self, rows: NDArray[np.int64], shuffle: GroupShuffle | None
    ) -> NDArray[np.float64]:
        if self._costs is None:
            return self.plan.tokens(rows).astype(np.float64)
        costs = np.empty(len(rows))
        for first in range(0, len(rows), self._block):
            part = slice(first, first + self._block)
            documents, counts = self.plan.documents(rows[part], shuffle)
            costs[part] = np.add.reduceat(self._costs[documents], np.cumsum(counts) - counts)
        return costs

    def _share(
        self, rows: NDArray[np.int64], costs: NDArray[np.float64], begins: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return this rank's rows of some steps, given those of all ranks and their costs."""
        if self.num_replicas == 1:
            return np.sort(rows, axis=1)
        num_more = rows.shape[1] % self.num_replicas
        if num_more:  # of a last step: the smallest, and no rank gets two of them
            falling = np.argsort(-costs[0], kind="stable")
            rows, costs = rows[:, falling], costs[:, falling]
        num_even = rows.shape[1] - num_more
        shares = dealt(costs[:, :num_even], self.num_replicas, begins)
        own = np.take_along_axis(rows, shares[:, self.rank], axis=1)
        if num_more:
            least_first = np.argsort(costs[0, shares[0]].sum(axis=1), kind="stable").tolist()
            turn = least_first.index(self.rank)
            own = np.append(own, rows[:, num_even:][:, turn : turn + 1], axis=1)
        return np.sort(own, axis=1)


def _pieces(documents: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    return pieces_of(documents, np.append(0, np.cumsum(counts)))


def _checked_lengths(lengths: ArrayLike) -> NDArray[np.integer]:
    # Of a dataset, numpy would read every sample.
    is_given = isinstance(lengths, (list, tuple)) or hasattr(lengths, "__array__")
    array = np.asarray(lengths if is_given else None)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise ConfigError(
            "lengths should be the number of tokens of each document, integers, at least one, but "
            f"got a {type(lengths).__name__} (shape {array.shape}, dtype {array.dtype})."
        )
    if (wrong := np.flatnonzero(array < 0)).size:
        raise ConfigError(
            f"lengths should be 0 or more, but lengths[{wrong[0]}] is {array[wrong[0]]} "
            f"({wrong.size} such of {len(array)})."
        )
    return array
