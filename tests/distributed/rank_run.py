# SPDX-License-Identifier: Apache-2.0
"""One of some ranks: it takes the epochs of a plan, and writes what it had.

    torchrun ... -m tests.distributed.rank_run FOLDER
    python -m tests.distributed.rank_run FOLDER RANK WORLD_SIZE

Without RANK they meet by torchrun's variables; with it at a file, and there are no variables.
FOLDER holds the plan.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # see tests.distributed.launching.TORCHRUN
from tests.distributed.loaders import loader_of, taken

from penstock.distributed import current_rank
from penstock.sampling import DistributedSampler


def epochs_of(world_size, kind, state=None, num_epochs=2, cut=2, **options):
    """Some epochs, then one up to the cut; the state is taken there."""
    loader = loader_of(kind, world_size, **options)
    if state is not None:
        loader.load_state_dict(json.loads(state))
    epochs = [taken(loader) for _ in range(num_epochs)]
    batches = iter(loader)
    epochs.append(taken(batches, cut))
    state = json.dumps(loader.state_dict())
    del batches
    return {"epochs": epochs, "state": state}


def main(folder, rank=None, world_size=None):
    folder = Path(folder)
    sampler = DistributedSampler(range(8), shuffle=False)  # before there is a group
    said = {"before": current_rank()}
    if rank is None:
        dist.init_process_group("gloo")
        # From here on the process group alone knows.
        said["variables"] = [os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")]
    else:
        store = f"file://{folder / 'meet'}"
        dist.init_process_group(
            "gloo", init_method=store, rank=int(rank), world_size=int(world_size)
        )
    rank, world_size = said["after"] = current_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said["early sampler"] = list(sampler)
    said["warnings"] = [str(warning.message).partition(",")[0] for warning in caught]
    # The ranks' generators differ, as they do where they are not seeded.
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)
    plan = json.loads((folder / "plan.json").read_text())
    results = {
        "said": said,
        "epochs": {name: epochs_of(world_size, **run) for name, run in plan["epochs"].items()},
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
