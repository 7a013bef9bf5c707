# SPDX-License-Identifier: Apache-2.0
"""`penstock run --engine torch` measures torch's own loader, and changes nothing."""

from __future__ import annotations

import gc
import json
import pickle
import warnings
import weakref

import pytest
import torch
from tests.program.training import TRAINING, run

from penstock.insight.trace import read_trace
from penstock.program.saved import run_in

pytest.importorskip("typer")

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data import dataloader as torchs

import penstock.torch
from penstock.program.stock import watch

PATCHED = {
    DataLoader: ("__init__", "__iter__"),
    torchs._BaseDataLoaderIter: ("_next_index",),
    torchs._SingleProcessDataLoaderIter: ("_next_data",),
    torchs._MultiProcessingDataLoaderIter: ("_next_data",),
}


class Sums:
    """What is known of each loader, in the order of their first epochs."""

    def __init__(self):
        self.accounts = []

    def add(self, monitor, loader):
        self.accounts.append(monitor.accounts(loader))

    @property
    def spans(self):
        return [accounts.stats().run for accounts in self.accounts]

    @property
    def counts(self):
        return [(span.starts, span.batches, span.samples) for span in self.spans]


@pytest.fixture
def sums(monkeypatch):
    for kind, names in PATCHED.items():
        for name in names:
            monkeypatch.setattr(kind, name, getattr(kind, name))  # so that it is set back
    found = Sums()
    watch(found.add)
    return found


def saved(folder, name="run.json"):
    return run_in(json.loads((folder / name).read_text()), name)


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter([{"name": "a", "x": 1}] * (7 if info is None else 5 + info.id))


class Boxes(Numbers):
    def __getitem__(self, index):
        return torch.zeros(index, 4)


class Bad(Numbers):
    def __getitem__(self, index):
        if index == 6:
            raise KeyError("six")
        return index


class Nested(Numbers):
    def __getitem__(self, index):
        return sum(batch.sum() for batch in DataLoader(Numbers(), 5))


def test_a_training_gives_the_same_under_either_engine_and_without(tmp_path):
    num_workers = 2
    alone = run(tmp_path, TRAINING, None, words=[num_workers])
    assert len(alone.stdout.splitlines()) == 3
    found = {}
    for engine in ("torch", "penstock"):
        done = run(
            tmp_path, TRAINING, "--engine", engine, "--save", f"{engine}.json", words=[num_workers]
        )
        assert done.stdout == alone.stdout
        place = done.stderr.splitlines()[0]
        assert place.startswith(f"penstock run: train.py:17: a loader of Noisy, {num_workers} w")
        assert ("A run without --engine torch shows why." in done.stderr) == (engine == "torch")
        found[engine] = saved(tmp_path, f"{engine}.json")
        loaders = found[engine].loaders
        train, check = (loader.run for loader in loaders)
        assert (train.starts, train.batches) == (3, 13 + 6 + 13)
        assert train.samples == 103 + 48 + 103
        assert (check.starts, check.batches, check.samples) == (3, 9, 309)
        known = [(loader.loaders, loader.num_workers, loader.dataset) for loader in loaders]
        assert known == [(1, num_workers, "Noisy"), (3, num_workers, "Noisy")]
        for loader in loaders:
            assert 0 < loader.first_batch_s <= loader.run.wait_s <= loader.run.seconds
        assert train.seconds + check.seconds <= found[engine].wall_s
    made = [[loader.made_at for loader in run.loaders] for run in found.values()]
    assert made[0] == made[1]
    assert all(place.startswith("train.py:") for place in made[0])


def test_a_page_and_a_trace_are_written_of_torchs_loader(tmp_path):
    options = ["--engine", "torch", "--report", "run.html", "--trace", "run.json"]
    run(tmp_path, TRAINING, *options, words=[0])
    assert ">Unknown<" in (tmp_path / "run.html").read_text()
    stats = read_trace(tmp_path / "run.json").stats
    assert stats.verdict.bottleneck == "unknown"
    assert (stats.run.batches, stats.run.samples, stats.run.starts) == (32, 254, 3)


def test_a_program_that_was_edited_keeps_penstocks_loader(tmp_path):
    edited = TRAINING.replace("from torch.utils.data import D", "from penstock.torch import D", 1)
    edited = edited.replace(", Dataset\n", "\nfrom torch.utils.data import Dataset\n")
    done = run(tmp_path, edited, "--engine", "torch", "--save", "run.json", words=[0])
    assert "without --engine torch" not in done.stderr
    assert [loader.run.batches for loader in saved(tmp_path).loaders] == [32, 9]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_of_a_map_style_dataset_are_those_that_its_sampler_asked_for(sums, num_workers):
    for _ in DataLoader(Boxes(), 8, collate_fn=torch.cat, num_workers=num_workers):
        pass
    for _ in DataLoader(Boxes(), batch_size=None, num_workers=num_workers):
        pass
    assert sums.counts == [(1, 3, 20), (1, 20, 20)]


