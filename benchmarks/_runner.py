# SPDX-License-Identifier: Apache-2.0
"""Runs the contenders of a benchmark one at a time, each in a fresh process, and compares them.

    parent:  for round in rounds:  for contender in contenders:
                 python FILE --contender NAME --round K    ->  one JSON line (a `Reading`)

The rounds go in turn (A B C, A B C, ...), so that a slow minute of the machine hits all of them.
Warm-up is inside each contender and not timed. Peak memory is taken in one more, untimed run per
contender, by the parent looking in from outside every 50 ms: reading the page tables of a process
takes locks that it needs itself, which would show in the times. Medians and the span from least to
greatest are given; with so few rounds anything finer would be for show.

A contender raises if what it got was not the right data, and the run then ends with exit code 1.
"""

from __future__ import annotations

import fnmatch
import json
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from _meter import Reading, tree_memory_bytes

if TYPE_CHECKING:
    import argparse
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Benchmark",
    "Reading",
    "Target",
    "as_table",
    "check",
    "data_loader",
    "machine_facts",
    "write",
]

_RESULTS: Final = Path(__file__).parent / "results"
_MARK: Final = "READING "
_MEMORY_INTERVAL_S: Final = 0.05
_CONTENDER_TIMEOUT_S: Final = 900.0  # the longest, torch with 5 M paths, takes a small part of it

S = TypeVar("S")


def check(condition: object, message: str) -> None:
    """Raise `ValueError` if a contender delivered what it should not have (`-O` keeps this)."""
    if not condition:
        raise ValueError(f"wrong data: {message}")


def data_loader(library: Literal["torch", "penstock"]) -> Any:  # noqa: ANN401 - one call fits both
    """Return the `DataLoader` class of a library, imported here and not before."""
    if library == "torch":
        from torch.utils.data import DataLoader
    else:
        from penstock.torch import DataLoader
    return DataLoader


