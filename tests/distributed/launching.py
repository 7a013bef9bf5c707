# SPDX-License-Identifier: Apache-2.0
"""Starts ranks as users do, with torchrun or one by one, waits for them, and leaves none behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.processes import ROOT, ended

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What it starts imports torch.distributed.nn first. The functions there (torch 2.13) have the group
# of the moment of the import for a default argument, and DistributedDataParallel imports it: only
# then imported, it keeps gloo's threads beyond destroy_process_group, and one that drops a tensor
# while Python ends aborts the process ("terminate called without an active exception").
# It lets its models go before it destroys the group. The reducer of a DistributedDataParallel ends
# a group that it is the last to hold, and waits for its thread without releasing the GIL, which
# that thread may be waiting for (https://github.com/pytorch/pytorch/issues/56297).
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1")


def environment(**more):
    """That of a process that trains on this machine alone; one thread, as ranks share its cores."""
    inherited = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    return {**inherited, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}


def started(command, *, folder, name, **options):
    """A process; what it prints goes to a file, as a full pipe would stop it."""
    options = {"cwd": ROOT, **options}
    with (folder / f"{name}.txt").open("w") as printed:
        return subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, **options)


def torchrun(module, num_processes, folder, *arguments, max_restarts=0):
    """Run a module of this folder under torchrun to its end."""
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={num_processes}"]
    command += [f"--max-restarts={max_restarts}", "-m", f"tests.distributed.{module}"]
    # torchrun 2.13 keeps one store over all restarts, where ranks find the addresses of the dead.
    own_stores = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    process = started([*command, *arguments], folder=folder, name="torchrun", env=own_stores)
    assert ended([process]) == [0], (folder / "torchrun.txt").read_text()


def results_of(folder, num_processes):
    """What each rank has written, by rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
