# SPDX-License-Identifier: Apache-2.0
"""What workers that are not forked get of the dataset, and what they share."""

from __future__ import annotations

import multiprocessing
import sys

import numpy as np
import pytest
import torch
from tests.process.plain_datasets import Finalized
from tests.process.shared_datasets import Counting, Holding, Reading

from penstock import Loader
from penstock.errors import UnpicklableError
from penstock.torch import DataLoader


class Deep:
    """Something that does not pickle, far inside."""

    def __init__(self):
        self.transform = {"steps": [str, (int, lambda x: x)]}

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_counter_made_for_processes_is_shared(method):
    context = multiprocessing.get_context(method)
    dataset = Counting(context.Value("i", 0))
    assert len(list(DataLoader(dataset, num_workers=2, multiprocessing_context=context))) == 8
    assert dataset.counter.value == 8


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_tensor_in_shared_memory_is_shared(method):
    dataset = Counting(torch.zeros(8).share_memory_())
    assert len(list(DataLoader(dataset, num_workers=2, multiprocessing_context=method))) == 8
    assert dataset.counter.tolist() == [1.0] * 8


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arrays_of_the_dataset_lie_in_one_segment_and_a_write_is_the_workers_own(method):
    dataset = Holding(np.arange(100_000.0))
    loader = DataLoader(
        dataset, num_workers=2, multiprocessing_context=method, sampler=[0, 0, 1, 1, 2, 2]
    )
    # Both workers read each index once: neither sees what the other wrote.
    assert [(value.item(), shared.item()) for value, shared in loader] == [
        (float(index), True) for index in (0, 0, 1, 1, 2, 2)
    ]
    assert dataset.array[0] == 0


# Before 2.14 torch's worker info kept the dataset until the process was gone.
LOADERS = [Loader, DataLoader, *[torch.utils.data.DataLoader] * (torch.__version__ >= (2, 14))]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__module__)
def test_a_dataset_is_finalized_as_its_worker_ends(loader, method, tmp_path):
    dataset = Finalized(tmp_path / "finalized")
    assert len(list(loader(dataset, num_workers=2, multiprocessing_context=method))) == 4
    assert dataset.path.read_text() == "None\nNone\n"


def test_a_connection_in_the_dataset_reaches_the_worker_as_itself():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    for number in range(4):
        sender.send(number * 10)
    loader = DataLoader(Reading(receiver), num_workers=1, multiprocessing_context="spawn")
    assert [batch.item() for batch in loader] == [0, 10, 20, 30]
    sender.close()
    receiver.close()


def test_shared_ctypes_without_a_lock_are_shared():
    context = multiprocessing.get_context("spawn")
    numbers = context.RawArray("i", [5, 6, 7, 8])
    loader = DataLoader(Reading(numbers), num_workers=1, multiprocessing_context=context)
    assert [batch.item() for batch in loader] == [5, 6, 7, 8]


def test_what_cannot_be_pickled_is_named_by_its_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    loader = DataLoader(Deep(), num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(UnpicklableError) as caught:
        iter(loader)
    message = str(caught.value)
    assert message.startswith("dataset.transform['steps'][1][1] cannot be sent to a worker: ")
    assert "<function Deep.__init__.<locals>.<lambda>" in message
    assert 'multiprocessing_context="fork"' in message


def test_a_function_that_cannot_be_pickled_is_named_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for name in ("collate_fn", "worker_init_fn"):
        loader = DataLoader(
            Holding(np.zeros(6)),
            num_workers=1,
            multiprocessing_context="spawn",
            **{name: lambda x: x},
        )
        with pytest.raises(UnpicklableError, match=f"^{name} cannot be sent"):
            iter(loader)
