# SPDX-License-Identifier: Apache-2.0
"""Accelerate with our engine: on one process, and on two under torchrun."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import sys

import pytest
import torch
import torch.utils.data
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from tests.clients.accelerate_run import (
    LABELS,
    LENGTH,
    SEED,
    Numbered,
    left_in_mid_epoch,
    plain,
    taken_over,
)
from tests.device.fake import FakeAccelerator
from tests.distributed.launching import TORCHRUN, environment, started
from tests.support.processes import ended
from torch.utils.data import BatchSampler

from penstock import sampling
from penstock.errors import ConfigError, StateError
from penstock.integrations.accelerate import PreparedLoader, prepare, skip_first_batches
from penstock.integrations.dealing import BatchShare
from penstock.torch import DataLoader, StatefulDataLoader
from penstock.torch.device import prefetcher


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    forget()


def forget():
    """Let the next accelerator be the first one of this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_CPU", None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where the scenarios of accelerate_run write, on one process and on two."""
    return [tmp_path_factory.mktemp(f"processes{number}") for number in (1, 2)]


@pytest.fixture(scope="module")
def left(folders):
    """What came in this process after the state that the run of two takes over."""
    rest = left_in_mid_epoch(folders[1] / "of_one")
    forget()
    return rest


@pytest.fixture(scope="module")
def noted(folders, left):
    """What the scenarios of accelerate_run said: that of one process, and those of two."""
    found = []
    for number, folder in enumerate(folders, 1):
        module = ["-m", "tests.clients.accelerate_run", str(folder)]
        launcher = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
        command = [*(launcher if number == 2 else [sys.executable]), *module]
        found.append((folder, started(command, folder=folder, name="run", env=environment())))
    for folder, process in found:
        assert ended([process]) == [0], (folder / "run.txt").read_text()
    (alone, _), (both, _) = found
    ranks = [alone / "rank0.json", both / "rank0.json", both / "rank1.json"]
    return [json.loads(path.read_text()) for path in ranks]


SEEDED = (
    "seeded", "split", "uneven", "in_workers", "with_drop_last", "with_balance",
    "with_anybodys_sampler",
)  # fmt: skip


def in_turns(first, second):
    """Samples with their random numbers, in the order of two processes' rounds."""
    rounds = zip(first, second, strict=True)
    return [pair for both in rounds for batch in both for pair in zip(*batch, strict=True)]


@pytest.mark.parametrize("name", SEEDED)
def test_two_processes_together_get_what_one_gets_random_numbers_included(noted, name):
    alone, *ranks = (each[name] for each in noted)
    for epoch in range(2):
        whole = [p for b in alone["epochs"][epoch]["batches"] for p in zip(*b, strict=True)]
        dealt = in_turns(*(rank["epochs"][epoch]["batches"] for rank in ranks))
        count = min(len(whole), len(dealt))
        assert count >= 16
        assert dealt[:count] == whole[:count]
    assert alone["epochs"][0]["batches"] != alone["epochs"][1]["batches"]


@pytest.mark.parametrize("name", ["seeded", "split", "in_workers", "with_anybodys_sampler"])
def test_a_gathered_metric_is_given_every_sample_once(noted, name):
    for each in noted:
        for epoch in each[name]["epochs"]:
            assert sorted(epoch["gathered"]) == list(range(LENGTH))


def test_a_gathered_metric_is_given_what_a_sampler_of_another_length_draws(noted):
    for each in noted:
        assert [len(epoch["gathered"]) for epoch in each["with_balance"]["epochs"]] == [19, 19]


def test_the_last_batch_is_known_as_the_last(noted):
    for each in noted:
        for epoch in each["seeded"]["epochs"]:
            assert epoch["ends"] == [False] * (each["seeded"]["length"] - 1) + [True]
            assert set(epoch["remainders"]) == {LENGTH % each["seeded"]["total_batch_size"]}


def test_processes_draw_other_numbers_for_the_batches_of_anybodys_batch_sampler(noted):
    epochs = [rank["with_anybodys_batches"]["epochs"][0]["batches"] for rank in noted[1:]]
    samples = in_turns(*epochs)
    assert sorted(index for index, _ in samples) == list(range(20))
    assert len({number for _, number in samples}) == 20


def test_a_batch_sampler_that_deals_by_itself_goes_on_to_do_so(noted):
    alone, *ranks = (each["with_batches_that_deal_themselves"]["epochs"] for each in noted)
    dealt = in_turns(*(epochs[0]["batches"] for epochs in ranks))
    whole = [pair for batch in alone[0]["batches"] for pair in zip(*batch, strict=True)]
    assert dealt[: len(whole)] == whole
    assert all(len({LABELS[n] for n in batch[0]}) == 2 for batch in ranks[0][0]["batches"])


