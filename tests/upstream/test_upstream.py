# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of its loader pass on Penstock's, where a copy of them is at hand."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

VARIABLE = "PENSTOCK_TORCH_TEST_DATALOADER"
ENGINE = os.environ.get("PENSTOCK_UPSTREAM_ENGINE", "penstock")
LIMIT_S = 1800
TEST_LIMIT_S = 240  # the longest kills and awaits dozens of processes: 75 s on 2 cores

# Tests, by a part of their names, that are not about public behaviour, and why. They are left out
# for torch's loader too, so that both counts are of the same tests.
LEFT_OUT = {
    "DataLoaderDataPipe": "DataPipes, deprecated; they run on torch's own engine",
    "test_multiprocessing_iterdatapipe": "DataPipes, deprecated; they run on torch's own engine",
    "test_default_collate_shared_tensor": "sets the private _utils.worker._worker_info",
    "test_get_worker_info": "of 2.6: the words of an error that torch 2.13's own class fails too",
    "test_out_of_order_index_ds": "of 2.6: an order that torch 2.13's own class fails too",
    "test_segfault": "the words of torch's error; Penstock's names the signal and the sample",
    "test_numpy_gen_state": "calls the private torch.utils.data._utils.worker._generate_state",
}


@pytest.mark.slow
def test_pytorchs_own_tests_of_public_behaviour_pass(capfd: pytest.CaptureFixture[str]) -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(
            f"set {VARIABLE} to PyTorch's test/test_dataloader.py (tests/upstream/README.md)"
        )
    if find_spec("expecttest") is None:
        pytest.skip("PyTorch's test helpers need the package expecttest")
    # Replaced in spawned processes and in the scripts of the tests too.
    command = [sys.executable, "-m", "penstock", "run", "-q", "--engine", ENGINE, "-m", "pytest"]
    command += ["-q", "-rsxfE", "-c", os.devnull, "-p", "no:cacheprovider"]
    command += ["-o", f"faulthandler_timeout={TEST_LIMIT_S}"]
    command += ["-o", "faulthandler_exit_on_timeout=true"]
    command += ["-k", " and ".join(f"not {name}" for name in LEFT_OUT), Path(path).name]
    faulthandler.cancel_dump_traceback_later()  # ours, which ends a test after 2 minutes
    with capfd.disabled():
        done = subprocess.run(command, cwd=Path(path).parent, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, "the list of what failed is printed above"
