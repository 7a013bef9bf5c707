# SPDX-License-Identifier: Apache-2.0
"""The worker that calls: a process, or a thread of the main process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker of a loader.

    Attributes:
        id: Number of this worker, 0 <= id < num_workers.
        num_workers: Workers of the loader that this one belongs to.
        seed: Seed of this worker's global generators: the loader's base seed plus `id`.
        dataset: This worker's copy of the dataset; a thread has the loader's own, if map-style.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which part of an iterable dataset is wanted in this process.

    Attributes:
        worker_id: 0 without workers.
        num_workers: At least 1.
        batch_size: Samples in a batch; None where samples come as they are.
        rank: Of the ranks that train together.
        world_size: Their number.
    """

    worker_id: int = 0
    num_workers: int = 1
    batch_size: int | None = None
    rank: int = 0
    world_size: int = 1


@dataclass(slots=True)
class _Worker:
    info: WorkerInfo | None = None
    shard: ShardInfo = ShardInfo()
    was_asked: bool = False


_threads = threading.local()  # has `worker` in a thread that is one
# All threads of a process have the same, those that the user's code starts as well.
_process = _Worker()


def _here() -> _Worker:
    worker: _Worker = getattr(_threads, "worker", _process)
    return worker


def get_worker_info() -> WorkerInfo | None:
    """Return the info of the worker that calls, or None outside a worker.

    An `IterableDataset` uses it to give each worker its own shard of the stream, and
    `worker_init_fn` to reach the worker's copy of the dataset.

    Concurrency:
        Where workers are threads, each sees itself, and the main process's own thread is no worker.
        A thread that a worker thread starts is none either.

    Example:
        >>> get_worker_info() is None  # the main process is no worker
        True
    """
    worker = _here()
    worker.was_asked = True
    return worker.info


def get_thread_info() -> WorkerInfo | None:
    """Return the same of a worker that is this very thread; None in one that is a process."""
    return None if _here() is _process else get_worker_info()


def set_worker_info(info: WorkerInfo | None) -> None:
    """Make `info` what `get_worker_info` returns in this process."""
    global _process
    vars(_threads).clear()  # this process may have been forked from a worker thread
    _process = _Worker(info, _process.shard)


def set_thread_info(info: WorkerInfo) -> None:
    """Make `info` what `get_worker_info` returns in this thread alone."""
    _threads.worker = _Worker(info)


def current_shard() -> ShardInfo:
    """Return which part of an iterable dataset is wanted: all of it, outside of a loader."""
    worker = _here()
    worker.was_asked = True
    return worker.shard


def shard_unasked() -> ShardInfo:
    """Return the same as `current_shard`, without counting as a stream that deals itself out.

    Whether it was called decides whether a loader warns of workers that read the same.
    """
    return _here().shard


def info_unasked() -> WorkerInfo | None:
    """Return the same as `get_worker_info`, likewise."""
    return _here().info


def was_asked() -> bool:
    """Return whether this worker has called `get_worker_info` or `current_shard`."""
    return _here().was_asked


def set_shard(shard: ShardInfo) -> ShardInfo:
    """Make `shard` what `current_shard` returns in this worker; return what it was.

    In a worker thread that is the thread alone, elsewhere the process.
    """
    worker = _here()
    outer, worker.shard = worker.shard, shard
    return outer
