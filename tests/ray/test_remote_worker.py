# SPDX-License-Identifier: Apache-2.0
"""The main process's view of an actor whose answers come in any order; the test is the actor."""

from __future__ import annotations

import concurrent.futures
import queue
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.backends.ray.backend import RemoteWorker
from penstock.engine.backends.ray.worker import Answer
from penstock.engine.plan import RetryHints, ShardPosition, WorkerSpec
from penstock.engine.task import BeginEpoch, Kind, Task, TaskResult, decode_message, encode_result


@dataclass
class Asked:
    """A call that the actor was sent; the test says what it returns, and when."""

    kind: str
    args: tuple
    done: concurrent.futures.Future = field(default_factory=concurrent.futures.Future)

    def future(self):
        return self.done

    @property
    def begun(self):
        return decode_message(self.args[0])

    @property
    def task(self):
        return decode_message(self.args[1])

    @property
    def number(self):
        return self.args[2]

    @property
    def trial(self):
        return self.args[4]


class Actor:
    """Has the methods that a handle has, and notes in order what is asked."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, kind):
        class Method:
            @staticmethod
            def remote(*args):
                self.asked.append(Asked(kind, args))
                return self.asked[-1]

        return Method()

    def of(self, *kinds):
        return [asked for asked in self.asked if asked.kind in kinds]

    def open_calls(self, worker):
        """Calls of the generation of now that are under way, and not answered otherwise."""
        return [
            asked
            for asked in self.of("make")
            if not asked.done.done() and asked.begun.generation == worker._generation
        ]


class MainProcess:
    """Does what the backend does, but for making batches of answers."""

    def __init__(self, *, is_iterable=False):
        self.actor = Actor()
        self.inbox = queue.SimpleQueue()
        spec = WorkerSpec(None, is_iterable, True)
        self.worker = RemoteWorker(0, self.actor, spec, self.inbox)
        self.taken = []
        self.worker.begin_generation(BeginEpoch(1, 1))
        self.worker.open("serialized")

    def submit(self, step, indices, hints=None):
        self.worker.submit(Task(self.worker._generation, step, indices, hints))

    def answer(self, asked):
        asked.done.set_result(answer_to(asked))
        come = self.inbox.get_nowait()
        worker = self.worker
        assert come.call.worker is worker
        worker.num_out -= 1
        if come.call.kind == "open":
            worker.is_ready = True
            worker.send()
            return
        if come.call.kind == "make" and come.call.task.generation == worker._generation:
            self.taken += [result.step for result in worker.take(come)]
            worker.send()

    def open_now(self):
        """Let the actor open the spec."""
        (asked,) = self.actor.of("open")
        self.answer(asked)

    def makes(self):
        return [asked for asked in self.actor.of("make") if asked.trial is None]


def answer_to(asked):
    """What an actor answers to any call."""
    if asked.kind != "make" or asked.trial is not None:
        return Answer("answer")
    task = asked.task
    return Answer("answer", encode_result(TaskResult(task.generation, task.step, Kind.EMPTY)))


class Watch:
    """What must hold after every move of the main process, and what is to become of each step."""

    def __init__(self, main):
        self.main = main
        self.num_seen = 0
        self.held = {}  # step -> whether it is to be alone, in the order of submission
        self.numbers = {}  # generation -> how many calls
        self.tries_seen = {}  # step -> numbers of the samples that were tried

    def check(self):
        worker, actor = self.main.worker, self.main.actor
        for asked in actor.asked[self.num_seen :]:
            self._check_new(asked)
        self.num_seen = len(actor.asked)
        under_way = actor.open_calls(worker)
        if any(asked.trial is not None for asked in under_way):
            assert len(under_way) == 1, "something is beside a trial"
        steps = {asked.task.step for asked in under_way}
        if any(self.held.get(step) for step in steps):
            assert len(steps) == 1, "something is beside a task that is to be alone"
        at_hand = steps_at_hand(worker)
        sent = [step for step in self.held if step in at_hand]
        assert at_hand == sent == list(self.held)[: len(sent)]
        assert [step for _, step in worker.tasks] == list(self.held)

    def _check_new(self, asked):
        worker = self.main.worker
        if asked.kind != "make":
            return
        assert worker.is_ready, "sent before the spec was open"
        # Where to go on is noted until it is known to have come: the first answer says so.
        has_begun = asked.args[3] > 0
        position = None if has_begun or worker._generation == 1 else ShardPosition(2)
        assert asked.begun == BeginEpoch(worker._generation, 1, False, position)
        generation, step = asked.begun.generation, asked.task.step
        assert asked.number == self.numbers.get(generation, 0), "not the next number"
        self.numbers[generation] = asked.number + 1
        assert asked.args[3] == worker._num_taken
        assert asked.task.hints is None or not asked.task.hints.alone
        if asked.trial is not None:
            seen = self.tries_seen.setdefault(step, [])
            assert self.held[step], "tried though nothing is suspected"
            seen.append(asked.trial)
            assert seen == list(range(len(seen)))

    def take(self):
        """The steps that were taken are those that were held first, in order."""
        steps = list(self.main.taken)
        assert steps == list(self.held)[: len(steps)]
        for step in steps:
            del self.held[step]
        self.main.taken.clear()


HINTS = st.sampled_from(
    [
        None,
        None,
        None,
        RetryHints(True, ()),
        RetryHints(True, ((3, "x", "y"),)),
        RetryHints(False, ()),
    ]
)


@given(data=st.data(), iterable=st.booleans(), num_moves=st.integers(1, 60))
def test_tasks_are_numbered_and_taken_in_order_and_suspects_are_alone_whatever_comes_when(
    data, iterable, num_moves
):
    main = MainProcess(is_iterable=iterable)
    worker, actor = main.worker, main.actor
    watch = Watch(main)
    next_step = 0
    tried = {}  # step -> samples

    def pending():
        return [a for a in actor.of("make", "open", "handshake") if not a.done.done()]

    for _ in range(num_moves):
        moves = ["submit"]
        moves += ["answer"] * 4 if pending() else []
        moves += ["generation"] if next_step else []
        move = data.draw(st.sampled_from(moves))
        if move == "submit":
            hints = data.draw(HINTS)
            num_samples = data.draw(st.integers(0, 3))
            is_alone = hints is not None and hints.alone
            watch.held[next_step] = is_alone
            tried[next_step] = num_samples if is_alone and not iterable else 0
            main.submit(next_step, list(range(num_samples)), hints)
            next_step += data.draw(st.integers(1, 3))  # other workers have the others
        elif move == "answer":
            main.answer(data.draw(st.sampled_from(pending())))
        else:
            worker.tasks.clear()
            begun = BeginEpoch(worker._generation + 1, 1, False, ShardPosition(2))
            worker.begin_generation(begun)
            watch.held.clear()
        watch.take()
        watch.check()

    while watch.held:
        assert pending(), "deadlock: nothing is under way"
        main.answer(data.draw(st.sampled_from(pending())))
        watch.take()
        watch.check()
    for step, seen in watch.tries_seen.items():
        assert max(seen) < tried[step]
    assert worker._early == {}
    for asked in pending():
        main.answer(asked)
    assert worker.num_out == 1, "but for the call that tells of its end"
    assert main.taken == []


@given(data=st.data(), iterable=st.booleans(), num_tasks=st.integers(1, 8))
def test_a_dead_worker_is_sent_nothing_and_keeps_the_tasks_that_were_not_taken(
    data, iterable, num_tasks
):
    main = MainProcess(is_iterable=iterable)
    main.open_now()
    worker = main.worker
    for step in range(num_tasks):
        main.submit(step, [step])
    come = data.draw(st.permutations(range(num_tasks)))[: data.draw(st.integers(0, num_tasks))]
    for number in come:
        main.answer(main.actor.of("make")[number])
    in_turn = next(k for k in range(num_tasks + 1) if k not in come)
    assert main.taken == list(range(in_turn))
    worker.note_end("it was stuck")
    assert not worker.is_open
    main.submit(100, [0])
    assert len(main.actor.of("make")) == num_tasks, "sent to a dead worker"
    lost = list(range(in_turn, num_tasks))
    assert steps_at_hand(worker) == lost
    assert [step for _, step in worker.tasks] == [*lost, 100]
    assert list(worker.other_steps) == lost[1:]


def steps_at_hand(worker):
    """The steps of which it may be making one, the likeliest first."""
    if not worker.sent:
        return []
    return [worker.snapshot().step, *worker.other_steps]


def test_who_is_forgotten_is_not_listened_to():
    main = MainProcess()
    main.open_now()
    main.submit(0, [0])
    main.worker.forget()
    for asked in main.actor.asked:
        if not asked.done.done():
            asked.done.set_result(answer_to(asked))
    assert main.inbox.empty()
