# SPDX-License-Identifier: Apache-2.0
"""No workers: tasks run in the caller's process and thread, when their batch is asked for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine.backends.in_process import Made, PlainOutput, Raised
from penstock.engine.deeds import Standing
from penstock.engine.fault_log import NO_LOSSES, Losses
from penstock.engine.fetch import Fetcher
from penstock.engine.logbook import Notes, Phase
from penstock.engine.order import TaskDone, WorkerExhausted
from penstock.faults import annotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.epoch import Epoch
    from penstock.engine.plan import Caution, Plan

__all__ = ["SerialBackend"]


class SerialBackend:
    """One worker, number 0, that is the caller itself.

    What the dataset raises, KeyboardInterrupt and StopIteration included, is raised in the caller
    as it is.
    """

    def __init__(self, plan: Plan) -> None:
        """Make batches as `plan.recipe` says."""
        self._recipe = plan.recipe
        self._base_seed = plan.base_seed
        self._page_lock = plan.page_lock
        self._output = PlainOutput(plan.page_lock)
        self._fetcher: Fetcher | None = None
        self._task: tuple[int, object] | None = None
        self._epoch = 0
        self._notes = Notes(cpu_clock=time.thread_time_ns)

    def start(self) -> None:
        """Nothing to start."""

    @property
    def is_whole(self) -> bool:
        """Always."""
        return True

    def begin_epoch(self, epoch: Epoch) -> None:
        """Iterate the dataset anew."""
        self._epoch = epoch.number
        self._fetcher = Fetcher(
            self._recipe,
            self._output,
            base_seed=self._base_seed,
            epoch=epoch.number,
            is_announced=epoch.is_announced,
            share=epoch.progress.given.shares.get(0),
            isolated=True,
            notes=self._notes,
        )

    def await_start(self) -> tuple[int, ...]:
        """Return nobody: workers of this machine start at once."""
        return ()

    def submit(
        self, worker_id: int, step: int, indices: object, caution: Caution | None = None
    ) -> None:
        """Keep the task until its event is asked for; there is nothing to be cautious of."""
        self._task = (step, indices)

    def events(self, timeout_s: float | None) -> Sequence[TaskDone | WorkerExhausted]:
        """Run the task that was submitted."""
        assert self._fetcher is not None
        assert self._task is not None
        step, indices = self._task
        self._task = None
        self._notes.begin_task(self._epoch, step)
        try:
            batch = self._fetcher.fetch(indices, step)
            share = self._fetcher.share()
        except BaseException as error:
            if isinstance(error, StopIteration) and self._recipe.is_iterable:
                bad = self._fetcher.take_bad()
                return [WorkerExhausted(0, step, Losses(len(bad), bad))]
            losses = Losses(0, self._fetcher.take_bad())
            if isinstance(error, Exception):
                annotate(error, f"in epoch {self._epoch}, step {step}")
            return [TaskDone(0, step, Raised(error, self._fetcher.share(), losses))]
        num_asked = self._fetcher.num_asked  # counted only where a policy needs it
        losses = Losses(num_asked, self._fetcher.take_bad()) if num_asked else NO_LOSSES
        times = self._notes.take_times(num_bytes=self._output.take_num_bytes())
        self._notes.phase(Phase.WAITING)
        times = times._replace(idle_ns=0)  # what lies between two tasks is the trainer's own code
        return [TaskDone(0, step, Made(batch, share, losses, times))]

    def respawn(self, worker_id: int) -> None:
        """Never called: the caller does not die."""

    def hire(self, worker_id: int) -> None:
        """Never called: there is one caller."""

    def dismiss(self, worker_id: int) -> None:
        """Never called, either."""

    def kill(self, worker_id: int, why: str) -> None:
        """Never called: nobody waits with a timeout."""

    def diagnose(self, worker_id: int, *, with_stacks: bool) -> Standing:
        """Nothing: the caller knows its own."""
        return Standing("")

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Drop the dataset's iterator and the recycled memory that no batch holds."""
        self._fetcher = None
        self._output = PlainOutput(self._page_lock)
        self._notes.close()
