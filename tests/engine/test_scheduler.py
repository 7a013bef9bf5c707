# SPDX-License-Identifier: Apache-2.0
"""The scheduler under any interleaving of events."""

from __future__ import annotations

from collections import Counter, deque
from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.scheduler import (
    AddWorker,
    Deliver,
    Draw,
    Fail,
    Finish,
    Quarantine,
    RemoveWorker,
    Respawn,
    Scheduler,
    Submit,
    TaskDone,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)


class World:
    """Workers, a sampler and a user around one Scheduler; `choose` decides who moves next."""

    def __init__(
        self,
        choose,
        *,
        num_workers,
        lookahead,
        in_order,
        num_steps,
        shards=None,
        skipped=(),
        **beginning,
    ):
        self.choose = choose
        self.scheduler = Scheduler(num_workers, lookahead, in_order=in_order, **beginning)
        self.lookahead, self.in_order = lookahead, in_order
        self.first_step = beginning.get("first_step", 0)
        self.to_draw = None
        if num_steps is not None:
            steps = enumerate(range(num_steps), self.first_step)
            self.to_draw = deque(step for step in steps if step[0] not in skipped)
        self.num_drawn = 0
        self.queues = [deque() for _ in range(num_workers)]
        self.shards = list(shards) if shards is not None else None  # batches each worker can make
        self.submitted = {}  # step -> (worker, indices)
        self.loads = {}  # step -> tasks that each worker had when it was submitted
        self.delivered = []
        self.finished = False
        self.failed = None
        self.dead = set()
        self.deadly = {}  # step -> sample of it that ends workers; None: the batch as a whole does
        self.quarantined = []
        self.num_respawns = 0
        self.num_counted = 0  # of the respawns: after deaths that count
        self.to_submit_again = {}  # worker -> steps that its predecessor held
        self.is_alone = {}  # step -> whether its samples are tried one by one
        self.known_at_once = set()  # steps whose worker notes each sample anyway
        self.may_have_answered = False  # whether a death may take answers along with it
        self.present = set(range(num_workers))
        self.starting = set(beginning.get("starting", ()))
        self.num_abandoned = 0
        self.survives = False  # whether every death is survived
        self.num_workers = num_workers
        self.prefetch = None  # set by who changes the workers
        self.carry_out(self.scheduler.refill())

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
                    pending.extendleft(reversed(self.draw()))
                case AddWorker(worker_id):
                    assert worker_id not in self.present, "added twice"
                    assert worker_id < self.num_workers
                    self.present.add(worker_id)
                    self.starting.add(worker_id)
                    while len(self.queues) <= worker_id:
                        self.queues.append(deque())
                case RemoveWorker(worker_id, ""):
                    assert worker_id >= self.num_workers, "one that is to stay was removed"
                    assert not self.queues[worker_id], "removed with work in its hands"
                    self.present.remove(worker_id)
                    self.starting.discard(worker_id)
                case RemoveWorker(worker_id, reason):
                    assert reason == "killed"
                    assert worker_id in self.starting, "given up though it was ready"
                    assert not self.queues[worker_id]
                    self.starting.remove(worker_id)
                    self.present.remove(worker_id)
                    self.dead.remove(worker_id)
                    self.num_abandoned += 1
                case Respawn(worker_id, _):
                    assert worker_id in self.dead
                    self.dead.remove(worker_id)
                    self.num_respawns += 1
                case Quarantine(sample, _):
                    self.quarantined.append(sample)
                case Submit(worker_id, step, indices, alone) if step in self.submitted:
                    assert worker_id not in self.dead
                    assert self.submitted[step] == (worker_id, indices)
                    assert self.to_submit_again[worker_id].pop(0) == step
                    self.queues[worker_id].append(step)
                    self.is_alone[step] = alone
                case Submit(worker_id, step, indices, alone):
                    assert not alone
                    assert worker_id in self.present
                    assert worker_id not in self.dead or not self.survives, "a step for the dead"
                    assert worker_id < self.num_workers, "a new step for a worker that is to leave"
                    assert worker_id not in self.starting, "a step that waits for a start"
                    self.submitted[step] = (worker_id, indices)
                    self.loads[step] = [len(queue) for queue in self.queues]
                    self.queues[worker_id].append(step)
                case Deliver(step, worker_id, outcome, indices):
                    assert self.shards is not None or indices == self.submitted[step][1]
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

    def change_workers(self, num_workers, prefetch):
        self.num_workers, self.lookahead = num_workers, num_workers * prefetch
        self.carry_out(self.scheduler.change_workers(num_workers, self.lookahead))

    def get_ready(self, worker_id):
        self.starting.remove(worker_id)
        self.carry_out(self.scheduler.handle(WorkerReady(worker_id)))

    is_waiting = False

    def draw(self):
        if self.to_draw is None:
            self.num_drawn += 1
            return self.scheduler.drawn(self.num_drawn - 1, None)
        if not self.to_draw:
            return self.scheduler.drained()
        self.num_drawn += 1
        return self.scheduler.drawn(*self.to_draw.popleft())

    def request(self):
        self.is_waiting = True
        self.carry_out(self.scheduler.request())

    def check_all_delivered(self, num_steps):
        steps = [step for step, _ in self.delivered]
        assert (steps if self.in_order else sorted(steps)) == list(range(num_steps))

    def movable_workers(self):
        return [w for w, queue in enumerate(self.queues) if queue and w not in self.dead]

    def die(self, worker_id, **how):
        """The worker ends now; it may have been doing its next task, or nothing."""
        self.dead.add(worker_id)
        self.to_submit_again[worker_id] = list(self.queues[worker_id])
        self.queues[worker_id].clear()
        decisions = self.scheduler.handle(WorkerLost(worker_id, "killed", **how))
        kinds = [type(decision) for decision in decisions]
        # A task goes out again only when it is known which samples it must not make, and by whom.
        order = [RemoveWorker, Quarantine, Respawn, Submit, Deliver, Fail]
        assert sorted(kinds, key=order.index) == kinds
        self.carry_out(decisions)
        if worker_id not in self.dead:
            self.num_counted += how.get("counts", True)
            assert not self.to_submit_again[worker_id], "a task of the dead worker was lost"

    def is_deadly(self, step):
        return step in self.deadly and (step, self.deadly[step]) not in self.quarantined

    def sent(self, worker_id):
        """What a worker has been sent: nothing goes beside a task whose samples are tried alone."""
        sent = []
        for step in self.queues[worker_id]:
            if self.is_alone.get(step, False):
                return sent or [step]
            sent.append(step)
        return sent

    def move(self, worker_id):
        step = self.queues[worker_id][0]
        if self.may_have_answered:
            # It has made these, and ends before their answers have left it.
            sent = self.sent(worker_id)
            k = next((k for k, s in enumerate(sent) if self.is_deadly(s)), 0)
            if k and self.choose([False, True]):
                self.die(worker_id, step=sent[0], or_steps=tuple(sent[1:]))
                return
        if self.is_deadly(step):
            sample = self.deadly[step]
            alone = step in self.known_at_once or self.is_alone.get(step, False)
            known = (step, sample) if alone and sample is not None else None
            others = self.sent(worker_id)[1:] if self.may_have_answered and known is None else ()
            self.die(worker_id, step=step, sample=known, or_steps=tuple(others))
            return
        self.queues[worker_id].popleft()
        if self.shards is None:
            self.carry_out(self.scheduler.handle(TaskDone(worker_id, step, ("made", step))))
        elif self.shards[worker_id] > 0:
            self.shards[worker_id] -= 1
            outcome = (worker_id, self.shards[worker_id])
            self.carry_out(self.scheduler.handle(TaskDone(worker_id, step, outcome)))
        elif self.shards[worker_id] == 0:
            self.shards[worker_id] = -1
            self.carry_out(self.scheduler.handle(WorkerExhausted(worker_id, step)))
        # -1: a worker whose shard is exhausted answers nothing more

    def run(self, *, kill_after=None):
        """Move one of the parties at a time until the epoch is over; fails if no one can move."""
        for moves in range(100_000):
            if self.finished or self.failed:
                return
            if kill_after is not None and moves == kill_after[0]:
                self.dead.add(kill_after[1])
                self.carry_out(self.scheduler.handle(WorkerLost(kill_after[1], "killed")))
                continue
            movers = self.movable_workers()
            if not self.is_waiting:
                movers = [*movers, "user"]
            if not movers and kill_after is not None:
                self.carry_out(self.scheduler.handle(WorkerLost(kill_after[1], "killed")))
                continue
            assert movers, "deadlock: the user waits and no worker has anything to do"
            mover = self.choose(movers)
            if mover == "user":
                self.request()
            else:
                self.move(mover)
        raise AssertionError("the epoch does not end")