@dataclass(frozen=True, slots=True)
class Target:
    """What a contender should reach.

    Attributes:
        contender: Whose figure.
        peer: The figure is divided by this contender's; None takes it as it is.
        at_least: Least figure or ratio, or None.
        at_most: Greatest figure or ratio, or None. Neither of the two only reports the ratio.
        figure: "value", or the name of one of `Reading.more`.
    """

    contender: str
    peer: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    figure: str = "value"

    def reached(self, readings: Mapping[str, Sequence[Reading]]) -> float | None:
        """Return the figure or ratio of medians; None where one of the two was not run."""
        if self.contender not in readings or (self.peer and self.peer not in readings):
            return None
        own = _median(readings[self.contender], self.figure)
        return own / _median(readings[self.peer], self.figure) if self.peer else own

    def is_met(self, reached: float) -> bool | None:
        """Return whether `reached` is good enough; None if nothing was asked."""
        if self.at_least is not None:
            return reached >= self.at_least
        return reached <= self.at_most if self.at_most is not None else None

    def line(self, reached: float) -> str:
        """Return the comparison in words."""
        what = self.contender if self.figure == "value" else f"{self.contender}, {self.figure}"
        text = f"{what} / {self.peer}: {reached:.2f} x" if self.peer else f"{what}: {reached:.3g}"
        met = self.is_met(reached)
        if met is None:
            return f"{text} (no target)"
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{text} (target {bound}: {'met' if met else 'MISSED'})"


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[S]):
    """One question, its contenders and its targets.

    Attributes:
        file: The benchmark's `__file__`.
        unit: Unit of `Reading.value`.
        better: Which way is good.
        contenders: Name -> function of a size, run in a process of its own.
        full: The size that counts.
        smoke: A size that only shows that everything works.
        targets: What is compared.
        rounds: Timed rounds, unless the command line says otherwise.
    """

    file: str
    unit: str
    better: Literal["higher", "lower"]
    contenders: Mapping[str, Callable[[S], Reading]]
    full: S
    smoke: S
    targets: Sequence[Target] = field(default=())
    rounds: int = 5

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run from the command line; return the exit status: 1 if a contender failed, else 0.

        A missed target is no failure: how fast a machine is belongs into a result, not into a test.
        """
        options = self._parser().parse_args(arguments)
        if options.contender:
            reading = self.contenders[options.contender](self.smoke if options.smoke else self.full)
            write(_MARK + json.dumps({"round": options.round, **asdict(reading)}))
            return 0
        names = [
            name
            for name in self.contenders
            if not options.only or any(fnmatch.fnmatch(name, pattern) for pattern in options.only)
        ]
        if options.list:
            write("\n".join(names))
            return 0
        return self._compete(names, options)

    def _parser(self) -> argparse.ArgumentParser:
        import argparse

        hidden = argparse.SUPPRESS
        parser = argparse.ArgumentParser(prog=Path(self.file).name)
        parser.add_argument(
            "--smoke", action="store_true", help="tiny sizes, one round: does it work?"
        )
        parser.add_argument(
            "--rounds", type=int, default=self.rounds, help="timed rounds (%(default)s)"
        )
        parser.add_argument(
            "--only", nargs="+", metavar="PATTERN", help="contenders, such as 'torch*'"
        )
        parser.add_argument("--list", action="store_true", help="name the contenders and stop")
        parser.add_argument(
            "--save", action="store_true", help="write benchmarks/results/NAME.json"
        )
        parser.add_argument("--contender", choices=list(self.contenders), help=hidden)
        parser.add_argument("--round", type=int, default=0, help=hidden)
        return parser

    def _compete(self, names: Sequence[str], options: argparse.Namespace) -> int:
        if options.rounds < 1:
            write(f"--rounds must be at least 1, not {options.rounds}")
            return 2
        readings: dict[str, list[Reading]] = {name: [] for name in names}
        peaks_bytes: dict[str, int] = {}
        try:
            for number in range(1 if options.smoke else options.rounds):
                for name in names:
                    write(f"round {number + 1}: {name}", to=sys.stderr)
                    readings[name].append(self._run(name, number, smoke=options.smoke)[0])
            for name in names if not options.smoke else ():
                write(f"memory: {name}", to=sys.stderr)
                peaks_bytes[name] = self._run(name, -1, smoke=False, watch_memory=True)[1]
        except ContenderError as error:
            write(f"{Path(self.file).name}: {error}", to=sys.stderr)
            return 1
        self._report(readings, peaks_bytes, smoke=options.smoke)
        if options.save and options.smoke:
            write("not saved: smoke sizes are no result", to=sys.stderr)
        elif options.save:
            self._save(readings, peaks_bytes)
        return 0

    def _run(
        self, name: str, number: int, *, smoke: bool, watch_memory: bool = False
    ) -> tuple[Reading, int]:
        import subprocess

        command = [sys.executable, self.file, "--contender", name, "--round", str(number)]
        with subprocess.Popen(
            [*command, *(["--smoke"] if smoke else [])],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own: its workers can be ended with it
        ) as process:
            try:
                output, peak_bytes = _wait(process, name, watch_memory=watch_memory)
            finally:
                _end_group(process)
        lines = [line for line in output.splitlines() if line.startswith(_MARK)]
        if process.returncode != 0 or len(lines) != 1:
            raise ContenderError(
                f"contender {name!r} ended with exit code {process.returncode} and {len(lines)} "
                "readings; its own messages are above"
            )
        fields = json.loads(lines[0].removeprefix(_MARK))
        del fields["round"]
        return Reading(**fields), peak_bytes

    def _remarks(self, readings: Mapping[str, Sequence[Reading]]) -> list[str]:
        """Return what else is to be said with the figures, for a subclass to fill."""
        return []

    def _report(
        self,
        readings: Mapping[str, Sequence[Reading]],
        peaks_bytes: Mapping[str, int],
        *,
        smoke: bool,
    ) -> None:
        for line in self._remarks(readings):
            write(line)
        write(f"\n{Path(self.file).stem}: {self.unit}, {self.better} is better")
        if smoke:
            write("(smoke sizes: the figures mean nothing)")
        write(as_table(self._rows(readings, peaks_bytes)))
        for name, runs in readings.items():
            for title, series in runs[-1].series.items():
                write(f"  {name}, {title}: " + " ".join(f"{value:.4g}" for value in series))
        for target in self.targets if not smoke else ():
            if (reached := target.reached(readings)) is not None:
                write(f"  {target.line(reached)}")

    def _rows(
        self, readings: Mapping[str, Sequence[Reading]], peaks_bytes: Mapping[str, int]
    ) -> list[list[str]]:
        extras = sorted({title for runs in readings.values() for run in runs for title in run.more})
        rows = [
            [
                *("contender", self.unit, "least - greatest", *extras),
                *("wall s", "CPU s", "CPU us/batch", "peak MB"),
            ]
        ]
        for name, runs in readings.items():
            values = [run.value for run in runs]
            peak = f"{peaks_bytes[name] / 1e6:.0f}" if name in peaks_bytes else "-"
            rows.append(
                [
                    name,
                    f"{statistics.median(values):.4g}",
                    f"{min(values):.4g} - {max(values):.4g}",
                    *(f"{_median(runs, title):.4g}" for title in extras),
                    f"{_median(runs, 'wall_s'):.2f}",
                    f"{_median(runs, 'cpu_s'):.2f}",
                    f"{statistics.median(run.cpu_s / run.num_batches * 1e6 for run in runs):.0f}",
                    peak,
                ]
            )
        return rows

    def _save(
        self, readings: Mapping[str, Sequence[Reading]], peaks_bytes: Mapping[str, int]
    ) -> None:
        targets = [
            {**asdict(target), "reached": reached, "met": target.is_met(reached)}
            for target in self.targets
            if (reached := target.reached(readings)) is not None
        ]
        result = {
            "benchmark": Path(self.file).stem,
            "unit": self.unit,
            "better": self.better,
            "size": asdict(self.full),  # type: ignore[call-overload]
            "machine": machine_facts(),
            "readings": {name: [asdict(run) for run in runs] for name, runs in readings.items()},
            "peak_bytes": dict(peaks_bytes),
            "targets": targets,
        }
        _RESULTS.mkdir(exist_ok=True)
        path = _RESULTS / f"{Path(self.file).stem}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write(f"saved results/{path.name}", to=sys.stderr)


class ContenderError(Exception):
    """A contender's process failed, hung, or delivered wrong data."""


