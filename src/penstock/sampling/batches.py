# SPDX-License-Identifier: Apache-2.0
"""Which indices make a batch.

A batch sampler over an `IndexSampler` is two things: an order, and where in it each batch begins.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, cast

import numpy as np

from penstock.data.dataset import is_current, length_of
from penstock.sampling.sampler_state import Resumable
from penstock.sampling.samplers import IndexSampler, Sampler, check_bool, check_positive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

    from numpy.typing import NDArray

    from penstock.sampling.sampler_state import SamplerPosition
    from penstock.sampling.samplers import Indices

# Indices computed at a time where an order is not stored: 128 KiB, and numpy's cost per call is
# gone.
_BLOCK: Final = 1 << 14


class BatchLayout(NamedTuple):
    """How an epoch's batches lie in the order of one rank, and in that of all ranks together.

    The second decides the random numbers of each sample: index j of batch k has place
    `first + k * per_batch + j * stride`, whichever rank it is on.

    Attributes:
        first: Place of the first index of this rank's first batch.
        per_batch: Places from the first index of a batch to that of the next.
        stride: Places from an index of a batch to the next one.
        offsets: Batch k of this rank is `order[offsets[k] : offsets[k + 1]]`, int64 of shape
            (batches + 1,). None: batches are of `batch_size` indices.
    """

    first: int
    per_batch: int
    stride: int
    offsets: NDArray[np.int64] | None = None


class BatchOrder(IndexSampler):
    """The order of a batch sampler that deals batches out itself: those of one rank in a row."""

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch, those included that come twice to make it even."""
        return len(self) * self.num_replicas


class BatchSampler(Resumable, Sampler[list[int]]):
    """Batches of another sampler's indices.

    Example:
        >>> from penstock.sampling import SequentialSampler
        >>> batches = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=False)
        >>> list(batches), len(batches)
        ([[0, 1], [2, 3], [4]], 3)
        >>> list(batches.index_batches())
        [array([0, 1]), array([2, 3]), array([4])]
    """

    _shows: ClassVar[tuple[str, ...]] = ("length", "batch_size", "drop_last", "sampler")

    #: Whether every batch, but perhaps the last, is of `batch_size` indices.
    is_even: bool = True

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        """Set the size of the batches.

        Args:
            sampler: Any iterable of indices; of other keys too, as long as only `__iter__` is used.
            batch_size: Indices in a batch, at least 1.
            drop_last: Whether a last, shorter batch is left out.
        """
        check_positive("batch_size", batch_size)
        check_bool("drop_last", drop_last)
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    @property
    def epoch(self) -> int:
        """The sampler's epoch."""
        epoch: int = self.sampler.epoch  # type: ignore[attr-defined]
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler, if it takes one."""
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches."""
        length = len(cast("Sized", self.sampler))
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def layout(self) -> BatchLayout:
        """Return where the batches of the current epoch lie. The sampler is an `IndexSampler`."""
        order = cast("IndexSampler", self.sampler)
        return BatchLayout(order.rank, self.batch_size * order.world_size, order.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of what the sampler yields, drawn no earlier than asked for.

        After `load_state_dict`, here or of an `IndexSampler` inside, only the rest of them.
        """
        counter = self._counter()
        place = counter._next_place()
        return self._from(place) if counter is self else self._cut(place)

    def _counter(self) -> Resumable:
        # The sampler counts its indices. Any other is asked for its indices once more, and those of
        # the batches given before are passed over.
        if self.is_even and self._has_order():
            return cast("IndexSampler", self.sampler)
        return self

    def _cut(self, place: SamplerPosition) -> Iterator[list[int]]:
        order = cast("IndexSampler", self.sampler)
        place.begin(order.epoch)
        for batch in batches_of(order.indices(), self.batch_size, self.drop_last, place.given):
            indices = batch.tolist()
            place.given += len(indices)  # no call follows at which Ctrl-C could hit
            yield indices

    def _from(self, place: SamplerPosition) -> Iterator[list[int]]:
        place.begin(getattr(self, "epoch", None))
        for batch in itertools.islice(self._drawn(), place.given, None):
            place.given += 1
            yield batch

    def _drawn(self) -> Iterator[list[int]]:
        if self._has_order():
            yield from (batch.tolist() for batch in self._ordered())
            return
        # A generator, since islice calls iter(), where what is its own iterator may begin again.
        indices = (index for index in self.sampler)
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch
            if len(batch) < self.batch_size:
                return

    def _has_order(self) -> bool:
        """Whether the sampler's order can be had without iterating."""
        return isinstance(self.sampler, IndexSampler) and is_current(
            type(self.sampler), "indices", ("__iter__",)
        )

    def _ordered(self) -> Iterator[NDArray[np.int64]]:
        """All batches; the order is that of the epoch at the time of the call."""
        order, offsets = cast("IndexSampler", self.sampler).indices(), self.layout().offsets
        if offsets is not None:
            return pieces_of(order, offsets)
        return batches_of(order, self.batch_size, self.drop_last)

    def index_batches(self) -> Iterator[NDArray[np.int64] | list[Any]]:
        """Return the batches as int64 arrays if the sampler is an `IndexSampler`, else as lists.

        The arrays are views of the order of the epoch at the time of the call: do not write.
        """
        if self._has_order() and is_current(type(self), "index_batches", ("__iter__",)):
            return self._ordered()
        return iter(self)

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on, as JSON has it."""
        inner: Any = self.sampler
        if isinstance(inner, IndexSampler):
            ranks, settings = inner.world_size, inner.settings()
        else:
            ranks, settings = 1, {"kind": type(inner).__name__, "length": length_of(inner)}
        return {
            "sampler": settings,
            "global_batch_size": self.batch_size * ranks,
            "drop_last": self.drop_last,
        }


def batches_of(
    order: Indices, batch_size: int, drop_last: bool, start: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of each batch of an order, from position `start` on.

    An array is cut into views. Any other order is computed in blocks.
    """
    stop = len(order) - (len(order) - start) % batch_size if drop_last else len(order)
    is_stored = isinstance(order, np.ndarray)
    block = max(stop, 1) if is_stored else max(_BLOCK // batch_size, 1) * batch_size
    for begin in range(start, stop, block):
        part = np.asarray(order[begin : min(begin + block, stop)], np.int64)
        for offset in range(0, len(part), batch_size):
            yield part[offset : offset + batch_size]


def pieces_of(order: Indices, offsets: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield `order[offsets[k] : offsets[k + 1]]` for each k."""
    for start, stop in itertools.pairwise(offsets.tolist()):
        yield np.asarray(order[start:stop], np.int64)
