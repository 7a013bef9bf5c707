# SPDX-License-Identifier: Apache-2.0
"""Batches get to the device in order and whole, whenever the queues come to it."""

from __future__ import annotations

import collections
import contextlib
import gc
import traceback
import types
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device.fake import CONSUMER, COPIES, POISON, FakeAccelerator, HostMemory
from tests.support.processes import holds_in_child

from penstock.errors import ConfigError
from penstock.torch.device.accelerator import Accelerator, open_accelerator
from penstock.torch.device.copier import MAX_BEHIND, DeviceCopier, Pinning, map_leaves

MOST_HELD = 4  # batches in main memory, of a loop that finishes what it has begun


@pytest.fixture
def device():
    return FakeAccelerator()


@pytest.fixture
def host():
    return HostMemory()


def step(number):
    return lambda: f"epoch 2, step {number}"


def delivered(copier, batch, number=0):
    return copier.finish(copier.begin(batch, step(number)))


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


def test_a_batch_that_is_held_nowhere_else_is_copied_when_the_queue_comes_to_it(device, host):
    copier = DeviceCopier(device)
    begun = copier.begin({"x": host.tensor(1.0), "name": "a"}, step(0))
    assert host.num_held == 1
    batch = copier.finish(begun)
    assert batch["name"] == "a"
    assert batch["x"].tolist() == [POISON] * 3  # nothing has run
    device.advance(COPIES)
    assert batch["x"].tolist() == [1.0] * 3


def test_host_memory_is_let_go_of_when_its_copy_is_over_and_not_before(device, host):
    copier = DeviceCopier(device)
    for number in range(3):
        copier.begin([host.tensor(float(number))], step(number))
    assert host.num_held == 3
    for _ in range(4):  # two copies and their marks
        device.advance(COPIES)
    copier.begin([], step(3))
    assert host.num_held == 1


def test_the_fake_catches_memory_that_was_used_again_too_early(device, host):
    x = host.tensor(1.0)
    with device.copying():
        copy, other = device.copy(x), device.copy(host.tensor(2.0))
    del x  # as a copier would that holds nothing
    device.use(other)
    del other  # which was not given to the consumer's queue
    device.drain()
    assert copy.tolist() == device.read[0] == [POISON] * 3


def test_the_consumers_queue_waits_and_has_every_copy_before_the_batch_is_given(device, host):
    seen = []

    def transform(batch):
        seen.extend(device.asked(CONSUMER))
        return batch

    copier = DeviceCopier(device, transform)
    begun = copier.begin([host.tensor(1.0), host.tensor(2.0)], step(0))
    assert device.asked(CONSUMER) == []
    batch = copier.finish(begun)
    assert seen == ["wait", "given", "given", "mark"]
    given_numbers = {number for where, what, number in device.log if what == "given"}
    assert given_numbers == {id(tensor) for tensor in batch}


def test_what_is_on_the_device_already_stays(device):
    device.device = torch.device("meta")
    batch = [torch.empty(2, device="meta"), "text"]
    assert delivered(DeviceCopier(device), batch) is batch
    assert "copy" not in device.asked(COPIES)


def test_a_slow_device_holds_the_thread_and_not_ever_more_memory(device, host):
    copier = DeviceCopier(device)
    most = 0
    for number in range(40):
        delivered(copier, [host.tensor(float(number))], number)
        reached = sum(mark.is_reached for mark in device.marks if mark.queue == CONSUMER)
        most = max(most, number + 1 - reached)
        assert host.num_held <= MOST_HELD
    assert most == MAX_BEHIND


def test_a_quick_device_is_waited_for_no_longer_than_it_takes(device, host):
    copier = DeviceCopier(device)
    for number in range(20):
        delivered(copier, [host.tensor(float(number))], number)
        device.drain()
        copier.begin([], step(99))
        assert host.num_held == 0


