# SPDX-License-Identifier: Apache-2.0
"""Ranks, each a process of its own, that feed from one pool of Ray's workers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from tests.ray import pool_rank  # noqa: E402
from tests.ray.conftest import _becomes  # noqa: E402
from tests.ray.pool_data import (  # noqa: E402
    LENGTH,
    SEED,
    TABLE_BYTES,
    loader_of,
    told,
)

from penstock import Loader  # noqa: E402
from penstock.engine.backends.ray.options import RayOptions  # noqa: E402
from penstock.engine.backends.ray.parcels import Parcel  # noqa: E402
from penstock.engine.backends.ray.pool import PoolCrew, start_keeper  # noqa: E402
from penstock.engine.backends.ray.sharing import split_parcel  # noqa: E402
from penstock.errors import ConfigError, WorkerDied  # noqa: E402
from penstock.ray import WorkerPool  # noqa: E402
from penstock.sampling import RandomSampler  # noqa: E402

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
POOL = "test"
NUM_WORKERS = 2
OPTIONS = {"num_cpus": 0}
PATIENCE_S = 60.0


class Process:
    """One that does what it is told as a rank, and says what came of it."""

    def __init__(self, address):
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, pool_rank.__file__, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._num_unanswered = 1  # it says when it is ready

    def tell(self, name, **options):
        print(json.dumps([name, options]), file=self._process.stdin, flush=True)
        self._num_unanswered += 1

    def answer(self):
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()[-4000:]
        self._num_unanswered -= 1
        kind, value = json.loads(line)
        if kind == "raised":
            raise RankError(value)
        return value

    def ask(self, name, **options):
        self.tell(name, **options)
        return self.answer()

    def settle(self):
        """Leave nothing to the next test, also where this one has failed."""
        while self._num_unanswered:
            with contextlib.suppress(RankError):
                self.answer()
        self.ask("close")

    def kill(self):
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def end(self):
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self.kill()


class RankError(Exception):
    """What a rank's loader raised."""


@contextlib.contextmanager
def processes(cluster, count):
    """So many, which start at the same time."""
    started = [Process(cluster.address) for _ in range(count)]
    try:
        for process in started:
            assert process.answer() is None
        yield started
    finally:
        for process in started:
            process.end()


