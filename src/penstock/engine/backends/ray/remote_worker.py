# SPDX-License-Identifier: Apache-2.0
"""The main process's view of one actor: what it was sent, what has come back, and how it ended.

Guarantees
    Answers are taken in the order of the tasks, whatever the order in which they come.
    What is lost on its way is sent again, with the number that it had.
    Samples are tried by themselves one after the other, then their batch is made, and nothing else
    is under way meanwhile: if the actor dies, it was the one.
"""

from __future__ import annotations

import collections
import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.engine.backends.ray.worker import Answer
from penstock.engine.plan import RetryHints, dataset_keys
from penstock.engine.status_page import Phase, StatusSnapshot
from penstock.engine.task import BeginEpoch, encode_message
from penstock.engine.timing import replaced, row_of_worker
from penstock.engine.worker_table import KnownWorker

if TYPE_CHECKING:
    import queue
    from collections.abc import Iterator

    from penstock.engine.backends.ray.worker import Hello
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.task import Task
    from penstock.engine.worker_table import Activity

__all__ = ["Actor", "Call", "Come", "RemoteWorker", "WorkerClock"]

Actor = Any  # a handle of a RayWorker; Ray's own type says nothing of its methods

_SILENCE_S: Final = 5.0  # that a batch may well take; asking costs a millisecond
_FIRST_DOUBT_S: Final = 30.0  # that it will start; the next one after ten times as long
_LAST_WORDS_S: Final = 10.0  # from the first sign of a death to the last of what was made before
_DEATHS_THAT_PROVE: Final = 2
_DEATHS_THAT_PROVE_UNSEEN: Final = 3  # ends that may have come from outside: nobody says how

_LONGEST_TEXT: Final = 1500
_ADVICE_ON_EXIT: Final = (
    "Ray's logs on that machine (session_latest/logs) may say why, and so may num_workers=0: look "
    "for native code that crashes, os._exit, memory that ran out, or somebody or something that "
    "killed it (kill -9, a job scheduler)."
)
_ADVICE_ON_EXIT_ASKED: Final = "Look for sys.exit in the dataset."
_ADVICE_ON_HANG: Final = "Raise `timeout` if samples, or the start of a worker, may take that long."
_ADVICE_ON_NODE: Final = "Its work is done elsewhere as soon as the cluster has room for it."
_ADVICE_ON_START: Final = (
    "Every machine of the cluster needs penstock, and what the dataset imports, of the versions "
    'that the main process has. Install them there, or let Ray: ray_options={"runtime_env": {"pip":'
    ' [...], "working_dir": "."}}.'
)


class Call(NamedTuple):
    """A call that is under way.

    Attributes:
        worker: Whose.
        kind: "hello", "open", "make", "try" or "end".
        generation: In which it was sent.
        step: Of which step; -1 for none.
        number: Of a "make": which of the worker's tasks. Of a "try": which sample of its batch.
        sent_ns: When; of a "make" that is sent once more, when it was for the first time.
    """

    worker: RemoteWorker
    kind: str
    generation: int
    step: int = -1
    number: int = -1
    sent_ns: int = 0


class Come(NamedTuple):
    """A call that has returned, or failed."""

    call: Call
    future: Any
    received_ns: int


