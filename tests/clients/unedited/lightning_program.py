# SPDX-License-Identifier: Apache-2.0
"""A training with Lightning on torch's loader; the argument is the number of workers."""

from __future__ import annotations

import sys

import torch
from tests.clients.torchvision_operators import declare_missing
from torch.utils.data import DataLoader

declare_missing()

import lightning  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset  # noqa: E402


class Noisy(RandomDataset):
    def __getitem__(self, index):
        return super().__getitem__(index) + torch.rand(32)


class Model(BoringModel):
    def train_dataloader(self):
        return DataLoader(Noisy(32, 20), 4, shuffle=True, num_workers=int(sys.argv[1]))

    def val_dataloader(self):
        return DataLoader(Noisy(32, 8), 4, num_workers=int(sys.argv[1]))

    def training_step(self, batch, batch_index):
        result = super().training_step(batch, batch_index)
        sys.stdout.write(f"training {result['loss'].item()!r}\n")
        return result

    def validation_step(self, batch, batch_index):
        result = super().validation_step(batch, batch_index)
        sys.stdout.write(f"validation {result['x'].item()!r}\n")
        return result


lightning.seed_everything(7, workers=True, verbose=False)
lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Model())
