# SPDX-License-Identifier: Apache-2.0
"""The core of every worker: carries out its tasks, alike in all backends.

    runner = TaskRunner(output, status, identity)
    runner.set_up(load)                        # returns the spec; calls worker_init_fn
    runner.begin_epoch(BeginEpoch(...))        # notifies the dataset, or iterates it
    runner.run(Task(...)) -> TaskResult        # reads, collates, recovers, times

Guarantees
    An `Exception` of the user's code leaves it only as a result. A worker that cannot be set up,
    or cannot begin an epoch, answers each of its tasks with the exception.
    The end of an iterable's shard is reported once; later tasks have no result.
    It has no socket, queue, thread, process or clock of its own, so all that a worker decides can
    be tested without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.engine.batch_maker import BatchMaker
from penstock.engine.pickling import copy_of_error
from penstock.engine.recover import NO_BATCH
from penstock.engine.task import Kind, Notices, TaskResult, WorkerIdentity
from penstock.faults import annotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.engine.output import Output
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusWriter
    from penstock.engine.task import BeginEpoch, Task

__all__ = ["TaskRunner"]


class TaskRunner:
    """Makes the batches of one worker.

    Attributes:
        maker: Maker of the batches of the epoch begun last; None before the first, and if the
            last could not be begun.
        failure: Exception of the set-up, or of the epoch's begin; the result of every task.

    Concurrency:
        One thread.
    """

    def __init__(
        self,
        output: Output,
        status: StatusWriter,
        identity: WorkerIdentity = WorkerIdentity(),  # noqa: B008 - immutable
        *,
        restores_generators: bool = False,
        in_thread: bool = False,
    ) -> None:
        """Begin as a worker that is not set up.

        Args:
            output: Destination of batches.
            status: Writer of the worker's status.
            identity: Identity of this worker.
            restores_generators: See `BatchMaker`.
            in_thread: See `BatchMaker`.
        """
        self.maker: BatchMaker | None = None
        self.failure: Exception | None = None
        self._output = output
        self._status = status
        self._identity = identity
        self._options = {"restores_generators": restores_generators, "in_thread": in_thread}
        self._spec: WorkerSpec | None = None
        self._is_expected = identity.joins_late
        self._generation = 0
        self._has_ended = False  # its shard, in this epoch
        self._notices: Notices | None = None  # for the next result

    def set_up(self, load: Callable[[], WorkerSpec]) -> None:
        """Call `load` to prepare the worker and return its spec; if it fails, every task does."""
        try:
            self._spec = load()
        except Exception as error:
            annotate(error, "while the worker was starting")
            self.failure = error

    def notice(self, **notices: Any) -> None:  # noqa: ANN401 - fields of `Notices`
        """Send `notices` along with the next result."""
        self._notices = (self._notices or Notices())._replace(**notices)

    def begin_epoch(
        self,
        begun: BeginEpoch,
        *,
        agree: Callable[[Callable[[bool], BatchMaker]], BatchMaker] | None = None,
        compared: Callable[[Iterable[Any]], Iterator[Any]] | None = None,
    ) -> TaskResult | None:
        """Begin an epoch.

        Args:
            begun: The epoch, and the position to go on from.
            agree: Function that calls its argument with whether to notify the dataset of the
                epoch: workers that share a dataset notify it once. None does as `begun` says.
            compared: See `ShardInfo`.

        Returns:
            The result that a worker added during the epoch is ready; None for other workers.
        """
        self._generation = begun.generation
        self._has_ended = False
        if self._spec is not None:
            self._begin(self._spec, begun, agree, compared)
        if not self._is_expected:
            return None
        self._is_expected = False
        return TaskResult(begun.generation, -1, Kind.READY)

    def _begin(
        self,
        spec: WorkerSpec,
        begun: BeginEpoch,
        agree: Callable[[Callable[[bool], BatchMaker]], BatchMaker] | None,
        compared: Callable[[Iterable[Any]], Iterator[Any]] | None,
    ) -> None:
        def make_maker(is_announced: bool) -> BatchMaker:
            told = begun._replace(is_announced=is_announced)
            return BatchMaker(
                spec,
                self._output,
                self._status,
                self._identity,
                told,
                compared=compared,
                **self._options,
            )

        self._status.begin_generation(begun.generation)
        self.maker = self.failure = None  # an iterator of the last epoch ends first
        try:
            self.maker = make_maker(begun.is_announced) if agree is None else agree(make_maker)
        except Exception as error:
            annotate(error, f"while epoch {begun.epoch} began")
            self.failure = error

    def run(self, task: Task) -> TaskResult | None:
        """Return the result of `task`; None if the end of its shard was reported before."""
        generation, step, indices, hints, is_measured = task[:5]
        if self._has_ended:
            return None
        if self.failure is not None:
            return TaskResult(generation, step, Kind.FAILED, copy_of_error(self.failure))
        maker, output = self.maker, self._output
        assert maker is not None
        self._status.begin_task(generation, step, measures=is_measured)
        output.begin(counts_bytes=is_measured)
        # No exception is kept in a variable that outlives its handler: with the frames of its
        # traceback that would be a cycle, which keeps samples until a garbage collection.
        try:
            batch = maker.make(indices, step, hints)
            position = maker.position()
        except Exception as error:
            output.abandon()
            bad, notices = maker.take_bad(), self._take_notices(maker)
            assert self._spec is not None
            if isinstance(error, StopIteration) and self._spec.is_iterable:
                self._has_ended = True
                return TaskResult(
                    generation, step, Kind.EXHAUSTED, None, None, len(bad), bad, notices=notices
                )
            position = maker.position()
            return TaskResult(
                generation, step, Kind.FAILED, error, position, bad=bad, notices=notices
            )
        return TaskResult(
            generation,
            step,
            Kind.EMPTY if batch is NO_BATCH else Kind.DONE,
            batch,
            position,
            maker.num_asked,
            maker.take_bad() if maker.num_asked else (),
            self._take_times(is_measured),
            self._take_notices(maker),
        )

    def _take_times(self, is_measured: bool) -> bytes:
        if not is_measured:
            return self._status.take_times()
        num_bytes, pool_bytes, slot_ns = self._output.take_cost()
        return self._status.take_times(num_bytes=num_bytes, pool_bytes=pool_bytes, slot_ns=slot_ns)

    def _take_notices(self, maker: BatchMaker) -> Notices | None:
        found, own = maker.take_notices(), self._notices
        if own is None:
            return found
        self._notices = None
        if found is None:
            return own
        return found._replace(drawings=own.drawings + found.drawings, states=own.states)

    def close(self) -> None:
        """Release the dataset's iterator."""
        self.maker = self.failure = None
