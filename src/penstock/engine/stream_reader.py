# SPDX-License-Identifier: Apache-2.0
"""Reading one worker's shard of an iterable dataset, from its start or from a position."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import math
import pickle
import time
import warnings
from typing import TYPE_CHECKING, Any, Final

from penstock.data.dataset import can_resume
from penstock.engine.plan import ShardPosition
from penstock.engine.recover import BatchItem, Reader
from penstock.faults import annotate, text_of
from penstock.worker_info import set_shard, was_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.engine.assembly import Assembler, PlainMaker
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.task import WorkerIdentity
    from penstock.randomness.samples import SampleStreams
    from penstock.worker_info import ShardInfo

__all__ = ["StreamReader", "shard_maker"]

# Between two states of a dataset: this many times the duration of taking one, so 2 % of the time.
_STATE_INTERVAL: Final = 50.0
_LONGEST_RUN: Final = 100  # bad samples in a row, after which an iterator is given up


class StreamReader(Reader):
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
        position: ShardPosition,
        notices: dict[str, Any],
    ) -> None:
        """Begin the iterable, or bring it to `position`.

        Args:
            spec: Spec of the worker, with the dataset.
            streams: Random streams of the samples; None without a seed.
            identity: Identity of the worker.
            position: Position to go on from.
            notices: Receives the digest of the shard's first sample, to compare with others'.
        """
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
        self._can_resume = can_resume(spec.dataset)
        self._iterator = self._begin(position)
        # Not the iterator itself: `islice` calls `iter` on it, which may begin it anew.
        self._samples = map(next, itertools.repeat(self._iterator))

    def _begin(self, position: ShardPosition) -> Iterator[Any]:
        dataset = self._spec.dataset
        if position.has_ended:  # its state is that of an end: there is nothing to load
            self._num_batches, self._has_ended = position.num_batches, True
            return iter(())
        if position.state is not None:
            dataset.load_state_dict(pickle.loads(position.state))
            self._num_batches = self._state_at = position.state_at
        if self._streams is not None:
            self._streams.begin_iterator()
        iterator: Iterator[Any] = iter(dataset)
        return iterator

    def replay(self, make_batch: Callable[[], object], num_batches: int) -> None:
        """Make batches that were given before once more, under the same random numbers."""
        while self._num_batches < num_batches and not self._has_ended:
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
            why = (
                "A generator ends with the first exception that leaves it, so the samples after "
                "this one cannot be had: catch it inside, or let __iter__ return an object of a "
                "class with __next__, which can go on."
            )
        elif self._num_failed >= _LONGEST_RUN:
            why = f"The iterator raised {self._num_failed} times in a row."
        else:
            return False
        annotate(error, why)
        return True

    # The position.

    def shard_position(self) -> ShardPosition:
        """Return the position, without the dataset's state."""
        return ShardPosition(self._num_batches, self._has_ended, self._state_at)

    def position(self) -> ShardPosition:
        """Return the position, with the dataset's state if it was taken just now."""
        state = self._new_state()
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
            state = pickle.dumps(dataset.state_dict(), protocol=5)
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
    spec: WorkerSpec, reader: StreamReader, info: ShardInfo, assembler: Assembler
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
