# SPDX-License-Identifier: Apache-2.0
"""Run PyTorch's own `test_dataloader.py` with `torch.utils.data` replaced by Penstock's classes.

    python tests/upstream/run.py PATH/TO/pytorch/test/test_dataloader.py

README.md beside this file says where to get that file, and what it needs.

The replacement is done when this module is imported, under whatever name: a spawned process imports
the main module of its parent again, and so has Penstock's classes before it unpickles anything.
`PENSTOCK_UPSTREAM_BASELINE=1` leaves torch's classes: what fails then, fails for its own reasons.
"""

# ruff: noqa: T201 - it prints its result
from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import unittest
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.utils.data
import torch.utils.data.dataloader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType

IS_BASELINE = os.environ.get("PENSTOCK_UPSTREAM_BASELINE") == "1"
TEST_LIMIT_S = 240  # the longest one kills and awaits dozens of processes: 75 s on 2 cores
MODULE = "test_dataloader"

# Patterns of test ids ("Class.test"), each with the reason why it is not about public behaviour.
# They are left out for torch's classes too, so that both counts are of the same tests.
DESELECTED: dict[str, str] = {
    "IntegrationTestDataLoaderDataPipe.*": "DataPipes, deprecated; they run on torch's own engine",
    "*.test_multiprocessing_iterdatapipe*": "DataPipes, deprecated; they run on torch's own engine",
    "*.test_default_collate_shared_tensor": "sets the private _utils.worker._worker_info",
    "*.test_get_worker_info": "of 2.6: the words of an error that torch 2.13's own class fails too",
    "*.test_out_of_order_index_ds": "of 2.6: an order that torch 2.13's own class fails too",
    "*.test_numpy_gen_state": "calls the private torch.utils.data._utils.worker._generate_state",
}


def replace() -> None:
    """Put Penstock's names in the place of torch's, where users import them from.

    Inner modules keep theirs, and `torch.utils.data` its `random_split`: Penstock calls them.
    """
    import penstock.torch

    for name in set(penstock.torch.__all__) - {"random_split"}:
        setattr(torch.utils.data, name, getattr(penstock.torch, name))
    torch.utils.data.dataloader.DataLoader = penstock.torch.DataLoader


def replace_in(module: ModuleType) -> None:
    """Put Penstock's names in the place of those that `module` imported from inner modules."""
    import penstock.torch

    for name in penstock.torch.__all__:
        if hasattr(module, name):
            setattr(module, name, getattr(penstock.torch, name))


if not IS_BASELINE:
    replace()


class _Result(unittest.TextTestResult):
    """Notes how long each test took, and ends one that hangs."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started_s = time.monotonic()
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(TEST_LIMIT_S)

    def stopTest(self, test: unittest.TestCase) -> None:
        signal.alarm(0)
        if (took_s := time.monotonic() - self._started_s) > 10:
            self.stream.writeln(f"    {_id_of(test)} took {took_s:.0f} s")
        super().stopTest(test)


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"the test hangs: it took more than {TEST_LIMIT_S} s")


def _id_of(test: unittest.TestCase) -> str:
    return test.id().removeprefix(f"{MODULE}.")


def _tests_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _tests_in(item)
        else:
            yield item


def _reason_against(name: str) -> str | None:
    reasons = (why for pattern, why in DESELECTED.items() if fnmatch.fnmatchcase(name, pattern))
    return next(reasons, None)


@contextlib.contextmanager
def _replaced_in_scripts() -> Iterator[None]:
    """Have scripts that a test runs as `python -c ...` import this module first."""
    prefix = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import run\n"
    stock = subprocess.check_output

    def with_prefix(call: Callable[..., object]) -> Callable[..., object]:
        def run(command: object, *args: object, **options: object) -> object:
            if isinstance(command, list) and "-c" in command:
                at = command.index("-c") + 1
                command = [*command[:at], prefix + str(command[at]), *command[at + 1 :]]
            return call(command, *args, **options)

        return run

    subprocess.check_output = with_prefix(stock)  # type: ignore[assignment]
    try:
        yield
    finally:
        subprocess.check_output = stock


def run(path: Path, patterns: list[str], *, stop_early: bool) -> bool:
    """Run the tests of the file at `path`, print the counts, and return whether all passed."""
    sys.path.insert(0, str(path.parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(MODULE)
    if not IS_BASELINE:
        replace_in(module)
    # Its own protocol for loading insists on being the running script.
    vars(module).pop("load_tests", None)
    found = list(_tests_in(unittest.defaultTestLoader.loadTestsFromModule(module)))
    if patterns:
        found = [t for t in found if any(fnmatch.fnmatchcase(_id_of(t), p) for p in patterns)]
    left_out = {_id_of(test): why for test in found if (why := _reason_against(_id_of(test)))}
    suite = unittest.TestSuite(test for test in found if _id_of(test) not in left_out)
    runner = unittest.TextTestRunner(
        verbosity=2, resultclass=_Result, warnings="ignore", failfast=stop_early
    )
    with _replaced_in_scripts():
        result = runner.run(suite)
    _print_counts(result, left_out)
    return result.wasSuccessful()


def _print_counts(result: unittest.TestResult, left_out: dict[str, str]) -> None:
    bad = [test for test, _ in (*result.failures, *result.errors)]
    bad_names = sorted({re.sub(r" .*", "", _id_of(test)) for test in bad})
    passed = result.testsRun - len(bad_names) - len(result.skipped) - len(result.expectedFailures)
    print()
    for name, why in sorted(left_out.items()):
        print(f"deselected: {name}: {why}")
    for test, why in result.skipped:
        print(f"skipped by itself: {_id_of(test)}: {why}")
    for name in bad_names:
        print(f"failed: {name}")
    print(
        f"{torch.utils.data.DataLoader.__module__}.DataLoader, torch {torch.__version__}: "
        f"{passed} passed, "
        f"{len(bad_names)} failed, {len(result.skipped)} skipped by themselves, "
        f"{len(result.expectedFailures)} expected to fail, {len(left_out)} deselected"
    )


def main() -> int:
    """Read the command line, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "path",
        nargs="?",
        default=os.environ.get("PENSTOCK_TORCH_TEST_DATALOADER"),
        help="PyTorch's test/test_dataloader.py (or $PENSTOCK_TORCH_TEST_DATALOADER)",
    )
    parser.add_argument("-k", dest="patterns", action="append", default=[], metavar="PATTERN")
    parser.add_argument(
        "-x", dest="stop_early", action="store_true", help="stop at the first failure"
    )
    options = parser.parse_args()
    if not options.path:
        parser.error("name PyTorch's test/test_dataloader.py; README.md says how to get it")
    path = Path(options.path).resolve()
    if path.name != f"{MODULE}.py" or not path.is_file():
        parser.error(f"expected the path of a {MODULE}.py, got {options.path}")
    return 0 if run(path, options.patterns, stop_early=options.stop_early) else 1


if __name__ == "__main__":
    sys.exit(main())
