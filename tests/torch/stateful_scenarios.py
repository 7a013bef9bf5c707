# SPDX-License-Identifier: Apache-2.0
"""Scenarios for the `StatefulDataLoader` of torchdata, and for Penstock's in its place.

A scenario is a moment at which a state is taken, with a dataset, arguments and samplers. `observe`
plays it with one of the two classes, and returns what a program can see of it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

LENGTH = 14


class Rows:
    """A map-style dataset that writes down, for each worker, what it is asked."""

    def __init__(self, path):
        self.path = path
        self.count = 0

    def record(self, *what):
        info = get_worker_info()
        with Path(self.path).open("a") as file:
            file.write(f"{info.id if info else 'main'}: {' '.join(map(str, what))}\n")

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.record("read", index)
        self.count += 1
        return [index, *self.drawn()]

    def drawn(self):
        return []


class KeptRows(Rows):
    """Counts its samples, and keeps the count."""

    def drawn(self):
        return [self.count]

    def state_dict(self):
        self.record("state_dict", self.count)
        return {"count": self.count}

    def load_state_dict(self, state):
        self.record("load", state["count"])
        self.count = state["count"]


class RandomRows(Rows):
    """Draws from all generators, of whose states it keeps torch's."""

    def drawn(self):
        return [int(torch.randint(1000, ())), random.randrange(1000), np.random.randint(1000)]

    def state_dict(self):
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["torch"])


class Stream(Rows, IterableDataset):
    """An iterable dataset without a state; worker 1 has more than the others."""

    __getitem__ = None

    def share(self):
        info = get_worker_info()
        if info is None:
            return range(LENGTH)
        return range(4) if info.id == 0 else range(100 * info.id, 100 * info.id + LENGTH - 4)

    def __iter__(self):
        self.record("iter")
        return iter(self.share())


class EmptyShare(Stream):
    """Has nothing for worker 0."""

    def share(self):
        return range(0) if get_worker_info().id == 0 else range(5)


