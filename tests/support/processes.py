# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run to their end, of which nothing is left afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100  # below pytest's faulthandler_timeout; some 10 s are usual


def python(*arguments, **options):
    """Run Python to its end, as `completed` does; code after "-c" may be indented."""
    return completed([sys.executable, *map(textwrap.dedent, map(str, arguments))], **options)


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


def but_of_forks(warned):
    """The warnings without Python's own of forks in a process with threads, from 3.12 on."""
    return [warning for warning in warned if "multi-threaded" not in str(warning.message)]


def holds_in_child(check):
    """Return whether `check()` is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        is_true = False
        try:
            is_true = check()
        finally:
            os._exit(0 if is_true else 1)
    return os.waitpid(pid, 0)[1] == 0
