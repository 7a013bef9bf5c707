# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: every image of a folder, or record of a store, and which of them are broken."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.lines import printable, without_password
from penstock.cli.progress import Bar
from penstock.data import PackedList

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cli.decoding import BrokenFile
    from penstock.cli.store_survey import BadRecord
    from penstock.cli.survey import Findings

__all__ = ["check"]

T = TypeVar("T")


def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A folder, searched for images, subfolders included; or a store's address.",
        ),
    ],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes.", show_default="usable cores")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Give one JSON object instead of lines.")
    ] = False,
) -> None:
    """Find the images of a folder, or the records of a store, that are broken.

    Every image is decoded whole, in worker processes; of a store every checksum is compared, and
    every record with the index. For each broken one a line goes to stdout: its path or key, a tab,
    and what is wrong. The exit status is 1 if there are any, otherwise 0.
    """
    num_workers = workers or _num_usable_cores()
    if _is_store(what):
        num_broken = _check_store(what, num_workers, as_json=as_json)
    else:
        num_broken = _check_folder(Path(what), num_workers, as_json=as_json)
    if num_broken:
        raise typer.Exit(1)


def _is_store(what: str) -> bool:
    if ":" not in what and not Path(what).suffix:
        return False  # a plain folder, for which the packages of stores need not be there
    from penstock.cli.sources import is_store

    return is_store(what)


def _check_folder(folder: Path, num_workers: int, *, as_json: bool) -> int:
    from penstock.cli.decoding import iter_image_paths, no_image_in
    from penstock.cli.survey import Findings, check_files

    start_s = time.monotonic()
    paths = PackedList(sorted(iter_image_paths(folder)))
    if not paths:
        raise no_image_in(folder)
    findings: Findings[BrokenFile] = Findings(len(paths))
    try:
        with Bar() as bar:
            check_files(paths, num_workers, findings, _tell(bar))
    finally:  # a check that is interrupted says what it has found so far
        wall_s = time.monotonic() - start_s
        broken = sorted(findings.broken, key=lambda file: str(file.path))
        if as_json:
            _write_json(_record_of_files(findings, broken, wall_s))
        else:
            _write_lines([(str(file.path), file.reason) for file in broken])
        _summarise(findings, "files", wall_s)
    return len(broken)


def _check_store(what: str, num_workers: int, *, as_json: bool) -> int:
    from penstock.cli.sources import open_named, parse
    from penstock.cli.store_survey import check_store
    from penstock.cli.survey import Findings

    start_s = time.monotonic()
    options: dict[str, Any] = {"verify": "always"} if parse(what).kind == "lmdb" else {}
    store = open_named(what, **options)
    try:
        findings: Findings[BadRecord] = Findings(len(store))
        try:
            with Bar() as bar:
                check_store(store, num_workers, findings, _tell(bar))
        finally:
            wall_s = time.monotonic() - start_s
            broken = sorted(findings.broken, key=_position)
            if as_json:
                _write_json(_record_of_store(store.address, findings, broken, wall_s))
            else:
                _write_lines([(record.key, record.reason) for record in broken])
            _summarise(findings, "records", wall_s)
    finally:
        store.close()
    return len(broken)


def _position(record: BadRecord) -> int:
    return -1 if record.position is None else record.position


def _tell(bar: Bar) -> Callable[[Findings[T]], None]:
    def tell(findings: Findings[T]) -> None:
        bar.show(findings.num_checked, findings.num_files, f"{len(findings.broken)} broken")

    return tell


def _write_json(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    sys.stdout.flush()


def _write_lines(broken: Sequence[tuple[str, str]]) -> None:
    for name, reason in broken:
        sys.stdout.write(f"{printable(name)}\t{printable(without_password(reason))}\n")
    sys.stdout.flush()


def _summarise(findings: Findings[T], what: str, wall_s: float) -> None:
    num_all = f"{findings.num_files:,}"
    if findings.num_checked < findings.num_files:
        num_all = f"stopped after {findings.num_checked:,} of {num_all}"
    sys.stderr.write(f"{num_all} {what}, {len(findings.broken):,} broken, {wall_s:.1f} s\n")


def _record_of_files(
    findings: Findings[BrokenFile], broken: Sequence[BrokenFile], wall_s: float
) -> dict[str, Any]:
    return {
        "num_files": findings.num_files,
        "num_checked": findings.num_checked,
        "num_broken": len(broken),
        "seconds": round(wall_s, 3),
        "broken": [{"path": str(file.path), "reason": file.reason} for file in broken],
    }


def _record_of_store(
    address: str, findings: Findings[BadRecord], broken: Sequence[BadRecord], wall_s: float
) -> dict[str, Any]:
    return {
        "address": address,
        "num_records": findings.num_files,
        "num_checked": findings.num_checked,
        "num_broken": len(broken),
        "seconds": round(wall_s, 3),
        "broken": [
            {"key": r.key, "position": r.position, "reason": without_password(r.reason)}
            for r in broken
        ],
    }


def _num_usable_cores() -> int:
    """Cores that this process may run on; a container mostly has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