class KeptStream(Stream):
    """Keeps its place, and the number of its epochs."""

    def __init__(self, path):
        super().__init__(path)
        self.place, self.epochs, self.begin = 0, 0, 0

    def __iter__(self):
        self.record("iter", self.begin)
        self.place, self.begin = self.begin, 0
        for number in self.share()[self.place :]:
            self.place += 1
            yield [number, self.epochs]
        self.place, self.epochs = 0, self.epochs + 1

    def state_dict(self):
        self.record("state_dict", self.place, self.epochs)
        return {"place": self.place, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.record("load", state["place"], state["epochs"])
        self.begin, self.epochs = state["place"], state["epochs"]


class Place:
    """An iterator that keeps its place."""

    def __init__(self, stream):
        self.stream, self.place = stream, 0

    def __iter__(self):
        return self

    def __next__(self):
        share = self.stream.share()
        if self.place == len(share):
            raise StopIteration
        self.place += 1
        return [share[self.place - 1], int(torch.randint(1000, ()))]

    def state_dict(self):
        self.stream.record("iterator's state_dict", self.place)
        return {"place": self.place, "torch": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.stream.record("iterator's load", state["place"])
        self.place = state["place"]
        torch.set_rng_state(state["torch"])


class StreamOfKept(Stream):
    """Its iterators keep their place, and the dataset nothing."""

    def __iter__(self):
        self.record("iter")
        return Place(self)


class BothKept(KeptStream):
    """Dataset and iterator keep a state each."""

    def __iter__(self):
        self.record("iter")
        self.epochs += 1
        return Place(self)


class OwnIterator(Stream):
    """Is its own iterator, and begins anew when it is asked for one."""

    def __iter__(self):
        self.record("iter")
        self.place = 0
        return self

    __next__ = Place.__next__

    @property
    def stream(self):
        return self

    state_dict = Place.state_dict
    load_state_dict = Place.load_state_dict


class KeptSampler:
    """Keeps its place, with a generator as iterator."""

    def __init__(self, size=1):
        self.place, self.begin, self.size = 0, 0, size

    def __len__(self):
        return LENGTH // self.size

    def __iter__(self):
        self.place, self.begin = self.begin, 0
        for number in range(self.place, LENGTH, self.size):
            self.place = number + self.size
            batch = [(LENGTH - 1 - k) % LENGTH for k in range(number, number + self.size)]
            yield batch[0] if self.size == 1 else batch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.begin = state["place"]


class KeptIteratorSampler:
    """Its iterators keep their place."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return KeptIndices()


class KeptIndices:
    place = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == LENGTH:
            raise StopIteration
        self.place += 1
        return LENGTH - self.place

    state_dict = KeptSampler.state_dict

    def load_state_dict(self, state):
        self.place = state["place"]


def batches_of(generator):
    return BatchSampler(RandomSampler(range(LENGTH), generator=generator), 4, drop_last=False)


ORDERS = {  # each gets a generator
    "sequential": lambda g: {},
    "shuffle": lambda g: {"shuffle": True},
    "shuffle, generator": lambda g: {"shuffle": True, "generator": g},
    "generator": lambda g: {"generator": g},
    "drop_last": lambda g: {"shuffle": True, "drop_last": True},
    "torch's RandomSampler": lambda g: {"sampler": RandomSampler(range(LENGTH))},
    "torch's RandomSampler, generator": lambda g: {
        "sampler": RandomSampler(range(LENGTH), generator=g)
    },
    "torch's WeightedRandomSampler": lambda g: {
        "sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH)
    },
    "list": lambda g: {"sampler": [3, 1, 2, 0, 5, 8]},
    "kept sampler": lambda g: {"sampler": KeptSampler()},
    "kept iterator of a sampler": lambda g: {"sampler": KeptIteratorSampler()},
    "batches in a list": lambda g: {"batch_sampler": [[0, 1], [5], [9, 3, 2], [4], [7, 8]]},
    "torch's BatchSampler": lambda g: {"batch_sampler": batches_of(g)},
    "kept batch sampler": lambda g: {"batch_sampler": KeptSampler(2)},
}
SETTINGS = {
    "0": {"num_workers": 0},
    "2": {"num_workers": 2},
    "2, persistent": {"num_workers": 2, "persistent_workers": True},
    "3, prefetch 1": {"num_workers": 3, "prefetch_factor": 1},
    "2, every 3": {"num_workers": 2, "snapshot_every_n_steps": 3},
    "2, every 0": {"num_workers": 2, "snapshot_every_n_steps": 0},
    "2, persistent, every 5": {
        "num_workers": 2, "persistent_workers": True, "snapshot_every_n_steps": 5,
    },
    "2, init": {"num_workers": 2, "worker_init_fn": torch.manual_seed},
}  # fmt: skip


def plain(batch):
    if isinstance(batch, list):
        return list(map(plain, batch))
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def as_list(samples):
    return samples


@dataclass
class Trial:
    """One class of loader, in one scenario."""

    kind: type
    folder: Path
    dataset: type
    settings: dict
    order: str
    batch_size: int | None
    paths: list = field(default_factory=list)
    seen: list = field(default_factory=list)

    def loader(self, **changes):
        """Make a loader, its dataset and samplers anew, as a program that starts again does."""
        self.paths.append(self.folder / f"{self.kind.__module__}-{len(self.paths)}")
        self.generator = torch.Generator().manual_seed(3)
        orders = ORDERS[self.order](self.generator)
        if "batch_sampler" not in orders:
            orders["batch_size"] = self.batch_size
        collate_fn = as_list if self.batch_size != 1 else None
        given = {**self.settings, **orders, "collate_fn": collate_fn, **changes}
        return self.kind(self.dataset(self.paths[-1]), **given)

    def resumed(self, state, **changes):
        loader = self.loader(**changes)
        loader.load_state_dict(state)
        return loader

    def take(self, batches, number=None):
        self.seen.append(list(map(plain, itertools.islice(batches, number))))

    def calls(self, number=-1):
        """Note what the dataset of a loader was asked; that loader's workers are at their end."""
        found = {}
        path = self.paths[number]
        for line in path.read_text().splitlines() if path.exists() else ():
            worker, _, what = line.partition(": ")
            found.setdefault(worker, []).append(what)
        self.seen.append(found)

    def generators(self):
        """Note which random numbers come next in this process."""
        self.seen.append([int(torch.randint(10**6, ())), random.randrange(10**6)])
        self.seen.append(self.generator.get_state().sum().item())


def whole(trial):
    loader = trial.loader()
    for _ in range(3):
        trial.take(loader)
        trial.generators()
    trial.calls()


def before(trial):
    loader = trial.loader()
    state = loader.state_dict()
    trial.take(loader)
    trial.take(loader)
    trial.calls()
    trial.take(trial.resumed(state))
    trial.calls()


def first(trial):
    loader = trial.loader()
    batches = iter(loader)
    state = loader.state_dict()
    trial.take(batches)
    loader = trial.resumed(state)
    trial.take(loader)
    trial.take(loader)
    trial.calls()


def middle(trial, number=3):
    loader = trial.loader()
    batches = iter(loader)
    trial.take(batches, number)
    state = loader.state_dict()
    trial.take(batches)
    torch.manual_seed(9)
    loader = trial.resumed(state)
    trial.take(loader)
    trial.generators()
    trial.take(loader)
    trial.calls()


def late(trial):
    middle(trial, 5)


def stopped(trial):
    loader = trial.loader()
    for k, batch in enumerate(loader):
        trial.seen.append(plain(batch))
        if k == 1:
            break
    state = loader.state_dict()
    trial.take(loader)  # another epoch
    trial.take(trial.resumed(state))
    trial.calls()


def last(trial):
    loader = trial.loader()
    for _ in loader:
        state = loader.state_dict()
    loader = trial.resumed(state)
    trial.take(loader)
    trial.take(loader)


def end(trial):
    loader = trial.loader()
    trial.take(loader)
    state = loader.state_dict()
    trial.take(loader)
    torch.manual_seed(9)
    loader = trial.resumed(state)
    trial.take(loader)
    trial.generators()
    trial.take(loader)


def loaded_twice(trial):
    loader = trial.loader()
    batches = iter(loader)
    trial.take(batches, 3)
    state = loader.state_dict()
    loader = trial.resumed(state)
    loader.load_state_dict(state)
    trial.take(loader)
    loader.load_state_dict(state)
    trial.take(loader)


def iterator_alive(trial):
    loader = trial.loader()
    batches = iter(loader)
    trial.take(batches, 2)
    state = loader.state_dict()
    trial.take(batches, 2)
    loader.load_state_dict(state)
    again = iter(loader)
    trial.take(again)
    trial.take(loader)


def resumed_twice(trial):
    loader = trial.loader()
    batches = iter(loader)
    trial.take(batches, 2)
    state = loader.state_dict()
    loader = trial.resumed(state)
    trial.take(iter(loader), 2)
    state = loader.state_dict()
    trial.take(trial.resumed(state))
    trial.calls()


def state_of_loaded(trial):
    loader = trial.loader()
    trial.take(iter(loader), 3)
    loader = trial.resumed(loader.state_dict())
    state = loader.state_dict()
    trial.take(loader)
    trial.take(trial.resumed(state))


def nothing_loaded(trial):
    loader = trial.loader()
    trial.take(iter(loader), 2)
    loader.load_state_dict({})
    trial.take(loader)


MOMENTS = {
    moment.__name__: moment
    for moment in (
        whole, before, first, middle, late, stopped, last, end, loaded_twice, iterator_alive,
        resumed_twice, state_of_loaded, nothing_loaded,
    )
}  # fmt: skip


def observe(kind, scenario, folder):
    """Play a scenario; an exception is noted and ends it."""
    moment, dataset, settings, order, batch_size = scenario
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    trial = Trial(kind, folder, dataset, SETTINGS[settings], order, batch_size)
    try:
        MOMENTS[moment](trial)
    except Exception as error:
        trial.seen.append(repr(error))
    return trial.seen


def scenarios():
    """Yield moment, dataset, settings, order and batch size of every scenario."""
    streams = Stream, KeptStream, StreamOfKept, BothKept, OwnIterator
    some = "0", "2", "2, persistent", "2, every 3"
    for moment in MOMENTS:
        for dataset, settings in itertools.product(
            (Rows, KeptRows, RandomRows, *streams), SETTINGS
        ):
            yield moment, dataset, settings, "sequential", 1
        for order, settings in itertools.product(ORDERS, some):
            yield moment, KeptRows, settings, order, 3
        kinds = Rows, KeptRows, Stream, KeptStream, StreamOfKept
        for dataset, settings, batch_size in itertools.product(kinds, ("0", "2"), (None, 3)):
            yield moment, dataset, settings, "sequential", batch_size
        for settings in ("2", "2, persistent"):
            yield moment, EmptyShare, settings, "sequential", 1


def name_of(scenario):
    moment, dataset, settings, order, batch_size = scenario
    return f"{moment}: {dataset.__name__}, workers {settings}, {order}, batches of {batch_size}"
