# SPDX-License-Identifier: Apache-2.0
"""`Targets` is a list that pickles by field, whatever has become of it, and arrives equal."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.slots import deliver

from penstock.transport.arena import Arena, SlotPool, SlotWriter
from penstock.transport.packing import AsTensor, pack, unpack
from penstock.vision.batches import Targets


def targets_of(counts=(2, 0, 3), make=np.asarray):
    return Targets(
        {
            "boxes": make(np.arange(4 * n, dtype=np.float32).reshape(n, 4)),
            "labels": make(np.arange(n)),
            "name": f"{n} objects",
        }
        for n in counts
    )


def assert_equal(found, expected):
    assert type(found) is type(expected) is Targets
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for key, value in one.items():
            assert type(value) is type(other[key])
            if isinstance(value, str):
                assert value == other[key]
            else:
                assert value.dtype == other[key].dtype
                assert np.array_equal(value, other[key])
                assert value.shape == other[key].shape


def again(targets):
    return pickle.loads(pickle.dumps(targets, protocol=5))


def roots_of(found, key):
    return {id(target[key].base) for target in found}


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["arrays", "tensors"])
def test_what_arrives_is_equal_and_writable(make):
    targets = targets_of(make=make)
    found = again(targets)
    assert_equal(found, targets)
    found[0]["boxes"][:] = 7
    assert found[2]["boxes"][0, 0] == 0


def test_a_field_is_one_array():
    found = again(targets_of())
    assert len(roots_of(found, "boxes")) == 1
    assert found[0]["boxes"].base.size == 20


def test_besides_the_values_little_is_pickled():
    targets = targets_of([10] * 64)
    num_bytes = sum(target["boxes"].nbytes + target["labels"].nbytes for target in targets)
    overhead, of_list = (len(pickle.dumps(t)) - num_bytes for t in (targets, list(targets)))
    assert overhead < of_list / 3


def test_changes_are_pickled():
    targets = targets_of()
    targets[0]["boxes"] = targets[0]["boxes"] * 2
    targets[1]["boxes"] = np.ones((1, 4), np.float32)
    del targets[2]
    assert_equal(again(targets), targets)
    assert again(targets)[1]["boxes"].tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[0].update(boxes=t[0]["boxes"].astype(np.float64)),
        lambda t: t[0].update(boxes=np.zeros((2, 5), np.float32)),
        lambda t: t[0].update(boxes=np.float32(3)),
        lambda t: t[0].update(boxes=torch.zeros(2, 4)),
        lambda t: t[0].update(boxes=[1, 2]),
        lambda t: t[0].pop("labels"),
        lambda t: t[1].update(more=3),
        lambda t: t.append("no dict"),
        lambda t: t.clear(),
        lambda t: t[0].update(labels=np.array(["a", None], object)),
        lambda t: t[0].update(boxes=np.asfortranarray(t[0]["boxes"])),
    ],
    ids=[
        "dtype",
        "width",
        "scalar",
        "tensor",
        "list",
        "missing",
        "more",
        "mixed",
        "empty",
        "objects",
        "order",
    ],
)
def test_what_cannot_be_one_array_arrives_as_it_is(change):
    targets = targets_of()
    change(targets)
    found = again(targets)
    assert len(found) == len(targets)
    for one, other in zip(found, targets, strict=True):
        assert type(one) is type(other)
        if isinstance(one, dict):
            assert list(one) == list(other)
            for key in one:
                assert type(one[key]) is type(other[key])
                assert np.array_equal(one[key], other[key])


def test_arrays_alone_travel_the_same_way():
    targets = Targets(np.full((n, 5), n, np.float32) for n in (2, 0, 3))
    found = again(targets)
    assert [array.tolist() for array in found] == [array.tolist() for array in targets]
    assert len({id(array.base) for array in found}) == 1


def test_a_tensor_that_requires_grad_keeps_it():
    targets = Targets([{"boxes": torch.zeros(2, 4, requires_grad=True)}])
    assert again(targets)[0]["boxes"].requires_grad


def test_read_only_arrays_arrive_writable():
    targets = targets_of([200, 300])
    values = np.zeros((500, 4), np.float32)
    values.flags.writeable = False
    targets[0]["boxes"], targets[1]["boxes"] = values[:200], values[200:]
    again(targets)[0]["boxes"][:] = 1


def test_views_of_one_array_in_the_slot_are_not_copied():
    pool, arena = SlotPool(), Arena()
    writer = SlotWriter(pool)
    masks = writer.empty((6, 64, 64), np.uint8)
    masks[:] = np.arange(6)[:, None, None]
    targets = Targets({"masks": masks[a:b]} for a, b in ((0, 2), (2, 2), (2, 6)))
    used = writer._heads["small"].used_bytes
    packed = pack(targets, writer)
    assert [extent.size_bytes for extent in packed.buffers] == [masks.nbytes]
    assert packed.buffers[0].offset == 0
    assert used == masks.nbytes  # it was the first, and nothing was placed after it
    found = unpack(packed, deliver(pool, arena, packed.slots))
    assert [target["masks"][:, 0, 0].tolist() for target in found] == [[0, 1], [], [2, 3, 4, 5]]
    last = found[2]["masks"]
    del masks, targets, found
    assert arena.take_freed() == ([], [])  # one view holds the slot
    assert last[3].min() == 5
    del last
    assert arena.take_freed() == (list(packed.slots), [])
    arena.remove(packed.slots)
    pool.close()


def test_neighbours_that_are_not_views_of_one_array_are_copied():
    whole = np.zeros((400, 4), np.float32)
    first, second = whole[:200], whole[200:].view()
    other = np.ones((200, 4), np.float32)
    found = again(Targets([{"b": first}, {"b": other}, {"b": second}]))
    assert [target["b"][0, 0] for target in found] == [0, 1, 0]


def shared(targets):
    """Whether what is pickled of the field "b" is the memory of the first target's."""
    buffers = []
    pickle.dumps(targets, protocol=5, buffer_callback=buffers.append)
    return any(np.shares_memory(np.frombuffer(b.raw(), "u1"), targets[0]["b"]) for b in buffers)


