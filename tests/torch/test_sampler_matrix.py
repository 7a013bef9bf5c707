# SPDX-License-Identifier: Apache-2.0
"""Every kind of sampler in every place that takes one: the drop-in gives what torch gives.

Reading in bulk among them, as torch documents it: `batch_size=None` and a batch sampler as
`sampler`, so that the dataset is asked for a list of samples at once.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as theirs
from tests.torch.comparing import assert_same
from tests.torch.datasets_for_tests import EagerSampler, LazySampler, TensorSampler, UnevenBatches
from tests.torch.test_equality import states

import penstock.torch as ours
from penstock import sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LENGTH = 14
KEYS = ("alder", "birch", "cedar", "dogwood", "elm")


class Asked(theirs.Dataset):
    """A sample says what was asked for, types included, and draws."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> Any:
        return repr(index), random.random(), np.random.rand(), torch.rand(2)


class AskedTogether(Asked):
    """Offers `__getitems__`, with samples that say so."""

    def __getitems__(self, indices: Any) -> list[Any]:
        return [(*self[index], f"of {len(indices)}") for index in indices]


class Backwards(theirs.SequentialSampler):
    """A subclass of a stock sampler, with an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(LENGTH))


class Halved(theirs.RandomSampler):
    """One that draws as the stock one does, and leaves half out."""

    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() if index % 2)


class Tuples(theirs.BatchSampler):
    """A subclass of torch's batch sampler, with batches of another type."""

    def __iter__(self) -> Iterator[Any]:
        return map(tuple, super().__iter__())


class Pairs:
    """A batch sampler that derives from nothing."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[Any]]:
        indices = iter(self.sampler)
        return map(list, zip(indices, indices, strict=False))


class Generated:
    """An iterable whose iterator is a generator that draws as it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(9):
            yield random.randrange(LENGTH) if random.random() < 0.5 else np.random.randint(LENGTH)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# Each is made anew from the library (torch.utils.data or penstock.torch) and the dataset.
SAMPLERS: dict[str, Callable[[Any, Any], Any]] = {
    "sequential": lambda lib, data: lib.SequentialSampler(data),
    "random": lambda lib, data: lib.RandomSampler(data),
    "random, generator": lambda lib, data: lib.RandomSampler(data, generator=own_generator()),
    "random, replacement": lambda lib, data: lib.RandomSampler(data, True, 9),
    "random, more than all": lambda lib, data: lib.RandomSampler(data, num_samples=LENGTH + 3),
    "weighted": lambda lib, data: lib.WeightedRandomSampler([1, 2] * 7, 11),
    "weighted, generator": lambda lib, data: lib.WeightedRandomSampler(
        torch.arange(14.0), 5, replacement=False, generator=own_generator()
    ),
    "subset": lambda lib, data: lib.SubsetRandomSampler([3, 1, 4, 1, 5, 9, 2]),
    "subset of an array": lambda lib, data: lib.SubsetRandomSampler(np.arange(7, dtype=np.int32)),
    "subset of keys": lambda lib, data: lib.SubsetRandomSampler(KEYS),
    "distributed": lambda lib, data: lib.DistributedSampler(data, 2, 1),
    "distributed, in order": lambda lib, data: lib.DistributedSampler(data, 3, 0, shuffle=False),
    "torch's in either": lambda lib, data: theirs.RandomSampler(data),
    "subclass": lambda lib, data: Backwards(data),
    "subclass that draws": lambda lib, data: Halved(data),
    "eager": lambda lib, data: EagerSampler(LENGTH),
    "lazy": lambda lib, data: LazySampler(LENGTH),
    "tensors": lambda lib, data: TensorSampler(LENGTH),
    "uneven batches": lambda lib, data: UnevenBatches(LENGTH),
    "generator function": lambda lib, data: Generated(),
    "list": lambda lib, data: [7, 7, 1, 0, 12],
    "tuple of keys": lambda lib, data: KEYS,
    "range": lambda lib, data: range(1, 12, 2),
    "array": lambda lib, data: np.array([5, 3, 8, 3], np.int16),
    "arrays": lambda lib, data: [np.arange(n, 2 * n, dtype=np.uint8) for n in range(1, 5)],
    "tensor": lambda lib, data: torch.tensor([5, 3, 8]),
    "dict": lambda lib, data: dict.fromkeys(KEYS),
    "Penstock's": lambda lib, data: sampling.RandomSampler(data, seed=5),
    "Penstock's, weighted": lambda lib, data: sampling.WeightedRandomSampler([1, 2] * 7, 11),
    "Penstock's share": lambda lib, data: sampling.DistributedSampler(data, 2, 1),
    "Penstock's share of a user's": lambda lib, data: sampling.DistributedSampler(
        EagerSampler(LENGTH), 2, 1
    ),
}
# Where a sampler is put: the loader's arguments.
PLACES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "unbatched": lambda lib, s: {"sampler": s, "batch_size": None},
    "batched": lambda lib, s: {"sampler": s, "batch_size": 3},
    "batched, dropping": lambda lib, s: {"sampler": s, "batch_size": 3, "drop_last": True},
    "bulk": lambda lib, s: {"sampler": lib.BatchSampler(s, 3, False), "batch_size": None},
    "bulk, dropping": lambda lib, s: {"sampler": lib.BatchSampler(s, 3, True), "batch_size": None},
    "bulk, batched": lambda lib, s: {"sampler": lib.BatchSampler(s, 2, False), "batch_size": 2},
    "bulk of lists": lambda lib, s: {
        "sampler": lib.BatchSampler(lib.BatchSampler(s, 2, False), 2, False),
        "batch_size": None,
    },
    "bulk, subclass": lambda lib, s: {"sampler": Tuples(s, 3, False), "batch_size": None},
    "bulk, the user's": lambda lib, s: {"sampler": Pairs(s), "batch_size": None},
    "bulk, Penstock's": lambda lib, s: {
        "sampler": sampling.BatchSampler(s, 3, False),
        "batch_size": None,
    },
    "batches": lambda lib, s: {"batch_sampler": lib.BatchSampler(s, 3, False)},
    "batches of lists": lambda lib, s: {
        "batch_sampler": lib.BatchSampler(lib.BatchSampler(s, 2, False), 2, False)
    },
    "batches, subclass": lambda lib, s: {"batch_sampler": Tuples(s, 3, True)},
    "batches, the user's": lambda lib, s: {"batch_sampler": Pairs(s)},
    "batches, Penstock's": lambda lib, s: {"batch_sampler": sampling.BatchSampler(s, 3, False)},
}
WITH_WORKERS = (
    "unbatched", "batched", "batches", "bulk", "bulk of lists", "bulk, subclass",
    "bulk, Penstock's",
)  # fmt: skip


