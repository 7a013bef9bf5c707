# SPDX-License-Identifier: Apache-2.0
"""Batches with bad samples: finding the samples to blame, and making the batch of the others.

The sample to blame is found by trying: each sample by itself, then in pairs with one that most
others agree with. An exception that no single sample explains is an error of the collate function
or of the dataset as a whole, and is raised under any policy.

Which sample takes the place of a bad one is a pure function of seed, epoch, place and attempt.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.plan import RetryHints, sample_key
from penstock.engine.status_page import Phase
from penstock.errors import TooManyFailures, WorkerDied
from penstock.faults import Failure, annotate, text_of, unread_sample
from penstock.randomness.keys import Purpose, seed_sequence

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from penstock.data.dataset import Allocator
    from penstock.engine.assembly import Assembler
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusWriter

NO_BATCH: Final = object()
"""Stands for a batch of which no sample is left."""

_MISSING: Final = object()
_MOST_ATTEMPTS: Final = 20  # at an item after the first; so many bad samples are no accident
_MOST_OF_STREAM: Final = 100  # the same where the next sample costs no draw
_MOST_REFERENCES: Final = 4  # samples that others are compared with
_MOST_DRAWS: Final = 100  # to find one that was not tried yet; few are tried, so one is enough


@dataclass(slots=True, eq=False)
class BatchItem:
    """One item of a batch, and the sample that is read for it.

    Attributes:
        number: Number of the item in the batch, from 0.
        index: Index of the sample to read; None in an iterable dataset.
        place: Place in the epoch's global order; decides the sample's random numbers.
        attempt: Number of the attempt: 0 for the sample that the sampler drew; one more for each
            replacement, and each time that it is made with other partners.
        sample: Sample that was read; `_MISSING` before, and if it could not be made.
        tried: Indices that were given up, the sampler's first.
    """

    number: int
    index: Any
    place: int
    attempt: int = 0
    sample: Any = _MISSING
    tried: tuple[Any, ...] = ()


class Reader:
    """Reads the samples of items one by one."""

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the sample of `item`.

        Raises:
            StopIteration: there are no more.
            Exception: it cannot be made.
        """
        raise NotImplementedError

    def gather(
        self, items: list[BatchItem], position: int, stride: int, empty: Allocator
    ) -> tuple[bool, Any]:
        """Return (False, the samples to collate), or (True, the batch, collated already)."""
        return False, [item.sample for item in items]

    def is_spent(self, error: Exception) -> bool:
        """Return whether nothing can be read after `error`; if so, add a note of why to it."""
        return False


