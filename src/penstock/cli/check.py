# SPDX-License-Identifier: Apache-2.0
"""`penstock check`: every image of a folder, or record of a store, and which of them are broken.

Files or records ──▶ workers of Penstock's own loader ──▶ Findings ──▶ lines

What a decoder raises travels as a result. A file that ends the process that decodes it is a bad
sample, which the loader skips: the worker is replaced, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from penstock.cli import options
from penstock.cli.reasons import reason_of
from penstock.cli.terminal import Bar, silence_libraries
from penstock.data import PackedList
from penstock.errors import ConfigError, StoreError, StoreUnreachable
from penstock.faults import FaultPolicy
from penstock.lines import counted, say, say_json
from penstock.loader import Loader
from penstock.redact import without_password
from penstock.system_limits import cores_by_affinity, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.stores.records import Record
    from penstock.stores.store import Store

_MAPPED: Final = ("lmdb", "arrow")  # kinds of stores whose files are mapped into memory
_ANNOTATIONS: Final = (".txt", ".xml", ".yaml", ".yml", ".json")
# Files in a task: it costs the loader some 0.1 ms, decoding a photo some 5 ms.
_MAX_TASK_FILES: Final = 16
_TASKS_PER_WORKER: Final = 8  # at least, so that no worker is left with the last files alone
# A file that ends its worker does so 2 or 3 times. Where hundreds do, the decoder is broken.
_MAX_RESPAWNS: Final = 1000
_LONGEST_TASK_S: Final = 300  # a decoder that takes longer over one task hangs, and is ended


@options.takes(list_columns=options.LIST_OPTIONS, fields=options.FIELD_OPTIONS)
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A folder, searched for images and annotations, subfolders included; an image, "
            "imglab's XML, YOLO's yaml file, COCO's JSON, a list; or a store's address.",
        ),
    ],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes.", show_default="usable cores")
    ] = None,
    as_json: options.AsJson = False,
    *,
    list_columns: dict[str, Any],
    fields: dict[str, str],
) -> None:
    """Find broken images, annotations or records of a folder or store.

    Every image is decoded whole, in worker processes; of a store every checksum is compared, and
    every record with the index. Annotations of VOC, YOLO and imglab are read, and their images
    looked for; COCO's JSON and lists where they are named. For each broken one a line goes to
    stdout: its path or key, a tab, and what is wrong. Images of formats that are not read are
    counted on stderr. The exit status is 1 if anything is broken, otherwise 0.
    """
    if list_columns and not what.lower().endswith((".txt", ".json")):
        raise ConfigError(f"{options.option_of(next(iter(list_columns)))} is for text lists.")
    import penstock.images.decode  # noqa: F401 - where Pillow is missing, this says it once
    from penstock.cli.sources import is_store, open_named, parse

    start_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        items: Files | Records
        if fields or is_store(what):
            store = stack.enter_context(open_named(what, fields))
            if parse(what).kind in _MAPPED:
                _check_opening(store)
            items = Records(store)
        else:
            items = _files_in(Path(what), list_columns)
        findings = Findings(len(items), broken=[*items.broken])
        try:
            with Bar() as bar:
                check_in_parallel(
                    items, workers or int(cores_by_affinity()), findings,
                    lambda: bar.show(findings.num_checked, findings.num_items, "checked"),
                )  # fmt: skip
        finally:  # a check that is interrupted says what it has found so far
            _say(items, findings, time.monotonic() - start_s, as_json=as_json)
    if findings.broken:
        raise typer.Exit(1)


def _say(items: Files | Records, findings: Findings, wall_s: float, *, as_json: bool) -> None:
    """Say what is broken, and how many of what were checked."""
    below = ""
    if isinstance(items, Files):
        broken = sorted(findings.broken, key=lambda one: one.name)
        checked, below = counted(findings.num_items, "file"), items.text_below
        also = f" and {counted(items.num_annotations, 'annotation')}" * (items.num_annotations > 0)
        record: dict[str, Any] = {
            "num_files": findings.num_items,
            "num_annotations": items.num_annotations,
            "num_checked": findings.num_checked,
            "broken": [{"path": one.name, "reason": one.reason} for one in broken],
            "not_looked_at": sorted(items.passed_over),
        }
    else:
        broken = sorted(findings.broken, key=lambda one: one.position)
        checked = counted(findings.num_items, "record")
        also = f", {counted(findings.num_images, 'image')} decoded"
        record = {
            "address": without_password(items.address),
            "num_records": findings.num_items,
            "num_checked": findings.num_checked,
            "num_images": findings.num_images,
            "broken": [
                {"key": one.name, "position": one.position, "reason": without_password(one.reason)}
                for one in broken
            ],
        }
    if as_json:
        say_json({**record, "num_broken": len(broken), "seconds": round(wall_s, 3)})
    else:
        for one in broken:
            say(one.name, without_password(one.reason))
    if findings.num_checked < findings.num_items:
        checked = f"stopped after {findings.num_checked:,} of {checked}"
    say(f"{checked}{also}, {len(broken):,} broken, {wall_s:.1f} s", err=True)
    if below:
        say(below, err=True)


class Broken(NamedTuple):
    """A file or a record that is broken: its path or key, and why; its position if it has one."""

    name: str
    reason: str
    position: int = -1


@dataclass
class Findings:
    """How far a check has come."""

    num_items: int  # to check
    num_checked: int = 0  # broken ones included
    num_images: int = 0  # whole ones in them
    broken: list[Broken] = field(default_factory=list)


class _Result(NamedTuple):
    """Result of checking one item: what is wrong (StoreUnreachable ends the check), and images."""

    position: int
    reason: str | StoreUnreachable | None = None
    num_images: int = 0


def check_in_parallel(
    items: Files | Records, num_workers: int, findings: Findings, show: Callable[[], object]
) -> None:
    """Check all items in worker processes, and call `show` each time that `findings` has grown.

    It grows in place, so that the caller has it whatever ends the check.
    """
    if not len(items):
        return
    num_workers = min(num_workers, len(items))
    loader: Loader[list[_Result]] = Loader(
        items,
        batch_size=min(_MAX_TASK_FILES, max(1, len(items) // (num_workers * _TASKS_PER_WORKER))),
        num_workers=num_workers,
        timeout=_LONGEST_TASK_S,
        collate_fn=list,
        # What is wrong with a file is said once, by the report.
        worker_init_fn=silence_libraries,
        on_error=FaultPolicy("skip", max_failures=None, max_respawns=_MAX_RESPAWNS),
    )

    def note(index: int, reason: str) -> None:
        findings.broken.append(Broken(items.describe(index), reason, index))

    with warnings.catch_warnings():
        # At the end the loader warns of the files left out; here they are in the findings.
        warnings.filterwarnings("ignore", "epoch 0: .* bad samples? left out", UserWarning)
        try:
            for results in loader:
                for index, reason, num_images in results:
                    if isinstance(reason, StoreUnreachable):
                        raise reason
                    findings.num_checked += 1
                    findings.num_images += num_images
                    if reason is not None:
                        note(index, reason)
                show()
        finally:
            for failure in loader.failures:  # what ended the process that decoded it
                findings.num_checked += 1
                note(failure.index, reason_of(failure.error))


def check_file(path: str) -> None:
    """Decode an image file, strictly; raises nearly any exception if it is damaged."""
    from penstock.images.decode import check_image
    from penstock.opening import read_file

    check_image(read_file(path))


@dataclass
class Files:
    """Image files, to be decoded, and what was found about annotations."""

    paths: Sequence[str]
    num_annotations: int = 0
    broken: list[Broken] = field(default_factory=list)
    passed_over: Sequence[str] = ()
    text_below: str = ""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> _Result:
        """Return what is wrong with a file."""
        try:
            check_file(self.paths[index])
        except Exception as error:  # over damaged data Pillow raises nearly anything
            return _Result(index, reason_of(error))
        return _Result(index, num_images=1)

    def describe(self, index: int) -> str:
        """Return the file's path, without a "./" before it."""
        return str(Path(self.paths[index]))


