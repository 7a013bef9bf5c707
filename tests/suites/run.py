# SPDX-License-Identifier: Apache-2.0
"""Run the test suites of other projects, on torch's own loader and on Penstock's in its place.

    python tests/suites/run.py [SUITE ...]

suites.toml beside this file names them. Each has an environment of its own, .suites/SUITE: its
package, the source distribution with its tests, PyTorch, Penstock. pytest runs the tests twice, the
second time with `-p penstock.testing.dropin`. One that passes on torch's loader alone is run three
more times on both: it differs if torch's passes each time, and Penstock's not. The exit status is 1
if a test differs that suites.toml does not name as known, and if a suite cannot be run.
"""

# ruff: noqa: T201 - it prints its result
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

import environments  # noqa: E402 - beside the benchmarks, whose environments it makes

COMMON = ["torch==2.13.0", "-e .[torch]", "pytest", "pytest-timeout"]
TEST_LIMIT_S = 120
RUN_LIMIT_S = 3600
NUM_REPEATS = 3


class CannotRunError(Exception):
    """A suite's environment or its tests could not be had."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One table of suites.toml."""

    name: str
    requirement: str
    needs: list[str]
    tests: list[str]
    deselect: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its environment is, and all that it writes."""
        return ROOT / ".suites" / self.name

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / "bin" / "python"


def set_up(suite: Suite) -> Path:
    """Make the environment of a suite unless it is there; return the folder with its sources."""
    suite.folder.mkdir(parents=True, exist_ok=True)
    requirements = suite.folder.with_suffix(".txt")
    requirements.write_text("\n".join([suite.requirement, *suite.needs, *COMMON, ""]), "utf-8")
    if not environments.is_made(suite.folder, requirements):
        print(f"{suite.name}: installing", flush=True)
        if not environments.make(suite.folder, requirements):
            raise CannotRunError((suite.folder / "failed.txt").read_text("utf-8"))
    (suite.folder / "pytest.ini").touch()  # else a suite without one runs by Penstock's
    package, _, version = suite.requirement.partition("==")
    sources = suite.folder / f"sources-{version}"
    if not any(sources.glob("*/")):
        command = [suite.python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", package]
        done = subprocess.run(
            [*command, "-d", sources, suite.requirement],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise CannotRunError("\n".join(environments.reasons(done.stdout)))
        with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
            archive.extractall(sources, filter="data")
    return next(path for path in sources.iterdir() if path.is_dir())


def run(suite: Suite, sources: Path, tests: list[str], *, on: str) -> dict[str, list[str] | None]:
    """Run tests on "torch" or "penstock"; return what each that ran said as it failed.

    None stands for a pass. One that was skipped, or failed as expected, has an empty list.
    """
    written = suite.folder / f"outcomes-{on}.jsonl"
    written.unlink(missing_ok=True)
    (suite.folder / "home").mkdir(exist_ok=True)
    environment = os.environ | {
        "HOME": str(suite.folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # small networks: more threads wait for each other
        "PENSTOCK_OUTCOMES": str(written),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [suite.python, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command += ["-p", "penstock.testing.dropin"] if on == "penstock" else []
    command += ["-p", "outcomes"]  # second: it may import torchvision, with what that imports
    command += ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings="]
    command += ["--rootdir", sources, "--basetemp", suite.folder / "tmp"]
    command += ["--timeout", str(TEST_LIMIT_S), *(f"--deselect={name}" for name in suite.deselect)]
    with (suite.folder / f"log-{on}.txt").open("w") as log:
        try:
            subprocess.run(
                [*command, *tests],
                cwd=sources,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=RUN_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            log.write(f"\nEnded after {RUN_LIMIT_S} s.\n")
    said: dict[str, list[str] | None] = {}
    for line in written.read_text("utf-8").splitlines() if written.exists() else []:
        name, outcome, lines = json.loads(line)
        if name not in said or outcome == "failed":  # what is torn down may fail after a pass
            said[name] = None if outcome == "passed" else lines
    return said


def passed(said: dict[str, list[str] | None]) -> set[str]:
    """Return the names of the tests that passed."""
    return {name for name, lines in said.items() if lines is None}


def differing(suite: Suite, sources: Path, names: list[str]) -> set[str]:
    """Run tests again on both loaders; return those that differ."""
    stable, failing = set(names), set()
    for _ in range(NUM_REPEATS if names else 0):
        stable &= passed(run(suite, sources, names, on="torch"))
        failing |= set(names) - passed(run(suite, sources, names, on="penstock"))
    return stable & failing


def compare(suite: Suite) -> bool:
    """Run a suite on both loaders and print what differs; return whether all of it is known."""
    try:
        sources = set_up(suite)
        stock = passed(run(suite, sources, suite.tests, on="torch"))
        if not stock:
            log = (suite.folder / "log-torch.txt").read_text("utf-8", "replace")
            raise CannotRunError("no test passes on torch's loader:\n" + log[-1000:])
    except CannotRunError as error:
        print(f"{suite.name}: cannot be run: {error}", flush=True)
        return False
    ours = run(suite, sources, suite.tests, on="penstock")
    lost = sorted(stock - passed(ours))
    different = differing(suite, sources, lost)
    print(
        f"{suite.requirement}: {len(stock)} passed on torch's loader, "
        f"{len(stock) - len(lost)} of these on Penstock's at once, {len(different)} differ"
    )
    is_known = True
    for name in lost:
        why = next((why for start, why in suite.known.items() if name.startswith(start)), None)
        if name not in different:
            why = f"does not differ when both are run {NUM_REPEATS} more times"
        is_known &= why is not None
        print(f"  {name}: {why or 'DIFFERS, and is not known'}")
        print(*(f"      {line}" for line in ours.get(name) or ["It did not run."]), sep="\n")
    sys.stdout.flush()
    return is_known


def main() -> int:
    """Read the command line, run, and return the exit status."""
    tables = tomllib.loads(Path(__file__).with_name("suites.toml").read_text("utf-8"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="SUITE", help="all if none is named")
    names = parser.parse_args().names or list(tables)
    if unknown := set(names) - set(tables):
        parser.error(f"suites.toml has no {sorted(unknown)}; it has: {list(tables)}")
    results = [compare(Suite(name=name, **tables[name])) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
