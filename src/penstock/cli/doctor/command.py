# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor`: puts the findings together, and writes them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import penstock
from penstock.cli.doctor.device import look_at_device
from penstock.cli.doctor.extras import (
    Imports,
    installed,
    look_at_core,
    look_at_extras,
    parse_requirement,
    user_extras,
)
from penstock.cli.doctor.interpreter import (
    look_at_interpreter,
    look_at_start_method,
    look_at_threads,
)
from penstock.cli.doctor.machine import look_at_limits, look_at_machine, look_at_shared_memory
from penstock.cli.doctor.trial import start_trial, trial_finding
from penstock.lines import printable, say, say_json
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.cli.doctor.finding import Finding

__all__ = ["doctor"]

_MARKS: Final = {"ok": "ok", "advice": "ADVICE", "problem": "PROBLEM"}
_NAME_WIDTH: Final = 15  # of the longest name, opentelemetry, and a space
_MARK_WIDTH: Final = 9


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Give one JSON object instead of lines.")
    ] = False,
) -> None:
    """Look at this machine and this environment as a loader meets them.

    Versions, cores, memory, shared memory, limits, the GPU, the libraries of each extra, and
    whether two workers deliver batches. What is not fine is marked ADVICE or PROBLEM, and below it
    stands what to do. Libraries are imported in processes of their own: one that is broken is
    reported. Environment variables are not shown, those apart that set threads or hide a GPU. The
    exit status is 1 if there is a problem, otherwise 0.
    """
    findings = list(_findings())
    if as_json:
        say_json(_record(findings))
    else:
        _write(findings)
    if _count(findings, "problem"):
        raise typer.Exit(1)


def _findings() -> Iterator[Finding]:
    requirements = [parse_requirement(line) for line in _own_requirements()]
    extras = user_extras(requirements)
    names = {needed.name for extra in extras for needed in extra.requirements}
    libraries = {name: installed(name) for name in sorted(names)}
    # At once, for the sake of time: torch, the trial, and all the others.
    torch = [lib for name, lib in libraries.items() if name == "torch" and lib.version]
    others = [lib for name, lib in libraries.items() if name != "torch" and lib.version]
    # Before anything is started, which would be counted.
    machine, limits = list(look_at_machine()), list(look_at_limits())
    with Imports(torch) as of_torch, Imports(others) as of_others, start_trial() as trial:
        yield from look_at_interpreter()
        yield from look_at_core(requirements)
        yield from machine
        yield from look_at_shared_memory()
        yield from limits
        reasons = of_torch.reasons() | of_others.reasons()
        yield look_at_device(of_torch.device, torch[0].version if torch else None)
        yield from look_at_extras(extras, libraries, reasons)
        yield look_at_start_method()
        yield look_at_threads()
        yield trial_finding(trial)


def _own_requirements() -> Sequence[str]:
    try:
        return metadata.requires("penstock") or ()
    except metadata.PackageNotFoundError:  # which is a finding of its own
        return ()


def _count(findings: Sequence[Finding], status: str) -> int:
    return sum(finding.status == status for finding in findings)


def _record(findings: Sequence[Finding]) -> dict[str, Any]:
    record = {
        "penstock": penstock.__version__,
        "num_problems": _count(findings, "problem"),
        "num_advice": _count(findings, "advice"),
        "findings": [
            {
                "topic": finding.topic,
                "name": finding.name,
                "status": finding.status,
                "found": finding.found,
                "remedy": finding.remedy,
                "values": dict(finding.values),
            }
            for finding in findings
        ],
    }
    masked: dict[str, Any] = _without_passwords(record)
    return masked


def _without_passwords(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can have
    if isinstance(value, str):
        return without_password(value)
    if isinstance(value, dict):
        return {name: _without_passwords(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_passwords(each) for each in value]
    return value


def _write(findings: Sequence[Finding]) -> None:
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        say(topic)
        for finding in group:
            _write_row(f"  {_MARKS[finding.status]:<{_MARK_WIDTH}}{finding.name}", finding.found)
            if finding.remedy:
                _write_row("", f"→ {finding.remedy}")
    problems, advice = _count(findings, "problem"), _count(findings, "advice")
    say("")
    say(f"problems: {problems}, advice: {advice}")


def _write_row(head: str, text: str) -> None:
    """Write what was found beside its name; on a terminal broken into lines that fit."""
    indent = 2 + _MARK_WIDTH + _NAME_WIDTH
    lines = [head.ljust(indent - 1) + " " + printable(without_password(text))]
    if sys.stdout is not None and sys.stdout.isatty():
        width = max(shutil.get_terminal_size().columns, indent + 40)
        after = " " * indent
        lines = textwrap.wrap(lines[0], width, subsequent_indent=after, break_on_hyphens=False)
    for line in lines:
        say(line)
