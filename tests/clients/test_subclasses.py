# SPDX-License-Identifier: Apache-2.0
"""Subclasses of torch's loader as they are found in the wild, on torch's and on ours.

Each pattern is a class body that is given its base. Under the same seeds both must behave alike:
the same batches bit for bit, the same lengths, the same errors.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import numpy as np
import pytest
import torch
import torch.utils.data
from tests.torch.comparing import assert_same
from torch.utils.data import Dataset
from torch.utils.data import dataloader as torchs

import penstock.torch
from penstock.torch.loader import _LoaderIterator

NUM_SAMPLES = 10
BASES = [torch.utils.data.DataLoader, penstock.torch.DataLoader]
both = pytest.mark.parametrize("num_workers", [0, 2])


class Noisy(Dataset):
    """Index, and random numbers as augmentations draw them."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index, torch.rand(3), np.random.rand()


class Forever:
    """A sampler, or batch sampler, that begins again when it has ended."""

    def __init__(self, inner):
        self.sampler = inner

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


def infinite(base):
    """One iterator for all epochs, so that workers stay (as the YOLO families have it)."""

    class Infinite(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self):
            return len(self.batch_sampler.sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

        def reset(self):
            self.iterator = self._get_iterator()

        def __del__(self):
            try:
                # With torch's own loader a worker that ends while it holds the lock of the event
                # "done" lets the next line wait for ever, once in some hundred times.
                is_torchs = base is torch.utils.data.DataLoader
                for worker in () if is_torchs else self.iterator._workers:
                    if worker.is_alive():
                        worker.terminate()
                self.iterator._shutdown_workers()
            except Exception:  # without workers there are none
                pass

    return Infinite


def multi_epochs(base):
    """The same by the name-mangled flag with which torch guards its attributes."""

    class MultiEpochs(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            if self.batch_sampler is None:
                self.sampler = Forever(self.sampler)
            else:
                self.batch_sampler = Forever(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self):
            sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
            return len(sampler.sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

    return MultiEpochs


def transforming(base):
    """`__iter__` and `__len__` overridden."""

    class Transforming(base):
        def __iter__(self):
            for index, noise, number in super().__iter__():
                yield {"index": index, "noise": noise * 2, "number": number}

        def __len__(self):
            return super().__len__() + 1

    return Transforming


def wrapped_iterator(base):
    """`_get_iterator` overridden, torch's own hook."""

    class Counted:
        def __init__(self, inner):
            self.inner = inner
            self.num_given = 0

        def __iter__(self):
            return self

        def __next__(self):
            batch = next(self.inner)
            self.num_given += 1
            return batch, self.num_given

    class WrappedIterator(base):
        def _get_iterator(self):
            return Counted(super()._get_iterator())

    return WrappedIterator


def torchs_iterators(base):
    """`__iter__` that makes torch's private iterators by name."""

    class TorchsIterators(base):
        def __iter__(self):
            if self.num_workers == 0:
                return torchs._SingleProcessDataLoaderIter(self)
            return torchs._MultiProcessingDataLoaderIter(self)

    return TorchsIterators


def with_attributes(base):
    """Attributes, properties and methods by the names that our arguments have."""

    class WithAttributes(base):
        device = "cuda:9"

        def __init__(self, *args, seed=None, **kwargs):
            self.seed = seed
            self.epoch = 0
            self.failures = 3
            super().__init__(*args, **kwargs)
            self.progress = {"done": 0}
            self.on_error = print

        @property
        def backend(self):
            return "nccl"

        def address(self):
            return self.seed, self.device

        def __iter__(self):
            self.epoch += 1
            self.progress["done"] = self.epoch
            return super().__iter__()

    return WithAttributes


PATTERNS = [
    infinite,
    multi_epochs,
    transforming,
    wrapped_iterator,
    torchs_iterators,
    with_attributes,
]
patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)


def three_epochs(loader):
    """Twelve batches, in turns of what the loader takes for an epoch."""
    return [list(itertools.islice(loader, 4)) for _ in range(3)]


@both
@patterns
def test_a_subclass_gives_what_it_gives_on_torchs_loader(pattern, num_workers):
    expected, got = [], []
    for base, found in zip(BASES, (expected, got), strict=True):
        torch.manual_seed(3), np.random.seed(3)
        loader = pattern(base)(Noisy(), batch_size=3, shuffle=True, num_workers=num_workers)
        assert isinstance(loader, torch.utils.data.DataLoader)
        found += [len(loader), three_epochs(loader), torch.get_rng_state(), loader.batch_size]
        del loader
    assert_same(expected, got)


@both
def test_a_reset_begins_with_a_new_iterator_and_sees_what_was_changed(num_workers):
    class Closable(Noisy):
        mosaic = True

        def __getitem__(self, index):
            return index, self.mosaic, torch.rand(2)

    found = []
    for base in BASES:
        torch.manual_seed(9)
        loader = infinite(base)(Closable(), batch_size=4, shuffle=True, num_workers=num_workers)
        before = list(loader)
        loader.dataset.mosaic = False  # as YOLO's last epochs do
        loader.reset()
        found.append([before, list(loader)])
        del loader
    assert_same(*found)
    assert not any(torch.any(mosaic) for _, mosaic, _ in found[1][1])


# A loader in a config.


COPIES = {
    "pickled": lambda loader: pickle.loads(pickle.dumps(loader)),
    "copied deeply": copy.deepcopy,
    "copied": copy.copy,
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("seed", [None, 7])
def test_a_loader_is_copied_with_its_config_before_an_epoch(kind, seed):
    options = {} if seed is None else {"seed": seed}
    bases = BASES if seed is None else BASES[1:]
    found = []
    for base in bases:
        config = {"train": base(Noisy(), batch_size=3, shuffle=True, num_workers=2, **options)}
        config = {"train": COPIES[kind](config["train"])}
        torch.manual_seed(1)
        found.append(list(config["train"]))
    if seed is not None:
        loader = penstock.torch.DataLoader(Noisy(), batch_size=3, shuffle=True, seed=seed)
        found.append(list(loader))
    assert_same(*found)


@pytest.mark.parametrize("kind", ["pickled", "copied deeply"])
@pytest.mark.parametrize("base", BASES, ids=["torch", "penstock"])
def test_persistent_workers_cannot_be_copied_and_say_so(kind, base):
    loader = base(range(6), num_workers=1, persistent_workers=True)
    list(loader)
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        COPIES[kind](loader)
    assert [int(i) for i in loader] == list(range(6))  # and go on
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert [int(i) for i in COPIES[kind](loader)] == list(range(6))


# Wrappers around a loader, and code that looks inside.


@pytest.mark.parametrize("base", BASES, ids=["torch", "penstock"])
def test_code_that_looks_at_the_persistent_iterator_finds_what_it_needs(base):
    loader = base(range(8), batch_size=2, num_workers=2, persistent_workers=True)
    assert loader._iterator is None
    batches = iter(loader)
    workers = list(loader._iterator._workers)
    pids = [worker.pid for worker in workers]
    assert all(worker.is_alive() for worker in workers)
    assert len(batches) == 4
    assert next(batches).tolist() == [0, 1]
    assert len(list(batches)) == 3
    assert len(list(loader)) == 4
    assert [worker.pid for worker in loader._iterator._workers] == pids
    loader._iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in workers)
    loader._iterator = None
    assert len(list(loader)) == 4  # with new ones
    loader._iterator._shutdown_workers()


@pytest.mark.parametrize("base", BASES, ids=["torch", "penstock"])
def test_the_index_sampler_and_the_kind_of_dataset_are_where_code_looks_for_them(base):
    loader = base(range(8), batch_size=2)
    assert loader._index_sampler is loader.batch_sampler
    assert loader._auto_collation
    assert loader._dataset_kind == torchs._DatasetKind.Map
    assert loader._IterableDataset_len_called is None
    assert base(range(8), batch_size=None)._index_sampler is not None
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 3
    loader._DataLoader__initialized = False
    loader.batch_size = 3  # as code does that wants another label on the loader
    loader._DataLoader__initialized = True
    assert loader.batch_size == 3
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_iterator_is_not_of_torchs_private_classes():
    # What docs/differences-from-torch.md says of isinstance checks.
    for num_workers in (0, 2):
        batches = iter(penstock.torch.DataLoader(range(4), num_workers=num_workers))
        assert type(batches) is _LoaderIterator
        assert not isinstance(batches, torchs._BaseDataLoaderIter)
        assert len(list(batches)) == 4


@pytest.mark.parametrize("base", BASES, ids=["torch", "penstock"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_private_names_of_the_iterator_that_have_a_counterpart(base, num_workers):
    loader = base(range(8), batch_size=2, num_workers=num_workers)
    batches = iter(loader)
    assert batches._index_sampler is loader.batch_sampler
    assert batches._collate_fn is loader.collate_fn
    assert batches._dataset is loader.dataset
    assert [batches._next_data().tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in batches] == [[4, 5], [6, 7]]
    with pytest.raises(StopIteration):
        batches._next_data()


@pytest.mark.parametrize("options", [{}, {"seed": 3, "persistent_workers": True, "num_workers": 1}])
def test_private_names_without_a_counterpart_say_what_to_use(options):
    batches = iter(penstock.torch.DataLoader(range(8), **options))
    assert (batches._num_yielded, len(batches._workers)) == (0, options.get("num_workers", 0))
    for name, instead in {
        "_next_index": "loader.batch_sampler",
        "_sampler_iter": "loader.batch_sampler",
        "_dataset_fetcher": "loader.dataset",
        "_data_queue": "loader.stats()",
        "_worker_result_queue": "loader.stats()",
    }.items():
        with pytest.raises(AttributeError, match=rf"no {name}: .*{re.escape(instead)}"):
            getattr(batches, name)
        assert not hasattr(batches, name)
    batches._shutdown_workers()


def test_attributes_of_a_subclass_stay_its_own_and_change_nothing():
    loader = with_attributes(penstock.torch.DataLoader)(Noisy(), batch_size=3, seed=11)
    assert (loader.seed, loader.device, loader.backend) == (11, "cuda:9", "nccl")
    assert (loader.epoch, loader.failures, loader.on_error) == (0, 3, print)
    assert loader.address() == (11, "cuda:9")
    assert loader.progress == {"done": 0}
    assert loader.state_dict()["seed"] is None  # it was not passed on
    assert loader.stats().num_workers == 0
    assert len(list(loader)) == 4
