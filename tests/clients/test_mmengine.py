# SPDX-License-Identifier: Apache-2.0
"""mmengine's Runner, built of a config, trains on Penstock's loader and resumes from its state."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import warnings
from pathlib import Path

import cv2
import mmengine
import numpy as np
import pytest
import torch
import torch.utils.data
from tests.clients.torchvision_operators import declare_missing
from tests.distributed.launching import TORCHRUN, environment
from tests.support.processes import completed

import penstock.torch
from penstock.collate import Collator
from penstock.errors import ConfigError, StateError
from penstock.sampling import DistributedSampler
from penstock.torch import DevicePrefetcher

declare_missing()  # mmengine's list of versions imports torchvision
with warnings.catch_warnings():
    # While it is imported it uses parts of torch that are deprecated by now.
    warnings.simplefilter("ignore")
    from mmengine.evaluator import BaseMetric
    from mmengine.logging import HistoryBuffer, MessageHub, MMLogger
    from mmengine.model import BaseModel
    from mmengine.registry import (
        DATA_SAMPLERS,
        DATASETS,
        FUNCTIONS,
        METRICS,
        MODELS,
        RUNNERS,
        DefaultScope,
    )
    from mmengine.visualization import Visualizer

    from penstock.integrations.mmengine import PenstockRunner, _endless

pytestmark = [
    # mmengine 0.10.7, of 2024, and what it imports
    pytest.mark.filterwarnings("ignore:Setting (OMP|MKL)_NUM_THREADS"),
    pytest.mark.filterwarnings("ignore:Multi-processing start method"),
    pytest.mark.filterwarnings("ignore:.*pkg_resources"),
    pytest.mark.filterwarnings("ignore:Failed to search registry with scope"),
]

NUM_SAMPLES = 12
BATCH_SIZE = 3
RUNS = itertools.count()


@DATASETS.register_module(force=True)
class Noisy(torch.utils.data.Dataset):
    """Samples that say who they are, with a random number each, and a list of what was read."""

    read: list[int] = []  # noqa: RUF012 - of the process, to be looked at after a run

    def __init__(self, length=NUM_SAMPLES):
        self.length = length
        self.metainfo = {"classes": ["noise"]}

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        Noisy.read.append(index)
        return {"index": index, "noise": torch.from_numpy(np.random.random(2).astype(np.float32))}


@MODELS.register_module(force=True)
class Remembers(BaseModel):
    """A line, which keeps the batches that it was trained with."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen = []

    def forward(self, index, noise, mode="tensor"):
        if mode == "predict":
            return [{"index": int(i)} for i in index]
        # Tensors of a batch alias its slot: kept as numbers, not as tensors.
        self.seen.append((index.tolist(), noise.tolist()))
        return {"loss": (self.line(noise) ** 2).mean()}


@METRICS.register_module(force=True)
class Counts(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [sample["index"] for sample in data_samples]

    def compute_metrics(self, results):
        return {"seen": len(set(results))}


@FUNCTIONS.register_module(force=True)
class Rows:
    """A `CollateInto`, made of a config."""

    def __init__(self, scale):
        self.scale = scale

    def collate_into(self, samples, out):
        noise = out.empty((len(samples), 2), np.float32)
        noise[...] = [sample["noise"].numpy() * self.scale for sample in samples]
        index = np.array([sample["index"] for sample in samples])
        return {"index": out.leaf(index), "noise": out.leaf(noise)}

    def __call__(self, samples):
        return self.collate_into(samples, Collator(np.empty))


@pytest.fixture(autouse=True)
def as_it_was():
    """Take back what a Runner does to its process: open logs, a start method, OpenCV's threads."""
    threads = cv2.getNumThreads()
    method = multiprocessing.get_start_method(allow_none=True)
    Noisy.read.clear()
    yield
    for logger in MMLogger._instance_dict.values():
        for handler in logger.handlers:
            handler.close()
    for manager in (MMLogger, MessageHub, Visualizer, DefaultScope):
        manager._instance_dict.clear()
    multiprocessing.set_start_method(method, force=True)
    cv2.setNumThreads(threads)


def config(work_dir, *, by_epoch=True, hook=True, max_epochs=3, max_iters=10, every=2, **loader):
    """Return a Runner's config, as a file has it; `loader` goes into train_dataloader."""
    length = {"max_epochs": max_epochs} if by_epoch else {"max_iters": max_iters}
    train = {
        "batch_size": BATCH_SIZE,
        "num_workers": 0,
        "dataset": {"type": "Noisy"},
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "collate_fn": {"type": "default_collate"},
    }
    return {
        "runner_type": "PenstockRunner",
        "default_scope": "mmengine",
        "work_dir": str(work_dir),
        "model": {"type": "Remembers"},
        "train_dataloader": train | loader,
        "train_cfg": {"by_epoch": by_epoch, **length},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
        "default_hooks": {
            "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": every}
        },
        "custom_hooks": [{"type": "PenstockHook"}] if hook else [],
        "randomness": {"seed": 5},
        # On a CPU mmengine's own wrapping of the model fails: it names a device of CUDA.
        "model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None},
        "log_level": "WARNING",
    }


