# SPDX-License-Identifier: Apache-2.0
"""One trainer's work in an actor: its recipe, its epoch, its tasks one after the other.

Guarantees
    Calls of an actor may come in any order, and twice, as Ray sends again what a broken link may
    have swallowed. So tasks are numbered, and done in the order of their numbers. One of a
    map-style dataset that comes again is done again, which gives the same batch. Of an iterable
    one, each is done once, and its answer is kept until the trainer says that it has come.
    Nothing that the user's code raises ends the actor; `SystemExit` and the like are answered as
    its end.

Concurrency:
    `want`, `entry` and `is_in_turn` may be called at any time; everything else is called in one
    thread, the same for all sessions of an actor.
"""

from __future__ import annotations

import gc
import resource
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.engine.backends.in_process import PlainOutput
from penstock.engine.backends.ray.parcels import Parcel, pack_parcel, value_of
from penstock.engine.messages import (
    BatchMade,
    ExceptionReport,
    ShardExhausted,
    TaskFailed,
    encode,
    report_bad,
    report_exception,
)
from penstock.engine.recover import NO_BATCH, drop_frames
from penstock.engine.status_page import Phase
from penstock.engine.thread_status import ThreadStatus, Unwanted
from penstock.engine.user_frames import stack_of_error
from penstock.engine.worker_setup import make_fetcher, set_up_worker, take_place_again
from penstock.transport.packing import Packed
from penstock.worker_info import Place, current_place, take_place

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.engine.accounts import TaskTimes
    from penstock.engine.fetch import Fetcher
    from penstock.engine.messages import BeginEpoch, Task
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusSnapshot
    from penstock.engine.worker_setup import WorkerIdentity

__all__ = ["Answer", "Session"]

_NOTHING: Final = Packed(b"", (), ())
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


_in_place: Session | None = None  # whose worker this process is just now


class Answer(NamedTuple):
    """What a task came to.

    Attributes:
        kind: "answer"; "dropped", as its epoch is over; "unknown", as the actor has no such
            session; "ended", as the user's code asked for the worker's end.
        message: `penstock.engine.messages`, encoded; for "ended" how, as text.
        parcel: The batch, if there is one.
        entry: For "ended": what was being done.
    """

    kind: str
    message: bytes | str = b""
    parcel: Parcel | None = None
    entry: StatusSnapshot | None = None


