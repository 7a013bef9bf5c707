# SPDX-License-Identifier: Apache-2.0
"""Trainings of test_lightning.py on two processes: torchrun starts it, argument is a folder."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.nn  # see tests.distributed.launching.TORCHRUN
from tests.clients.torchvision_operators import declare_missing
from torch.utils.data import WeightedRandomSampler

import penstock.torch
from penstock.errors import ConfigError
from penstock.sampling import BatchSampler, ClassBalancedSampler, DistributedSampler

declare_missing()

import lightning  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from tests.clients.test_lightning import Model, Noisy  # noqa: E402

from penstock.integrations.lightning import ExactResume  # noqa: E402

OPTIONS = {"batch_size": 4, "num_workers": 1, "seed": 7}


class Looks(lightning.Callback):
    """Notes which loader the trainer iterates."""

    def __init__(self):
        self.found = {}

    def on_train_start(self, trainer, pl_module):
        loader = trainer.train_dataloader
        self.found = {
            "class": type(loader),
            "iterator": type(trainer.fit_loop._data_fetcher.iterator._iterator.iterators[0]),
            "sampler": type(loader.sampler),
            "seed": loader.seed,
            "on_error": loader.on_error,
            "num_workers": loader.num_workers,
        }


def shuffled(**options):
    return penstock.torch.DataLoader(
        Noisy(), shuffle=True, on_error="skip", **{**OPTIONS, **options}
    )


class HookModel(Model):
    def train_dataloader(self):
        return shuffled(num_workers="auto")


class DealtOut(Model):
    def train_dataloader(self):  # in a hook the ranks are known
        sampler = DistributedSampler(ClassBalancedSampler(Noisy(), seed=1))
        return penstock.torch.DataLoader(Noisy(), sampler=sampler, **OPTIONS)


class InBatches(Model):
    """Gives Lightning a batch sampler, of indices that are dealt out or not."""

    def __init__(self, is_dealt_out):
        super().__init__()
        self.is_dealt_out = is_dealt_out

    def train_dataloader(self):
        sampler = ClassBalancedSampler(Noisy(), seed=1)
        if self.is_dealt_out:
            sampler = DistributedSampler(sampler)
        batches = BatchSampler(sampler, 4, False)
        return penstock.torch.DataLoader(Noisy(), batch_sampler=batches, seed=7)


def fit(model, loader=None, callbacks=(), path=None, **options):
    looks = Looks()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        callbacks=[looks, *callbacks],
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )
    trainer.fit(model, loader, ckpt_path=path, weights_only=False)
    return {"seen": model.seen, "loader": looks.found}


def trainings(folder):
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    yield "Trainer, shuffle", fit(Model(), shuffled(), [keep])
    resumed = {}
    for step in (2, 3):
        path = folder / f"step={step}.ckpt"
        resumed[step] = [b for _, _, b in fit(Model(), shuffled(), [ExactResume()], path)["seen"]]
    yield "resumed", resumed
    yield "Trainer, hook", fit(HookModel())
    weighted = WeightedRandomSampler([1.0] * 20, 20, replacement=False)
    loader = penstock.torch.DataLoader(Noisy(), sampler=weighted, **OPTIONS)
    yield "Trainer, torch's weighted sampler", fit(Model(), loader)
    sampler = ClassBalancedSampler(Noisy(), seed=1)
    loader = penstock.torch.DataLoader(Noisy(), sampler=sampler, **OPTIONS)
    yield "Trainer, balanced", fit(Model(), loader, max_epochs=1)
    apart = {"max_epochs": 1, "use_distributed_sampler": False}
    yield "Trainer, balanced and dealt out", fit(DealtOut(), **apart)
    yield "Trainer, balanced in batches", fit(InBatches(is_dealt_out=False))
    yield (
        "Trainer, dealt out in batches",
        fit(InBatches(is_dealt_out=True), use_distributed_sampler=False),
    )
    for model in (DealtOut(), InBatches(is_dealt_out=True)):
        try:
            fit(model)
        except ConfigError as error:
            yield f"dealt out twice, {type(model).__name__}", str(error)


def fabric_trainings():
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    inner = shuffled()
    loader = fabric.setup_dataloaders(inner)
    seen = []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            seen.append((epoch, number, batch))
            if len(seen) == 4:
                state = loader._dataloader.state_dict()
    yield "Fabric", seen
    again = fabric.setup_dataloaders(shuffled())
    again._dataloader.load_state_dict(state)
    yield "Fabric, resumed", [(1, n, batch) for n, batch in enumerate(again, 1)]


def main(folder):
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = dict(trainings(folder))
    found.update(fabric_trainings())
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
