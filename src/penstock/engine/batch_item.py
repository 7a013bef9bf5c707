# SPDX-License-Identifier: Apache-2.0
"""The items of a batch: each an index, its place in the epoch, and the sample made for it."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MISSING", "MOST_ATTEMPTS", "BatchItem"]

MISSING: Final = object()
MOST_ATTEMPTS: Final = 20  # to fill an item after the first; as many bad ones are no accident


class BatchItem:
    """One item of a batch.

    Attributes:
        number: Which, from 0.
        index: Of its sample; None in an iterable dataset.
        place: In the epoch's global order; decides the sample's random numbers.
        attempt: 0 for the sample that the sampler drew; one more for each replacement, and each
            time that it is made with other partners.
        sample: What was made for it; `MISSING` as long as, or because, there is none.
    """

    __slots__ = ("attempt", "index", "number", "place", "sample")

    def __init__(self, number: int, index: Any, place: int, sample: Any = MISSING) -> None:  # noqa: ANN401
        """Begin without a sample, or with `sample`."""
        self.number = number
        self.index = index
        self.place = place
        self.attempt = 0
        self.sample = sample

    def with_sample(self, sample: Any) -> BatchItem:  # noqa: ANN401
        """Return the same item with `sample`."""
        item = BatchItem(self.number, self.index, self.place, sample)
        item.attempt = self.attempt
        return item