def test_rows_one_after_another_are_not_copied():
    whole = np.zeros((4000, 4), np.float32)
    assert shared(Targets([{"b": whole[:2000]}, {"b": whole[2000:]}]))


def test_rows_with_gaps_that_end_where_the_next_begin_are_copied():
    whole = np.arange(48_000, dtype=np.float32).reshape(6000, 8)[:, ::2]  # half of what it spans
    first, second = whole[:4000], whole[2000:4000]
    assert first[:2000].nbytes * 2 == first.nbytes
    found = again(Targets([{"b": first}, {"b": second}]))
    assert np.array_equal(found[0]["b"], first)
    assert np.array_equal(found[1]["b"], second)


def test_rows_that_only_happen_to_be_neighbours_are_copied():
    memory = memoryview(bytearray(64_000))
    first, second = (np.frombuffer(memory[k : k + 32_000], "f4") for k in (0, 32_000))
    assert first.base is not second.base
    assert not shared(Targets([{"b": first}, {"b": second}]))


def test_rows_that_may_not_be_written_to_arrive_writable_however_many():
    whole = np.zeros((4000, 4), np.float32)
    whole.flags.writeable = False
    targets = Targets([{"b": whole[:2000]}, {"b": whole[2000:]}])
    assert not shared(targets)
    again(targets)[1]["b"][:] = 1


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 900), st.integers(0, 900)), min_size=1),
    st.sampled_from([np.asarray, torch.from_numpy]),
)
def test_any_views_of_any_arrays_arrive_equal(spans, make):
    whole = [np.arange(n, n + 2700, dtype=np.float32).reshape(900, 3) for n in range(3)]
    whole.append(np.arange(5400, dtype=np.float32).reshape(900, 6)[:, ::2])  # with gaps
    parts = [make(whole[which])[min(a, b) : max(a, b)] for which, a, b in spans]
    found = again(Targets({"rows": part} for part in parts))
    for target, part in zip(found, parts, strict=True):
        assert np.array_equal(target["rows"], part)
        target["rows"][:] = -1  # nobody else's
    assert all((part >= 0).all() for part in parts)


def test_marked_arrays_become_one_tensor():
    targets = Targets(
        {"boxes": AsTensor(np.full((n, 4), n, np.float32), "penstock.torch.worker")}
        for n in (2, 0, 3)
    )
    found = again(targets)
    assert [target["boxes"].shape for target in found] == [(2, 4), (0, 4), (3, 4)]
    assert {
        target["boxes"].untyped_storage().data_ptr() for target in found if len(target["boxes"])
    } == {found[0]["boxes"].untyped_storage().data_ptr()}


def test_copies_are_lists_of_their_own():
    targets = targets_of()
    shallow, deep = copy.copy(targets), copy.deepcopy(targets)
    assert type(shallow) is type(deep) is Targets
    assert shallow[0] is targets[0]
    deep[0]["boxes"][:] = 9
    assert targets[0]["boxes"][0, 0] == 0


def test_torchs_own_pickler_takes_it():
    file = io.BytesIO()
    multiprocessing.reduction.ForkingPickler(file, 5).dump(targets_of())
    assert_equal(pickle.loads(file.getvalue()), targets_of())
