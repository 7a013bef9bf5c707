# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: page-locked slots, copies that go on after the call, streams.

A copy that is still to come is made certain by work queued in front of it: matrix products that
take tens of milliseconds. Nothing here depends on how many.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.holdings import Holdings

from penstock.torch import DataLoader, DevicePrefetcher, NormalizeImages
from penstock.torch.device.accelerator import open_accelerator
from penstock.torch.device.page_lock import CudaPageLock
from penstock.transport.memory import Mapping, create_segment

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    # CUDA is in use before any worker starts; they do not touch it.
    pytest.mark.filterwarnings("ignore:Workers are about to be forked:RuntimeWarning"),
]

WORKERS = [(0, "process"), (2, "process"), (2, "thread")]
LARGE_BYTES = 4 << 20  # above what a pool of private buffers keeps (1 MiB)
MARKS = 251
MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def no_leaks(cuda):
    """As for all tests, but for what CUDA opens when it likes."""
    before = without_cuda(cuda)
    yield
    torch.cuda.synchronize()
    gc.collect()
    left = without_cuda(cuda).left_since(before)
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


def without_cuda(device):
    CudaPageLock(device).fence()  # unmaps what the device was still reading at the last call
    held = Holdings.now()
    its = ("/dev/nvidia", "anon_inode:", "/proc/", "/sys/")
    return dataclasses.replace(
        held,
        descriptors=frozenset(d for d in held.descriptors if not d[1].startswith(its)),
    )


class Tree:
    """Samples with leaves of all sizes: in a slot of their own, in a shared one, in the message."""

    def __init__(self, length=48):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {
            "large": np.full((256, 1024), index, np.float32),
            "small": [np.full(1500, index, np.int16), torch.full((3000,), index)],
            "tiny": np.full(3, index, np.uint8),
            "label": index,
            "name": f"sample {index}",
        }


class Marked:
    """Batches whose every byte is their step's mark; notes where they were written."""

    sizes = (100, 6000, 60_000, LARGE_BYTES)

    def __init__(self, length):
        self.length = length
        self.addresses = set()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError("batches are made at once")

    def get_batch(self, indices, alloc):
        batch = [alloc((size,), np.uint8) for size in self.sizes]
        for array in batch:
            array.fill(indices[0] % MARKS)
        self.addresses.update(array.ctypes.data for array in batch)
        return batch


def loader_of(dataset, workers, **options):
    num_workers, backend = workers
    return DataLoader(dataset, num_workers=num_workers, backend=backend, **options)


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for item in tree for tensor in tensors_of(item)]


def assert_equal(got, expected, device):
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        got, expected = list(got.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other, device)
    elif isinstance(expected, torch.Tensor):
        assert got.device == device
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.equal(got.cpu(), expected)
    else:
        assert got == expected


class Stall:
    """Queues some tens of milliseconds of work in the current stream."""

    def __init__(self):
        self.square = torch.randn(4096, 4096, device="cuda")
        self.result = torch.empty_like(self.square)

    def __call__(self, count=10):
        for _ in range(count):
            torch.mm(self.square, self.square, out=self.result)


@pytest.fixture
def stall(cuda):
    return Stall()


# Page-locked batches


@pytest.mark.parametrize("workers", WORKERS)
def test_every_tensor_of_a_batch_is_pinned_and_holds_what_it_should(workers):
    plain = loader_of(Tree(), (0, "process"), batch_size=8)
    pinned = loader_of(Tree(), workers, batch_size=8, pin_memory=True)
    count = 0
    for got, expected in zip(pinned, plain, strict=True):
        assert_equal(got, expected, torch.device("cpu"))
        assert len(tensors_of(got)) == 5
        assert all(tensor.is_pinned() for tensor in tensors_of(got))
        count += 1
    assert count == 6


def test_what_a_worker_wrote_into_a_slot_stays_there():
    for batch in loader_of(Tree(), (2, "process"), batch_size=8, pin_memory=True):
        for tensor in (batch["large"], *batch["small"]):
            assert "memfd:penstock" in mapped_at(tensor.data_ptr())


def mapped_at(address):
    for line in MAPS.read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return line
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("workers", [(0, "process")])
def test_what_this_process_wrote_into_its_own_buffers_stays_there(workers):
    dataset = Marked(12)
    for batch in loader_of(dataset, workers, batch_size=1, pin_memory=True):
        assert batch[-1].data_ptr() in dataset.addresses
        assert batch[-1].is_pinned()


