# SPDX-License-Identifier: Apache-2.0
"""Streams from workers that behave as torch's iterators do; imported once there are workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.data.dataset import can_resume
from penstock.engine import scheduler
from penstock.engine.task import Kind
from penstock.engine.worker_stream import WorkerStream
from penstock.torch.streams import AsTorch

if TYPE_CHECKING:
    from penstock.engine.plan import Epoch, Given, ShardPosition
    from penstock.engine.task import TaskResult


class TorchWorkerStream(AsTorch, WorkerStream):
    """Batches made by workers."""


class StatefulWorkerStream(TorchWorkerStream):
    """Batches made by workers, with the states of their datasets and iterators."""

    def _begin(self, epoch: Epoch) -> None:
        """Begin an epoch, and wait until all workers have: their states may be asked for."""
        self._ends: dict[int, ShardPosition] = {}
        self._every = self._plan.steps_per_state or 0
        self._unready = set(range(self._wanted.num_workers))
        super()._begin(epoch)
        while self._unready and self.backend.is_whole:
            self._wait()
        # What was given after each `steps_per_state` steps, the last two times.
        self._snapshots = [epoch.progress.given]

    def _handle(self, event: scheduler.BackendEvent) -> scheduler.Answer | None:
        if isinstance(event, scheduler.WorkerReady) and event.worker_id in self._unready:
            self._unready.discard(event.worker_id)
            if event.result.kind == Kind.FAILED:
                event.result.batch()  # raises it
            progress, shard = self.epoch.progress, event.result.position
            progress.counted = progress.counted.with_shards([(event.worker_id, shard)])
            progress.handed_out = progress.counted
        elif isinstance(event, scheduler.WorkerExhausted):
            self._ends[event.worker_id] = event.result.position
        return super()._handle(event)

    def _takes_state(self, step: int) -> bool:
        every, spec, num_workers = self._every, self._plan.spec, self._wanted.num_workers
        if not every or not spec.is_iterable:
            is_last = every > 0 and step % every + num_workers >= every  # of its worker
            return is_last and can_resume(spec.dataset)
        # Which worker is going to give the last batch before the state is not known: shards end.
        num_ahead = num_workers * self._wanted.prefetch_factor
        num_given = self.epoch.progress.counted.num_steps
        return num_given % every + 1 + num_ahead + num_workers >= every

    def _give(self, step: int, worker_id: int, outcome: TaskResult) -> Any:  # noqa: ANN401
        batch = super()._give(step, worker_id, outcome)
        given = self.epoch.progress.handed_out
        if self._every > 1 and given.num_steps % self._every == 0:
            self._snapshots = [self._snapshots[-1], given]
        return batch

    def snapshot(self) -> tuple[Given, int]:
        """Return what was given when states were kept last, and the number of steps since."""
        given = last = self.epoch.progress.given
        if self._every != 1:
            last = [one for one in self._snapshots if one.num_steps <= given.num_steps][-1]
        shards, ends = last.shards, self._ends.items()
        ended = [(id_, end) for id_, end in ends if end.num_batches == shards[id_].num_batches]
        return last.with_shards(ended), given.num_steps - last.num_steps
