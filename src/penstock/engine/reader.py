# SPDX-License-Identifier: Apache-2.0
"""The items of a batch, and the protocol of the readers that give each a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock.data.names import describe_sample

if TYPE_CHECKING:
    from penstock.data.dataset import Allocator

__all__ = ["MISSING", "MOST_ATTEMPTS", "BatchItem", "Reader", "name_samples"]

MISSING: Final = object()
MOST_ATTEMPTS: Final = 20  # at an item after the first; so many bad samples are no accident
_MOST_LISTED: Final = 16


class BatchItem:
    """One item of a batch, and the sample that is read for it.

    Attributes:
        number: Number of the item in the batch, from 0.
        index: Index of the sample to read; None in an iterable dataset.
        place: Place in the epoch's global order; decides the sample's random numbers.
        attempt: Number of the attempt: 0 for the sample that the sampler drew; one more for each
            replacement, and each time that it is made with other partners.
        sample: Sample that was read; `MISSING` before, and if it could not be made.
    """

    __slots__ = ("attempt", "index", "number", "place", "sample")

    def __init__(self, number: int, index: Any, place: int, sample: Any = MISSING) -> None:  # noqa: ANN401
        """Create an item with `sample`, or without one."""
        self.number = number
        self.index = index
        self.place = place
        self.attempt = 0
        self.sample = sample

    def with_sample(self, sample: Any) -> BatchItem:  # noqa: ANN401
        """Return the same item with another sample."""
        item = BatchItem(self.number, self.index, self.place, sample)
        item.attempt = self.attempt
        return item


class Reader(Protocol):
    """Reads the samples of items one by one, for `penstock.engine.recover`."""

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the sample of `item`.

        Raises:
            StopIteration: there are no more.
            Exception: it cannot be made.
        """

    def gather(self, items: list[BatchItem], empty: Allocator) -> tuple[bool, Any]:
        """Return (False, the samples to collate), or (True, the batch, collated already)."""

    def read_anew(self, items: list[BatchItem]) -> None:
        """Read the samples once more, where that is possible: collating may have changed them."""

    def replace(self, item: BatchItem, error: Exception) -> None:
        """Give `item` another sample to read, as this one raised `error`.

        Raises:
            TooManyFailures: there is none, or many were bad.
        """

    def is_spent(self, error: Exception) -> bool:
        """Return whether nothing can be read after `error`; if so, add a note of why to it."""

    def end_of_workers(self, item: BatchItem) -> str:
        """Return how the sample of `item` ended workers; empty if it did not."""


def name_samples(dataset: Any, indices: Any) -> str:  # noqa: ANN401
    """Return "sample 3 (photos/cat.jpg)", or "samples [3, 4]"; indices may be of any kind."""
    try:
        listed = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
    except TypeError:  # a slice, say
        return f"samples {indices!r}"
    if len(listed) > _MOST_LISTED:
        first = ", ".join(map(repr, listed[:_MOST_LISTED]))
        return f"samples [{first}, … {len(listed)} in all]"
    if len(listed) != 1:
        return f"samples {listed}"
    name = describe_sample(dataset, listed[0])
    return f"sample {listed[0]!r}" + ("" if name is None else f" ({name})")
