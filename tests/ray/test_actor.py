# SPDX-License-Identifier: Apache-2.0
"""What an actor does with calls that come in any order, and twice; its code without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import sample_rng, worker_info
from penstock.data import IterableDataset
from penstock.engine.assembly import PlainOutput
from penstock.engine.backends import process_worker
from penstock.engine.backends.ray.worker import RayWorker, serialize_tree, value_of
from penstock.engine.plan import BatchIndices, WorkerSpec
from penstock.engine.status_page import Phase, StatusWriter
from penstock.engine.task import (
    BeginEpoch,
    Kind,
    Task,
    WorkerIdentity,
    decode_result,
    encode_message,
)
from penstock.engine.task_runner import TaskRunner
from penstock.randomness.samples import fallback_state, restore_fallback

IDENTITY = WorkerIdentity(worker_id=0, num_workers=1, base_seed=5)
BATCH = 3
NUM_BATCHES = 7  # in the stream
LIMIT_S = 60.0

gates: dict[str, Gate] = {}  # by name: a dataset crosses as a pickle, and finds its gate in here


class Gate:
    """Where a sample waits for the test, which learns that it does."""

    def __init__(self):
        self.reached = queue.SimpleQueue()
        self.opened = threading.Semaphore(0)
        self.read = []

    def pass_through(self, index):
        self.read.append(index)
        self.reached.put(index)
        assert self.opened.acquire(timeout=LIMIT_S)


class Numbers:
    """Sample i is i, and what it draws."""

    def __init__(self, draws, gate=None, ends_at=None):
        self.draws = draws
        self.gate = gate
        self.ends_at = ends_at

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if self.gate is not None:
            gates[self.gate].pass_through(index)
        if index == self.ends_at:
            raise SystemExit(f"sample {index} wants it")
        return {"index": index, "drawn": sample_rng().random() if self.draws else 0.0}


class Stream(IterableDataset):
    """As many samples as make `NUM_BATCHES` batches; each is read once for good."""

    def __init__(self, draws, ends_at=None):
        self.draws = draws
        self.ends_at = ends_at

    def __iter__(self):
        for index in range(NUM_BATCHES * BATCH):
            if index == self.ends_at:
                raise SystemExit(f"sample {index} wants it")
            yield {"index": index, "drawn": sample_rng().random() if self.draws else 0.0}


class OneArray(IterableDataset):
    """Yields the same array again and again, with something else in it."""

    def __iter__(self):
        array = np.zeros(5000, np.uint8)
        for k in range(10):
            array[:] = k
            yield array


@pytest.fixture(autouse=True)
def no_worker_for_good(monkeypatch):
    """This process goes on as the one that it was: with its threads, and as no worker."""
    monkeypatch.setattr(process_worker, "when_imported", lambda name, call: None)
    drawn = fallback_state()
    yield
    worker_info.set_worker_info(None)
    restore_fallback(drawn)
    gc.unfreeze()
    gates.clear()


@contextlib.asynccontextmanager
async def opened(dataset, *, seed=None, is_batched=True):
    is_iterable = isinstance(dataset, IterableDataset)
    batch_size = BATCH if is_batched else None
    spec = WorkerSpec(dataset, is_iterable, is_batched, seed=seed, batch_size=batch_size)
    worker = RayWorker(IDENTITY)
    try:
        assert (await worker.open(serialize_tree(spec))).kind == "answer"
        yield worker
    finally:
        for gate in gates.values():
            gate.opened.release(1000)
        await worker.close()
        await asyncio.sleep(0)  # what waited for its turn is dropped, in the thread
        end_thread(worker)


def end_thread(worker):
    worker._thread.shutdown()


def run(scenario):
    async def limited():
        await asyncio.wait_for(scenario, LIMIT_S)

    asyncio.run(limited())


def indices_of(number, seed):
    indices = list(range(number * BATCH, (number + 1) * BATCH))
    return indices if seed is None else BatchIndices(indices, number * BATCH, 1)


def calls_of(generation, seed=None):
    begun = encode_message(BeginEpoch(generation, generation))

    def arguments(number):
        # Steps are the loader's, which has other workers as well; numbers are of this one alone.
        task = Task(generation, number * 4, indices_of(number, seed))
        return begun, encode_message(task), number

    return arguments


def noted(answer):
    """An answer in plain values, to be compared."""
    if answer.kind != "answer":
        return answer.kind
    result, _ = decode_result(answer.message)
    if result.kind == Kind.EXHAUSTED:
        return "end", result.step
    assert result.kind == Kind.DONE, result.payload
    batch = value_of(answer.serialized)
    return result.step, batch["index"].tolist(), batch["drawn"].tolist()


def made_in_order(dataset, seed, generation, num_tasks):
    """What the tasks of a generation come to where each comes once, in order."""
    is_iterable = isinstance(dataset, IterableDataset)
    spec = WorkerSpec(dataset, is_iterable, True, seed=seed, batch_size=BATCH)
    runner = TaskRunner(PlainOutput(), StatusWriter(), IDENTITY)
    runner.set_up(lambda: spec)
    runner.begin_epoch(BeginEpoch(generation, generation))
    maker = runner.maker
    made = []
    for number in range(num_tasks):
        try:
            batch = maker.make(indices_of(number, seed), number * 4)
        except StopIteration:
            made.append(("end", number * 4))
            made += ["dropped"] * (num_tasks - len(made))
            break
        made.append((number * 4, batch["index"].tolist(), batch["drawn"].tolist()))
    return made


class Link:
    """A main process, and a link that sends its calls in any order, twice, and loses answers."""

    def __init__(self, data, worker, seed, depth):
        self.data = data
        self.worker = worker
        self.seed = seed
        self.depth = depth
        self.generation = 0
        self.reached = 0  # the newest generation of which a call has reached the actor
        self.on_the_way = []  # (generation, number, come): of calls, copies included
        self.running = []  # (generation, number, task)
        self.delivered = set()  # (generation, number) that have reached it
        self.begin_generation(1)

    def begin_generation(self, generation):
        self.generation = generation
        self.num_sent = 0
        self.answers = {}  # number -> what came first
        self.num_come = 0

    @property
    def unanswered(self):
        return [k for k in range(self.num_sent) if k not in self.answers]

    def send(self):
        self.on_the_way.append((self.generation, self.num_sent, self.num_come))
        self.num_sent += 1

    def send_again(self, number):
        """Ray sends what it sent: with the number of answers that had come by then."""
        come = self.data.draw(st.integers(max(0, number - self.depth + 1), self.num_come))
        self.on_the_way.append((self.generation, number, come))

    def deliver(self, k):
        generation, number, come = self.on_the_way.pop(k)
        call = self.worker.make(*calls_of(generation, self.seed)(number), come)
        self.running.append((generation, number, asyncio.ensure_future(call)))
        self.delivered.add((generation, number))
        self.reached = max(self.reached, generation)

    def _num_due(self, generation):
        """Return how many tasks of a generation are due: they are there, and all before them."""
        if generation < self.reached:
            # They are dropped; those that wait hear of it when the first call of the new is done.
            return 10**9 if (self.reached, 0) in self.delivered else -1
        number = 0
        while (generation, number) in self.delivered:
            number += 1
        return number

    async def settle(self):
        """Wait for all that must be answered; the link may lose some of it."""
        due = [each for each in self.running if each[1] < self._num_due(each[0])]
        answers = await asyncio.gather(*(task for _, _, task in due))
        early = [
            task
            for generation, number, task in self.running
            if generation == self.reached and number >= self._num_due(generation)
        ]
        assert not any(task.done() for task in early), "done before a task that it comes after"
        self.running = [each for each in self.running if each not in due]
        for (generation, number, _), answer in zip(due, answers, strict=True):
            if generation != self.generation:
                continue
            said = noted(answer)
            if said == "dropped" and number in self.answers:
                continue  # a late copy, of what has come
            if number not in self.answers and self.data.draw(st.booleans(), label="lost"):
                self.send_again(number)
                continue
            if number >= self.num_come:  # else it has been used, and anything will do
                assert self.answers.setdefault(number, said) == said
        while self.num_come in self.answers:
            self.num_come += 1

    def check_memory(self):
        worker = self.worker
        assert len(worker._kept) <= (self.depth if worker._is_iterable else 0)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    iterable=st.booleans(),
    seed=st.sampled_from([None, 7]),
    depth=st.integers(1, 4),
    num_generations=st.integers(1, 3),
    num_tasks=st.integers(0, NUM_BATCHES + 3),
)
def test_whatever_comes_when_the_main_process_gets_every_batch_once_and_in_order(
    data, iterable, seed, depth, num_generations, num_tasks
):
    dataset = (Stream if iterable else Numbers)(draws=seed is not None)
    expected = [made_in_order(dataset, seed, g, num_tasks) for g in range(1, num_generations + 1)]

    async def scenario():
        async with opened(dataset, seed=seed) as worker:
            link = Link(data, worker, seed, depth)
            while link.generation < num_generations or link.num_come < num_tasks:
                moves = []
                if link.num_sent < min(link.num_come + depth, num_tasks):
                    moves.append("send")
                if link.unanswered:
                    moves.append("again")
                if link.on_the_way:
                    moves += ["deliver", "deliver"]
                if link.running:
                    moves.append("settle")
                if link.generation < num_generations:
                    moves.append("next generation")
                move = data.draw(st.sampled_from(moves))
                if move == "send":
                    link.send()
                elif move == "again":
                    link.send_again(data.draw(st.sampled_from(link.unanswered)))
                elif move == "deliver":
                    link.deliver(data.draw(st.integers(0, len(link.on_the_way) - 1)))
                elif move == "settle":
                    await link.settle()
                    link.check_memory()
                    took = [link.answers[k] for k in range(link.num_come)]
                    assert took == expected[link.generation - 1][: link.num_come]
                else:
                    link.begin_generation(link.generation + 1)
            stale = [task for _, _, task in link.running]
            closing = asyncio.ensure_future(worker.close())
            await asyncio.gather(closing, *stale)  # nothing waits any more

    run(scenario())


def test_a_new_generationbegins_with_its_first_task_even_if_the_second_is_there_before():
    async def scenario():
        async with opened(Stream(draws=False)) as worker:
            first, second = calls_of(1), calls_of(2)
            assert noted(await worker.make(*first(0), 0)) == (0, [0, 1, 2], [0.0] * 3)
            early = asyncio.ensure_future(worker.make(*first(2), 0))
            newer = asyncio.ensure_future(worker.make(*second(1), 0))
            begun = await worker.make(*second(0), 0)
            assert noted(begun) == (0, [0, 1, 2], [0.0] * 3)
            assert noted(await newer) == (4, [3, 4, 5], [0.0] * 3)
            assert noted(await early) == "dropped"
            assert noted(await worker.make(*first(1), 0)) == "dropped"
            assert noted(await worker.make(*second(2), 0))[1] == [6, 7, 8]

    run(scenario())


def test_at_no_moment_while_a_generationbegins_is_a_later_task_of_it_in_turn():
    """The event loop asks whether a task is in turn while the thread begins the generation."""

    class Asked(RayWorker):
        asked = None

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if self.asked is not None:
                assert not self._is_in_turn(self.asked, 2), f"in turn once {name} is set"

    worker = Asked(IDENTITY)
    spec = WorkerSpec(Stream(draws=False), True, True, batch_size=BATCH)
    assert worker._answer(worker._set_up, serialize_tree(spec)).kind == "answer"
    for generation in (1, 2):
        begun = BeginEpoch(generation, generation)
        worker._status.wanted = generation
        worker.asked = begun
        for number in range(4):
            task = Task(generation, number, indices_of(number, None))
            assert worker._answer(worker._serve, begun, task, number, 0, None).kind == "answer"
            worker.asked = None
    worker._close()
    end_thread(worker)


@pytest.mark.parametrize("dataset", [Numbers(False, ends_at=4), Stream(False, ends_at=4)])
def test_a_wish_to_end_is_answered_with_what_was_being_done_and_again_if_it_is_lost(dataset):
    """An iterator that has raised says that it has no more: nothing else may be taken from it."""

    async def scenario():
        async with opened(dataset) as worker:
            call = calls_of(1)
            assert noted(await worker.make(*call(0), 0))[1] == [0, 1, 2]
            ended = await worker.make(*call(1), 0)
            again = await worker.make(*call(1), 0)
            for answer in (ended, again):
                assert answer.kind == "ended"
                assert answer.message.startswith("SystemExit: sample 4 wants it\nWhere it was")
                assert "test_actor.py" in answer.message
                assert (answer.snapshot.step, answer.snapshot.phase) == (4, Phase.READING)
                assert answer.snapshot.number == 1

    run(scenario())


def test_a_worker_that_ends_has_no_call_waiting_any_more():
    gates["left"] = gate = Gate()

    async def scenario():
        async with opened(Numbers(False, gate="left")) as worker:
            call = calls_of(1)
            until_end = asyncio.ensure_future(worker.until_end())
            # One is being done, one waits for the thread, others for a task before them.
            calls = [asyncio.ensure_future(worker.make(*call(k), 0)) for k in (0, 0, 2, 3)]
            calls.append(asyncio.ensure_future(worker.make(*call(5), 0, 1)))
            assert await _next(gate.reached) == 0
            closing = asyncio.ensure_future(worker.close())
            await asyncio.sleep(0)
            assert not until_end.done()
            gate.opened.release(100)
            await closing
            await until_end
            answers = await asyncio.gather(*calls)
            assert {answer.kind for answer in answers} == {"dropped"}
            assert gate.read == [0]
            assert noted(await worker.make(*call(1), 0)) == "dropped"
            assert (await worker.make(*call(1), 0, 0)).kind == "dropped"
            await worker.until_end()

    run(scenario())


def wait_at_gate(worker_id):
    gates["opening"].pass_through(worker_id)


def test_a_worker_ends_once_it_is_set_up_if_it_is_told_to_meanwhile():
    gates["opening"] = gate = Gate()

    async def scenario():
        worker = RayWorker(IDENTITY)
        spec = WorkerSpec(Numbers(False), False, True, worker_init_fn=wait_at_gate)
        calls = [worker.open(serialize_tree(spec)), worker.open(serialize_tree(spec))]
        opening = [asyncio.ensure_future(call) for call in calls]  # one is a late copy
        await _next(gate.reached)
        snapshot, stack = await worker.doing()
        assert (snapshot.phase, "pass_through" in stack) == (Phase.STARTING, True)
        waiting = asyncio.ensure_future(worker.make(*calls_of(1)(1), 0))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(worker.close())
        await asyncio.sleep(0)
        gate.opened.release()
        await asyncio.gather(closing, *opening)
        assert (await waiting).kind == "dropped"
        assert gate.read == [0]
        end_thread(worker)

    run(scenario())


def test_what_the_users_code_writes_into_again_is_not_in_batches_that_were_made():
    async def scenario():
        async with opened(OneArray(), is_batched=False) as worker:
            answers = [await worker.make(*calls_of(1)(number), 0) for number in range(10)]
            assert [set(value_of(a.serialized).tolist()) for a in answers] == [
                {k} for k in range(10)
            ]

    run(scenario())


async def _next(reached):
    """What reaches a gate; without a thread that waits, which would be one more to end."""
    while True:
        try:
            return reached.get_nowait()
        except queue.Empty:
            await asyncio.sleep(0.001)
