# SPDX-License-Identifier: Apache-2.0
"""Datasets, samplers and functions for workers of tests; a spawned one imports them from here."""

from __future__ import annotations

import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

Pair = namedtuple("Pair", ["image", "label"])


class Rows(Dataset):
    """`length` samples: a tensor that is big enough for the arena, and the index."""

    def __init__(self, length=23, size=2000):
        self.length = length
        self.size = size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.arange(self.size, dtype=torch.float32) + index, index


class RowsByBatch(Rows):
    """Offers `__getitems__`, with samples that say so."""

    def __getitems__(self, indices):
        return [(*self[index], len(indices)) for index in indices]


class Augmented(Rows):
    """Draws from the three global generators for each sample."""

    def __getitem__(self, index):
        return {
            "index": index,
            "python": random.random(),
            "numpy": np.random.rand(3),
            "torch": torch.rand(1200),
            "mixed": torch.randn(2) * random.gauss(0, 1) + np.random.normal(),
        }


class Tree(Rows):
    """A sample of every kind that the default collate takes."""

    def __getitem__(self, index):
        return {
            "pair": Pair(torch.full((3, 20, 20), float(index)), index % 3),
            "tuple": (index, index / 3, index % 2 == 0, f"sample {index}", b"raw %d" % index),
            "list": [
                [index, [index + 1]],
                [np.float32(index), np.int16(index), np.bool_(index % 2)],
            ],
            "nested": {"empty": {}, "deep": {"deeper": {"text": str(index), "value": index}}},
            "mixed numbers": index if index % 2 else float(index),
            "zero-dimensional": torch.tensor(index),
            "zero-size": torch.empty(0, 3),
        }


class Arrays(Rows):
    """numpy arrays and scalars of the dtypes that torch has."""

    DTYPES = ("?", "u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")

    def __getitem__(self, index):
        return {
            # torch takes arrays of uint64, but no list of its scalars
            dtype: np.full((2, 300), index % 7, dtype)
            if dtype == "u8"
            else (np.full((2, 300), index % 7, dtype), np.dtype(dtype).type(index % 5))
            for dtype in self.DTYPES
        }


class Tensors(Rows):
    """Tensors of many dtypes and layouts."""

    DTYPES = (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.uint16,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    )

    def __getitem__(self, index):
        plain = [torch.full((2, 1100), index % 2).to(dtype) for dtype in self.DTYPES]
        square = torch.arange(1600.0).view(40, 40) + index
        return plain, square.T, torch.tensor(index).expand(3, 500)


class Stepped(Rows):
    """Tensors with gaps between their elements."""

    def __getitem__(self, index):
        return (torch.arange(8000.0).view(80, 100) + index)[::2, 1::3]


@dataclass
class Example:
    """What a user's own sample may be."""

    image: torch.Tensor
    label: int
    name: str | None = None


class Examples(Rows):
    """Samples that only a custom collate takes."""

    def __getitem__(self, index):
        return Example(torch.full((5, 300), float(index)), index, None if index % 2 else str(index))


class Stream(IterableDataset):
    """The numbers up to `length`; each worker iterates all of them."""

    def __init__(self, length=17, size=1500):
        self.length = length
        self.size = size

    def __iter__(self):
        for index in range(self.length):
            yield torch.full((self.size,), float(index)), index


class SizedStream(Stream):
    """Says its length."""

    def __len__(self):
        return self.length


class ShardedStream(Stream):
    """Worker 0 gets most, the last one little, so that workers end at different times."""

    SHARES = (0.6, 0.9, 1.0)

    def __iter__(self):
        info = get_worker_info()
        start, stop = 0, self.length
        if info is not None and info.num_workers == len(self.SHARES):
            shares = (0.0, *self.SHARES)
            start = round(self.length * shares[info.id])
            stop = round(self.length * shares[info.id + 1])
        for index in range(start, stop):
            yield torch.full((self.size,), float(index)), index, -1 if info is None else info.id


class EvenlySharded(Stream):
    """Each worker gets every n-th number."""

    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(start, self.length, step)


class RandomStream(Stream):
    """Draws from the three global generators for each sample; worker n gives 3 n samples less."""

    def __iter__(self):
        info = get_worker_info()
        for _ in range(self.length if info is None else self.length - 3 * info.id):
            yield random.random(), np.random.rand(2), torch.rand(1100)


class CountingStream(Stream):
    """Remembers how often it was iterated: persistent workers go on counting."""

    def __init__(self, length=9):
        super().__init__(length)
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        for index in range(self.length):
            yield self.epoch, index


class Counting(Rows):
    """Remembers how many samples this copy has given."""

    def __init__(self, length=20):
        super().__init__(length)
        self.given = 0

    def __getitem__(self, index):
        self.given += 1
        return index, self.given


class WorkerReport(Rows):
    """What a worker knows of itself."""

    def __getitem__(self, index):
        info = get_worker_info()
        if info is None:
            return index, -1, -1, -1, torch.get_num_threads()
        assert isinstance(info.dataset, WorkerReport)
        return index, info.id, info.num_workers, info.seed, torch.get_num_threads()


class Marked(Rows):
    """Carries a mark that `worker_init_fn` sets."""

    mark = -1

    def __getitem__(self, index):
        return index, self.mark, torch.rand(2)


def mark_worker(worker_id):
    """A `worker_init_fn` that reaches its copy of the dataset, and draws."""
    get_worker_info().dataset.mark = 100 * worker_id + random.randrange(100)
    torch.rand(worker_id + 1)


def seed_worker(worker_id):
    """The `worker_init_fn` that torch's documentation advises."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed + worker_id)


class EagerSampler(Sampler):
    """Draws its whole order from the global generator when it is asked for an iterator."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


class LazySampler(EagerSampler):
    """Draws from the global generator as it goes."""

    def __iter__(self):
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


class TensorSampler(EagerSampler):
    """Yields indices that are tensors."""

    def __iter__(self):
        return iter(torch.randperm(self.length))


class UnevenBatches(Sampler):
    """Batches of 1, 2, 3, ... indices."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size + 1


def collate_examples(samples):
    """Collate into a user's own class."""
    images = torch.stack([sample.image for sample in samples])
    return Example(images, samples[0].label, samples[-1].name)


def collate_as_they_are(samples):
    """No collate at all."""
    return samples


def collate_with_extras(samples):
    """Default collate in a custom one, with a None, an array and a random tensor beside it."""
    batch = torch.utils.data.default_collate(samples)
    return (
        batch,
        None,
        np.stack([np.full(700, len(samples), "f4")]),
        torch.rand(3),
        {"n": len(samples)},
    )


def collate_read_only(samples):
    """Arrays that may not be written to, small ones and large ones."""
    first = int(samples[0][1])
    large = np.full((30, 40), first)
    large.flags.writeable = False
    return large, large.T, np.broadcast_to(np.float32(first), 9), np.frombuffer(b"abc", "u1")


def collate_ragged(samples):
    """Batches whose shape depends on what they hold."""
    longest = max(index for _, index in samples) + 1
    return torch.stack([row[:longest] for row, _ in samples])


def double(sample):
    """A collate for `batch_size=None`: gets one sample."""
    row, index = sample
    return row * 2, index


class ArrayBatches:
    """Batches as arrays of a dtype and a memory order of the user's own."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __iter__(self):
        for batch in ([1, 0, 2, 0], [3, 0, 5, 0], [7]):
            yield np.array(batch, self.dtype)
        yield np.arange(12, dtype=self.dtype)[::3]


class Asking(Rows):
    """Says what its index was."""

    def __getitem__(self, index):
        return f"{type(index).__name__} {index!r}"
