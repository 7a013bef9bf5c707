# SPDX-License-Identifier: Apache-2.0
"""The trainer's view of one actor: what it was sent, and what has come back.

Guarantees
    Answers are taken in the order of the tasks, whatever the order in which they come.
    What is lost on its way is sent again, with the number that it had.
    Samples are tried by themselves one after the other, then their batch is made, and nothing else
    is under way meanwhile: if the actor dies, it was the one.
"""

from __future__ import annotations

import collections
import os
import socket
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.distributed import current_rank
from penstock.engine.backends.ray.clock import WorkerClock
from penstock.engine.messages import BeginEpoch, Task, encode
from penstock.engine.plan import RetryHints, dataset_keys

if TYPE_CHECKING:
    import queue
    from collections.abc import Iterator

    from penstock.engine.backends.ray.crew import Actor
    from penstock.engine.backends.ray.session import Answer
    from penstock.engine.backends.ray.worker import Hello
    from penstock.engine.epoch import ShardPosition
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusSnapshot
    from penstock.engine.worker_setup import WorkerIdentity

__all__ = ["Call", "Come", "RemoteWorker", "Round", "name_of_trainer"]

_SILENCE_S: Final = 5.0  # that a batch may well take; asking costs a millisecond
_FIRST_DOUBT_S: Final = 30.0  # that it will start; the next one after ten times as long


def name_of_trainer() -> str:
    """Return a name for a loader of this process, which nobody else has, and users understand."""
    of_ours = uuid.uuid4().hex[:8]
    return f"rank {current_rank().rank}, pid {os.getpid()} on {socket.gethostname()} #{of_ours}"


class Round(NamedTuple):
    """An epoch that is under way. The user may begin the same epoch again: numbers all differ."""

    number: int
    epoch: int
    is_announced: bool


class Call(NamedTuple):
    """A call that is under way.

    Attributes:
        worker: Whose.
        kind: "hello", "open", "make", "try" or "end".
        session: In which of its sessions.
        round: In which it was sent.
        step: Of which step; -1 for none.
        number: Of a "make": which of the worker's tasks. Of a "try": which sample of its batch.
        sent_ns: When; of a "make" that is sent once more, when it was for the first time.
    """

    worker: RemoteWorker
    kind: str
    session: str
    round: int
    step: int = -1
    number: int = -1
    sent_ns: int = 0


class Come(NamedTuple):
    """A call that has returned, or failed."""

    call: Call
    future: Any
    received_ns: int


class _Sent(NamedTuple):
    """A task that was sent, in case that it has to be sent again."""

    step: int
    message: bytes
    at_ns: int  # for the first time, as the answer may be to that


