# SPDX-License-Identifier: Apache-2.0
"""Reading samples of a map-style dataset: one by one, many at once, or batches already collated."""

from __future__ import annotations

import contextlib
from operator import length_hint
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.dataset import batch_reader, length_of, reads_together
from penstock.data.names import name_samples
from penstock.engine.plan import dataset_keys, unwrap_indices
from penstock.engine.recover import BatchItem, Reader
from penstock.faults import annotate
from penstock.user_code import transform_that_raised

if TYPE_CHECKING:
    from penstock.data.dataset import Allocator, BatchReader
    from penstock.engine.assembly import Assembler, PlainMaker
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusWriter
    from penstock.randomness.samples import SampleStreams

__all__ = ["MapReader", "map_maker"]

_ONE_SAMPLE: Final = "while reading sample "


class MapReader(Reader):
    """Reads the samples of one epoch.

    Attributes:
        streams: Random streams of the samples; None without a seed.
        reads_together: Whether `__getitems__` reads the samples of a batch.
        reads_whole: Whether the dataset collates batches itself.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(self, spec: WorkerSpec, status: StatusWriter) -> None:
        """Find out how the dataset of `spec` can be read."""
        self.streams: SampleStreams | None = None
        self._dataset = spec.dataset
        self._faults = spec.faults
        self._status = status
        self._read_batch: BatchReader | None = None
        if spec.is_batched and spec.collate_fn is None:
            self._read_batch = batch_reader(spec.dataset)
        self.reads_whole = self._read_batch is not None
        # With random streams, or where bad samples are left out, samples are read one by one,
        # unless `__getitems__` does more than that.
        can_read_together = (
            reads_together(spec.dataset)
            if spec.seed is not None or spec.faults.tolerates
            else bool(getattr(spec.dataset, "__getitems__", None))
        )
        self.reads_together = spec.is_batched and can_read_together

    def whole_batch(self, indices: Any) -> np.ndarray[Any, Any] | None:  # noqa: ANN401
        """Return the indices as `read_whole` takes them, or None if it cannot be used."""
        if self._read_batch is None:
            return None
        array = np.asarray(unwrap_indices(indices))
        if array.ndim != 1 or array.dtype.kind not in "iu":
            return None
        return array.astype(np.int64, copy=False)

    # Reading a batch in which no sample may be bad. All raise whatever the dataset raises, with a
    # note that names the samples.

    def read_whole(self, indices: np.ndarray[Any, Any], empty: Allocator) -> Any:  # noqa: ANN401
        """Return the batch that the dataset collates itself."""
        assert self._read_batch is not None
        try:
            batch = self._read_batch(indices, empty)
        except Exception as error:
            annotate(error, f"while reading samples {indices.tolist()} of the dataset by get_batch")
            raise
        if batch is None:
            raise TypeError(
                f"get_batch of {type(self._dataset).__name__} returned None; it has to return the "
                "batch, collated as the default collate would."
            )
        return batch

    def read_together(self, indices: Any) -> Any:  # noqa: ANN401
        """Return the samples that `__getitems__` gives."""
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
        """Return samples read one after the other."""
        dataset, streams = self._dataset, self.streams
        samples = []
        index = None
        try:
            if streams is None and (cell := self._status.number_cell()) is not None:
                for cell[0], index in enumerate(indices):
                    samples.append(dataset[index])
                return samples
            note = self._status.sample
            for number, index in enumerate(indices):
                note(number)
                if streams is not None:
                    streams.begin_sample(position + number * stride)
                samples.append(dataset[index])
        except Exception as error:
            self.explain(error, index)
            raise
        return samples

    def read_quickly(self, indices: Any) -> Any:  # noqa: ANN401
        """Return the samples as `read_each` does, without random streams and status."""
        dataset = self._dataset
        indices = indices if type(indices) is list else list(indices)
        left = iter(indices)
        try:
            return [dataset[index] for index in left]
        except Exception as error:
            self.explain(error, indices[~length_hint(left)])
            raise

    def explain(self, error: Exception, index: Any) -> None:  # noqa: ANN401
        """Add a note to `error` that says which sample it came from, and which transform."""
        transform = transform_that_raised(self._dataset, error)
        where = "" if transform is None else f", in its transform {transform}"
        named = name_samples(self._dataset, [index])
        annotate(error, f"while reading {named} of the dataset{where}")
        self._note_policy(error)

    def _note_policy(self, error: Exception) -> None:
        if not self._faults.tolerates:
            annotate(error, "(on_error='skip' or 'replace' goes on without a sample that fails)")

    # Reading items, of which some may be bad: see `Reader`.

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the sample, after as many attempts as the policy allows."""
        for _ in range(self._faults.retries):
            with contextlib.suppress(Exception):
                return self._read_once(item)
        return self._read_once(item)  # the last attempt may raise

    def _read_once(self, item: BatchItem) -> Any:  # noqa: ANN401
        if self.streams is not None:
            self.streams.begin_sample(item.place, item.attempt)
        try:
            # What can be read together is read here by itself, and by `gather` with the others.
            if (whole := self.whole_batch([item.index])) is not None:
                return self.read_whole(whole, np.empty)
            if self.reads_together and not self.reads_whole:
                (sample,) = self._dataset.__getitems__([item.index])
                return sample
            return self._dataset[item.index]
        except Exception as error:
            self.explain(error, item.index)
            raise

    def gather(
        self, items: list[BatchItem], position: int, stride: int, empty: Allocator
    ) -> tuple[bool, Any]:
        """Return the samples; those that can be read together are read once more, together."""
        indices = [item.index for item in items]
        whole = self.whole_batch(indices)
        if whole is None and not self.reads_together:
            return False, [item.sample for item in items]
        if self.streams is not None:
            places = {item.number: item.attempt for item in items}
            self.streams.begin_part(position, stride, places)
        if whole is not None:
            return True, self.read_whole(whole, empty)
        return False, self.read_together(indices)


def map_maker(spec: WorkerSpec, reader: MapReader, assembler: Assembler) -> PlainMaker:
    """Return the function that makes batches of a map-style dataset by the shortest way."""
    dataset, collate = spec.dataset, assembler.collate_function()

    def make_single(index: Any, out: list[Any]) -> int:  # noqa: ANN401
        key = dataset_keys(index)
        try:
            sample = dataset[key]
        except Exception as error:
            reader.explain(error, key)
            raise
        out.append(collate(sample))
        return 1

    def make(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
        keys = indices.tolist() if type(indices) is np.ndarray else dataset_keys(indices)
        samples = read(keys)
        try:
            out.append(collate(samples))
        except Exception as error:
            assembler.explain(error, samples, keys)
            raise
        return length_of(samples) or 0

    def make_whole(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
        whole = reader.whole_batch(indices)
        if whole is None:
            return make(indices, out)
        out.append(assembler.as_batch(reader.read_whole(whole, assembler.empty)))
        return len(whole)

    read = reader.read_together if reader.reads_together else reader.read_quickly
    if not spec.is_batched:
        return make_single
    return make_whole if reader.reads_whole else make
