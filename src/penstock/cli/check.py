# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: every image below a folder is decoded, and what cannot be is listed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.data import PackedList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cli.decoding import BrokenFile
    from penstock.cli.survey import Findings

__all__ = ["check"]

_REDRAW_S: Final = 0.1


def check(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Searched for images, subfolders included.")
    ],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes.", show_default="usable cores")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Give one JSON object instead of lines.")
    ] = False,
) -> None:
    """Find the images of a folder that cannot be decoded.

    Every image is decoded whole, in worker processes. For each broken one a line goes to stdout:
    its path, a tab, and what is wrong. The exit status is 1 if there are any, otherwise 0.
    """
    from penstock.cli.decoding import iter_image_paths, no_image_in
    from penstock.cli.survey import Findings, check_files

    start_s = time.monotonic()
    paths = PackedList(sorted(iter_image_paths(folder)))
    if not paths:
        raise no_image_in(folder)
    findings = Findings(len(paths))
    try:
        with _Bar() as bar:
            check_files(paths, workers or _num_usable_cores(), findings, bar.show)
    finally:  # a check that is interrupted says what it has found so far
        _report(findings, time.monotonic() - start_s, as_json=as_json)
    if findings.broken:
        raise typer.Exit(1)


class _Bar(contextlib.AbstractContextManager["_Bar"]):
    """A progress bar on stderr, if that is a terminal. Without a thread: workers are forked."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[num_broken]} broken"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("check", total=None, num_broken=0)
        self._drawn_s = 0.0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, findings: Findings) -> None:
        """Bring it up to date, unless it was a moment ago."""
        now_s = time.monotonic()
        if now_s - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now_s
        self._progress.update(
            self._task,
            total=findings.num_files,
            completed=findings.num_checked,
            num_broken=len(findings.broken),
            refresh=True,
        )


def _report(findings: Findings, wall_s: float, *, as_json: bool) -> None:
    broken = sorted(findings.broken, key=lambda file: str(file.path))
    if as_json:
        sys.stdout.write(json.dumps(_record(findings, broken, wall_s), indent=2) + "\n")
    else:
        for file in broken:
            sys.stdout.write(f"{_printable(str(file.path))}\t{_printable(file.reason)}\n")
    sys.stdout.flush()
    num_files = f"{findings.num_files:,}"
    if findings.num_checked < findings.num_files:
        num_files = f"stopped after {findings.num_checked:,} of {num_files}"
    sys.stderr.write(f"{num_files} files, {len(broken):,} broken, {wall_s:.1f} s\n")


def _record(findings: Findings, broken: Sequence[BrokenFile], wall_s: float) -> dict[str, Any]:
    return {
        "num_files": findings.num_files,
        "num_checked": findings.num_checked,
        "num_broken": len(broken),
        "seconds": round(wall_s, 3),
        "broken": [{"path": str(file.path), "reason": file.reason} for file in broken],
    }


def _printable(text: str) -> str:
    """Return what stays in its line, whatever bytes a file's name has: others are escaped."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _num_usable_cores() -> int:
    """Cores that this process may run on; a container mostly has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