def _world(num_workers, prefetch, in_order):
    lookahead = num_workers * prefetch
    return {"num_workers": num_workers, "lookahead": lookahead, "in_order": in_order}


def _shards(how):
    return st.lists(st.integers(0, 9), min_size=how["num_workers"], max_size=how["num_workers"])


worlds = {"how": st.builds(_world, st.integers(1, 5), st.integers(1, 4), st.booleans())}


@given(
    data=st.data(),
    first=st.integers(0, 10),
    rest=st.integers(0, 20),
    any_worker=st.booleans(),
    **worlds,
)
def test_every_step_that_was_not_given_is_delivered_once_and_in_order_whatever_happens_when(
    data, first, rest, any_worker, how
):
    steps = range(first, first + rest)
    skipped = data.draw(st.sets(st.sampled_from(steps))) if rest else set()
    num_workers, lookahead = how["num_workers"], how["lookahead"]

    def choose(movers):
        assert len(world.scheduler._tasks) <= lookahead
        assert world.num_drawn <= len(world.delivered) + lookahead
        return data.draw(st.sampled_from(movers))

    world = World(
        choose,
        **how,
        num_steps=rest,
        any_worker=any_worker,
        first_step=first,
        first_worker=first % num_workers,
        skipped=skipped,
    )
    world.run()
    wanted = [step for step in steps if step not in skipped]
    delivered = [step for step, _ in world.delivered]
    assert (delivered if how["in_order"] else sorted(delivered)) == wanted
    assert all(outcome == ("made", step) for step, outcome in world.delivered)
    assert world.scheduler._tasks == {}
    # Indices are counted from 0 here: those of step s are number s - first.
    assert all(indices == step - first for step, (_, indices) in world.submitted.items())
    for turn, (step, (worker_id, _)) in enumerate(world.submitted.items(), first):
        if any_worker:  # the one with the least to do gets it
            assert world.loads[step][worker_id] == min(world.loads[step])
        elif how["in_order"]:
            assert worker_id == turn % num_workers


