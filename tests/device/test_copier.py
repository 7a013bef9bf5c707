# SPDX-License-Identifier: Apache-2.0
"""Batches get to the device in order and whole, whenever the queues come to it."""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device.fake import COPIES, POISON, TRAINER, FakeAccelerator, HostMemory
from tests.support.processes import holds_in_child

from penstock.errors import ConfigError
from penstock.torch.device.accelerator import Accelerator, open_accelerator
from penstock.torch.device.copier import MAX_BEHIND, MAX_OUTSTANDING, DeviceCopier, Pinning


@pytest.fixture
def device():
    return FakeAccelerator()


@pytest.fixture
def host():
    return HostMemory()


def step(number):
    return lambda: f"epoch 2, step {number}"


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


def test_a_batch_that_nobody_else_holds_is_copied_when_the_queue_comes_to_it(device, host):
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
        copy = device.copy(x)
    del x  # as a copier would that holds nothing
    device.drain()
    assert copy.tolist() == [POISON] * 3


def test_the_fake_catches_a_copy_that_was_not_given_to_the_main_process(device, host):
    with device.copying():
        copy = device.copy(host.tensor(1.0))
    device.use(copy)
    del copy
    device.drain()
    assert device.read == [[POISON] * 3]


def test_the_consumers_queue_waits_and_has_every_copy_before_the_batch_is_given(device, host):
    seen = []

    def transform(batch):
        seen.extend(device.asked(TRAINER))
        return batch

    copier = DeviceCopier(device, transform)
    begun = copier.begin([host.tensor(1.0), host.tensor(2.0)], step(0))
    assert device.asked(TRAINER) == []
    batch = copier.finish(begun)
    assert seen == ["wait", "given", "given", "mark"]
    given_numbers = {number for where, what, number in device.log if what == "given"}
    assert given_numbers == {id(tensor) for tensor in batch}


def test_what_is_on_the_device_already_stays(device):
    there = torch.empty(2, device="meta")
    device.device = torch.device("meta")
    copier = DeviceCopier(device)
    batch = [there, "text"]
    assert copier.finish(copier.begin(batch, step(0))) is batch
    assert "copy" not in device.asked(COPIES)


def test_a_tensor_that_is_in_a_batch_twice_is_copied_once(device, host):
    x = host.tensor(1.0)
    copier = DeviceCopier(device)
    batch = copier.finish(copier.begin({"a": x, "b": x}, step(0)))
    assert batch["a"] is batch["b"]
    assert device.asked(COPIES).count("copy") == 1


def test_a_slow_device_holds_the_thread_and_not_ever_more_memory(device, host):
    copier = DeviceCopier(device)
    most = 0
    for number in range(5 * MAX_OUTSTANDING):
        copier.finish(copier.begin([host.tensor(float(number))], step(number)))
        reached = sum(mark.is_reached for mark in device.marks if mark.queue == TRAINER)
        most = max(most, number + 1 - reached)
        assert host.num_held <= MAX_OUTSTANDING + 1
    assert most == MAX_BEHIND


def test_a_quick_device_is_never_waited_for(device, host):
    copier = DeviceCopier(device)
    for number in range(3 * MAX_OUTSTANDING):
        copier.finish(copier.begin([host.tensor(float(number))], step(number)))
        device.drain()
    assert "waited for" not in [what for _, what, _ in device.log]


class Moved:
    """Has a tensor inside, and moves in the main process's queue."""

    def __init__(self, device, tensor):
        self.device = device
        self.tensor = tensor
        self.asked = []

    def to(self, device, non_blocking=False):
        self.asked.append((device, non_blocking))
        self.device.log.append((TRAINER, "moved", self))
        there = torch.full_like(self.tensor, POISON)
        source = self.tensor.view(-1).detach()
        self.device._push(TRAINER, lambda: there.copy_(source))
        self.tensor = there  # in place, as graphs of torch_geometric do it
        return self


def test_an_object_moves_by_its_own_method_in_the_main_processes_queue(device, host):
    copier = DeviceCopier(device)
    thing = Moved(device, host.tensor(5.0))
    begun = copier.begin([thing, host.tensor(1.0), thing], step(0))
    assert thing.asked == []
    batch = copier.finish(begun)
    assert thing.asked == [(device.device, True)]
    assert batch[0] is batch[2] is thing
    assert device.asked(TRAINER) == ["wait", "given", "moved", "mark"]


def test_an_objects_host_memory_is_held_until_the_consumers_queue_has_moved_it(device, host):
    copier = DeviceCopier(device)
    batch = copier.finish(copier.begin([Moved(device, host.tensor(5.0))], step(0)))
    assert host.num_held == 1  # though the object itself has another tensor now
    device.drain()
    assert batch[0].tensor.tolist() == [5.0] * 3
    copier.begin([], step(1))
    assert host.num_held == 0


class Plain:
    def to(self, device):
        return device


class Anything:
    def to(self, *args, **options):
        return args, options


def test_non_blocking_is_given_to_those_that_take_it(device):
    copier = DeviceCopier(device)
    got = copier.finish(copier.begin([Plain(), Anything()], step(0)))
    assert got == [device.device, ((device.device,), {"non_blocking": True})]


