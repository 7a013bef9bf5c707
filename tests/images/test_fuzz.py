# SPDX-License-Identifier: Apache-2.0
"""Files damaged at random, by the thousand: nothing but ValueError, no crash, no hang, no flood."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cv2")
pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[2]
# Twice what was seen. No small file may take what the 100,000,000 pixels that are allowed would.
MOST_BYTES = 500_000_000


def run(decoder, seed, count, *folders):
    """Return what the process says that decodes them; and the last file, if it dies."""
    how = [str(argument) for argument in (decoder, seed, 0, count)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.images.mutate", *how, *folders],
        capture_output=True, text=True, timeout=1500, cwd=ROOT, check=False,
    )  # fmt: skip
    *_, last = done.stdout.splitlines() or ["nothing"]
    assert done.returncode == 0, f"ended by {done.returncode} at {last}\n{done.stderr[-3000:]}"
    return json.loads(last)


def check(said, count):
    assert said["wrong"] == []
    assert said["refused"] + said["decoded"] == count
    assert said["decoded"] > count // 20  # else nothing gets past the headers
    assert said["peak_bytes"] < MOST_BYTES


def test_2000_damaged_files_raise_value_errors_and_nothing_else(decoder):
    check(run(decoder, 5, 2000), 2000)


@pytest.mark.slow
def test_20000_damaged_files_raise_value_errors_and_nothing_else(decoder, data_dir):
    check(run(decoder, 6, 20_000, str(data_dir / "broken")), 20_000)
