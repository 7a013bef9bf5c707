# SPDX-License-Identifier: Apache-2.0
"""What saturates first with 1,000 trainers and 10^10 samples?

Question
    Two machines' worth of cores are here, not a thousand. (1) What an epoch's order and a loader's
    state cost a rank of 1,000, measured on the code itself. (2) Which of the workers' cores, the
    trainers' own dispatch, the object store and the network is the limit, by a simulation whose
    costs are measured here, and whose predictions are compared with measurements here.

Method
    Sizes: a rank of 1,000 goes on in the middle of an epoch. Milliseconds from nothing to its next
    64 indices; the peak of what Python and numpy allocate for it (tracemalloc; for torch the list
    of its sampler included); bytes of the state as JSON.

    torch, 10M        `torch.utils.data.DistributedSampler` of 10 million samples, passed over up to
                      the middle. (10^10 would be a list of 400 GB.)
    penstock, 10M     `penstock.Loader` with `DistributedSampler(..., num_replicas=1000)`, from its
                      state. The first batch is compared with the one of a loader that was not
                      resumed.
    penstock, 10^10   The same of 10^10 samples.
    penstock, shards  The same of 10^10 samples in 100,000 shards: `ShardSampler` on 125 nodes.

    Simulation: discrete events. A trainer has as many batches under way as workers times
    `prefetch_factor`, takes them in order, pays `dispatch_s` of its node's cores for each, and
    computes for `step_s`; synchronous ones wait for each other at each step. A batch costs a worker
    `cpu_s` (with a spread), `worker_s`, and the copy into the node's object store. A batch for
    another node goes through both nodes' links, first come first served. Cores of a node are shared
    evenly by what runs on it. `--smoke` holds it against closed formulas.

    `--calibrate` measures the costs on a cluster of two nodes on this machine, by real Ray and
    Penstock's Ray workers: CPU seconds of a JPEG batch in one process, and in two at once; CPU
    seconds per batch of the trainer's thread, of the worker, and of the rest of Ray, by batches of
    nothing; the copy into the store; the link between the two stores. From these alone it predicts
    the throughput with 1 and 2 workers, with 2 trainers of 2 workers each, and with a worker on
    the other node, measures the same, and prints both.

Left out
    The first epoch's start of workers. Failures. What gradients send over the same links.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6, Ray 2.60.0

Command
    python benchmarks/scale_sim.py --calibrate --save
    python benchmarks/scale_sim.py --save

Result
    docs/design/scale.md has the tables.

What it does not show
    More than two cores, or more than one host: the link is a socket of one machine to itself. Of
    the machines in the simulation, cores, links and step times are assumptions, and named so.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import sys
import time
import tracemalloc
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, as_table, check, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RANKS: Final = 1000
_NODES: Final = 125
_BATCH_SIZE: Final = 64
_SEED: Final = 7
CALIBRATION: Final = Path(__file__).parent / "results" / "scale_calibration.json"


# Sizes, on the code itself.


@dataclass(frozen=True, slots=True)
class Size:
    """Samples of an epoch; `num_many` stands for 10^10."""

    num_items: int
    num_many: int
    num_shards: int


def _torch_order(num_items: int, rank: int) -> tuple[list[int], int]:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(num_items), _RANKS, rank, seed=_SEED)
    sampler.set_epoch(3)
    middle = len(sampler) // 2
    return list(itertools.islice(sampler, middle, middle + _BATCH_SIZE)), 0


def _loader(num_items: int, rank: int, num_shards: int = 0) -> Any:  # noqa: ANN401
    from penstock import Loader
    from penstock.sampling import DistributedSampler, ShardSampler

    sampler: Any
    if num_shards:
        lengths = np.full(num_shards, num_items // num_shards)
        node, local_rank = divmod(rank, _RANKS // _NODES)
        sampler = ShardSampler(
            lengths,
            seed=_SEED,
            num_nodes=_NODES,
            node=node,
            ranks_per_node=_RANKS // _NODES,
            local_rank=local_rank,
        )
    else:
        sampler = DistributedSampler(range(num_items), _RANKS, rank, seed=_SEED)
    return Loader(range(num_items), batch_size=_BATCH_SIZE, sampler=sampler, seed=_SEED)


def _resumed(num_items: int, rank: int, num_shards: int, state: str) -> tuple[list[int], int]:
    loader = _loader(num_items, rank, num_shards)
    loader.load_state_dict(json.loads(state))
    return next(iter(loader)).tolist(), len(json.dumps(loader.state_dict()))


def _state_in_the_middle(num_items: int, num_shards: int) -> tuple[str, list[int]]:
    """Return rank 0's state in the middle of epoch 3, and what rank 7 gets there."""
    loader = _loader(num_items, 0, num_shards)
    middle = len(loader) // 2
    loader.set_epoch(3)
    # The state that the loader itself gives, with the number of batches that were given: to run
    # through half an epoch of 10^10 samples would take a while.
    state = {**loader.state_dict(), "epoch": 3, "batches": middle, "samples": None}
    other = _loader(num_items, 7, num_shards)
    other.sampler.set_epoch(3)
    first = middle * _BATCH_SIZE
    return json.dumps(state), other.sampler.indices()[first : first + _BATCH_SIZE].tolist()