NO_SEED = ("with_balance_and_no_seed", "with_batches_that_deal_themselves_and_no_seed")


@pytest.mark.parametrize("name", NO_SEED)
def test_what_is_dealt_is_not_dealt_again_without_a_seed(noted, name):
    alone, *ranks = (each[name]["epochs"] for each in noted)
    for epoch in range(2):
        whole = [index for batch in alone[epoch]["batches"] for index in batch[0]]
        dealt = [index for index, _ in in_turns(*(e[epoch]["batches"] for e in ranks))]
        assert len(whole) >= 19
        assert dealt[: len(whole)] == whole


def test_without_a_seed_batches_are_those_of_accelerates_own_loader(noted):
    for each in noted:
        for ours, theirs in each["without_seed"]:
            assert ours == theirs


RESUMED = ("resumed", "resumed_in_workers", "resumed_without_seed", "resumed_seedable")


@pytest.mark.parametrize("name", RESUMED)
def test_load_state_goes_on_exactly_in_mid_epoch_and_reads_nothing_again(noted, name):
    for processes, each in zip((1, 2, 2), noted, strict=True):
        resumed = each[name]
        assert resumed["epoch"] == 1
        assert resumed["got"] == resumed["expected"]
        rest = 2 * len(resumed["got"][0]) - (processes == 1)  # alone, the last batch has one sample
        assert resumed["num_read"] == rest
        assert resumed["same_later"]


def test_another_number_of_processes_goes_on_where_a_state_was_saved(
    noted, left, folders, accelerator
):
    whole = [pair for batch in left for pair in zip(*batch, strict=True)]
    assert len(whole) == LENGTH - 8
    assert in_turns(*(rank["taken_over"] for rank in noted[1:]))[: len(whole)] == whole
    assert taken_over(folders[1] / "of_two") == left
    assert in_turns(*(rank["left_in_mid_epoch"] for rank in noted[1:]))[: len(whole)] == whole


def test_skipped_batches_are_not_read(noted):
    for processes, each in zip((1, 2, 2), noted, strict=True):
        skipped = each["skipped"]
        assert skipped["same"]
        assert skipped["num_read"] == (4 if processes == 2 else 21 - 8)
        assert skipped["later"] == (6 if processes == 2 else 11)


def test_a_stream_is_read_by_each_process_and_dealt(noted):
    alone, *ranks = noted
    assert alone["stream"]["gathered"] == list(range(LENGTH))
    for rank in ranks:
        assert rank["stream"]["gathered"] == list(range(LENGTH))
        assert rank["split_stream"]["gathered"] == list(range(LENGTH))
    assert [rank["stream"]["batches"][0] for rank in ranks] == [[0, 1], [2, 3]]
    assert [rank["split_stream"]["batches"][0] for rank in ranks] == [[0], [1]]


def test_what_cannot_be_had_on_several_processes_is_refused(noted):
    alone, first, _ = (each["refused"] for each in noted)
    assert set(alone.values()) == {None}
    assert first["dispatch"].startswith("ConfigError: dispatch_batches=True has process 0 read")
    assert first["unbatched"].startswith("ConfigError: Accelerate deals batches, and a loader with")
    assert first["shared"].startswith("ConfigError: torch.utils.data.distributed.DistributedS")
    assert first["split"].startswith("ValueError: To use a `DataLoader` in `split_batches` mode")


def made(dataset=None, **arguments):
    return DataLoader(dataset or Numbered(), batch_size=4, shuffle=True, seed=SEED, **arguments)


def test_which_engine_runs(accelerator):
    loader = made()
    theirs = accelerator.prepare(loader)
    assert type(theirs) is DataLoaderShard
    assert len(list(theirs)) == 6
    assert loader.stats().run.batches == 0  # torch's ran

    ours = accelerator.prepare(prepare(accelerator, loader))
    assert type(ours) is PreparedLoader
    assert isinstance(ours, DataLoader)
    assert len(list(ours)) == 6
    assert ours.stats().run.batches == 6
    assert [each for each in accelerator._dataloaders if each is ours] == [ours]


def test_the_given_loader_stays_as_it_is(accelerator):
    loader, same = made(), made()
    sampler = loader.batch_sampler.sampler
    prepared = prepare(accelerator, loader)
    list(prepared)
    assert prepared.epoch == 1
    assert loader.epoch == 0
    assert loader.batch_sampler.sampler is sampler
    assert [plain(batch) for batch in loader] == [plain(batch) for batch in same]


