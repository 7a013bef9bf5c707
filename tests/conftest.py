# SPDX-License-Identifier: Apache-2.0
"""What every test is held to: it leaves no process, thread, descriptor or shared memory behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import psutil
import pytest
from tests.support.holdings import Holdings, servers_of_multiprocessing

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before an import of Albumentations, which asks the network for a newer one then.
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

# By itself hypothesis fails an example that takes 200 ms, which on a busy machine means nothing.
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

# A fork server starts once per process, at the first test that needs one; what it has imported, its
# workers need not. Nothing tested with it depends on these: the tests of what a worker does without
# torch spawn theirs.
multiprocessing.set_forkserver_preload(
    ["__main__", "tests.process.faulty_datasets", "torch", "penstock.torch"]
)

# "forkserver" is the default from Python 3.14 on.
if start_method := os.environ.get("PENSTOCK_TEST_START_METHOD"):
    multiprocessing.set_start_method(start_method, force=True)

# A shell starts what goes on in the background with Ctrl-C switched off, and children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GRACE_S = 5.0  # a worker that was ended is gone by then; the promise of the shutdown page

_TESTS = Path(__file__).parent
_MAY_IMPORT_TORCH = (f"{_TESTS}/", f"{_TESTS.parent / 'src' / 'penstock' / 'torch'}/")

_slots_found = [0]


class NeedsTorch(pytest.Item):
    """Stands for the tests of a module that imports torch, where there is none: one skip."""

    fixturenames = ()

    def runtest(self) -> None:
        pytest.skip("the module imports torch, which is not installed here")


class ModuleOfTests(pytest.Module):
    """A module of tests, which may need torch; any other failure to import it is an error."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        try:
            yield from super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            if not (isinstance(cause, ModuleNotFoundError) and cause.name == "torch"):
                raise
            files = (frame.filename for frame in traceback.extract_tb(cause.__traceback__))
            *_, importer = (file for file in files if not file.startswith("<frozen"))
            if not importer.startswith(_MAY_IMPORT_TORCH):
                raise  # what is to run without torch imports it
            # Half of the module is there; who imports from it is to find that it needs torch.
            for name, module in list(sys.modules.items()):
                if getattr(module, "__file__", None) == str(self.path):
                    del sys.modules[name]
            yield NeedsTorch.from_parent(self, name="needs torch")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Leave out, and count, the modules of tests that need torch where there is none."""
    return ModuleOfTests.from_parent(parent, path=module_path)


def pytest_collection_finish() -> None:
    """What exists now stays, and the collector need not look at it again, in any test or worker.

    There are a million objects: a collection takes a third of a second with them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def workers_by_fork() -> Iterator[None]:
    """Workers are forked: the test changes something in this process, and they are to have it."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """After the test nothing is left that it did not find.

    The first look is cheap and mostly the last; where something is left, the test gets a garbage
    collection and the time that a worker has for its exit.
    """
    # Looking for mapped slots takes milliseconds; there are those that the last test found.
    before = Holdings.now(_slots_found[-1])
    yield
    after = Holdings.now()
    _slots_found[:] = [after.num_slots_mapped]
    if not after.left_since(before):
        return
    gc.collect()
    servers, _ = servers_of_multiprocessing()
    ending = [p for p in Holdings.now().children - before.children if p.pid not in servers]
    psutil.wait_procs(ending, timeout=GRACE_S)
    for thread in Holdings.now().threads - before.threads:
        thread.join(GRACE_S)  # as those of another library's executor, which is shut down
    after = Holdings.now()
    _slots_found[:] = [after.num_slots_mapped]
    left = after.left_since(before)
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture(autouse=True)
def restore_randomness() -> Iterator[None]:
    """The global generators are after each test as they were before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if torch is not None:
        torch.set_rng_state(of_torch)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real data; the test is skipped where there is none."""
    named = os.environ.get("PENSTOCK_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if folder.is_dir():
        return folder
    reason = f"no real data at {folder}: name its folder in PENSTOCK_TEST_DATA"
    if os.environ.get("PENSTOCK_REQUIRE_DATA") == "1":
        pytest.fail(f"{reason}. PENSTOCK_REQUIRE_DATA=1 forbids to skip.")
    pytest.skip(reason)