class Wrapped(torch.Tensor):
    """A tensor that moves in a way of its own."""

    def to(self, *args, **options):
        return "moved"


class Image(torch.Tensor):
    """A tensor with a name for its kind, as torchvision has them."""


def test_tensors_that_are_more_than_one_piece_of_memory_do_not_go_ahead(device):
    copier = DeviceCopier(device)
    batch = [torch.ones(2).as_subclass(Wrapped), torch.ones(2).as_subclass(Image)]
    moved, image = copier.finish(copier.begin(batch, step(0)))
    assert moved == "moved"
    assert type(image) is Image
    assert device.asked(COPIES) == ["copy", "mark"]


def test_a_failing_copy_names_batch_and_device_and_the_next_goes_on(device, host):
    copier = DeviceCopier(device)
    begun = copier.begin([host.tensor(0.0)], step(0))
    device.trouble = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError, match="no room") as raised:
        copier.begin([host.tensor(1.0)], step(1))
    assert "epoch 2, step 1, while copying the batch to cuda:0" in notes_of(raised.value)
    assert "Lower batch_size" in notes_of(raised.value)
    batches = [copier.finish(begun), copier.finish(copier.begin([host.tensor(2.0)], step(2)))]
    device.drain()
    assert [batch[0].tolist() for batch in batches] == [[0.0] * 3, [2.0] * 3]


def test_what_was_copied_of_a_batch_that_failed_is_held_until_it_is_read(device, host):
    class Bad(torch.Tensor):
        """Fails when it is looked at, after the tensor before it was copied."""

        @property
        def layout(self):
            raise ValueError("bad")

    copier = DeviceCopier(device)
    with pytest.raises(ValueError, match="bad") as raised:
        copier.begin([host.tensor(1.0), torch.ones(1).as_subclass(Bad)], step(0))
    assert "epoch 2, step 0" in notes_of(raised.value)
    del raised
    assert device.asked(COPIES) == ["copy"]
    copier.begin([], step(1))  # the copy has not run
    assert host.num_held == 1
    device.drain()
    copier.begin([], step(2))
    assert host.num_held == 0


def test_a_failing_method_and_a_failing_transform_are_named(device):
    class Refusing:
        def to(self, device):
            raise LookupError("not there")

    copier = DeviceCopier(device)
    with pytest.raises(LookupError) as raised:
        copier.finish(copier.begin([Refusing()], step(3)))
    note = notes_of(raised.value)
    assert note.startswith("epoch 2, step 3, while moving a tests.device.test_copier")
    assert note.endswith("Refusing of the batch to cuda:0 by its method `to`")

    def transform(batch):
        raise torch.OutOfMemoryError("no room")

    copier = DeviceCopier(device, transform)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        copier.finish(copier.begin([torch.ones(1)], step(4)))
    note = notes_of(raised.value)
    assert "epoch 2, step 4, while the transform worked on the batch on cuda:0" in note
    assert "Lower batch_size" in note


@pytest.mark.parametrize("queue", [COPIES, TRAINER])
@pytest.mark.parametrize("moment", ["begin", "finish"])
def test_a_failure_of_the_device_that_shows_later_names_the_batch_it_is_of(
    device, host, queue, moment
):
    first = host.tensor(0.0)
    held = weakref.ref(first)
    copier = DeviceCopier(device)
    copier.finish(copier.begin([first], step(0)))
    del first
    if moment == "begin":
        call, arguments = copier.begin, ([host.tensor(1.0)], step(1))
    else:
        call, arguments = copier.finish, (copier.begin([host.tensor(1.0)], step(1)),)
    next(mark for mark in device.marks if mark.queue == queue).error = RuntimeError
    with pytest.raises(RuntimeError, match="bad access") as raised:
        call(*arguments)
    note = notes_of(raised.value)
    assert note.startswith("epoch 2, step 0: the device's work for this batch")
    assert "cuda:0" in note
    del raised, arguments
    batch = copier.finish(copier.begin([host.tensor(2.0)], step(2)))
    assert held() is not None  # what has failed may still be read
    device.drain()
    assert batch[0].tolist() == [2.0] * 3
    copier.begin([], step(3))
    assert host.num_held == 0


def test_a_failure_that_shows_while_the_thread_waits_is_named_too(device):
    copier = DeviceCopier(device)
    for number in range(MAX_BEHIND):
        copier.finish(copier.begin([torch.ones(1)], step(number)))
    mark = next(mark for mark in device.marks if mark.queue == TRAINER)
    begun = copier.begin([torch.ones(1)], step(99))
    is_over = mark.query

    def is_over_once():  # it is not over, and fails while it is waited for
        mark.error = RuntimeError
        return False

    mark.query = is_over_once
    with pytest.raises(RuntimeError, match="bad access") as raised:
        copier.finish(begun)
    assert notes_of(raised.value).startswith("epoch 2, step 0:")
    mark.query = is_over


