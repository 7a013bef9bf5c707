# SPDX-License-Identifier: Apache-2.0
"""Tests of `penstock.integrations.jax` on four devices; test_jax.py runs them.

In a process of their own: JAX counts its devices once, and its threads make every later fork a
hazard.
"""

from __future__ import annotations

import gc
import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.clients.reused import ROWS, Reused

from penstock import Loader
from penstock.errors import ConfigError
from penstock.integrations.jax import to_devices


class Samples:
    """Row i is full of i; text is no number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {
            "x": np.full(1024, index, np.float32),
            "parts": (np.full((2, 8), index, np.int32), index),
            "name": f"sample {index}",
        }


def loader(num_workers=0, batch_size=8, dataset=None, **options):
    if num_workers and options.get("backend") != "thread":
        options.setdefault("multiprocessing_context", "forkserver")
    return Loader(
        Samples() if dataset is None else dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        seed=3,
        **options,
    )


@pytest.fixture(scope="module")
def by_rows():
    mesh = jax.make_mesh((4,), ("data",))
    return NamedSharding(mesh, PartitionSpec("data"))


@pytest.fixture(autouse=True)
def _nothing_is_left_in_jax():
    yield
    gc.collect()
    jax.device_put(0.0).block_until_ready()  # JAX lets go of arrays at its next call


def same(batch, expected):
    """Assert that a batch on devices holds what a batch in NumPy held."""
    assert batch["name"] == expected["name"]
    np.testing.assert_array_equal(batch["x"], expected["x"])
    np.testing.assert_array_equal(batch["parts"][0], expected["parts"][0])
    np.testing.assert_array_equal(batch["parts"][1], expected["parts"][1])


def test_there_are_four_devices():
    assert len(jax.devices()) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_split_over_the_devices_and_hold_what_the_loader_gives(by_rows, num_workers):
    batches = list(to_devices(loader(num_workers), by_rows))
    for batch, expected in zip(batches, loader(), strict=True):
        same(batch, expected)
        assert batch["x"].sharding == by_rows
        assert [shard.data.shape for shard in batch["x"].addressable_shards] == [(2, 1024)] * 4
        assert isinstance(batch["parts"], list)  # as the default collate has it


def lies_in(array, memory):
    """Return whether a shard of a jax array lies in a NumPy array's memory."""
    start = memory.ctypes.data
    return any(
        start <= shard.data.unsafe_buffer_pointer() < start + memory.nbytes
        for shard in array.addressable_shards
    )


@pytest.mark.parametrize("where", ["one device", "four devices"])
def test_held_batches_are_never_written_over_although_jax_takes_slots_as_they_are(by_rows, where):
    sharding = by_rows if where == "four devices" else jax.devices()[0]
    # That JAX aliases is the reason for this test; it has to be so for the test to mean anything.
    numpy_batch = next(iter(loader(1)))["x"]
    assert lies_in(jax.device_put(numpy_batch, sharding), numpy_batch)
    del numpy_batch
    source = loader(2, persistent_workers=True)
    placed = to_devices(source, sharding)
    held = [batch for _ in range(5) for batch in placed]  # 30 batches, of 3 that are under way
    again = loader()
    expected = [batch for _ in range(5) for batch in again]
    assert len(held) == len(expected) == 30
    for batch, numpy_batch in zip(held, expected, strict=True):
        same(batch, numpy_batch)
    del source, placed
    gc.collect()


def test_arrays_of_the_dataset_itself_are_copied(by_rows):
    dataset = Reused()
    held = list(to_devices(Loader(dataset, batch_size=8), by_rows, prefetch=0))
    assert len(held) == 6
    for number, batch in enumerate(held):
        expected = np.broadcast_to(np.arange(8)[:, None] + 8 * number, (8, 1024))
        np.testing.assert_array_equal(batch, expected)
        assert not lies_in(batch, dataset.buffer)


