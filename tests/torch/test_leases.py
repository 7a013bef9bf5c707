# SPDX-License-Identifier: Apache-2.0
"""A batch is the user's until the last alias of it is garbage, also where torch moves its bytes."""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from tests.support.slots import deliver
from torch.multiprocessing.reductions import shared_cache

import penstock.torch as pt
from penstock.collate import Collator
from penstock.data.dataset import batch_reader
from penstock.engine.assembly import PlainOutput
from penstock.torch.collate import TensorCollator
from penstock.transport.arena import Arena, SlotPool, SlotWriter
from penstock.transport.packing import AsTensor, pack, unpack

SHAPE = (4, 65_536)  # 1 MiB of float32: smaller batches of no process are torch's own memory
NUM_MORE = 30  # batches that go by while aliases of earlier ones are held

ANYWHERE = pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 1}, {"num_workers": 1, "backend": "thread"}],
    ids=["serial", "process", "thread"],
)


class Module(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("buffer", buffer)


ALIASES = {
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "memoryview": lambda x: memoryview(x.numpy()),
    "row": lambda x: x[0],
    "numpy of a row": lambda x: x[0].numpy(),
    "row of numpy": lambda x: x.numpy()[0],
    "numpy by DLPack": np.from_dlpack,
    "torch by DLPack": torch.from_dlpack,
    "torch of numpy": lambda x: torch.from_numpy(x.numpy()),
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "parameter": torch.nn.Parameter,
    "another dtype": lambda x: x.view(torch.int32),
    "expanded": lambda x: x[:1].expand(3, -1),
    "set_": lambda x: torch.empty(0).set_(x),
    "storage": lambda x: x.untyped_storage(),
}
MOVES = {
    "share_memory_": lambda x: x.share_memory_(),
    "share_memory_ of a row": lambda x: x[0].share_memory_(),
    "share_memory_ of the storage": lambda x: x.untyped_storage().share_memory_(),
    "share_memory of a module": lambda x: Module(x).share_memory(),
    "sent": ForkingPickler.dumps,
    "storage sent": lambda x: ForkingPickler.dumps(x.untyped_storage()),
}


def values(alias):
    if isinstance(alias, torch.UntypedStorage):
        alias = torch.empty(0).set_(alias)
    if isinstance(alias, torch.Tensor):
        alias = alias.detach().contiguous().view(torch.float32)
    return np.asarray(alias)


def num_running(leases):
    return sum(view() is not None for view in leases._items)


def unpacked(tree):
    """Return a tree that came through a slot, and what counts the leases."""
    pool, arena = SlotPool(), Arena()
    packed = pack(tree, SlotWriter(pool))
    return unpack(packed, deliver(pool, arena, packed.slots)), lambda: num_running(arena.leases)


def recycled(make):
    """Return what `make` makes in recycled memory, and what counts the leases."""
    output = PlainOutput()
    return make(output.empty), lambda: num_running(output._pool._leases)


def as_tensor(storage_and_leases):
    storage, num_leases = storage_and_leases
    return torch.empty(0).set_(storage), num_leases


ROWS = np.full(SHAPE, 5, np.float32)
BATCHES = {
    "slot": lambda: unpacked(torch.from_numpy(ROWS)),
    "slot, storage": lambda: as_tensor(unpacked(torch.from_numpy(ROWS).untyped_storage())),
    "slot, strides": lambda: unpacked(torch.from_numpy(ROWS).t()),
    "slot, of a worker without torch": lambda: unpacked(AsTensor(ROWS, "penstock.torch.worker")),
    "tensors": lambda: recycled(
        lambda alloc: TensorCollator(alloc).batch([*torch.from_numpy(ROWS)])
    ),
    "arrays": lambda: recycled(lambda alloc: TensorCollator(alloc).batch([*ROWS])),
    "TensorDataset": lambda: recycled(
        lambda alloc: batch_reader(pt.TensorDataset(torch.from_numpy(ROWS)))(np.arange(4), alloc)[0]
    ),
    "get_batch": lambda: recycled(
        lambda alloc: TensorCollator(alloc).sample(Collator(alloc).batch([*ROWS]))
    ),
    "collate_into": lambda: recycled(
        lambda alloc: TensorCollator(alloc).leaf(Collator(alloc).batch([*ROWS]))
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_lease_ends_with_the_last_alias_though_torch_moves_the_storage(move):
    for name, alias_of in ALIASES.items():
        batch, num_leases = unpacked(torch.zeros(4, 1000))
        alias = alias_of(batch)
        MOVES[move](batch)
        del batch
        assert num_leases() == 1, name
        del alias
        if torch.__version__ < (2, 13):  # torch 2.6 does so once it has sent 128 storages
            shared_cache.free_dead_references()
        assert num_leases() == 0, name


@pytest.mark.parametrize("made", BATCHES)
def test_every_tensor_over_leased_memory_keeps_its_lease(made):
    batch, num_leases = BATCHES[made]()
    array = batch.numpy()
    batch.share_memory_()
    del batch
    assert num_leases() == 1
    assert (array == 5).all()
    del array
    assert num_leases() == 0


class Numbered(torch.utils.data.Dataset):
    """Batches of one sample, full of their number."""

    def __len__(self):
        return len(ALIASES) + NUM_MORE

    def __getitem__(self, index):
        return torch.full(SHAPE, float(index))


@ANYWHERE
def test_aliases_keep_their_bytes_while_other_batches_go_by(workers):
    held = {}
    moves = list(MOVES.values())
    batches = iter(pt.DataLoader(Numbered(), **workers))
    for number, (name, alias_of) in enumerate(ALIASES.items()):
        batch = next(batches)[0]
        held[name] = alias_of(batch)
        moves[number % len(moves)](batch)
    del batch
    assert sum(1 for _ in batches) == NUM_MORE
    changed = [
        name
        for number, (name, alias) in enumerate(held.items())
        if not (values(alias) == number).all()
    ]
    assert changed == []


@pytest.mark.parametrize(
    ("workers", "is_seen"),
    [({}, False), ({"num_workers": 1}, True), ({"num_workers": 1, "backend": "thread"}, False)],
    ids=["serial", "process", "thread"],
)
def test_a_forked_child_writes_to_held_batches_of_processes_alone(workers, is_seen):
    batch = next(iter(pt.DataLoader(Numbered(), **workers)))
    array = batch.numpy()  # torch's own threads did not survive the fork
    if (child := os.fork()) == 0:
        array += 1
        os._exit(0)
    os.waitpid(child, 0)
    assert (array == float(is_seen)).all()
    assert not batch.is_shared()  # else torch would send the slot itself, which is used again


SAMPLES = {
    "tensors": [torch.ones(3, 5)] * 8,
    "bfloat16": [torch.ones(5, dtype=torch.bfloat16)] * 8,
    "numbers": [1.0] * 8,
    "a tensor": torch.ones(8, 5),
    "TensorDataset": pt.TensorDataset(torch.ones(8, 3, 5), torch.arange(8)),
    "ConcatDataset": pt.ConcatDataset([torch.ones(4, 5), torch.ones(4, 5)]),
}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "backend": "thread"}])
@pytest.mark.parametrize("samples", SAMPLES)
def test_a_small_batch_of_no_process_can_be_resized_as_torch_s(samples, workers):
    for batch in pt.DataLoader(SAMPLES[samples], batch_size=4, **workers):
        for tensor in batch if isinstance(batch, list) else [batch]:
            copy = tensor.clone()
            torch.cat([copy, copy], out=tensor.resize_(0))
            assert tensor.equal(torch.cat([copy, copy]))
            tensor.untyped_storage().resize_(0)
