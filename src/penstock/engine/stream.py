# SPDX-License-Identifier: Apache-2.0
"""The base class of all streams of batches, with or without workers.

    BatchStream ── WorkerStream   workers make the batches (`worker_stream`)
                └─ SerialStream   the caller's own thread does (`serial_stream`)

Shutdown order: a stream closes when it fails, when it is closed, when its last reference goes, and
when an epoch ends, unless its workers are kept. Batches outlive the stream that gave them.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.clocks import ConsumerClock
from penstock.engine.epoch import Given
from penstock.engine.fault_log import FaultLog, said_of_stop
from penstock.engine.plan import unwrap_indices
from penstock.engine.recover import NO_BATCH
from penstock.engine.timing import WORKERS_PART, TimingRow, num_samples_of, sample_us_of
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from penstock.engine.backends import Backend
    from penstock.engine.delivery_hook import DeliveryHook
    from penstock.engine.epoch import Epoch, ShardPosition
    from penstock.engine.plan import Plan
    from penstock.engine.recover import BadSample
    from penstock.engine.task import TaskResult
    from penstock.engine.timing import Observer, WorkerSettings

__all__ = ["FOLD_AT", "LONG_NS", "BatchStream", "was_raised_below"]

FOLD_AT: Final = 1024  # light rows: some 300 KB
# Measuring a batch costs up to 50 us in the main process: 1 % of this.
LONG_NS: Final = 5_000_000
_RECENT: Final = 64  # batches, among which half are to be long
_FEWEST_LONG: Final = 4  # batches; the first ones import modules, and a machine may stall

_log = logging.getLogger("penstock")
_new: Final = tuple.__new__  # a named tuple's own is written in Python, and slower


def was_raised_below(end: GeneratorExit) -> bool:
    """Return whether the user's code has raised it, and not a `close` of the generator."""
    return end.__traceback__ is not None and end.__traceback__.tb_next is not None