def _files_in(place: Path, columns: dict[str, Any]) -> Files:
    """Return the images and annotations of a folder or file, and files that are not looked at."""
    from penstock.cli.files import (
        check_annotated_file,
        check_annotations,
        is_passed_over,
        iter_files,
        passed_over_text,
    )
    from penstock.stores.folder.listing import IMAGE_SUFFIXES

    if not place.exists():
        raise ConfigError(
            f"{place} does not exist. Name a folder, a file or a store; pack a dataset first."
        )
    if not place.is_dir():
        if place.suffix.lower() not in _ANNOTATIONS:
            return Files([str(place)])
        found = check_annotated_file(place, columns)
        return Files(sorted(found.images), found.num_files, found.broken)
    images, xml, passed_over = [], [], []
    for path in iter_files(place):
        if path.lower().endswith(IMAGE_SUFFIXES):
            images.append(path)
        elif path.lower().endswith(".xml"):
            xml.append(path)
        elif is_passed_over(path):
            passed_over.append(path)
    packed, text = PackedList(sorted(images)), passed_over_text(passed_over, place)
    found = check_annotations(place, packed, xml)
    if not images and not found.num_files:
        suffixes = ", ".join(IMAGE_SUFFIXES)
        raise ConfigError(
            f"no image in {place} or below it. Looked for files ending in {suffixes}. {text}"
        )
    return Files(packed, found.num_files, found.broken, passed_over, text)


