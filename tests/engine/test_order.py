# SPDX-License-Identifier: Apache-2.0
"""The order machine under any interleaving of events."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.order import (
    Deliver,
    Draw,
    Fail,
    Finish,
    IndicesDrawn,
    IndicesExhausted,
    Order,
    Requested,
    Submit,
    TaskDone,
    WorkerDied,
    WorkerExhausted,
)


class World:
    """Workers, a sampler and a user around one Order; `choose` decides who moves next."""

    def __init__(
        self, choose, *, num_workers, lookahead, in_order, num_steps, shares=None, **beginning
    ):
        self.choose = choose
        self.order = Order(num_workers, lookahead, in_order=in_order, **beginning)
        self.lookahead = lookahead
        self.to_draw = deque(range(num_steps)) if num_steps is not None else None
        self.num_drawn = 0
        self.queues = [deque() for _ in range(num_workers)]
        self.shares = list(shares) if shares is not None else None  # batches each worker can make
        self.submitted = {}  # step -> (worker, indices)
        self.loads = {}  # step -> tasks that each worker had when it was submitted
        self.delivered = []
        self.finished = False
        self.failed = None
        self.dead = set()
        self.carry_out(self.order.start())

    @classmethod
    def drawn(cls, data, **options):
        """A world in which hypothesis decides who moves."""
        return cls(lambda movers: data.draw(st.sampled_from(movers)), **options)

    def carry_out(self, decisions):
        pending = deque(decisions)
        while pending:
            decision = pending.popleft()
            match decision:
                case Draw():
                    pending.extendleft(reversed(self.order.handle(self.draw())))
                case Submit(worker_id, step, indices):
                    assert step not in self.submitted
                    self.submitted[step] = (worker_id, indices)
                    self.loads[step] = [len(queue) for queue in self.queues]
                    self.queues[worker_id].append(step)
                case Deliver(step, worker_id, outcome):
                    assert worker_id == self.submitted[step][0]
                    assert self.is_waiting, "delivered without a request"
                    self.is_waiting = False
                    self.delivered.append((step, outcome))
                case Finish():
                    assert self.is_waiting
                    self.is_waiting = False
                    self.finished = True
                case Fail():
                    self.failed = decision

    is_waiting = False

    def draw(self):
        if self.to_draw is None:
            self.num_drawn += 1
            return IndicesDrawn(None)
        if not self.to_draw:
            return IndicesExhausted()
        self.num_drawn += 1
        return IndicesDrawn(self.to_draw.popleft())

    def request(self):
        self.is_waiting = True
        self.carry_out(self.order.handle(Requested()))

    def movable_workers(self):
        return [w for w, queue in enumerate(self.queues) if queue and w not in self.dead]

    def move(self, worker_id):
        step = self.queues[worker_id].popleft()
        if self.shares is None:
            self.carry_out(self.order.handle(TaskDone(worker_id, step, ("made", step))))
        elif self.shares[worker_id] > 0:
            self.shares[worker_id] -= 1
            outcome = (worker_id, self.shares[worker_id])
            self.carry_out(self.order.handle(TaskDone(worker_id, step, outcome)))
        elif self.shares[worker_id] == 0:
            self.shares[worker_id] = -1
            self.carry_out(self.order.handle(WorkerExhausted(worker_id, step)))
        # -1: a worker whose share has ended answers nothing more

    def run(self, *, kill_after=None):
        """Move one of the parties at a time until the epoch is over; fails if nobody can move."""
        for moves in range(100_000):
            if self.finished or self.failed:
                return
            if kill_after is not None and moves == kill_after[0]:
                self.dead.add(kill_after[1])
                self.carry_out(self.order.handle(WorkerDied(kill_after[1], "killed")))
                continue
            movers = self.movable_workers()
            if not self.is_waiting:
                movers = [*movers, "user"]
            if not movers and kill_after is not None:
                self.carry_out(self.order.handle(WorkerDied(kill_after[1], "killed")))
                continue
            assert movers, "deadlock: the user waits and no worker has anything to do"
            mover = self.choose(movers)
            if mover == "user":
                self.request()
            else:
                self.move(mover)
        raise AssertionError("the epoch does not end")


worlds = {
    "num_workers": st.integers(1, 5),
    "prefetch": st.integers(1, 4),
    "in_order": st.booleans(),
}


@given(data=st.data(), num_steps=st.integers(0, 40), **worlds)
def test_every_step_is_delivered_once_and_in_order_whatever_happens_when(
    data, num_steps, num_workers, prefetch, in_order
):
    world = World.drawn(
        data,
        num_workers=num_workers,
        lookahead=num_workers * prefetch,
        in_order=in_order,
        num_steps=num_steps,
    )
    world.run()
    steps = [step for step, _ in world.delivered]
    assert sorted(steps) == list(range(num_steps))
    assert all(outcome == ("made", step) for step, outcome in world.delivered)
    if in_order:
        assert steps == list(range(num_steps))
    assert world.order.num_pending == 0


@given(
    data=st.data(),
    first=st.integers(0, 10),
    rest=st.integers(0, 20),
    any_worker=st.booleans(),
    **worlds,
)
def test_an_epoch_that_is_resumed_makes_the_steps_that_were_not_given_and_no_other(
    data, first, rest, any_worker, num_workers, prefetch, in_order
):
    steps = range(first, first + rest)
    skipped = data.draw(st.sets(st.sampled_from(steps))) if rest else set()
    world = World.drawn(
        data,
        num_workers=num_workers,
        lookahead=data.draw(st.sampled_from([num_workers * prefetch, 0]))
        if num_workers == 1
        else num_workers * prefetch,
        in_order=in_order,
        num_steps=rest,
        any_worker=any_worker,
        first_step=first,
        first_worker=first % num_workers,
        skipped=skipped,
    )
    world.run()
    wanted = [step for step in steps if step not in skipped]
    delivered = [step for step, _ in world.delivered]
    assert (delivered if in_order else sorted(delivered)) == wanted
    # Indices are counted from 0 here: those of step s are number s - first.
    assert all(indices == step - first for step, (_, indices) in world.submitted.items())


@given(data=st.data(), num_steps=st.integers(0, 40), **worlds)
def test_where_any_worker_will_do_the_one_with_the_least_to_do_gets_the_step(
    data, num_steps, num_workers, prefetch, in_order
):
    world = World.drawn(
        data,
        num_workers=num_workers,
        lookahead=num_workers * prefetch,
        in_order=in_order,
        num_steps=num_steps,
        any_worker=True,
    )
    world.run()
    for step, (worker_id, _) in world.submitted.items():
        assert world.loads[step][worker_id] == min(world.loads[step])
    assert sorted(step for step, _ in world.delivered) == list(range(num_steps))


@given(num_steps=st.integers(0, 10))
def test_without_lookahead_each_step_is_drawn_when_it_is_asked_for(num_steps):
    world = World(
        lambda movers: movers[0], num_workers=1, lookahead=0, in_order=True, num_steps=num_steps
    )
    assert world.num_drawn == 0
    for asked in range(1, num_steps + 1):
        world.request()
        assert world.num_drawn == asked
        world.move(0)
        assert len(world.delivered) == asked
    world.request()
    assert world.finished
    world.request()  # and it stays over
    assert world.finished


@given(data=st.data(), num_steps=st.integers(0, 40), **worlds)
def test_steps_go_round_the_workers_in_turn_and_no_more_than_the_lookahead_are_under_way(
    data, num_steps, num_workers, prefetch, in_order
):
    lookahead = num_workers * prefetch

    def choose(movers):
        assert world.order.num_pending <= lookahead
        assert world.num_drawn <= len(world.delivered) + lookahead
        return data.draw(st.sampled_from(movers))

    world = World(
        choose,
        num_workers=num_workers,
        lookahead=lookahead,
        in_order=in_order,
        num_steps=num_steps,
    )
    world.run()
    if in_order:
        assert all(worker == step % num_workers for step, (worker, _) in world.submitted.items())
    assert [indices for _, (_, indices) in sorted(world.submitted.items())] == list(
        range(num_steps)
    )


@given(data=st.data(), **worlds)
def test_shares_of_an_iterable_end_at_different_times_and_nothing_is_lost(
    data, num_workers, prefetch, in_order
):
    shares = data.draw(
        st.lists(st.integers(0, 9), min_size=num_workers, max_size=num_workers), label="shares"
    )
    world = World.drawn(
        data,
        num_workers=num_workers,
        lookahead=num_workers * prefetch,
        in_order=in_order,
        num_steps=None,
        shares=shares,
    )
    world.run()
    made = sorted((w, left) for w, share in enumerate(shares) for left in range(share))
    assert sorted(outcome for _, outcome in world.delivered) == made
    if in_order:
        steps = [step for step, _ in world.delivered]
        assert all(a < b for a, b in pairwise(steps))


@given(data=st.data(), num_steps=st.integers(1, 30), moves=st.integers(0, 60), **worlds)
def test_a_death_fails_the_epoch_after_what_is_ready_and_never_hangs_it(
    data, num_steps, moves, num_workers, prefetch, in_order
):
    victim = data.draw(st.integers(0, num_workers - 1))
    world = World.drawn(
        data,
        num_workers=num_workers,
        lookahead=num_workers * prefetch,
        in_order=in_order,
        num_steps=num_steps,
    )
    world.run(kill_after=(moves, victim))
    steps = [step for step, _ in world.delivered]
    assert len(set(steps)) == len(steps)
    if in_order:
        assert steps == list(range(len(steps)))
    if world.failed:
        assert world.failed == Fail(victim, "killed")
    else:
        assert len(steps) == num_steps


def test_the_steps_a_dead_worker_held_can_be_named():
    world = World(lambda m: m[0], num_workers=2, lookahead=4, in_order=True, num_steps=10)
    world.move(0)
    assert world.order.steps_of(0) == [2]
    assert world.order.steps_of(1) == [1, 3]
