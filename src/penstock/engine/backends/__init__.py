# SPDX-License-Identifier: Apache-2.0
"""Backends, which run the tasks: one Protocol, one file per backend."""

from __future__ import annotations

import atexit
import pkgutil
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.engine.plan import Epoch, Plan
    from penstock.engine.scheduler import BackendEvent
    from penstock.engine.task import Task
    from penstock.engine.worker_table import WorkerProgress

# Of one system call. A signal that comes just before it, or that the kernel gives to another
# thread, does not end it; Python acts upon the signal when the call is over.
LONGEST_WAIT_S: Final = 1.0


class Backend(Protocol):
    """Runs tasks, each on the worker it is submitted to, per worker in the order of submission.

    Concurrency:
        One thread.
    """

    def start(self) -> None:
        """Start the workers; does not wait until they are ready."""

    @property
    def is_whole(self) -> bool:
        """Whether every worker lives; else the backend cannot begin another epoch."""

    def begin_epoch(self, epoch: Epoch) -> int:
        """Begin an epoch, or go on in one; return the generation of its tasks and results.

        Results of earlier generations are dropped from now on.
        """

    # Only of process workers.

    def begin_ahead(self, epoch: Epoch) -> int:
        """Begin the next epoch, as all tasks of the current one are submitted.

        Returns:
            Its generation. `events` returns its results beside those of the current epoch, until
            `adopt_ahead` or `begin_epoch`.
        """

    def adopt_ahead(self, generation: int, epoch: Epoch) -> None:
        """Make the epoch that was begun ahead the current one: it has turned out as `epoch`."""

    def await_start(self) -> Collection[int]:
        """Return the workers still starting; `events` reports each as `WorkerReady`.

        They may be given tasks before that.
        """

    def submit(self, worker_id: int, task: Task) -> None:
        """Give a worker a task of the current epoch, or of the one begun ahead. Does not block."""

    def events(self, timeout_s: float | None) -> Sequence[BackendEvent]:
        """Return what happened since the last call, waiting for the first thing to happen."""

    def respawn(self, worker_id: int) -> None:
        """Start another worker in the place of a dead one, which goes on in the current epoch.

        It has none of the dead worker's tasks until they are submitted again.
        """

    def add_worker(self, worker_id: int) -> None:
        """Start one worker more, `worker_id` below `plan.max_workers`; it joins the current epoch.

        Does not wait until it is ready: `events` reports it as `WorkerReady`, if the epoch is still
        on.
        """

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker that has no tasks; does not wait for its end, which is no death.

        The same number may be added again later.
        """

    def kill(self, worker_id: int, why: str) -> None:
        """End a worker that is stuck; `events` then reports its death."""

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> WorkerProgress:
        """Return what a worker is doing, and how far it is."""

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Stop the workers and wait until they are gone; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """Traits of a backend's workers, by which other modules decide.

    Attributes:
        path: Path of the backend's class, as "module:name", imported where workers are started.
        shares_interpreter: Whether workers are threads of the main process, and share its lock,
            memory and global generators.
        is_local: Whether workers are on this machine, and use its cores and its memory.
        has_start_method: Whether workers are processes that `multiprocessing` starts.
    """

    path: str = ""
    shares_interpreter: bool = False
    is_local: bool = True
    has_start_method: bool = False


BACKENDS: Final = {
    "process": BackendTraits(f"{__name__}.process:ProcessBackend", has_start_method=True),
    "thread": BackendTraits(f"{__name__}.thread:ThreadBackend", shares_interpreter=True),
    "ray": BackendTraits(f"{__name__}.ray.backend:RayBackend", is_local=False),
}


def traits_of(backend: str) -> BackendTraits:
    """Return the traits of a backend; the defaults for "serial", which has no workers."""
    return BACKENDS.get(backend, BackendTraits())


def open_backend(plan: Plan) -> Backend:
    """Return the backend of `plan`, which has workers; it is not yet started."""
    backend: Backend = pkgutil.resolve_name(plan.traits.path)(plan)
    return backend


_to_close: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(backend: Any) -> None:  # noqa: ANN401 - not all can begin an epoch ahead
    """Close `backend` at interpreter exit, before multiprocessing's own handler runs."""
    _to_close.add(backend)
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # what is registered last runs first


def _close_all() -> None:
    for backend in list(_to_close):
        backend.close(in_a_hurry=True)
