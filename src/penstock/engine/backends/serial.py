# SPDX-License-Identifier: Apache-2.0
"""No workers: tasks run in the caller's process and thread, when their batch is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.engine.fetch import Fetcher
from penstock.engine.order import TaskDone, WorkerExhausted
from penstock.transport.arena import BufferPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.epoch import Epoch, Share
    from penstock.engine.plan import Plan

__all__ = ["SerialBackend"]


class _Batch:
    __slots__ = ("_batch", "share")

    def __init__(self, batch: object, share: Share | None) -> None:
        self._batch = batch
        self.share = share

    def result(self) -> object:
        return self._batch


class _Raised:
    """What the user's code raised, raised again as it is."""

    __slots__ = ("_error", "share")

    def __init__(self, error: BaseException, share: Share | None) -> None:
        self._error: BaseException | None = error
        self.share = share

    def result(self) -> object:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # a traceback that holds its own exception would be a cycle


class SerialBackend:
    """One worker, number 0, that is the caller itself.

    What the dataset raises, KeyboardInterrupt and StopIteration included, is raised in the caller
    as it is.
    """

    def __init__(self, plan: Plan) -> None:
        """Make batches as `plan.recipe` says."""
        self._recipe = plan.recipe
        self._pool = BufferPool()
        self._fetcher: Fetcher | None = None
        self._task: tuple[int, object] | None = None

    def start(self) -> None:
        """Nothing to start."""

    @property
    def is_whole(self) -> bool:
        """Always."""
        return True

    def begin_epoch(self, epoch: Epoch) -> None:
        """Iterate the dataset anew."""
        self._fetcher = Fetcher(
            self._recipe,
            self._pool.empty,
            epoch=epoch.number,
            is_announced=epoch.is_announced,
            share=epoch.progress.shares.get(0),
            isolated=True,
        )

    def submit(self, worker_id: int, step: int, indices: object) -> None:
        """Keep the task until its event is asked for."""
        self._task = (step, indices)

    def events(self, timeout_s: float | None) -> Sequence[TaskDone | WorkerExhausted]:
        """Run the task that was submitted."""
        assert self._fetcher is not None
        assert self._task is not None
        step, indices = self._task
        self._task = None
        try:
            batch = self._fetcher.fetch(indices)
            share = self._fetcher.share()
        except BaseException as error:
            if isinstance(error, StopIteration) and self._recipe.is_iterable:
                return [WorkerExhausted(0, step)]
            return [TaskDone(0, step, _Raised(error, self._fetcher.share()))]
        return [TaskDone(0, step, _Batch(batch, share))]

    def close(self) -> None:
        """Drop the dataset's iterator and the recycled memory that no batch holds."""
        self._fetcher = None
        self._pool = BufferPool()
