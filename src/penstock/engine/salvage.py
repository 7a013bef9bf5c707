# SPDX-License-Identifier: Apache-2.0
"""Making a batch although some of its samples cannot be made.

The sample to blame is found by trying: each sample by itself, then in pairs with one that most
others agree with. What cannot be put down to single samples is an error of the collate function or
of the dataset as a whole, and is raised under any policy.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.engine.logbook import Phase
from penstock.engine.map_reader import MapReader
from penstock.engine.plan import sample_key
from penstock.engine.seats import NO_SAMPLE, Seat
from penstock.engine.share_reader import ShareReader
from penstock.engine.substitutes import Substitutes
from penstock.errors import TooManyFailures, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Hashable

    from penstock.engine.assembly import Assembler
    from penstock.engine.logbook import Notes
    from penstock.engine.plan import Caution, Recipe

__all__ = ["NO_BATCH", "BadSample", "Salvage"]

NO_BATCH: Final = object()
"""Stands for a batch of which no sample is left."""

_MOST_ATTEMPTS: Final = 20  # substitutes for one place; as many bad ones in a row are no accident
_MOST_REFERENCES: Final = 4  # samples that others are compared with


class BadSample(NamedTuple):
    """A sample that could not be made.

    Attributes:
        index: As the sampler, or a substitution, gave it; None in an iterable dataset.
        error: What was raised, without traceback.
        traceback: As text; for one that ended workers, all that is known of its end.
        replaced_by: What was tried in its place; None if nothing.
    """

    index: Any
    error: BaseException
    traceback: str
    replaced_by: Any = None


class Salvage:
    """Makes batches of what is left of them, for one epoch.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(
        self,
        reader: MapReader | ShareReader,
        assembler: Assembler,
        recipe: Recipe,
        notes: Notes,
        seed: int,
        epoch: int,
    ) -> None:
        """Begin an epoch.

        Args:
            reader: Reads samples.
            assembler: Collates and finishes.
            recipe: How a task becomes a batch, and what becomes of bad samples.
            notes: Where to note what is being done.
            seed: Decides the substitutes.
            epoch: Does so too.
        """
        self._map = reader if isinstance(reader, MapReader) else None
        self._share = reader if isinstance(reader, ShareReader) else None
        self._assembler = assembler
        self._recipe = recipe
        self._faults = recipe.faults
        self._notes = notes
        self._drawn_from = seed, epoch
        self._substitutes: Substitutes | None = None
        self._bad: list[BadSample] = []
        self._begin_batch([], 0, recipe.world_size, alone=False, killers={})

    def _begin_batch(
        self,
        indices: list[Any],
        position: int,
        stride: int,
        *,
        alone: bool,
        killers: dict[Hashable, tuple[str, str]],
    ) -> None:
        self._indices = indices
        self._position = position
        self._stride = stride
        self._alone = alone
        self._killers = killers

    def take_bad(self) -> list[BadSample]:
        """Return the bad samples that were found since the last call, in order."""
        bad, self._bad = self._bad, []
        return bad

    def fetch(self, indices: Any, position: int, stride: int, caution: Caution) -> Any:  # noqa: ANN401
        """Return a batch of a map-style dataset, finished; `NO_BATCH` if nothing is left of it.

        Args:
            indices: What the dataset takes: a list of them, or one if not batched.
            position: Place of the first in the epoch's global order.
            stride: From each to the next.
            caution: How to be careful.

        Raises:
            Exception: what cannot be put down to single samples, or all if the policy is to raise.
        """
        indices = list(indices) if self._recipe.is_batched else [indices]
        killers = {key: (reason, advice) for key, reason, advice in caution.killers}
        self._begin_batch(indices, position, stride, alone=caution.alone, killers=killers)
        seats = [Seat(number, index) for number, index in enumerate(indices)]
        for seat in seats:
            self.fill(seat, position + seat.number * stride)
        return self.join(seats, position)

    def fill(self, seat: Seat, place: int) -> None:
        """Give `seat` a sample: its own, a substitute's, or none.

        Args:
            seat: The place in the batch.
            place: Its place in the epoch's global order.

        Raises:
            StopIteration: the share of an iterable has ended.
        """
        while True:
            self._notes.seat(Phase.READING, seat)
            try:
                seat.sample = self._read(seat, place)
                if self._alone and (error := self._trial([seat], place)) is not None:
                    raise error
                return
            except StopIteration as end:
                if self._share is not None:
                    raise
                error = end
            except Exception as raised:
                error = raised
            self._reject(seat, place, error)
            if self._faults.on_error == "skip":
                return

    def _read(self, seat: Seat, place: int) -> Any:  # noqa: ANN401
        how = self._killers.get(sample_key(seat.index))
        if how is not None and seat.index is not None:
            raise WorkerDied(how[0])
        if self._share is not None:
            return self._share.read(seat, place)
        for _ in range(self._faults.retries):
            try:
                return self._read_once(seat, place)
            except Exception:  # tried again; the last time it counts
                continue
        return self._read_once(seat, place)

    def _read_once(self, seat: Seat, place: int) -> Any:  # noqa: ANN401
        assert self._map is not None
        reader = self._map
        try:
            whole = reader.whole_batch([seat.index])
            if whole is not None:  # it is read again, together with the others
                return self._read_whole(reader, [seat], np.empty)
            return reader.read_one(seat, place)
        except Exception as error:
            reader.note(error, seat.index)
            raise

    def _read_whole(self, reader: MapReader, seats: list[Seat], empty: Any) -> Any:  # noqa: ANN401
        if self._assembler.streams is not None:
            places = {seat.number: seat.attempt for seat in seats}
            self._assembler.streams.begin_part(self._position, self._stride, places)
        indices = np.array([seat.index for seat in seats], np.int64)
        return reader.read_whole(indices, empty)

    def _reject(self, seat: Seat, place: int, error: Exception) -> None:
        """Note that the sample is bad, and say what takes its place.

        Raises:
            Exception: `error` itself, if the policy is to raise, or an iterable cannot go on.
        """
        if not self._faults.tolerates or isinstance(error, TooManyFailures):
            raise error
        if self._share is not None and self._share.give_up(error):
            raise error
        if isinstance(error, WorkerDied):
            _, text = self._killers[sample_key(seat.index)]
        else:
            text = _as_text(error)
        _drop_frames(error)
        bad, seat.sample = BadSample(seat.index, error, text), NO_SAMPLE
        self._bad.append(bad)
        if self._faults.on_error == "replace":
            seat.attempt += 1
            if self._share is None:
                seat.index = self._draw(seat, place)
                self._bad[-1] = bad._replace(replaced_by=seat.index)

    def _draw(self, seat: Seat, place: int) -> Any:  # noqa: ANN401
        if seat.attempt > _MOST_ATTEMPTS:
            raise TooManyFailures(
                f"no substitute was found for sample {self._indices[seat.number]!r}: "
                f"{_MOST_ATTEMPTS} others that were drawn in its place could not be made either. "
                "That many bad samples in a row are rarely an accident: look at the first ones "
                "with on_error='raise'."
            )
        if self._substitutes is None:
            seed, epoch = self._drawn_from
            self._substitutes = Substitutes(
                self._recipe.dataset, seed, epoch, from_all=self._recipe.covers_dataset
            )
        return self._substitutes.draw(place, seat.attempt, seat.index, self._indices)

    def join(self, seats: list[Seat], position: int) -> Any:  # noqa: ANN401
        """Return the batch of the seats that are taken, finished; `NO_BATCH` if none is."""
        while True:
            taken = [seat for seat in seats if seat.sample is not NO_SAMPLE]
            if not taken:
                return NO_BATCH
            try:
                return self._assembler.finish(self._joined(taken, position))
            except Exception as raised:
                error = raised
            self._assembler.output.abandon()
            self._unseat_odd_ones(taken, position, error)

    def _joined(self, seats: list[Seat], position: int, *, rehearsing: bool = False) -> Any:  # noqa: ANN401
        reader = self._map
        indices = None if reader is None else [seat.index for seat in seats]
        if reader is not None and reader.whole_batch(indices) is not None:
            if not rehearsing:
                self._notes.phase(Phase.READING)
            empty = np.empty if rehearsing else self._assembler.output.empty
            return self._assembler.as_batch(self._read_whole(reader, seats, empty))
        samples = [seat.sample for seat in seats]
        if not self._recipe.is_batched:
            (samples,) = samples
        return self._assembler.collate(samples, position, indices, rehearsing=rehearsing)

    def _trial(self, seats: list[Seat], position: int) -> Exception | None:
        """Return what making a batch of these seats alone raises; None if nothing."""
        phase = self._notes.phase if len(seats) > 1 else lambda p: self._notes.seat(p, seats[0])
        try:
            phase(Phase.COLLATING)
            batch = self._joined(seats, position, rehearsing=True)
            phase(Phase.SENDING)
            self._assembler.output.rehearse(batch)
        except Exception as error:
            return error
        return None

    def _unseat_odd_ones(self, taken: list[Seat], position: int, error: Exception) -> None:
        """Find the samples that keep the batch from being made, and reject them.

        Raises:
            Exception: `error`, if it cannot be put down to single samples.
        """
        odd_ones = self._odd_ones(taken, position)
        if not odd_ones:
            error.add_note(
                "Each sample of the batch by itself gives no error, nor do two of them together "
                "tell which one is bad, so no sample was left out."
            )
            raise error
        for seat, reason in odd_ones:
            place = position + seat.number * self._stride
            self._reject(seat, place, reason)
            if self._faults.on_error == "replace":
                with contextlib.suppress(StopIteration):  # an iterable's end: one sample less
                    self.fill(seat, place)

    def _odd_ones(self, taken: list[Seat], position: int) -> list[tuple[Seat, Exception]]:
        alone = [(seat, self._trial([seat], position)) for seat in taken]
        failed = [(seat, error) for seat, error in alone if error is not None]
        if failed or not self._recipe.is_batched:
            return failed
        reference = taken[0]
        for _ in range(_MOST_REFERENCES):
            pairs = [
                (seat, self._trial([reference, seat], position))
                for seat in taken
                if seat is not reference
            ]
            misfits = [(seat, error) for seat, error in pairs if error is not None]
            if len(misfits) * 2 <= len(taken):
                return misfits
            reference = misfits[0][0]
        return []


def _drop_frames(error: BaseException) -> None:
    """Drop the tracebacks: their frames hold samples, and whatever else was at hand."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            waiting += [link.__cause__, link.__context__]


def _as_text(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