@pytest.mark.parametrize(
    ("num_workers", "prefetch", "num_given"),
    [*((0, prefetch, given) for prefetch in (0, 2, 50) for given in (0, 1, 4, 6)), (1, 2, 3)],
)
def test_the_state_counts_what_was_given_out_and_nothing_ahead(
    by_rows, num_workers, prefetch, num_given
):
    source = loader(num_workers, persistent_workers=num_workers > 0)
    placed = to_devices(source, by_rows, prefetch=prefetch)
    for _ in placed:  # an epoch before
        pass
    batches = iter(placed)
    for _ in range(num_given):
        next(batches)
    state = json.loads(json.dumps(placed.state_dict()))
    assert (placed.epoch, state["epoch"], state["batches"]) == (1, 1, num_given)
    rest = [batch["name"] for batch in batches]
    assert placed.state_dict()["epoch"] == 2
    again = to_devices(loader(), by_rows, prefetch=prefetch)
    again.load_state_dict(state)
    batches = iter(again)
    assert again.state_dict()["batches"] == num_given
    assert [batch["name"] for batch in batches] == rest
    assert [batch["name"] for batch in again] == [batch["name"] for batch in placed]
    del source, placed, batches
    gc.collect()


def test_a_loop_that_is_left_early_goes_on_with_the_next_epoch(by_rows):
    placed = to_devices(loader(), by_rows)
    for batch in placed:
        first = batch["name"]
        break
    assert placed.state_dict()["batches"] == 1
    second = [batch["name"] for batch in placed]
    plain = loader()
    assert next(iter(plain))["name"] == first
    assert [batch["name"] for batch in plain] == second
    placed.set_epoch(0)
    assert next(iter(placed))["name"] == first
    assert len(placed) == 6


def test_a_transform_may_fill_the_same_buffer_for_every_batch():
    buffer = np.zeros(8 * 1024 + 16, np.float32)  # JAX takes memory as it is that begins at 64 B
    first = -(buffer.ctypes.data // 4) % 16
    x, names = buffer[first : first + 8 * 1024].reshape(8, 1024), np.zeros(8, "U9")

    def padded(batch):
        x[:], names[:] = batch["x"], batch["name"]
        return {"x": x, "name": names}

    found = list(to_devices(loader(num_workers=1), transform=padded))
    for batch, expected in zip(found, loader(), strict=True):
        np.testing.assert_array_equal(batch["x"], expected["x"])
        assert batch["name"].tolist() == expected["name"]


def test_a_batch_that_cannot_be_split_is_jaxs_error_with_what_to_do(by_rows):
    with pytest.raises(ValueError, match="evenly divide") as caught:
        next(iter(to_devices(loader(batch_size=6), {"x": by_rows, "parts": None, "name": None})))
    assert "drop_last=True" in caught.value.__notes__[0]
    (batch, *_) = to_devices(loader(batch_size=8), {"x": by_rows, "parts": None, "name": None})
    assert batch["parts"][1].devices() == {jax.devices()[0]}


def test_a_last_batch_that_cannot_be_split_is_refused_dropped_or_padded(by_rows):
    dataset = np.zeros((50, 3), np.float32)  # 48 + 2
    with pytest.raises(ValueError, match="evenly divide"):
        list(to_devices(loader(batch_size=48, dataset=dataset), by_rows))
    dropped = to_devices(loader(batch_size=48, dataset=dataset, drop_last=True), by_rows)
    assert [batch.shape for batch in dropped] == [(48, 3)]
    padded = to_devices(
        loader(batch_size=48, dataset=dataset),
        by_rows,
        transform=lambda batch: np.pad(batch, ((0, -len(batch) % 4), (0, 0))),
    )
    assert [batch.shape for batch in padded] == [(48, 3), (4, 3)]


def test_each_part_of_a_batch_may_have_a_sharding_of_its_own(by_rows):
    whole = NamedSharding(by_rows.mesh, PartitionSpec())
    shardings = {"x": by_rows, "parts": whole, "name": whole}
    for batch, expected in zip(to_devices(loader(), shardings), loader(), strict=True):
        same(batch, expected)
        assert batch["x"].sharding == by_rows
        assert batch["parts"][0].sharding == batch["parts"][1].sharding == whole


def test_the_default_device_and_a_device():
    for sharding, device in ((None, jax.devices()[0]), (jax.devices()[2], jax.devices()[2])):
        batch = next(iter(to_devices(loader(), sharding)))
        assert batch["x"].devices() == {device}


def test_prefetch_is_checked():
    with pytest.raises(ConfigError, match="prefetch"):
        to_devices(loader(), prefetch=-1)
