# SPDX-License-Identifier: Apache-2.0
"""Which datasets may be read by the batch."""

import numpy as np
import pytest

from penstock import Loader
from penstock.data import (
    ArrayDataset,
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
)
from penstock.data.dataset import batch_reader, register_batch_reader


class Doubled(ArrayDataset):
    def __getitem__(self, index):
        return tuple(2 * value for value in super().__getitem__(index))


class DoubledInBulk(ArrayDataset):
    def __getitems__(self, indices):
        return [(2 * value,) for (value,) in super().__getitems__(indices)]


class DoubledThroughout(Doubled):
    def get_batch(self, indices, alloc):
        return [2 * values for values in super().get_batch(indices, alloc)]


class Forwarding:
    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __getitem__(self, index):
        return self.dataset[index]


def test_get_batch_is_given_its_arguments_by_position():
    class OldNames:  # of before Empty became Allocator
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError("the batch is read at once")

        def get_batch(self, indices, empty):
            rows = empty((len(indices),), np.int64)
            rows[:] = indices
            return rows

    for dataset in (OldNames(), Subset(OldNames(), [0, 1, 2, 3]), ConcatDataset([OldNames()])):
        assert [batch.tolist() for batch in Loader(dataset, batch_size=2)] == [[0, 1], [2, 3]]


def test_a_dataset_with_get_batch_is_read_by_it():
    assert batch_reader(ArrayDataset(np.arange(3))) is not None
    assert batch_reader(DoubledThroughout(np.arange(3))) is not None


@pytest.mark.parametrize("cls", [Doubled, DoubledInBulk])
def test_a_subclass_that_changes_samples_is_not_bypassed(cls):
    assert batch_reader(cls(np.arange(3))) is None


def test_a_mixin_that_changes_samples_is_not_bypassed():
    class Negated:
        def __getitem__(self, index):
            return -index

    class Mixed(Negated, ArrayDataset):
        pass

    assert batch_reader(Mixed(np.arange(3))) is None


def test_a_proxy_is_not_mistaken_for_what_it_forwards_to():
    assert batch_reader(Forwarding(ArrayDataset(np.arange(3)))) is None


@pytest.mark.parametrize("name", ["get_batch", "__getitems__"])
def test_a_method_put_on_the_object_itself_stops_the_batch_path(name):
    dataset = ArrayDataset(np.arange(3))
    setattr(dataset, name, lambda *_: None)
    assert batch_reader(dataset) is None


def test_a_subclass_switches_the_batch_path_off_with_none():
    class Slow(ArrayDataset):
        get_batch = None

    assert batch_reader(Slow(np.arange(3))) is None


def test_can_get_batch_is_asked():
    assert batch_reader(ArrayDataset(np.array(["a", "b"]))) is None


@pytest.mark.parametrize("dataset", [[1, 2], {1: 2}, range(3), np.arange(3), "abc"])
def test_plain_containers_are_read_by_the_sample(dataset):
    assert batch_reader(dataset) is None


def test_a_registered_reader_holds_for_the_exact_type_only():
    class Foreign:
        pass

    class Derived(Foreign):
        pass

    register_batch_reader(Foreign, lambda dataset: lambda indices, alloc: (dataset, len(indices)))
    foreign = Foreign()
    assert batch_reader(foreign)(np.arange(2), np.empty) == (foreign, 2)
    assert batch_reader(Derived()) is None


def test_a_child_that_cannot_be_read_by_the_batch_stops_its_parents():
    whole, part = ArrayDataset(np.arange(3)), Doubled(np.arange(3))
    assert batch_reader(Subset(whole, [0])) is not None
    assert batch_reader(Subset(part, [0])) is None
    assert batch_reader(ConcatDataset([whole, part])) is None


def test_adding_concatenates_maps_and_chains_streams():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1, 2])

    numbers = ArrayDataset(np.arange(2))
    assert isinstance(numbers + numbers, ConcatDataset)
    assert isinstance(Stream() + Stream(), ChainDataset)
    assert list(Stream() + Stream()) == [1, 2, 1, 2]


def test_what_a_subclass_must_define_is_named():
    with pytest.raises(NotImplementedError, match="must define __getitem__"):
        Dataset()[0]
    with pytest.raises(TypeError, match=r"abstract.* '?__iter__"):
        IterableDataset()
    with pytest.raises(TypeError):
        len(Dataset())