class _ParcelOutput(PlainOutput):
    """Packs batches that lie in recycled memory of this process; Ray copies them into its store.

    It does so while the next batch is being made, and an iterable's may have to be sent once more.
    So what the user's code has made, and may be about to write into again, is copied here.
    """

    def __init__(self) -> None:
        """Begin with no memory."""
        super().__init__()
        self._given: list[tuple[int, int]] = []  # addresses of the batch's memory that is ours

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return memory for an array; see `PlainOutput.empty`."""
        array = super().empty(shape, dtype)
        start = _address(array)
        self._given.append((start, start + array.nbytes))
        return array

    def finish(self, batch: object) -> Parcel:
        """Return the batch as a parcel."""
        pickled, buffers = pack_parcel(batch)
        parcel = Parcel(pickled, [b if self._is_ours(b) else b.copy() for b in buffers])
        self.abandon()
        return parcel

    def _is_ours(self, buffer: npt.NDArray[np.uint8]) -> bool:
        first = _address(buffer)
        return any(start <= first < end for start, end in self._given)

    def abandon(self) -> None:
        """Forget what was asked for; garbage collection takes it back."""
        self._given.clear()
        self.take_num_bytes()

    def dry_run(self, batch: object) -> None:
        """Raise what packing would."""
        pack_parcel(batch)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class Session:
    """What one trainer's worker `identity.worker_id` does in this actor."""

    def __init__(self, parcel: Parcel, identity: WorkerIdentity) -> None:
        """Begin; `parcel` holds the recipe, and is not opened yet."""
        self._parcel = parcel
        self._identity = identity
        self._wanted = 0
        self.notes = ThreadStatus()
        self._output = _ParcelOutput()
        self._recipe: WorkerSpec | None = None
        self._fetcher: Fetcher | None = None
        self._failure: ExceptionReport | None = None  # the answer to every task
        self._is_set_up = False
        self._place: Place | None = None  # as it left it when another session had its turn
        self._begun: BeginEpoch | None = None
        self._share_ended = False
        self._has_served = False
        self._next_number = 0
        self._kept: dict[int, Answer] = {}  # by number; of an iterable
        self._end: Answer | None = None  # the answer to every task from here on

    @property
    def worker_id(self) -> int:
        """Which of its trainer's workers this is."""
        return self._identity.worker_id

    def want(self, round_: int) -> None:
        """Say that nothing of rounds before this one is wanted any more."""
        if round_ > self._wanted:
            self._wanted = round_
            self.notes.want(round_)

    def entry(self) -> StatusSnapshot:
        """Return what is being done."""
        return self.notes.snapshot()

    def set_up(self) -> Answer:
        """Open the recipe, seed, and run `worker_init_fn`."""
        try:
            return self._answered_by(self._set_up)
        finally:
            gc.freeze()  # see penstock.engine.worker

    def _set_up(self) -> Answer:
        try:
            self._recipe = value_of(self._parcel)
            self._leave_place_to(self)
            set_up_worker(self._recipe, self._identity)
            self._is_set_up = True
        except Exception as error:
            self._failure = report_exception(error)
        return Answer("answer")

    def serve(self, begun: BeginEpoch, task: Task, number: int, num_come: int) -> Answer:
        """Return what becomes of a task.

        Args:
            begun: The epoch that it belongs to, which is begun if it is a new one.
            task: What to do.
            number: Which of this round's tasks it is, from 0.
            num_come: How many answers of this round the trainer has.
        """
        if not self.notes.is_of_now(begun.generation):
            return Answer("dropped")
        return self._answered_by(lambda: self._serve_once(begun, task, number, num_come))

    def _answered_by(self, work: Any) -> Answer:  # noqa: ANN401 - a function
        if self._end is not None:  # an iterator that has raised would only say that it has no more
            return self._end
        try:
            self._take_place()
            answer: Answer = work()
        except Unwanted:
            self._output.abandon()
            return Answer("dropped")
        except BaseException as error:  # SystemExit, say; of Exception nothing gets here
            text = "".join(traceback.format_exception_only(error)).strip()
            words = f"{text}\nWhere it was raised:\n{stack_of_error(error)}"
            self._end = Answer("ended", words, entry=self.entry())
            return self._end
        finally:
            self.notes.phase(Phase.WAITING)
        return answer

    def _take_place(self) -> None:
        """Be the worker that this session's user knows, if another session's was in between."""
        if self._is_set_up and _in_place is not self:
            self._leave_place_to(self)
            assert self._recipe is not None
            assert self._place is not None
            take_place_again(self._recipe, self._place)

    @staticmethod
    def _leave_place_to(session: Session) -> None:
        global _in_place
        if _in_place is not None:
            _in_place._place = current_place()
        _in_place = session

    def _serve_once(self, begun: BeginEpoch, task: Task, number: int, num_come: int) -> Answer:
        self._begin_if_new(begun)
        self._kept = {k: answer for k, answer in self._kept.items() if k >= num_come}
        if self.is_iterable and number < self._next_number:  # a late copy of what has come, if none
            return self._kept.get(number, Answer("dropped"))
        answer = self._serve(task)
        if self.is_iterable:
            self._kept[number] = answer
        self._next_number = max(self._next_number, number + 1)
        return answer

    @property
    def is_iterable(self) -> bool:
        """Whether tasks have to be done in their order; known once it is set up."""
        return self._recipe is not None and self._recipe.is_iterable

    def is_in_turn(self, begun: BeginEpoch, number: int) -> bool:
        """Return whether a task may be served now: those before it have been, or none is wanted."""
        if not self.notes.is_of_now(begun.generation):
            return True
        if self._begun is None or begun.generation != self._begun.generation:
            return number == 0
        return number <= self._next_number

    def _begin_if_new(self, begun: BeginEpoch) -> None:
        if self._begun is not None and self._begun.generation == begun.generation:
            return
        self._share_ended = False
        self._next_number = 0
        self._kept = {}
        self._begun = begun  # behind the numbers, as `is_in_turn` may be asked meanwhile
        if not self._is_set_up:
            return
        assert self._recipe is not None
        self.notes.begin_generation(begun.generation)
        self._fetcher = None  # an iterator of the epoch before ends before the next begins
        try:
            self._fetcher = make_fetcher(
                self._recipe, self._output, self._identity, begun, self.notes
            )
            self._failure = None
        except Exception as error:
            self._failure = report_exception(error)

    def _serve(self, task: Task) -> Answer:
        if self._share_ended:
            return Answer("dropped")  # the trainer knows that no answer comes
        if self._failure is not None:
            return Answer(
                "answer", encode(TaskFailed(task.generation, task.step, self._failure, None))
            )
        assert self._fetcher is not None
        assert self._recipe is not None
        self.notes.begin_task(task.generation, task.step)
        self._output.take_num_bytes()
        try:
            parcel = self._fetcher.fetch(task.indices, task.step, task.hints)
            share = self._fetcher.saved_position()
        except Exception as error:
            self._output.abandon()
            return self._failed(task, error, self._fetcher)
        is_empty = parcel is NO_BATCH
        message = BatchMade(
            task.generation,
            task.step,
            _NOTHING,
            (),
            (),
            share,
            self._fetcher.take_first_digest(),
            self._fetcher.num_asked,
            tuple(map(report_bad, self._fetcher.take_bad())),
            is_empty,
            self._times(0 if is_empty else parcel.num_bytes),
        )
        self._freeze_once()
        return Answer("answer", encode(message), None if is_empty else parcel)

    def _times(self, num_bytes: int) -> TaskTimes:
        times = self.notes.take_times(num_bytes=num_bytes, pool_bytes=self._output.pool_bytes)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        return times._replace(rss_bytes=peak)

    def _failed(self, task: Task, error: Exception, fetcher: Fetcher) -> Answer:
        assert self._recipe is not None
        is_end = isinstance(error, StopIteration) and self._recipe.is_iterable
        report = None if is_end else report_exception(error)
        drop_frames(error)
        bad = tuple(map(report_bad, fetcher.take_bad()))
        if report is None:
            self._share_ended = True
            return Answer(
                "answer", encode(ShardExhausted(task.generation, task.step, len(bad), bad))
            )
        failed = TaskFailed(task.generation, task.step, report, fetcher.saved_position(), bad)
        return Answer("answer", encode(failed))

    def try_sample(self, begun: BeginEpoch, task: Task, number: int) -> Answer:
        """Read, collate and pack sample `number` of a task by itself, and drop it.

        It either ends this process or it does not; what it raises, `serve` is going to raise again.
        """
        if not self.notes.is_of_now(begun.generation):
            return Answer("dropped")
        return self._answered_by(lambda: self._try_sample(begun, task, number))

    def _try_sample(self, begun: BeginEpoch, task: Task, number: int) -> Answer:
        self._begin_if_new(begun)
        if self._failure is None:
            assert self._fetcher is not None
            self.notes.begin_task(task.generation, task.step)
            self._fetcher.try_sample(task.indices, number, task.hints)
        return Answer("answer")

    def _freeze_once(self) -> None:
        """Freeze what the first batch has brought as well; see penstock.engine.worker."""
        if not self._has_served and self._recipe is not None and not self._recipe.is_iterable:
            self._has_served = True
            gc.collect()
            gc.freeze()

    def close(self) -> None:
        """Let go of the dataset, its iterator and all memory."""
        global _in_place
        if _in_place is self:
            _in_place = None
            take_place(Place(None, False))
        self._place = None
        self._fetcher = self._recipe = None
        self._kept.clear()
        self._output.close()
        self.notes.close()
