# SPDX-License-Identifier: Apache-2.0
"""Workers on a Ray cluster that several trainers share."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.engine.backends.ray.cluster import check_actor_options, connect
from penstock.engine.backends.ray.options import RayOptions, checked_options
from penstock.engine.backends.ray.pool import KeeperLink, find_keeper, start_keeper
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from penstock.engine.backends.ray.keeper import KeeperReport, WorkerReport
    from penstock.engine.backends.ray.worker import SessionLoad

__all__ = ["PoolStats", "PoolTrainer", "PoolWorker", "WorkerPool"]


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """One worker of a pool.

    Attributes:
        is_alive: Whether it has started and not died.
        num_deaths: How many workers had its place before.
        pid: Of its process; None if it does not answer.
        node_id: Of its machine, as Ray knows it; None if it does not answer.
        num_trainers: Trainers that have work here.
        num_waiting: Their tasks that wait.
    """

    is_alive: bool
    num_deaths: int
    pid: int | None
    node_id: str | None
    num_trainers: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class PoolTrainer:
    """One trainer of a pool: one iterator of one loader.

    Attributes:
        name: Rank, process and machine.
        workers: Numbers of its workers in the pool.
        num_waiting: Tasks that wait, in all its workers.
        waited_s: For how long the one that has waited longest for its turn has.
        num_done: Turns that it has had: batches made, and what goes before the first.
        idle_s: For how long it has asked for nothing.
    """

    name: str
    workers: tuple[int, ...]
    num_waiting: int
    waited_s: float
    num_done: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool has, and has to do.

    Attributes:
        workers: By number.
        trainers: By name.
        num_shared: Objects in the object store that hold what trainers share: their datasets'
            large arrays one by one, and the rest of each dataset.
        shared_bytes: Bytes of those.
        num_puts: Objects put into the store for that since the pool was started.
    """

    workers: tuple[PoolWorker, ...]
    trainers: tuple[PoolTrainer, ...]
    num_shared: int
    shared_bytes: int
    num_puts: int


class WorkerPool:
    """Workers on a Ray cluster that several trainers share: ranks of a run, or different runs.

    A loader uses it with `backend="ray", ray_options={"pool": name}`, from any process on any node
    of the cluster. Where trainers want batches of the same worker, they get them in turn, one each,
    however many the others wait for. Which trainer has which workers does not show in the batches.

    The pool is started by the first `WorkerPool(name, ...)`, lives in the cluster, and outlives the
    program that started it, until somebody calls `close` (as leaving a `with` block does). Workers
    that die are replaced. What their trainers had under way is made again; a death counts against a
    loader's `FaultPolicy.max_respawns` only if its own sample was being made.

    Args:
        name: By which loaders find it, anywhere in the cluster.
        num_workers: How many actors.
        ray_options: What each asks of the cluster, by the names of Ray's `Actor.options`: num_cpus
            (1 unless given), num_gpus, memory, resources, scheduling_strategy, runtime_env.
        address: Of the cluster, as for a loader.

    Raises:
        ConfigError: an argument is out of its range; or there is a pool of that name, with another
            number of workers or other options.
        MissingExtraError: Ray is not installed.
        TypeError: an argument of the wrong type.

    Concurrency:
        Any thread.

    Example:
        Once, on any node; the block keeps the pool for as long as the training runs:

            with WorkerPool("images", num_workers=64, address="auto"):
                subprocess.run(["torchrun", "--nproc-per-node=8", "train.py"], check=True)

        In train.py, on every rank:

            loader = DataLoader(
                dataset, batch_size=32, num_workers=64, seed=7, backend="ray",
                ray_options={"pool": "images"}, address="auto",
                sampler=DistributedSampler(dataset, seed=7),
            )
    """

    def __init__(
        self,
        name: str,
        num_workers: int,
        *,
        ray_options: Mapping[str, Any] | None = None,
        address: str | None = None,
    ) -> None:
        """Start the pool, or find it; does not wait for its workers."""
        options = _checked(name, num_workers, ray_options, address)
        ray = connect(options)
        link = start_keeper(ray, name, num_workers, options.actor)
        num_there, options_there = link.ask("terms")
        differing = [] if num_there == num_workers else [f"num_workers={num_there}"]
        differing += [f"another {key}" for key in _differing(options.actor, options_there)]
        if differing:
            raise ConfigError(
                f"the cluster has a pool {name!r} with {' and '.join(differing)}, got num_workers="
                f"{num_workers}. WorkerPool.find({name!r}) uses it as it is, and close() ends it"
            )
        self._use(link, num_workers)

    def _use(self, link: KeeperLink, num_workers: int) -> None:
        self._link = link
        self._num_workers = num_workers
        self._is_closed = False

    @classmethod
    def find(cls, name: str, *, address: str | None = None) -> WorkerPool:
        """Return the pool of that name, whoever started it.

        Args:
            name: Of the pool.
            address: Of the cluster, as for a loader.

        Raises:
            ConfigError: the cluster has none.
        """
        link = find_keeper(connect(RayOptions(address)), name)
        num_workers, _ = link.ask("terms")
        pool = cls.__new__(cls)
        pool._use(link, num_workers)
        return pool

    @property
    def name(self) -> str:
        """By which loaders find it."""
        return self._link.name

    @property
    def num_workers(self) -> int:
        """How many actors it has: the most that a loader may use."""
        return self._num_workers

    def stats(self) -> PoolStats:
        """Return what there is, and who waits for what; asks all workers.

        Raises:
            WorkerDied: the pool was closed.
        """
        report = self._link.report()
        return PoolStats(
            workers=tuple(map(_worker_of, report.workers)),
            trainers=tuple(_trainer_of(name, report) for name in sorted(report.trainers)),
            num_shared=report.num_pieces,
            shared_bytes=report.shared_bytes,
            num_puts=report.num_puts,
        )

    def close(self) -> None:
        """End the pool, for all its trainers: their loaders raise `WorkerDied`."""
        if not self._is_closed:
            self._is_closed = True
            self._link.close()

    def __enter__(self) -> WorkerPool:
        """Return the pool; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the pool."""
        self.close()

    def __repr__(self) -> str:
        """Return name and number of workers; options may hold tokens."""
        closed = ", closed" if self._is_closed else ""
        return f"<WorkerPool {self.name!r}, {self.num_workers} workers{closed}>"