@contextlib.contextmanager
def settled(ranks):
    """Nothing is under way at the end of the block."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.settle()


@pytest.fixture(scope="module")
def four(cluster):
    """Processes for all tests; started once, as that takes seconds."""
    with processes(cluster, 4) as started:
        yield started


@pytest.fixture
def pool(cluster):
    with WorkerPool(POOL, NUM_WORKERS, ray_options=OPTIONS) as found:
        yield found


@pytest.fixture
def ranks(four, pool):
    """Processes, and a pool for them; what they iterate is closed before it."""
    with settled(four):
        yield four


def of_pool(num_workers=NUM_WORKERS, name=POOL, **options):
    ray_options = {"pool": name}
    return {"backend": "ray", "num_workers": num_workers, "ray_options": ray_options, **options}


def open_all(ranks, dataset="noise", **options):
    """Let each process be a rank, in their order."""
    options = {**of_pool(), "world_size": len(ranks), **options}
    for number, rank in enumerate(ranks):
        rank.tell("open", dataset=dataset, rank=number, **options)
    for rank in ranks:
        rank.answer()


def take_all(ranks, count=None):
    for rank in ranks:
        rank.tell("take", count=count)
    return [rank.answer() for rank in ranks]


@functools.cache
def expected(dataset, rank, world_size, args=()):
    """What a rank gets without workers."""
    if dataset == "stream":  # the loader asks the environment who it is
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(world_size))
            return list(map(told, loader_of(dataset, rank, world_size, args=args)))
    return list(map(told, loader_of(dataset, rank, world_size, args=args)))


def in_turns(batches_of_ranks):
    """The global order: batch k of all ranks, a sample of each in turn."""
    order = []
    for batches in zip(*batches_of_ranks, strict=True):
        order += [i for at in zip(*(indices for indices, _ in batches), strict=True) for i in at]
    return order


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_gets_its_slices_of_one_order(ranks, world_size):
    few = ranks[:world_size]
    open_all(few)
    taken = take_all(few)
    assert taken == [expected("noise", rank, world_size) for rank in range(world_size)]
    assert in_turns(taken) == list(RandomSampler(range(LENGTH), seed=SEED))


@pytest.mark.slow
def test_a_rank_may_use_fewer_workers_and_gets_those_with_the_fewest_trainers(ranks, pool):
    two = ranks[:2]
    open_all(two, num_workers=1)
    begun = take_all(two, 1)
    assert sorted(trainer.workers for trainer in pool.stats().trainers) == [(0,), (1,)]
    for rank, ends in enumerate(take_all(two)):
        assert begun[rank] + ends == expected("noise", rank, 2)


def test_a_rank_that_is_killed_resumes_while_the_others_go_on(cluster, ranks):
    others = ranks[:2]
    with processes(cluster, 2) as (victim, successor):
        three = [others[0], victim, others[1]]
        open_all(three)
        begun = take_all(three, 5)
        state = victim.ask("state")
        lost = take_all(three, 3)[1]
        victim.tell("take")
        victim.kill()
        middle = take_all(others, 3)
        options = of_pool(rank=1, world_size=3, state=state)
        successor.ask("open", dataset="noise", **options)
        ends = take_all([others[0], successor, others[1]])
    assert begun[1] + ends[1] == expected("noise", 1, 3)
    assert lost == ends[1][:3]
    for k, (rank, taken) in enumerate(zip((0, 2), middle, strict=True)):
        whole = expected("noise", rank, 3)
        assert begun[rank] == whole[:5]
        assert taken + ends[2 * k] == whole[8:]


def kill_worker(pool, number):
    """End a worker by force, and know how many times that has been its fate."""
    reports = []

    def answers():
        reports.append(pool.stats().workers[number])
        return reports[-1].pid is not None

    assert _becomes(answers, PATIENCE_S)
    os.kill(reports[-1].pid, signal.SIGKILL)
    return reports[-1].num_deaths + 1


def are_set_up(pool, num_trainers):
    """Whether all workers know so many trainers, and have nothing to do for any of them."""
    stats = pool.stats()
    are_known = all(worker.num_trainers == num_trainers for worker in stats.workers)
    return are_known and all(trainer.idle_s > 0 for trainer in stats.trainers)


def test_workers_die_and_all_ranks_get_the_same_new_one_and_lose_nothing(cluster, ranks, pool):
    def have_all_work_for(number):
        """Whether each rank has two batches under way there; one is being made."""
        return pool.stats().workers[number].num_waiting == 2 * len(ranks) - 1

    def have_all_a_new(number):
        worker = pool.stats().workers[number]
        return (worker.num_trainers, worker.num_deaths) == (len(ranks), 1)

    with gate(cluster, "gate") as passage:
        cluster.ray.get(passage.open.remote())
        open_all(ranks, "gated", args=[list(range(LENGTH)), "gate"])
        taken = take_all(ranks, 1)
        # Of a death while a rank's dataset is opened, that rank is the cause.
        assert _becomes(lambda: are_set_up(pool, len(ranks)), PATIENCE_S)
        # Else the other worker may make all batches, and no rank miss the one that has died.
        cluster.ray.get(passage.shut.remote())
        for rank in ranks:
            rank.tell("take")
        for number in range(NUM_WORKERS):
            assert _becomes(functools.partial(have_all_work_for, number), PATIENCE_S)
            kill_worker(pool, number)
            assert _becomes(functools.partial(have_all_a_new, number), PATIENCE_S)
        cluster.ray.get(passage.open.remote())
        taken = [one + rank.answer() for one, rank in zip(taken, ranks, strict=True)]
    assert taken == [expected("noise", rank, 4) for rank in range(4)]
    assert [worker.num_deaths for worker in pool.stats().workers] == [1, 1]


def _bad_sample(rank, world_size, at_batch):
    """A sample of a rank's slice, and the batch that it is in."""
    indices, _ = expected("noise", rank, world_size)[at_batch]
    return indices[2]


