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

from penstock.cli.lines import amount, printable, without_password
from penstock.cli.progress import Bar
from penstock.errors import ConfigError, PenstockError, StoreError
from penstock.faults import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.stores.address import Address
    from penstock.stores.packing import PackProgress, PackReport

__all__ = ["pack"]

_INTERRUPTED: Final = 130  # as shells have it: 128 and the number of SIGINT
_SHARD: Final = re.compile(r"\d{5}-of-\d{5}\.lmdb")
_USER: Final = re.compile(r"//[^/@]*@")


def pack(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder, a store's address, or module:callable, which is run for a dataset.",
        ),
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
) -> None:
    """Pack a dataset into a store.

    What is at DST stays until the new store is complete. Image files are stored byte for byte,
    unless they are to be shrunk. With --skip-bad a line goes to stdout for each sample left out:
    its name, a tab, and the reason. The last line says what was packed, how fast, and where.
    """
    from penstock.stores.packing import pack as pack_into

    _check_places(src, dst, num_shards=shards)
    with _saying_what_is_kept(dst), Bar() as bar:
        source = _source(src, split=split, trust_pickle=trust_pickle, copy_local=copy_local)
        with source as samples, _errors_of_samples(src):
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
    _report(report)


def _source(src: str, **options: Any) -> contextlib.AbstractContextManager[Any]:  # noqa: ANN401
    from penstock.cli.sources import dataset_named, names_a_dataset, open_named

    if not names_a_dataset(src):
        return open_named(src, **options)
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{given[0]} is not for {src}, which makes its dataset itself.")
    return dataset_named(src)


@contextlib.contextmanager
def _saying_what_is_kept(dst: str) -> Iterator[None]:
    """Say at a Ctrl-C how to go on."""
    from penstock.cli.sources import parse

    try:
        yield
    except KeyboardInterrupt:
        kind, place = parse(dst)
        partial = Path(f"{place}.partial")
        if kind == "mongodb":
            kept = "What was packed so far is kept beside the collection: "
        elif partial.exists():
            kept = f"What was packed so far is kept in {partial}: "
        else:
            sys.stderr.write("penstock: stopped before anything was packed.\n")
            raise typer.Exit(_INTERRUPTED) from None
        sys.stderr.write(f"penstock: stopped. {kept}the same command with --resume goes on.\n")
        raise typer.Exit(_INTERRUPTED) from None


@contextlib.contextmanager
def _errors_of_samples(src: str) -> Iterator[None]:
    """Turn what a decoder raises into an error that says which sample, and what to do.

    Not where the user's own code is run: its author needs the traceback.
    """
    from penstock.cli.sources import names_a_dataset

    try:
        yield
    except PenstockError:
        raise
    except (ValueError, OSError) as error:
        if names_a_dataset(src):
            raise
        # The one that names on_error speaks to those who call the library.
        notes = "; ".join(n for n in getattr(error, "__notes__", ()) if "on_error" not in n)
        raise StoreError(
            f"{text_of(error)} ({notes}). --skip-bad leaves such samples out and lists them; with "
            "--resume it goes on from here."
        ) from error


def _tell(bar: Bar) -> Callable[[PackProgress], None]:
    start_s = time.monotonic()

    def tell(progress: PackProgress) -> None:
        mb_per_s = progress.num_bytes / 1e6 / max(1e-9, time.monotonic() - start_s)
        bar.show(progress.num_done, progress.num_records, f"{mb_per_s:,.1f} MB/s")

    return tell


def _report(report: PackReport) -> None:
    for failure in report.left_out:
        name = failure.name if failure.name is not None else f"sample {failure.index}"
        reason = without_password(_reason(failure.error))
        sys.stdout.write(f"{printable(name)}\t{printable(reason)}\n")
    num_new = report.num_records - report.num_resumed
    wall_s = max(1e-9, report.wall_s)
    parts = [
        f"{report.num_records:,} records",
        f"{amount(report.num_bytes)} in {wall_s:.1f} s "
        f"({report.num_bytes / 1e6 / wall_s:,.1f} MB/s, {num_new / wall_s:,.0f} records/s)",
    ]
    if report.num_resumed:
        parts.insert(1, f"{report.num_resumed:,} of them from the interrupted run")
    if report.num_left_out:
        parts.append(f"{report.num_left_out:,} left out")
    sys.stdout.write(f"{printable(without_password(report.address))}: {', '.join(parts)}\n")
    sys.stdout.flush()


def _reason(error: BaseException) -> str:
    """Return in one line what is wrong with a sample."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    says = isinstance(error, (PenstockError, ValueError, OSError)) and str(error)
    return " ".join(str(error).split()) if says else text_of(error)


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
        others = sorted(e.name for e in path.iterdir() if not _SHARD.fullmatch(e.name))
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
    if target.kind == "folder" and other.is_relative_to(one):
        raise ConfigError(f"DST ({target.place}) would be in the folder SRC, and a part of it.")