@pytest.mark.parametrize("options", [{"pin_memory": True}, {"device": "cuda"}], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
def test_slots_are_unlocked_with_their_workers_and_locked_anew(options, persistent):
    # Memory that stayed locked would be found locked at the same address, which is an error.
    for _ in range(3):
        loader = loader_of(
            Marked(12), (2, "process"), batch_size=1, persistent_workers=persistent, **options
        )
        for _ in range(3):
            for step, batch in enumerate(loader):
                assert all(bool((tensor == step).all()) for tensor in batch)


class Refusing:
    """CUDA's runtime, asked to lock nothing at all, which it refuses."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.num_asked = 0

    def cudaHostRegister(self, address, size_bytes, flags):
        self.num_asked += 1
        return self.runtime.cudaHostRegister(address, 0, flags)

    def __getattr__(self, name):
        return getattr(self.runtime, name)


@pytest.mark.parametrize("options", [{"pin_memory": True}, {"device": "cuda"}], ids=str)
@pytest.mark.parametrize("workers", WORKERS)
def test_where_nothing_can_be_locked_torch_pins_and_a_warning_says_so(
    workers, options, monkeypatch
):
    runtime = Refusing(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for step, batch in enumerate(loader_of(Marked(12), workers, batch_size=1, **options)):
                assert all(bool((tensor == step).all()) for tensor in batch)
                assert "device" in options or all(tensor.is_pinned() for tensor in batch)
    said = [str(w.message) for w in caught if "page-lock" in str(w.message)]
    if workers[1] == "thread":  # torch pins what threads make
        assert (runtime.num_asked, said) == (0, [])
        return
    assert runtime.num_asked > 0
    assert len(said) == 2  # of each loader
    assert all("cuda:" in text for text in said)


def test_a_refusal_does_no_harm_to_what_torch_does_next(cuda):
    fd = create_segment(1 << 20)
    mapping = Mapping(fd, 1 << 20)
    os.close(fd)
    lock = CudaPageLock(cuda)
    release = lock.lock(mapping.address, mapping.size_bytes)
    assert release is not None
    assert torch.from_numpy(mapping.bytes()).is_pinned()
    with pytest.warns(RuntimeWarning, match="page-locked"):
        assert lock.lock(mapping.address, mapping.size_bytes) is None  # it is locked already
    assert (torch.ones(3, device=cuda) + 1).tolist() == [2, 2, 2]
    torch.cuda.synchronize()
    unmapped = []
    release(lambda: unmapped.append(True))
    assert unmapped
    assert not torch.from_numpy(mapping.bytes()).is_pinned()


def test_pages_that_are_being_read_are_unmapped_later_without_a_wait(cuda, stall):
    lock = CudaPageLock(cuda)
    fd = create_segment(1 << 20)
    mapping = Mapping(fd, 1 << 20)
    os.close(fd)
    release = lock.lock(mapping.address, mapping.size_bytes)
    stall(50)
    unmapped = []
    release(lambda: unmapped.append(True))
    assert not unmapped
    torch.cuda.synchronize()
    lock.fence()  # which looks again
    assert unmapped


# Poison: memory that is used again too early


def test_a_buffer_that_is_overwritten_while_its_copy_is_queued_is_seen_to_be(stall):
    """The other tests of this section could fail."""
    source = torch.ones(LARGE_BYTES, dtype=torch.uint8).pin_memory()
    stall()
    arrived = source.to("cuda", non_blocking=True)
    source.fill_(2)
    assert bool((arrived != 1).any())


@pytest.mark.parametrize("way", ["own stream", "current stream", "device"])
@pytest.mark.parametrize("workers", WORKERS)
def test_no_slot_is_written_again_before_the_device_has_read_it(workers, way, stall):
    num_steps = 150
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    loader = loader_of(Marked(num_steps), workers, batch_size=1, **options)
    side = torch.cuda.Stream() if way == "own stream" else torch.cuda.current_stream()
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    ends = collections.deque()
    num_seen = 0
    for step, batch in enumerate(loader):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(side):
            stall(2)
            arrived = [tensor.to("cuda", non_blocking=True) for tensor in batch]
        current.wait_stream(side)
        for tensor in arrived:
            tensor.record_stream(current)
        del batch, tensor
        bad += torch.stack([(tensor != step % MARKS).any() for tensor in arrived]).any()
        del arrived
        ends.append(current.record_event())
        if len(ends) > 8:
            ends.popleft().synchronize()
        num_seen += 1
    assert num_seen == num_steps
    assert int(bad) == 0


@pytest.mark.parametrize("workers", [(0, "process"), (2, "thread")])
def test_batches_after_a_fork_are_right(workers):
    """Locked pages of this process stay its own, and are not left to the child by copy-on-write."""
    loader = loader_of(Marked(40), workers, batch_size=1, pin_memory=True)
    for step, batch in enumerate(loader):
        arrived = [tensor.to("cuda", non_blocking=True) for tensor in batch]
        assert all(bool((tensor == step).all()) for tensor in arrived)
        if step == 10:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)


def made_fence(lock):
    fence = lock.fence()
    while not fence.is_made:
        fence.ask()
    return fence


def test_some_batches_share_a_fence_that_is_made_behind_the_last_of_them(cuda, stall):
    torch.cuda.synchronize()
    lock = CudaPageLock(cuda)
    fence = lock.fence()
    assert lock.fence() is fence
    stall(50)
    while not fence.is_made:
        assert not fence.is_over()
    assert not fence.is_over()
    assert lock.fence() is not fence
    torch.cuda.synchronize()
    assert fence.is_over()


@pytest.mark.parametrize("priority", [0, -1, -2, -3])
def test_a_fence_waits_for_streams_of_every_priority(cuda, stall, priority):
    stream = torch.cuda.Stream(priority=priority)
    torch.cuda.synchronize()
    lock = CudaPageLock(cuda)
    with torch.cuda.stream(stream):
        stall(50)
    fence = made_fence(lock)
    assert not fence.is_over()
    torch.cuda.synchronize()
    assert fence.is_over()


def test_a_fence_does_not_wait_for_what_comes_after_it(cuda, stall):
    torch.cuda.synchronize()
    fence = made_fence(CudaPageLock(cuda))
    stall(50)
    assert fence.is_over()
    assert not torch.cuda.current_stream().query()


# Batches on the device


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("device", ["cuda", "auto", "index", "object"])
def test_batches_arrive_on_the_device_and_are_the_same(workers, device, cuda):
    named = {"index": f"cuda:{cuda.index}", "object": cuda}.get(device, device)
    plain = loader_of(Tree(), (0, "process"), batch_size=8)
    loader = loader_of(Tree(), workers, batch_size=8, device=named)
    for _ in range(2):
        for got, expected in zip(loader, plain, strict=True):
            assert_equal(got, expected, cuda)


def test_the_memory_of_a_device_does_not_grow(cuda, stall):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    most_slots = 0
    for batch in loader_of(Marked(300), (2, "process"), batch_size=1, device=cuda):
        stall(1)  # the host is faster, and does not wait
        batch[-1].sum()
        most_slots = max(most_slots, MAPS.read_text().count("memfd:penstock"))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 16 * (LARGE_BYTES + (1 << 20))
    assert most_slots < 60


# Any iterable


class TorchTree(Tree, torch.utils.data.Dataset):
    pass


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_prefetcher_brings_batches_of_torchs_own_loader(num_workers, pin_memory, cuda):
    plain = torch.utils.data.DataLoader(TorchTree(), batch_size=8)
    loader = torch.utils.data.DataLoader(
        TorchTree(), batch_size=8, num_workers=num_workers, pin_memory=pin_memory
    )
    prefetcher = DevicePrefetcher(loader, cuda)
    assert len(prefetcher) == 6
    for _ in range(2):
        for got, expected in zip(prefetcher, plain, strict=True):
            assert_equal(got, expected, cuda)


def test_a_prefetcher_of_a_generator_keeps_host_memory_until_it_was_read(cuda, stall):
    def batches():
        for step in range(60):
            yield torch.full((LARGE_BYTES,), step, dtype=torch.uint8).pin_memory()

    for step, batch in enumerate(DevicePrefetcher(batches(), cuda)):
        stall(1)
        assert bool((batch == step).all())


# The queue of copies


def test_copies_have_a_queue_of_their_own(cuda, stall):
    accelerator = open_accelerator("cuda")
    assert accelerator.device == cuda
    assert accelerator.has_queues
    trainers = torch.cuda.current_stream()
    with accelerator.copying():
        assert torch.cuda.current_stream() != trainers
        stall(100)
    mark = accelerator.mark_copies()
    assert not mark.query()
    assert (torch.ones(2, device=cuda) + 1).tolist() == [2, 2]  # this queue goes on
    assert not mark.query()
    mark.synchronize()
    assert mark.query()
    assert torch.cuda.current_stream() == trainers


def test_the_consumers_queue_waits_for_a_mark_of_copies_and_the_thread_does_not(cuda, stall):
    accelerator = open_accelerator(cuda)
    source = torch.full((LARGE_BYTES,), 7, dtype=torch.uint8).pin_memory()
    with accelerator.copying():
        stall(100)
        arrived = accelerator.copy(source)
    mark = accelerator.mark_copies()
    accelerator.hand_over(mark, [arrived])
    behind = accelerator.mark_consumer()
    assert not behind.query()
    assert not mark.query()
    assert bool((arrived == 7).all())
    assert mark.query()
    behind.wait()


# Normalising


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_normalising_is_one_kernel_and_gives_what_the_cpu_gives(dtype, cuda):
    images = torch.randint(0, 256, (8, 33, 35, 3), dtype=torch.uint8)
    normalize = NormalizeImages(dtype=dtype)
    expected = normalize(images)
    there, given = normalize.to(cuda), images.to(cuda)
    got = there(given)
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(there(given), got)
    kernels = kernels_of(lambda: there(given))
    if not kernels_of(lambda: torch.ones(2, device=cuda) + 1):
        pytest.skip("torch's profiler sees no kernels here")
    assert len(kernels) == 1


def kernels_of(call):
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[activity.CPU, activity.CUDA], acc_events=True
    ) as profile:
        call()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