def test_close_waits_for_copies_and_lets_go_and_twice_does_nothing(device, host):
    copier = DeviceCopier(device)
    given_batch = copier.finish(copier.begin([host.tensor(1.0)], step(0)))
    copier.begin([host.tensor(2.0)], step(1))
    copier.close()
    assert host.num_held == 0
    num_asked = len(device.log)
    copier.close()
    assert len(device.log) == num_asked
    assert given_batch[0].tolist() == [1.0] * 3


def test_close_does_not_wait_for_the_main_processes_work(device):
    copier = DeviceCopier(device)
    copier.finish(copier.begin([torch.ones(1)], step(0)))
    copier.close()
    assert [mark.queue for mark in device.marks if mark.is_reached] == [COPIES]


def test_close_tells_no_failure_and_lets_go(device, host):
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
    batch = copier.finish(copier.begin({"x": [host.tensor(1.0)]}, step(0)))
    thing = copier.finish(copier.begin([Moved(device, host.tensor(1.0))], step(0)))
    gone = [weakref.ref(batch["x"][0]), weakref.ref(copier)]
    device.drain()
    del batch, thing, copier
    assert [ref() for ref in gone] == [None, None]
    assert host.num_held == 0


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("trouble", ["copy", "to", "transform", "mark"])
def test_an_error_that_is_dropped_keeps_no_batch(device, host, trouble):
    class Refusing:
        def to(self, device):
            raise LookupError(trouble)

    def transform(batch):
        raise LookupError(trouble)

    copier = DeviceCopier(device, transform if trouble == "transform" else None)
    if trouble == "copy":
        device.trouble = LookupError(trouble)
    if trouble == "mark":
        copier.begin([], step(0))
        device.marks[0].error = LookupError
    objects = [Refusing()] if trouble == "to" else []
    try:
        copier.finish(copier.begin([host.tensor(1.0), *objects], step(0)))
    except LookupError:
        assert "epoch 2, step 0" in traceback.format_exc()
    else:
        raise AssertionError("nothing was raised")
    gone = weakref.ref(copier)
    del copier, transform
    assert gone() is None
    assert host.num_held == 0


ACTIONS = st.lists(
    st.sampled_from(["begin", "finish", "copies", "trainer", "drop", "fail", "object", "close"]),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS)
def test_whatever_the_queues_do_the_main_process_reads_what_was_sent(actions):
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
        elif action in (COPIES, TRAINER):
            device.advance(action)
        num_objects = sum(isinstance(one.batch[0], Moved) for _, one in begun)
        assert host.num_held <= 2 * MAX_OUTSTANDING + num_objects
    begun.clear()
    copier.close()
    assert host.num_held == 0
    device.drain()
    assert device.read == expected


def test_on_the_cpu_a_batch_is_handed_over_as_it_is():
    accelerator = open_accelerator("cpu")
    assert isinstance(accelerator, Accelerator)
    copier = DeviceCopier(accelerator)
    assert not copier.begins_ahead
    batch = {"x": torch.ones(2), "y": [torch.zeros(1)]}
    assert copier.finish(copier.begin(batch, step(0))) is batch
    copier.close()


def test_the_transform_runs_on_the_cpu_too():
    copier = DeviceCopier(open_accelerator("cpu"), lambda batch: batch + 1)
    assert float(copier.finish(copier.begin(torch.ones(()), step(0)))) == 2.0


def test_on_the_cpu_an_object_moves_and_waits_for_it():
    copier = DeviceCopier(open_accelerator("cpu"))
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    got = copier.finish(copier.begin([Anything(), packed], step(0)))
    assert got[0] == ((torch.device("cpu"),), {})
    assert got[1].data.tolist() == packed.data.tolist()


def test_a_device_without_queues_copies_by_itself():
    class Elsewhere(Accelerator):
        """As MPS: another memory, and no queue of ours. Here it is "meta"."""

    copier = DeviceCopier(Elsewhere(torch.device("meta")))
    host = HostMemory()
    batch = copier.finish(copier.begin([host.tensor(1.0)], step(0)))
    assert batch[0].device.type == "meta"
    copier.begin([], step(1))
    assert host.num_held == 0


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("nonsense", "device='nonsense' names none"),
        ("cuda:-1", "device='cuda:-1' names none"),
        (True, "not True"),
        (None, "not None"),
        (2.5, "not 2.5"),
        ("meta", "no support for devices of type 'meta'"),
    ],
)
def test_what_is_no_device_is_refused(device, text):
    with pytest.raises(ConfigError, match=text):
        open_accelerator(device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_auto_is_the_cpu_and_others_tell_why_not():
    assert open_accelerator("auto").device == torch.device("cpu")
    with pytest.raises(ConfigError, match="device=0 is the index of an accelerator"):
        open_accelerator(0)
    with pytest.raises(
        ConfigError, match=r"device='cuda:1' cannot be used: torch .* (built|finds)"
    ):
        open_accelerator("cuda:1")
    with pytest.raises(ConfigError, match="device='mps' cannot be used"):
        open_accelerator("mps")


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
    assert pinning.finish(pinning.begin([Pinnable(), 1], step(0))) == ["pinned", 1]
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
