# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: every image of a folder, or record of a store, and which of them are broken."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import typer

from penstock.cli.arguments import ImageField, KeyField, LabelField  # noqa: TC001 - typer's
from penstock.cli.list_options import option_of, takes_list_options
from penstock.cli.progress import Bar
from penstock.data import PackedList
from penstock.errors import ConfigError
from penstock.lines import say, say_json
from penstock.plural import counted
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.cli.annotation_check import AnnotationFindings
    from penstock.cli.decoding import BrokenFile
    from penstock.cli.parallel_check import Findings
    from penstock.cli.store_check import BadRecord
    from penstock.stores.store import Store

__all__ = ["check"]

T = TypeVar("T")

_ANNOTATIONS: Final = (".txt", ".xml", ".yaml", ".yml")
_INDEX: Final = ".penstock-index"  # that release 0.1 left in a folder which it packed


@takes_list_options
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A folder, searched for images and annotations, subfolders included; an image, "
            "imglab's or VOC's XML, YOLO's yaml file, a list; or a store's address.",
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
    *,
    list_columns: Mapping[str, Any],
) -> None:
    """Find broken images, annotations or records of a folder or store.

    Every image is decoded whole, in worker processes; of a store every checksum is compared, and
    every record with the index. Annotations of VOC, YOLO and imglab are read, and their images
    looked for. For each broken one a line goes to stdout: its path or key, a tab, and what is
    wrong. Images in files without an image's suffix are counted on stderr. The exit status is 1 if
    anything is broken, otherwise 0.
    """
    if list_columns and not what.lower().endswith(".txt"):
        raise ConfigError(f"{option_of(next(iter(list_columns)))} is for text lists.")
    num_workers = workers or _num_usable_cores()
    fields = {"image_field": image_field, "label_field": label_field, "key_field": key_field}
    if _is_store(what) or any(fields.values()):
        num_broken = _check_store(what, num_workers, fields, as_json=as_json)
    else:
        num_broken = _check_files(Path(what), num_workers, list_columns, as_json=as_json)
    if num_broken:
        raise typer.Exit(1)


def _is_store(what: str) -> bool:
    path = Path(what)
    if ":" not in what and not path.suffix and not (path / _INDEX).exists():
        return False  # a plain folder, for which the packages of stores need not be there
    from penstock.cli.sources import is_store

    return is_store(what) or (path / _INDEX).exists()


def _check_files(what: Path, num_workers: int, columns: Mapping[str, Any], *, as_json: bool) -> int:
    from penstock.cli.decoding import no_image_in
    from penstock.cli.parallel_check import Findings, check_files
    from penstock.cli.passed_over import passed_over_text

    start_s = time.monotonic()
    found = _found_in(what) if what.is_dir() else _found_in_file(what, columns)
    passed_over = passed_over_text(found.passed_over, what)
    if not found.images and not found.annotations.num_files:
        raise no_image_in(what, passed_over)
    annotations = found.annotations
    findings: Findings[BrokenFile] = Findings(len(found.images))
    findings.broken += annotations.broken
    try:
        with Bar() as bar:
            if found.images:
                check_files(found.images, num_workers, findings, _tell(bar))
    finally:  # a check that is interrupted says what it has found so far
        wall_s = time.monotonic() - start_s
        broken = sorted(findings.broken, key=lambda file: str(file.path))
        if as_json:
            say_json(_record_of_files(findings, broken, wall_s, found))
        else:
            _write_lines([(str(file.path), file.reason) for file in broken])
        count = annotations.num_files
        also = f" and {counted(count, 'annotation')}" if count else ""
        _summarise(findings, "file", also, wall_s)
        if passed_over:
            say(passed_over, err=True)
    return len(broken)


class _FolderContents(NamedTuple):
    """What is checked, and what is not."""

    images: Sequence[str]
    annotations: AnnotationFindings
    passed_over: Sequence[str] = ()


