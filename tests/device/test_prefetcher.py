# SPDX-License-Identifier: Apache-2.0
"""`DevicePrefetcher` is one batch ahead, and otherwise the loader itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.device.fake import COPIES, FakeAccelerator, HostMemory

from penstock.torch.device import prefetcher
from penstock.torch.device.prefetcher import DevicePrefetcher


@pytest.fixture
def device(monkeypatch):
    """The fake accelerator, in place of the one that the machine has not."""
    accelerator = FakeAccelerator()
    monkeypatch.setattr(prefetcher, "open_accelerator", lambda name: accelerator)
    return accelerator


class Loader:
    """Gives `number` batches; raises some errors instead."""

    def __init__(self, number, errors=None, host=None):
        self.number = number
        self.errors = errors or {}
        self.host = host or HostMemory()
        self.num_asked = 0

    def __iter__(self):
        return Asked(self)


class Asked:
    """An iterator that goes on after an error, as loaders' do."""

    def __init__(self, loader):
        self.loader = loader
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        position = self.position
        self.position += 1
        self.loader.num_asked += 1
        if position in self.loader.errors:
            raise self.loader.errors[position]
        if position >= self.loader.number:
            raise StopIteration
        return [self.loader.host.tensor(float(position))]


class SizedLoader(Loader):
    def __len__(self):
        return self.number


def values(batches, device):
    device.drain()
    return [batch[0].tolist()[0] for batch in batches]


def test_all_batches_come_in_order_and_the_copy_of_the_next_is_begun_before_one_is_given(device):
    loader = Loader(4)
    num_begun = []
    got = []
    for batch in DevicePrefetcher(loader):
        num_begun.append(device.asked(COPIES).count("copy"))
        got.append(batch)
    assert num_begun == [2, 3, 4, 4]
    assert values(got, device) == [0.0, 1.0, 2.0, 3.0]
    again = DevicePrefetcher(SizedLoader(2))
    assert values([*again, *again], device) == [0.0, 1.0, 0.0, 1.0]
    assert len(again) == 2


def test_a_loader_with_a_length_is_not_asked_beyond_it_before_the_last_batch_is_given(device):
    loader = SizedLoader(2)
    asked = [loader.num_asked for _ in DevicePrefetcher(loader)]
    assert asked == [2, 2]
    assert loader.num_asked == 3  # its own StopIteration ends it


def test_an_error_of_the_loader_comes_in_its_turn_and_the_rest_after_it(device):
    batches = iter(DevicePrefetcher(Loader(4, {1: LookupError("bad sample")})))
    got = [next(batches)]
    with pytest.raises(LookupError, match="bad sample"):
        next(batches)
    got.extend(batches)
    assert values(got, device) == [0.0, 2.0, 3.0]


def test_an_error_of_the_copy_ahead_comes_in_its_turn_and_names_its_batch(device):
    batches = iter(DevicePrefetcher(Loader(3)))
    got = [next(batches)]
    device.trouble = torch.OutOfMemoryError("no room")
    got.append(next(batches))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        next(batches)
    assert raised.value.__notes__[0] == (
        "batch 2 of Loader, on the way to cuda:0, while copying it"
    )
    assert next(batches, None) is None
    assert values(got, device) == [0.0, 1.0]


def test_an_interrupt_is_not_kept_for_later(device):
    batches = iter(DevicePrefetcher(Loader(3, {1: KeyboardInterrupt()})))
    with pytest.raises(KeyboardInterrupt):
        next(batches)


def test_after_close_nothing_comes_and_nothing_is_held(device):
    loader = Loader(9)
    batches = iter(DevicePrefetcher(loader))
    first = next(batches)
    batches.close()
    batches.close()
    assert loader.host.num_held == 0
    assert next(batches, None) is None
    assert values([first], device) == [0.0]


@pytest.mark.parametrize("number", [1, 9])
def test_a_loop_that_breaks_off_frees_loader_and_batches_at_once(device, number):
    gc.collect()
    gc.disable()
    try:
        loader = Loader(number)
        batches = iter(DevicePrefetcher(loader))
        source = weakref.ref(batches._source)
        for _ in batches:
            break
        del batches
        assert source() is None
        assert loader.host.num_held == 0
    finally:
        gc.enable()


def test_an_error_that_is_due_keeps_its_traceback_and_nothing_after_close(device):
    def generate():
        yield [torch.ones(1)]
        raise LookupError("bad")

    gc.collect()
    gc.disable()
    try:
        batches = iter(DevicePrefetcher(generate()))
        gone = weakref.ref(batches)
        next(batches)
        batches.close()
        del batches
        assert gone() is None
    finally:
        gc.enable()
    batches = iter(DevicePrefetcher(generate()))
    next(batches)
    with pytest.raises(LookupError) as raised:
        next(batches)
    assert raised.traceback[-1].name == "generate"


def test_on_the_cpu_nothing_is_asked_for_ahead():
    loader = Loader(3)
    asked = [(batch[0].tolist()[0], loader.num_asked) for batch in DevicePrefetcher(loader, "cpu")]
    assert asked == [(0.0, 1), (1.0, 2), (2.0, 3)]


def test_torchs_own_loader_goes_through(device):
    loader = torch.utils.data.DataLoader(torch.arange(5.0), batch_size=2)
    got = list(DevicePrefetcher(loader))
    device.drain()
    assert [batch.tolist() for batch in got] == [[0.0, 1.0], [2.0, 3.0], [4.0]]