def middle_of_an_epoch(
    size: Size, *, is_torch: bool = False, many: bool = False, shards: bool = False
) -> Reading:
    """Go on in the middle as rank 7 of 1,000."""
    num_items = size.num_many if many else size.num_items
    num_shards = size.num_shards if shards else 0
    go_on: Callable[[], tuple[list[int], int]] = partial(_torch_order, num_items, 7)
    expected = None
    if not is_torch:
        state, expected = _state_in_the_middle(num_items, num_shards)
        go_on = partial(_resumed, num_items, 7, num_shards, state)
    go_on()  # imports, and caches of both
    times_s = []
    with Meter() as meter:
        for _ in range(3):
            start_s = time.perf_counter()
            indices, state_bytes = go_on()
            times_s.append(time.perf_counter() - start_s)
    tracemalloc.start()
    go_on()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    check(len(set(indices)) == _BATCH_SIZE, "an index came twice in a batch")
    check(0 <= min(indices) <= max(indices) < num_items, "indices of another dataset")
    check(expected is None or indices == expected, "it went on somewhere else")
    check(state_bytes < 1000, f"a state of {state_bytes} bytes")
    more = {"peak MB": peak_bytes / 1e6, "state B": float(state_bytes)}
    return Reading.of(meter, sorted(times_s)[1] * 1e3, 3, more)


# The simulation.