def _found_in(folder: Path) -> _FolderContents:
    from penstock.cli.annotation_check import check_annotations
    from penstock.cli.decoding import iter_files
    from penstock.cli.passed_over import is_passed_over
    from penstock.stores.folder.listing import IMAGE_SUFFIXES

    images: list[str] = []
    xml: list[str] = []
    passed_over: list[str] = []
    for path in iter_files(folder):
        name = path.lower()
        if name.endswith(IMAGE_SUFFIXES):
            images.append(path)
        elif name.endswith(".xml"):
            xml.append(path)
        elif is_passed_over(path):
            passed_over.append(path)
    packed = PackedList(sorted(images))
    return _FolderContents(packed, check_annotations(folder, packed, xml), passed_over)


def _found_in_file(path: Path, columns: Mapping[str, Any]) -> _FolderContents:
    from penstock.cli.annotation_check import AnnotationFindings, check_annotated_file

    if not path.exists():
        raise ConfigError(f"{path} does not exist. Name a folder, a file or a store.")
    if path.suffix.lower() not in _ANNOTATIONS:
        return _FolderContents([str(path)], AnnotationFindings())
    findings = check_annotated_file(path, columns)
    return _FolderContents(sorted(findings.images), findings)


def _check_store(what: str, num_workers: int, fields: dict[str, Any], *, as_json: bool) -> int:
    from penstock.cli.parallel_check import Findings
    from penstock.cli.sources import open_named, parse
    from penstock.cli.store_check import check_opening, check_store

    start_s = time.monotonic()
    kind, place = parse(what)
    is_lmdb = kind == "lmdb"
    options: dict[str, Any] = {"verify": "always", "verify_tree": "open"} if is_lmdb else {}
    with open_named(what, **fields, **options) as store:
        if is_lmdb:
            check_opening(store)
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
                say_json(_record_of_store(store, findings, broken, wall_s))
            else:
                _write_lines([(record.key, record.reason) for record in broken])
            also = f" and {counted(len(others), 'other image')}" if others else ""
            _summarise(findings, "record", also, wall_s, is_store=True)
    return len(broken)


def _others(store: Store, folder: Path) -> list[str]:
    """Return the images below a folder that `pack` made which are no record's."""
    from penstock.cli.decoding import iter_image_paths
    from penstock.stores.folder.store import FolderStore

    assert isinstance(store, FolderStore)
    of_records = {os.fspath(store.file_of(position)) for position in range(len(store))}
    return sorted(path for path in iter_image_paths(folder) if path not in of_records)


def _check_others(paths: Sequence[str], num_workers: int, findings: Findings[BadRecord]) -> None:
    from penstock.cli.parallel_check import Findings, check_files
    from penstock.cli.store_check import BadRecord

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


def _write_lines(broken: Sequence[tuple[str, str]]) -> None:
    for name, reason in broken:
        say(name, without_password(reason))


def _summarise(
    findings: Findings[T], item: str, also: str, wall_s: float, *, is_store: bool = False
) -> None:
    checked = counted(findings.num_files, item)
    if findings.num_checked < findings.num_files:
        checked = f"stopped after {findings.num_checked:,} of {checked}"
    # Of a folder each file is one; a store may have none, or several in a record.
    images = f"{counted(findings.num_images, 'image')} decoded, " if is_store else ""
    broken = f"{len(findings.broken):,} broken, {wall_s:.1f} s"
    say(f"{checked}{also}, {images}{broken}", err=True)


def _record_of_files(
    findings: Findings[BrokenFile],
    broken: Sequence[BrokenFile],
    wall_s: float,
    found: _FolderContents,
) -> dict[str, Any]:
    return {
        "num_files": findings.num_files,
        "num_annotations": found.annotations.num_files,
        "num_checked": findings.num_checked,
        "num_broken": len(broken),
        "seconds": round(wall_s, 3),
        "broken": [{"path": str(file.path), "reason": file.reason} for file in broken],
        "not_looked_at": sorted(found.passed_over),
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
