# SPDX-License-Identifier: Apache-2.0
"""Starts ranks as users do, with torchrun or one by one, waits for them, and leaves none behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100  # below pytest's faulthandler_timeout; some 10 s are usual
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
    """A process; what it prints goes to a file, as a pipe that nobody reads would stop it."""
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


def completed(command, **options):
    """Run a command, torchrun perhaps, to its end; what it printed is in the result, as text."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    out, err = told_by(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def told_by(process, timeout_s=TIMEOUT_S):
    """What a process writes into its two pipes until its end, or a failure with what it has."""
    try:
        return process.communicate(timeout=timeout_s)
    except BaseException as error:
        end([process])
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        out, err = _last_words_of(process)
        raise AssertionError(f"{process} has not ended in {timeout_s} s:\n{out}\n{err}") from None


def _last_words_of(process):
    """What a process that is gone has printed; one that it has started may still hold its pipes."""
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired as held:
        process.stdout.close()
        process.stderr.close()
        return held.output, "… and something that it has started goes on"


def ended(processes):
    """Wait for all of them; their exit codes. What they have started ends with them."""
    try:
        return [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        end(processes)


def end(processes):
    """End those that still run, and their children: torchrun's are in sessions of their own."""
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def results_of(folder, num_processes):
    """What each rank has written, by rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