def test_an_epoch_that_is_left_early_is_no_longer_the_active_one(accelerator):
    prepared = prepare(accelerator, made(num_workers=1))
    for _ in prepared:
        assert accelerator.gradient_state.active_dataloader is prepared
        break
    assert accelerator.gradient_state.active_dataloader is None
    assert prepared.state_dict()["batches"] == 1  # though one more was fetched


def test_a_state_taken_at_the_last_batch_is_that_of_the_next_epoch(accelerator):
    prepared = prepare(accelerator, made())
    states = [prepared.state_dict() for _ in prepared]
    found = [(state["epoch"], state["batches"]) for state in states]
    assert found == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)]


class Interrupted(Numbered):
    """Ctrl-C hits when a sample is read, once."""

    hits_at = None

    def __getitem__(self, index):
        if len(self.read) == self.hits_at:
            self.hits_at = None
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize("hits_at", range(0, LENGTH, 3))
def test_the_state_after_ctrl_c_is_of_what_the_loop_has(accelerator, hits_at):
    expected = [plain(batch) for batch in prepare(accelerator, made())]
    dataset = Interrupted()
    dataset.hits_at = hits_at
    prepared, got = prepare(accelerator, made(dataset=dataset)), []
    with pytest.raises(KeyboardInterrupt):
        got.extend(map(plain, prepared))
    resumed = prepare(accelerator, made())
    resumed.load_state_dict(prepared.state_dict())
    assert got + [plain(batch) for batch in resumed] == expected


def test_a_folder_without_the_loaders_state_is_refused(accelerator, tmp_path):
    accelerator.save_state(tmp_path)
    prepare(accelerator, made())
    with pytest.raises(StateError, match="has no state of prepared loader 0"):
        accelerator.load_state(tmp_path)


@pytest.fixture
def stateful_accelerator():
    yield Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    forget()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_accelerates_stateful_loaders_are_ours_under_torchdatas_name(
    stateful_accelerator, num_workers, monkeypatch, tmp_path
):
    import torchdata.stateful_dataloader as torchdata

    monkeypatch.setattr(torchdata, "StatefulDataLoader", StatefulDataLoader)
    options = {"batch_size": 2, "shuffle": True, "num_workers": num_workers}
    loader = stateful_accelerator.prepare(StatefulDataLoader(range(12), **options))
    assert type(loader.base_dataloader) is StatefulDataLoader
    assert sorted(index for batch in loader for index in batch.tolist()) == [*range(12)]
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(2)]
    stateful_accelerator.save_state(tmp_path)
    rest = [batch.tolist() for batch in batches]
    assert sorted(index for batch in first + rest for index in batch) == [*range(12)]
    stateful_accelerator.load_state(tmp_path)
    assert [batch.tolist() for batch in loader] == rest
    assert len(list(loader)) == 6
    stateful_accelerator.free_memory()  # Accelerate keeps its loaders


def test_what_is_no_loader_of_ours_is_refused(accelerator):
    with pytest.raises(ConfigError, match=r"not StatefulDataLoader\. .* give others to that"):
        prepare(accelerator, StatefulDataLoader(range(4)))
    theirs = torch.utils.data.DataLoader(Numbered())
    with pytest.raises(ConfigError, match=r"Call it before accelerator.prepare"):
        prepare(accelerator, accelerator.prepare(DataLoader(range(4))))
    with pytest.raises(ConfigError, match=r"prepare takes a penstock.torch.DataLoader"):
        prepare(accelerator, theirs)
    with pytest.raises(ConfigError, match=r"accelerate.skip_first_batches takes other loaders"):
        skip_first_batches(theirs, 1)
    with pytest.raises(ConfigError, match="num_batches"):
        skip_first_batches(prepare(accelerator, made()), -1)


def test_what_is_the_loaders_is_set_there_or_refused_as_torch_refuses_it(accelerator):
    prepared = prepare(accelerator, made())
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after"):
            setattr(prepared, name, 99)
    with pytest.raises(ConfigError, match="seed attribute should not be set after"):
        prepared.seed = 3
    prepared.collate_fn = len
    assert list(prepared) == [4, 4, 4, 4, 4, 1]
    prepared.tag = "mine"
    assert (prepared.tag, hasattr(prepared.loader, "tag")) == ("mine", False)


class Doubled(DataLoader):
    """A subclass that makes other batches of ours."""

    def __iter__(self):
        for indices, numbers in super().__iter__():
            yield 2 * indices, numbers