class Recovery:
    """Makes batches in spite of bad samples, for one epoch.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(
        self,
        reader: Reader,
        assembler: Assembler,
        spec: WorkerSpec,
        status: StatusWriter,
        replacements: Replacements,
    ) -> None:
        """Begin an epoch."""
        self._reader = reader
        self._assembler = assembler
        self._spec = spec
        self._faults = spec.faults
        self._status = status
        self._replacements = replacements
        self._bad: list[Failure] = []  # the main process adds where they were found
        self._keys: list[Any] = []  # of the batch under way, if it is not a stream's
        self._stride = 1
        self._hints = RetryHints()
        self._quarantined: dict[Hashable, tuple[str, str]] = {}  # key -> reason, stack

    def take_bad(self) -> list[Failure]:
        """Return the bad samples that were found since the last call, in order."""
        bad, self._bad = self._bad, []
        return bad

    def begin(
        self, keys: list[Any], position: int, stride: int, hints: RetryHints | None
    ) -> list[BatchItem]:
        """Return the items of a batch of a map-style dataset, for `fill` and `join`."""
        self._keys = keys
        self._stride = stride
        self._hints = hints or RetryHints()
        known = self._hints.quarantined
        self._quarantined = {key: (reason, stack) for key, reason, stack in known}
        return [BatchItem(k, key, position + k * stride) for k, key in enumerate(keys)]

    def fill(self, item: BatchItem, error: Exception | None = None) -> None:
        """Make the sample of `item`: its own, a replacement, or none.

        Raises:
            StopIteration: the shard of an iterable has ended.
            Exception: the sample's, if the policy is to raise; or nothing more can be read.
        """
        first_bad = len(self._bad)
        while error is None or self._reject(item, error):
            error = self._read(item)
            if error is None:
                for k in range(first_bad, len(self._bad)):
                    if self._bad[k].partner_of is None:
                        self._bad[k] = replace(self._bad[k], replaced_by=item.index)
                return

    def _read(self, item: BatchItem) -> Exception | None:
        """Read the sample of `item`; return why it is bad, or None."""
        self._status.item(Phase.READING, item)
        try:
            if (how := self._quarantined.get(sample_key(item.index))) is not None:
                raise WorkerDied(how[0])
            item.sample = self._reader.read(item)
        except StopIteration as end:
            if item.index is None:  # an iterable's
                raise
            return end
        except Exception as error:
            if self._faults.tolerates and self._reader.is_spent(error):
                raise
            return error
        if self._hints.alone:
            # If this ends the process, the status page names the sample. An exception proves
            # nothing: a collate function may need more than one sample.
            self._trial([item], item.place)
        return None

    def _reject(self, item: BatchItem, error: Exception) -> bool:
        """Record a bad sample, or its partner; return whether to make the sample of `item` again.

        Raises:
            Exception: `error` itself, if the policy is to raise.
        """
        if not self._faults.tolerates:
            raise error
        how = self._quarantined.get(sample_key(item.index))
        text = "".join(traceback.format_exception(error)) if how is None else how[1]
        drop_frames(error)
        unread = unread_sample(error)
        bad = Failure(item.index, None if unread is None else unread.name, error, text)
        item.sample = _MISSING
        may_draw = item.index is not None and item.attempt < _MOST_ATTEMPTS
        if unread is not None and unread.is_partner and may_draw:
            self._bad.append(replace(bad, index=unread.index, partner_of=item.index))
            item.attempt += 1
            return True
        self._bad.append(bad)
        if self._faults.on_error == "skip":
            return False
        self._replace(item, error)
        return True

    def _replace(self, item: BatchItem, error: Exception) -> None:
        """Give `item` another sample to read; in a stream, the next one.

        Raises:
            TooManyFailures: there is none, or many were bad.
        """
        item.attempt += 1
        item.tried += (item.index,)
        most = _MOST_OF_STREAM if item.index is None else _MOST_ATTEMPTS
        if item.attempt > most:
            is_known = item.index is not None
            of = f"sample {item.tried[0]!r}" if is_known else "a sample of the iterable dataset"
            raise TooManyFailures(
                f"no replacement was found for {of}: {most} others that were drawn in its place "
                f"could not be made either, the last one for {text_of(error)}. That many bad "
                "samples in a row are rarely an accident; loader.failures lists them."
            )
        if item.index is not None:
            item.index = self._replacements.draw(item, self._keys)

    def join(self, items: list[BatchItem], position: int) -> Any:  # noqa: ANN401
        """Return the batch of the items that have a sample, finished; `NO_BATCH` if none has.

        Raises:
            Exception: one that no single sample explains; any, if the policy is to raise.
        """
        while True:
            taken = [item for item in items if item.sample is not _MISSING]
            if not taken:
                return NO_BATCH
            try:
                self._status.phase(Phase.READING)
                batch = self._joined(taken, position, self._assembler)
                return self._assembler.finish(batch, _indices_of(taken))
            except Exception as raised:
                error = raised
            self._assembler.output.abandon()
            if not self._faults.tolerates:
                raise error
            self._drop_misfits(taken, position, error)

    def _joined(self, items: list[BatchItem], position: int, assembler: Assembler) -> Any:  # noqa: ANN401
        is_batch, made = self._reader.gather(items, position, self._stride, assembler.empty)
        if is_batch:
            return assembler.as_batch(made)
        return assembler.collate(made, position, _indices_of(items))

    def _trial(self, items: list[BatchItem], position: int) -> Exception | None:
        """Return the exception that a batch of these items alone raises; None if there is none.

        The samples are copied: a collate function may change what it gets.
        """
        copies = [replace(item, sample=_copied(item.sample)) for item in items]
        try:
            self._status.item(Phase.COLLATING, items[-1])
            batch = self._joined(copies, position, self._assembler.for_trials)
            self._status.item(Phase.SENDING, items[-1])
            self._assembler.output.dry_run(batch)
        except Exception as error:
            return error
        return None

    def _drop_misfits(self, taken: list[BatchItem], position: int, error: Exception) -> None:
        """Find the samples that keep the batch from being made, and reject them.

        Raises:
            Exception: `error`, if no single sample explains it.
        """
        for item in taken:
            if item.index is not None:  # collating may have changed the sample
                with contextlib.suppress(Exception):  # what cannot be read again is taken as it is
                    item.sample = self._reader.read(item)
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
            with contextlib.suppress(StopIteration):  # an iterable's end: one sample less
                self.fill(item, reason)

    def _misfits(self, taken: list[BatchItem], position: int) -> list[tuple[BatchItem, Exception]]:
        alone = [(item, self._trial([item], position)) for item in taken]
        failed = [(item, error) for item, error in alone if error is not None]
        if not self._spec.is_batched or len(taken) == 1 or 0 < len(failed) < len(taken):
            return failed
        # All alike: none is bad by itself, or the collate function needs more than one.
        reference = taken[0]
        for _ in range(_MOST_REFERENCES):
            others = [item for item in taken if item is not reference]
            pairs = [(item, self._trial([reference, item], position)) for item in others]
            misfits = [(item, error) for item, error in pairs if error is not None]
            if len(misfits) * 2 <= len(taken):
                return misfits
            reference = misfits[0][0]  # not a sample like one that fits few others
        return []


class Replacements:
    """Draws replacements for the bad samples of one epoch.

    What is drawn must be a sample that the epoch could have had. A sampler that goes over all of
    the dataset could have drawn any; of another one (a split's, a weighted one) nothing is known
    but the batch at hand, so one of that is taken. Both keep to the bad sample's class where the
    dataset says its labels and another sample has the same.
    """

    def __init__(self, spec: WorkerSpec, seed: int, epoch: int) -> None:
        """Draw for one epoch, as decided by `seed`."""
        self._dataset = spec.dataset
        self._is_of_all = spec.covers_dataset and hasattr(spec.dataset, "__len__")
        self._seed = seed
        self._epoch = epoch

    @functools.cached_property
    def _labels(self) -> Any:  # noqa: ANN401
        from penstock.data.labels.known import known_labels

        labels = known_labels(self._dataset)
        # Of samples with several classes each, none is "of the same class" as another.
        return labels if isinstance(labels, np.ndarray) else None

    def draw(self, item: BatchItem, batch: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return the index of a replacement.

        Raises:
            TooManyFailures: there is no other sample that was not tried.
        """
        sequence = seed_sequence(self._seed, Purpose.REPLACEMENTS, self._epoch)
        counter = np.array([0, item.attempt, item.place, 0], np.uint64)
        bits = np.random.Philox(key=sequence.generate_state(2, np.uint64), counter=counter)
        rng = np.random.Generator(bits)
        rejected = set(map(sample_key, item.tried))
        for members, own in self._pools(item.tried[0], batch):
            for _ in range(_MOST_DRAWS if len(members) > 1 else 0):
                k = int(rng.integers(len(members) - 1))
                drawn = members[k + (k >= own)]
                if sample_key(drawn) not in rejected:
                    return drawn
        whose = "the dataset has" if self._is_of_all else "its batch has"
        raise TooManyFailures(
            f"there is no other sample to put in the place of sample {item.tried[0]!r}: {whose} "
            "none that was not tried. Use larger batches, or on_error='skip'."
        )

    def _pools(self, index: Any, batch: Sequence[Any]) -> Iterator[tuple[Sequence[Any], int]]:  # noqa: ANN401
        """Yield what to draw from, the best first, and where in it the bad sample is."""
        label = self._label_of(index)
        if self._is_of_all and isinstance(index, (int, np.integer)):
            index = int(index) % len(self._dataset)
            if label is not None:
                members = np.flatnonzero(self._labels == label).tolist()
                yield members, bisect.bisect_left(members, index)
            yield range(len(self._dataset)), index
            return
        others = [other for other in batch if sample_key(other) != sample_key(index)]
        alike = [other for other in others if label is not None and self._label_of(other) == label]
        yield [*alike, index], len(alike)
        yield [*others, index], len(others)

    def _label_of(self, index: Any) -> Any:  # noqa: ANN401
        if self._labels is None or not isinstance(index, (int, np.integer)):
            return None
        is_inside = -len(self._labels) <= index < len(self._labels)
        return self._labels[index] if is_inside else None


def _indices_of(items: list[BatchItem]) -> list[Any] | None:
    return None if items[0].index is None else [item.index for item in items]


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