def test_an_epoch_that_is_over_stays_over():
    world = World(lambda m: m[0], num_workers=1, lookahead=1, in_order=True, num_steps=0)
    for _ in range(2):
        world.finished = False
        world.request()
        assert world.finished


@given(data=st.data(), **worlds)
def test_shares_of_an_iterable_end_at_different_times_and_nothing_is_lost(data, how):
    shards = data.draw(_shards(how))
    world = World.drawn(data, **how, num_steps=None, shards=shards)
    world.run()
    made = sorted((w, left) for w, shard in enumerate(shards) for left in range(shard))
    assert sorted(outcome for _, outcome in world.delivered) == made
    if how["in_order"]:
        steps = [step for step, _ in world.delivered]
        assert all(a < b for a, b in pairwise(steps))


@given(data=st.data(), num_steps=st.integers(1, 30), moves=st.integers(0, 60), **worlds)
def test_a_death_fails_the_epoch_after_what_is_ready_and_never_hangs_it(
    data, num_steps, moves, how
):
    victim = data.draw(st.integers(0, how["num_workers"] - 1))
    world = World.drawn(data, **how, num_steps=num_steps)
    world.run(kill_after=(moves, victim))
    steps = [step for step, _ in world.delivered]
    assert len(set(steps)) == len(steps)
    if how["in_order"]:
        assert steps == list(range(len(steps)))
    if world.failed:
        assert world.failed == Fail(victim, "killed")
    else:
        assert len(steps) == num_steps


