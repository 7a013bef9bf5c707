# SPDX-License-Identifier: Apache-2.0
"""What ranks do with batches together: train a model, and measure one."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
import torch.distributed as dist
from tests.distributed.loaders import GLOBAL_BATCH, LENGTH
from torch import nn

from penstock.sampling import DistributedSampler
from penstock.torch import DataLoader

LEARNING_RATE = 0.5


class Points:
    """Sample i: two numbers, and the one to be learned of them; it draws nothing."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        x = np.array([np.sin(index), np.cos(3.0 * index)])
        return x, np.array([2.0 * x[0] - x[1] ** 2])


def points_loader(world_size, pad, num_workers=0, *, drop_last=False, **ranks):
    return DataLoader(
        Points(),
        batch_size=GLOBAL_BATCH // world_size,
        sampler=DistributedSampler(Points(), pad=pad, **ranks),
        drop_last=drop_last,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        seed=7,
    )


def new_model():
    model = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def weights_of(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()]).tolist()


def train(world_size, pad, num_epochs=2, num_workers=0, joins=None, drop_last=False):
    """Train with DistributedDataParallel; the batches of each epoch, and the weights at the end.

    Args:
        world_size: Number of ranks.
        pad: Of the sampler.
        num_epochs: Of training.
        num_workers: Of the loader.
        joins: "model" or "context", the two ways to say that ranks have uneven numbers of batches;
            None: they have equal ones.
        drop_last: Of the loader.
    """
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    loader = points_loader(world_size, pad, num_workers, drop_last=drop_last)
    num_batches = []
    for _ in range(num_epochs):
        uneven = {
            "model": lambda: model.join(),
            "context": lambda: Join([model]),
            None: contextlib.nullcontext,
        }[joins]()
        num_batches.append(0)
        with uneven:
            for x, y in loader:
                num_batches[-1] += 1
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
    return {"batches": num_batches, "weights": weights_of(model)}


def trained_alone(world_size, pad, num_epochs=2, drop_last=False):
    """The same by one process, which adds up the ranks' gradients."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    loaders = [
        points_loader(world_size, pad, num_replicas=world_size, rank=rank, drop_last=drop_last)
        for rank in range(world_size)
    ]
    for _ in range(num_epochs):
        epochs = [list(loader) for loader in loaders]
        for step in range(max(map(len, epochs))):
            optimizer.zero_grad()
            for batches in epochs:
                if step < len(batches):
                    x, y = batches[step]
                    (nn.functional.mse_loss(model(x), y) / world_size).backward()
            optimizer.step()
    return weights_of(model)


def is_right(indices):
    """What the model of the validation says; it is wrong for the first few samples."""
    return indices >= 10


def validate(sampler, world_size):
    """Samples that were counted over all ranks, and how many of them were right."""
    loader = DataLoader(range(LENGTH), batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
    counts = torch.zeros(2, dtype=torch.int64)
    for indices in loader:  # ranks may have one batch more or less: nothing waits in here
        counts += torch.tensor([len(indices), int(is_right(indices).sum())])
    dist.all_reduce(counts)
    return counts.tolist()


def validate_in_all_ways(world_size):
    data = range(LENGTH)
    return {
        "none": validate(DistributedSampler(data, shuffle=False, pad="none"), world_size),
        "repeat": validate(DistributedSampler(data, shuffle=False), world_size),
        "torch's": validate(torch.utils.data.DistributedSampler(data, shuffle=False), world_size),
    }
