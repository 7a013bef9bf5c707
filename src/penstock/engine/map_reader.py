# SPDX-License-Identifier: Apache-2.0
"""Reading samples of a map-style dataset: one by one, many at once, or batches already collated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.dataset import batch_reader, is_drawless, reads_together
from penstock.data.names import describe_sample
from penstock.engine.plan import unwrap_indices
from penstock.engine.transforms import transform_that_raised
from penstock.faults import annotate

if TYPE_CHECKING:
    from penstock.data.dataset import Allocator, BatchReader
    from penstock.engine.batch_item import BatchItem
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusWriter
    from penstock.randomness.samples import SampleStreams

__all__ = ["MapReader", "note_samples"]

_ONE_SAMPLE: Final = "while reading sample "
_MOST_LISTED: Final = 16


class MapReader:
    """Reads the samples of one epoch.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(self, spec: WorkerSpec, status: StatusWriter) -> None:
        """Look at how the dataset can be read."""
        self._dataset = spec.dataset
        self._tolerates = spec.faults.tolerates
        self._status = status
        self._read_batch: BatchReader | None = None
        if spec.is_batched and spec.collate_fn is None:
            self._read_batch = batch_reader(spec.dataset)
        self.streams: SampleStreams | None = None
        # With streams of its own, a sample is better read by itself where nothing is lost by it; as
        # it is where one that fails is left out.
        can_read_together = (
            reads_together(spec.dataset)
            if spec.seed is not None or self._tolerates
            else bool(getattr(spec.dataset, "__getitems__", None))
        )
        self.reads_together = spec.is_batched and can_read_together

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
            # A dataset that knows which sample it was has said so.
            if not any(_ONE_SAMPLE in note for note in getattr(error, "__notes__", ())):
                named = note_samples(self._dataset, indices)
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
            self.note(error, index)
            raise
        return samples

    def read_one(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the sample for `item`."""
        if self.streams is not None:
            self.streams.begin_sample(item.place, item.attempt)
        if self._read_batch is None and self.reads_together:
            (sample,) = self._dataset.__getitems__([item.index])
            return sample
        return self._dataset[item.index]

    def note(self, error: Exception, index: Any) -> None:  # noqa: ANN401
        """Add a note to `error` that says which sample it came from, and which transform."""
        transform = transform_that_raised(self._dataset, error)
        where = "" if transform is None else f", in its transform {transform}"
        named = note_samples(self._dataset, [index])
        annotate(error, f"while reading {named} of the dataset{where}")
        self._note_policy(error)

    def _note_policy(self, error: Exception) -> None:
        if not self._tolerates:
            annotate(error, "(on_error='skip' or 'replace' goes on without a sample that fails)")


def note_samples(dataset: Any, indices: Any) -> str:  # noqa: ANN401
    """Return "sample 3 (photos/cat.jpg)", or "samples [3, 4]"; indices may be of any kind."""
    try:
        listed = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
    except TypeError:  # a slice, say
        return f"samples {indices!r}"
    if len(listed) > _MOST_LISTED:
        first = ", ".join(map(repr, listed[:_MOST_LISTED]))
        return f"samples [{first}, … {len(listed)} in all]"
    if len(listed) != 1:
        return f"samples {listed}"
    name = describe_sample(dataset, listed[0])
    return f"sample {listed[0]!r}" + ("" if name is None else f" ({name})")
