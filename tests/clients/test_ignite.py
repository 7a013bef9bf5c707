# SPDX-License-Identifier: Apache-2.0
"""Ignite's Engine over a Penstock loader resumes from its checkpoints."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from tests.torch.comparing import assert_same
from torch.utils.data import Dataset

import penstock.torch

NUM_BATCHES = 5


class Points(Dataset):
    """Points with noise of their own, and on which side of a line they lie."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        point = torch.rand(2)
        return point, (point.sum() > 1).long()


def loader_of(**options):
    options = {"batch_size": 4, "shuffle": True, "num_workers": 2, "seed": 7, **options}
    return penstock.torch.DataLoader(Points(), **options)


def engine_of():
    """An engine that keeps what it is given."""
    seen = []

    def step(engine, batch):
        seen.append(batch)
        points, labels = batch
        return torch.stack([1 - points.sum(1), points.sum(1) - 1], dim=1), labels

    return Engine(step), seen


@pytest.mark.parametrize("iteration", [5, 7], ids=["after an epoch", "within one"])
def test_a_checkpoint_of_the_engine_and_the_loader_resumes_exactly(tmp_path, iteration):
    engine, seen = engine_of()
    loader = loader_of()
    keep = Checkpoint({"engine": engine, "loader": loader}, DiskSaver(tmp_path), n_saved=None)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=iteration), keep)
    engine.run(loader, max_epochs=3)

    saved = torch.load(tmp_path / f"checkpoint_{iteration}.pt", weights_only=True)
    engine, rest = engine_of()
    loader = loader_of(num_workers=1)
    Checkpoint.load_objects({"engine": engine, "loader": loader}, saved)
    state = engine.run(loader)
    assert (state.epoch_length, state.iteration) == (NUM_BATCHES, 3 * NUM_BATCHES)
    assert_same(seen[iteration:], rest)
