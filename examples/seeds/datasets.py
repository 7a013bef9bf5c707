# SPDX-License-Identifier: Apache-2.0
"""Datasets whose samples are random numbers, so that any slip of a seed shows in the batches."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import penstock
from penstock.data import IterableDataset, shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


class Sized:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Globals(Sized):
    """Draws from every global generator: index, random, numpy.random, torch."""

    def __getitem__(self, index: int) -> NDArray[np.float64]:
        drawn = random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()
        return np.array([index, *drawn])


class Both(Globals):
    """Draws from the global generators, and from the sample's own."""

    def __getitem__(self, index: int) -> NDArray[np.float64]:
        return np.append(super().__getitem__(index), penstock.sample_rng().normal())


class Own(Sized):
    """Draws from the sample's own generator alone: workers may be threads."""

    def __getitem__(self, index: int) -> NDArray[np.float64]:
        return np.array([index, penstock.sample_rng().normal()])


class OwnInBatches(Own):
    """The same numbers, though all at once."""

    def get_batch(self, indices: NDArray[np.int64], alloc: Callable[..., Any]) -> NDArray[Any]:
        drawn = [penstock.sample_rng(place).normal() for place in range(len(indices))]
        return np.stack([indices, drawn], axis=1)


class OwnInItems(Own):
    """The same, by the protocol that torch knows."""

    def __getitems__(self, indices: Sequence[int]) -> list[NDArray[np.float64]]:
        drawn = [penstock.sample_rng(place).normal() for place in range(len(indices))]
        return [np.array(pair) for pair in zip(indices, drawn, strict=True)]


class Sorted(OwnInBatches):
    """Hands its indices on in another order, and says so, or not."""

    def __init__(self, length: int, *, says_so: bool) -> None:
        super().__init__(length)
        self.says_so = says_so

    def get_batch(self, indices: NDArray[np.int64], alloc: Callable[..., Any]) -> NDArray[Any]:
        order = np.argsort(indices)
        if not self.says_so:
            return super().get_batch(indices[order], alloc)[np.argsort(order)]
        with penstock.renumbered_samples(order):
            return super().get_batch(indices[order], alloc)[np.argsort(order)]


class GlobalsInBatches(Globals):
    """Draws from a global generator once for each sample of a batch."""

    def get_batch(self, indices: NDArray[np.int64], alloc: Callable[..., Any]) -> NDArray[Any]:
        return np.array([[index, random.random()] for index in indices])


class TwoTransforms(Sized):
    """Two transforms, each of which asks for the sample's generator."""

    def __getitem__(self, index: int) -> tuple[bool, float, float]:
        first, second = penstock.sample_rng(), penstock.sample_rng()
        return first is second, first.random(), second.random()


class Kept(Sized):
    """Keeps a generator of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


class OfOtherThread(Sized):
    """Asks in the thread that makes the sample, and in another one."""

    def __getitem__(self, index: int) -> tuple[float, float]:
        drawn: list[float] = []
        other = threading.Thread(target=lambda: drawn.append(penstock.sample_rng().random()))
        other.start()
        other.join()
        return penstock.sample_rng().random(), drawn[0]


class Twisters(Sized):
    """The 624 words of numpy's twister and of torch's, as they are before a sample."""

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        return words_of_numpy(), words_of_torch()


def words_of_numpy() -> NDArray[np.uint32]:
    state: Any = np.random.get_state()
    return np.asarray(state[1], np.uint32)


def words_of_torch() -> NDArray[np.uint32]:
    """The state is seed, left, seeded, next, 624 words, and cached normal numbers.

    Each takes 8 bytes up to the words, but "left" and "seeded" share 8.
    """
    return torch.get_rng_state().numpy()[24 : 24 + 624 * 8].view(np.uint64).astype(np.uint32)


class WorkerSeeds(Sized):
    """Which worker makes a sample, its seed, and what its global generators draw next."""

    def __getitem__(self, index: int) -> tuple[int, int, float, float]:
        info = torch.utils.data.get_worker_info()
        drawn = random.random(), torch.rand((), dtype=torch.float64).item()
        return (-1, -1, *drawn) if info is None else (info.id, info.seed, *drawn)


class DiesOnce(Both):
    """Kills its worker at one sample, the first time that anybody reads it."""

    def __init__(self, length: int, mark: Path) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index: int) -> NDArray[np.float64]:
        if index == self.length // 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Faulty(Both):
    """Cannot read some samples."""

    def __init__(self, length: int, bad: set[int]) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> NDArray[np.float64]:
        if index in self.bad:
            raise OSError(f"sample {index} is damaged")
        return super().__getitem__(index)


class Counted(Both):
    """Notes what is read of it, in this process."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> NDArray[np.float64]:
        self.read.append(index)
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    """Numbers that are dealt out, with noise; perhaps shuffled, by a global generator."""

    def __init__(self, length: int, *, by: Any = "batch", shuffled: bool = False) -> None:  # noqa: ANN401
        self.length, self.by, self.shuffled = length, by, shuffled

    def __iter__(self) -> Iterator[NDArray[np.float64]]:
        items = list(range(self.length))
        if self.shuffled:
            random.shuffle(items)
        for item in shard(items, self.by):
            yield np.array([item, random.random(), penstock.sample_rng().normal()])


class Undealt(Stream):
    """Every worker goes through all of it."""

    def __iter__(self) -> Iterator[NDArray[np.float64]]:
        yield from (np.array([float(item)]) for item in range(self.length))


class ResumableStream(IterableDataset[Any]):
    """Knows how far it is, as the page on resuming has it."""

    start = position = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[NDArray[np.float64]]:
        begin, self.start = self.start, 0
        for position, number in enumerate(shard(range(self.length)), start=1):
            self.position = position
            if position > begin:
                yield np.array([number, penstock.sample_rng().normal()])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


def draw_in_collate(samples: list[NDArray[np.float64]]) -> tuple[NDArray[np.float64], float]:
    return np.stack(samples), random.random()


def draw_in_worker(_worker_id: int) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    penstock.sample_rng().random()