class Moved:
    """Has a tensor inside, and moves when the consumer's queue has come so far."""

    def __init__(self, device, tensor):
        self.device = device
        self.tensor = tensor

    def to(self, device):
        assert device == self.device.device
        self.device.log.append((CONSUMER, "moved", self))
        self.device.drain()
        self.tensor = self.tensor.clone()  # in place, as graphs of torch_geometric do it
        return self


def test_an_object_moves_by_its_own_method_in_the_consumers_queue(device, host):
    copier = DeviceCopier(device)
    thing = Moved(device, host.tensor(5.0))
    begun = copier.begin([thing, host.tensor(1.0)], step(0))
    assert "moved" not in device.asked(CONSUMER)
    batch = copier.finish(begun)
    assert batch[0] is thing
    assert device.asked(CONSUMER) == ["wait", "given", "moved", "mark"]
    assert [thing.tensor.tolist(), batch[1].tolist()] == [[5.0] * 3, [1.0] * 3]


class Wrapped(torch.Tensor):
    """A tensor that moves in a way of its own."""

    def to(self, *args, **options):
        return "moved"


class Image(torch.Tensor):
    """A tensor with a name for its kind, as torchvision has them."""


def test_tensors_that_are_more_than_one_piece_of_memory_do_not_go_ahead(device):
    batch = [torch.ones(2).as_subclass(Wrapped), torch.ones(2).as_subclass(Image)]
    copier = DeviceCopier(device)
    moved, image = delivered(copier, batch)
    assert moved == "moved"
    assert type(image) is Image
    assert device.asked(COPIES) == ["copy", "mark"]


def test_a_failing_copy_names_batch_and_device_and_the_next_goes_on(device, host):
    copier = DeviceCopier(device)
    begun = copier.begin([host.tensor(0.0)], step(0))
    device.trouble = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError, match="no room") as raised:
        copier.begin([host.tensor(1.0)], step(1))
    assert "epoch 2, step 1, on the way to cuda:0, while copying it" in notes_of(raised.value)
    assert "Lower batch_size" in notes_of(raised.value)
    batches = [copier.finish(begun), delivered(copier, [host.tensor(2.0)], 2)]
    device.drain()
    assert [batch[0].tolist() for batch in batches] == [[0.0] * 3, [2.0] * 3]


def test_what_was_copied_of_a_batch_that_failed_is_held_until_it_is_read(device, host):
    class Bad(torch.Tensor):
        """Fails when it is looked at, after the tensor before it was copied."""

        @property
        def layout(self):
            raise ValueError("bad")

    copier = DeviceCopier(device)
    with pytest.raises(ValueError, match="bad"):
        copier.begin([host.tensor(1.0), torch.ones(1).as_subclass(Bad)], step(0))
    assert device.asked(COPIES) == ["copy"]
    copier.begin([], step(1))  # the copy has not run
    assert host.num_held == 1
    device.drain()
    copier.begin([], step(2))
    assert host.num_held == 0


class Refusing:
    def to(self, device):
        raise LookupError("not there")


def fail(batch):
    raise LookupError("no transform")


@pytest.mark.parametrize(
    ("batch", "transform", "note"),
    [
        ([Refusing()], None, "while moving a Refusing by its method `to`"),
        ([torch.ones(1)], fail, "while transforming it"),
    ],
)
def test_a_failing_method_and_a_failing_transform_are_named(device, batch, transform, note):
    with pytest.raises(LookupError) as raised:
        delivered(DeviceCopier(device, transform), batch, 3)
    assert notes_of(raised.value) == f"epoch 2, step 3, on the way to cuda:0, {note}"


def test_close_waits_for_copies_alone_and_lets_go_and_twice_does_nothing(device, host):
    copier = DeviceCopier(device)
    given_batch = delivered(copier, [host.tensor(1.0)])
    copier.begin([host.tensor(2.0)], step(1))
    copier.close()
    assert host.num_held == 0
    assert {mark.queue for mark in device.marks if mark.is_reached} == {COPIES}
    num_asked = len(device.log)
    copier.close()
    assert len(device.log) == num_asked
    assert given_batch[0].tolist() == [1.0] * 3