def _check_opening(store: Store) -> None:
    """Raise StoreError if reading a store's index kills a process, as SIGBUS of a bad disk does."""
    if "fork" not in get_all_start_methods():
        return  # the loader says what is missing on Windows
    process = get_context("fork").Process(target=_read_index, args=(store,), daemon=True)
    process.start()
    process.join()
    if (code := process.exitcode or 0) < 0:
        raise StoreError(
            f"{store.address} cannot be opened: the process that read its index was killed by "
            f"{signal_name(-code)}. Is its disk failing, or was the file written to meanwhile? "
            "Restore it from a copy, or pack it anew."
        )


def _read_index(store: Store) -> None:
    silence_libraries()  # an error is raised again by the process that opens it next
    len(store)


class Records:
    """Records of a store, to be compared with their checksums and the index."""

    def __init__(self, store: Store) -> None:
        """Read the store's index."""
        self._store = store
        self.address, self._index = store.address, store.index
        self.broken: list[Broken] = []
        store.close()  # workers that are forked inherit no connection

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> _Result:
        """Return what is wrong with a record."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[_Result]:
        """Read many at once; one by one if something is wrong with one of them."""
        try:
            with self._store.borrow(indices) as records:
                return [self._result(i, r) for i, r in zip(indices, records, strict=True)]
        except StoreUnreachable as error:
            return [_Result(index, error) for index in indices]
        except Exception as error:
            if len(indices) == 1:
                return [_Result(indices[0], reason_of(error))]
        return [self.__getitem__(index) for index in indices]

    def _result(self, index: int, record: Record) -> _Result:
        from penstock.images.decode import check_image
        from penstock.stores.pack_source import images_in

        key, label, said = self._index.keys[index], self._index.label_of(index), record.label
        if record.key != key:
            return _Result(index, f"the record at its place is called {record.key!r}")
        if isinstance(label, tuple) and not isinstance(said, tuple):
            said = () if said is None else (said,)  # in an index all have several if one has
        if said != label:
            return _Result(index, f"its label is {record.label}, by the index it is {label}")
        num_images = 0
        for image in images_in(record.sample):
            try:
                check_image(image.data)
            except Exception as error:  # over damaged data Pillow raises nearly anything
                return _Result(index, reason_of(error), num_images)
            num_images += 1
        return _Result(index, None, num_images)

    def describe(self, index: int) -> str:
        """Return the record's key."""
        return self._index.keys[index]