def test_the_steps_a_dead_worker_held_can_be_named():
    world = World(lambda m: m[0], num_workers=2, lookahead=4, in_order=True, num_steps=10)
    world.move(0)
    assert world.scheduler.steps_of(0) == [2]
    assert world.scheduler.steps_of(1) == [1, 3]


@given(data=st.data(), num_steps=st.integers(0, 30), any_worker=st.booleans(), **worlds)
def test_workers_may_die_at_any_moment_and_every_step_is_delivered_once(
    data, num_steps, any_worker, how
):
    """Deaths that no task is to blame for: none is lost, none comes twice, the order holds."""
    deaths_left = data.draw(st.integers(0, 12), label="deaths")

    def choose(movers):
        nonlocal deaths_left
        worker_id = data.draw(st.sampled_from([None, None, *range(how["num_workers"])]))
        if deaths_left and worker_id is not None:
            deaths_left -= 1
            world.die(worker_id)
            movers = [*world.movable_workers(), *(["user"] if "user" in movers else [])]
        return data.draw(st.sampled_from(movers))

    world = World(
        choose,
        **how,
        num_steps=num_steps,
        any_worker=any_worker,
        max_respawns=12,
        can_quarantine=data.draw(st.booleans()),
    )
    world.run()
    assert world.failed is None
    world.check_all_delivered(num_steps)
    assert world.quarantined == []
    assert len(world.scheduler._tasks) == 0


@given(data=st.data(), num_steps=st.integers(1, 30), **worlds)
def test_samples_that_kill_are_quarantined_at_the_second_death_and_nothing_else_is(
    data, num_steps, how
):
    """Whether the sample is known at once, or only the batch is, and its samples are tried."""
    world = World.drawn(data, **how, num_steps=num_steps, max_respawns=100, can_quarantine=True)
    steps_that_kill = data.draw(st.sets(st.sampled_from(range(num_steps)), max_size=4))
    world.deadly = {step: data.draw(st.integers(0, 7)) for step in steps_that_kill}
    world.known_at_once = data.draw(st.sets(st.sampled_from(range(num_steps))))
    world.run()
    assert world.failed is None
    world.check_all_delivered(num_steps)
    assert sorted(world.quarantined) == sorted(world.deadly.items())
    assert world.num_respawns == 2 * len(world.deadly)


@given(
    data=st.data(),
    num_steps=st.integers(1, 30),
    max_respawns=st.integers(0, 6),
    can_quarantine=st.booleans(),
    **worlds,
)
def test_an_epoch_fails_with_the_first_death_that_it_may_not_survive(
    data, num_steps, max_respawns, can_quarantine, how
):
    """Respawns are spent; or a sample is to blame, and may not be left out."""
    world = World.drawn(
        data,
        **how,
        num_steps=num_steps,
        max_respawns=max_respawns,
        can_quarantine=can_quarantine,
    )
    steps_that_kill = data.draw(st.sets(st.sampled_from(range(num_steps)), min_size=1, max_size=4))
    world.deadly = dict.fromkeys(steps_that_kill, 0)
    world.run()
    steps = [step for step, _ in world.delivered]
    assert len(set(steps)) == len(steps)
    assert world.num_respawns <= max_respawns
    survives = can_quarantine and max_respawns >= 2 * len(world.deadly)
    assert (world.failed is None) == survives
    if survives:
        assert len(steps) == num_steps
    else:
        assert not world.deadly.keys() & set(steps) - {s for s, _ in world.quarantined}
        if how["in_order"]:
            assert steps == list(range(len(steps)))


@given(data=st.data(), num_steps=st.integers(1, 12), limit=st.integers(2, 3), **worlds)
def test_a_batch_that_kills_though_each_of_its_samples_passes_ends_the_epoch(
    data, num_steps, limit, how
):
    world = World.drawn(data, **how, num_steps=num_steps, max_respawns=100, can_quarantine=True)
    victim = data.draw(st.sampled_from(range(num_steps)))
    world.deadly = {victim: None}
    world.run()
    assert world.failed
    assert world.num_respawns == 1
    assert world.quarantined == []
    assert victim not in dict(world.delivered)


