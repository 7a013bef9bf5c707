# SPDX-License-Identifier: Apache-2.0
"""One epoch of the worker threads: the dataset that they share is told of it once.

    the first worker     tells (`set_epoch`), then makes its fetcher
    the others           wait until it has, or until they are wanted no more

Concurrency:
    Workers call `begin`; any thread may call `give_up`. No user's code runs under the lock.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.engine.fetch import Fetcher
    from penstock.engine.thread_worker import ThreadWorker

__all__ = ["Round", "copy_of_error"]


class Round:
    """One epoch of one backend, shared by its workers. The user may begin the same epoch again.

    Attributes:
        number: Counts up.
        epoch: Its number to the user.
        teller: The worker that is telling the dataset; None before and afterwards.
    """

    def __init__(self, number: int, epoch: int, *, is_announced: bool) -> None:
        """Begin it; `is_announced` says whether the dataset is told."""
        self.number = number
        self.epoch = epoch
        self.teller: ThreadWorker | None = None
        self._is_announced = is_announced
        self._to_watch = [True]  # popped by the first worker that begins
        self._changed = threading.Condition()
        self._was_told = False
        self._failure: Exception | None = None

    def begin(
        self, worker: ThreadWorker, make: Callable[[bool], Fetcher], *, is_shared: bool
    ) -> Fetcher:
        """Return the fetcher that `make(is_announced)` makes.

        A dataset that all workers share is told of the epoch once, before any of them reads; if
        that fails, it fails for all.

        Raises:
            Unwanted: the worker is wanted no more.
        """
        if not (self._is_announced and is_shared):
            return make(self._is_announced)
        if not self._is_to_tell(worker):
            if self._failure is not None:
                raise copy_of_error(self._failure)
            return make(False)
        try:
            fetcher = make(True)
        except Exception as error:
            self._end_telling(worker, error)
            raise
        except BaseException:  # the worker's end, so another one is to tell
            self.give_up(worker)
            raise
        self._end_telling(worker, None)
        return fetcher

    def _is_to_tell(self, worker: ThreadWorker) -> bool:
        with self._changed:
            while not self._was_told:
                worker.notes.check()
                if self.teller is None:
                    self.teller = worker
                    return True
                self._changed.wait()
        return False

    def _end_telling(self, worker: ThreadWorker, failure: Exception | None) -> None:
        with self._changed:
            if self.teller is worker:  # else: it was given up, and another one tells
                self._was_told, self._failure = True, failure
                self.teller = None
            self._changed.notify_all()

    def give_up(self, worker: ThreadWorker) -> None:
        """Let another worker tell, if this one was about to; let it wait for none any more."""
        with self._changed:
            if self.teller is worker:
                self.teller = None
            self._changed.notify_all()

    def take_watch(self) -> bool:
        """Return whether the caller is the one whose first task is watched; True once."""
        try:
            return self._to_watch.pop()
        except IndexError:
            return False


def copy_of_error(error: Exception) -> Exception:
    """Return what may be raised in place of `error`, which is raised more than once.

    Raising it makes the frames of whoever raises it, and all that is in them, a part of it.
    """
    try:
        again = type(error).__new__(type(error), *error.args)
        vars(again).update(vars(error))
        again.__notes__ = list(getattr(error, "__notes__", ()))
        same = str(again) == str(error)
    except Exception:  # its class does not have that
        return error
    return again.with_traceback(error.__traceback__) if same else error
