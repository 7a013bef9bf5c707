# SPDX-License-Identifier: Apache-2.0
"""Batches with bad samples: finding the samples to blame, and making the batch of the others.

The sample to blame is found by trying: each sample by itself, then in pairs with one that most
others agree with. An exception that no single sample explains is an error of the collate function
or of the dataset as a whole, and is raised under any policy.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.engine.reader import MISSING, MOST_ATTEMPTS, BatchItem
from penstock.engine.status_page import Phase
from penstock.errors import WorkerDied
from penstock.faults import annotate, unread_sample

if TYPE_CHECKING:
    from penstock.engine.assembly import Assembler
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.reader import Reader
    from penstock.engine.status_page import StatusWriter

__all__ = ["NO_BATCH", "BadSample", "Recovery", "drop_frames"]

NO_BATCH: Final = object()
"""Stands for a batch of which no sample is left."""

_MOST_REFERENCES: Final = 4  # samples that others are compared with


class BadSample(NamedTuple):
    """A sample that could not be made.

    Attributes:
        index: Index that the sampler or a replacement gave; for a partner, that the dataset drew.
            None in an iterable dataset.
        error: Exception, without its traceback.
        traceback: Traceback as text; for a sample that ended workers, what is known of their end.
        replaced_by: Index of the sample that took its place; None if none did.
        name: Name of the sample in the dataset that could not read it; None if not known.
        partner_of: Index of the sample that it was drawn for; None if it was asked for itself.
    """

    index: Any
    error: BaseException
    traceback: str
    replaced_by: Any = None
    name: str | None = None
    partner_of: Any = None


class Recovery:
    """Makes batches in spite of bad samples, for one epoch.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(
        self, reader: Reader, assembler: Assembler, spec: WorkerSpec, status: StatusWriter
    ) -> None:
        """Begin an epoch.

        Args:
            reader: Reader of samples and replacements.
            assembler: Assembler that collates and finishes batches.
            spec: Spec of the worker, with the fault policy.
            status: Writer of the worker's status.
        """
        self._reader = reader
        self._assembler = assembler
        self._is_batched = spec.is_batched
        self._faults = spec.faults
        self._status = status
        self._bad: list[BadSample] = []

    def take_bad(self) -> list[BadSample]:
        """Return the bad samples that were found since the last call, in order."""
        bad, self._bad = self._bad, []
        return bad

    def fill(self, item: BatchItem, *, alone: bool = False) -> None:
        """Make the sample of `item`: its own, a replacement, or none.

        Args:
            item: Item of the batch.
            alone: Whether to collate and pack the sample by itself first. If that ends the process,
                the status page names the sample. An exception proves nothing: a collate function
                may need more than one sample.

        Raises:
            StopIteration: the shard of an iterable has ended.
            Exception: the sample's, if the policy is to raise; or nothing more can be read.
        """
        first_bad = len(self._bad)
        while True:
            self._status.item(Phase.READING, item)
            try:
                item.sample = self._reader.read(item)
            except StopIteration as end:
                if item.index is None:  # an iterable's
                    raise
                error: Exception = end
            except Exception as raised:
                error = raised
            else:
                if alone:
                    self._trial([item], item.place)
                self._note_replacement(first_bad, item)
                return
            if self._faults.tolerates and self._reader.is_spent(error):
                raise error
            if self._draws_others(item, error):
                continue
            self._reject(item, error)
            if self._faults.on_error == "skip":
                return

    def _draws_others(self, item: BatchItem, error: Exception) -> bool:
        """Return whether to make the sample of `item` again, as only a partner of it is bad.

        The partner is recorded; the sample gets the random numbers of its next attempt.
        """
        unread = unread_sample(error)
        if not self._faults.tolerates or unread is None or not unread.is_partner:
            return False
        if item.index is None or item.attempt >= MOST_ATTEMPTS:
            return False
        text = _as_text(error)
        drop_frames(error)
        self._bad.append(
            BadSample(unread.index, error, text, name=unread.name, partner_of=item.index)
        )
        item.attempt += 1
        return True

    def _reject(self, item: BatchItem, error: Exception) -> None:
        """Record the sample of `item` as bad, and give the item another if the policy says so.

        Raises:
            Exception: `error` itself, if the policy is to raise.
        """
        if not self._faults.tolerates:
            raise error
        text = _as_text(error)
        if isinstance(error, WorkerDied):
            text = self._reader.end_of_workers(item)
        drop_frames(error)
        unread = unread_sample(error)
        name = None if unread is None else unread.name
        self._bad.append(BadSample(item.index, error, text, name=name))
        item.sample = MISSING
        if self._faults.on_error == "replace":
            self._reader.replace(item, error)

    def _note_replacement(self, first_bad: int, item: BatchItem) -> None:
        """Record the sample of `item` as the one that replaced those found bad since."""
        for k in range(first_bad, len(self._bad)):
            if self._bad[k].partner_of is None:
                self._bad[k] = self._bad[k]._replace(replaced_by=item.index)

    def join(self, items: list[BatchItem], position: int) -> Any:  # noqa: ANN401
        """Return the batch of the items that have a sample, finished; `NO_BATCH` if none has.

        Args:
            items: Items of the batch, filled.
            position: Place of the batch in the epoch's global order.

        Raises:
            Exception: one that no single sample explains; any, if the policy is to raise.
        """
        while True:
            taken = [item for item in items if item.sample is not MISSING]
            if not taken:
                return NO_BATCH
            try:
                batch = self._joined(taken, position)
                indices = None if taken[0].index is None else [item.index for item in taken]
                return self._assembler.finish(batch, indices)
            except Exception as raised:
                error = raised
            self._assembler.output.abandon()
            if not self._faults.tolerates:
                raise error
            self._drop_misfits(taken, position, error)

    def _joined(self, items: list[BatchItem], position: int, *, dry_run: bool = False) -> Any:  # noqa: ANN401
        empty = np.empty if dry_run else self._assembler.output.empty
        if not dry_run:
            self._status.phase(Phase.READING)
        is_batch, gathered = self._reader.gather(items, empty)
        if is_batch:
            return self._assembler.as_batch(gathered)
        if not self._is_batched:
            (gathered,) = gathered
        indices = None if items[0].index is None else [item.index for item in items]
        return self._assembler.collate(gathered, position, indices, dry_run=dry_run)

    def _trial(self, items: list[BatchItem], position: int) -> Exception | None:
        """Return the exception that a batch of these items alone raises; None if there is none.

        The samples are copied: a collate function may change what it gets.
        """
        phase = self._status.phase if len(items) > 1 else lambda p: self._status.item(p, items[0])
        copies = [item.with_sample(_copied(item.sample)) for item in items]
        try:
            phase(Phase.COLLATING)
            batch = self._joined(copies, position, dry_run=True)
            phase(Phase.SENDING)
            self._assembler.output.dry_run(batch)
        except Exception as error:
            return error
        return None

    def _drop_misfits(self, taken: list[BatchItem], position: int, error: Exception) -> None:
        """Find the samples that keep the batch from being made, and reject them.

        Raises:
            Exception: `error`, if no single sample explains it.
        """
        with contextlib.suppress(Exception):  # what cannot be read again is taken as it is
            self._reader.read_anew(taken)
        misfits = self._misfits(taken, position)
        if not misfits:
            annotate(
                error,
                "No single sample of the batch explains it, nor do two of them together tell which "
                "one is bad, so no sample was left out.",
            )
            raise error
        for item, reason in misfits:
            annotate(reason, "while collating it, or sending what was collated")
            first_bad = len(self._bad)
            self._reject(item, reason)
            if self._faults.on_error == "replace":
                with contextlib.suppress(StopIteration):  # an iterable's end: one sample less
                    self.fill(item)
                    self._note_replacement(first_bad, item)

    def _misfits(self, taken: list[BatchItem], position: int) -> list[tuple[BatchItem, Exception]]:
        alone = [(item, self._trial([item], position)) for item in taken]
        failed = [(item, error) for item, error in alone if error is not None]
        if not self._is_batched or len(taken) == 1 or 0 < len(failed) < len(taken):
            return failed
        # All alike: none is bad by itself, or the collate function needs more than one.
        reference = taken[0]
        for _ in range(_MOST_REFERENCES):
            pairs = [
                (item, self._trial([reference, item], position))
                for item in taken
                if item is not reference
            ]
            misfits = [(item, error) for item, error in pairs if error is not None]
            if len(misfits) * 2 <= len(taken):
                return misfits
            reference = misfits[0][0]
        return []


def _copied(sample: Any) -> Any:  # noqa: ANN401
    try:
        return copy.deepcopy(sample)
    except Exception:  # a sample that cannot be copied is used itself
        return sample


def drop_frames(error: BaseException) -> None:
    """Drop the tracebacks of `error` and its causes: their frames hold samples."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            with contextlib.suppress(Exception):  # a frozen dataclass, say, refuses to be changed
                link.__traceback__ = None
            waiting += [link.__cause__, link.__context__]


def _as_text(error: Exception) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # its own __str__ may fail
        return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
