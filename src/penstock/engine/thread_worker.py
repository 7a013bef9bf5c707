# SPDX-License-Identifier: Apache-2.0
"""The life of a worker that is a thread of the trainer's process.

Guarantees
    Tasks are done in the order in which they came. One of an earlier epoch is broken off at its
    next sample, and so is everything once the worker is wanted no more.
    Nothing that the user's code raises ends the worker; `SystemExit` and the like do, as a death.
    Between two tasks it holds no batch, no sample and no exception.
    The generators that belong to the process are never touched.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import queue
import threading
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.engine.backends.in_process import Made, PlainOutput, Raised
from penstock.engine.fault_log import NO_LOSSES, Losses
from penstock.engine.fetch import Fetcher
from penstock.engine.generator_watch import GeneratorWatch
from penstock.engine.logbook import Phase
from penstock.engine.order import TaskDone, WorkerDied, WorkerExhausted
from penstock.engine.thread_notes import ThreadNotes, Unwanted
from penstock.faults import annotate
from penstock.randomness.samples import seed_thread
from penstock.worker_info import WorkerInfo, set_thread_info

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from penstock.engine.epoch import Share
    from penstock.engine.generator_watch import Drawing
    from penstock.engine.order import BackendEvent
    from penstock.engine.plan import Caution, Plan, Recipe

__all__ = ["Answer", "Round", "ThreadTask", "ThreadWorker"]

_ENGINE: Final = f"{os.sep}penstock{os.sep}engine{os.sep}"


class Round:
    """One epoch of one backend, shared by its workers. The user may begin the same epoch again.

    Attributes:
        number: Counts up.
        epoch: Its number to the user.
    """

    def __init__(self, number: int, epoch: int, *, is_announced: bool) -> None:
        """Begin it; `is_announced` says whether the dataset is told."""
        self.number = number
        self.epoch = epoch
        self._is_announced = is_announced
        self._to_watch = [True]  # popped by the first worker that begins
        self._telling = threading.Lock()
        self._was_told = False
        self._failure: Exception | None = None

    def begin(self, make: Callable[[bool], Fetcher], *, is_shared: bool) -> Fetcher:
        """Return the fetcher that `make(is_announced)` makes.

        A dataset that all workers share is told of the epoch once, before any of them reads; if
        that fails, it fails for all.
        """
        if not (self._is_announced and is_shared):
            return make(self._is_announced)
        with self._telling:
            if self._failure is not None:
                raise _copy_of(self._failure)
            is_announced, self._was_told = not self._was_told, True
            try:
                return make(is_announced)
            except Exception as error:
                self._failure = error
                raise

    def take_watch(self) -> bool:
        """Return whether the caller is the one whose first task is watched; True once."""
        try:
            return self._to_watch.pop()
        except IndexError:
            return False


class ThreadTask(NamedTuple):
    """Make the batch of one step; see `penstock.engine.messages.Task`."""

    round: int
    step: int
    indices: object
    caution: Caution | None


class _Begin(NamedTuple):
    """A new epoch, and where to go on in it."""

    round: Round
    share: Share | None


class Answer(NamedTuple):
    """What a worker tells.

    Attributes:
        worker: Who. The trainer drops what comes of one that it has given up.
        round: Number of the round that it is about.
        event: For the order of steps; None where nothing but the rest is told.
        first_sample: Digest of the first sample of a share, if the batch begins with it.
        drawings: Functions that draw from generators of the process.
    """

    worker: ThreadWorker
    round: int
    event: BackendEvent | None
    first_sample: bytes | None = None
    drawings: tuple[Drawing, ...] = ()


class ThreadWorker:
    """One worker thread, and what the trainer keeps of it.

    Attributes:
        worker_id: Its number.
        thread: A daemon, so that one that is stuck does not keep the interpreter from ending.
        notes: What it is doing.
        tasks: Step -> indices of the epoch's tasks that it has not answered; the trainer's.
        share: How far it is in its share of an iterable dataset; the trainer's.
        is_gone: Whether its end was told; the trainer's.
    """

    def __init__(
        self,
        worker_id: int,
        plan: Plan,
        sequence: np.random.SeedSequence,
        outbox: queue.SimpleQueue[Answer],
    ) -> None:
        """Prepare a worker.

        Args:
            worker_id: Its number.
            plan: What to do.
            sequence: Seeds what `sample_rng` gives where the recipe has no seed.
            outbox: Where its answers go.
        """
        self.worker_id = worker_id
        self.notes = ThreadNotes()
        self.tasks: dict[int, object] = {}
        self.share: Share | None = None
        self.is_gone = False
        self._plan = plan
        self._recipe: Recipe = plan.recipe
        self._sequence = sequence
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[ThreadTask | _Begin | None] = queue.SimpleQueue()
        self._output = PlainOutput()
        self._fetcher: Fetcher | None = None
        self._round: Round | None = None
        self._failure: Exception | None = None  # of setting up: the answer to every task
        self._is_set_up = True
        self._share_ended = False
        self._drawings: tuple[Drawing, ...] = ()  # of worker_init_fn, to be told
        self._watch: GeneratorWatch | None = None  # of an epoch's begin, for its first task
        self.thread = threading.Thread(target=self._run, name=f"penstock-{worker_id}", daemon=True)

    def __str__(self) -> str:
        """Return "worker 0 (thread penstock-0)"."""
        return f"worker {self.worker_id} (thread {self.thread.name})"

    def begin(self, round_: Round) -> None:
        """Let it begin an epoch, where `share` says; what it has of others is wanted no more."""
        self.notes.want(round_.number)
        self._inbox.put(_Begin(round_, self.share))

    def submit(self, task: ThreadTask) -> None:
        """Give it a task."""
        self.tasks[task.step] = task.indices
        self._inbox.put(task)

    def stop(self) -> None:
        """Let it end, at the next sample if it is busy; does not wait."""
        self.notes.want_nothing()
        self._inbox.put(None)

    # From here on: in the thread.

    def _run(self) -> None:
        try:
            self._serve_all()
        except Unwanted:
            pass
        except BaseException as error:
            self._tell_end(error)
        finally:
            self.notes.watch(None)
            self._fetcher = self._failure = None  # an iterator ends in its own thread
            set_thread_info(None)
            seed_thread(None)
            self.notes.close()
            self._outbox = queue.SimpleQueue()  # answers in it refer to this worker

    def _tell_end(self, error: BaseException) -> None:
        if not self.notes.is_wanted:
            return
        text = "".join(traceback.format_exception_only(error)).strip()
        stack = _stack_of(error)
        end = WorkerDied(self.worker_id, f"ended with {text}", f"\nWhere it was raised:\n{stack}")
        self._outbox.put(Answer(self, 0, end))

    def _serve_all(self) -> None:
        try:
            self._set_up()
        except Exception as error:
            annotate(error, f"in {self}, while it was starting")
            self._failure = error
            self._is_set_up = False
        while True:
            self.notes.phase(Phase.WAITING)
            command = self._inbox.get()
            if command is None or not self.notes.is_wanted:
                return
            try:
                self._obey(command)
            except Unwanted:  # of an earlier epoch, or this worker is to end
                continue
            finally:
                del command  # it may hold an epoch's last indices

    def _obey(self, command: ThreadTask | _Begin) -> None:
        if isinstance(command, _Begin):
            self._begin(command)
        elif self.notes.is_of_now(command.round) and not self._share_ended:
            self._outbox.put(self._serve(command))

    def _set_up(self) -> None:
        plan = self._plan
        if plan.recipe.is_iterable:
            own = _own_copy(plan.recipe.dataset)
            self._recipe = dataclasses.replace(plan.recipe, dataset=own)
        seed_thread(self._sequence)
        set_thread_info(
            WorkerInfo(
                id=self.worker_id,
                num_workers=plan.num_workers,
                seed=plan.base_seed + self.worker_id,
                dataset=self._recipe.dataset,
            )
        )
        if plan.recipe.worker_init_fn is not None:
            self._initialise(plan.recipe.worker_init_fn)

    def _initialise(self, worker_init_fn: Callable[[int], object]) -> None:
        watch = GeneratorWatch(None)
        self.notes.watch(watch)
        try:
            worker_init_fn(self.worker_id)
        finally:
            self.notes.watch(None)
            self._drawings = tuple(watch.found)

    def _begin(self, command: _Begin) -> None:
        self._share_ended = False
        if not self._is_set_up:
            return
        round_, share = command
        self._round = round_
        self.notes.begin_round(round_.number)
        self._fetcher = None  # an iterator of the epoch before ends before the next begins
        self._watch = GeneratorWatch(self._recipe.dataset) if round_.take_watch() else None
        self.notes.watch(self._watch)
        try:
            self._fetcher = round_.begin(
                lambda is_announced: self._make_fetcher(round_.epoch, share, is_announced),
                is_shared=not self._recipe.is_iterable,
            )
            self._failure = None
        except Exception as error:
            annotate(error, f"in {self}, while it began epoch {round_.epoch}")
            self._failure = error
        finally:
            self.notes.watch(None)

    def _make_fetcher(self, epoch: int, share: Share | None, is_announced: bool) -> Fetcher:
        return Fetcher(
            self._recipe,
            self._output,
            base_seed=self._plan.base_seed,
            epoch=epoch,
            is_announced=is_announced,
            worker_id=self.worker_id,
            num_workers=self._plan.num_workers,
            share=share,
            in_thread=True,
            notes=self.notes,
        )

    def _serve(self, task: ThreadTask) -> Answer:
        if self._failure is not None:
            raised = Raised(_copy_of(self._failure), None, NO_LOSSES)
            return Answer(self, task.round, TaskDone(self.worker_id, task.step, raised))
        assert self._fetcher is not None
        assert self._round is not None
        watch, self._watch = self._watch, None
        self.notes.begin_task(task.round, task.step)
        self._output.take_num_bytes()
        self.notes.watch(watch)
        try:
            event = self._make(task, self._fetcher)
        finally:
            self.notes.watch(None)
        drawings, self._drawings = self._drawings, ()
        if watch is not None:
            drawings += tuple(watch.found)
        return Answer(self, task.round, event, self._fetcher.take_first_digest(), drawings)

    def _make(self, task: ThreadTask, fetcher: Fetcher) -> TaskDone | WorkerExhausted:
        # No exception is kept in a variable that outlives its handler: with the frames of its
        # traceback that would be a cycle, which keeps samples until a garbage collection.
        try:
            batch = fetcher.fetch(task.indices, task.step, task.caution)
            share = fetcher.share()
        except Exception as error:
            if isinstance(error, StopIteration) and self._recipe.is_iterable:
                self._share_ended = True
                bad = self._take_bad(task)
                return WorkerExhausted(self.worker_id, task.step, Losses(len(bad), bad))
            annotate(error, self._where(task))
            losses = Losses(0, self._take_bad(task))
            return TaskDone(self.worker_id, task.step, Raised(error, fetcher.share(), losses))
        bad = self._take_bad(task)
        losses = Losses(fetcher.num_asked, bad) if fetcher.num_asked else NO_LOSSES
        times = self.notes.take_times(num_bytes=self._output.take_num_bytes())
        times = times._replace(rss_bytes=0)  # the process's is the trainer's, and not a worker's
        return TaskDone(self.worker_id, task.step, Made(batch, share, losses, times))

    def _take_bad(self, task: ThreadTask) -> list[Any]:
        assert self._fetcher is not None
        bad = self._fetcher.take_bad()
        for sample in bad:
            annotate(sample.error, self._where(task))
        return bad

    def _where(self, task: ThreadTask) -> str:
        assert self._round is not None
        return f"in {self}, epoch {self._round.epoch}, step {task.step}"


def _stack_of(error: BaseException) -> str:
    """Return where it was raised: the user's lines, if it was there."""
    entries = traceback.extract_tb(error.__traceback__)
    ours = [k for k, entry in enumerate(entries) if _ENGINE in entry.filename]
    users = entries[ours[-1] + 1 :] if ours else entries
    return "".join(traceback.format_list(users or entries))


def _copy_of(error: Exception) -> Exception:
    """Return what may be raised in place of `error`, which is raised more than once.

    Raising it makes the frames of whoever raises it, and all that is in them, a part of it.
    """
    try:
        again = type(error).__new__(type(error), *error.args)
        vars(again).update(vars(error))
        again.__notes__ = list(getattr(error, "__notes__", ()))
        same = str(again) == str(error)
    except Exception:  # its class does not have that
        return error
    return again.with_traceback(error.__traceback__) if same else error


def _own_copy(dataset: Any) -> Any:  # noqa: ANN401
    """Return a copy of an iterable dataset: where it stands is each worker's own.

    As a process worker's is, but for arrays, whose memory stays shared where they can be pickled.
    What can be copied in no way is shared.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
        return pickle.loads(data, buffers=buffers)
    except Exception:  # a class inside a function, a lambda, an open file
        buffers.clear()
    try:
        return copy.deepcopy(dataset)
    except Exception:  # it holds a lock, say
        return dataset
