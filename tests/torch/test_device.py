# SPDX-License-Identifier: Apache-2.0
"""`DataLoader(device=...)` and `pin_memory=True` on a machine without an accelerator."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from penstock.errors import ConfigError
from penstock.torch import DataLoader, DevicePrefetcher, NormalizeImages

CREWS = [(0, "process"), (2, "process"), (2, "thread")]


class Images(torch.utils.data.Dataset):
    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((64, 64, 3), index, dtype=torch.uint8), index


def loader_of(crew=(0, "process"), **options):
    num_workers, backend = crew
    return DataLoader(Images(), batch_size=4, num_workers=num_workers, backend=backend, **options)


def flat(batches):
    return [(images.clone(), labels.clone()) for images, labels in batches]


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("crew", CREWS)
@pytest.mark.parametrize("device", ["cpu", "auto", torch.device("cpu")])
def test_batches_are_those_of_a_loader_without_a_device(crew, device):
    assert equal(flat(loader_of(crew, device=device)), flat(loader_of(crew)))


@pytest.mark.parametrize("crew", CREWS)
def test_the_transform_gets_each_batch_once_in_order(crew):
    seen = []
    normalize = NormalizeImages(mean=None, std=None)

    def transform(batch):
        seen.append(int(batch[1][0]))
        return normalize(batch[0]), batch[1]

    batches = list(loader_of(crew, device="cpu", device_transform=transform))
    assert seen == list(range(0, 24, 4))
    assert batches[1][0].shape == (4, 3, 64, 64)
    assert torch.allclose(batches[1][0][:, 0, 0, 0], torch.arange(4, 8) / 255)


@pytest.mark.parametrize("crew", CREWS)
def test_what_the_transform_raises_names_the_batch_and_the_device_and_the_others_come(crew):
    def transform(batch):
        if int(batch[1][0]) == 8:
            raise ValueError("not this one")
        return batch

    batches = iter(loader_of(crew, device="cpu", device_transform=transform))
    assert [int(next(batches)[1][0]) for _ in range(2)] == [0, 4]
    with pytest.raises(ValueError, match="not this one") as raised:
        next(batches)
    notes = "\n".join(raised.value.__notes__)
    assert "epoch 0, step 2" in notes
    assert "cpu" in notes
    assert [int(labels[0]) for _, labels in batches] == [12, 16, 20]


@pytest.mark.parametrize("crew", CREWS)
def test_a_state_that_is_saved_under_way_counts_what_was_given(crew):
    options = {"shuffle": True, "seed": 5, "device": "cpu"}
    loader = loader_of(crew, **options)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    assert state["batches"] == 2
    rest = flat(batches)
    again = loader_of(crew, **options)
    again.load_state_dict(state)
    assert equal(flat(again), rest)


@pytest.mark.parametrize("crew", CREWS[1:])
def test_a_prefetcher_of_our_loader_keeps_its_state_exact_and_its_workers(crew):
    loader = loader_of(crew, shuffle=True, seed=5, persistent_workers=True)
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


def _epoch_of(loader, epoch):
    loader.set_epoch(epoch)
    return loader


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "fast"}, "device must be"),
        ({"device": object()}, "device must be"),
        ({"device_transform": len}, "no device"),
    ],
)
def test_arguments_that_make_no_sense_are_told_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        loader_of(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_told_with_what_to_do():
    with pytest.raises(ConfigError, match=r"cuda") as raised:
        iter(loader_of(device="cuda"))
    assert "'auto'" in str(raised.value)


def test_the_arguments_are_attributes_that_a_subclass_may_use_for_its_own():
    loader = loader_of(device="cpu", device_transform=list)
    assert (loader.device, loader.device_transform) == ("cpu", list)

    class Mine(DataLoader):
        def __init__(self, *args):
            super().__init__(*args)
            self.device = "mine"

    mine = Mine(Images())
    assert mine.device == "mine"
    assert len(list(mine)) == 24


def test_a_loader_with_a_device_is_pickled_and_copied_as_a_recipe():
    loader = loader_of(device="cpu")
    for other in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert equal(flat(other), flat(loader_of()))


def test_the_report_of_a_loader_names_its_device(tmp_path):
    loader = loader_of(device=torch.device("cpu"))
    list(loader)
    assert loader._recording().settings["device"] == "cpu"
    assert loader.report(tmp_path / "run.html").exists()


def test_on_the_cpu_nothing_is_copied():
    data = torch.zeros(4, 8)
    (batch,) = DataLoader([data], batch_size=None, device="cpu")
    assert batch.data_ptr() == data.data_ptr()
