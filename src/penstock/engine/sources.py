# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a batch's items come from, one by one: what `Recovery` works on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock.engine.batch_item import MOST_ATTEMPTS, BatchItem
from penstock.engine.map_reader import note_samples
from penstock.engine.plan import sample_key
from penstock.engine.replacements import Replacements
from penstock.errors import TooManyFailures, WorkerDied
from penstock.faults import text_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from penstock.data.dataset import Allocator
    from penstock.engine.map_reader import MapReader
    from penstock.engine.plan import RetryHints, WorkerSpec
    from penstock.engine.stream_reader import StreamReader
    from penstock.randomness.samples import SampleStreams

__all__ = ["ItemSource", "MapItemSource", "StreamItemSource"]

_LONGEST_RUN: Final = 100  # the same for an iterator, which has no choice


class ItemSource(Protocol):
    """Reads the samples of items."""

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the sample for `item`.

        Raises:
            StopIteration: there are no more.
            Exception: it cannot be made.
        """

    def gather(self, items: list[BatchItem], empty: Allocator) -> tuple[bool, Any]:
        """Return what is to be collated: (False, samples), or (True, the batch already)."""

    def read_anew(self, items: list[BatchItem]) -> None:
        """Read the samples once more, where that is possible: collating may have changed them."""

    def find_replacement(self, item: BatchItem, error: Exception) -> None:
        """Let `item` be for another sample, as this one gave `error`.

        Raises:
            TooManyFailures: there is none, or many were bad.
        """

    def is_spent(self, error: Exception) -> bool:
        """Return whether no more can be read after reading raised `error`, and say why in it."""

    def what_is_known_of(self, item: BatchItem) -> str:
        """Return what is known of how the sample of `item` ended workers; empty if it did not."""


class MapItemSource:
    """A map-style dataset."""

    def __init__(
        self,
        reader: MapReader,
        spec: WorkerSpec,
        streams: SampleStreams | None,
        seed: int,
        epoch: int,
    ) -> None:
        """Read with `reader`; `seed` and `epoch` decide the replacements."""
        self._reader = reader
        self._spec = spec
        self._streams = streams
        self._drawn_from = seed, epoch
        self._replacements: Replacements | None = None
        self._indices: list[Any] = []
        self._rejected: dict[int, set[Hashable]] = {}  # by number of the item
        self._position = 0
        self._stride = 1
        self._quarantined: dict[Hashable, tuple[str, str]] = {}

    def begin(
        self, indices: list[Any], position: int, stride: int, hints: RetryHints | None
    ) -> list[BatchItem]:
        """Return the items of a batch."""
        self._indices = indices
        self._rejected = {}
        self._position = position
        self._stride = stride
        known = () if hints is None else hints.quarantined
        self._quarantined = {key: (reason, advice) for key, reason, advice in known}
        return [BatchItem(k, index, position + k * stride) for k, index in enumerate(indices)]

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the sample, tried as often as the policy says."""
        how = self._quarantined.get(sample_key(item.index))
        if how is not None:
            raise WorkerDied(how[0])
        for _ in range(self._spec.faults.retries):
            try:
                return self._read_once(item)
            except Exception:  # tried again; the last time it counts
                continue
        return self._read_once(item)

    def _read_once(self, item: BatchItem) -> Any:  # noqa: ANN401
        try:
            if self._reader.whole_batch([item.index]) is not None:
                return self._read_whole([item], np.empty)  # `gather` reads it with the others
            return self._reader.read_one(item)
        except Exception as error:
            self._reader.note(error, item.index)
            raise

    def gather(self, items: list[BatchItem], empty: Allocator) -> tuple[bool, Any]:
        """Return the samples of `items`; what can be read together is read once more, together."""
        indices = [item.index for item in items]
        if self._reader.whole_batch(indices) is not None:
            return True, self._read_whole(items, empty)
        if self._reader.reads_together:
            self._begin_part(items)
            return False, self._reader.read_together(indices)
        return False, [item.sample for item in items]

    def _read_whole(self, items: list[BatchItem], empty: Allocator) -> Any:  # noqa: ANN401
        self._begin_part(items)
        indices = np.array([item.index for item in items], np.int64)
        return self._reader.read_whole(indices, empty)

    def _begin_part(self, items: list[BatchItem]) -> None:
        if self._streams is not None:
            places = {item.number: item.attempt for item in items}
            self._streams.begin_part(self._position, self._stride, places)

    def read_anew(self, items: list[BatchItem]) -> None:
        """Read samples that are read one by one; the others are read when they are gathered."""
        if self._reader.whole_batch([]) is not None or self._reader.reads_together:
            return
        for item in items:
            item.sample = self.read(item)

    def find_replacement(self, item: BatchItem, error: Exception) -> None:
        """Draw another index."""
        rejected = self._rejected.setdefault(item.number, set())
        rejected.add(sample_key(item.index))
        item.attempt += 1
        if item.attempt > MOST_ATTEMPTS:
            raise TooManyFailures(
                f"no replacement was found for sample {self._indices[item.number]!r}: "
                f"{MOST_ATTEMPTS} others that were drawn in its place could not be made either, "
                f"the last one, {note_samples(self._spec.dataset, [item.index])}, for "
                f"{text_of(error)}. That many bad samples in a row are rarely an accident; "
                "loader.failures lists them."
            )
        if self._replacements is None:
            self._replacements = Replacements(
                self._spec.dataset, *self._drawn_from, from_all=self._spec.covers_dataset
            )
        original = self._indices[item.number]
        item.index = self._replacements.draw(
            item.place, item.attempt, original, self._indices, rejected
        )

    def is_spent(self, error: Exception) -> bool:
        """Return False: every sample is by itself."""
        return False

    def what_is_known_of(self, item: BatchItem) -> str:
        """Return the memory figures, and the stack of a crash."""
        return self._quarantined.get(sample_key(item.index), ("", ""))[1]


class StreamItemSource:
    """A worker's shard of an iterable dataset: the next sample takes the place of a bad one."""

    def __init__(self, reader: StreamReader) -> None:
        """Read with `reader`."""
        self._reader = reader

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the next sample; nothing is tried twice."""
        return self._reader.read(item)

    def gather(self, items: list[BatchItem], empty: Allocator) -> tuple[bool, Any]:
        """Return the samples."""
        return False, [item.sample for item in items]

    def read_anew(self, items: list[BatchItem]) -> None:
        """Nothing can be read twice."""

    def find_replacement(self, item: BatchItem, error: Exception) -> None:
        """Let the item be for the next sample."""
        item.attempt += 1
        if item.attempt > _LONGEST_RUN:
            raise TooManyFailures(
                f"{_LONGEST_RUN} samples in a row did not fit into one batch of the iterable "
                f"dataset, the last one for {text_of(error)}; loader.failures lists them."
            )

    def is_spent(self, error: Exception) -> bool:
        """Return whether the iterator has come to its end by raising."""
        return self._reader.give_up(error)

    def what_is_known_of(self, item: BatchItem) -> str:
        """Return nothing: no sample of an iterable can be told from the others."""
        return ""
