# SPDX-License-Identifier: Apache-2.0
"""Runs the peers one at a time, each in its own environment, and keeps what they measured.

    python benchmarks/peers/environments.py            # once
    python benchmarks/peers/compare.py [--works tiny transport] [--only 'DALI*'] [--rounds 3]
    python benchmarks/peers/page.py                    # docs/benchmarks.md

    for work in works:
        for round in rounds:  for contender in contenders:   one process each (measure.py)
        for contender in contenders:                         memory, looked at from outside

Rounds go in turn (A B C, A B C, ...), so that a slow minute of the machine hits all alike. A run
has a session of its own and a time limit; whatever it started is ended with it. A contender that
fails does not end the comparison: what it said last is kept and shown, and the exit status is 1.

results/peers/WORK.json is merged by contender, so one peer can be measured again. Nothing else may
be measured meanwhile: a lock refuses a second comparison, but cannot know what else you run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import environments
import works
from _meter import tree_memory_bytes
from _runner import as_table, machine_facts, write
from contender import Contender, contenders
from measure import MARK, end_descendants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["RESULTS", "main", "result_name"]

HERE: Final = Path(__file__).parent
ROOT: Final = environments.ROOT
RESULTS: Final = HERE.parent / "results" / "peers"
_LOCK: Final = ROOT / ".peers" / "measuring.lock"
_LIMIT_S: Final = 400.0
_SMOKE_LIMIT_S: Final = 120.0
_GRACE_S: Final = 10.0  # from the reading to the process's own end; what it measured stands
_LOOK_EVERY_S: Final = 0.05
_RUN_VARIABLE: Final = "PENSTOCK_PEERS_RUN"  # what a run starts has it too, wherever it goes
# Work -> the runs that make it up: (work of measure.py, more arguments, whether every round).
_RUNS: Final[Mapping[str, Sequence[tuple[str, tuple[str, ...], bool]]]] = {
    "photos": [("photos", (), True)],
    "pack": [("pack", (), False)],
    "packed": [("packed", (), True)],
    "tiny": [("tiny", (), True)],
    "transport": [("transport", (), True)],
    "first": [("first", (), True)],
    "paths": [("paths", (), False)],
    "resume": [("resume-save", (), False), ("resume-restore", (), True)],
    "killed": [("killed", (), False), ("killed", ("--tolerant",), False)],
    "corrupt": [("corrupt", (), False), ("corrupt", ("--tolerant",), False)],
}
_WATCHED: Final = ("photos", "packed", "tiny", "transport")


class RunError(Exception):
    """A run failed; the message is what it said last."""


@dataclass(slots=True)
class Entry:
    """What one contender measured in one work.

    Attributes:
        runs: Name of the run, such as "resume-restore" or "killed --tolerant" -> its figures.
        errors: What failed runs said last, with the run's name before it.
        peak_mb: Greatest memory of the process tree in the untimed run; None if none was made.
    """

    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    peak_mb: float | None = None


def result_name(work: str) -> str:
    """Return the name of a work's file below results/peers."""
    return f"{work}.json"


# ---------------------------------------------------------------- one run


def run_once(
    contender: Contender,
    work: str,
    more: Sequence[str],
    options: argparse.Namespace,
    *,
    watch_memory: bool = False,
) -> tuple[dict[str, Any], int]:
    """Run a contender in a process of its own; return its figures, and its peak memory in bytes.

    Raises:
        RunError: It failed, or was still running after the time limit.
    """
    python = sys.executable if options.here else str(environments.python(contender.environment))
    command = [python, str(HERE / "contender.py"), "--contender", contender.name]
    command += ["--work", work, "--data", str(options.data), *more]
    marker = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *(["--smoke"] if options.smoke else [])],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, _RUN_VARIABLE: marker},
        )
        try:
            limit_s = _SMOKE_LIMIT_S if options.smoke else _LIMIT_S
            figures, peak_bytes = _follow(process, limit_s, watch_memory=watch_memory)
        finally:
            _end(process, marker)
        if figures is not None:
            return figures, peak_bytes
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
        if process.returncode == -signal.SIGKILL:
            raise RunError(f"still running after {limit_s:.0f} s, or killed: {_last(lines)}")
        raise RunError(_last(lines) or f"exit status {process.returncode}")


def _last(lines: Sequence[str]) -> str:
    """Return the line of an error: the last that looks like "SomethingError: ...", or the last."""
    named = [
        line for line in lines if "Error" in line.split(":")[0] and not line.startswith("File")
    ]
    return without_places((named or [*lines, ""])[-1 if named else -2 if lines else 0])[:300]


def without_places(line: str) -> str:
    """Return a message without the paths of this machine."""
    return line.replace(str(ROOT) + "/", "").replace(str(Path.home()), "~")