def test_a_worker_killed_from_outside_thrice_over_one_sample_has_it_quarantined_not_before():
    world = World(
        lambda m: m[0],
        num_workers=1,
        lookahead=2,
        in_order=True,
        num_steps=3,
        max_respawns=5,
        can_quarantine=True,
    )
    for deaths in range(1, 4):
        world.die(0, step=0, sample=7, limit=3)
        assert world.quarantined == ([7] if deaths == 3 else [])
    assert list(world.queues[0]) == [0, 1]


@given(data=st.data(), deaths=st.integers(0, 6), **worlds)
def test_shares_of_an_iterable_go_on_with_the_worker_that_takes_the_place(data, deaths, how):
    shards = data.draw(_shards(how))
    left = deaths

    def choose(movers):
        nonlocal left
        worker_id = data.draw(st.sampled_from([None, *range(how["num_workers"])]))
        if left and worker_id is not None and worker_id not in world.dead:
            left -= 1
            if world.shards[worker_id] < 0:
                # It had noted that its shard is exhausted: no one takes its place, nor misses it.
                before = world.num_respawns
                world.die(worker_id)
                assert world.num_respawns == before
            else:
                world.die(worker_id)
            movers = [*world.movable_workers(), *(["user"] if "user" in movers else [])]
        return data.draw(st.sampled_from(movers))

    world = World(choose, **how, num_steps=None, shards=shards, max_respawns=6)
    world.run()
    assert world.failed is None
    made = sorted((w, left) for w, shard in enumerate(shards) for left in range(shard))
    assert sorted(outcome for _, outcome in world.delivered) == made


def test_after_the_first_death_that_is_too_many_nobody_is_replaced_and_it_is_the_one_told():
    world = World(
        lambda m: m[0], num_workers=2, lookahead=4, in_order=True, num_steps=9, max_respawns=1
    )
    world.die(0)
    assert world.num_respawns == 1
    world.die(1)
    world.die(0)
    assert world.num_respawns == 1
    world.request()
    assert world.failed == Fail(1, "killed")


def _deadly_samples(data, num_steps):
    """Steps with one sample each that ends workers; every step has samples 0 to 7."""
    steps = data.draw(st.sets(st.sampled_from(range(num_steps)), max_size=4), label="deadly")
    return {step: data.draw(st.integers(0, 7)) for step in steps}


@given(data=st.data(), num_steps=st.integers(1, 30), **worlds)
def test_a_worker_may_have_died_of_any_step_it_holds_and_only_the_deadly_sample_is_quarantined(
    data, num_steps, how
):
    """What it had made may have been lost with it; which step it was at is then not known."""
    world = World.drawn(data, **how, num_steps=num_steps, max_respawns=100, can_quarantine=True)
    world.deadly = _deadly_samples(data, num_steps)
    world.may_have_answered = True
    world.run()
    assert world.failed is None
    world.check_all_delivered(num_steps)
    assert sorted(world.quarantined) == sorted(world.deadly.items())
    # Each is met twice at most: in its batch, and by itself. One death may do for several batches.
    assert len(world.deadly) <= world.num_respawns <= 2 * len(world.deadly)