def plain(samples: list[Any]) -> list[Any]:
    return samples


class Named(Asked):
    """Does not draw, so that a sampler that draws from a global generator does so alone."""

    def __getitem__(self, index: Any) -> Any:
        return repr(index)


def loader_of(
    lib: Any, sampler: str, place: str, dataset: type[Asked] = Asked, **options: Any
) -> Any:
    data = dataset()
    arguments = PLACES[place](lib, SAMPLERS[sampler](lib, data))
    return lib.DataLoader(data, collate_fn=plain, **arguments, **options)


def set_seeds(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def seen(lib: Any, sampler: str, place: str, num_epochs: int, **options: Any) -> list[object]:
    """Return all batches of a loader, and the states of the global generators after each."""
    set_seeds(20_240)
    loader = loader_of(lib, sampler, place, **options)
    found: list[object] = [states(None)]
    for _ in range(num_epochs):
        found.append([(batch, states(None)) for batch in loader])
        found.append(states(None))
    return found


def num_epochs_of(sampler: str) -> int:
    # torch's loader does not tell the epoch to a sampler, and so gives the same order again.
    return 1 if sampler.startswith("Penstock's") else 2


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_gives_in_every_place_what_it_gives_in_torchs_loader(sampler: str) -> None:
    for place in PLACES:
        for dataset in (Asked, AskedTogether):
            options = {"num_epochs": num_epochs_of(sampler), "dataset": dataset}
            expected = seen(theirs, sampler, place, **options)
            assert_same(expected, seen(ours, sampler, place, **options), f"{place}, {dataset}")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_and_so_it_does_with_workers(sampler: str) -> None:
    options = {"num_epochs": num_epochs_of(sampler), "num_workers": 2, "persistent_workers": True}
    for place in WITH_WORKERS:
        expected = seen(theirs, sampler, place, **options)
        assert_same(expected, seen(ours, sampler, place, **options), place)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_state_goes_on_with_the_rest_of_the_epoch(sampler: str, num_workers: int) -> None:
    for place in PLACES if num_workers == 0 else WITH_WORKERS:
        set_seeds(1)
        workers = {"num_workers": num_workers, "backend": "thread"}  # a state is the same with any
        loader = loader_of(ours, sampler, place, Named, **workers)
        empty = json.loads(json.dumps(loader.state_dict()))
        list(loader)
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = list(batches)
        set_seeds(2)
        resumed = loader_of(ours, sampler, place, Named, **workers)
        resumed.load_state_dict(empty)
        resumed.load_state_dict(state)
        assert list(resumed) == rest, place


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_seed_decides_the_epochs_of_a_sampler_in_every_place(sampler: str) -> None:
    for place in PLACES:
        num_workers = 2 if place == "bulk" else 0
        made = [
            loader_of(ours, sampler, place, seed=7, num_workers=number)
            for number in (0, num_workers, 0, num_workers)
        ]
        loaders = (set_seeds(number) or loader for number, loader in enumerate(made))
        whole = [list(loader) for loader in [next(loaders)] for _ in range(2)]
        assert_same(whole, [list(loader) for loader in [next(loaders)] for _ in range(2)], place)
        stopped = next(loaders)
        list(stopped)
        batches = iter(stopped)
        next(batches)
        state = json.loads(json.dumps(stopped.state_dict()))
        batches.close()
        resumed = next(loaders)
        resumed.load_state_dict(state)
        assert_same(whole[1][1:], list(resumed), place)
