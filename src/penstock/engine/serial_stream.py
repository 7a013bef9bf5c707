# SPDX-License-Identifier: Apache-2.0
"""Batches without workers: made in the caller's own thread, when they are asked for."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.assembly import PlainOutput
from penstock.engine.plan import Given
from penstock.engine.recover import NO_BATCH
from penstock.engine.status_page import Phase, StatusWriter
from penstock.engine.stream import FOLD_AT, LONG_NS, BatchStream
from penstock.engine.task import BeginEpoch, Kind, Task, WorkerIdentity
from penstock.engine.task_runner import TaskRunner
from penstock.randomness.generator_watch import UNSEEDED, warn_of_drawings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from penstock.engine.assembly import PlainMaker
    from penstock.engine.plan import Epoch, Plan, ShardPosition

_new: Final = tuple.__new__  # a named tuple's own is a function of Python


class SerialStream(BatchStream):
    """A stream whose one worker, number 0, is the caller itself.

    What the dataset raises, KeyboardInterrupt included, is raised in the caller as it is.
    """

    def _prepare(self, plan: Plan) -> None:
        self._status = StatusWriter(cpu_clock=time.thread_time_ns)
        self._runner: TaskRunner | None = None

    def _begin(self, epoch: Epoch) -> None:
        """Begin an epoch; an iterable dataset's iterator is made here."""
        self._tasks: Iterator[tuple[int, object]] = epoch.tasks()
        self._runner = None  # an iterator of the last epoch ends before the next begins
        plan, position = self._plan, epoch.progress.given.shards.get(0)
        output, identity = PlainOutput(plan.page_lock), WorkerIdentity(base_seed=plan.base_seed)
        runner = TaskRunner(output, self._status, identity, restores_generators=True)
        runner.set_up(lambda: plan.spec)
        runner.begin_epoch(BeginEpoch(epoch.number, epoch.number, epoch.is_announced, position))
        if runner.failure is not None:
            failures, runner.failure = [runner.failure], None
            raise failures.pop()  # in no variable: its traceback would make a cycle
        self._runner = runner

    def batches(self, epoch: Epoch) -> Generator[Any, None, None]:
        """Yield the batches of `epoch`, until another is begun; see `BatchStream.batches`."""
        make = None if self._hook is not None else self._plain_maker()
        if make is None or epoch.progress.given.ahead:
            return super().batches(epoch)
        assert self._runner is not None
        assert self._runner.maker is not None
        return self._plain_batches(epoch, make, self._runner.maker.shard_position)

    def _plain_maker(self) -> PlainMaker | None:
        maker = None if self._runner is None else self._runner.maker
        return None if maker is None else maker.plain_maker()

    def _plain_batches(
        self, epoch: Epoch, make: PlainMaker, shard_position: Callable[[], ShardPosition] | None
    ) -> Generator[Any, None, None]:
        """Do what `BatchStream.batches` does in one frame, which for cheap samples is the time."""
        progress, observer = epoch.progress, self._observer
        tasks, now = self._tasks, time.monotonic_ns
        out: list[Any] = []  # a batch passes through it: the loop alone keeps its batch
        light = deque() if observer is None else observer.light
        taken_ns = self._clock.taken_ns
        try:
            while self.epoch is epoch and not self._is_over:
                if observer is not None and observer.measures:
                    if taken_ns:
                        self._clock.given_until(taken_ns)
                        taken_ns = 0
                    yield self.take()
                    progress.counted = progress.handed_out
                    continue
                asked_ns = now()
                try:
                    step, indices = next(tasks)
                except StopIteration:
                    self._clock.given_until(taken_ns, asked_ns)
                    self._end()
                    return
                try:
                    num_samples = make(indices, out)
                except Exception as error:
                    self._clock.given_until(taken_ns, asked_ns)
                    if isinstance(error, StopIteration) and shard_position is not None:
                        self._end()
                    else:  # a StopIteration here is a map-style sample's
                        self._fail(step, 0, shard_position and shard_position(), error)
                    raise
                given = progress.counted
                if shard_position is None:
                    given = _new(Given, (step + 1, *given[1:]))
                else:
                    shards = {**given.shards, 0: shard_position()}
                    given = _new(Given, (given.num_steps + 1, given.ahead, shards, 0, *given[4:]))
                if progress.failed:
                    progress.failed.clear()
                progress.handed_out = given
                self.num_yielded += 1
                if observer is not None:
                    given_ns, consumer_ns = now(), 0
                    if not taken_ns:
                        asked_ns -= self._clock.take_starting_ns()
                    else:
                        consumer_ns = asked_ns - taken_ns
                        if given_ns - taken_ns > LONG_NS:
                            self._note_long(observer)
                    taken_ns = given_ns
                    light.append(
                        (asked_ns, given_ns, consumer_ns, epoch.number, step, 0, 0, 0, num_samples)
                    )
                    if len(light) >= FOLD_AT:
                        self._fold(observer)
                        observer = self._observer
                yield out.pop()
                progress.counted = given
        except BaseException as error:
            if not self._is_end(error, progress):
                raise

    def _next(self) -> Any:  # noqa: ANN401 - any batch tree, or NO_BATCH
        if self._is_over:
            raise StopIteration
        try:
            step, indices = next(self._tasks)
        except StopIteration:
            self._end()
            raise
        measures = self._observer is not None and self._observer.measures
        assert self._runner is not None
        result = self._runner.run(Task(self.epoch.number, step, indices, is_measured=measures))
        assert result is not None  # after the end of a stream it is not asked
        self._status.phase(Phase.ENDING)  # in no account: it is the main process's own code
        if result.notices is not None:
            warn_of_drawings(result.notices.get("drawings", ()), UNSEEDED)
        if result.kind == Kind.EXHAUSTED:
            self._count_rest(result, 0)
            self._end()
            raise StopIteration
        batch = self._give(step, 0, result)
        if self._observer is not None and batch is not NO_BATCH:
            result.pid = os.getpid()
            self._observe(self._observer, result, indices)
        return batch

    def _release(self, *, in_a_hurry: bool) -> None:
        """Drop the dataset's iterator and the recycled memory that no batch holds."""
        self._runner = None
        self._status.close()