def test_a_sample_that_ends_workers_is_skipped_by_its_rank_and_harms_no_other(ranks, pool):
    three = ranks[:3]
    bad = _bad_sample(1, 3, at_batch=6)
    open_all(three, "deadly", args=[bad], on_error="skip")
    taken = take_all(three)
    for rank in (0, 2):
        assert taken[rank] == expected("noise", rank, 3)
        assert three[rank].ask("failed") == []
    whole = expected("noise", 1, 3)
    assert [indices for indices, _ in taken[1]] == [
        [index for index in indices if index != bad] for indices, _ in whole
    ]
    assert taken[1][:6] + taken[1][7:] == whole[:6] + whole[7:]
    assert three[1].ask("failed") == [bad]
    # By three ends, as nobody says how they came.
    assert sum(worker.num_deaths for worker in pool.stats().workers) == 3


def test_a_sample_that_ends_workers_fails_its_rank_alone_where_it_is_to_raise(ranks):
    three = ranks[:3]
    bad = _bad_sample(1, 3, at_batch=6)
    open_all(three, "deadly", args=[bad])
    for rank in three:
        rank.tell("take")
    with pytest.raises(RankError, match=rf"WorkerDied: .*reading samples? .*\b{bad}\b"):
        three[1].answer()
    assert three[0].answer() == expected("noise", 0, 3)
    assert three[2].answer() == expected("noise", 2, 3)


@pytest.mark.slow
def test_a_dataset_that_ends_workers_as_they_open_it_fails_its_rank_alone(ranks):
    two = ranks[:2]
    two[0].ask("open", dataset="noise", rank=0, world_size=2, **of_pool())
    begun = two[0].ask("take", count=3)
    two[1].ask("open", dataset="ends at once", rank=1, world_size=2, **of_pool())
    two[0].tell("take")
    with pytest.raises(RankError, match="WorkerDied"):
        two[1].ask("take")
    assert begun + two[0].answer() == expected("noise", 0, 2)


def pid_of_keeper():
    from ray._private import state

    (pid,) = (
        actor["Pid"]
        for actor in state.actors().values()
        if actor["ActorClassName"].endswith("Keeper") and actor["State"] == "ALIVE"
    )
    return pid


def test_a_keeper_that_dies_is_started_anew_and_nothing_is_lost(ranks, pool):
    two = ranks[:2]
    open_all(two)
    taken = take_all(two, 3)
    assert _becomes(lambda: are_set_up(pool, 2), PATIENCE_S)
    workers = [worker.pid for worker in pool.stats().workers]
    os.kill(pid_of_keeper(), signal.SIGKILL)
    # Else these may make all the batches that are left, and nobody ask the new keeper for anything.
    assert _becomes(lambda: not any(map(psutil.pid_exists, workers)), PATIENCE_S)
    ends = take_all(two)
    assert [one + more for one, more in zip(taken, ends, strict=True)] == [
        expected("noise", rank, 2) for rank in range(2)
    ]
    assert pool.stats().num_shared == 2  # the new keeper was brought it again


def test_ranks_with_one_dataset_put_it_once(ranks, pool):
    open_all(ranks)
    stats = pool.stats()
    assert stats.num_puts == stats.num_shared == 2  # the large array, and all the rest
    assert TABLE_BYTES < stats.shared_bytes < TABLE_BYTES + 10_000
    assert len(stats.trainers) == 4
    take_all(ranks, 2)
    for rank in ranks:
        rank.ask("close")
    open_all(ranks)  # again, while it is still kept
    assert pool.stats().num_puts == 2
    take_all(ranks, 1)


def test_equal_arrays_of_a_dataset_are_put_once_without_waiting_for_one_another(pool):
    assert _becomes(lambda: all(w.is_alive for w in pool.stats().workers), PATIENCE_S)
    began = time.monotonic()
    loader = loader_of("twins", 0, 1, **of_pool(persistent_workers=True))
    iterator = iter(loader)
    assert told(next(iterator)) == expected("noise", 0, 1)[0]
    assert pool.stats().num_puts == 2
    assert time.monotonic() - began < 30.0  # others would wait for 60 s
    assert _becomes(lambda: are_set_up(pool, 1), PATIENCE_S)  # nothing is on its way any more


