# SPDX-License-Identifier: Apache-2.0
"""Examples run as the programs that they are."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["ENVIRONMENT", "run"]

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",  # more would fight for the cores of a busy machine
    "NO_ALBUMENTATIONS_UPDATE": "1",  # it asks PyPI for its newest release
}


def run(*command):
    """Run Python on `command`; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
