# SPDX-License-Identifier: Apache-2.0
"""Datasets whose samples are all random numbers, from every source there is."""

from __future__ import annotations

import random

import numpy as np

from penstock import renumbered_samples, sample_rng
from penstock.data import IterableDataset, shard


def draws() -> np.ndarray:
    """Numbers of every global generator and the sample's own; normals leave a cache behind."""
    import torch

    rng = sample_rng()
    return np.array(
        [
            random.random(),
            random.gauss(0, 1),
            np.random.random(),
            np.random.randn(),
            torch.rand((), dtype=torch.float64).item(),
            torch.randn(()).item(),
            rng.random(),
            sample_rng().normal(),
        ]
    )


class Noise:
    """Sample i: (i, eight random numbers)."""

    def __init__(self, length: int = 53) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index, draws()


class NumpyNoise(Noise):
    """Without torch: a worker of the core's Loader never imports it."""

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        numbers = [random.random(), random.gauss(0, 1), np.random.random(), np.random.randn()]
        return index, np.array([*numbers, sample_rng().random(), sample_rng().normal()])


class BatchNoise(NumpyNoise):
    """The samples' own generators alone, read by the batch as well as one by one."""

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        return index, sample_rng().random(3)

    def get_batch(self, indices, alloc):
        numbers = alloc((len(indices), 3), np.float64)
        for k in reversed(range(len(indices))):  # in any order
            numbers[k] = sample_rng(k).random(3)
        return [np.array(indices), numbers]


class SortedBatchNoise(BatchNoise):
    """Hands its indices on in another order, as a store that likes sorted keys would."""

    def get_batch(self, indices, alloc):
        order = np.argsort(indices)
        with renumbered_samples(order):
            numbers, noise = super().get_batch(indices[order], np.empty)
        back = np.argsort(order)
        return [numbers[back], noise[back]]


class Countdown(IterableDataset):
    """A stream that is dealt out, with noise; it shuffles its list with the global generator."""

    def __init__(self, length: int = 41, *, shuffled: bool = False, by: str = "batch") -> None:
        self.length = length
        self.shuffled = shuffled
        self.by = by

    def __iter__(self):
        items = list(range(self.length))
        if self.shuffled:
            random.shuffle(items)
        for item in shard(items, self.by):
            yield item, sample_rng().random()


class Resumable(IterableDataset):
    """A stream that knows how to go on."""

    def __init__(self, length: int = 40) -> None:
        self.length = length
        self.position = self.start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        self.position = start
        for number, item in enumerate(shard(range(self.length), "item")):
            if number < start:
                continue
            self.position = number + 1
            yield item, sample_rng().random()

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]