class BatchStream:
    """A stream of batches, epoch after epoch.

    A subclass makes batches (`_next`), begins epochs, and releases what it holds (`_release`).

    Attributes:
        num_yielded: Number of batches of this epoch that this stream has given.

    Concurrency:
        One thread at a time.
    """

    num_yielded = 0

    def __init__(
        self,
        plan: Plan,
        epoch: Epoch,
        faults: FaultLog | None = None,
        observer: Observer | None = None,
        hook: DeliveryHook | None = None,
        *,
        cpu_clock: Callable[[], int],
    ) -> None:
        """Begin `epoch`.

        Args:
            plan: Plan of the stream.
            epoch: The first epoch, or the rest of one.
            faults: Log of bad samples; None is one of its own.
            observer: Observer of every batch; None measures nothing.
            hook: Delivery hook of each batch before the loop gets it; None is none.
            cpu_clock: Clock of the loop's CPU time, in nanoseconds.
        """
        self._plan = plan
        self._hook = hook
        self._observer = observer
        self._faults = faults or FaultLog(plan.spec.faults, plan.spec.dataset)
        self._clock = ConsumerClock(cpu_clock)
        self._is_open = False
        self._epoch = epoch
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begin an epoch; what is left of the last one is dropped."""
        raise NotImplementedError

    def _begin(self, epoch: Epoch) -> None:
        """Reset what belongs to one epoch."""
        self._epoch = epoch
        self._is_over = False
        self._num_bad = 0  # new ones, of which the observer was not notified yet
        self._num_long = self._long_since = 0
        self.num_yielded = 0

    def set_hook(self, hook: DeliveryHook | None) -> None:
        """Use another delivery hook from the next epoch on."""
        before, self._hook = self._hook, hook
        if before is not None:
            before.close()

    @property
    def epoch(self) -> Epoch:
        """The epoch that was begun last."""
        return self._epoch

    @property
    def backend(self) -> Backend | None:
        """The backend that runs the tasks; None without workers."""
        return None

    def batches(self, epoch: Epoch) -> Generator[Any, None, None]:
        """Yield the batches of `epoch`, until another is begun.

        A batch counts when the generator is suspended; `EpochIterator` is the iterator for loops.
        An exception ends the generator, and where `take` says so also the stream; else another
        generator goes on with the next batch.
        """
        progress = epoch.progress
        try:
            while self._epoch is epoch:
                yield self.take()  # in no variable: the loop alone keeps its batch
                progress.counted = progress.handed_out
        except GeneratorExit as end:  # at the yield, when the loop has the batch and wants no more
            if was_raised_below(end):
                self.close(in_a_hurry=True)
                raise
            progress.counted = progress.handed_out
        except StopIteration:
            return
        except Exception:
            raise
        except BaseException:  # see `_closed_on_error`; the batch that was under way is lost here
            self.close(in_a_hurry=True)
            raise

    def take(self) -> Any:  # noqa: ANN401 - any batch tree
        """Return the next batch, which the caller is to yield.

        Raises:
            StopIteration: the epoch is over.
            WorkerDied: a worker is gone, and no more are to be started. The stream is closed. Or
                this is a forked copy of the process that has the workers.
            TooManyFailures: more samples were bad than the policy allows. The stream is closed.
            KeyboardInterrupt: and whatever else interrupts the wait. The stream is closed.
            WorkerTimeout: no batch came in time. The stream goes on with the next call.
            RuntimeError: a sample raised StopIteration. The stream goes on with the next call.
            Exception: what the user's code raised. The stream goes on with the next call. Where the
                sampler raised it, the batch that workers were about to give is lost, as in torch.
        """
        observer = self._observer
        if observer is not None:
            self._clock.ask(lightly=not observer.measures)
        try:
            while True:
                batch = self._next()
                if batch is not NO_BATCH:
                    self.num_yielded += 1
                    return batch
                progress = self._epoch.progress
                progress.counted = progress.handed_out
        except StopIteration:
            raise
        except Exception:
            # The wait for it is no time of the main process's own code.
            if observer is not None and observer.measures:
                self._clock.take()
            else:
                self._clock.given_until(time.monotonic_ns())
            raise

    def _next(self) -> Any:  # noqa: ANN401 - any batch tree, or NO_BATCH
        raise NotImplementedError

    def _count(
        self,
        step: int,
        worker_id: int,
        shard: ShardPosition | None,
        num_asked: int,
        num_failed: int,
    ) -> None:
        """Let a batch count once it is yielded.

        Args:
            step: Step of the batch.
            worker_id: Number of the worker that made it.
            shard: Position of that worker in its shard of an iterable dataset.
            num_asked: Number of samples that were asked for; 0 where they are not counted.
            num_failed: Number of bad ones that were not known yet.
        """
        progress = self._epoch.progress
        given = progress.counted
        if num_asked:
            with self._closed_on_error():
                given = self._faults.spend(given, num_asked, num_failed, self._epoch)
        failed = progress.failed
        if shard is not None:
            shards = [(id_, shard) for _, id_, shard in failed if shard is not None]
            turn = (worker_id + 1) % max(self._plan.num_workers, 1)  # without workers it is 0
            given = given.with_shards([*shards, (worker_id, shard)], turn)
        elif self._plan.in_order and not given.ahead:
            given = Given(step + 1, *given[1:])
        else:
            given = given.with_steps([*(failed_step for failed_step, _, _ in failed), step])
        failed.clear()  # they count with this one
        progress.handed_out = given

    def _record(self, bad: Sequence[BadSample], step: int, worker_id: int | None) -> int:
        """Record bad samples; return how many were not known yet."""
        num_new = self._faults.record(bad, self._epoch, step, worker_id)
        self._num_bad += num_new
        return num_new

    def _refuse_stop(self, error: StopIteration) -> None:
        """Raise another error in the place of a sample's StopIteration, which ends any loop."""
        raise RuntimeError(said_of_stop(error)) from error

    def _namer(self, step: int) -> Callable[[], str]:
        number = self._epoch.number
        return lambda: f"epoch {number}, step {step}"

    def _finish(self, begun: Any, hook: DeliveryHook) -> Any:  # noqa: ANN401 - any batch tree
        """Return the batch that `hook` has begun with."""
        # From here on, time is that of the main process's device or of its own code.
        self._clock.arrived()
        try:
            return hook.finish(begun)
        except Exception:
            raise
        except BaseException:  # see `_closed_on_error`
            self.close(in_a_hurry=True)
            raise

    def _observe(
        self,
        observer: Observer,
        made: TaskResult,
        indices: object,
        *,
        worker_id: int = 0,
        num_ready: int = 0,
        num_workers: int = 0,
        lookahead: int = 0,
    ) -> WorkerSettings | None:
        """Give the observer the row of a batch that the loop gets now.

        Args:
            observer: The observer.
            made: Result with the batch.
            indices: Indices of its samples.
            worker_id: See `TimingRow`, as for the others.
            num_ready: See there.
            num_workers: See there.
            lookahead: See there.

        Returns:
            The settings that the observer wants; None for the present ones.
        """
        row = _new(TimingRow, (
            worker_id, made.pid, num_ready, *self._clock.give(), self._epoch.number, made.step,
            self._num_bad, num_workers, lookahead, *WORKERS_PART.unpack_from(made.times),
        ))  # fmt: skip
        self._num_bad = 0
        keys = None if self._plan.spec.is_iterable else unwrap_indices(indices)
        try:
            return observer.batch_given(row, keys, sample_us_of(made.times), self._epoch)
        except Exception as error:
            self._end_accounts(error)
            return None

    def _end_accounts(self, error: Exception) -> None:
        """Go on without the observer, which has failed."""
        self._observer = None
        # As text: a handler that keeps the record would keep this stream with it.
        _log.error("the accounts of a loader have failed\n%s", traceback.format_exc())
        warnings.warn(
            "the loader's accounts have failed, and end here, while training goes on: "
            f"{type(error).__name__}: {error}. Please report it, with the log's traceback.",
            RuntimeWarning,
            stacklevel=users_level(),
        )

    def _observe_lightly(
        self, observer: Observer, made: TaskResult, num_workers: int = 0, lookahead: int = 0
    ) -> None:
        """Note the light row of a batch that is not measured."""
        asked_ns, given_ns, consumer_ns = self._clock.give_lightly()
        light, num_bad, self._num_bad = observer.light, self._num_bad, 0
        light.append((
            asked_ns, given_ns, consumer_ns, self._epoch.number, made.step, num_bad, num_workers,
            lookahead, num_samples_of(made.times),
        ))  # fmt: skip
        if len(light) >= FOLD_AT:
            self._fold(observer)
        if consumer_ns and given_ns - asked_ns + consumer_ns > LONG_NS:
            self._note_long(observer)

    def _fold(self, observer: Observer) -> None:
        try:
            observer.fold()
        except Exception as error:
            self._end_accounts(error)

    def _note_long(self, observer: Observer) -> None:
        """Count a batch so long, with the loop's own code, that measuring it costs little."""
        if self.num_yielded - self._long_since > _RECENT:
            self._num_long, self._long_since = 0, self.num_yielded
        self._num_long += 1
        num_recent = self.num_yielded - self._long_since
        if self._num_long >= _FEWEST_LONG and 2 * self._num_long > num_recent:
            observer.batches_are_long()

    def _end(self) -> None:
        """End the epoch, as there are no more batches."""
        self._is_over = self._epoch.progress.is_over = True
        if not self._plan.keep_workers:
            self.close()
        self._faults.warn_of_losses(self._epoch)
        if self._observer is not None:
            self._observer.epoch_ended(self._epoch, self._clock.end(self._num_bad))

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
            self._is_over = self._epoch.progress.is_closed = True
            try:
                if self._hook is not None:
                    self._hook.close()
            finally:  # also if a second Ctrl-C comes
                try:
                    self._release(in_a_hurry=in_a_hurry)
                finally:
                    self._clock.close()
                    if self._observer is not None:
                        self._observer.epoch_left(self._epoch)

    def _release(self, *, in_a_hurry: bool) -> None:
        raise NotImplementedError

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit multiprocessing ends daemonic workers by itself, and faster. `sys` may
        # be gone by then.
        if getattr(self, "_is_open", False) and not is_finalizing():
            self.close()