def test_on_a_device_the_state_counts_what_the_loop_has_also_of_a_loader_with_its_own_iter(
    accelerator, monkeypatch
):
    monkeypatch.setattr(prefetcher, "open_accelerator", lambda device: FakeAccelerator())
    loader = Doubled(Numbered(), batch_size=4, shuffle=True, seed=SEED)
    prepared = prepare(accelerator, loader)
    prepared.device = torch.device("meta")
    states, devices = [], []
    for indices, _ in prepared:
        states.append((prepared.state_dict()["epoch"], prepared.state_dict()["batches"]))
        devices.append(indices.device.type)
    assert states == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)]
    assert devices == ["meta"] * 6


@pytest.mark.parametrize("placed", [True, False])
def test_batches_are_put_on_the_device_if_that_is_wanted(accelerator, placed, monkeypatch):
    shards = []
    prepare_theirs = accelerator.prepare_data_loader

    def noting(loader, **named):
        shards.append(prepare_theirs(loader, **named))
        if shards[-1] is not loader:
            shards[-1].device = torch.device("cuda")  # as with dispatch_batches=True there
        return shards[-1]

    monkeypatch.setattr(accelerator, "prepare_data_loader", noting)
    monkeypatch.setattr(accelerator, "device_placement", placed)
    prepared = prepare(accelerator, made())
    assert len(shards) == 2
    assert prepared.device == (None if placed is False else torch.device("cpu"))


def test_a_prepared_loader_can_be_copied(accelerator):
    expected = [plain(batch) for batch in prepare(accelerator, made())]
    prepared = prepare(accelerator, made())
    for copied in (
        copy.copy(prepare(accelerator, made())),
        copy.deepcopy(prepared),
        pickle.loads(pickle.dumps(prepared)),
    ):
        assert len(copied) == 6
        found, ends = [], []
        for batch in copied:
            found.append(plain(batch))
            ends.append(accelerator.gradient_state.end_of_dataloader)
        assert found == expected
        assert ends == [False] * 5 + [True]
    assert prepared.epoch == 0
    with pytest.raises(AttributeError):
        PreparedLoader.__new__(PreparedLoader).dataset  # noqa: B018 - as unpickling asks


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_shares_are_those_of_accelerate(even, drop_last, split):
    for length in range(26):
        for size, processes in ((1, 2), (2, 3), (3, 2), (5, 4)):
            given = size * processes if split else size
            theirs = BatchSampler(range(length), given, drop_last)
            order = sampling.SequentialSampler(range(length))
            batches = sampling.BatchSampler(order, given, drop_last)
            for rank in range(processes):
                shard = BatchSamplerShard(theirs, processes, rank, split, even)
                share = BatchShare(
                    batches, order, size, num_processes=processes, process_index=rank,
                    even_batches=even,
                )  # fmt: skip
                expected = [list(batch) for batch in shard]
                assert list(share) == expected
                assert len(share) == len(expected)


@pytest.mark.parametrize("is_seeded", [False, True])
def test_even_batches_can_be_changed_between_epochs_as_join_uneven_inputs_does(
    accelerator, monkeypatch, is_seeded
):
    """With the two ranks' batches in one process; Accelerate joins on GPUs alone."""
    order = sampling.SequentialSampler(range(9))
    batches = sampling.BatchSampler(order, 2, False)
    monkeypatch.setattr(Accelerator, "multi_device", True)
    monkeypatch.setattr("accelerate.accelerator.Join", lambda *_, **__: contextlib.nullcontext())
    counts = {}
    for rank in range(2):
        if is_seeded:
            share = BatchShare(batches, order, 2, num_processes=2, process_index=rank)
        else:
            share = BatchSamplerShard(batches, 2, rank)
        prepared = prepare(accelerator, made())
        prepared.loader = DataLoader(Numbered(9), batch_sampler=share, seed=SEED)

        def lengths(prepared=prepared):
            return [len(indices) for indices, _ in prepared]

        before = lengths()
        with accelerator.join_uneven_inputs([], even_batches=False):
            within = lengths()
        counts[rank] = before, within, lengths()
        accelerator._dataloaders.clear()
    assert counts == {0: ([2] * 3, [2, 2, 1], [2] * 3), 1: ([2] * 3, [2, 2], [2] * 3)}


def test_a_share_can_be_pickled():
    order = sampling.RandomSampler(range(100_000), seed=3)  # not stored, but computed
    batches = sampling.BatchSampler(order, 4, False)
    share = BatchShare(batches, order, 4, num_processes=3, process_index=1)
    again = pickle.loads(pickle.dumps(share))
    whole = list(batches)
    assert list(again)[:5] == whole[1:15:3]