@given(
    data=st.data(),
    num_steps=st.integers(1, 30),
    max_respawns=st.integers(0, 8),
    may_have_answered=st.booleans(),
    **worlds,
)
def test_machines_may_go_at_any_moment_and_cost_no_respawn(
    data, num_steps, max_respawns, may_have_answered, how
):
    """Between deaths that count, and whether or not one of these has ended the epoch."""
    losses_left = data.draw(st.integers(0, 12), label="lost machines")
    num_lost = 0

    def choose(movers):
        nonlocal losses_left, num_lost
        worker_id = data.draw(st.sampled_from([None, None, *range(how["num_workers"])]))
        if movers == [False, True]:  # whether answers are lost; no one else moves in between
            return data.draw(st.booleans())
        if losses_left and worker_id is not None and worker_id not in world.dead:
            losses_left -= 1
            world.die(worker_id, counts=False)
            assert worker_id not in world.dead or world.scheduler._failure, "not survived"
            num_lost += worker_id not in world.dead
            movers = [*world.movable_workers(), *(["user"] if "user" in movers else [])]
        return data.draw(st.sampled_from(movers)) if movers else None

    world = World(
        choose,
        **how,
        num_steps=num_steps,
        max_respawns=max_respawns,
        can_quarantine=True,
    )
    world.deadly = _deadly_samples(data, num_steps)
    world.may_have_answered = may_have_answered
    world.run()
    assert world.num_counted <= max_respawns
    assert world.num_respawns == world.num_counted + num_lost
    assert set(world.quarantined) <= set(world.deadly.items()), "an innocent sample was quarantined"
    steps = [step for step, _ in world.delivered]
    assert len(set(steps)) == len(steps)
    assert {step for step in steps if step in world.deadly} <= {s for s, _ in world.quarantined}
    if max_respawns >= 2 * len(world.deadly):
        assert world.failed is None
    if world.failed is None:
        assert (steps if how["in_order"] else sorted(steps)) == list(range(num_steps))
        assert sorted(world.quarantined) == sorted(world.deadly.items())


@given(deaths=st.integers(1, 8), limit=st.integers(2, 6))
def test_deaths_of_unknown_cause_in_a_batch_end_the_epoch_at_the_limit_though_none_counts(
    deaths, limit
):
    """As in a pool, where no one knows whose sample it was: it cannot go on for ever."""
    world = World(lambda m: m[0], num_workers=1, lookahead=2, in_order=True, num_steps=2)
    for _ in range(deaths):
        if not world.dead:
            world.die(0, step=0, counts=False, limit=limit)
    assert world.num_respawns == min(deaths, limit - 1)
    assert world.num_counted == 0
    world.request()
    assert (world.failed is not None) == (deaths >= limit)


def test_of_several_steps_it_may_have_died_of_one_that_has_not_killed_before_is_suspected():
    """A batch that has killed twice ends the epoch, but not if it was another one this time."""
    options = {"num_workers": 1, "lookahead": 3, "in_order": True, "num_steps": 3}
    world = World(lambda m: m[0], max_respawns=9, can_quarantine=True, **options)
    world.die(0, step=0)
    assert [world.is_alone[step] for step in range(3)] == [True, False, False]
    world.die(0, step=0, or_steps=(1, 2))
    assert [world.is_alone[step] for step in range(3)] == [True, True, True]
    world.die(0, step=0, or_steps=(1, 2))
    world.request()
    assert world.failed


@given(
    data=st.data(),
    num_steps=st.integers(0, 60),
    num_workers=st.integers(1, 4),
    prefetch=st.integers(1, 3),
    changes=st.dictionaries(
        st.integers(0, 120), st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=6
    ),
    in_order=st.booleans(),
    max_deaths=st.integers(0, 2),
)
def test_workers_may_change_at_any_moment_and_every_step_is_delivered_once(
    data, num_steps, num_workers, prefetch, changes, in_order, max_deaths
):
    world = World.drawn(
        data,
        num_workers=num_workers,
        lookahead=num_workers * prefetch,
        in_order=in_order,
        num_steps=num_steps,
        any_worker=True,
        max_respawns=max_deaths,
    )
    world.survives = True
    for moves in range(10_000):
        if world.finished:
            break
        if moves in changes:
            world.change_workers(*changes[moves])
        if max_deaths and world.present and data.draw(st.integers(0, 30)) == 0:
            max_deaths -= 1
            world.die(data.draw(st.sampled_from(sorted(world.present))))
        if world.starting and data.draw(st.integers(0, 3)) == 0:
            world.die(data.draw(st.sampled_from(sorted(world.starting))))
        if world.starting and data.draw(st.booleans()):
            world.get_ready(data.draw(st.sampled_from(sorted(world.starting))))
        movers = world.movable_workers() + ([] if world.is_waiting else ["user"])
        assert movers, "deadlock"
        mover = world.choose(movers)
        world.request() if mover == "user" else world.move(mover)
    assert world.finished
    steps = [step for step, _ in world.delivered]
    assert sorted(steps) == list(range(num_steps))
    assert not in_order or steps == list(range(num_steps))
    # Who was to leave is gone when all is answered, and who never came is missed by no one.
    assert world.present <= set(range(world.num_workers))
    assert world.num_abandoned or world.present == set(range(world.num_workers))


