# SPDX-License-Identifier: Apache-2.0
"""One rank of a training run under torch.distributed, as a process of its own.

    python -m tests.process.distributed_run PLAN.json RANK

The plan names the ranks' meeting point and the runs; what each run gave is written beside it. What
a single process needs for comparison is here too.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from tests.process.seeded_datasets import Noise

from penstock.sampling import DistributedSampler, WeightedRandomSampler
from penstock.torch import DataLoader

SEED = 7
LENGTH = 100
WEIGHTS = [1.0 + index % 5 for index in range(LENGTH)]


class Shuffled:
    """A user's sampler, written without a thought for seeds or ranks."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)


def source_of(kind, length=LENGTH):
    """What a DistributedSampler wraps."""
    torch_weighted = torch.utils.data.WeightedRandomSampler
    return {
        "dataset": lambda: Noise(length),
        "weighted": lambda: WeightedRandomSampler(WEIGHTS[:length], length, seed=3),
        "torch weighted": lambda: torch_weighted(WEIGHTS[:length], length),
        "torch weighted, own generator": lambda: torch_weighted(
            WEIGHTS[:length], length, generator=torch.Generator()
        ),
        "user's": lambda: Shuffled(length),
    }[kind]()


def loader_of(kind, batch_size, *, length=LENGTH, num_workers=0, **ranks):
    return DataLoader(
        Noise(length),
        batch_size=batch_size,
        sampler=DistributedSampler(source_of(kind, length), **ranks),
        seed=SEED,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )


def content(batch):
    """The samples of a batch: [index, the bytes of its random numbers]."""
    indices, draws = batch
    return [[int(i), row.numpy().tobytes().hex()] for i, row in zip(indices, draws, strict=True)]


def taken(loader, count=None):
    """The next epoch, or so many batches of it."""
    return [content(batch) for batch in itertools.islice(loader, count)]


def train(kind, num_workers, num_epochs, cut):
    """Some epochs, then one up to the cut; the state is taken there."""
    loader = loader_of(kind, 8, num_workers=num_workers)
    epochs = [taken(loader) for _ in range(num_epochs)]
    batches = iter(loader)
    epochs.append([content(batch) for batch in itertools.islice(batches, cut)])
    return {
        "rank": [loader.sampler.rank, loader.sampler.num_replicas],
        "epochs": epochs,
        "state": json.dumps(loader.state_dict()),
    }


def main(plan_path, rank):
    plan = json.loads(Path(plan_path).read_text())
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{plan_path}.meet", rank=rank, world_size=plan["world_size"]
    )
    # The ranks' generators differ, as they do where nobody has seeded them.
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)
    results = []
    for run in plan["runs"]:
        results.append(train(**{**run, "num_workers": run["num_workers"][rank]}))
        states = [None] * plan["world_size"]
        torch.distributed.all_gather_object(states, results[-1]["state"])
        results[-1]["states of all"] = states
    Path(f"{plan_path}.{rank}").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