def test_different_datasets_in_one_pool(ranks, pool):
    two = ranks[:2]
    for number, rank in enumerate(two):
        options = of_pool(rank=number, world_size=2, args=[1 + number])
        rank.ask("open", dataset="noise", **options)
    assert take_all(two) == [expected("noise", rank, 2, args=(rank + 1,)) for rank in range(2)]
    assert pool.stats().num_puts == 4


def test_each_trainer_sees_itself_in_the_worker(ranks):
    two = ranks[:2]
    for number, rank in enumerate(two):
        options = of_pool(1 + number, rank=number, world_size=2, torchs=True, prefetch_factor=3)
        rank.ask("open", dataset="who am I", args=[10 + number], **options)
    for number, taken in enumerate(take_all(two)):
        by_both = np.frombuffer(bytes.fromhex("".join(drawn for _, drawn in taken)), np.int64)
        by_us, by_torch = by_both.reshape(-1, 2, 4).swapaxes(0, 1)
        assert (by_us == by_torch).all()
        assert (by_us[:, 1:] == [1 + number, 10 + number, 1]).all()
        assert set(by_us[:, 0]) <= set(range(1 + number))  # one may have opened too late for any


def test_a_worker_lets_go_of_the_datasets_of_trainers_that_have_left(pool):
    loader = loader_of("cyclic", 0, 1, batch_size=LENGTH, **of_pool(1))
    for epoch in range(4):
        loader.set_epoch(epoch)
        (batch,) = loader
        assert batch["num_alive"].max() == 1


def test_a_stream_is_dealt_out_to_ranks_and_workers(ranks):
    two = ranks[:2]
    open_all(two, "stream", torchs=True)
    taken = take_all(two)
    assert taken == [expected("stream", rank, 2) for rank in range(2)]
    assert in_turns(taken) == list(range(LENGTH))


class Umpire:
    """Lets a rank's sample be made once both ranks have a task in the worker, and notes whose."""

    def __init__(self, keeper, num_of_each):
        self._keeper = keeper
        self._left = {0: num_of_each, 1: num_of_each}
        self.order = []

    async def until_both_want(self, rank):
        import asyncio

        self.order.append(rank)
        self._left[rank] -= 1
        (seat,) = await self._keeper.seats.remote()
        deadline = time.monotonic() + PATIENCE_S
        while self._left[1 - rank]:
            assert time.monotonic() < deadline, f"rank {1 - rank} never wants a batch"
            load = await seat.actor.load.remote()
            of_other = [s for s in load.sessions if s.trainer.startswith(f"rank {1 - rank},")]
            if any(session.num_waiting for session in of_other):
                return
            await asyncio.sleep(0.001)

    async def told(self):
        return self.order


def test_turns_go_round_however_many_tasks_one_has_waiting(cluster, four):
    two, num_batches = four[:2], LENGTH // 2
    with WorkerPool("of one", 1, ray_options=OPTIONS) as pool, settled(two):
        keeper = cluster.ray.get_actor("penstock-pool:of one", namespace="penstock")
        umpire = cluster.ray.remote(Umpire)
        umpire = umpire.options(name="umpire", namespace="penstock", num_cpus=0, max_concurrency=9)
        handle = umpire.remote(keeper, num_batches)
        for number, (rank, prefetch_factor) in enumerate(zip(two, (16, 1), strict=True)):
            options = of_pool(1, "of one", batch_size=1, prefetch_factor=prefetch_factor)
            options.update(rank=number, world_size=2, persistent_workers=True)
            rank.ask("open", dataset="takes turns", args=[number, "umpire"], **options)
        assert [len(taken) for taken in take_all(two)] == [num_batches] * 2
        order = cluster.ray.get(handle.told.remote())
        num_done = {trainer.name[:6]: trainer.num_done for trainer in pool.stats().trainers}
    cluster.ray.kill(handle)
    # From when the second has come until one has had all of its.
    last = min(len(order) - 1 - order[::-1].index(rank) for rank in (0, 1))
    both = order[order.index(1 - order[0]) : last + 1]
    ahead = list(itertools.accumulate(1 if rank == 0 else -1 for rank in both))
    assert max(ahead) - min(ahead) <= 1
    assert len(both) >= 2 * num_batches - 10
    assert num_done == {"rank 0": num_batches + 1, "rank 1": num_batches + 1}  # and the opening