@given(
    data=st.data(),
    changes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_after_a_change_as_many_steps_are_under_way_as_the_new_workers_look_ahead(data, changes):
    world = World.drawn(
        data, num_workers=2, lookahead=4, in_order=True, num_steps=3000, any_worker=True
    )
    for change in changes:
        world.change_workers(*change)
        for worker_id in sorted(world.starting):
            world.get_ready(worker_id)
        for _ in range(60):
            if data.draw(st.booleans()) and not world.is_waiting:
                world.request()
            elif world.movable_workers():
                world.move(world.choose(world.movable_workers()))
    for _ in range(60):  # what was drawn beyond a smaller lookahead is delivered first
        while not world.is_waiting:
            world.request()
        while world.is_waiting:
            world.move(world.choose(world.movable_workers()))
    assert len(world.scheduler._tasks) == world.lookahead


def test_who_is_there_does_not_get_the_share_of_those_who_are_still_starting():
    scheduler = Scheduler(1, 2, any_worker=True)
    submitted = Counter()
    steps = count()

    def carry_out(decisions):
        for decision in decisions:
            if isinstance(decision, Draw):
                carry_out(scheduler.drawn(next(steps), None))
            elif isinstance(decision, Submit):
                submitted[decision.worker_id] += 1

    carry_out(scheduler.refill())
    carry_out(scheduler.change_workers(20, 40))
    assert submitted == {0: 2}
    for worker_id in (7, 3, 19):
        carry_out(scheduler.handle(WorkerReady(worker_id)))
    assert submitted == {0: 2, 7: 2, 3: 2, 19: 2}
    assert scheduler.handle(WorkerLost(5, "killed")) == [RemoveWorker(5, "killed")]
    assert scheduler.num_at_work == 4
    carry_out(scheduler.change_workers(4, 8))
    assert sum(submitted.values()) <= 10


def test_nobody_waits_for_a_newcomer_that_is_lost_when_the_sampler_gave_nothing():
    scheduler = Scheduler(1, 2)
    assert list(map(type, scheduler.refill())) == [Draw, Draw]  # the sampler raises at both
    assert AddWorker(1) in scheduler.change_workers(2, 4)
    assert scheduler.request() == []  # the newcomer is to have steps of its own
    lost = WorkerLost(1, "no memory")
    removal, end = scheduler.handle(lost)
    assert (removal, type(end)) == (RemoveWorker(1, "no memory"), Finish)


@given(data=st.data(), num_steps=st.integers(0, 20), **worlds)
def test_no_step_waits_for_a_worker_that_has_not_started(data, num_steps, how):
    starting = data.draw(st.sets(st.integers(0, how["num_workers"] - 1)))
    never = data.draw(st.sets(st.sampled_from(sorted(starting)))) if starting else set()
    if len(never) == how["num_workers"]:
        never.pop()
    world = World.drawn(
        data,
        **how,
        num_steps=num_steps,
        any_worker=True,
        starting=starting,
        max_respawns=100,
    )
    while not world.finished:
        movers = world.movable_workers() + ([] if world.is_waiting else ["user"])
        to_start = sorted(world.starting - never)
        if to_start and (not movers or data.draw(st.booleans())):
            if data.draw(st.integers(0, 3)) == 0:
                world.die(to_start[0], counts=False)
            else:
                world.get_ready(to_start[0])
            continue
        assert movers, "no one can move"
        mover = world.choose(movers)
        world.request() if mover == "user" else world.move(mover)
    world.check_all_delivered(num_steps)