class RemoteWorker(KnownWorker):
    """One actor, seen from the main process.

    Attributes:
        actor: Ray's handle.
        is_ready: Whether the actor has opened the spec, so that it may be sent tasks.
        hello: Where it is; None until it has started.
        started_at: When it was asked for, by the monotonic clock.
        doubt_s: After how many seconds without a hello it is to be said.
        joins_late: Whether the scheduler is to learn when it has started.
        clock: Of its machine.
        sent: Number -> what was sent and not answered: the call, and the task as a message.
        num_lost: How often in this generation a batch was lost on its way.
        trial: Step and number of the sample that is being tried by itself.
        dying_since: When the first sign of its end came.
        end: By what it ends: what Ray raised, its own answer, or why the main process killed it.
        last_snapshot: What it said that it was doing.
        last_stack: Where in the user's code.
    """

    def __init__(
        self, worker_id: int, actor: Actor, spec: WorkerSpec, inbox: queue.SimpleQueue[Come | None]
    ) -> None:
        """Greet an actor that was asked for; once it has said hello, `open` is to follow."""
        super().__init__(worker_id, 0)
        self.is_ready = False
        self.actor = actor
        self._spec = spec
        self._inbox: queue.SimpleQueue[Come | None] | None = inbox
        self.hello: Hello | None = None
        self.started_at = time.monotonic()
        self.doubt_s = _FIRST_DOUBT_S
        self.joins_late = False
        self.dying_since: float | None = None
        self.end: Exception | Answer | str | None = None
        self.last_snapshot: StatusSnapshot | None = None
        self.last_stack = ""
        self.clock = WorkerClock()
        self._num_out = 0
        self.begin_generation(BeginEpoch(0, 0))
        self.knock()
        self._listen(Call(self, "end", 0), actor.until_end.remote())  # it fails with the actor

    def __str__(self) -> str:
        """Return "worker 0 (pid 7 on 10.0.0.2)"."""
        return f"worker {self.worker_id} ({self.place})"

    @property
    def is_open(self) -> bool:
        """Whether it may be sent anything: no sign of its end has come."""
        return self.dying_since is None and not self.is_gone

    @property
    def is_silent(self) -> bool:
        """Whether it is dying, and nothing more of it is under way."""
        return self.dying_since is not None and self._num_out == 0

    @property
    def place(self) -> str:
        """Where it is, in words."""
        if self.hello is None:
            return "not yet started"
        return f"pid {self.hello.pid} on {self.hello.address}"

    # What it is sent.

    def open(self, parcel: object) -> None:
        """Let the actor open the spec; `parcel` is the reference of it."""
        self._listen(Call(self, "open", 0), self.actor.open.remote(parcel))

    def knock(self) -> None:
        """Ask for a sign of life.

        If the actor's end of a connection was given up while no packets came through, this end
        does not learn of it before something is sent: then Ray connects anew, and sends all that
        was under way once more.
        """
        self._heard_at = time.monotonic()
        self._is_asked_for_hello = True
        self._listen(Call(self, "hello", 0), self.actor.hello.remote())

    def _listen(self, call: Call, reference: Any) -> None:  # noqa: ANN401 - Ray's reference
        if call.kind != "end":
            self._num_out += 1

        def come(future: Any) -> None:  # noqa: ANN401
            if (inbox := self._inbox) is not None:
                inbox.put(Come(call, future, time.monotonic_ns()))

        reference.future().add_done_callback(come)

    def forget(self) -> None:
        """Take note of nothing any more, and hold nothing in the object store.

        Ray may keep the callback of a call for long after this.
        """
        self._inbox = None
        self._early.clear()
        self.sent.clear()

    def begin_generation(self, begun: BeginEpoch) -> None:
        """Forget what was sent; the actor learns of the epoch with its first task."""
        self._generation = begun.generation
        # Kind of call, task, and for a "try" which of its samples.
        self._to_send: collections.deque[tuple[str, Task, int]] = collections.deque()
        self.trial: tuple[int, int] | None = None
        self.sent: dict[int, tuple[Call, bytes]] = {}
        self.num_lost = 0
        self._next_number = 0
        self._number_alone = -1  # of the task that was sent last, if it is to be alone
        self._num_taken = 0
        self._early: dict[int, Come] = {}  # by number
        self._begun_message = encode_message(begun)
        # What the dataset's state holds may be large, and is sent once.
        self._begun_already = encode_message(begun._replace(position=None))

    def submit(self, task: Task) -> None:
        """Send a task, behind trials of its samples if it is to be done alone."""
        hints = task.hints
        is_alone = hints is not None and hints.alone
        if hints is not None and is_alone:
            quarantined = hints.quarantined
            task = task._replace(hints=RetryHints(False, quarantined) if quarantined else None)
            if not self._spec.is_iterable:
                count = self._num_samples(task.indices)
                self._to_send.extend(("try", task, k) for k in range(count))
        self._to_send.append(("make alone" if is_alone else "make", task, -1))
        self.send()

    def _num_samples(self, indices: object) -> int:
        if not self._spec.is_batched:
            return 1
        return len(keys) if hasattr(keys := dataset_keys(indices), "__len__") else 0

    def send(self) -> None:
        """Send what may be sent: what is to be alone if nothing is under way, nothing beside it."""
        while self._to_send and not self._is_busy_alone and self.is_open and self.is_ready:
            kind, task, number = self._to_send[0]
            if kind != "make" and self.sent:
                return
            self._to_send.popleft()
            message, generation, step = encode_message(task), task.generation, task.step
            if kind == "try":
                self.trial = step, number
                reference = self.actor.try_sample.remote(self._begun_message, message, number)
                self._listen(Call(self, "try", generation, step, number), reference)
                continue
            number, self._next_number = self._next_number, self._next_number + 1
            self._number_alone = number if kind == "make alone" else -1
            call = Call(self, "make", generation, step, number, time.monotonic_ns())
            self.sent[number] = call, message
            self.send_again(number)

    @property
    def _is_busy_alone(self) -> bool:
        return self.trial is not None or self._number_alone in self.sent

    def send_again(self, number: int) -> None:
        """Send the task of this number, for the first time or once more."""
        call, message = self.sent[number]
        begun = self._begun_already if self._num_taken else self._begun_message
        self._listen(call, self.actor.make.remote(begun, message, number, self._num_taken))

    # What comes back.

    def note_come(self, call: Call) -> None:
        """Note that a call is under way no more."""
        self._heard_at = time.monotonic()
        if call.kind != "end":
            self._num_out -= 1
        if call.kind == "hello":
            self._is_asked_for_hello = False

    @property
    def due(self) -> float:
        """When to look after it, if nothing is heard till then, by the monotonic clock."""
        if self.is_gone:
            return math.inf
        if self.dying_since is not None:
            return self.dying_since + (0.0 if self.is_silent else _LAST_WORDS_S)
        if self.hello is None:
            return self.started_at + self.doubt_s
        if self._num_out == 0 or self._is_asked_for_hello:  # it owes nothing, or was asked already
            return math.inf
        return self._heard_at + _SILENCE_S

    def is_awaited(self, call: Call) -> bool:
        """Return whether the answer to a task or a trial is still of use."""
        if call.generation != self._generation:
            return False
        return call.number in self.sent if call.kind == "make" else self.trial is not None

    def take(self, come: Come) -> Iterator[Come]:
        """Yield the answers whose turn it is now that this one has come."""
        self._early[come.call.number] = come
        while self._num_taken in self._early:
            number = self._num_taken
            self._num_taken += 1
            yield self._taken(number)

    def take_rest(self) -> Iterator[Come]:
        """Yield the answers that have come before those of earlier tasks, which never will.

        Those of an iterable dataset are of no use without the earlier ones.
        """
        for number in sorted(self._early):
            if not self._spec.is_iterable:
                yield self._taken(number)

    def _taken(self, number: int) -> Come:
        call, _ = self.sent.pop(number)
        del self.tasks[call.generation, call.step]
        return self._early.pop(number)

    # How it ended, and over what.

    @property
    def steps_at_hand(self) -> list[int]:
        """The steps of which it may be making one, the likeliest first.

        Tasks are done in their order, but what it has made may not have left its process yet.
        """
        return [self.sent[number][0].step for number in sorted(self.sent)]

    def snapshot(self) -> StatusSnapshot:
        """Return what it is doing, by what it has said, or else by what it was sent."""
        if self.last_snapshot is not None:
            return self.last_snapshot
        phase, step, number = Phase.WAITING, -1, None
        if self.trial is not None:
            phase, (step, number) = Phase.READING, self.trial
        elif not self.is_ready:
            phase = Phase.ABSENT if self.hello is None else Phase.STARTING
        elif self.steps_at_hand:
            phase, step = Phase.READING, self.steps_at_hand[0]
        return StatusSnapshot(self._generation, step, phase, number, False, None, 0, 0.0)

    def other_steps(self, activity: Activity) -> tuple[int, ...]:
        """Return what it may have been making as well as the step of `activity`."""
        if self.last_snapshot is not None or self.trial is not None or activity.step is None:
            return ()
        return tuple(step for step in self.steps_at_hand if step != activity.step)

    def note_end(self, end: Exception | Answer | str) -> None:
        """Note that it is dying; a kill says more than its own words, and these more than Ray."""
        self.dying_since = time.monotonic()
        if self.end is None or isinstance(self.end, Exception):
            self.end = end

    @property
    def deaths_that_prove(self) -> int:
        """How many such ends of workers prove a sample guilty."""
        is_seen = not isinstance(self.end, Exception)
        return _DEATHS_THAT_PROVE if is_seen else _DEATHS_THAT_PROVE_UNSEEN

    @property
    def died_with_node(self) -> bool:
        """Whether Ray says that the machine is the cause, which it may say before all else."""
        error = self.end if isinstance(self.end, Exception) else None
        return getattr(error, "preempted", False) or "because its node has died" in str(error)

    def describe_end(self, *, is_node_gone: bool) -> tuple[str, str]:
        """Return how it ended, and what to do about it; to be called when it has."""
        stack = f"\nIts Python stack then:\n{self.last_stack}" if self.last_stack else ""
        if isinstance(self.end, str):
            return f"was killed, as {self.end},", _ADVICE_ON_HANG + stack
        if isinstance(self.end, Answer):
            text = str(self.end.message)
            return f"ended with {text.splitlines()[0]}", f"{_ADVICE_ON_EXIT_ASKED}\n{text}"
        if is_node_gone:
            if self.hello is None:
                end = "was lost with the machine that Ray was about to start it on"
                return end, _ADVICE_ON_NODE
            node = f"Ray's node {self.hello.node_id[:12]}, {self.hello.address}"
            return f"was lost with its machine ({node})", _ADVICE_ON_NODE
        text = _words_of_ray(self.end)
        if self.hello is None:
            return f"could not be started: {text}", _ADVICE_ON_START
        return "is gone", f"Ray says: {text}\n{_ADVICE_ON_EXIT}"


