# SPDX-License-Identifier: Apache-2.0
"""Places of a batch, each to be taken by a sample."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MOST_ATTEMPTS", "NO_SAMPLE", "Seat"]

NO_SAMPLE: Final = object()
MOST_ATTEMPTS: Final = 20  # to fill a seat after the first; as many bad ones are no accident


class Seat:
    """One place of a batch.

    Attributes:
        number: Which, from 0.
        index: Of the sample that is to take it; None in an iterable dataset.
        place: In the epoch's global order; decides the sample's random numbers.
        attempt: 0 for the sample that the sampler drew; one more for each substitute, and each time
            that it is made with other partners.
        sample: What was made for it; `NO_SAMPLE` as long as, or because, there is none.
    """

    __slots__ = ("attempt", "index", "number", "place", "sample")

    def __init__(self, number: int, index: Any, place: int, sample: Any = NO_SAMPLE) -> None:  # noqa: ANN401
        """Leave the place free, or taken by `sample`."""
        self.number = number
        self.index = index
        self.place = place
        self.attempt = 0
        self.sample = sample

    def with_sample(self, sample: Any) -> Seat:  # noqa: ANN401
        """Return the same seat, taken by `sample`."""
        seat = Seat(self.number, self.index, self.place, sample)
        seat.attempt = self.attempt
        return seat
