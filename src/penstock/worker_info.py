# SPDX-License-Identifier: Apache-2.0
"""Who am I, asked from inside a worker: a process, or a thread of the main process's."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["WorkerInfo", "get_worker_info"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker knows of itself.

    Attributes:
        id: Number of this worker, 0 <= id < num_workers.
        num_workers: Workers of the loader that this one belongs to.
        seed: Seed of this worker's global generators: the loader's base seed plus `id`.
        dataset: This worker's own copy of the dataset; of a map-style one, a thread has no copy
            but the loader's own.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any


class _Here(threading.local):
    """What is known of a worker that is a thread; other threads have nothing in it."""

    info: WorkerInfo | None = None
    shard: ShardInfo | None = None
    was_asked = False


_here = _Here()
# Of a worker that is a process: all its threads see it, those that the user's code starts as well.
_current: WorkerInfo | None = None
_was_asked = False


def get_worker_info() -> WorkerInfo | None:
    """Return what this worker knows of itself, or None outside a worker.

    An `IterableDataset` uses it to give each worker its own shard of the stream, and
    `worker_init_fn` to reach the worker's copy of the dataset.

    Concurrency:
        Where workers are threads, each sees itself, and the main process's own thread is no worker.
        A thread that a worker thread starts is none either.

    Example:
        >>> get_worker_info() is None  # the main process is no worker
        True
    """
    _note_asked()
    return _current if _here.info is None else _here.info


def get_thread_info() -> WorkerInfo | None:
    """Return the same of a worker that is this very thread; None in one that is a process."""
    if _here.info is not None:
        _here.was_asked = True
    return _here.info


def _note_asked() -> None:
    global _was_asked
    if _here.info is None:
        _was_asked = True
    else:
        _here.was_asked = True


def set_worker_info(info: WorkerInfo | None) -> None:
    """Make `info` what `get_worker_info` returns in this process."""
    global _current, _was_asked
    _here.info = _here.shard = None  # this process may have been forked from a worker thread
    _current = info
    _was_asked = False  # a forked process has what was asked before


def set_thread_info(info: WorkerInfo | None) -> None:
    """Make `info` what `get_worker_info` returns in this thread alone; None ends that."""
    _here.info, _here.shard, _here.was_asked = info, None, False


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


_shard = ShardInfo()


def current_shard() -> ShardInfo:
    """Return which part of an iterable dataset is wanted: all of it, outside of a loader."""
    _note_asked()
    return shard_unasked()


def shard_unasked() -> ShardInfo:
    """Return the same as `current_shard`, without counting as a stream that deals itself out.

    Whether it was called decides whether a loader warns of workers that read the same.
    """
    return _shard if _here.shard is None else _here.shard


def was_asked() -> bool:
    """Return whether this worker was asked which worker or shard it is."""
    return _was_asked if _here.info is None else _here.was_asked


def set_shard(shard: ShardInfo) -> ShardInfo:
    """Make `shard` what `current_shard` returns in this worker; returns what it was.

    In a worker thread that is the thread alone, elsewhere the process.
    """
    global _shard
    outer = shard_unasked()
    if _here.info is None:
        _shard = shard
    else:
        _here.shard = shard
    return outer
