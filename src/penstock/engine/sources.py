# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a batch's seats come from, one by one: what `Salvage` works on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock.engine.map_reader import note_samples
from penstock.engine.plan import sample_key
from penstock.engine.seats import MOST_ATTEMPTS, Seat
from penstock.engine.substitutes import Substitutes
from penstock.errors import TooManyFailures, WorkerDied
from penstock.faults import text_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from penstock.data.dataset import Allocator
    from penstock.engine.map_reader import MapReader
    from penstock.engine.plan import Caution, Recipe
    from penstock.engine.share_reader import ShareReader
    from penstock.randomness.samples import SampleStreams

__all__ = ["MapSource", "ShareSource", "Source"]

_LONGEST_RUN: Final = 100  # the same for an iterator, which has no choice


class Source(Protocol):
    """Reads the samples of seats."""

    def read(self, seat: Seat) -> Any:  # noqa: ANN401
        """Return the sample that is to take `seat`.

        Raises:
            StopIteration: there are no more.
            Exception: it cannot be made.
        """

    def gather(self, seats: list[Seat], empty: Allocator) -> tuple[bool, Any]:
        """Return what is to be collated: (False, samples), or (True, the batch already)."""

    def read_anew(self, seats: list[Seat]) -> None:
        """Read the samples once more, where that is possible: collating may have changed them."""

    def find_substitute(self, seat: Seat, error: Exception) -> None:
        """Let `seat` be for another sample, as this one gave `error`.

        Raises:
            TooManyFailures: there is none, or many were bad.
        """

    def is_spent(self, error: Exception) -> bool:
        """Return whether no more can be read after reading raised `error`, and say why in it."""

    def what_is_known_of(self, seat: Seat) -> str:
        """Return what is known of how the sample of `seat` ended workers; empty if it did not."""


class MapSource:
    """A map-style dataset."""

    def __init__(
        self,
        reader: MapReader,
        recipe: Recipe,
        streams: SampleStreams | None,
        seed: int,
        epoch: int,
    ) -> None:
        """Read with `reader`; `seed` and `epoch` decide the substitutes."""
        self._reader = reader
        self._recipe = recipe
        self._streams = streams
        self._drawn_from = seed, epoch
        self._substitutes: Substitutes | None = None
        self._indices: list[Any] = []
        self._rejected: dict[int, set[Hashable]] = {}  # by number of the seat
        self._position = 0
        self._stride = 1
        self._killers: dict[Hashable, tuple[str, str]] = {}

    def begin(
        self, indices: list[Any], position: int, stride: int, caution: Caution | None
    ) -> list[Seat]:
        """Return the seats of a batch."""
        self._indices = indices
        self._rejected = {}
        self._position = position
        self._stride = stride
        known = () if caution is None else caution.killers
        self._killers = {key: (reason, advice) for key, reason, advice in known}
        return [Seat(k, index, position + k * stride) for k, index in enumerate(indices)]

    def read(self, seat: Seat) -> Any:  # noqa: ANN401
        """Return the sample, tried as often as the policy says."""
        how = self._killers.get(sample_key(seat.index))
        if how is not None:
            raise WorkerDied(how[0])
        for _ in range(self._recipe.faults.retries):
            try:
                return self._read_once(seat)
            except Exception:  # tried again; the last time it counts
                continue
        return self._read_once(seat)

    def _read_once(self, seat: Seat) -> Any:  # noqa: ANN401
        try:
            if self._reader.whole_batch([seat.index]) is not None:
                return self._read_whole([seat], np.empty)  # `gather` reads it with the others
            return self._reader.read_one(seat)
        except Exception as error:
            self._reader.note(error, seat.index)
            raise

    def gather(self, seats: list[Seat], empty: Allocator) -> tuple[bool, Any]:
        """Return the samples of `seats`; what can be read together is read once more, together."""
        indices = [seat.index for seat in seats]
        if self._reader.whole_batch(indices) is not None:
            return True, self._read_whole(seats, empty)
        if self._reader.reads_together:
            self._begin_part(seats)
            return False, self._reader.read_together(indices)
        return False, [seat.sample for seat in seats]

    def _read_whole(self, seats: list[Seat], empty: Allocator) -> Any:  # noqa: ANN401
        self._begin_part(seats)
        indices = np.array([seat.index for seat in seats], np.int64)
        return self._reader.read_whole(indices, empty)

    def _begin_part(self, seats: list[Seat]) -> None:
        if self._streams is not None:
            places = {seat.number: seat.attempt for seat in seats}
            self._streams.begin_part(self._position, self._stride, places)

    def read_anew(self, seats: list[Seat]) -> None:
        """Read samples that are read one by one; the others are read when they are gathered."""
        if self._reader.whole_batch([]) is not None or self._reader.reads_together:
            return
        for seat in seats:
            seat.sample = self.read(seat)

    def find_substitute(self, seat: Seat, error: Exception) -> None:
        """Draw another index."""
        rejected = self._rejected.setdefault(seat.number, set())
        rejected.add(sample_key(seat.index))
        seat.attempt += 1
        if seat.attempt > MOST_ATTEMPTS:
            raise TooManyFailures(
                f"no substitute was found for sample {self._indices[seat.number]!r}: "
                f"{MOST_ATTEMPTS} others that were drawn in its place could not be made either, "
                f"the last one, {note_samples(self._recipe.dataset, [seat.index])}, for "
                f"{text_of(error)}. That many bad samples in a row are rarely an accident; "
                "loader.failures lists them."
            )
        if self._substitutes is None:
            self._substitutes = Substitutes(
                self._recipe.dataset, *self._drawn_from, from_all=self._recipe.covers_dataset
            )
        original = self._indices[seat.number]
        seat.index = self._substitutes.draw(
            seat.place, seat.attempt, original, self._indices, rejected
        )

    def is_spent(self, error: Exception) -> bool:
        """Return False: every sample is by itself."""
        return False

    def what_is_known_of(self, seat: Seat) -> str:
        """Return the memory figures, and the stack of a crash."""
        return self._killers.get(sample_key(seat.index), ("", ""))[1]


class ShareSource:
    """A worker's share of an iterable dataset: the next sample takes the place of a bad one."""

    def __init__(self, reader: ShareReader) -> None:
        """Read with `reader`."""
        self._reader = reader

    def read(self, seat: Seat) -> Any:  # noqa: ANN401
        """Return the next sample; nothing is tried twice."""
        return self._reader.read(seat)

    def gather(self, seats: list[Seat], empty: Allocator) -> tuple[bool, Any]:
        """Return the samples."""
        return False, [seat.sample for seat in seats]

    def read_anew(self, seats: list[Seat]) -> None:
        """Nothing can be read twice."""

    def find_substitute(self, seat: Seat, error: Exception) -> None:
        """Let the seat be for the next sample."""
        seat.attempt += 1
        if seat.attempt > _LONGEST_RUN:
            raise TooManyFailures(
                f"{_LONGEST_RUN} samples in a row did not fit into one batch of the iterable "
                f"dataset, the last one for {text_of(error)}; loader.failures lists them."
            )

    def is_spent(self, error: Exception) -> bool:
        """Return whether the iterator has come to its end by raising."""
        return self._reader.give_up(error)

    def what_is_known_of(self, seat: Seat) -> str:
        """Return nothing: no sample of an iterable can be told from the others."""
        return ""
