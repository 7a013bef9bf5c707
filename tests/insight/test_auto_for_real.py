# SPDX-License-Identifier: Apache-2.0
"""`num_workers="auto"` with real workers: it grows where it must, and holds back where it should.

What is asked for holds on a busy machine too: nothing here says how quick anything is to be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from penstock import Loader, sample_rng

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures as Linux tells")

# One core is a setting of the whole process, so it has one of its own.
ONE_CORE = """
import os, sys, hashlib, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from penstock import Loader

class Hashed:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if sys.argv[1] == "cpu":
            hashlib.pbkdf2_hmac("sha256", b"", b"", 5000)
        return index

if __name__ == "__main__":
    loader = Loader(Hashed(), batch_size=4, num_workers="auto", backend=sys.argv[2])
    most = 0
    for step, batch in enumerate(loader):
        if sys.argv[1] == "trainer":
            time.sleep(0.01)
        most = max(most, loader.stats().num_workers if step % 5 == 0 else 0)
        if step == 120:
            break
    print(most)
"""


class Slow:
    """A sample is (its index, a random number), and takes 20 ms of waiting for it."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.02)
        return np.array((index, sample_rng().random()))


class Quick(Slow):
    """The same samples."""

    def __getitem__(self, index):
        return np.array((index, sample_rng().random()))


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_reads_of_20_ms_get_workers_and_the_stream_stays_the_same(backend):
    options = {"batch_size": 2, "shuffle": True, "seed": 5}
    loader = Loader(Slow(), num_workers="auto", backend=backend, **options)
    stream = np.stack(list(loader))
    assert len(stream) == 200
    assert loader.stats().num_workers >= 4, loader.stats().changes
    np.testing.assert_array_equal(stream, np.stack(list(Loader(Quick(), **options))))


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("work", ["cpu", "trainer"])
def test_on_one_core_there_are_never_many(work, backend, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ONE_CORE)
    done = subprocess.run(
        [sys.executable, str(program), work, backend],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert int(done.stdout) < 4