def test_close_raises_no_failure_of_the_device_and_lets_go(device, host):
    copier = DeviceCopier(device)
    copier.begin([host.tensor(1.0)], step(0))
    device.marks[0].error = RuntimeError
    copier.close()
    assert host.num_held == 0


def test_a_copier_that_goes_lets_no_memory_be_used_early(device, host):
    copier = DeviceCopier(device)
    begun = copier.begin([host.tensor(1.0)], step(0))
    copies = list(begun.copies)
    del copier, begun
    assert copies[0].tolist() == [1.0] * 3
    assert host.num_held == 0


def test_a_forked_copy_does_nothing(device, host):
    copier = DeviceCopier(device)
    copier.begin([host.tensor(1.0)], step(0))
    num_asked = len(device.log)

    def does_nothing():
        copier.close()
        copier.__del__()
        return len(device.log) == num_asked and host.num_held == 1

    assert holds_in_child(does_nothing)


@pytest.fixture
def no_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_batches_and_copiers_go_by_reference_counting_alone(device, host):
    copier = DeviceCopier(device, lambda batch: batch)
    batch = delivered(copier, {"x": [host.tensor(1.0)]})
    thing = delivered(copier, [Moved(device, host.tensor(1.0))])
    gone = [weakref.ref(batch["x"][0]), weakref.ref(copier)]
    device.drain()
    del batch, thing, copier
    assert [ref() for ref in gone] == [None, None]
    assert host.num_held == 0


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("trouble", ["copy", "to", "transform"])
def test_an_error_that_is_dropped_keeps_no_batch(device, host, trouble):
    copier = DeviceCopier(device, fail if trouble == "transform" else None)
    if trouble == "copy":
        device.trouble = LookupError(trouble)
    objects = [Refusing()] if trouble == "to" else []
    try:
        delivered(copier, [host.tensor(1.0), *objects])
    except LookupError:
        assert "epoch 2, step 0" in traceback.format_exc()
    else:
        raise AssertionError("nothing was raised")
    gone = weakref.ref(copier)
    del copier
    assert gone() is None
    assert host.num_held == 0


ACTIONS = st.lists(
    st.sampled_from(["begin", "finish", COPIES, CONSUMER, "drop", "fail", "object", "close"]),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS)
def test_whatever_the_queues_do_the_consumer_reads_what_was_sent(actions):
    device, host = FakeAccelerator(), HostMemory()
    expected = []

    def transform(batch):
        tensor = batch[0].tensor if isinstance(batch[0], Moved) else batch[0]
        device.use(tensor)

    copier = DeviceCopier(device, transform)
    begun = []
    for number, action in enumerate(actions):
        if action in ("begin", "object"):
            tensor = host.tensor(float(number))
            batch = [Moved(device, tensor) if action == "object" else tensor]
            del tensor
            begun.append((number, copier.begin(batch, step(number))))
            del batch
        elif action == "finish" and begun:
            sent, first = begun.pop(0)
            copier.finish(first)
            del first
            expected.append([float(sent)] * 3)
        elif action == "drop" and begun:
            begun.pop(0)
        elif action == "fail":
            device.trouble = ValueError("bad")
            with contextlib.suppress(ValueError):
                copier.begin([host.tensor(float(number))], step(number))
        elif action == "close":
            copier.close()
        elif action in (COPIES, CONSUMER):
            device.advance(action)
    begun.clear()
    copier.close()
    assert host.num_held == 0
    device.drain()
    assert device.read == expected


def test_on_the_cpu_batches_stay_as_they_are_and_objects_and_the_transform_are_called():
    copier = DeviceCopier(open_accelerator("cpu"))
    assert not copier.begins_ahead
    batch = {"x": torch.ones(2), "y": [torch.zeros(1)]}
    assert delivered(copier, batch) is batch
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    got = delivered(copier, [packed, torch.ones(2).as_subclass(Wrapped)])
    assert got[0].data.tolist() == packed.data.tolist()
    assert type(got[1]) is Wrapped  # it is there
    copier.close()
    with_transform = DeviceCopier(open_accelerator("cpu"), lambda batch: batch + 1)
    assert float(delivered(with_transform, torch.ones(()))) == 2.0


