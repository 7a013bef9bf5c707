# SPDX-License-Identifier: Apache-2.0
"""Datasets that Ray's workers make batches of; numpy alone, so that an actor starts quickly."""

from __future__ import annotations

import os
import signal

import numpy as np

from penstock import get_worker_info, sample_rng
from penstock.data import IterableDataset, shard


class Drawn:
    """Sample i has random numbers of its own, from all sources that a seed decides."""

    def __init__(self, length=200, size=2000):
        self.length = length
        self.size = size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {
            "index": index,
            "own": sample_rng().random(3),
            "global": np.random.random(),
            "large": np.full(self.size, index, np.float32),
        }


class Suicidal(Drawn):
    """The first workers that read a sample of `at` are killed; files say that they were."""

    def __init__(self, folder, at, times=1, **options):
        super().__init__(**options)
        self.folder = folder
        self.times = times
        self.at = frozenset(at)

    def __getitem__(self, index):
        if index in self.at:
            self.die_once(index)
        return super().__getitem__(index)

    def die_once(self, index):
        for time in range(self.times):
            try:
                os.close(os.open(f"{self.folder}/{index}.{time}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


class Stream(IterableDataset):
    """Counts from 0, each worker its share, with random numbers."""

    def __init__(self, length=120):
        self.length = length

    def __iter__(self):
        for index in shard(range(self.length)):
            yield {"index": index, "own": sample_rng().random(3)}


class SuicidalStream(Stream):
    """The first worker that comes to a sample of `at` is killed."""

    def __init__(self, folder, at, **options):
        super().__init__(**options)
        self.killer = Suicidal(folder, at)

    def __iter__(self):
        for sample in super().__iter__():
            if sample["index"] in self.killer.at:
                self.killer.die_once(sample["index"])
            yield sample


class Table:
    """Rows of one large array, which is to lie in the object store once."""

    def __init__(self, num_rows=1000, num_columns=1000):
        self.rows = np.arange(num_rows * num_columns, dtype=np.float32).reshape(num_rows, -1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"row": self.rows[index], "is_view": not self.rows.flags.owndata, "pid": os.getpid()}


class WhoAmI:
    """Says what the worker knows of itself, by us and by torch."""

    def __init__(self, salt):
        self.salt = salt

    def __len__(self):
        return 64

    def __getitem__(self, index):
        import torch.utils.data

        infos = get_worker_info(), torch.utils.data.get_worker_info()
        return np.array([[i.id, i.num_workers, i.dataset.salt, i.dataset is self] for i in infos])
