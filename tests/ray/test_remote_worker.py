# SPDX-License-Identifier: Apache-2.0
"""The main process's view of an actor whose answers come in any order; the test is the actor."""

from __future__ import annotations

import concurrent.futures
import queue
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.backends.ray.remote_worker import RemoteWorker
from penstock.engine.backends.ray.worker import Answer
from penstock.engine.plan import RetryHints, ShardPosition, WorkerSpec
from penstock.engine.task import BeginEpoch, Task, decode_message

ANSWER = Answer("answer")


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
            for asked in self.of("make", "try_sample")
            if not asked.done.done()
            and asked.begun.generation == worker._generation
            and (asked.kind == "try_sample" or asked.number in worker.sent)
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
        self.worker.open("parcel")

    def submit(self, step, indices, hints=None):
        self.worker.tasks[self.worker._generation, step] = indices
        self.worker.submit(Task(self.worker._generation, step, indices, hints))

    def answer(self, asked, answer=ANSWER):
        asked.done.set_result(answer)
        come = self.inbox.get_nowait()
        worker = self.worker
        assert come.call.worker is worker
        worker.note_come(come.call)
        if come.call.kind == "open":
            worker.is_ready = True
            worker.send()
            return
        if come.call.kind in ("hello", "end") or not worker.is_awaited(come.call):
            return
        if come.call.kind == "try":
            worker.trial = None
        else:
            self.taken += [(taken.call.number, taken.call.step) for taken in worker.take(come)]
        worker.send()

    def open_now(self):
        """Let the actor open the spec."""
        (asked,) = self.actor.of("open")
        self.answer(asked)

    def makes(self):
        return [(asked.number, asked.task.step) for asked in self.actor.of("make")]


class Watch:
    """What must hold after every move of the main process, and what is to become of each step."""

    def __init__(self, main):
        self.main = main
        self.num_seen = 0
        self.held = {}  # step -> whether it is to be alone, in the order of submission
        self.numbers = {}  # generation -> messages in the order of their numbers
        self.tries_seen = {}  # step -> numbers of the samples that were tried

    def check(self):
        worker, actor = self.main.worker, self.main.actor
        for asked in actor.asked[self.num_seen :]:
            self._check_new(asked)
        self.num_seen = len(actor.asked)
        under_way = actor.open_calls(worker)
        if any(asked.kind == "try_sample" for asked in under_way):
            assert len(under_way) == 1, "something is beside a trial"
        steps = {asked.task.step for asked in under_way}
        if any(self.held.get(step) for step in steps):
            assert len(steps) == 1, "something is beside a task that is to be alone"
        sent = [step for step in self.held if step in worker.steps_at_hand]
        assert worker.steps_at_hand == sent == list(self.held)[: len(sent)]
        assert [step for _, step in worker.tasks] == list(self.held)

    def _check_new(self, asked):
        worker = self.main.worker
        if asked.kind not in ("make", "try_sample"):
            return
        assert worker.is_ready, "sent before the spec was open"
        # Where to go on is told until it is known to have come: the first answer says so.
        has_begun = asked.kind == "make" and asked.args[3] > 0
        position = None if has_begun or worker._generation == 1 else ShardPosition(2)
        assert asked.begun == (worker._generation, 1, False, position)
        step = asked.task.step
        if asked.kind == "try_sample":
            seen = self.tries_seen.setdefault(step, [])
            assert self.held[step], "tried though nothing is suspected"
            seen.append(asked.number)
            assert seen == list(range(len(seen)))
            return
        messages = self.numbers.setdefault(asked.begun.generation, [])
        if asked.number == len(messages):
            messages.append(asked.args[1])
        assert messages[asked.number] == asked.args[1], "another task with the same number"
        assert asked.args[3] == worker._num_taken
        assert asked.task.hints is None or not asked.task.hints.alone

    def take(self):
        """The steps that were taken are those that were held first, in order."""
        steps = [step for _, step in self.main.taken]
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
        return [a for a in actor.of("make", "try_sample", "open", "hello") if not a.done.done()]

    for _ in range(num_moves):
        moves = ["submit"]
        moves += ["answer"] * 4 if pending() else []
        moves += ["again"] if worker.sent and worker.is_ready else []
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
        elif move == "again":
            number = data.draw(st.sampled_from(sorted(worker.sent)))
            before = len(actor.asked)
            worker.send_again(number)
            (again,) = actor.asked[before:]
            assert again.number == number
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
    assert worker._num_out == 0
    assert main.taken == []


def test_a_task_that_is_sent_again_counts_from_when_it_was_sent_first():
    """The answer may be to the first call: its times were before the second."""
    main = MainProcess()
    main.open_now()
    main.submit(0, [0])
    main.worker.send_again(0)
    first, second = main.actor.of("make")
    assert first.args == second.args
    second.done.set_result(ANSWER)
    first.done.set_result(ANSWER)
    come, late = main.inbox.get_nowait(), main.inbox.get_nowait()
    assert come.call.sent_ns == late.call.sent_ns
    assert [step for _, step in _steps(main.worker.take(come))] == [0]
    assert not main.worker.is_awaited(late.call)


def _steps(taken):
    return [(come.call.number, come.call.step) for come in taken]


@given(data=st.data(), iterable=st.booleans(), num_tasks=st.integers(1, 8))
def test_of_a_dead_worker_what_had_come_is_taken_unless_an_iterables_batch_before_it_is_lost(
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
    assert [step for _, step in main.taken] == list(range(in_turn))
    worker.dying_since = 0.0
    assert not worker.is_open
    main.submit(100, [0])
    assert len(main.actor.of("make")) == num_tasks, "sent to a dead worker"
    rest = [step for _, step in _steps(worker.take_rest())]
    assert rest == ([] if iterable else sorted(k for k in come if k > in_turn))
    lost = [k for k in range(num_tasks) if k >= in_turn and k not in rest]
    assert worker.steps_at_hand == lost
    assert [step for _, step in worker.tasks] == [*lost, 100]


def test_who_is_forgotten_is_not_listened_to():
    main = MainProcess()
    main.open_now()
    main.submit(0, [0])
    main.worker.forget()
    for asked in main.actor.asked:
        if not asked.done.done():
            asked.done.set_result(ANSWER)
    assert main.inbox.empty()


def test_it_is_silent_once_nothing_but_the_call_that_tells_of_its_end_is_under_way():
    main = MainProcess()
    main.worker.dying_since = 0.0
    assert not main.worker.is_silent
    main.answer(main.actor.of("hello")[0])
    assert not main.worker.is_silent
    main.open_now()
    assert main.worker.is_silent
    assert len(main.actor.of("until_end")) == 1
