# SPDX-License-Identifier: Apache-2.0
"""The soak of `soak.py`, in short and in full."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")
FULL_S = float(os.environ.get("PENSTOCK_SOAK_SECONDS", "600"))


def soak(seconds):
    """Return the figures of a soak, which has checked itself."""
    done = subprocess.run(
        [sys.executable, SCRIPT, str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * seconds + 180,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.slow
def test_twenty_seconds_of_killed_workers_and_corrupt_samples_lose_nothing_good():
    figures = soak(20)
    assert figures["kills"] >= 10
    assert all(figures[f"persistent_workers={kept}"]["respawns"] > 0 for kept in (True, False))


@pytest.mark.slow
def test_ten_minutes_of_killed_workers_and_corrupt_samples_lose_nothing_good():
    faulthandler.cancel_dump_traceback_later()  # pytest's 2 minutes a test; the script has its own
    figures = soak(FULL_S)
    assert figures["kills"] >= FULL_S / 2