@dataclass(frozen=True, slots=True)
class Costs:
    """What a batch costs, measured.

    Attributes:
        cpu_s: CPU seconds of a core to make one, with nothing else on the machine.
        spread: Standard deviation of that, as a part of it.
        slowdown: By how much each core is slower when all are busy; 1 is not at all.
        dispatch_s: CPU seconds of the trainer's thread.
        worker_s: CPU seconds of the worker besides making it.
        background_s: CPU seconds of Ray's other threads and processes, on the trainer's node.
        store_s_per_byte: To copy it into the object store, by the worker.
        link_bytes_per_s: Between the stores of two nodes.
        link_cpu_s_per_byte: CPU seconds, of both nodes together.
    """

    cpu_s: float
    spread: float = 0.1
    slowdown: float = 1.0
    dispatch_s: float = 0.0
    worker_s: float = 0.0
    background_s: float = 0.0
    store_s_per_byte: float = 0.0
    link_bytes_per_s: float = math.inf
    link_cpu_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Scene:
    """A cluster and a training run.

    Attributes:
        costs: Of a batch.
        batch_size: Samples.
        batch_bytes: In the object store.
        num_trainers: Ranks, or runs of their own.
        trainers_per_node: On each of their nodes.
        workers_per_trainer: `num_workers` of each trainer.
        worker_nodes: Nodes for workers alone; 0: they are on the trainers' nodes.
        cores: Of each node.
        store_bytes_per_s: Of a node's memory: the most that can be copied into its store.
        step_s: What a trainer computes for each batch.
        slow_share: Part of the trainers that takes `slow_factor` times as long.
        slow_factor: See above.
        is_one_machine: Whether all nodes share the cores of one, as those of a test do.
        is_synchronous: Whether all trainers wait for each other at each step.
        prefetch_factor: Batches under way for each worker of a trainer.
        num_batches: For each trainer.
        seed: Of the spread.
    """

    costs: Costs
    batch_size: int = _BATCH_SIZE
    batch_bytes: int = 0
    num_trainers: int = 1
    trainers_per_node: int = 1
    workers_per_trainer: int = 1
    worker_nodes: int = 0
    cores: int = 64
    store_bytes_per_s: float = math.inf
    step_s: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    is_one_machine: bool = False
    is_synchronous: bool = False
    prefetch_factor: int = 2
    num_batches: int = 60
    seed: int = 0

    @property
    def under_way(self) -> int:
        """Batches of a trainer, besides the one that it computes with."""
        return self.workers_per_trainer * self.prefetch_factor

    @property
    def trainer_nodes(self) -> int:
        return -(-self.num_trainers // self.trainers_per_node)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run came to.

    Attributes:
        samples_per_s: Of all trainers together, once they run.
        waiting: Part of the trainers' time without a batch, mean of all.
        waiting_most: That of the trainer that waits most.
        network_bytes_per_s: Over all links, each byte counted once.
        store_peak_bytes: The most that lay in the store of a node.
        store_bound_bytes: What `prefetch_factor` allows there.
        busy: Part of the time in which each resource was in use: the busiest of its kind.
        num_events: Of the simulation.
    """

    samples_per_s: float
    waiting: float
    waiting_most: float
    network_bytes_per_s: float
    store_peak_bytes: int
    store_bound_bytes: int
    busy: dict[str, float]
    num_events: int

    @property
    def limit(self) -> str:
        """What is busiest. Workers that wait for a core are busy as well, so cores go first."""
        most = max(self.busy.values())
        return next(name for name, share in self.busy.items() if share >= 0.97 * most)


class _Cores:
    """Cores that what runs on them shares evenly."""

    def __init__(self, run: _Run, number: int, slowdown: float) -> None:
        self._run = run
        self._number = number
        self._slowdown = slowdown
        self._jobs: list[tuple[float, int, Callable[[], None] | None]] = []
        self._done = 0.0  # CPU seconds that a job which is always there would have got
        self._at_s = 0.0
        self._version = 0
        self.cpu_s = 0.0

    def _rate(self) -> float:
        """CPU seconds that each job gets in a second."""
        num_busy = min(len(self._jobs), self._number)
        if not num_busy:
            return 0.0
        crowding = (num_busy - 1) / max(self._number - 1, 1)
        return num_busy / len(self._jobs) / (1 + (self._slowdown - 1) * crowding)

    def _advance(self) -> None:
        passed_s = self._run.now_s - self._at_s
        self._done += passed_s * self._rate()
        self.cpu_s += passed_s * min(len(self._jobs), self._number)
        self._at_s = self._run.now_s

    def compute(self, cpu_s: float, then: Callable[[], None] | None = None) -> None:
        """Take so many CPU seconds, and go on."""
        if cpu_s <= 0:
            if then is not None:
                self._run.at(self._run.now_s, then)
            return
        self._advance()
        heapq.heappush(self._jobs, (self._done + cpu_s, next(self._run.numbers), then))
        self._plan()

    def _plan(self) -> None:
        self._version += 1
        if self._jobs:
            left_s = max(self._jobs[0][0] - self._done, 0.0) / self._rate()
            self._run.at(self._run.now_s + left_s, partial(self._finish, self._version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # something came in between
        self._advance()
        self._done = max(self._done, self._jobs[0][0])
        _, _, then = heapq.heappop(self._jobs)
        self._plan()
        if then is not None:
            then()


class _Node:
    """Cores, an object store, and a link."""

    def __init__(self, cores: _Cores) -> None:
        self.compute = cores.compute
        self.store_free_s = self.out_free_s = self.in_free_s = 0.0
        self.store_busy_s = self.out_busy_s = self.in_busy_s = 0.0
        self.stored_bytes = self.peak_bytes = 0

    def store(self, num_bytes: int) -> None:
        self.stored_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.stored_bytes)


class _Worker:
    """Makes the batches of its trainer, one after the other."""

    def __init__(self, run: _Run, node: _Node) -> None:
        self._run = run
        self.node = node
        self._tasks: deque[tuple[int, int]] = deque()  # trainer and step
        self._is_busy = False
        self._since_s = self.busy_s = 0.0

    def busy_until(self, now_s: float) -> float:
        """Return for how long it was at work so far."""
        return self.busy_s + (now_s - self._since_s if self._is_busy else 0.0)

    def submit(self, trainer: int, step: int) -> None:
        self._tasks.append((trainer, step))
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        trainer, step = self._tasks.popleft()
        self._is_busy = True
        self._since_s = self._run.now_s
        scene, costs = self._run.scene, self._run.scene.costs
        cpu_s = costs.cpu_s * self._run.factor() + costs.worker_s
        cpu_s += scene.batch_bytes * costs.store_s_per_byte
        self.node.compute(cpu_s, partial(self._made, trainer, step))

    def _made(self, trainer: int, step: int) -> None:
        run, node = self._run, self.node
        copy_s = run.scene.batch_bytes / run.scene.store_bytes_per_s
        # The copy itself was part of what was computed: it ends later if the memory is busy.
        stored_s = max(run.now_s, node.store_free_s + copy_s)
        node.store_free_s = max(node.store_free_s, run.now_s - copy_s) + copy_s
        node.store_busy_s += copy_s
        node.store(run.scene.batch_bytes)
        run.at(stored_s, partial(self._stored, trainer, step))

    def _stored(self, trainer: int, step: int) -> None:
        self._is_busy = False
        self.busy_s += self._run.now_s - self._since_s
        self._run.send(self.node, self._run.trainers[trainer], step)
        if self._tasks:
            self._begin()


class _Trainer:
    """Takes batches in order, and has a bounded number of them under way."""

    def __init__(
        self, run: _Run, number: int, node: _Node, workers: list[_Worker], step_s: float
    ) -> None:
        self._run = run
        self.number = number
        self.node = node
        self._workers = workers
        self.step_s = step_s
        self._under_way = [0] * len(workers)
        self._made_by: dict[int, int] = {}
        self._here: set[int] = set()
        self._holders: dict[int, list[_Node]] = {}
        self._num_submitted = 0
        self.num_taken = 0
        self.dispatch_s = 0.0
        self._is_waiting = True
        self._waits_since_s = 0.0
        self._warm_s: float | None = None
        self.waited_s = self.ran_s = 0.0

    def start(self) -> None:
        for _ in range(self._run.scene.under_way):
            self._submit()

    def _submit(self) -> None:
        step = self._num_submitted
        # Some more than are taken, so that nothing is idle before the last trainer has its last.
        if step >= self._run.scene.num_batches + self._run.scene.under_way:
            return
        self._num_submitted += 1
        least = min(range(len(self._workers)), key=lambda k: (self._under_way[k], (k - step) % 97))
        self._under_way[least] += 1
        self._made_by[step] = least
        self._workers[least].submit(self.number, step)

    def arrived(self, step: int, holders: list[_Node]) -> None:
        if self.num_taken == self._run.scene.num_batches:
            self._let_go(holders)
            return
        self._here.add(step)
        self._holders[step] = holders
        self.node.compute(self._run.scene.costs.background_s)
        if self._is_waiting:
            self._take()

    def _take(self) -> None:
        if self.num_taken not in self._here:
            return
        self._is_waiting = False
        now_s = self._run.now_s
        if self._warm_s is not None:
            self.waited_s += now_s - self._waits_since_s
        costs = self._run.scene.costs
        self.dispatch_s += costs.dispatch_s
        self.node.compute(costs.dispatch_s, self._dispatched)

    def _dispatched(self) -> None:
        step = self.num_taken
        self._here.remove(step)
        self._under_way[self._made_by.pop(step)] -= 1
        self._submit()
        self._waits_since_s = self._run.now_s
        if self._run.scene.is_synchronous:
            self._run.meet(step)
        else:
            self.compute()

    def compute(self) -> None:
        """Begin the step, when all that it waits for are there."""
        if self._warm_s is not None:
            self.waited_s += self._run.now_s - self._waits_since_s
        self._run.at(self._run.now_s + self.step_s, self._stepped)

    def _let_go(self, holders: list[_Node]) -> None:
        for node in holders:
            node.stored_bytes -= self._run.scene.batch_bytes

    def _stepped(self) -> None:
        scene, now_s = self._run.scene, self._run.now_s
        self._let_go(self._holders.pop(self.num_taken))
        self.num_taken += 1
        if self._warm_s is None and self.num_taken >= self._run.num_warm:
            self._warm_s = now_s
            self._run.mark(0)
        if self.num_taken == scene.num_batches:
            assert self._warm_s is not None
            self._run.mark(1)
            self.ran_s = now_s - self._warm_s
            for holders in self._holders.values():
                self._let_go(holders)
            self._holders.clear()
            return
        self._is_waiting = True
        self._waits_since_s = now_s
        self._take()


class _Run:
    """One run of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.now_s = 0.0
        self.numbers = itertools.count()
        self.num_warm = max(scene.num_batches // 3, 1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._met: dict[int, int] = {}
        self.network_bytes = 0
        self._rng = np.random.default_rng(scene.seed)
        self._factors: list[float] = []
        num_machines = 1 if scene.is_one_machine else scene.trainer_nodes + scene.worker_nodes
        slowdown = scene.costs.slowdown
        self.cores = [_Cores(self, scene.cores, slowdown) for _ in range(num_machines)]
        nodes = [
            _Node(self.cores[number % num_machines])
            for number in range(scene.trainer_nodes + scene.worker_nodes)
        ]
        self.trainer_nodes = nodes[: scene.trainer_nodes]
        self.worker_nodes = nodes[scene.trainer_nodes :] or self.trainer_nodes
        self.workers = self._make_workers()
        self.window: list[tuple[float, dict[str, list[float]]]] = []  # when it begins and ends
        self.trainers = [self._make_trainer(number) for number in range(scene.num_trainers)]

    def _make_workers(self) -> list[_Worker]:
        scene = self.scene
        total = scene.num_trainers * scene.workers_per_trainer
        if self.worker_nodes is not self.trainer_nodes:
            nodes = [self.worker_nodes[k % len(self.worker_nodes)] for k in range(total)]
        else:  # each trainer's own, on its node
            per_node = scene.workers_per_trainer * scene.trainers_per_node
            nodes = [self.worker_nodes[k // per_node] for k in range(total)]
        return [_Worker(self, node) for node in nodes]

    def _make_trainer(self, number: int) -> _Trainer:
        scene, wanted = self.scene, self.scene.workers_per_trainer
        own = self.workers[number * wanted : (number + 1) * wanted]
        is_slow = number < round(scene.slow_share * scene.num_trainers)
        step_s = scene.step_s * (scene.slow_factor if is_slow else 1.0)
        node = self.trainer_nodes[number // scene.trainers_per_node]
        return _Trainer(self, number, node, own, step_s)

    def factor(self) -> float:
        """Return how much longer than usual a batch takes; 1 in the mean."""
        if not self._factors:
            spread = self.scene.costs.spread
            sigma = math.sqrt(math.log1p(spread * spread))
            drawn = self._rng.lognormal(-sigma * sigma / 2, sigma, 4096)
            self._factors = drawn.tolist()
        return self._factors.pop()

    def at(self, when_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self.numbers), then))

    def meet(self, step: int) -> None:
        """Wait for all trainers, and begin the step."""
        self._met[step] = self._met.get(step, 0) + 1
        if self._met[step] == len(self.trainers):
            del self._met[step]
            for trainer in self.trainers:
                trainer.compute()

    def send(self, source: _Node, trainer: _Trainer, step: int) -> None:
        """Bring a batch from a store to a trainer; on the same node it is there."""
        target, scene = trainer.node, self.scene
        if source is target:
            trainer.arrived(step, [source])
            return
        takes_s = scene.batch_bytes / scene.costs.link_bytes_per_s
        begun_s = max(self.now_s, source.out_free_s)
        source.out_free_s = begun_s + takes_s
        target.in_free_s = max(begun_s, target.in_free_s) + takes_s
        source.out_busy_s += takes_s
        target.in_busy_s += takes_s
        self.network_bytes += scene.batch_bytes
        for node in (source, target):
            node.compute(scene.batch_bytes * scene.costs.link_cpu_s_per_byte / 2)
        target.store(scene.batch_bytes)  # its place is kept from the first byte on
        there_s = max(source.out_free_s, target.in_free_s)
        self.at(there_s, partial(trainer.arrived, step, [source, target]))

    def mark(self, number: int) -> None:
        """Note how long everything was in use: when the first trainer is warm, and when it ends."""
        if len(self.window) == number:
            self.window.append((self.now_s, self._in_use()))

    def _in_use(self) -> dict[str, list[float]]:
        """Return the seconds for which each resource was in use so far."""
        nodes = [*self.trainer_nodes, *self.worker_nodes]
        first, workers, now_s = self.scene.trainer_nodes, self.workers, self.now_s
        cores = [each.cpu_s / self.scene.cores for each in self.cores]
        return {
            "links": [seconds for n in nodes for seconds in (n.in_busy_s, n.out_busy_s)],
            "store copies": [node.store_busy_s for node in nodes],
            "trainers' cores": cores[:first],
            "workers' cores": cores[first:],
            "workers": [sum(each.busy_until(now_s) for each in workers) / len(workers)],
            "dispatch": [trainer.dispatch_s for trainer in self.trainers],
            "steps": [trainer.num_taken * trainer.step_s for trainer in self.trainers],
        }

    def _busy(self) -> dict[str, float]:
        (start_s, before), (stop_s, after) = self.window
        return {
            name: max((b - a for a, b in zip(before[name], after[name], strict=True)), default=0.0)
            / (stop_s - start_s)
            for name in after
        }

    def outcome(self) -> Outcome:
        for trainer in self.trainers:
            trainer.start()
        while self._events:
            self.now_s, _, then = heapq.heappop(self._events)
            then()
        scene = self.scene
        check(
            all(trainer.num_taken == scene.num_batches for trainer in self.trainers),
            "a trainer did not get all of its batches",
        )
        nodes = [*self.trainer_nodes, *self.worker_nodes]
        check(not any(node.stored_bytes for node in nodes), "a batch was never let go of")
        counted = scene.num_batches - self.num_warm
        rates = [counted / trainer.ran_s for trainer in self.trainers]
        waits = [trainer.waited_s / trainer.ran_s for trainer in self.trainers]
        return Outcome(
            samples_per_s=sum(rates) * scene.batch_size,
            waiting=sum(waits) / len(waits),
            waiting_most=max(waits),
            network_bytes_per_s=self.network_bytes / self.now_s,
            store_peak_bytes=max(node.peak_bytes for node in self.trainer_nodes),
            store_bound_bytes=scene.trainers_per_node * (scene.under_way + 1) * scene.batch_bytes,
            busy=self._busy(),
            num_events=next(self.numbers),
        )


def simulate(scene: Scene) -> Outcome:
    """Run a scene; the same outcome each time."""
    return _Run(scene).outcome()


def check_simulation(num_batches: int) -> None:
    """Hold the simulation against what can be computed by hand."""
    costs = Costs(cpu_s=0.05, spread=0.0)
    plain = Scene(costs, batch_bytes=1_000_000, num_batches=num_batches)

    def rate(scene: Scene) -> float:
        return simulate(scene).samples_per_s / scene.batch_size

    def expect(what: str, found: float, right: float) -> None:
        check(abs(found - right) <= 0.03 * right, f"{what}: {found:.4g}, not {right:.4g}")

    expect("one worker", rate(plain), 20)
    expect("three workers", rate(replace(plain, workers_per_trainer=3)), 60)
    crowd = replace(plain, workers_per_trainer=8, cores=4, num_batches=2 * num_batches)
    expect("8 workers on 4 cores", rate(crowd), 80)
    slowed = replace(crowd, costs=replace(costs, slowdown=1.25))
    expect("4 cores that slow each other", rate(slowed), 64)
    fast = replace(plain, workers_per_trainer=4, step_s=0.04)
    expect("a slow trainer", rate(fast), 25)
    outcome = simulate(fast)
    expect("no waiting", 1 + outcome.waiting, 1)
    check(outcome.limit == "steps", f"limit of a slow trainer: {outcome.limit}")
    dispatch = replace(fast, step_s=0.0, costs=replace(costs, cpu_s=0.001, dispatch_s=0.004))
    expect("a trainer's thread", rate(dispatch), 250)
    check(simulate(dispatch).limit == "dispatch", "limit of tiny batches")
    far = replace(
        fast, step_s=0.0, worker_nodes=1, costs=replace(costs, link_bytes_per_s=30_000_000)
    )
    outcome = simulate(far)
    expect("a slow link", outcome.samples_per_s / far.batch_size, 30)
    check(outcome.limit == "links", f"limit of a slow link: {outcome.limit}")
    check(outcome.store_peak_bytes <= outcome.store_bound_bytes, "prefetch_factor bounds nothing")
    check(
        outcome.store_peak_bytes >= outcome.store_bound_bytes - 2 * far.batch_bytes,
        "a store that ought to be full is not",
    )
    copies = replace(fast, step_s=0.0, store_bytes_per_s=40_000_000)
    expect("a slow memory", rate(copies), 40)
    # Two runs, one of them slow.
    two = replace(plain, num_trainers=2, trainers_per_node=2, workers_per_trainer=2, step_s=0.01)
    two = replace(two, slow_share=0.5, slow_factor=20.0)
    expect("workers of their own", rate(two), 40 + 5)
    spread = replace(plain, costs=replace(costs, spread=0.5), workers_per_trainer=3)
    check(simulate(spread) == simulate(spread), "a simulation is not the same twice")
    check(simulate(spread) != simulate(replace(spread, seed=1)), "the seed decides nothing")


# What a batch of 64 photos cost on a busy machine: where results/scale_calibration.json is missing.
_GUESSED: Final = Costs(
    cpu_s=0.055,
    spread=0.05,
    slowdown=1.1,
    dispatch_s=0.0004,
    worker_s=0.0013,
    background_s=0.0006,
    store_s_per_byte=0.1e-9,
    link_bytes_per_s=0.5e9,
    link_cpu_s_per_byte=2.2e-9,
)
_GBIT: Final = 1e9 / 8


def calibrated() -> tuple[Costs, bool]:
    """Return the measured costs, or guessed ones, and whether they were measured."""
    if not CALIBRATION.exists():
        return _GUESSED, False
    return Costs(**json.loads(CALIBRATION.read_text(encoding="utf-8"))["costs"]), True


def scenes(costs: Costs) -> dict[str, Scene]:
    """Return 1,000 trainers: what is assumed of their machines is written here.

    125 nodes of 8 accelerators and 64 cores; a step is 256 photos in 0.1 s; the store's memory is
    good for 20 GB/s of copies; a link's CPU seconds per byte are those of sockets, measured.
    """
    four = replace(  # batches of 256 for those of 64 that were measured
        costs, cpu_s=4 * costs.cpu_s, spread=costs.spread / 2, link_bytes_per_s=100 * _GBIT
    )
    local = Scene(
        four,
        batch_size=256,
        batch_bytes=256 * 224 * 224 * 3,
        num_trainers=_RANKS,
        trainers_per_node=_RANKS // _NODES,
        workers_per_trainer=4,
        cores=64,
        store_bytes_per_s=20e9,
        step_s=0.1,
        is_synchronous=True,
        num_batches=60,
    )
    slow_link = replace(four, link_bytes_per_s=25 * _GBIT)
    remote = replace(local, worker_nodes=_NODES)
    apart = replace(local, is_synchronous=False, slow_share=0.5, slow_factor=3.0)
    tiny = replace(
        local,
        costs=replace(four, cpu_s=0.0005),
        batch_bytes=32_000,
        step_s=0.001,
        is_synchronous=False,
    )
    return {
        "4 workers each, own node": local,
        "2 workers each, own node": replace(local, workers_per_trainer=2),
        "4 each, other nodes, 100 Gbit/s": remote,
        "the same, float32": replace(remote, batch_bytes=4 * local.batch_bytes),
        "the same, float32, 25 Gbit/s": replace(
            remote, batch_bytes=4 * local.batch_bytes, costs=slow_link
        ),
        "the same, uint8, 25 Gbit/s": replace(remote, costs=slow_link),
        "runs of two speeds, 2 each": replace(apart, workers_per_trainer=2, worker_nodes=_NODES),
        "batches of 32 KB, step 1 ms": tiny,
    }


def table(named: dict[str, Scene]) -> str:
    """Simulate scenes, and return what they came to."""
    rows = [
        [
            *("1,000 trainers", "M samples/s", "waiting", "10^10 take", "network GB/s"),
            *("a node's store", "bound", "busiest", "next"),
        ]
    ]
    for name, scene in named.items():
        outcome = simulate(scene)
        by_share = sorted(outcome.busy.items(), key=lambda item: -item[1])
        rest = [f"{what} {share:.0%}" for what, share in by_share if what != outcome.limit]
        rows.append(
            [
                name,
                f"{outcome.samples_per_s / 1e6:.2f}",
                f"{outcome.waiting:.0%}",
                f"{1e10 / outcome.samples_per_s / 60:.0f} min",
                f"{outcome.network_bytes_per_s / 1e9:.0f}",
                f"{outcome.store_peak_bytes / 1e9:.2f} GB",
                f"{outcome.store_bound_bytes / 1e9:.2f} GB",
                f"{outcome.limit} {outcome.busy[outcome.limit]:.0%}",
                rest[0],
            ]
        )
    return as_table(rows)


BENCHMARK = Benchmark(
    file=__file__,
    unit="ms to go on in the middle",
    better="lower",
    contenders={
        "torch, 10M": partial(middle_of_an_epoch, is_torch=True),
        "penstock, 10M": middle_of_an_epoch,
        "penstock, 10^10": partial(middle_of_an_epoch, many=True),
        "penstock, shards": partial(middle_of_an_epoch, many=True, shards=True),
    },
    full=Size(num_items=10_000_000, num_many=10**10, num_shards=100_000),
    smoke=Size(num_items=1_000_000, num_many=10**10, num_shards=1_000),
    targets=(
        Target("penstock, 10^10", at_most=50.0),
        Target("penstock, 10^10", at_most=2.0, figure="peak MB"),
        Target("penstock, shards", at_most=200.0),
        Target("penstock, 10M", "torch, 10M"),
    ),
    rounds=3,
)


def _small(scene: Scene) -> Scene:
    return replace(
        scene,
        num_trainers=16,
        worker_nodes=min(scene.worker_nodes, 2),
        num_batches=12,
    )


def main(arguments: Sequence[str]) -> int:
    """Measure sizes, then simulate; or calibrate."""
    if "--part" in arguments:
        from _scale_points import part

        return part(arguments[arguments.index("--part") + 1])
    if "--calibrate" in arguments:
        from _scale_points import calibrate

        return calibrate(is_saved="--save" in arguments, is_small="--smoke" in arguments)
    status = BENCHMARK.main(arguments)
    if status or {"--contender", "--list", "--only", "--help", "-h"} & set(arguments):
        return status
    is_smoke = "--smoke" in arguments
    check_simulation(600)
    costs, is_measured = calibrated()
    named = scenes(costs)
    if is_smoke:
        named = {name: _small(scene) for name, scene in named.items()}
    origin = "measured here (results/scale_calibration.json)" if is_measured else "guesses"
    write(f"\nsimulation; a batch's costs are {origin}: {costs}")
    write(table(named))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