def test_samples_of_a_stream_are_those_of_full_batches(sums):
    loader = DataLoader(Stream(), 4)
    for _ in range(2):
        for _ in loader:
            pass
    for _ in DataLoader(Stream(), 4, num_workers=2):
        pass
    for _ in DataLoader(Stream(), None):
        pass
    assert sums.counts == [(2, 4, 16), (1, 4, 16), (1, 7, 7)]


def test_persistent_workers_that_were_left_early_are_asked_anew(sums):
    loader = DataLoader(Numbers(), 3, num_workers=2, persistent_workers=True)
    for epoch in range(4):
        for step, _ in enumerate(loader):
            if epoch % 2 == 0 and step == 1:
                break
    assert sums.counts == [(4, 2 + 7 + 2 + 7, 6 + 20 + 6 + 20)]


def test_a_wait_is_told_from_the_programs_own_time(sums):
    for _ in DataLoader(Numbers(), 4):
        pass
    (span,) = sums.spans
    assert 0 < span.wait_s < span.seconds
    assert 0 < span.consumer_s < span.seconds
    assert 0 < sums.accounts[0].stats().first_batch_s <= span.wait_s


def test_subclasses_of_any_kind_are_accounted_for(sums):
    class Endless(DataLoader):
        __hash__ = None

        def __eq__(self, other):
            return True

        def __iter__(self):
            while True:
                yield from super().__iter__()

    for step, _ in enumerate(Endless(Numbers(), 8)):
        if step == 7:
            break
    assert sums.counts == [(3, 8, 20 + 20 + 16)]
    assert Endless.__init__.__qualname__ == "DataLoader.__init__"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_and_its_dataset_are_not_kept_alive(sums, num_workers):
    gc.disable()
    try:
        data = TensorDataset(torch.arange(20))
        loader = DataLoader(data, 4, num_workers=num_workers, persistent_workers=num_workers > 0)
        for _ in loader:
            break
        iterator = iter(loader)
        next(iterator)
        ends = [weakref.ref(held) for held in (data, loader, iterator)]
        del data, loader, iterator
        assert [end() for end in ends] == [None] * 3
    finally:
        gc.enable()
    assert sums.counts == [(2, 2, 8)]


def test_a_loader_is_pickled_as_it_was_and_its_copy_is_accounted_for(sums):
    loader = DataLoader(Numbers(), 4)
    before = sorted(vars(loader))
    list(loader)
    copy = pickle.loads(pickle.dumps(loader))
    list(copy)
    assert sorted(vars(loader)) == sorted(vars(copy)) == before
    assert not any("penstock" in name for name in before)
    assert sums.counts == [(1, 5, 20)] * 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_made_ends_no_account(sums, num_workers):
    batches = iter(DataLoader(Bad(), 4, num_workers=num_workers))
    next(batches)
    with pytest.raises(KeyError, match="six"):
        next(batches)
    assert [batch.tolist()[0] for batch in batches] == [8, 12, 16]
    assert sums.counts == [(1, 4, 16)]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.6 to 2.8 name a line of torch")
def test_warnings_of_torch_name_the_line_of_the_program(sums):
    class Longer(IterableDataset):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 3

    loader = DataLoader(Longer())
    assert len(loader) == 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_loader_inside_of_a_worker_is_the_datasets_own_business(sums):
    batches = list(DataLoader(Nested(), 10, num_workers=1))
    assert [batch.tolist() for batch in batches] == [[190] * 10] * 2
    assert sums.counts == [(1, 2, 20)]


def test_penstocks_own_loader_is_not_accounted_for_twice(sums):
    assert len(list(penstock.torch.DataLoader(Numbers(), 4))) == 5
    assert sums.counts == []


def test_nothing_is_drawn(sums):
    torch.manual_seed(3)
    list(DataLoader(Numbers(), 4, shuffle=True))
    here = torch.rand(4)
    for kind, names in PATCHED.items():
        for name in names:
            setattr(kind, name, getattr(kind, name).__wrapped__)
    torch.manual_seed(3)
    list(DataLoader(Numbers(), 4, shuffle=True))
    assert torch.equal(torch.rand(4), here)