class Gate:
    """Where a sample waits until the test opens it."""

    def __init__(self):
        import asyncio

        self._is_reached = asyncio.Event()
        self._is_open = asyncio.Event()

    async def reached(self):
        await self._is_reached.wait()

    async def passed(self):
        self._is_reached.set()
        await self._is_open.wait()

    async def open(self):
        self._is_open.set()

    async def shut(self):
        self._is_open.clear()


@contextlib.contextmanager
def gate(cluster, name):
    """A gate's handle; it is open once the block is left, also if that has failed."""
    options = {"name": name, "namespace": "penstock", "num_cpus": 0, "max_concurrency": 9}
    handle = cluster.ray.remote(Gate).options(**options).remote()
    try:
        yield handle
    finally:
        cluster.ray.get(handle.open.remote())


def test_who_waits_for_its_turn_ends_no_worker_and_is_told_whose_it_is(cluster, four):
    patient, slow, strict = three = four[:3]
    with (
        WorkerPool("of one", 1, ray_options=OPTIONS) as pool,
        settled(three),
        gate(cluster, "gate") as passage,
    ):
        options = {**of_pool(1, "of one"), "world_size": 3}
        patient.ask("open", dataset="noise", rank=0, timeout=3, on_error="skip", **options)
        strict.ask("open", dataset="noise", rank=2, timeout=6, **options)
        begun = take_all([patient, strict], 1)
        assert begun == [expected("noise", rank, 3)[:1] for rank in (0, 2)]
        at, _ = expected("noise", 1, 3)[0]
        slow.ask("open", dataset="gated", rank=1, args=[at[1:2], "gate"], **options)
        slow.tell("take")
        cluster.ray.get(passage.reached.remote(), timeout=PATIENCE_S)
        for rank in (patient, strict):
            rank.tell("take")
        with pytest.raises(
            RankError, match=r"WorkerTimeout: .*\n.* waiting for its turn: .*rank 1"
        ):
            strict.answer()

        def has_waited():
            stats = pool.stats()
            return any(t.name.startswith("rank 0,") and t.waited_s > 9 for t in stats.trainers)

        assert _becomes(has_waited, PATIENCE_S)
        cluster.ray.get(passage.open.remote())
        assert begun[0] + patient.answer() == expected("noise", 0, 3)
        assert slow.answer() == expected("noise", 1, 3)
        assert patient.ask("failed") == []
        assert pool.stats().workers[0].num_deaths == 0


def test_who_is_stuck_itself_ends_the_worker_and_nothing_is_counted_against_others(ranks, pool):
    two = ranks[:2]
    bad = _bad_sample(1, 2, at_batch=6)
    two[0].ask("open", dataset="noise", rank=0, world_size=2, **of_pool())
    options = of_pool(rank=1, world_size=2, args=[bad], timeout=5, on_error="skip")
    two[1].ask("open", dataset="stuck", **options)
    taken = take_all(two)
    assert taken[0] == expected("noise", 0, 2)
    whole = expected("noise", 1, 2)
    assert taken[1][:6] + taken[1][7:] == whole[:6] + whole[7:]
    assert two[1].ask("failed") == [bad]
    assert sum(worker.num_deaths for worker in pool.stats().workers) == 2


@contextlib.contextmanager
def pool_with_lease(cluster, lease_s):
    link = start_keeper(cluster.ray, "short", NUM_WORKERS, OPTIONS, lease_s=lease_s)
    try:
        yield WorkerPool.find("short")
    finally:
        link.close()


def test_what_a_dead_trainer_had_is_dropped(cluster, four):
    with pool_with_lease(cluster, 2.0) as pool, processes(cluster, 1) as (victim,):
        two = [four[0], victim]
        open_all(two, **of_pool(name="short"))
        take_all(two, 1)
        victim.kill()
        four[0].ask("close")

        def is_empty():
            stats = pool.stats()
            of_workers = sum(worker.num_trainers for worker in stats.workers)
            return (len(stats.trainers), of_workers, stats.num_shared) == (0, 0, 0)

        assert _becomes(is_empty, PATIENCE_S)


