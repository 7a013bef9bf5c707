# SPDX-License-Identifier: Apache-2.0
"""Reading samples of a map-style dataset: one by one, many at once, or batches already collated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.dataset import batch_reader, is_drawless, reads_together
from penstock.engine.plan import sample_key, unwrap_indices
from penstock.engine.reader import MOST_ATTEMPTS, BatchItem, name_samples
from penstock.engine.replacements import Replacements
from penstock.errors import TooManyFailures, WorkerDied
from penstock.faults import annotate, text_of
from penstock.user_code import transform_that_raised

if TYPE_CHECKING:
    from collections.abc import Hashable

    from penstock.data.dataset import Allocator, BatchReader
    from penstock.engine.plan import RetryHints, WorkerSpec
    from penstock.engine.status_page import StatusWriter
    from penstock.randomness.samples import SampleStreams

__all__ = ["MapReader"]

_ONE_SAMPLE: Final = "while reading sample "


class MapReader:
    """Reads the samples of one epoch.

    Attributes:
        streams: Random streams of the samples; None without a seed.
        reads_together: Whether `__getitems__` reads the samples of a batch.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(self, spec: WorkerSpec, status: StatusWriter, seed: int, epoch: int) -> None:
        """Find out how the dataset can be read.

        Args:
            spec: Spec of the worker, with the dataset.
            status: Writer of the worker's status.
            seed: Seed of the replacements of bad samples, together with `epoch`.
            epoch: Number of the epoch.
        """
        self.streams: SampleStreams | None = None
        self._spec = spec
        self._dataset = spec.dataset
        self._tolerates = spec.faults.tolerates
        self._status = status
        self._read_batch: BatchReader | None = None
        if spec.is_batched and spec.collate_fn is None:
            self._read_batch = batch_reader(spec.dataset)
        # With random streams, or where bad samples are left out, samples are read one by one,
        # unless `__getitems__` does more than that.
        can_read_together = (
            reads_together(spec.dataset)
            if spec.seed is not None or self._tolerates
            else bool(getattr(spec.dataset, "__getitems__", None))
        )
        self.reads_together = spec.is_batched and can_read_together
        self._drawn_from = seed, epoch
        self._replacements: Replacements | None = None
        self._indices: list[Any] = []
        self._rejected: dict[int, set[Hashable]] = {}  # by number of the item
        self._position = 0
        self._stride = 1
        self._quarantined: dict[Hashable, tuple[str, str]] = {}

    @property
    def reads_whole(self) -> bool:
        """Whether the dataset collates batches itself."""
        return self._read_batch is not None

    @property
    def draws_nothing(self) -> bool:
        """Whether no random stream is needed."""
        return self._read_batch is not None and is_drawless(self._dataset)

    def whole_batch(self, indices: Any) -> np.ndarray[Any, Any] | None:  # noqa: ANN401
        """Return the indices as `read_whole` takes them, or None if it cannot be used."""
        if self._read_batch is None:
            return None
        array = np.asarray(unwrap_indices(indices))
        if array.ndim != 1 or array.dtype.kind not in "iu":
            return None
        return array.astype(np.int64, copy=False)

    # Reading a batch in which no sample may be bad.

    def read_whole(self, indices: np.ndarray[Any, Any], empty: Allocator) -> Any:  # noqa: ANN401
        """Return the batch that the dataset collates itself.

        Raises:
            Exception: whatever it raises, with a note that names the samples.
        """
        assert self._read_batch is not None
        try:
            batch = self._read_batch(indices, empty)
        except Exception as error:
            annotate(error, f"while reading samples {indices.tolist()} of the dataset by get_batch")
            raise
        if batch is None:
            kind = type(self._dataset).__name__
            raise TypeError(
                f"get_batch of {kind} returned None for samples {indices.tolist()}; it has to "
                "return the batch, collated as the default collate would."
            )
        return batch

    def read_together(self, indices: Any) -> Any:  # noqa: ANN401
        """Return the samples that `__getitems__` gives.

        Raises:
            Exception: whatever it raises, with a note that names the samples.
        """
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            # The dataset may have named the sample already.
            if not any(_ONE_SAMPLE in note for note in getattr(error, "__notes__", ())):
                named = name_samples(self._dataset, indices)
                annotate(error, f"while reading {named} of the dataset")
            self._note_policy(error)
            raise

    def read_each(self, indices: Any, position: int, stride: int) -> Any:  # noqa: ANN401
        """Return samples read one after the other.

        Raises:
            Exception: whatever the dataset raises, with a note that names the sample.
        """
        dataset = self._dataset
        samples = []
        index = None
        begin = None if self.streams is None else self.streams.begin_sample
        note = self._status.sample
        try:
            if begin is None:
                if not self._status.follows_samples:
                    for index in indices:
                        samples.append(dataset[index])  # noqa: PERF401 - `index` is for the note
                    return samples
                if (cell := self._status.number_cell()) is not None:
                    for cell[0], index in enumerate(indices):
                        samples.append(dataset[index])
                    return samples
            for number, index in enumerate(indices):
                note(number)
                if begin is not None:
                    begin(position)
                    position += stride
                samples.append(dataset[index])
        except Exception as error:
            self.explain(error, index)
            raise
        return samples

    def explain(self, error: Exception, index: Any) -> None:  # noqa: ANN401
        """Add a note to `error` that says which sample it came from, and which transform."""
        transform = transform_that_raised(self._dataset, error)
        where = "" if transform is None else f", in its transform {transform}"
        named = name_samples(self._dataset, [index])
        annotate(error, f"while reading {named} of the dataset{where}")
        self._note_policy(error)

    def _note_policy(self, error: Exception) -> None:
        if not self._tolerates:
            annotate(error, "(on_error='skip' or 'replace' goes on without a sample that fails)")

    # Reading items, of which some may be bad: see `Reader`.

    def items_of(
        self, indices: list[Any], position: int, stride: int, hints: RetryHints | None
    ) -> list[BatchItem]:
        """Return the items of a batch; until the next such call, the others concern this batch."""
        self._indices = indices
        self._rejected = {}
        self._position = position
        self._stride = stride
        known = () if hints is None else hints.quarantined
        self._quarantined = {key: (reason, advice) for key, reason, advice in known}
        return [BatchItem(k, index, position + k * stride) for k, index in enumerate(indices)]

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the sample, after as many attempts as the policy allows."""
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
            if self.whole_batch([item.index]) is not None:
                return self._read_items([item], np.empty)  # `gather` reads it with the others
            if self.streams is not None:
                self.streams.begin_sample(item.place, item.attempt)
            if self._read_batch is None and self.reads_together:
                (sample,) = self._dataset.__getitems__([item.index])
                return sample
            return self._dataset[item.index]
        except Exception as error:
            self.explain(error, item.index)
            raise

    def gather(self, items: list[BatchItem], empty: Allocator) -> tuple[bool, Any]:
        """Return the samples; those that can be read together are read once more, together."""
        indices = [item.index for item in items]
        if self.whole_batch(indices) is not None:
            return True, self._read_items(items, empty)
        if self.reads_together:
            self._begin_part(items)
            return False, self.read_together(indices)
        return False, [item.sample for item in items]

    def _read_items(self, items: list[BatchItem], empty: Allocator) -> Any:  # noqa: ANN401
        self._begin_part(items)
        return self.read_whole(np.array([item.index for item in items], np.int64), empty)

    def _begin_part(self, items: list[BatchItem]) -> None:
        if self.streams is not None:
            places = {item.number: item.attempt for item in items}
            self.streams.begin_part(self._position, self._stride, places)

    def read_anew(self, items: list[BatchItem]) -> None:
        """Read samples that are read one by one; the others are read when they are gathered."""
        if self.whole_batch([]) is not None or self.reads_together:
            return
        for item in items:
            item.sample = self.read(item)

    def replace(self, item: BatchItem, error: Exception) -> None:
        """Draw another index."""
        rejected = self._rejected.setdefault(item.number, set())
        rejected.add(sample_key(item.index))
        item.attempt += 1
        if item.attempt > MOST_ATTEMPTS:
            raise TooManyFailures(
                f"no replacement was found for sample {self._indices[item.number]!r}: "
                f"{MOST_ATTEMPTS} others that were drawn in its place could not be made either, "
                f"the last one, {name_samples(self._dataset, [item.index])}, for "
                f"{text_of(error)}. That many bad samples in a row are rarely an accident; "
                "loader.failures lists them."
            )
        if self._replacements is None:
            self._replacements = Replacements(
                self._dataset, *self._drawn_from, from_all=self._spec.covers_dataset
            )
        original = self._indices[item.number]
        item.index = self._replacements.draw(
            item.place, item.attempt, original, self._indices, rejected
        )

    def is_spent(self, error: Exception) -> bool:
        """Return False: each sample is read independently of the others."""
        return False

    def end_of_workers(self, item: BatchItem) -> str:
        """Return the memory figures, and the stack of a crash."""
        return self._quarantined.get(sample_key(item.index), ("", ""))[1]
