# SPDX-License-Identifier: Apache-2.0
"""A training with Accelerate on torch's loader; the argument is the number of workers."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(5)
data = TensorDataset(torch.randn(70, 8), torch.randint(0, 3, (70,)))
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=int(sys.argv[1]))
model = torch.nn.Linear(8, 3)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), loader
)
for batches in (loader, accelerator.skip_first_batches(loader, 2)):
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        sys.stdout.write(f"rank {accelerator.process_index}: {loss.item()!r}\n")
accelerator.end_training()