def _follow(
    process: subprocess.Popen[str], limit_s: float, *, watch_memory: bool
) -> tuple[dict[str, Any] | None, int]:
    """Wait for the reading and the end; return None for the figures where none came."""
    readings: list[dict[str, Any]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            _, mark, text = line.rpartition(MARK)
            if mark:
                readings.append(json.loads(text))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + limit_s
    peak_bytes = 0
    while process.poll() is None and time.monotonic() < deadline_s:
        if watch_memory:
            peak_bytes = max(peak_bytes, tree_memory_bytes(process.pid))
        if readings:
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
            watch_memory = False
        time.sleep(_LOOK_EVERY_S)
    thread.join(1.0)
    return (readings[-1] if readings else None), peak_bytes


def _end(process: subprocess.Popen[str], marker: str) -> None:
    """End a run, and whatever it started: workers, and daemons in sessions of their own."""
    import psutil

    end_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if other.environ().get(_RUN_VARIABLE) == marker:
                other.kill()


# ---------------------------------------------------------------- all runs


def compete(
    work: str, chosen: Sequence[Contender], options: argparse.Namespace
) -> dict[str, Entry]:
    """Run all contenders of a work, in turn."""
    entries = {contender.name: Entry() for contender in chosen}
    for number in range(options.rounds):
        for contender in chosen:
            for name, more, every_round in _RUNS[work]:
                if number > 0 and not every_round:
                    continue
                if "--tolerant" in more and "tolerant" in contender.absent:
                    continue
                _run_into(entries[contender.name], contender, name, more, number, options)
    if work in _WATCHED and not options.smoke:
        for contender in chosen:
            entry = entries[contender.name]
            if not entry.runs:
                continue
            write(f"{work}, memory: {contender.name}", to=sys.stderr)
            try:
                arguments = ("--memory-only",)
                peak_bytes = run_once(contender, work, arguments, options, watch_memory=True)[1]
            except RunError as error:
                entry.errors.append(f"memory: {error}")
            else:
                entry.peak_mb = peak_bytes / 1e6
    return entries


def _run_into(
    entry: Entry,
    contender: Contender,
    work: str,
    more: Sequence[str],
    number: int,
    options: argparse.Namespace,
) -> None:
    name = " ".join([work, *more])
    write(f"{name}, round {number + 1}: {contender.name}", to=sys.stderr)
    try:
        figures, _ = run_once(contender, work, more, options)
    except RunError as error:
        entry.errors.append(f"{name}: {error}")
        write(f"  failed: {error}", to=sys.stderr)
        return
    del figures["contender"], figures["work"]
    if "outcome" in figures:
        figures["outcome"]["line"] = without_places(figures["outcome"]["line"])
    entry.runs.setdefault(name, []).append(figures)


def table(work: str, entries: Mapping[str, Entry]) -> str:
    """Return the results of a work as a table for the terminal."""
    rows = [["contender", "run", "median", "least - greatest", "unit", "CPU ms/sample", "peak MB"]]
    for name, entry in entries.items():
        for run, readings in entry.runs.items():
            if "outcome" in readings[0]:
                outcome = readings[0]["outcome"]
                came = f"{outcome['came']} of {outcome['expected']}"
                rows.append([name, run, outcome["kind"], came, "", "", ""])
                continue
            values = [reading["value"] for reading in readings]
            cpu = [reading["more"].get("CPU ms/sample") for reading in readings]
            rows.append(
                [
                    *(name, run, f"{statistics.median(values):.4g}"),
                    f"{min(values):.4g} - {max(values):.4g}",
                    readings[0]["unit"],
                    f"{statistics.median(cpu):.4g}" if cpu[0] is not None else "",
                    f"{entry.peak_mb:.0f}" if entry.peak_mb is not None else "",
                ]
            )
        rows += [[name, "FAILED", error, "", "", "", ""] for error in entry.errors]
    return f"\n{work}\n{as_table(rows)}"


# ---------------------------------------------------------------- results


def save(
    work: str,
    entries: Mapping[str, Entry],
    chosen: Sequence[Contender],
    machine: Mapping[str, Any],
    rounds: int,
) -> None:
    """Put the entries into the work's file, in the place of older ones of the same contenders."""
    path = RESULTS / result_name(work)
    known = json.loads(path.read_text("utf-8"))["contenders"] if path.exists() else {}
    first_run = _RUNS[work][0][0]
    for contender in chosen:
        known[contender.name] = {
            "machine": dict(machine),
            "packages": packages(contender.environment),
            "size": asdict(works.size_of(first_run, smoke=False)),
            "rounds": rounds,
            **asdict(entries[contender.name]),
        }
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {"work": work, "contenders": dict(sorted(known.items()))}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


_packages: dict[str, dict[str, str]] = {}


def packages(environment: str) -> dict[str, str]:
    """Return the versions that an environment has of the packages in its file."""
    if environment not in _packages:
        lines = environments.requirements(environment).read_text("utf-8").splitlines()
        names = [line.partition("==")[0].partition("[")[0] for line in lines if "==" in line]
        if environment == "penstock":
            names.insert(0, "penstock")
        code = (
            "import sys, json, platform, importlib.metadata as m;"
            "print(json.dumps({'Python': platform.python_version(),"
            " **{name: m.version(name) for name in sys.argv[1:]}}))"
        )
        command = [str(environments.python(environment)), "-c", code, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        _packages[environment] = json.loads(done.stdout)
    return _packages[environment]


def save_failures(all_contenders: Mapping[str, Contender]) -> None:
    """Keep which environments could not be installed, and why."""
    found = {}
    for contender in all_contenders.values():
        if reason := environments.failure(contender.environment):
            found[contender.environment] = {
                "date": machine_facts()["date"],
                "reason": [without_places(line) for line in reason.splitlines()],
            }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "not-installed.json"
    path.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the command line


@contextlib.contextmanager
def alone() -> Iterator[IO[str]]:
    """Refuse a second comparison on this machine's copy of the project.

    Raises:
        BlockingIOError: There is one already.
    """
    _LOCK.parent.mkdir(exist_ok=True)
    with open(_LOCK, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status: 1 if a run failed."""
    options = _parser().parse_args(arguments)
    known = contenders()
    chosen = [
        contender
        for name, contender in known.items()
        if not options.only or any(fnmatch.fnmatch(name, pattern) for pattern in options.only)
    ]
    if options.list:
        write("\n".join(contender.name for contender in chosen))
        return 0
    if not chosen:
        write(f"no contender fits {options.only}; there are: {', '.join(known)}", to=sys.stderr)
        return 2
    if options.smoke:
        options.rounds = 1
    if not options.here:
        chosen = _installed(chosen)
    place = options.data / "smoke" if options.smoke else options.data
    works.prepare(place, smoke=options.smoke)
    if options.smoke:  # whose figures nobody reads
        return _compare(chosen, known, options)
    try:
        with alone():
            return _compare(chosen, known, options)
    except BlockingIOError:
        write(f"another comparison is running: {_LOCK} is locked", to=sys.stderr)
        return 2


def _compare(
    chosen: Sequence[Contender], known: Mapping[str, Contender], options: argparse.Namespace
) -> int:
    is_kept = not options.smoke and not options.here
    machine = {
        name: fact
        for name, fact in machine_facts().items()
        if name in ("date", "commit", "processor", "cores", "memory_gib", "system")
    }
    num_failed = 0
    for work in options.works:
        competing = [
            contender
            for contender in chosen
            if contender.has_part_in(_RUNS[work][0][0]) and work not in contender.absent
        ]
        if not competing:
            continue
        entries = compete(work, competing, options)
        num_failed += sum(len(entry.errors) for entry in entries.values())
        write(table(work, entries))
        if is_kept:
            save(work, entries, competing, machine, options.rounds)
    if is_kept:
        save_failures(known)
    elif not options.smoke:
        write("not saved: with --here no peer has its own environment", to=sys.stderr)
    if options.smoke:
        write("smoke sizes: the figures mean nothing, and are not saved", to=sys.stderr)
        shutil.rmtree(options.data / "smoke" / "resume", ignore_errors=True)
    if num_failed:
        write(f"{num_failed} runs failed, see above", to=sys.stderr)
    return 1 if num_failed else 0


def _installed(chosen: Sequence[Contender]) -> list[Contender]:
    """Return the contenders whose environment there is.

    Raises:
        SystemExit: One has not been made yet.
    """
    found = []
    for contender in chosen:
        if environments.failure(contender.environment):
            write(f"{contender.name}: could not be installed, left out", to=sys.stderr)
        elif environments.is_installed(contender.environment):
            found.append(contender)
        else:
            raise SystemExit(
                f".peers/{contender.environment} is not there, or older than its file: "
                f"python benchmarks/peers/environments.py {contender.environment}"
            )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compare.py")
    parser.add_argument("--works", nargs="+", choices=list(_RUNS), default=list(_RUNS))
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="contenders, such as 'DALI*'")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--here", action="store_true", help="in this interpreter, not in .peers")
    parser.add_argument("--list", action="store_true", help="name the contenders and stop")
    parser.add_argument(
        "--data",
        type=lambda text: Path(text).resolve(),
        default=ROOT / ".peers" / "data",
        help="where the photos are copied to (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
