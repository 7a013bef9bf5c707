# SPDX-License-Identifier: Apache-2.0
"""Reading samples: of a map-style dataset, and of one worker's shard of an iterable one."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import math
import pickle
import time
import warnings
from operator import length_hint
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.dataset import batch_reader, can_resume, is_drawless, length_of, reads_together
from penstock.data.names import name_samples
from penstock.engine.plan import ShardPosition, dataset_keys, unwrap_indices
from penstock.engine.recover import BatchItem, Reader
from penstock.engine.states import load_state, pair_of, take_states
from penstock.faults import annotate, text_of
from penstock.user_code import transform_that_raised
from penstock.worker_info import set_shard, was_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.data.dataset import Allocator, BatchReader
    from penstock.engine.assembly import Assembler, PlainMaker
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusWriter
    from penstock.engine.task import BeginEpoch, WorkerIdentity
    from penstock.randomness.samples import SampleStreams
    from penstock.worker_info import ShardInfo

_ONE_SAMPLE: Final = "while reading sample "
# Between two states of a dataset: this many times the duration of taking one, so 2 % of the time.
_STATE_INTERVAL: Final = 50.0
_LONGEST_RUN: Final = 100  # exceptions in a row, after which an iterator is given up


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
        has_streams = spec.seed is not None and not is_drawless(spec.dataset)
        can_read_together = (
            reads_together(spec.dataset)
            if has_streams or spec.faults.tolerates
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
            return self._read_batch(indices, empty)
        except Exception as error:
            annotate(error, f"while reading samples {indices.tolist()} of the dataset by get_batch")
            raise

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


class ShardReader(Reader):
    """One worker's shard of an iterable dataset, batch by batch.

    Attributes:
        is_untouched: Whether nothing was taken from the iterator yet.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        streams: SampleStreams | None,
        identity: WorkerIdentity,
        begun: BeginEpoch,
        notices: dict[str, Any],
    ) -> None:
        """Begin the iterable, or go on at the position where it was."""
        self._spec = spec
        self._streams = streams
        self._worker_id = identity.worker_id
        self._num_workers = identity.num_workers
        self._notices = notices
        self._num_batches = 0
        self._has_ended = False
        self.is_untouched = True
        self._state_at = 0  # batches after which its state was taken last
        self._next_state_s = 0.0
        self._num_failed = 0  # in a row
        self._keeps_states = begun.keeps_states
        self._can_resume = can_resume(spec.dataset)
        self._resumed = begun.position or ShardPosition()
        self._iterator = self._begin(self._resumed)
        # Not the iterator itself: `islice` calls `iter` on it, which may begin it anew.
        self._samples = map(next, itertools.repeat(self._iterator))

    def _begin(self, position: ShardPosition) -> Iterator[Any]:
        dataset = self._spec.dataset
        if position.has_ended:
            self._num_batches, self._has_ended = position.num_batches, True
            if not self._keeps_states:  # there is nothing to load for the next epoch
                return iter(())
        elif position.state is not None:
            self._num_batches = self._state_at = position.state_at
        of_dataset, of_iterator = pair_of(position.state)
        load_state(dataset, of_dataset)
        if self._streams is not None:
            self._streams.begin_iterator()
        iterator: Iterator[Any] = iter(dataset)
        load_state(iterator, of_iterator)
        return iterator

    def replay(self, make_batch: Callable[[], object]) -> None:
        """Make batches that were given before once more, under the same random numbers."""
        while self._num_batches < self._resumed.num_batches and not self._has_ended:
            with contextlib.suppress(Exception):  # the loop got the exception then, and went on
                make_batch()

    def place(self) -> int:
        """Return the place of the next batch, as if all shards were equally long."""
        step = self._num_batches * self._num_workers + self._worker_id
        return step * (self._spec.batch_size or 1) * self._spec.world_size + self._spec.rank

    # Taking a batch, which counts even if it fails. All raise StopIteration if the shard has ended.

    def take(self, fill: Callable[[BatchItem], None], count: int) -> list[BatchItem]:
        """Return the items of the next batch of `count` samples; `fill` calls `read` for each."""
        items: list[BatchItem] = []
        place = self.place()
        self._begin_batch()
        for number in range(count):
            item = BatchItem(number, None, place + number * self._spec.world_size)
            try:
                fill(item)
            except StopIteration:
                self._end(len(items), count)
                break
            items.append(item)
        return items

    def take_samples(self, count: int) -> list[Any]:
        """Return the samples of the next batch, read without random streams or policies."""
        self._begin_batch()
        self.is_untouched = False
        samples = list(itertools.islice(self._samples, count))
        if len(samples) < count:
            self._end(len(samples), count)
        return samples

    def _begin_batch(self) -> None:
        if self._has_ended:
            raise StopIteration
        self._num_batches += 1

    def _end(self, num_samples: int, count: int) -> None:
        self._has_ended = True
        if num_samples == 0 or (self._spec.drop_last and num_samples < count):
            self._num_batches -= 1
            raise StopIteration

    # Reading items, of which some may be bad: see `Reader`.

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the next sample; a sample that fails is not retried."""
        is_first, self.is_untouched = self.is_untouched, False
        if self._streams is not None:
            if is_first:
                self._streams.begin_first_sample(item.place)
            else:
                self._streams.begin_sample(item.place, item.attempt)
        sample = next(self._iterator)
        self._num_failed = 0
        if is_first and self._num_batches == 1 and self._num_workers > 1 and not was_asked():
            with contextlib.suppress(Exception):  # it cannot be pickled: there is just no warning
                pickled = pickle.dumps(sample, protocol=5)
                self._notices["first_digest"] = hashlib.blake2b(pickled, digest_size=16).digest()
        return sample

    def is_spent(self, error: Exception) -> bool:
        """Return whether the iterator cannot go on after `error`; if so, note why in it."""
        self._num_failed += 1
        if inspect.isgenerator(self._iterator):
            annotate(
                error,
                "A generator ends with the first exception that leaves it, so the samples after "
                "this one cannot be had: catch it inside, or let __iter__ return an object of a "
                "class with __next__, which can go on.",
            )
            return True
        if self._num_failed == _LONGEST_RUN:
            annotate(error, f"The iterator raised {_LONGEST_RUN} times in a row.")
        return self._num_failed >= _LONGEST_RUN

    # The position.

    def shard_position(self) -> ShardPosition:
        """Return the position, without the dataset's state."""
        return ShardPosition(self._num_batches, self._has_ended, self._state_at)

    def position(self, *, takes_state: bool) -> ShardPosition:
        """Return the position, with the dataset's state if it was taken just now."""
        if not self._keeps_states:
            state = self._new_state()
        else:
            state = take_states(self._spec.dataset, self._iterator) if takes_state else None
            self._state_at = self._state_at if state is None else self._num_batches
        return ShardPosition(self._num_batches, self._has_ended, self._state_at, state)

    def _new_state(self) -> bytes | None:
        """Return the dataset's state, pickled; None if it has none, or was asked recently.

        Asking takes about 2 % of the time; a resume reads the samples since the state once more.
        """
        if not self._can_resume:
            return None
        dataset = self._spec.dataset
        begun = time.perf_counter()
        if begun < self._next_state_s:
            return None
        try:
            state = pickle.dumps((dataset.state_dict(), None), protocol=5)
        except Exception as error:  # the batch is not to be lost for it
            self._next_state_s = math.inf
            warnings.warn(
                f"{type(dataset).__name__}.state_dict() failed with {text_of(error)}. The loader's "
                "state can only replay this stream.",
                stacklevel=2,
            )
            return None
        ended = time.perf_counter()
        self._next_state_s = ended + _STATE_INTERVAL * (ended - begun)
        self._state_at = self._num_batches
        return state


def shard_maker(
    spec: WorkerSpec, reader: ShardReader, info: ShardInfo, assembler: Assembler
) -> PlainMaker:
    """Return the function that makes batches of an iterable dataset by the shortest way.

    Only the number of the indices counts.
    """
    is_batched, collate = spec.is_batched, assembler.collate_function()

    def make(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
        outer = set_shard(info)
        try:
            samples = reader.take_samples(len(indices) if is_batched else 1)
            try:
                out.append(collate(samples if is_batched else samples[0]))
            except Exception as error:
                assembler.explain(error, samples, None)
                raise
            return len(samples)
        finally:
            set_shard(outer)

    return make
