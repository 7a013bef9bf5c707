# SPDX-License-Identifier: Apache-2.0
"""`penstock run` over programs of Lightning and Accelerate, unedited."""

from __future__ import annotations

import re

import pytest
from tests.distributed.launching import environment as of_ranks
from tests.program.running import PYTHON, RUN, environment, ran, split, written
from tests.support.processes import ROOT, completed

IN_PROGRAMS = ("accelerate", "lightning")

LIGHTNING = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)
{declared}
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        print(loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        return DataLoader(dataset, batch_size=4, shuffle=True)

lightning.seed_everything(7, verbose=False)
options = dict(max_epochs=2, logger=False, enable_checkpointing=False)
options |= dict(enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
lightning.Trainer(**options).fit(Model(), Data())
"""


def test_lightnings_losses_are_those_of_torch(tmp_path):
    declared = "from tests.clients.torchvision_operators import declare_missing; declare_missing()"
    written(tmp_path / "train.py", LIGHTNING.format(declared=declared))
    paths = f"{ROOT}:{environment().get('PYTHONPATH', '')}"
    stock = ran([*PYTHON, "train.py"], tmp_path, env=environment(PYTHONPATH=paths))
    got = ran([*RUN, "train.py"], tmp_path, env=environment(PYTHONPATH=paths))
    assert (stock.returncode, got.returncode) == (0, 0), got.stderr
    assert len(stock.stdout.splitlines()) == 16
    assert got.stdout == stock.stdout
    said = split(got.stderr)[1]
    assert said[0].startswith(
        "penstock run: train.py:25: a loader of TensorDataset, 0 workers, 16 batches. Waited "
    )


ACCELERATE = """
import torch
import torch.distributed.nn
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"{accelerator.process_index} {loss.item().hex()}\\n", end="", flush=True)
del model, optimizer, loader
accelerator.end_training()
"""
LAUNCH = "-m accelerate.commands.launch --num_machines 1 --mixed_precision no --dynamo_backend no"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_accelerate_launches_it(num_processes, tmp_path):
    written(tmp_path / "train.py", ACCELERATE)
    own = {"PYTHONPATH": environment().get("PYTHONPATH", ""), "HF_HOME": str(tmp_path)}
    # Its way to torchrun is called so; the program says that the ranks have no device.
    several = ["--multi_gpu"] if num_processes > 1 else ["--cpu"]
    launch = [*PYTHON, *LAUNCH.split(), *several, f"--num_processes={num_processes}"]

    def losses(*words):
        done = completed([*launch, *words], cwd=tmp_path, env=of_ranks(**own))
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines()), done.stderr

    stock, _ = losses("train.py")
    assert {line[0] for line in stock} == set("01"[:num_processes])
    got, stderr = losses("-m", "penstock", "run", "train.py")
    assert got == stock
    noted = [line for line in stderr.splitlines() if line.startswith("penstock run: ")]
    assert len(noted) == 1, stderr
    assert re.match(r"penstock run: train\.py:13: .*, \d+ batches\. Waited ", noted[0])