def test_a_call_that_waits_for_the_end_of_a_dead_trainer_does_not_stay_for_ever(cluster):
    with pool_with_lease(cluster, 2.0) as pool:
        keeper = cluster.ray.get_actor("penstock-pool:short", namespace="penstock")
        seat = cluster.ray.get(keeper.seats.remote())[0]
        call = seat.actor.until_end.remote("rank 0, dead before it could open/1")
        of_pool = seat.actor.until_end.remote(None)
        assert pool.stats().num_puts == 0  # the keeper looks after its workers from here on
        ended, waits = cluster.ray.wait([call, of_pool], num_returns=1, timeout=PATIENCE_S)
        assert (ended, waits) == ([call], [of_pool])
        assert _becomes(lambda: all(w.is_alive for w in pool.stats().workers), PATIENCE_S)


def test_who_waits_for_what_another_brings_asks_as_often_as_it_takes(cluster, monkeypatch):
    monkeypatch.setattr("penstock.engine.backends.ray.pool._ASK_AGAIN_S", 0.01)
    parcel = Parcel(b"a pickle", [np.ones(TABLE_BYTES, np.uint8)])
    _, pieces = split_parcel(parcel)
    with pool_with_lease(cluster, 600.0):
        crew = PoolCrew(cluster.ray, RayOptions(pool="short"), 1, "second")
        ask = crew._link.ask
        assert ask("hold", "first", [piece.digest for piece in pieces], 0.0) == [[], []]
        answers = []

        def ask_again(method, *args):
            if len(answers) in (2, 4):
                piece = pieces[len(answers) // 2 - 1]
                ask("keep", "first", piece.digest, piece.num_bytes, piece.content)
            answers.append(ask(method, *args))
            return answers[-1]

        monkeypatch.setattr(crew._link, "ask", ask_again)
        shared = crew.share(parcel)
        assert [len(answer) for answer in answers] == [2, 2, 2, 1, 1]
        assert answers[:2] == [[None, None]] * 2
        (_, found) = cluster.ray.get(shared.pieces)
        assert (found == parcel.buffers[0]).all()
        answers.clear()
        del shared, found


@pytest.mark.parametrize("leaves", [True, False])
def test_what_a_dead_trainer_was_to_bring_others_bring_in_one_go(cluster, leaves):
    """They wait a tenth of the lease for a word of it, and not as long for each piece."""
    digests = [f"piece {k}" for k in range(12)]
    with pool_with_lease(cluster, 600.0 if leaves else 20.0):
        keeper = cluster.ray.get_actor("penstock-pool:short", namespace="penstock")

        def ask(method, *args):
            return cluster.ray.get(getattr(keeper, method).remote(*args), timeout=PATIENCE_S)

        assert ask("hold", "first", digests, 0.0) == [[]] * 12
        assert ask("hold", "first", digests, 0.0) == [[]] * 12  # Ray has sent it once more
        ask("keep", "first", digests[0], 1, b"x")
        began = time.monotonic()
        second = keeper.hold.remote("second", digests, PATIENCE_S)
        if leaves:
            assert cluster.ray.wait([second], timeout=0.2) == ([], [second])
            ask("leave", "first")
        held = cluster.ray.get(second, timeout=PATIENCE_S)
        assert [len(found) for found in held] == [1] + [0] * 11
        assert time.monotonic() - began < 12.0
        del held


def test_a_trainer_that_was_forgotten_is_known_again_with_the_places_that_it_had(cluster, four):
    two = four[:2]
    with pool_with_lease(cluster, 8.0) as pool, settled(two):
        # A stream has a share in each worker, so a rank gets nowhere without both.
        open_all(two, "stream", **of_pool(name="short"))
        taken = take_all(two, 3)
        assert _becomes(lambda: not pool.stats().trainers, PATIENCE_S)
        num_deaths = kill_worker(pool, 1)
        taken = [one + more for one, more in zip(taken, take_all(two, 8), strict=True)]
        assert [trainer.workers for trainer in pool.stats().trainers] == [(0, 1)] * 2
        assert [worker.num_deaths for worker in pool.stats().workers] == [0, num_deaths]
        # Both places have still an actor each, and not one of them both numbers.
        kill_worker(pool, 0)
        ends = take_all(two)
        for rank in range(2):
            assert taken[rank] + ends[rank] == expected("stream", rank, 2)


@pytest.mark.parametrize("dataset", ["noise", pytest.param("stream", marks=pytest.mark.slow)])
def test_a_trainer_that_was_forgotten_goes_on_where_it_was(cluster, four, dataset):
    two = four[:2]
    with pool_with_lease(cluster, 1.0) as pool, settled(two):
        open_all(two, dataset, **of_pool(name="short", torchs=True))
        begun = take_all(two, 5)
        assert _becomes(lambda: not any(w.num_trainers for w in pool.stats().workers), PATIENCE_S)
        assert _becomes(lambda: not pool.stats().trainers, PATIENCE_S)
        ends = take_all(two)
    for rank in range(2):
        assert begun[rank] + ends[rank] == expected(dataset, rank, 2)


def test_a_loader_cannot_have_more_workers_than_the_pool(pool):
    loader = loader_of("noise", 0, 1, **of_pool(NUM_WORKERS + 1))
    with pytest.raises(ConfigError, match=r"'test' has 2 workers, got num_workers=3"):
        next(iter(loader))


def test_a_pool_that_is_not_there_is_named_with_those_that_are(pool):
    loader = loader_of("noise", 0, 1, **of_pool(name="elsewhere"))
    with pytest.raises(ConfigError, match=r"no pool 'elsewhere' \(it has 'test'\)"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="no pool 'elsewhere'"):
        WorkerPool.find("elsewhere")


def test_only_seeded_loaders_share_workers():
    torch_loader = pytest.importorskip("penstock.torch").DataLoader
    with pytest.raises(ConfigError, match="give seed="):
        torch_loader(range(8), **of_pool())


def test_no_loader_hires_workers_of_a_pool():
    with pytest.raises(ConfigError, match='num_workers="auto"'):
        Loader(range(8), **of_pool("auto"))


def test_a_pool_is_found_by_name_and_has_to_be_the_same(pool):
    again = WorkerPool(POOL, NUM_WORKERS, ray_options=OPTIONS)
    found = WorkerPool.find(POOL)
    assert again.num_workers == found.num_workers == NUM_WORKERS
    assert again.name == found.name == POOL
    with pytest.raises(ConfigError, match="with num_workers=2, got num_workers=3"):
        WorkerPool(POOL, 3, ray_options=OPTIONS)
    secret = {**OPTIONS, "runtime_env": {"env_vars": {"TOKEN": "hunter2"}}}
    with pytest.raises(ConfigError, match="another runtime_env") as caught:
        WorkerPool(POOL, NUM_WORKERS, ray_options=secret)
    assert "hunter2" not in str(caught.value)


def test_a_closed_pool_says_so(pool):
    loader = loader_of("noise", 0, 1, **of_pool(persistent_workers=True))
    iterator = iter(loader)
    assert told(next(iterator)) == expected("noise", 0, 1)[0]
    assert _becomes(lambda: are_set_up(pool, 1), PATIENCE_S)
    pool.close()
    pool.close()
    assert repr(pool) == "<WorkerPool 'test', 2 workers, closed>"
    with pytest.raises(WorkerDied, match="the pool 'test' was closed"):
        list(iterator)
    with pytest.raises(WorkerDied, match="the pool 'test' was closed"):
        pool.stats()


STARTS_A_POOL = """
import sys, ray
from penstock.ray import WorkerPool
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
WorkerPool("outlives", 1, ray_options={"num_cpus": 0})
"""


@pytest.mark.slow
def test_a_pool_outlives_the_program_that_started_it(cluster):
    subprocess.run([sys.executable, "-c", STARTS_A_POOL, cluster.address], check=True, cwd=ROOT)
    with WorkerPool.find("outlives") as pool:
        taken = list(map(told, loader_of("noise", 0, 1, **of_pool(1, pool.name))))
        assert taken == expected("noise", 0, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("", 2), ConfigError, "name"),
        ((3, 2), TypeError, "name"),
        (("x", 0), ConfigError, "at least 1"),
        (("x", "auto"), TypeError, "int"),
    ],
)
def test_what_cannot_be_a_pool_is_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        WorkerPool(*arguments)


def test_a_pool_is_not_made_of_another():
    with pytest.raises(ConfigError, match="leave out"):
        WorkerPool("x", 2, ray_options={"pool": "y"})
