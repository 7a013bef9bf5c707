# SPDX-License-Identifier: Apache-2.0
"""Who runs the tasks: one Protocol, one file per backend.

BACKENDS                    which there are, and what their workers are
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

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.engine.epoch import Epoch
    from penstock.engine.plan import Plan, RetryHints
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.worker_table import WorkerProgress

__all__ = ["BACKENDS", "Backend", "BackendTraits", "open_backend", "traits_of"]


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

    # Only of a backend whose traits say `begins_ahead`.

    def begin_ahead(self, epoch: Epoch) -> int:
        """Begin the next epoch, while results of the current one are still to come.

        All tasks of the current one are submitted. `adopt_ahead`, `drop_ahead` or `begin_epoch`
        comes next.

        Returns:
            The generation of its tasks and results.
        """

    def adopt_ahead(self, generation: int, epoch: Epoch) -> None:
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
        generation: int | None = None,
    ) -> None:
        """Give a worker the task of making `step` of the current epoch. Does not block.

        `generation` is given for an epoch that was begun ahead.
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


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """Traits of a backend's workers, by which others decide.

    Attributes:
        path: Of the backend's class, as "module:name". It is imported where workers are started.
        shares_interpreter: Workers are threads of the main process: they share its lock, memory and
            global generators.
        is_local: Workers are on this machine, and use its cores and its memory.
        has_start_method: Workers are processes that `multiprocessing` starts.
        begins_ahead: Workers can begin an epoch beside the one under way.
    """

    path: str = ""
    shares_interpreter: bool = False
    is_local: bool = True
    has_start_method: bool = False
    begins_ahead: bool = False


BACKENDS: Final = {
    "process": BackendTraits(
        f"{__name__}.process:ProcessBackend", has_start_method=True, begins_ahead=True
    ),
    "thread": BackendTraits(f"{__name__}.thread:ThreadBackend", shares_interpreter=True),
    "ray": BackendTraits(f"{__name__}.ray.backend:RayBackend", is_local=False),
}


def traits_of(backend: str) -> BackendTraits:
    """Return the traits of a backend; of "serial", which has no workers, those that say nothing."""
    return BACKENDS.get(backend, BackendTraits())


def open_backend(plan: Plan) -> Backend:
    """Return the backend that `plan` asks for, which has workers; not yet started."""
    backend: Backend = pkgutil.resolve_name(plan.traits.path)(plan)
    return backend
