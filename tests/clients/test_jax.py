# SPDX-License-Identifier: Apache-2.0
"""`penstock.Loader` on JAX's devices: four of them, of one process or of two, on the CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clients.programs import run_tests

IN_PROGRAMS = ("jax",)  # it has threads, so this process had better not import it

HERE = Path(__file__).parent


def environment(num_devices):
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


# In two halves: what takes longer than 120 s here counts as a hang.
@pytest.mark.parametrize("half", ["held or state or transform", "not (held or state or transform)"])
def test_on_four_devices(half):
    run_tests("jax_on_four_devices.py", half, **environment(4))


def test_on_two_processes_whose_devices_are_one_mesh():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "jax_process.py")]
    running = [
        subprocess.Popen(
            [*command, str(number), str(port)],
            env=environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    ended = [(process.communicate(timeout=120), process.returncode) for process in running]
    for (out, err), code in ended:
        assert code == 0, err
        assert out.splitlines()[-1] == "5 batches of both"