def _checked(
    name: object, num_workers: object, ray_options: Mapping[str, Any] | None, address: str | None
) -> RayOptions:
    if not isinstance(name, str):
        raise TypeError(f"name is a text, got {type(name).__name__}")
    if not name.strip():
        raise ConfigError(f"name is the pool's name, got {name!r}")
    if not isinstance(num_workers, int) or isinstance(num_workers, bool):
        raise TypeError(f"num_workers is an int, got {type(num_workers).__name__}")
    if num_workers < 1:
        raise ConfigError(f"num_workers is at least 1, got {num_workers}")
    options = checked_options("ray", ray_options, address)
    assert options is not None
    if options.pool is not None:
        raise ConfigError('ray_options of a pool say what its workers ask for; leave out "pool"')
    check_actor_options(options)
    return options


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the options that differ, by name: values may be secret."""
    keys = sorted({*ours, *theirs})
    return [key for key in keys if not _is_same(ours.get(key), theirs.get(key))]


def _is_same(one: Any, other: Any) -> bool:  # noqa: ANN401
    # Ray's strategies of scheduling compare by identity.
    return bool(one == other) or pickle.dumps(one) == pickle.dumps(other)


def _worker_of(worker: WorkerReport) -> PoolWorker:
    load = worker.load
    return PoolWorker(
        is_alive=worker.is_alive,
        num_deaths=worker.num_deaths,
        pid=None if load is None else load.pid,
        node_id=None if load is None else load.node_id,
        num_trainers=0 if load is None else len({session.trainer for session in load.sessions}),
        num_waiting=0 if load is None else sum(session.num_waiting for session in load.sessions),
    )


def _trainer_of(name: str, report: KeeperReport) -> PoolTrainer:
    sessions = list(_sessions_of(name, report.workers))
    return PoolTrainer(
        name=name,
        workers=report.trainers[name],
        num_waiting=sum(session.num_waiting for session in sessions),
        waited_s=max((session.waited_s for session in sessions), default=0.0),
        num_done=sum(session.num_done for session in sessions),
        idle_s=min((session.idle_s for session in sessions), default=0.0),
    )


def _sessions_of(trainer: str, workers: Iterable[WorkerReport]) -> Iterable[SessionLoad]:
    for worker in workers:
        for session in () if worker.load is None else worker.load.sessions:
            if session.trainer == trainer:
                yield session