def _words_of_ray(error: Exception | None) -> str:
    """Return what Ray says of an actor's end, without what it says of every actor."""
    text = str(error).strip()
    _, found, why = text.partition("The actor is dead because ")
    return " ".join((why if found else text).split())[:_LONGEST_TEXT]


class WorkerClock:
    """Learns how far a worker's clock is from ours, from the order of cause and effect.

    The monotonic clocks of two machines differ.
    A task is taken up after it was sent, and its batch has come after it was made. Each task so
    bounds the difference from both sides. Where no difference at all is within the bounds, as on
    one machine, it is taken for none; otherwise the middle is taken, which is off by half of the
    quickest round trip at most.

    Example:
        >>> from penstock.engine.timing import NO_TIMES
        >>> clock = WorkerClock()
        >>> times = replaced(NO_TIMES, begun_ns=1000, ended_ns=1600)
        >>> row = row_of_worker(clock.by_ours(times, sent_ns=70_000, received_ns=70_800))
        >>> row.begun_ns, row.ended_ns
        (70100, 70700)
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._least_ns = -math.inf
        self._most_ns = math.inf

    def by_ours(self, times: bytes, *, sent_ns: int, received_ns: int) -> bytes:
        """Return the times of a task by our clock; those of one that was not measured as they are.

        Args:
            times: By the worker's clock; see `penstock.engine.timing`.
            sent_ns: When the task was sent, by ours.
            received_ns: When its batch had come, by ours.
        """
        row = row_of_worker(times)
        if not row.begun_ns:
            return times
        least_ns, most_ns = sent_ns - row.begun_ns, received_ns - row.ended_ns
        self._least_ns = max(self._least_ns, least_ns)
        self._most_ns = min(self._most_ns, most_ns)
        if self._least_ns > self._most_ns:  # a clock was set, or drifts: what is new counts
            self._least_ns, self._most_ns = least_ns, most_ns
        if self._least_ns <= 0 <= self._most_ns:
            return times
        ahead_ns = int(self._least_ns + self._most_ns) // 2
        return replaced(times, begun_ns=row.begun_ns + ahead_ns, ended_ns=row.ended_ns + ahead_ns)
