# SPDX-License-Identifier: Apache-2.0
"""The seeded stream of threads is that of no workers, and of processes, bit for bit."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from penstock import FaultPolicy, Loader, sample_rng
from penstock.collate import default_collate
from penstock.data import IterableDataset, shard

# OpenCV's threads, of whatever ran before, are no danger to datasets without it.
pytestmark = pytest.mark.filterwarnings("ignore:Workers are about to be forked:RuntimeWarning")


class OwnNoise:
    """Sample i: (i, numbers of the sample's own generator)."""

    length = 37

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = sample_rng()
        return index, rng.random(2), sample_rng().normal()


class ListNoise(OwnNoise):
    """Read as a list."""

    def __getitems__(self, indices):
        return [(i, sample_rng(k).random(2), k) for k, i in enumerate(indices)]


class BatchNoise(OwnNoise):
    """Read as a batch."""

    def get_batch(self, indices, alloc):
        numbers = alloc((len(indices), 2), np.float64)
        for k in reversed(range(len(indices))):
            numbers[k] = sample_rng(k).random(2)
        return [np.array(indices), numbers]


class SomeBroken(OwnNoise):
    """Every seventh sample raises, after it has drawn."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index % 7 == 3:
            raise ValueError(f"sample {index} is broken")
        return sample


class Dealt(IterableDataset):
    """A stream that is dealt out, and that can go on where it was."""

    def __init__(self, length=41):
        self.length = length
        self.position = self.start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        self.position = start
        for number, item in enumerate(shard(range(self.length))):
            if number < start:
                continue
            self.position = number + 1
            yield item, sample_rng().random()

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


def with_noise(samples):
    batch = default_collate(samples)
    return [*batch, sample_rng().random(3)]


CASES = {
    "samples": (OwnNoise, {}),
    "lists": (ListNoise, {}),
    "batches": (BatchNoise, {}),
    "collate": (OwnNoise, {"collate_fn": with_noise}),
    "skip": (SomeBroken, {"on_error": FaultPolicy("skip", max_failures=100)}),
    "replace": (SomeBroken, {"on_error": FaultPolicy("replace", max_failures=100)}),
}


def plain(batches):
    return [[np.asarray(leaf).tolist() for leaf in batch] for batch in batches]


def stream(dataset, num_workers, backend="thread", **options):
    shuffle = not isinstance(dataset, IterableDataset)
    loader = Loader(
        dataset, 5, num_workers=num_workers, backend=backend, seed=7, shuffle=shuffle, **options
    )
    return plain(loader)


@pytest.mark.filterwarnings("ignore:epoch 0. . bad samples")
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_threads_gives_what_no_workers_give(case):
    kind, options = CASES[case]
    expected = stream(kind(), 0, **options)
    for num_workers in (1, 2, 3, 4):
        assert stream(kind(), num_workers, **options) == expected
    assert stream(kind(), 2, "process", **options) == expected


def test_shares_of_a_stream_are_those_of_no_workers():
    expected = stream(Dealt(), 0)
    for num_workers in (1, 2, 3, 4):
        assert stream(Dealt(), num_workers) == expected
    assert stream(Dealt(), 3, "process") == expected


@pytest.mark.parametrize("kind", [OwnNoise, BatchNoise, Dealt])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_resumed_stream_of_threads_goes_on_where_it_was(kind, num_workers):
    shuffle = kind is not Dealt

    def loader():
        return Loader(kind(), 4, num_workers=num_workers, backend="thread", seed=7, shuffle=shuffle)

    whole = plain(loader())
    for count in (0, 1, 4):
        first = loader()
        batches = iter(first)
        begun = [next(batches) for _ in range(count)]
        state = json.loads(json.dumps(first.state_dict()))
        del batches
        rest = loader()
        rest.load_state_dict(state)
        assert plain(begun) + plain(rest) == whole


@pytest.mark.parametrize("seed", [None, 7])
def test_the_generators_of_the_process_are_never_touched(seed):
    torch = pytest.importorskip("torch")
    from penstock.torch import DataLoader

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    list(DataLoader(OwnNoise(), batch_size=5, num_workers=2, backend="thread", seed=seed))
    after = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    list(DataLoader(OwnNoise(), batch_size=5, num_workers=0, seed=seed))
    assert after == (random.random(), np.random.random(), torch.rand(1).item())


def test_without_a_seed_each_thread_draws_what_the_process_in_its_place_draws():
    torch = pytest.importorskip("torch")
    from penstock.torch import DataLoader

    def batches(backend):
        torch.manual_seed(5)
        loader = DataLoader(OwnNoise(), batch_size=5, num_workers=3, backend=backend)
        return plain(loader)

    of_threads = batches("thread")
    assert of_threads == batches("process")
    assert len({tuple(batch[2]) for batch in of_threads}) == len(of_threads)
