# SPDX-License-Identifier: Apache-2.0
"""Runs the peers one at a time, each in its own environment, and keeps what they measured.

    python benchmarks/peers/environments.py            # once
    python benchmarks/peers/compare.py --prepare       # once: what some peers read has to be packed
    python benchmarks/peers/compare.py [--works tiny transport] [--only 'DALI*'] [--rounds 3]
    python benchmarks/peers/page.py                    # docs/benchmarks.md

    for work in works:
        for round in rounds:  for contender in contenders:   one process each (measure.py)
        for contender in contenders:                         memory, seen from outside

Rounds go in turn (A B C, A B C, ...), so that a slow minute of the machine hits all alike. A run
has a session of its own and a time limit; whatever it started is ended with it, and what it left in
/dev/shm is removed. A contender that fails does not end the comparison: what it said last is kept
and shown, it has no further rounds, and the exit status is 1. One that measured and then did not
end as it should keeps its figures, with a remark.

results/peers/WORK.json is merged by contender, so one peer can be measured again. Nothing else may
be measured meanwhile: a lock refuses another comparison, but cannot know what else you run.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import environments
import works
from _meter import tree_memory_bytes
from _runner import as_table, machine_facts, write
from contender import MOST_SAID, Contender, contenders
from measure import MARK, end_descendants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["RESULTS", "main", "result_name"]

HERE: Final = Path(__file__).parent
ROOT: Final = environments.ROOT
RESULTS: Final = HERE.parent / "results" / "peers"
_LOCK: Final = ROOT / ".peers" / "measuring.lock"
_LIMIT_S: Final = 150.0
_SAVE_LIMIT_S: Final = 250.0  # resume-save reads 3.2 M rows
_PREPARE_LIMIT_S: Final = 900.0
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
    "resume": [("resume-save", (), False), ("resume-restore", (), False)],
    "killed": [("killed", (), False), ("killed", ("--tolerant",), False)],
    "corrupt": [("corrupt", (), False), ("corrupt", ("--tolerant",), False)],
}
_WATCHED: Final = ("photos", "packed")
_FEWER_ROUNDS: Final = ("photos", "packed")  # where `Contender.rounds` counts
_PREPARED: Final = {"tiny": "tiny", "paths": "paths", "resume": "resume-save"}  # work -> run
_DIRTY: Final = "-dirty"
_SHARED_MEMORY: Final = Path("/dev/shm")


class RunError(Exception):
    """A run failed; the message is what it said last."""


@dataclass(slots=True)
class Entry:
    """What one contender measured in one work.

    Attributes:
        runs: Name of the run, such as "resume-restore" or "killed --tolerant" -> its figures.
        errors: What failed runs said last, with the run's name before it.
        remarks: What is to be said of runs that did measure: how they ended, what they left.
        peak_mb: Greatest memory of the process tree in the untimed run; None if none was made.
    """

    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
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
    remarks: list[str],
    *,
    watch_memory: bool = False,
) -> tuple[dict[str, Any], int]:
    """Run a contender in a process of its own; return its figures, and its peak memory in bytes.

    What is to be said of its end is added to `remarks`.

    Raises:
        RunError: It failed, or was still running after the time limit.
    """
    python = sys.executable if options.here else str(environments.python(contender.environment))
    command = [python, str(HERE / "contender.py"), "--contender", contender.name]
    command += ["--work", work, "--data", str(options.data), *more]
    limit_s = _SAVE_LIMIT_S if work == "resume-save" else _LIMIT_S
    limit_s = _SMOKE_LIMIT_S if options.smoke else limit_s
    limit_s = _PREPARE_LIMIT_S if "--prepare" in more else limit_s
    before = _shared_files()
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
            figures, peak_bytes = _follow(process, limit_s, watch_memory=watch_memory)
            status = process.poll()
        finally:
            _end(process, marker)
        name = " ".join([work, *more])
        # Files that another process makes meanwhile are its own; alone, there is none.
        if _is_measured(options) and (left_bytes := _remove_shared_files(before)):
            remarks.append(f"{name}: left {left_bytes:,} bytes in /dev/shm")
        if figures is not None:
            if status is None:
                remarks.append(f"{name}: did not end within {_GRACE_S:.0f} s after its figures")
            elif status != 0:
                remarks.append(f"{name}: exit status {status} after its figures")
            return figures, peak_bytes
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
        if status is None:
            raise RunError(f"still running after {limit_s:.0f} s: {_last(lines)}")
        raise RunError(_last(lines) or f"exit status {status}")


def _shared_files() -> set[Path]:
    """Return the files of this user in /dev/shm."""
    found = set()
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid() and path.is_file():
                found.add(path)
    return found


def _remove_shared_files(before: set[Path]) -> int:
    """Remove the files that are new in /dev/shm and that no process uses; return their bytes."""
    new = {str(path) for path in _shared_files() - before}
    if not new:
        return 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            maps = (process / "maps").read_text("utf-8", "replace").splitlines()
            new -= {line.split(maxsplit=5)[-1] for line in maps}
            new -= {os.readlink(path) for path in (process / "fd").iterdir()}
    num_bytes = sum(os.path.getsize(path) for path in new)
    for path in new:
        os.unlink(path)
    return num_bytes


def _last(lines: Sequence[str]) -> str:
    """Return the line of an error: the last that looks like "SomethingError: ...", or the last."""
    named = [
        line for line in lines if "Error" in line.split(":")[0] and not line.startswith("File")
    ]
    return without_places((named or [*lines, ""])[-1 if named else -2 if lines else 0])[:MOST_SAID]


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
        with process.stdout as lines:
            for line in lines:
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
    for contender in chosen:
        _prepare(entries[contender.name], contender, work, options)
    for number in range(0 if options.prepare else options.rounds):
        for contender in chosen:
            entry = entries[contender.name]
            limited = contender.rounds if work in _FEWER_ROUNDS else None
            if (limited and number >= limited) or (entry.errors and number > 0):
                continue
            for name, more, every_round in _RUNS[work]:
                if number > 0 and not every_round:
                    continue
                if "--tolerant" in more and "tolerant" in contender.absent:
                    continue
                if name == "resume-restore" and "resume-save" not in entry.runs:
                    continue  # there is no place to go on from
                _run_into(entry, contender, name, more, number, options)
    if work in _WATCHED and _is_measured(options):
        for contender in chosen:
            entry = entries[contender.name]
            if not entry.runs:
                continue
            write(f"{work}, memory: {contender.name}", to=sys.stderr)
            try:
                peak_bytes = run_once(
                    *(contender, work, ("--memory-only",), options, entry.remarks),
                    watch_memory=True,
                )[1]
            except RunError as error:
                entry.errors.append(f"memory: {error}")
            else:
                entry.peak_mb = peak_bytes / 1e6
    return entries


def _prepare(entry: Entry, contender: Contender, work: str, options: argparse.Namespace) -> None:
    if contender.prepare is None or work not in _PREPARED:
        return
    write(f"{work}, what it reads: {contender.name}", to=sys.stderr)
    try:
        run_once(contender, _PREPARED[work], ("--prepare",), options, entry.remarks)
    except RunError as error:
        entry.errors.append(f"prepare: {error}")
        write(f"  failed: {error}", to=sys.stderr)


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
        figures, _ = run_once(contender, work, more, options, entry.remarks)
    except RunError as error:
        entry.errors.append(f"{name}: {error}")
        write(f"  failed: {error}", to=sys.stderr)
        return
    del figures["contender"], figures["work"]
    if "outcome" in figures:
        figures["outcome"]["line"] = without_places(figures["outcome"]["line"])
    entry.runs.setdefault(name, []).append(figures)


def _is_measured(options: argparse.Namespace) -> bool:
    return not options.smoke and not options.here and not options.prepare


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
        rows += [[name, "REMARK", remark, "", "", "", ""] for remark in entry.remarks]
    return f"\n{work}\n{as_table(rows)}"


# ---------------------------------------------------------------- results


def save(
    work: str,
    entries: Mapping[str, Entry],
    chosen: Sequence[Contender],
    machine: Mapping[str, Any],
    data: Path,
) -> None:
    """Put the entries into the work's file, in the place of older ones of the same contenders."""
    path = RESULTS / result_name(work)
    known = json.loads(path.read_text("utf-8"))["contenders"] if path.exists() else {}
    size = asdict(works.size_of(_RUNS[work][0][0], smoke=False))
    if not size["num_samples"]:
        size |= works.photo_facts(data)
    for contender in chosen:
        known[contender.name] = {
            "machine": dict(machine),
            "packages": packages(contender.environment),
            "size": size,
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
            names.insert(0, "penstock-loader")
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
def alone(*, is_measured: bool) -> Iterator[None]:
    """Refuse to measure beside anything else, and anything beside what is measured.

    Raises:
        BlockingIOError: Something else runs on this machine's copy of the project.
    """
    _LOCK.parent.mkdir(exist_ok=True)
    with open(_LOCK, "a+", encoding="utf-8") as file:
        fcntl.flock(file, (fcntl.LOCK_EX if is_measured else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        yield


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
    try:
        with alone(is_measured=_is_measured(options)):
            place = options.data / "smoke" if options.smoke else options.data
            works.prepare(place, smoke=options.smoke)
            return _compare(chosen, known, options)
    except BlockingIOError:
        write(f"another comparison is running: {_LOCK} is locked", to=sys.stderr)
        return 2


def _compare(
    chosen: Sequence[Contender], known: Mapping[str, Contender], options: argparse.Namespace
) -> int:
    is_kept = _is_measured(options)
    machine = {
        name: fact
        for name, fact in machine_facts().items()
        if name in ("date", "processor", "cores", "memory_gib", "system")
    }
    machine["commit"] = _commit()
    if is_kept and machine["commit"].endswith(_DIRTY):
        write("there are uncommitted changes: the page will say so", to=sys.stderr)
    num_failed = 0
    for work in options.works:
        competing = [
            contender
            for contender in chosen
            if contender.has_part_in(_RUNS[work][0][0])
            and work not in contender.absent
            and (contender.prepare is not None or not options.prepare)
        ]
        if not competing:
            continue
        entries = compete(work, competing, options)
        num_failed += sum(len(entry.errors) for entry in entries.values())
        if not options.prepare:
            write(table(work, entries))
        if is_kept:
            save(work, entries, competing, machine, options.data)
    if is_kept:
        save_failures(known)
    elif options.here:
        write("not saved: with --here no peer has its own environment", to=sys.stderr)
    if options.smoke:
        write("smoke sizes: the figures mean nothing, and are not saved", to=sys.stderr)
        shutil.rmtree(options.data / "smoke" / "resume", ignore_errors=True)
    if num_failed:
        write(f"{num_failed} runs failed, see above", to=sys.stderr)
    return 1 if num_failed else 0


def _commit() -> str:
    """Return the commit, marked where it is not what lies here; results themselves may differ."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    try:
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        paths = [".", ":!benchmarks/results", ":!docs/benchmarks.md"]
        status = git(["git", "status", "--porcelain", "--untracked-files=no", "--", *paths]).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (_DIRTY if status else "")


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
    parser.add_argument(
        "--prepare", action="store_true", help="only pack what some peers read: minutes, once"
    )
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
