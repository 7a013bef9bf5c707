# SPDX-License-Identifier: Apache-2.0
"""One epoch of the worker threads.

The dataset that they share is notified of the epoch once:

    the first worker     calls `set_epoch`, then makes its maker
    the others           wait until it has, or until they are to stop

Each worker shards its own copy of a stream (`penstock.data.shard`). If these copies differ, samples
are lost or come twice; so the first items are compared.

Concurrency:
    Workers call `begin`; any thread may call `give_up`. No user's code runs under the lock.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.pickling import copy_of_error
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.engine.backends.thread_worker import ThreadWorker
    from penstock.engine.batch_maker import BatchMaker
    from penstock.engine.generator_watch import GeneratorWatch

__all__ = ["ThreadGeneration"]

_MOST_COMPARED: Final = 64  # items of a stream; two orders of 2 items agree half of the time


class ThreadGeneration:
    """One epoch of one backend, shared by its workers. The user may begin the same epoch again.

    Attributes:
        number: Number of the generation; it counts up.
        epoch: Number of the epoch to the user.
        notifier: Worker that is notifying the dataset; None before and afterwards.
        watch: Watch of the worker whose first task is watched, if one is.
    """

    def __init__(self, number: int, epoch: int, *, is_announced: bool) -> None:
        """Begin a generation; `is_announced` says whether the dataset is notified."""
        self.number = number
        self.epoch = epoch
        self.notifier: ThreadWorker | None = None
        self.watch: GeneratorWatch | None = None
        # (call of `shard`, number of the item) -> the worker that was there first, item pickled
        self._dealt: dict[tuple[int, int], tuple[ThreadWorker, bytes]] = {}
        self._is_announced = is_announced
        self._to_watch = [True]  # popped by the first worker that begins
        self._changed = threading.Condition()
        self._was_notified = False
        self._failure: Exception | None = None

    def begin(
        self, worker: ThreadWorker, make: Callable[[bool], BatchMaker], *, is_shared: bool
    ) -> BatchMaker:
        """Return the maker that `make(is_announced)` makes.

        A dataset that all workers share is notified of the epoch once, before any of them reads; if
        that fails, it fails for all.

        Raises:
            Unwanted: the worker is wanted no more.
        """
        if not (self._is_announced and is_shared):
            return make(self._is_announced)
        if not self._is_to_notify(worker):
            if self._failure is not None:
                raise copy_of_error(self._failure)
            return make(False)
        try:
            maker = make(True)
        except Exception as error:
            self._end_notifying(worker, error)
            raise
        except BaseException:  # the worker's end, so another one is to notify
            self.give_up(worker)
            raise
        self._end_notifying(worker, None)
        return maker

    def _is_to_notify(self, worker: ThreadWorker) -> bool:
        with self._changed:
            while not self._was_notified:
                worker.status.check()
                if self.notifier is None:
                    self.notifier = worker
                    return True
                self._changed.wait()
        return False

    def _end_notifying(self, worker: ThreadWorker, failure: Exception | None) -> None:
        with self._changed:
            if self.notifier is worker:  # else: it was given up, and another one notifies
                self._was_notified, self._failure = True, failure
                self.notifier = None
            self._changed.notify_all()

    def give_up(self, worker: ThreadWorker) -> None:
        """Leave the notifying to another worker, if it was `worker`'s; end the wait of `worker`."""
        with self._changed:
            if self.notifier is worker:
                self.notifier = None
            self._changed.notify_all()

    def comparer(self, worker: ThreadWorker) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """Return a function that passes items on, and compares the first with other workers'."""
        calls = itertools.count()

        def compared(items: Iterable[Any]) -> Iterator[Any]:
            stream = iter(items)
            return itertools.chain(self._compared(stream, worker, next(calls)), stream)

        return compared

    def _compared(self, stream: Iterator[Any], worker: ThreadWorker, call: int) -> Iterator[Any]:
        for number, item in enumerate(itertools.islice(stream, _MOST_COMPARED)):
            pickled = _pickled(item)  # the item itself is the dataset's, which may change it
            first, other = self._dealt.setdefault((call, number), (worker, pickled))
            if not _are_equal(item, pickled, other):
                raise self._disagreement(number, (first, pickle.loads(other)), (worker, item))
            yield item

    def _disagreement(self, number: int, *found: tuple[ThreadWorker, object]) -> ConfigError:
        said = " and ".join(f"{item!r:.80} in {worker}" for worker, item in found)
        drawings = () if self.watch is None else self.watch.found
        named = "".join(f" ({drawing})" for drawing in drawings)
        return ConfigError(
            f"the items that shard deals out are not the same in all worker threads: item {number} "
            f"is {said}. Some samples would be lost, others would come twice. A stream that "
            f"shuffles with random, numpy.random or torch's global generator{named} draws from "
            "what all threads share: shuffle with a generator that is seeded alike in all workers, "
            "as np.random.default_rng((seed, epoch)), or use backend='process' with seed=."
        )

    def take_watch(self) -> bool:
        """Return whether the caller's first task is to be watched; True once."""
        try:
            return self._to_watch.pop()
        except IndexError:
            return False


def _pickled(item: object) -> bytes:
    try:
        return pickle.dumps(item, protocol=5)
    except Exception:  # it holds a lock, say: it is not compared
        return b""


def _are_equal(item: object, pickled: bytes, other: bytes) -> bool:
    """Return whether two items are equal, or cannot be compared; equal ones may pickle unlike."""
    if pickled == other or not (pickled and other):
        return True
    try:
        return bool(pickle.loads(other) == item)
    except Exception:  # arrays, whose bytes differ
        return False
