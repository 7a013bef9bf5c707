# SPDX-License-Identifier: Apache-2.0
"""Reading one worker's shard of an iterable dataset, from its start or from a position."""

from __future__ import annotations

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
from penstock.engine.reader import BatchItem
from penstock.errors import TooManyFailures
from penstock.faults import annotate, text_of
from penstock.worker_info import was_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.data.dataset import Allocator
    from penstock.engine.plan import WorkerSpec
    from penstock.randomness.samples import SampleStreams

__all__ = ["StreamReader"]

# Between two states of a dataset: this many times the duration of taking one, so 2 % of the time.
_STATE_INTERVAL: Final = 50.0
_LONGEST_RUN: Final = 100  # bad samples in a row, after which an iterator is given up


class StreamReader:
    """One worker's shard of an iterable dataset, batch by batch.

    Attributes:
        first_digest: Digest of the shard's first sample, to compare with other workers'.

    Concurrency:
        One thread. Every call runs the user's code, so its random streams must be active.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        streams: SampleStreams | None,
        worker_id: int,
        num_workers: int,
        position: ShardPosition,
    ) -> None:
        """Begin the iterable, or bring it to `position`."""
        self.first_digest: bytes | None = None
        self._spec = spec
        self._streams = streams
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._num_batches = 0
        self._has_ended = False
        self._is_untouched = True  # nothing was taken from the iterator
        self._state_at = 0  # batches after which its state was taken last
        self._next_state_s = 0.0
        self._num_to_replay = 0
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
        self._num_to_replay = position.num_batches - self._num_batches
        iterator: Iterator[Any] = iter(dataset)
        return iterator

    def replay(self, make_batch: Callable[[], object]) -> None:
        """Make batches that were given before once more, under the same random numbers."""
        for _ in range(self._num_to_replay):
            try:
                make_batch()
            except StopIteration:
                self._has_ended = True
                return
            except Exception:  # the loop got it then, and went on
                continue

    def place(self, k: int = 0) -> int:
        """Return the place of sample k of the next batch, as if all shards were equally long."""
        step = self._num_batches * self._num_workers + self._worker_id
        batch_size = self._spec.batch_size or 1
        return (step * batch_size + k) * self._spec.world_size + self._spec.rank

    # The samples of a batch.

    @property
    def has_begun(self) -> bool:
        """Whether a batch was read."""
        return self._num_batches > 0

    def take(self, fill: Callable[[BatchItem], None], count: int | None = None) -> list[BatchItem]:
        """Return the items of the next batch, filled; a batch that fails counts as well.

        Args:
            fill: Function that calls `read`, once or more.
            count: Number of samples to take; None is the batch size.

        Raises:
            StopIteration: the shard has ended.
            Exception: what `fill` raises.
        """
        if self._has_ended:
            raise StopIteration
        try:
            items = self._fill(fill, count or self._spec.batch_size or 1)
        except StopIteration:
            raise
        except Exception:
            self._num_batches += 1
            raise
        self._num_batches += 1
        return items

    def take_samples(self, count: int) -> list[Any]:
        """Return the samples of the next batch, read without random streams or policies.

        Args:
            count: Number of samples in a whole batch.

        Raises:
            StopIteration: the shard has ended.
            Exception: what the iterator raises.
        """
        if self._has_ended:
            raise StopIteration
        self._is_untouched = False
        self._num_batches += 1  # also of a batch that fails
        samples = list(itertools.islice(self._samples, count))
        if len(samples) < count:
            self._has_ended = True
            if not samples or self._spec.drop_last:
                self._num_batches -= 1
                raise StopIteration
        return samples

    def _fill(self, fill: Callable[[BatchItem], None], count: int) -> list[BatchItem]:
        items: list[BatchItem] = []
        for number in range(count):
            item = BatchItem(number, None, self.place(number))
            try:
                fill(item)
            except StopIteration:
                self._has_ended = True
                break
            items.append(item)
        is_short = self._has_ended and self._spec.drop_last and len(items) < count
        if not items or is_short:
            raise StopIteration
        return items

    # Reading items, of which some may be bad: see `Reader`.

    def read(self, item: BatchItem) -> Any:  # noqa: ANN401
        """Return the next sample; a sample that fails is not retried.

        Raises:
            StopIteration: there is none.
            Exception: whatever the iterator raises.
        """
        is_first, self._is_untouched = self._is_untouched, False
        if self._streams is not None:
            if is_first:
                self._streams.begin_first_sample(item.place)
            else:
                self._streams.begin_sample(item.place, item.attempt)
        sample = next(self._iterator)
        self._num_failed = 0
        is_start = self._num_batches == 0 and item.number == 0
        if is_start and self._num_workers > 1 and not was_asked():
            self.first_digest = _digest(sample)
        return sample

    def gather(self, items: list[BatchItem], empty: Allocator) -> tuple[bool, Any]:
        """Return the samples."""
        return False, [item.sample for item in items]

    def read_anew(self, items: list[BatchItem]) -> None:
        """Do nothing: no sample can be read twice."""

    def replace(self, item: BatchItem, error: Exception) -> None:
        """Give the item the next sample to read."""
        item.attempt += 1
        if item.attempt > _LONGEST_RUN:
            raise TooManyFailures(
                f"{_LONGEST_RUN} samples in a row did not fit into one batch of the iterable "
                f"dataset, the last one for {text_of(error)}; loader.failures lists them."
            )

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
        if self._num_failed >= _LONGEST_RUN:
            annotate(error, f"The iterator raised {self._num_failed} times in a row.")
            return True
        return False

    def end_of_workers(self, item: BatchItem) -> str:
        """Return an empty text: samples of an iterable cannot be identified."""
        return ""

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
                f"{type(dataset).__name__}.state_dict() failed with {type(error).__name__}: "
                f"{error}. The loader's state can only replay this stream.",
                stacklevel=2,
            )
            return None
        ended = time.perf_counter()
        self._next_state_s = ended + _STATE_INTERVAL * (ended - begun)
        self._state_at = self._num_batches
        return state


def _digest(sample: object) -> bytes | None:
    """Return a digest of a sample; None for one that cannot be pickled."""
    try:
        return hashlib.blake2b(pickle.dumps(sample, protocol=5), digest_size=16).digest()
    except Exception:  # whatever a user's class does; without a digest there is just no warning
        return None
