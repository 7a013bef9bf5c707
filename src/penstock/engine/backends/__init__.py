# SPDX-License-Identifier: Apache-2.0
"""Who runs the tasks: one Protocol, one file per backend.

open_backend(plan)          picks one
Backend.start()             workers begin to start; does not wait for them
Backend.begin_epoch(epoch)  before any task, and for each epoch: datasets are iterated anew
Backend.await_start()       those not there yet, notified of when they are
Backend.submit(w, s, i)     never blocks
Backend.respawn(w)          another worker in the place of one that died
Backend.add_worker(w)       one worker more, which joins the epoch
Backend.remove_worker(w)    one worker fewer; it has no tasks
Backend.events(timeout_s)   what happened: blocks until there is at least one, or time is up
Backend.close()             everything is gone when it returns; may be called again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.engine.epoch import Epoch
    from penstock.engine.plan import Plan, RetryHints
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.worker_table import WorkerProgress

__all__ = ["Backend", "open_backend"]


class Backend(Protocol):
    """Runs tasks, each on the worker it is submitted to, per worker in the order of submission.

    Attributes:
        measures: Whether results of tasks submitted from now on hold what they took.

    Concurrency:
        One thread.
    """

    measures: bool

    def start(self) -> None:
        """Start the workers; does not wait until they are ready."""

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives; what is not whole cannot begin another epoch."""

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begin an epoch, or go on in one; results of earlier ones are dropped from now on."""

    def begin_ahead(self, epoch: Epoch) -> int | None:
        """Begin the next epoch, while results of the current one are still to come.

        All tasks of the current one are submitted. `adopt_ahead` or `begin_epoch` comes next.

        Returns:
            The generation of its results; None if it cannot.
        """

    def adopt_ahead(self, epoch: Epoch) -> None:
        """Let the epoch that was begun ahead be the current one: it has turned out as `epoch`."""

    def drop_ahead(self) -> None:
        """Drop what comes of the epoch that was begun ahead."""

    def await_start(self) -> Collection[int]:
        """Return the workers that may take long to start; `events` tells when each can begin.

        They may be given tasks before that all the same.
        """

    def submit(
        self,
        worker_id: int,
        step: int,
        indices: object,
        hints: RetryHints | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """Give a worker the task of making `step` of the current epoch. Does not block.

        `ahead` says that it is of the epoch that was begun ahead.
        """

    def events(self, timeout_s: float | None) -> Sequence[BackendEvent]:
        """Return what happened since the last call, waiting for the first thing to happen.

        Returns:
            Events of the current epoch, and `TaskDone` of one begun ahead; none if `timeout_s`
            went by.
        """

    def respawn(self, worker_id: int) -> None:
        """Start another worker in the place of a dead one, which goes on in the current epoch.

        Tasks that the dead one had are not its own before they are submitted again.
        """

    def add_worker(self, worker_id: int) -> None:
        """Start one worker more, `worker_id` below `plan.max_workers`; it joins the current epoch.

        Does not wait until it is ready: `events` tells (`WorkerReady`), unless the epoch is over.
        """

    def remove_worker(self, worker_id: int) -> None:
        """Let a worker go that has no tasks; does not wait until it is gone, and is no death.

        The same number may be added again later.
        """

    def kill(self, worker_id: int, why: str) -> None:
        """End a worker that is stuck; `events` then tells of its death."""

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Return what a worker is doing, and how far it is.

        Args:
            worker_id: Its number.
            with_stacks: Whether the words hold the stacks of its threads. To show them disturbs it,
                and there is room for some of them only.
        """

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Stop the workers and wait until they are gone; a second call does nothing.

        Args:
            in_a_hurry: Whether to give them less time to finish what they are doing.
        """


def open_backend(plan: Plan) -> Backend:
    """Return the backend that `plan` asks for, which has workers; not yet started."""
    if plan.backend == "thread":
        from penstock.engine.backends.thread import ThreadBackend

        return ThreadBackend(plan)
    if plan.backend == "ray":
        from penstock.engine.backends.ray.backend import RayBackend

        return RayBackend(plan)
    from penstock.engine.backends.process import ProcessBackend

    return ProcessBackend(plan)