def trained(settings):
    settings = {**settings, "experiment_name": f"run{next(RUNS)}"}  # or they share their logs
    runner = RUNNERS.build(mmengine.Config(settings))
    runner.train()
    return runner


def resumed(settings, checkpoint):
    Noisy.read.clear()
    return trained({**settings, "load_from": str(checkpoint), "resume": True})


def weights(runner):
    return [p.tolist() for p in runner.model.parameters()]


def as_mmengine_has_it(settings):
    """Return the same config without what is Penstock's."""
    train = {k: v for k, v in settings["train_dataloader"].items() if k != "seed"}
    return {**settings, "runner_type": "Runner", "custom_hooks": [], "train_dataloader": train}


# mmengine seeds each worker alike in every epoch, which is what the warning says.
@pytest.mark.filterwarnings("ignore:worker_init_fn partial leaves:UserWarning")
@pytest.mark.parametrize(("by_epoch", "num_workers"), [(True, 0), (True, 2), (False, 0)])
def test_without_a_seed_the_batches_are_those_of_mmengines_own_loader(
    tmp_path, by_epoch, num_workers
):
    settings = config(
        tmp_path, by_epoch=by_epoch, max_iters=4, max_epochs=2, num_workers=num_workers
    )
    ours = trained(settings)
    theirs = trained(as_mmengine_has_it(settings))
    assert type(theirs.train_dataloader) is torch.utils.data.DataLoader
    assert isinstance(ours.train_dataloader, penstock.torch.DataLoader)
    assert ours.model.seen == theirs.model.seen
    assert weights(ours) == weights(theirs)
    assert ours.train_dataloader.stats().run.batches == len(ours.model.seen)


def test_workers_of_ours_make_the_batches(tmp_path):
    runner = trained(config(tmp_path, num_workers=2, seed="runner", max_epochs=1))
    loader = runner.train_dataloader
    assert (loader.seed, loader.stats().num_workers, loader.stats().run.batches) == (5, 2, 4)
    assert Noisy.read == []  # not in this process


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("saved_after", [2, 4, 6, 8])
def test_an_epoch_goes_on_where_it_was_saved(tmp_path, num_workers, saved_after):
    settings = config(tmp_path, num_workers=num_workers, seed="runner", every=saved_after)
    whole = trained(settings)
    rest = resumed(settings, tmp_path / f"iter_{saved_after}.pth")
    assert len(whole.model.seen) == 12
    assert rest.model.seen == whole.model.seen[saved_after:]
    assert weights(rest) == weights(whole)
    assert rest.iter == whole.iter == 12
    if not num_workers:
        assert Noisy.read == [i for indices, _ in rest.model.seen for i in indices]


