# SPDX-License-Identifier: Apache-2.0
"""Transformers' Trainer with our engine: on one process, and on two under torchrun."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from tests.clients.trainer_run import (
    LENGTH,
    OfTorch,
    Ours,
    PenstockTrainer,
    Sentences,
    Users,
    given_after,
    run,
    trainer,
    weights,
)
from tests.distributed.launching import TORCHRUN, environment, started
from tests.support.processes import ended

from penstock.errors import StateError
from penstock.integrations.accelerate import PreparedLoader

SKIPPED = 10  # batches before checkpoint 5, each step of which takes two


@pytest.fixture(autouse=True)
def _trainers_globals():
    """One thread, as two cores are shared by many; and nothing kept of another test's trainer."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(num_threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_CPU", None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run, one that resumed in it, and the folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("alone")
    return run(folder), folder


@pytest.fixture(scope="module")
def folder_of_ranks(tmp_path_factory):
    """Where two processes write."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(alone, folder_of_ranks):
    """The same on two processes, and what they do after the checkpoint of one."""
    folder = folder_of_ranks
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "tests.clients.trainer_run"]
    command += [str(folder), str(alone[1] / "checkpoint-5")]
    process = started(command, folder=folder, name="run", env=environment())
    assert ended([process]) == [0], (folder / "run.txt").read_text()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_training_resumes_in_mid_epoch_without_reading_what_was_read(alone):
    noted, folder = alone
    assert len(noted["given"]) == 26
    assert noted["given_after"] == noted["given"][SKIPPED:]
    assert noted["num_read"] == 2 * LENGTH - 2 * SKIPPED
    assert noted["weights_after"] == noted["weights"]
    assert (folder / "checkpoint-5" / "penstock_loader_rank0.json").exists()


def test_two_processes_get_the_samples_of_one_with_twice_the_batch(alone, ranks):
    together = [[*a[0], *b[0]] for a, b in zip(*(rank["given"] for rank in ranks), strict=True)]
    assert together == [numbers for numbers, _ in alone[0]["given"]]


def test_two_processes_resume_as_one_does(ranks):
    for rank in ranks:
        assert rank["given_after"] == rank["given"][SKIPPED:]
        assert rank["num_read"] == LENGTH - SKIPPED
        assert rank["weights_after"] == rank["weights"] == ranks[0]["weights"]


def test_another_number_of_processes_goes_on_at_a_checkpoint(
    alone, ranks, folder_of_ranks, tmp_path
):
    rest = alone[0]["given"][SKIPPED:]
    over = [[*a[0], *b[0]] for a, b in zip(*(rank["taken_over"] for rank in ranks), strict=True)]
    assert over == [numbers for numbers, _ in rest]
    assert given_after(folder_of_ranks / "checkpoint-5", tmp_path) == rest


@pytest.mark.parametrize("settings", [{}, {"dataloader_persistent_workers": True}])
def test_workers_change_nothing_of_a_collators_random_numbers(alone, tmp_path, settings):
    settings = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3, **settings}
    made = trainer(Ours, tmp_path, save_strategy="no", **settings)
    made.train()
    assert made.given == alone[0]["given"]
    loader = made.callback_handler.train_dataloader
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)
    assert loader.stats().run.batches == 26
    made.accelerator.free_memory()


class Drawing(PenstockTrainer):
    """A trainer whose steps draw, as dropout does."""

    def training_step(self, *given):
        self.drawn = [*getattr(self, "drawn", []), torch.rand(()).item()]
        return super().training_step(*given)


def of_tokens(samples):
    tokens = torch.tensor([sample["input_ids"][:2] for sample in samples])
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_threads_do_not_seed_what_the_trainer_draws_from(tmp_path, backend):
    options = {"backend": backend}
    made = trainer(
        Drawing, tmp_path, save_strategy="no", dataloader_num_workers=1, loader_options=options
    )
    made.data_collator = of_tokens
    made.train()
    loader = made.callback_handler.train_dataloader
    assert loader.backend == backend
    assert len(made.drawn) == len(set(made.drawn)) == 26
    assert (loader.worker_init_fn is None) == (backend == "thread")


def test_without_a_seed_it_is_transformers_own_training(tmp_path):
    theirs = trainer(OfTorch, tmp_path, save_strategy="no")
    theirs.train()
    ours = trainer(Ours, tmp_path, save_strategy="no", loader_options={"seed": None})
    ours.train()
    assert ours.given == theirs.given
    assert weights(ours) == weights(theirs)


def test_the_mixin_serves_somebodys_own_trainer(alone, tmp_path):
    made = trainer(Users, tmp_path, save_strategy="no")
    made.train()
    assert made.given == alone[0]["given"]


def test_a_checkpoint_of_transformers_own_trainer_is_resumed_too(alone, tmp_path):
    trainer(OfTorch, tmp_path, max_steps=5).train()
    data = Sentences()
    made = trainer(Ours, tmp_path, data=data)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert made.given == alone[0]["given"][SKIPPED:]
    assert len(data.read) == 2 * LENGTH - 2 * SKIPPED


def test_ignore_data_skip_begins_the_epoch_anew(alone, tmp_path):
    noted, folder = alone
    made = trainer(Ours, tmp_path, ignore_data_skip=True)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    assert made.given[:13] == noted["given"][:13]


def test_a_checkpoint_of_other_steps_is_refused(alone, tmp_path):
    made = trainer(Ours, tmp_path, gradient_accumulation_steps=1)
    with pytest.raises(StateError, match=r"saved in epoch 0 with 10 batches .* after 5:"):
        made.train(resume_from_checkpoint=str(alone[1] / "checkpoint-5"))


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential", "batch_rebalance"])
def test_the_trainers_own_samplers_are_kept_and_resume(tmp_path, strategy):
    whole = trainer(Ours, tmp_path, train_sampling_strategy=strategy)
    whole.train()
    data = Sentences()
    made = trainer(Ours, tmp_path, data=data, train_sampling_strategy=strategy)
    of_sampler = 2 * LENGTH if strategy == "batch_rebalance" else LENGTH
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert made.given == whole.given[SKIPPED:]
    if strategy == "sequential":
        of_sampler = 0
        assert [number for numbers, _ in whole.given[:13] for number in numbers] == [*range(26)]
    assert len(data.read) - of_sampler <= 2 * LENGTH - 2 * SKIPPED + 2


def test_evaluation_and_prediction_run_on_our_engine(tmp_path):
    made = trainer(Ours, tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    loader = made.get_eval_dataloader()
    assert type(loader) is PreparedLoader
    first, second = made.evaluate(), made.evaluate()
    assert first["eval_loss"] == second["eval_loss"]  # the collator masks the same tokens
    assert made.evaluated == [*range(7), *range(7)]
    assert loader.stats().run.batches == 8
    assert made.get_eval_dataloader() is loader
    assert made.predict(Sentences(5)).predictions.shape[0] == 5
    del loader, made._eval_dataloaders


def test_training_arguments_decide(tmp_path):
    made = trainer(Ours, tmp_path, dataloader_drop_last=True, per_device_train_batch_size=4)
    loader = made.get_train_dataloader()
    assert (len(loader), loader.seed, loader.num_workers) == (6, 5, 0)
    assert trainer(Ours, tmp_path, data_seed=9).get_train_dataloader().seed == 9
    options = {"on_error": "replace", "progress": False}
    made = trainer(Ours, tmp_path, loader_options=options)
    assert made.get_train_dataloader().on_error == "replace"
    assert made.get_eval_dataloader().on_error == "raise"