def test_a_device_without_queues_copies_by_itself():
    copier = DeviceCopier(Accelerator(torch.device("meta")))  # as MPS
    host = HostMemory()
    batch = delivered(copier, [host.tensor(1.0)])
    assert batch[0].device.type == "meta"
    assert host.num_held == 0


@pytest.mark.parametrize("device", ["nonsense", "cuda:-1", None, 2.5, "meta"])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(ConfigError, match=f"device={device!r} cannot be used: .*'auto'"):
        open_accelerator(device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_auto_is_the_cpu_and_others_are_refused():
    assert open_accelerator("auto").device == torch.device("cpu")
    for device in (0, "cuda:1", "mps"):
        with pytest.raises(ConfigError, match=f"device={device!r} cannot be used: "):
            open_accelerator(device)


class Pinnable:
    def __init__(self, error=None):
        self.error = error

    def pin_memory(self):
        if self.error is not None:
            raise self.error
        return "pinned"


def test_pinning_is_torchs_and_names_the_batch_that_fails():
    pinning = Pinning("cuda")
    assert not pinning.begins_ahead
    assert delivered(pinning, [Pinnable(), 1]) == ["pinned", 1]
    with pytest.raises(RuntimeError, match="no memory") as raised:
        pinning.begin([Pinnable(RuntimeError("no memory"))], step(1))
    assert (
        notes_of(raised.value) == "epoch 2, step 1, while page-locking the batch (pin_memory=True)"
    )
    pinning.close()


def test_a_batch_that_is_begun_ahead_in_inference_mode_can_be_trained_with(device):
    copier = DeviceCopier(device)
    with torch.inference_mode(), copier.without_autograd():
        begun = copier.begin([torch.ones(2)], step(0))
    (batch,) = copier.finish(begun)
    device.drain()
    weight = torch.ones(2, requires_grad=True)
    (weight * batch).sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]


# Containers

Point = collections.namedtuple("Point", ["x", "to"])  # a field like the method makes no leaf


class NamedList(list):
    name = "kept"


ONE, TWO = torch.ones(1), torch.ones(1) + 1
CONTAINERS = {
    "dict": ({"x": ONE, 4: None}, {"x": TWO, 4: None}),
    "default": (collections.defaultdict(list, x=ONE), collections.defaultdict(list, x=TWO)),
    "frozen": (types.MappingProxyType({"x": ONE}), types.MappingProxyType({"x": TWO})),
    "tuple": ((ONE, "text", b"bytes", 2.5), (TWO, "text", b"bytes", 2.5)),
    "namedtuple": (Point(ONE, (ONE,)), Point(TWO, (TWO,))),
    "list": ([ONE, [ONE], []], [TWO, [TWO], []]),
    "user's list": (NamedList([ONE]), NamedList([TWO])),
    "deque": (collections.deque([ONE, 2], 3), collections.deque([TWO, 2], 3)),
    "others": ([{1, 2}, None, True, np.float32(1)], [{1, 2}, None, True, np.float32(1)]),
    "Size": (torch.Size([2, 3]), torch.Size([2, 3])),
}


@pytest.mark.parametrize(("tree", "expected"), CONTAINERS.values(), ids=CONTAINERS)
def test_containers_keep_their_types_and_are_not_written_to(tree, expected):
    before = repr(tree)
    got = map_leaves(tree, lambda leaf: leaf + 1)
    assert type(got) is type(expected)
    assert repr(got) == repr(expected)
    assert repr(tree) == before
    assert getattr(got, "default_factory", None) is getattr(tree, "default_factory", None)


def test_what_a_leaf_raises_is_not_taken_for_the_containers():
    asked = []

    def refuse(leaf):
        asked.append(leaf)
        raise TypeError("no")

    with pytest.raises(TypeError, match="no"):
        map_leaves(collections.OrderedDict(x=ONE), refuse)
    assert len(asked) == 1
