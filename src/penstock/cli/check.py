# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: every image of a folder, or record of a store, and which of them are broken."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from penstock.cli.arguments import ImageField, KeyField, LabelField  # noqa: TC001 - typer's
from penstock.cli.lines import printable, without_password
from penstock.cli.progress import Bar
from penstock.data import PackedList

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cli.decoding import BrokenFile
    from penstock.cli.store_survey import BadRecord
    from penstock.cli.survey import Findings
    from penstock.stores.store import Store

__all__ = ["check"]

T = TypeVar("T")

_MARKER: Final = ".penstock"  # that `pack` leaves in a folder which it makes


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
    image_field: ImageField = None,
    label_field: LabelField = None,
    key_field: KeyField = None,
) -> None:
    """Find the broken images or records of a folder or store.

    Every image is decoded whole, in worker processes; of a store every checksum is compared, and
    every record with the index. VOC's annotations are read, and their images looked for. For each
    broken one a line goes to stdout: its path or key, a tab, and what is wrong. The exit status is
    1 if there are any, otherwise 0.
    """
    num_workers = workers or _num_usable_cores()
    fields = {"image_field": image_field, "label_field": label_field, "key_field": key_field}
    if _is_store(what) or any(fields.values()):
        num_broken = _check_store(what, num_workers, fields, as_json=as_json)
    else:
        num_broken = _check_folder(Path(what), num_workers, as_json=as_json)
    if num_broken:
        raise typer.Exit(1)


def _is_store(what: str) -> bool:
    path = Path(what)
    if ":" not in what and not path.suffix and not (path / _MARKER).exists():
        return False  # a plain folder, for which the packages of stores need not be there
    from penstock.cli.sources import is_store
    from penstock.stores.folder.marks import read_marker

    return is_store(what) or read_marker(path) is not None


def _check_folder(folder: Path, num_workers: int, *, as_json: bool) -> int:
    from penstock.cli.annotation_check import broken_annotations, voc_folders
    from penstock.cli.decoding import iter_image_paths, no_image_in
    from penstock.cli.survey import Findings, check_files

    start_s = time.monotonic()
    paths = PackedList(sorted(iter_image_paths(folder)))
    if not paths:
        raise no_image_in(folder)
    findings: Findings[BrokenFile] = Findings(len(paths))
    num_annotations = 0
    try:
        with Bar() as bar:
            for root in voc_folders(folder, paths):
                num_found, broken = broken_annotations(root)
                num_annotations += num_found
                findings.broken += broken
            check_files(paths, num_workers, findings, _tell(bar))
    finally:  # a check that is interrupted says what it has found so far
        wall_s = time.monotonic() - start_s
        broken = sorted(findings.broken, key=lambda file: str(file.path))
        if as_json:
            _write_json(_record_of_files(findings, broken, wall_s, num_annotations))
        else:
            _write_lines([(str(file.path), file.reason) for file in broken])
        annotations = f" and {num_annotations:,} annotations" if num_annotations else ""
        _summarise(findings, f"files{annotations}", wall_s)
    return len(broken)


def _check_store(what: str, num_workers: int, fields: dict[str, Any], *, as_json: bool) -> int:
    from penstock.cli.sources import open_named, parse
    from penstock.cli.store_survey import check_store
    from penstock.cli.survey import Findings

    start_s = time.monotonic()
    kind, place = parse(what)
    options: dict[str, Any] = {"verify": "always"} if kind == "lmdb" else {}
    with open_named(what, **fields, **options) as store:
        others = [] if ":" in what or kind != "folder" else _others(store, Path(place))
        findings: Findings[BadRecord] = Findings(len(store) + len(others))
        try:
            with Bar() as bar:
                check_store(store, num_workers, findings, _tell(bar))
                _check_others(others, num_workers, findings)
        finally:
            wall_s = time.monotonic() - start_s
            broken = sorted(findings.broken, key=_position)
            if as_json:
                _write_json(_record_of_store(store, findings, broken, wall_s))
            else:
                _write_lines([(record.key, record.reason) for record in broken])
            of_what = f"records and {len(others):,} other images" if others else "records"
            _summarise(findings, of_what, wall_s, is_store=True)
    return len(broken)


def _others(store: Store, folder: Path) -> list[str]:
    """Return the images below a folder that `pack` made which are no record's."""
    from penstock.cli.decoding import iter_image_paths
    from penstock.stores.folder.store import FolderStore

    assert isinstance(store, FolderStore)
    of_records = {os.fspath(store.file_of(position)) for position in range(len(store))}
    return sorted(path for path in iter_image_paths(folder) if path not in of_records)


def _check_others(paths: Sequence[str], num_workers: int, findings: Findings[BadRecord]) -> None:
    from penstock.cli.store_survey import BadRecord
    from penstock.cli.survey import Findings, check_files

    if paths:
        found: Findings[BrokenFile] = Findings(len(paths))
        check_files(paths, num_workers, found)
        findings.num_checked += found.num_checked
        findings.num_images += found.num_images
        findings.broken += [BadRecord(None, str(f.path), f.reason) for f in found.broken]


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


def _summarise(findings: Findings[T], what: str, wall_s: float, *, is_store: bool = False) -> None:
    num_all = f"{findings.num_files:,}"
    if findings.num_checked < findings.num_files:
        num_all = f"stopped after {findings.num_checked:,} of {num_all}"
    # Of a folder each file is one; a store may have none, or several in a record.
    images = f"{findings.num_images:,} images decoded, " if is_store else ""
    broken = f"{len(findings.broken):,} broken, {wall_s:.1f} s"
    sys.stderr.write(f"{num_all} {what}, {images}{broken}\n")


def _record_of_files(
    findings: Findings[BrokenFile],
    broken: Sequence[BrokenFile],
    wall_s: float,
    num_annotations: int,
) -> dict[str, Any]:
    return {
        "num_files": findings.num_files,
        "num_annotations": num_annotations,
        "num_checked": findings.num_checked,
        "num_broken": len(broken),
        "seconds": round(wall_s, 3),
        "broken": [{"path": str(file.path), "reason": file.reason} for file in broken],
    }


def _record_of_store(
    store: Store, findings: Findings[BadRecord], broken: Sequence[BadRecord], wall_s: float
) -> dict[str, Any]:
    return {
        "address": without_password(store.address),
        "num_records": len(store),
        "num_checked": findings.num_checked,
        "num_images": findings.num_images,
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
