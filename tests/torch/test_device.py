# SPDX-License-Identifier: Apache-2.0
"""`DataLoader(device=...)` and `pin_memory=True` on a machine without an accelerator."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from penstock.errors import ConfigError
from penstock.torch import DataLoader, DevicePrefetcher, NormalizeImages

WORKERS = [(0, "process"), (2, "process"), (2, "thread")]


class Images(torch.utils.data.Dataset):
    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((64, 64, 3), index, dtype=torch.uint8), index


def loader_of(workers=(0, "process"), **options):
    num_workers, backend = workers
    return DataLoader(Images(), batch_size=4, num_workers=num_workers, backend=backend, **options)


def flat(batches):
    return [(images.clone(), labels.clone()) for images, labels in batches]


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("device", ["cpu", "auto", torch.device("cpu")])
def test_batches_are_those_of_a_loader_without_a_device(workers, device):
    assert equal(flat(loader_of(workers, device=device)), flat(loader_of(workers)))


@pytest.mark.parametrize("workers", WORKERS)
def test_the_transform_gets_each_batch_once_in_order(workers):
    seen = []
    normalize = NormalizeImages(mean=None, std=None)

    def transform(batch):
        seen.append(int(batch[1][0]))
        return normalize(batch[0]), batch[1]

    batches = list(loader_of(workers, device="cpu", device_transform=transform))
    assert seen == list(range(0, 24, 4))
    assert batches[1][0].shape == (4, 3, 64, 64)
    assert torch.allclose(batches[1][0][:, 0, 0, 0], torch.arange(4, 8) / 255)


@pytest.mark.parametrize("workers", WORKERS)
def test_what_the_transform_raises_names_the_batch_and_the_device_and_the_others_come(workers):
    def transform(batch):
        if int(batch[1][0]) == 8:
            raise ValueError("not this one")
        return batch

    batches = iter(loader_of(workers, device="cpu", device_transform=transform))
    assert [int(next(batches)[1][0]) for _ in range(2)] == [0, 4]
    with pytest.raises(ValueError, match="not this one") as raised:
        next(batches)
    notes = "\n".join(raised.value.__notes__)
    assert "epoch 0, step 2" in notes
    assert "cpu" in notes
    assert [int(labels[0]) for _, labels in batches] == [12, 16, 20]


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_a_prefetcher_of_our_loader_keeps_its_state_exact_and_its_workers(workers):
    loader = loader_of(workers, shuffle=True, seed=5, persistent_workers=True)
    prefetcher = DevicePrefetcher(loader, "cpu")
    assert len(prefetcher) == len(loader)
    batches = iter(prefetcher)
    for _ in range(2):
        next(batches)
    assert loader.state_dict()["batches"] == 2
    first = len(flat(batches))
    second = flat(prefetcher)
    assert (first, len(second)) == (4, 6)
    assert loader.epoch == 2
    assert equal(second, flat(_epoch_of(loader_of(shuffle=True, seed=5), 1)))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_state_is_loaded_after_a_prefetcher_with_kept_workers_was_left(seed):
    loader = loader_of((2, "process"), shuffle=True, seed=seed, persistent_workers=True)
    prefetcher = DevicePrefetcher(loader, "cpu")
    torch.manual_seed(4)
    for number, _ in enumerate(prefetcher):
        if number == 2:
            break
    state = loader.state_dict()
    assert state["batches"] == 3
    loader.load_state_dict(state)
    rest = flat(prefetcher)
    assert len(rest) == 3
    del prefetcher, loader


def test_kept_workers_serve_the_loader_and_a_prefetcher_of_it_in_turn():
    loader = loader_of((2, "process"), persistent_workers=True)
    doubled = DevicePrefetcher(loader, "cpu", transform=lambda batch: batch[1] * 2)
    plain = [labels.tolist() for _, labels in loader]
    pids = [worker.pid for worker in loader._iterator._workers]
    assert [labels.tolist() for labels in doubled] == [[2 * k for k in row] for row in plain]
    assert [labels.tolist() for _, labels in loader] == plain
    assert [worker.pid for worker in loader._iterator._workers] == pids


def test_what_a_subclass_makes_of_its_batches_is_what_the_transform_gets():
    class Named(DataLoader):
        def __iter__(self):
            return ({"labels": labels} for _, labels in super().__iter__())

    prefetcher = DevicePrefetcher(Named(Images(), 4), "cpu", transform=lambda b: b["labels"])
    assert [int(labels[0]) for labels in prefetcher] == list(range(0, 24, 4))


def test_ctrl_c_in_a_transform_closes_the_stream_and_leaves_no_time_behind():
    calls = []

    def transform(batch):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return batch

    loader = loader_of((2, "process"), device="cpu", device_transform=transform)
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert next(batches, None) is None
    assert loader.state_dict()["batches"] == 1
    assert len(list(loader)) == 6
    assert loader.stats().run.wait_s >= 0


def test_a_prefetcher_of_a_loader_with_a_device_keeps_the_loaders_transform():
    loader = loader_of(device="cpu", device_transform=lambda batch: batch[1])
    doubled = DevicePrefetcher(loader, "cpu", transform=lambda labels: labels * 2)
    assert [int(labels[0]) for labels in doubled] == list(range(0, 48, 8))


def test_an_iterator_that_ends_in_a_transform_does_not_end_the_epoch():
    others = iter(range(3))
    loader = loader_of(device="cpu", device_transform=lambda batch: (batch, next(others)))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(RuntimeError, match="the transform raised StopIteration"):
        next(batches)


class MovesInPlace:
    def to(self, device):
        pass


def test_an_object_whose_to_returns_nothing_is_an_error():
    with pytest.raises(TypeError, match="returned None"):
        next(iter(DevicePrefetcher([[MovesInPlace()]], "cpu")))


@pytest.mark.parametrize("workers", WORKERS)
def test_time_in_the_transform_is_the_loops_own(workers):
    slept = threading.Event()

    def transform(batch):
        slept.wait(0.02)
        return batch

    loader = loader_of(workers, device="cpu", device_transform=transform)
    list(loader)
    run = loader.stats().run
    assert run.consumer_s >= 5 * 0.02  # all but the last batch's, which nothing follows
    assert run.wait_s < run.seconds - 5 * 0.02 + 1e-6


def _epoch_of(loader, epoch):
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "fast"}, "device='fast' cannot be used: .*'auto'"),
        ({"device": 3.5}, "device=3.5 cannot be used"),
        ({"device_transform": len}, "give device="),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        loader_of(**options)


def test_a_device_that_torch_refuses_without_a_word_is_refused(monkeypatch):
    def refuse(device):
        raise AssertionError

    monkeypatch.setattr(torch, "get_device_module", refuse)
    with pytest.raises(ConfigError, match="device='cuda' cannot be used"):
        loader_of(device="cuda")


def test_a_loader_with_a_device_is_pickled_and_copied_as_a_recipe():
    loader = loader_of(device="cpu")
    for other in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert equal(flat(other), flat(loader_of()))
