# SPDX-License-Identifier: Apache-2.0
"""The base class of all streams of batches, and the stream without workers.

    BatchStream ── WorkerStream   workers make the batches (`worker_stream`)
                └─ SerialStream   the caller's own thread does

Shutdown order: a stream closes when it fails, when it is closed, when its last reference goes, and
when an epoch ends, unless its workers are kept. Batches outlive the stream that gave them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.assembly import PlainOutput
from penstock.engine.fault_log import FaultLog, said_of_stop
from penstock.engine.plan import Given, unwrap_indices
from penstock.engine.recover import NO_BATCH
from penstock.engine.status_page import Phase, StatusWriter
from penstock.engine.task import BeginEpoch, Kind, Task, WorkerIdentity
from penstock.engine.task_runner import TaskRunner
from penstock.engine.timing import (
    WORKERS_PART,
    ConsumerClock,
    TimingRow,
    num_samples_of,
    sample_us_of,
)
from penstock.errors import TooManyFailures
from penstock.faults import annotate
from penstock.randomness.generator_watch import UNSEEDED, warn_of_drawings
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock.engine.assembly import PlainMaker
    from penstock.engine.backends import Backend
    from penstock.engine.plan import Epoch, Plan, Progress, ShardPosition
    from penstock.engine.task import TaskResult
    from penstock.engine.timing import WorkerSettings
    from penstock.faults import Failure
    from penstock.insight.monitor import Monitor

_FOLD_AT: Final = 1024  # light rows: some 300 KB
# Measuring a batch costs up to 50 us in the main process: 1 % of this.
_LONG_NS: Final = 5_000_000
_RECENT: Final = 64  # batches, among which half are to be long
_FEWEST_LONG: Final = 4  # batches; the first ones import modules, and a machine may stall

_new: Final = tuple.__new__  # a named tuple's own is written in Python, and slower


class DeliveryHook:
    """Processes each batch between its arrival and the consumer: copies it to a device, say.

    arrives ──▶ begin ── also before the consumer asks for it ──▶ finish ──▶ consumer

    A subclass defines `begin`; the rest is that of a hook which does all its work there.

    Attributes:
        begins_ahead: Whether it is worth while to begin with the next batch before it is asked for.

    Concurrency:
        The consumer's thread.
    """

    begins_ahead: bool = False

    def without_autograd(self) -> AbstractContextManager[object]:
        """Return a context in which a batch is begun ahead: the consumer is still at another one.

        What the consumer has switched on for that one is not to reach this one.
        """
        return contextlib.nullcontext()

    def begin(self, batch: Any, where: Callable[[], str]) -> Any:  # noqa: ANN401 - any batch tree
        """Begin with a batch, without waiting for anything; return something for `finish`.

        Raises:
            Exception: of this batch, which is lost.
        """
        raise NotImplementedError

    def finish(self, begun: Any) -> Any:  # noqa: ANN401 - what `begin` returned
        """Return what the consumer gets; called in the order of `begin`, and raises as it does."""
        return begun

    def close(self) -> None:
        """Wait until nothing is under way, and let go of all batches; a second call does nothing.

        What was handed over stays valid.
        """


class BatchStream:
    """A stream of batches, epoch after epoch.

    A subclass makes batches (`_next`), begins epochs (`_open`, `_begin`), and releases what it
    holds (`_release`).

    Attributes:
        epoch: The epoch that was begun last.
        num_yielded: Number of batches of this epoch that this stream has given.
        backend: The backend that runs the tasks; None without workers.

    Concurrency:
        One thread at a time.
    """

    num_yielded = 0
    backend: Backend | None = None

    def __init__(
        self,
        plan: Plan,
        epoch: Epoch,
        faults: FaultLog | None = None,
        observer: Monitor | None = None,
        hook: DeliveryHook | None = None,
    ) -> None:
        """Begin `epoch`."""
        self._plan = plan
        self._hook = hook
        self._observer = observer
        self._faults = faults or FaultLog(plan.spec.faults, plan.spec.dataset)
        in_process = plan.num_workers > 0 and plan.traits.shares_interpreter
        self._clock = ConsumerClock(time.thread_time_ns if in_process else time.process_time_ns)
        self._is_open = False
        self.epoch = epoch
        self._prepare(plan)
        self.begin_epoch(epoch)

    def _prepare(self, plan: Plan) -> None:
        """Set what belongs to all epochs."""

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begin an epoch; what is left of the last one is dropped.

        Workers go on, or are started if they are gone.
        """
        self._clock.begin_epoch()
        self._open()
        self._is_open = True
        self.epoch = epoch
        self._is_over = False
        self._num_bad = 0  # new ones, of which the observer was not notified yet
        self._num_long = self._long_since = 0
        self.num_yielded = 0
        with self._closed_on_error():
            self._begin(epoch)
        self._clock.started()

    def _open(self) -> None:
        """Start what outlives an epoch, if it is not there."""

    def _begin(self, epoch: Epoch) -> None:
        raise NotImplementedError

    def set_hook(self, hook: DeliveryHook | None) -> None:
        """Use another delivery hook from the next epoch on."""
        before, self._hook = self._hook, hook
        if before is not None:
            before.close()

    def batches(self, epoch: Epoch) -> Generator[Any, None, None]:
        """Yield the batches of `epoch`, until another is begun.

        A batch counts when the generator is suspended; `EpochIterator` is the iterator for loops.
        An exception ends the generator, and where `take` says so also the stream; else another
        generator goes on with the next batch.
        """
        progress = epoch.progress
        try:
            while self.epoch is epoch:
                yield self.take()  # in no variable: the loop alone keeps its batch
                progress.counted = progress.handed_out
        except BaseException as error:
            if not self._is_end(error, progress):
                raise

    def _is_end(self, error: BaseException, progress: Progress) -> bool:
        """Return whether `error`, which ends a generator of batches, is no failure."""
        if isinstance(error, StopIteration):
            return True
        trace = error.__traceback__
        if isinstance(error, GeneratorExit) and (trace is None or trace.tb_next is None):
            # At the yield, and not in the user's code: the loop has the batch and wants no more.
            progress.counted = progress.handed_out
            return True
        if not isinstance(error, Exception):
            # See `_closed_on_error`; the batch that was under way is lost here.
            self.close(in_a_hurry=True)
        # The wait for it is no time of the main process's own code.
        elif self._observer is not None and self._observer.measures:
            self._clock.give()
        else:
            self._clock.given_until(time.monotonic_ns())
        return False

    def take(self) -> Any:  # noqa: ANN401 - any batch tree
        """Return the next batch, which the caller is to yield.

        Raises:
            StopIteration: the epoch is over.
            WorkerDied: a worker is gone, and no more are to be started. The stream is closed. Or
                this is a forked copy of the process that has the workers.
            TooManyFailures: more samples were bad than the policy allows. The stream is closed.
            KeyboardInterrupt: or another interrupt of the wait. `batches` closes the stream.
            WorkerTimeout: no batch came in time. The stream goes on with the next call.
            RuntimeError: a sample raised StopIteration. The stream goes on with the next call.
            Exception: what the user's code raised. The stream goes on with the next call. Where the
                sampler raised it, the batch that workers were about to give is lost, as in torch.
        """
        observer = self._observer
        if observer is not None:
            self._clock.ask(lightly=not observer.measures)
        while True:
            batch = self._next()
            if batch is not NO_BATCH:
                self.num_yielded += 1
                return batch
            progress = self.epoch.progress
            progress.counted = progress.handed_out

    def _next(self) -> Any:  # noqa: ANN401 - any batch tree, or NO_BATCH
        raise NotImplementedError

    def _give(self, step: int, worker_id: int, outcome: TaskResult) -> Any:  # noqa: ANN401
        """Return the batch of a step, which counts once it is yielded, or raise its exception."""
        num_failed = self._record(outcome.bad, step, worker_id) if outcome.bad else 0
        position, progress = outcome.position, self.epoch.progress
        try:
            if self._hook is None:
                batch = outcome.batch()
            else:
                batch = self._begun(step, outcome, self._hook)
                if batch is not NO_BATCH:
                    # From here on, time is that of the main process's device or of its own code.
                    self._clock.arrived()
                    batch = self._hook.finish(batch)
        except Exception as error:
            self._fail(step, worker_id, position, error)
            raise
        given = self._spent(outcome, num_failed) if outcome.num_asked else progress.counted
        failed = progress.failed
        if position is not None:
            shards = [(id_, shard) for _, id_, shard in failed if shard is not None]
            given = given.with_shards([*shards, (worker_id, position)])
        if self._plan.spec.is_iterable:
            turn = (worker_id + 1) % max(self._plan.num_workers, 1)  # without workers it is 0
            given = given._replace(num_steps=given.num_steps + 1, turn=turn)
        elif self._plan.in_order and not given.ahead:
            given = Given(step + 1, *given[1:])
        else:
            given = given.with_steps([*(failed_step for failed_step, _, _ in failed), step])
        failed.clear()  # they count with this one
        progress.handed_out = given
        return batch

    def _begun(self, step: int, outcome: TaskResult, hook: DeliveryHook) -> Any:  # noqa: ANN401
        """Return what `hook` has begun with, or NO_BATCH."""
        batch, number = outcome.batch(), self.epoch.number
        if batch is NO_BATCH:
            return batch
        return hook.begin(batch, lambda: f"epoch {number}, step {step}")

    def _fail(
        self, step: int, worker_id: int, position: ShardPosition | None, error: Exception
    ) -> None:
        """Note that a batch could not be made: it counts once a later one is given."""
        self.epoch.progress.failed.append((step, worker_id, position))
        if not self._plan.num_workers:  # else the table of workers has done so
            annotate(error, f"in epoch {self.epoch.number}, step {step}")
        if isinstance(error, TooManyFailures):
            self.close()
        if isinstance(error, StopIteration):
            self._refuse_stop(error)

    def _count_rest(self, result: TaskResult, worker_id: int) -> None:
        """Count the samples at the end of a shard that belong to no batch: they were bad."""
        num_failed = self._record(result.bad, result.step, worker_id)
        self.epoch.progress.counted = self._spent(result, num_failed)

    def _spent(self, result: TaskResult, num_failed: int) -> Given:
        """Return `counted` with the cost of `result`; too many failures close the stream."""
        with self._closed_on_error():
            counted = self.epoch.progress.counted
            return self._faults.spend(counted, result.num_asked, num_failed, self.epoch)

    def _record(self, bad: Sequence[Failure], step: int, worker_id: int) -> int:
        """Record bad samples; return how many were not known yet."""
        worker = worker_id if self._plan.num_workers else None
        num_new = self._faults.record(bad, self.epoch, step, worker)
        self._num_bad += num_new
        return num_new

    def _refuse_stop(self, error: StopIteration) -> None:
        """Raise another error in the place of a sample's StopIteration, which ends any loop."""
        raise RuntimeError(said_of_stop(error)) from error

    def _observe(
        self,
        observer: Monitor,
        made: TaskResult,
        indices: object,
        worker_id: int = 0,
        num_ready: int = 0,
        num_workers: int = 0,
        lookahead: int = 0,
    ) -> WorkerSettings | None:
        """Give the observer the row of a batch; return the settings that it wants, if any."""
        num_bad, self._num_bad = self._num_bad, 0
        if not observer.measures:
            asked_ns, given_ns, consumer_ns = self._clock.give_lightly()
            light = observer.light
            light.append((
                asked_ns, given_ns, consumer_ns, self.epoch.number, made.step, num_bad,
                num_workers, lookahead, num_samples_of(made.times),
            ))  # fmt: skip
            if len(light) >= _FOLD_AT:
                self._fold(observer)
            if consumer_ns and given_ns - asked_ns + consumer_ns > _LONG_NS:
                self._note_long(observer)
            return None
        row = _new(TimingRow, (
            worker_id, made.pid, num_ready, *self._clock.give(), self.epoch.number, made.step,
            num_bad, num_workers, lookahead, *WORKERS_PART.unpack_from(made.times),
        ))  # fmt: skip
        keys = None if self._plan.spec.is_iterable else unwrap_indices(indices)
        try:
            return observer.batch_given(row, keys, sample_us_of(made.times), self.epoch)
        except Exception as error:
            self._end_accounts(error)
            return None

    def _end_accounts(self, error: Exception) -> None:
        """Go on without the observer, which has failed."""
        self._observer = None
        warn_user(
            "the loader's accounts have failed, and end here, while training goes on: "
            f"{type(error).__name__}: {error}. Please report it.\n{traceback.format_exc()}",
            RuntimeWarning,
        )

    def _fold(self, observer: Monitor) -> None:
        try:
            observer.fold()
        except Exception as error:
            self._end_accounts(error)

    def _note_long(self, observer: Monitor) -> None:
        """Count a batch so long, with the loop's own code, that measuring it costs little."""
        if self.num_yielded - self._long_since > _RECENT:
            self._num_long, self._long_since = 0, self.num_yielded
        self._num_long += 1
        num_recent = self.num_yielded - self._long_since
        if self._num_long >= _FEWEST_LONG and 2 * self._num_long > num_recent:
            observer.batches_are_long()

    def _end(self) -> None:
        """End the epoch, as there are no more batches."""
        self._is_over = self.epoch.progress.is_over = True
        if not self._plan.keep_workers:
            self.close()
        self._faults.warn_of_losses(self.epoch)
        if self._observer is not None:
            self._observer.epoch_ended(self.epoch, self._clock.end(self._num_bad))

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the stream if anything is raised.

        Ctrl-C may have hit anywhere: a message half sent or half decoded would come back as a
        hang. With kept workers the next epoch starts new ones.
        """
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self, *, in_a_hurry: bool = False) -> None:
        """Release everything; a second call does nothing. Batches that were given stay valid."""
        if self._is_open:
            self._is_open = False
            self._is_over = self.epoch.progress.is_closed = True
            try:
                if self._hook is not None:
                    self._hook.close()
            finally:  # also if a second Ctrl-C comes
                try:
                    self._release(in_a_hurry=in_a_hurry)
                finally:
                    self._clock.close()
                    if self._observer is not None:
                        self._observer.epoch_left(self.epoch)

    def _release(self, *, in_a_hurry: bool) -> None:
        raise NotImplementedError

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit multiprocessing ends daemonic workers by itself, and faster. `sys` may
        # be gone by then.
        if getattr(self, "_is_open", False) and not is_finalizing():
            self.close()


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
        number, keeps_states = epoch.number, plan.steps_per_state is not None
        begun = BeginEpoch(number, number, epoch.is_announced, position, keeps_states)
        runner.begin_epoch(begun, reports=False)
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
                        if given_ns - taken_ns > _LONG_NS:
                            self._note_long(observer)
                    taken_ns = given_ns
                    light.append(
                        (asked_ns, given_ns, consumer_ns, epoch.number, step, 0, 0, 0, num_samples)
                    )
                    if len(light) >= _FOLD_AT:
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
