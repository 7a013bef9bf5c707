# SPDX-License-Identifier: Apache-2.0
"""`penstock pack`: a folder, a store or any dataset into a store."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.arguments import (
    SOURCE_HELP,
    ImageField,
    KeyField,
    LabelField,
)
from penstock.cli.lines import amount, printable, without_password
from penstock.cli.progress import Bar
from penstock.cli.reasons import short_reason
from penstock.cli.stopping import INTERRUPTED, TERMINATED, Termination
from penstock.errors import ConfigError, PenstockError, StoreError, StoreUnreachable, WorkerDied
from penstock.faults import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.stores.address import Address
    from penstock.stores.packing import PackProgress, PackReport

__all__ = ["pack"]

_USER: Final = re.compile(r"//[^/@]*@")
_HINT: Final = (
    "--skip-bad leaves such samples out and lists them; with --resume it goes on from here."
)
# Of the notes that are added to an error: the one of a record, that of a sample or of those read
# together, and the one that speaks to those who call the library.
_OF_RECORD: Final = "while encoding"
_OF_SAMPLE: Final = "while reading sample"
_OF_LIBRARY: Final = "(on_error="


def pack(
    src: Annotated[
        str,
        typer.Argument(metavar="SRC", help=SOURCE_HELP),
    ],
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="lmdb:PATH, mongodb://HOST/DB.COLLECTION, or a folder to make."
        ),
    ],
    resize: Annotated[
        int | None,
        typer.Option(min=1, metavar="PX", help="Shrink larger images to this shorter side."),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(min=1, max=100, metavar="Q", help="Of the JPEG files made, 90 if not given."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take this many from the front only.")
    ] = None,
    shards: Annotated[int, typer.Option(min=1, metavar="N", help="Number of LMDB files.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Worker processes.", show_default="usable cores"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out and list what cannot be packed.")
    ] = False,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which part of a folder, as in VOC's.")
    ] = None,
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="SRC is an LMDB file of pickles, which may run code."),
    ] = False,
    copy_local: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy the LMDB file SRC into DIR first, and read that."),
    ] = None,
    image_field: ImageField = None,
    label_field: LabelField = None,
    key_field: KeyField = None,
) -> None:
    """Pack a dataset into a store.

    What is at DST stays until the new store is complete. Image files are stored byte for byte,
    unless they are to be shrunk. With --skip-bad a line goes to stdout for each sample left out:
    its name, a tab, and the reason. The last line says what was packed, how fast, and where.
    """
    from penstock.stores.packing import pack as pack_into

    options = {
        "split": split,
        "trust_pickle": trust_pickle,
        "copy_local": copy_local,
        "image_field": image_field,
        "label_field": label_field,
        "key_field": key_field,
    }
    _check_places(src, dst, num_shards=shards)
    with _saying_what_is_kept(dst), _source(src, options) as samples, Bar() as bar:
        with _errors_of_samples(src):
            report = pack_into(
                samples,
                dst,
                num_workers=workers,
                resize=resize,
                quality=quality,
                limit=limit,
                num_shards=shards,
                resume=resume,
                on_error="skip" if skip_bad else "raise",
                progress=_tell(bar),
            )
        address = getattr(samples, "address", "")
    _report(report, address, is_resumed=resume)


@contextlib.contextmanager
def _source(src: str, options: dict[str, Any]) -> Iterator[Any]:
    """Return what is packed; while that is a store, libraries are kept from writing to stderr.

    A dataset of the user's own may write there what it likes.
    """
    from penstock.cli.quiet import silent_libraries
    from penstock.cli.sources import names_a_dataset, source_named

    quiet = contextlib.nullcontext() if names_a_dataset(src) else silent_libraries()
    with quiet, source_named(src, **options) as samples:
        yield samples


@contextlib.contextmanager
def _saying_what_is_kept(dst: str) -> Iterator[None]:
    """Say at a Ctrl-C or SIGTERM how to go on."""
    with Termination() as termination:
        try:
            yield
            return
        except KeyboardInterrupt:
            pass
        except WorkerDied:
            if not termination.is_noted:  # sent to the whole group, it ends workers as well
                raise
    sys.stderr.write(f"penstock: {without_password(_stopped(dst))}\n")
    raise typer.Exit(TERMINATED if termination.is_noted else INTERRUPTED)


def _stopped(dst: str) -> str:
    from penstock.cli.sources import parse

    kind, place = parse(dst)
    partial = Path(f"{place}.partial")
    if kind == "mongodb":
        kept = "What was packed so far is kept beside the collection"
    elif partial.exists():
        kept = f"What was packed so far is kept in {partial}"
    else:
        return "stopped before anything was packed."
    return f"stopped. {kept}: the same command with --resume goes on."


@contextlib.contextmanager
def _errors_of_samples(src: str) -> Iterator[None]:
    """Say at an error of a sample which one it was, and what to do.

    An exception of the user's own code keeps its type and traceback: its author needs them.
    """
    from penstock.cli.sources import names_a_dataset

    try:
        yield
    except Exception as error:
        notes = _notes(error)
        is_of_sample = any(note.startswith(_OF_SAMPLE) for note in notes)
        if isinstance(error, StoreError) and is_of_sample:
            if isinstance(error, StoreUnreachable):
                raise
            raise StoreError(f"{error} {_HINT}") from error
        if isinstance(error, PenstockError) or not is_of_sample:
            raise
        if names_a_dataset(src):
            error.__notes__ = [*notes, _HINT]
            raise
        where = [note for note in notes if note.startswith(_OF_RECORD)] or notes
        raise StoreError(f"{text_of(error)} ({'; '.join(where)}). {_HINT}") from error


def _notes(error: BaseException) -> list[str]:
    """Return the notes of an error, but the one that speaks to those who call the library."""
    notes = map(str, getattr(error, "__notes__", ()))
    named_twice = re.compile(r"\b(sample \d+) \(\1\)")
    return [named_twice.sub(r"\1", note) for note in notes if not note.startswith(_OF_LIBRARY)]


def _tell(bar: Bar) -> Callable[[PackProgress], None]:
    start_s = time.monotonic()

    def tell(progress: PackProgress) -> None:
        mb_per_s = progress.num_bytes / 1e6 / max(1e-9, time.monotonic() - start_s)
        bar.show(progress.num_done, progress.num_records, f"{mb_per_s:,.1f} MB/s")

    return tell


def _report(report: PackReport, source_address: str, *, is_resumed: bool) -> None:
    for failure in report.left_out:
        name = failure.name if failure.name is not None else f"sample {failure.index}"
        reason = short_reason(failure.error, failure.index, name, source_address)
        sys.stdout.write(f"{printable(name)}\t{printable(without_password(reason))}\n")
    is_complete = is_resumed and 0 < report.num_records == report.num_resumed
    parts = [f"{report.num_records:,} records"]
    parts += ["already complete"] if is_complete else _speed(report)
    if report.num_left_out:
        parts.append(f"{report.num_left_out:,} left out")
    sys.stdout.write(f"{printable(without_password(report.address))}: {', '.join(parts)}\n")
    sys.stdout.flush()


def _speed(report: PackReport) -> Iterator[str]:
    num_new = report.num_records - report.num_resumed
    wall_s = max(1e-9, report.wall_s)
    if report.num_resumed:
        yield f"{report.num_resumed:,} of them from the interrupted run"
    yield (
        f"{amount(report.num_bytes)} in {wall_s:.1f} s "
        f"({report.num_bytes / 1e6 / wall_s:,.1f} MB/s, {num_new / wall_s:,.0f} records/s)"
    )


def _check_places(src: str, dst: str, *, num_shards: int) -> None:
    """Refuse a destination that would take the source with it, or something else that is there.

    Raises:
        ConfigError: so it is.
    """
    from penstock.cli.sources import names_a_dataset, parse

    target = parse(dst)
    if not names_a_dataset(src):
        _check_apart(parse(src), target)
    path = Path(target.place)
    if target.kind != "lmdb" or not path.exists():
        return
    if num_shards == 1 and path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file for DST, or give --shards.")
    if num_shards > 1 and not path.is_dir():
        raise ConfigError(f"{path} is a file; --shards makes a folder. Name another DST.")
    if num_shards > 1:
        from penstock.stores.lmdb.store import is_shard

        others = sorted(e.name for e in path.iterdir() if not is_shard(e.name))
        if others:
            raise ConfigError(
                f"{path} is a folder with other things in it ({others[0]}), which the new store "
                "would replace. Name another DST."
            )


def _check_apart(source: Address, target: Address) -> None:
    if (source.kind == "mongodb") != (target.kind == "mongodb"):
        return
    if source.kind == "mongodb":
        places = [_USER.sub("//", a.place).partition("?")[0] for a in (source, target)]
        if places[0] == places[1]:
            raise ConfigError(f"SRC and DST are the same collection, {places[0]}.")
        return
    one, other = (Path(os.path.realpath(address.place)) for address in (source, target))
    if one == other:
        raise ConfigError(
            f"SRC and DST are the same place, {target.place}. Pack into another one, and rename "
            "that when you have looked at it."
        )
    if one.is_relative_to(other) and other.is_dir():
        raise ConfigError(f"DST ({target.place}) would replace the folder that SRC lies in.")
    if other.is_relative_to(one):
        raise ConfigError(f"DST ({target.place}) would be in the folder SRC, and a part of it.")
