# SPDX-License-Identifier: Apache-2.0
"""One rank that feeds itself: no process group, no torch; it is told its rank by variables.

    RANK=2 WORLD_SIZE=4 python -m tests.distributed.lone_run FOLDER

Rank 2 is killed after the third batch, which it has logged and not saved. The others wait there for
a line. Started again, it goes on with the state that it has saved, says so, and nobody is asked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.process.seeded_datasets import NumpyNoise

import penstock
from penstock.distributed import current_rank
from penstock.sampling import DistributedSampler

LENGTH = 96
BATCH_SIZE = 4
VICTIM = 2
PAUSE_AFTER = 3  # batches


def loader_of(**ranks):
    sampler = DistributedSampler(NumpyNoise(LENGTH), seed=5, **ranks)
    return penstock.Loader(
        NumpyNoise(LENGTH), batch_size=BATCH_SIZE, sampler=sampler, num_workers=1, seed=7
    )


def content(batch):
    return [[int(index), row.tolist()] for index, row in zip(*batch, strict=True)]


def main(folder):
    rank = current_rank().rank
    loader = loader_of()
    path = Path(folder) / f"state-{rank}.json"
    is_restarted = path.exists()
    if is_restarted:
        loader.load_state_dict(json.loads(path.read_text()))
    step = loader.state_dict()["batches"]
    with (Path(folder) / f"log-{rank}.jsonl").open("a") as log:
        for batch in loader:
            step += 1
            line = {"restarts": int(is_restarted), "step": step, "content": content(batch)}
            print(json.dumps(line), file=log, flush=True)
            if step == PAUSE_AFTER:
                if rank == VICTIM and not is_restarted:
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.stdout.write("there\n")
                sys.stdout.flush()
                sys.stdin.readline()
            path.with_suffix(".part").write_text(json.dumps(loader.state_dict()))
            path.with_suffix(".part").replace(path)
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(sys.argv[1])