@DATA_SAMPLERS.register_module(force=True)
def dealt(dataset, seed, shuffle):
    """A sampler of Penstock's, whose epochs are set."""
    return DistributedSampler(dataset, seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("sampler", ["DefaultSampler", "InfiniteSampler", "dealt"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_over_iterations_goes_on_and_reads_nothing_again(tmp_path, sampler, num_workers):
    settings = config(
        tmp_path,
        by_epoch=False,
        num_workers=num_workers,
        seed="runner",
        every=6,
        sampler={"type": sampler, "shuffle": True},
    )
    whole = trained(settings)
    rest = resumed(settings, tmp_path / "iter_6.pth")
    assert len(whole.model.seen) == 10  # two epochs and a half of a shuffled order
    assert rest.model.seen == whole.model.seen[6:]
    assert weights(rest) == weights(whole)
    if not num_workers:
        assert Noisy.read == [i for indices, _ in rest.model.seen for i in indices]


def test_without_a_seed_the_order_of_an_epoch_goes_on(tmp_path):
    settings = config(tmp_path, every=6)
    whole = trained(settings)
    rest = resumed(settings, tmp_path / "iter_6.pth")
    assert [i for i, _ in rest.model.seen] == [i for i, _ in whole.model.seen[6:]]


def test_without_a_seed_a_loop_over_iterations_reads_again_and_says_so(tmp_path):
    settings = config(tmp_path, by_epoch=False, every=2, max_iters=3)
    whole = trained(settings)
    rest = resumed(settings, tmp_path / "iter_2.pth")
    assert [i for i, _ in rest.model.seen] == [i for i, _ in whole.model.seen[2:]]
    log = Path(rest.log_dir, f"{rest.timestamp}.log").read_text()
    assert "Advance dataloader 2 steps" in log


def test_checkpoints_at_the_ends_of_epochs_and_the_number_of_the_epoch_fit(tmp_path):
    settings = config(tmp_path, seed="runner")
    settings["default_hooks"]["checkpoint"] = {"type": "CheckpointHook", "interval": 1}
    whole = trained(settings)
    state = torch.load(tmp_path / "epoch_2.pth", weights_only=False)["penstock_loader"]
    assert (state["epoch"], state["batches"]) == (2, 0)
    assert json.loads(json.dumps(state)) == state
    rest = resumed(settings, tmp_path / "epoch_2.pth")
    assert rest.model.seen == whole.model.seen[8:]


def test_weights_alone_begin_a_training_of_their_own(tmp_path):
    settings = config(tmp_path, seed="runner")
    whole = trained(settings)
    Noisy.read.clear()
    again = trained({**settings, "load_from": str(tmp_path / "iter_2.pth")})
    assert again.model.seen == whole.model.seen


def test_the_validation_loop_has_a_loader_of_ours_and_sees_each_sample(tmp_path):
    settings = config(tmp_path, seed="runner", max_epochs=2)
    val = {**settings["train_dataloader"], "dataset": {"type": "Noisy", "length": 7}}
    val |= {"sampler": {"type": "DefaultSampler", "shuffle": False}, "num_workers": 2}
    evaluation = {"val_cfg": {}, "val_evaluator": {"type": "Counts"}, "val_dataloader": val}
    runner = trained({**settings, **evaluation})
    assert isinstance(runner.val_dataloader, penstock.torch.DataLoader)
    assert runner.message_hub.get_scalar("val/seen").data[0].tolist() == [7, 7]
    assert runner.model.seen == trained({**settings, "custom_hooks": []}).model.seen


def test_an_endless_loop_over_no_batches_is_an_error():
    empty = penstock.torch.DataLoader(list(range(3)), batch_size=8, drop_last=True, seed=1)
    with pytest.raises(ConfigError, match="no batches"):
        next(_endless(empty, 0))


def test_the_log_says_what_limits_the_loader(tmp_path):
    runner = trained({**config(tmp_path, seed="runner"), "log_level": "INFO"})
    log = Path(runner.log_dir, f"{runner.timestamp}.log").read_text()
    assert log.count("Train loader: ") == 3


def loader_of(**settings):
    return PenstockRunner.build_dataloader(
        mmengine.ConfigDict(config("unused", **settings)["train_dataloader"]), seed=5
    )


def test_the_arguments_of_ours_come_from_the_config():
    loader = loader_of(on_error={"on_error": "replace", "retries": 1}, num_workers="auto", seed=3)
    assert (loader.seed, loader.on_error.on_error, loader.on_error.retries) == (3, "replace", 1)
    threads = loader_of(backend="thread", num_workers=2, seed="runner")
    assert (threads.backend, threads.seed, threads.worker_init_fn) == ("thread", 5, None)


def test_what_mmengine_builds_is_built():
    batches = {"type": "torch.utils.data.BatchSampler", "drop_last": True}
    loader = loader_of(batch_sampler=batches, batch_size=5, num_batch_per_epoch=2)
    assert (len(loader), len(loader.dataset), loader.batch_sampler.batch_size) == (2, 10, 5)
    assert loader.worker_init_fn.keywords["seed"] == 5
    lists = loader_of(collate_fn={"type": "pseudo_collate"})
    assert isinstance(next(iter(lists))["index"], list)
    bare = loader_of(collate_fn={"type": "torch.utils.data.default_collate"})
    assert bare.collate_fn is torch.utils.data.default_collate


def test_an_object_that_collates_into_the_slot_is_made_of_its_config():
    halves = loader_of(collate_fn={"type": "Rows", "scale": 0.5}, seed=1, num_workers=1)
    wholes = loader_of(seed=1)
    assert isinstance(halves.collate_fn, Rows)
    for half, whole in zip(halves, wholes, strict=True):
        assert torch.equal(half["noise"], whole["noise"] / 2)
        assert torch.equal(half["index"], whole["index"])


def test_a_prefetcher_around_a_loader_brings_its_batches_where_they_belong():
    negated = DevicePrefetcher(loader_of(seed=5), "cpu", transform=lambda batch: -batch["index"])
    assert [(-i).tolist() for i in negated] == [b["index"].tolist() for b in loader_of(seed=5)]


def test_a_loader_of_ones_own_is_taken_as_it_is(tmp_path):
    made = penstock.torch.DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, seed=5)
    settings = {**config(tmp_path), "train_dataloader": made}
    # Config() of an object that it cannot print is not mmengine's way; the constructor is.
    del settings["runner_type"], settings["model_wrapper_cfg"]
    runner = PenstockRunner(**settings)
    runner.train()
    assert runner.train_dataloader is made
    Noisy.read.clear()
    again = penstock.torch.DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, seed=5)
    load = {"load_from": str(tmp_path / "iter_6.pth"), "resume": True}
    rest = PenstockRunner(
        **{**settings, "train_dataloader": again, "experiment_name": "rest", **load}
    )
    rest.train()
    assert rest.model.seen == runner.model.seen[6:]


def test_the_hook_needs_a_loader_of_ours(tmp_path):
    settings = {**config(tmp_path), "runner_type": "Runner"}
    with pytest.raises(ConfigError, match='Set runner_type="PenstockRunner"'):
        trained(settings)


def test_a_seed_of_the_runner_needs_a_runner_with_one():
    settings = config("unused", seed="runner")["train_dataloader"]
    with pytest.raises(ConfigError, match="which has none"):
        PenstockRunner.build_dataloader(settings)


class _Runs:
    def __init__(self, call, *arguments):
        self.made_by = call, arguments

    def __reduce__(self):
        return self.made_by


@pytest.mark.parametrize(
    "harm", [_Runs(os.system, "true"), _Runs(getattr, HistoryBuffer, "__init__"), _Runs(eval, "1")]
)
def test_a_checkpoint_that_would_run_a_program_is_still_refused(tmp_path, harm):
    settings = config(tmp_path, seed="runner", max_epochs=1)
    trained(settings)
    checkpoint = torch.load(tmp_path / "iter_2.pth", weights_only=False)
    torch.save({**checkpoint, "harm": harm}, tmp_path / "harm.pth")
    with pytest.raises(pickle.UnpicklingError):
        resumed(settings, tmp_path / "harm.pth")


def test_other_data_are_refused(tmp_path):
    settings = config(tmp_path, seed="runner")
    trained(settings)
    settings["train_dataloader"]["dataset"] = {"type": "Noisy", "length": 9}
    with pytest.raises(StateError, match="length"):
        resumed(settings, tmp_path / "iter_2.pth")


def test_two_ranks_share_an_epoch_and_go_on_exactly(tmp_path):
    program = Path(__file__).with_name("mmengine_ranks.py")
    done = completed(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", program, tmp_path],
        env=environment(PYTHONPATH=str(program.parents[2])),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank in ranks:
        assert rank["rest"] == rank["whole"][3:]
        assert rank["weights"] == [ranks[0]["weights"][0]] * 2
    first, second = ([i for indices, _ in rank["whole"][:2] for i in indices] for rank in ranks)
    assert sorted(first + second) == list(range(NUM_SAMPLES))
    noise = [{n for _, rows in rank["whole"] for row in rows for n in row} for rank in ranks]
    assert noise[0].isdisjoint(noise[1])