class RemoteWorker:
    """One actor, seen from the trainer.

    Attributes:
        worker_id: Its number.
        actor: Ray's handle.
        session: By which the actor knows this trainer; "trainer/" and a number of its own.
        is_ready: Whether the actor has opened the session, so that it may be sent tasks.
        hello: Where it is; None until it has started.
        started_at: When it was asked for, by the monotonic clock.
        doubt_s: After how many seconds without a hello it is to be said.
        joins_late: Whether it is to be told when it has started.
        share: How far it is in its share of an iterable dataset.
        tasks: Step -> indices of those that it has not answered.
        sent: Number -> what was sent and not answered.
        num_lost: How often in this round a batch was lost on its way.
        trial: Step and number of the sample that is being tried by itself.
        is_gone: Whether its end was told.
        dying_since: When the first sign of its end came.
        error: By which Ray told of its end.
        ended: By which it told of its end itself.
        killed_because: Why the trainer ended it.
        last_entry: What it said that it was doing.
        last_stack: Where in the user's code.
    """

    def __init__(
        self,
        worker_id: int,
        actor: Actor,
        recipe: WorkerSpec,
        identity: WorkerIdentity,
        inbox: queue.SimpleQueue[Come | None],
        trainer: str = "",
    ) -> None:
        """Know an actor that was asked for; `open` is to follow."""
        self.worker_id = worker_id
        self._trainer = trainer
        self.is_ready = False
        self.actor = actor
        self._recipe = recipe
        self._identity = identity
        self._inbox: queue.SimpleQueue[Come | None] | None = inbox
        self._parcel: object = None  # a reference
        self.session = ""
        self.hello: Hello | None = None
        self.started_at = time.monotonic()
        self.doubt_s = _FIRST_DOUBT_S
        self.joins_late = False
        self.is_gone = False
        self.dying_since: float | None = None
        self.error: Exception | None = None
        self.ended: Answer | None = None
        self.killed_because: str | None = None
        self.last_entry: StatusSnapshot | None = None
        self.last_stack = ""
        self.clock = WorkerClock()
        self._num_out = 0
        self._heard_at = time.monotonic()
        self._is_asked_for_hello = False
        self._round = Round(0, 0, False)
        self.begin_round(self._round, None)

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

    def open(self, parcel: object) -> None:
        """Open a session; `parcel` is the reference of the recipe."""
        self._parcel = parcel
        self.session = f"{self._trainer}/{uuid.uuid4().hex}"
        self.is_ready = False
        if self.hello is None:
            self._ask_for_hello()
        reference = self.actor.open.remote(self.session, parcel, self._identity)
        self._listen(Call(self, "open", self.session, 0), reference)
        # It fails with the actor.
        self._listen(Call(self, "end", self.session, 0), self.actor.until_end.remote(self.session))

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
        self._inbox = self._parcel = None
        self._early.clear()

    def _ask_for_hello(self) -> None:
        self._is_asked_for_hello = True
        self._listen(Call(self, "hello", self.session, 0), self.actor.hello.remote())

    def note_come(self, call: Call) -> None:
        """Note that a call is under way no more."""
        self._heard_at = time.monotonic()
        if call.kind != "end":
            self._num_out -= 1
        if call.kind == "hello":
            self._is_asked_for_hello = False

    @property
    def silent_from(self) -> float:
        """From when on it is to be seen to that something is heard, by the monotonic clock.

        That is if it owes an answer, and has not been asked for a sign of life already.
        """
        if self._num_out == 0 or self._is_asked_for_hello:
            return float("inf")
        return self._heard_at + _SILENCE_S

    def knock(self) -> None:
        """Ask for a sign of life.

        If the actor's end of a connection was given up while no packets came through, this end
        does not learn of it before something is sent: then Ray connects anew, and sends all that
        was under way once more.
        """
        self._heard_at = time.monotonic()
        self._ask_for_hello()

    def is_awaited(self, call: Call) -> bool:
        """Return whether an answer to this call is still of use."""
        if call.round != self._round.number or call.session != self.session:
            return False
        return call.number in self.sent if call.kind == "make" else self.trial is not None

    def begin_round(self, begun: Round, share: ShardPosition | None) -> None:
        """Forget all tasks; the actor is told with the first one.

        Args:
            begun: The round.
            share: Where to go on in its share of an iterable dataset.
        """
        self._round = begun
        self.share = share
        self.tasks: dict[int, object] = {}
        self._cautions: dict[int, RetryHints | None] = {}
        self._to_send: collections.deque[tuple[str, int, int]] = collections.deque()
        self.trial: tuple[int, int] | None = None
        self.sent: dict[int, _Sent] = {}
        self.num_lost = 0
        self._begin_numbers()

    def _begin_numbers(self) -> None:
        self._next_number = 0
        self._number_alone = -1  # of the task that was sent last, if it is to be alone
        self._num_taken = 0
        self._early: dict[int, tuple[Come, Answer]] = {}  # by number
        share = self.share
        begun = BeginEpoch(self._round.number, self._round.epoch, self._round.is_announced, share)
        self._begun_message = encode(begun)
        # What the dataset's state holds may be large, and is told once.
        self._begun_already = encode(begun._replace(shard=None))

    def submit(self, step: int, indices: object, caution: RetryHints | None) -> None:
        """Send a task, behind trials of its samples if it is to be done with care."""
        self.tasks[step] = indices
        is_alone = caution is not None and caution.alone
        if caution is not None and is_alone:
            if not self._recipe.is_iterable:
                self._to_send.extend(("try", step, k) for k in range(self._num_samples(indices)))
            caution = RetryHints(False, caution.quarantined) if caution.quarantined else None
        self._cautions[step] = caution
        self._to_send.append(("make alone" if is_alone else "make", step, -1))
        self.send()

    def _num_samples(self, indices: object) -> int:
        keys = dataset_keys(indices)
        if not self._recipe.is_batched:
            return 1
        return len(keys) if hasattr(keys, "__len__") else 0

    def send(self) -> None:
        """Send what may be sent: what is to be alone if nothing is under way, nothing beside it."""
        while self._to_send and not self._is_busy_alone and self.is_open and self.is_ready:
            kind, step, number = self._to_send[0]
            task = Task(self._round.number, step, self.tasks[step], (), (), self._cautions[step])
            if kind != "make" and self.sent:
                return
            if kind != "try":
                self._number_alone = self._next_number if kind == "make alone" else -1
                sent = _Sent(step, encode(task), time.monotonic_ns())
                self.sent[self._next_number] = sent
                self.send_again(self._next_number)
                self._next_number += 1
            else:
                self._try(encode(task), step, number)
            self._to_send.popleft()

    @property
    def _is_busy_alone(self) -> bool:
        return self.trial is not None or self._number_alone in self.sent

    def _try(self, message: bytes, step: int, number: int) -> None:
        self.trial = step, number
        reference = self.actor.try_sample.remote(self.session, self._begun_message, message, number)
        self._listen(Call(self, "try", self.session, self._round.number, step, number), reference)

    def send_again(self, number: int) -> None:
        """Send the task of this number, for the first time or once more."""
        step, message, at_ns = self.sent[number]
        call = Call(self, "make", self.session, self._round.number, step, number, at_ns)
        begun = self._begun_already if self._num_taken else self._begun_message
        reference = self.actor.make.remote(self.session, begun, message, number, self._num_taken)
        self._listen(call, reference)

    def reopen(self) -> None:
        """Open another session, as the actor does not know this one, and send all again."""
        self.open(self._parcel)
        kinds = {self._number_alone: "make alone"}
        unanswered = [(kinds.get(k, "make"), self.sent[k].step, -1) for k in sorted(self.sent)]
        if self.trial is not None:
            unanswered.insert(0, ("try", *self.trial))
        self._to_send.extendleft(reversed(unanswered))
        self.trial = None
        self.sent = {}
        self._begin_numbers()
        self.send()

    def take(self, come: Come, answer: Answer) -> Iterator[tuple[Come, Answer]]:
        """Yield the answers whose turn it is now that this one has come."""
        self._early[come.call.number] = come, answer
        while self._num_taken in self._early:
            number = self._num_taken
            self._num_taken += 1
            yield self._taken(number)

    def take_rest(self) -> Iterator[tuple[Come, Answer]]:
        """Yield the answers that have come before those of earlier tasks, which never will.

        Those of an iterable dataset are of no use without the earlier ones.
        """
        for number in sorted(self._early):
            if not self._recipe.is_iterable:
                yield self._taken(number)

    def _taken(self, number: int) -> tuple[Come, Answer]:
        del self.tasks[self.sent.pop(number).step]
        return self._early.pop(number)

    @property
    def steps_at_hand(self) -> list[int]:
        """The steps of which it may be making one, the likeliest first.

        Tasks are done in their order, but what it has made may not have left its process yet.
        """
        return [self.sent[number].step for number in sorted(self.sent)]
