# SPDX-License-Identifier: Apache-2.0
"""No workers: tasks run in the caller's process and thread, when their batch is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.engine.fault_log import NO_LOSSES, Losses
from penstock.engine.fetch import Fetcher
from penstock.engine.order import TaskDone, WorkerExhausted
from penstock.faults import annotate
from penstock.transport.arena import BufferPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.epoch import Epoch, Share
    from penstock.engine.plan import Caution, Plan

__all__ = ["SerialBackend"]


class _Batch:
    __slots__ = ("_batch", "losses", "share")

    def __init__(self, batch: object, share: Share | None, losses: Losses) -> None:
        self._batch = batch
        self.share = share
        self.losses = losses

    def result(self) -> object:
        return self._batch


class _Raised:
    """What the user's code raised, raised again as it is."""

    __slots__ = ("_error", "losses", "share")

    def __init__(self, error: BaseException, share: Share | None, losses: Losses) -> None:
        self._error: BaseException | None = error
        self.share = share
        self.losses = losses

    def result(self) -> object:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # a traceback that holds its own exception would be a cycle


class _PlainOutput:
    """Batches leave as they are, in recycled memory of this process."""

    def __init__(self) -> None:
        self.empty = BufferPool().empty

    def finish(self, batch: object) -> object:
        return batch

    def rehearse(self, batch: object) -> None:
        """Nothing that could fail."""

    def abandon(self) -> None:
        """Garbage collection takes it back."""


class SerialBackend:
    """One worker, number 0, that is the caller itself.

    What the dataset raises, KeyboardInterrupt and StopIteration included, is raised in the caller
    as it is.
    """

    def __init__(self, plan: Plan) -> None:
        """Make batches as `plan.recipe` says."""
        self._recipe = plan.recipe
        self._base_seed = plan.base_seed
        self._output = _PlainOutput()
        self._fetcher: Fetcher | None = None
        self._task: tuple[int, object] | None = None
        self._epoch = 0

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
            share=epoch.progress.shares.get(0),
            isolated=True,
        )

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
            return [TaskDone(0, step, _Raised(error, self._fetcher.share(), losses))]
        num_asked = self._fetcher.num_asked  # counted only where a policy needs it
        losses = Losses(num_asked, self._fetcher.take_bad()) if num_asked else NO_LOSSES
        return [TaskDone(0, step, _Batch(batch, share, losses))]

    def respawn(self, worker_id: int) -> None:
        """Never called: the caller does not die."""

    def kill(self, worker_id: int, why: str) -> None:
        """Never called: nobody waits with a timeout."""

    def diagnose(self, worker_id: int) -> str:
        """Nothing: the caller knows its own."""
        return ""

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Drop the dataset's iterator and the recycled memory that no batch holds."""
        self._fetcher = None
        self._output = _PlainOutput()
