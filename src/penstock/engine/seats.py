# SPDX-License-Identifier: Apache-2.0
"""Places of a batch, each to be taken by a sample."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["NO_SAMPLE", "Seat"]

NO_SAMPLE: Final = object()


class Seat:
    """One place of a batch.

    Attributes:
        number: Which, from 0.
        index: Of the sample that is to take it; None in an iterable dataset.
        attempt: 0 for the sample that the sampler drew, 1 for its first substitute.
        sample: What was made for it; `NO_SAMPLE` as long as, or because, there is none.
    """

    __slots__ = ("attempt", "index", "number", "sample")

    def __init__(self, number: int, index: Any) -> None:  # noqa: ANN401 - any key
        """Leave the place free."""
        self.number = number
        self.index = index
        self.attempt = 0
        self.sample: Any = NO_SAMPLE