def _wait(process: subprocess.Popen[str], name: str, *, watch_memory: bool) -> tuple[str, int]:
    import subprocess

    deadline_s = time.monotonic() + _CONTENDER_TIMEOUT_S
    peak_bytes = 0
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise ContenderError(
                f"contender {name!r} was still running after {_CONTENDER_TIMEOUT_S:.0f} s"
            )
        try:
            output, _ = process.communicate(timeout=_MEMORY_INTERVAL_S if watch_memory else left_s)
        except subprocess.TimeoutExpired:
            if watch_memory:
                peak_bytes = max(peak_bytes, tree_memory_bytes(process.pid))
        else:
            return output, peak_bytes


def _end_group(process: subprocess.Popen[str]) -> None:
    import contextlib
    import os

    # Also after a clean end: a worker left behind would disturb the next contender.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _median(readings: Sequence[Reading], figure: str) -> float:
    figures = [{**run.more, **asdict(run)} for run in readings]
    return statistics.median(float(run.get(figure, "nan")) for run in figures)


def as_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def machine_facts() -> dict[str, Any]:
    import datetime
    import importlib.metadata
    import os
    import platform

    import psutil

    versions = {}
    for package in ("penstock-loader", "torch", "numpy", "torchdata"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    import subprocess

    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def write(text: str, to: Any = None) -> None:  # noqa: ANN401
    (to or sys.stdout).write(text + "\n")
    (to or sys.stdout).flush()
