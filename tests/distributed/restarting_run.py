# SPDX-License-Identifier: Apache-2.0
"""One rank of a training that is killed twice, and restarted by torchrun from what it has saved.

    torchrun --max-restarts=2 ... -m tests.distributed.restarting_run FOLDER

Every step takes a batch of a map-style loader and one of a stream. Every second step each rank
saves the states of both. Rank 1 is killed at step 8, before it saves; all others save. So is rank 0
at step 10, once torchrun has started all ranks again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.nn  # see tests.distributed.launching.TORCHRUN
from tests.process.seeded_datasets import Noise, Resumable

from penstock.distributed import current_rank
from penstock.sampling import DistributedSampler
from penstock.torch import DataLoader

LENGTH = 46  # 6 steps of 8, the last of 6, on 2 ranks and on 4
GLOBAL_BATCH = 8
NUM_STEPS = 6
NUM_EPOCHS = 2
SAVE_EVERY = 2
DEATHS = {0: (1, 8), 1: (0, 10)}  # restarts so far: the rank, and its step


def loaders_of(world_size, **ranks):
    """Of both kinds, with workers."""
    options = {
        "batch_size": GLOBAL_BATCH // world_size,
        "seed": 7,
        "num_workers": 2,
        "multiprocessing_context": "fork",
    }
    sampler = DistributedSampler(Noise(LENGTH), pad="none", seed=5, **ranks)
    # Items of the stream go to the ranks and workers in turn.
    return DataLoader(Noise(LENGTH), sampler=sampler, **options), DataLoader(
        Resumable(LENGTH), **options
    )


def content(batch, items):
    """Of one step: [index, its random numbers] of each sample, and of each of the stream."""
    return [
        [[int(index), row.tolist()] for index, row in zip(*batch, strict=True)],
        [[int(item), float(number)] for item, number in zip(*items, strict=True)],
    ]


def state_path(folder, rank, step):
    return folder / f"state-{rank}-{step}.json"


def save(folder, rank, step, states):
    path = state_path(folder, rank, step)
    path.with_suffix(".part").write_text(json.dumps(states))
    path.with_suffix(".part").replace(path)  # whole, or not there


def last_common_step(folder, rank):
    """The last step whose states all ranks have saved."""
    steps = [int(path.stem.rpartition("-")[2]) for path in folder.glob(f"state-{rank}-*.json")]
    last = torch.tensor(max(steps, default=0))
    dist.all_reduce(last, op=dist.ReduceOp.MIN)
    return int(last)


def main(folder):
    folder = Path(folder)
    dist.init_process_group("gloo")
    rank, world_size = current_rank()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    loader, stream = loaders_of(world_size)
    step = last_common_step(folder, rank)
    if step:
        states = json.loads(state_path(folder, rank, step).read_text())
        loader.load_state_dict(states[0])
        stream.load_state_dict(states[1])
    with (folder / f"log-{rank}.jsonl").open("a") as log:
        for epoch in range(loader.epoch, NUM_EPOCHS):
            assert stream.epoch == epoch
            for batch, items in zip(loader, stream, strict=True):
                step += 1
                line = {"restarts": restarts, "step": step, "epoch": epoch}
                line["children"] = [
                    [p.pid, p.create_time()] for p in psutil.Process().children(recursive=True)
                ]
                print(json.dumps({**line, "content": content(batch, items)}), file=log, flush=True)
                dist.all_reduce(torch.ones(3))  # the gradients
                victim = DEATHS.get(restarts) == (rank, step)
                if step % SAVE_EVERY == 0 and not victim:
                    save(folder, rank, step, [loader.state_dict(), stream.state_dict()])
                if DEATHS.get(restarts, (0, 0))[1] == step:
                    dist.barrier()  # the others have saved
                if victim:
                    os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
