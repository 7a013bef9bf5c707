# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: every image of a folder, or record of a store, and which of them are broken."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

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
    from collections.abc import Callable, Sequence

    from penstock.cli.annotation_check import AnnotationFindings
    from penstock.cli.parallel_check import Findings

__all__ = ["check"]

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
    list_columns: dict[str, Any],
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
    num_workers = workers or len(os.sched_getaffinity(0))
    fields = {"image_field": image_field, "label_field": label_field, "key_field": key_field}
    if _is_store(what) or any(fields.values()):
        num_broken = _check_store(what, num_workers, fields, as_json=as_json)
    else:
        num_broken = _check_files(Path(what), num_workers, list_columns, as_json=as_json)
    if num_broken:
        raise typer.Exit(1)


def _is_store(what: str) -> bool:
    from penstock.cli.sources import is_store

    path = Path(what)
    if ":" not in what and not path.suffix and not (path / _INDEX).exists():
        return False  # a plain folder, for which the packages of stores need not be there
    return is_store(what) or (path / _INDEX).exists()


def _check_files(what: Path, num_workers: int, columns: dict[str, Any], *, as_json: bool) -> int:
    from penstock.cli.decoding import no_image_in, passed_over_text
    from penstock.cli.parallel_check import FilesToCheck, Findings, check_in_parallel

    start_s = time.monotonic()
    images, annotations, passed_over = _found_in(what, columns)
    text = passed_over_text(passed_over, what)
    if not images and not annotations.num_files:
        raise no_image_in(what, text)
    findings = Findings(len(images))
    findings.broken += annotations.broken
    try:
        if images:
            with Bar() as bar:
                check_in_parallel(FilesToCheck(images), num_workers, findings, _tell(bar))
    finally:  # a check that is interrupted says what it has found so far
        findings.broken.sort(key=lambda file: file.name)
        count = annotations.num_files
        record = {
            "num_files": findings.num_files,
            "num_annotations": count,
            "num_checked": findings.num_checked,
            "broken": [{"path": file.name, "reason": file.reason} for file in findings.broken],
            "not_looked_at": sorted(passed_over),
        }
        also = f" and {counted(count, 'annotation')}" if count else ""
        _report(findings, record, "file", also, start_s, as_json=as_json)
        if text:
            say(text, err=True)
    return len(findings.broken)


def _found_in(
    place: Path, columns: dict[str, Any]
) -> tuple[Sequence[str], AnnotationFindings, Sequence[str]]:
    """Return the images and annotations of a folder or file, and files that are not looked at."""
    from penstock.cli.annotation_check import (
        AnnotationFindings,
        check_annotated_file,
        check_annotations,
    )
    from penstock.cli.decoding import is_passed_over, iter_files
    from penstock.stores.folder.listing import IMAGE_SUFFIXES

    if place.is_dir():
        images, xml, passed_over = [], [], []
        for path in iter_files(place):
            if path.lower().endswith(IMAGE_SUFFIXES):
                images.append(path)
            elif path.lower().endswith(".xml"):
                xml.append(path)
            elif is_passed_over(path):
                passed_over.append(path)
        packed = PackedList(sorted(images))
        return packed, check_annotations(place, packed, xml), passed_over
    if not place.exists():
        raise ConfigError(
            f"{place} does not exist. Name a folder, a file or a store; pack a dataset first."
        )
    if place.suffix.lower() not in _ANNOTATIONS:
        return [str(place)], AnnotationFindings(), []
    found = check_annotated_file(place, columns)
    return sorted(found.images), found, []


def _check_store(what: str, num_workers: int, fields: dict[str, Any], *, as_json: bool) -> int:
    from penstock.cli.parallel_check import Findings
    from penstock.cli.sources import open_named, parse
    from penstock.cli.store_check import check_opening, check_store

    start_s = time.monotonic()
    is_lmdb = parse(what).kind == "lmdb"
    options: dict[str, Any] = {"verify": "always"} if is_lmdb else {}
    with open_named(what, **fields, **options) as store:
        if is_lmdb:
            check_opening(store)
        findings = Findings(len(store))
        try:
            with Bar() as bar:
                check_store(store, num_workers, findings, _tell(bar))
        finally:
            findings.broken.sort(key=lambda one: -1 if one.position is None else one.position)
            findings.broken = [
                one._replace(reason=without_password(one.reason)) for one in findings.broken
            ]
            record = {
                "address": without_password(store.address),
                "num_records": len(store),
                "num_checked": findings.num_checked,
                "num_images": findings.num_images,
                "broken": [
                    {"key": one.name, "position": one.position, "reason": one.reason}
                    for one in findings.broken
                ],
            }
            decoded = f", {counted(findings.num_images, 'image')} decoded"
            _report(findings, record, "record", decoded, start_s, as_json=as_json)
    return len(findings.broken)


def _tell(bar: Bar) -> Callable[[Findings], None]:
    def tell(findings: Findings) -> None:
        bar.show(findings.num_checked, findings.num_files, f"{len(findings.broken)} broken")

    return tell


def _report(
    findings: Findings,
    record: dict[str, Any],
    item: str,
    also: str,
    start_s: float,
    *,
    as_json: bool,
) -> None:
    """Say what is broken, and how many of what were checked."""
    wall_s = time.monotonic() - start_s
    num_broken = len(findings.broken)
    if as_json:
        say_json({**record, "num_broken": num_broken, "seconds": round(wall_s, 3)})
    else:
        for one in findings.broken:
            say(one.name, one.reason)
    checked = counted(findings.num_files, item)
    if findings.num_checked < findings.num_files:
        checked = f"stopped after {findings.num_checked:,} of {checked}"
    say(f"{checked}{also}, {num_broken:,} broken, {wall_s:.1f} s", err=True)
