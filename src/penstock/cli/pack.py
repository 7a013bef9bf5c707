# SPDX-License-Identifier: Apache-2.0
"""`penstock pack`: a folder, a store or any dataset into a store."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.arguments import (
    ANNOTATED_HELP,
    SOURCE_HELP,
    BadBoxesOption,
    FollowLinksOption,
    ImageField,
    KeyField,
    LabelField,
    bad_boxes_text,
)
from penstock.cli.list_options import option_of, takes_list_options
from penstock.cli.progress import Bar
from penstock.cli.reasons import short_reason
from penstock.cli.sigterm import INTERRUPTED, TERMINATED, Termination
from penstock.errors import ConfigError, PenstockError, StoreError, StoreUnreachable, WorkerDied
from penstock.faults import text_of
from penstock.lines import amount, say
from penstock.plural import counted
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.stores.packing import PackProgress, PackReport
    from penstock.stores.registry import Address

__all__ = ["pack"]

_HINT: Final = (
    "--skip-bad leaves such samples out and lists them; with --resume it goes on from here."
)
# Of the notes that are added to an error: the one of a record, that of a sample or of those read
# together, and the one that speaks to those who call the library.
_OF_RECORD: Final = "while encoding"
_OF_SAMPLE: Final = "while reading sample"
_OF_LIBRARY: Final = "(on_error="
_NAMED_TWICE: Final = re.compile(r"\b(sample \d+) \(\1\)")
_USER: Final = re.compile(r"//[^/@]*@")


@takes_list_options
def pack(
    src: Annotated[
        str,
        typer.Argument(metavar="SRC", help=SOURCE_HELP + ANNOTATED_HELP),
    ],
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="PATH.lmdb or lmdb:PATH, or mongodb://HOST/DB.COLLECTION.",
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
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store that is at DST.")
    ] = False,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Leave out and list what cannot be packed, and broken images: each is decoded to "
            "find them.",
        ),
    ] = False,
    follow_links: FollowLinksOption = False,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which part of a folder, as in VOC's.")
    ] = None,
    objects: Annotated[
        bool,
        typer.Option(
            "--objects",
            help="Pack a VOC folder as detection takes it, with boxes and classes as arrays, and "
            "not as images with the text of their XML.",
        ),
    ] = False,
    attributes: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Fields of objects in XML to pack with them, as pose: classes can be balanced by "
            "these.",
            show_default=False,
        ),
    ] = "",
    bad_boxes: BadBoxesOption = None,
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
    *,
    list_columns: dict[str, Any],
) -> None:
    """Pack a dataset into a store.

    A store that is at DST is replaced with --overwrite alone, and stays until the new one is
    complete. Image files are stored byte for byte, broken ones too, unless --resize, --quality or
    --skip-bad have them decoded; `penstock check` finds what is broken at any time. With --skip-bad
    a line goes to stdout for each sample left out: its name, a tab, and the reason. The last line
    says what was packed, how fast, and where.

    Of YOLO, imglab, lists of landmarks, and of VOC with --objects, a sample is the dict that the
    dataset of that form gives: image, boxes, labels, landmarks.
    """
    from penstock.cli.decoding import tell_passed_over
    from penstock.stores.packing import pack as pack_into

    options = {
        "split": split,
        "trust_pickle": trust_pickle,
        "copy_local": copy_local,
        "image_field": image_field,
        "label_field": label_field,
        "key_field": key_field,
    }
    _check_places(src, dst, shards)
    described = {
        "--objects": objects,
        "--bad-boxes": bad_boxes and bad_boxes.policy,
        "--attributes": tuple(name.strip() for name in attributes.split(",") if name.strip()),
    }
    with (
        _stopping(dst),
        _source(src, described, list_columns, options) as samples,
        Bar() as bar,
        _errors_of_samples(src),
    ):
        report = pack_into(
            samples,
            dst,
            num_workers=workers,
            resize=resize,
            quality=quality,
            limit=limit,
            num_shards=shards,
            resume=resume,
            overwrite=overwrite,
            on_error="skip" if skip_bad else "raise",
            check_images=skip_bad,
            follow_links=follow_links,
            progress=_tell(bar),
        )
        address = getattr(getattr(samples, "store", samples), "address", "")
        counts = getattr(samples, "box_counts", None)
    if counts is not None and (boxes := bad_boxes_text(counts)):
        say(boxes)
    if split is None and address.startswith("YOLO "):  # "train" is taken if no part is named
        from penstock.vision.annotations.yolo import read_yolo_data

        if others := ", ".join(name for name in read_yolo_data(src).splits if name != "train"):
            say(f"{address}; not packed: {others} (--split)")
    tell_passed_over(src)
    _report(report, address, is_resumed=resume)


@contextlib.contextmanager
def _source(
    src: str, described: dict[str, Any], columns: dict[str, Any], options: dict[str, Any]
) -> Iterator[Any]:
    """Return what is packed: a dataset of annotated images, a store, or a user's dataset.

    Libraries are kept from writing to stderr, where a dataset of the user's own may write.

    Args:
        src: What names it.
        described: The options for annotations, by their names.
        columns: Of a landmark list.
        options: Of `open_named`.

    Raises:
        ConfigError: an option does not fit it.
        StoreError: it cannot be read.
    """
    from penstock.cli.silence import silent_libraries
    from penstock.cli.sources import (
        described_dataset,
        described_form,
        names_a_dataset,
        source_named,
    )
    from penstock.stores.folder.annotated_folder import looks_like_voc

    silence = contextlib.nullcontext() if names_a_dataset(src) else silent_libraries()
    with silence:
        is_voc = described_form(src, columns) == "voc"
        found, attributes = None, described["--attributes"]
        if described["--objects"] or not is_voc:
            found = described_dataset(
                src,
                options["split"],
                columns,
                bad_boxes=described["--bad-boxes"] or "fix",
                attributes=attributes,
                stores_only={n: value for n, value in options.items() if n != "split"},
            )
        used = [*(name for name, value in described.items() if value), *map(option_of, columns)]
        if found is None and used:
            advice = f"{without_password(src)} has none"
            if is_voc:
                advice = "a VOC folder is packed with them by --objects: give that as well"
            raise ConfigError(f"{used[0]} is for objects marked in images; {advice}.")
        if found is None and is_voc and not looks_like_voc(Path(src)):
            raise ConfigError(f"{src} is VOC in other folders than VOC's own: give --objects.")
        absent = set(attributes) - set(getattr(found, "attribute_names", ()))
        if absent:
            raise ConfigError(f"--attributes is for VOC and imglab; {src} has no {min(absent)!r}.")
        if found is not None:
            yield found
            return
        with source_named(src, **options) as samples:
            yield samples


def _check_places(src: str, dst: str, num_shards: int) -> None:
    """Refuse a destination that would take the source with it, or something else that is there."""
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
    if source.kind == target.kind == "mongodb":
        places = [_USER.sub("//", a.place).partition("?")[0] for a in (source, target)]
        if places[0] == places[1]:
            raise ConfigError(f"SRC and DST are the same collection, {places[0]}.")
    if "mongodb" in (source.kind, target.kind):
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


@contextlib.contextmanager
def _stopping(dst: str) -> Iterator[None]:
    """Say at a Ctrl-C or SIGTERM how to go on."""
    from penstock.cli.sources import parse

    with Termination() as termination:
        try:
            yield
            return
        except KeyboardInterrupt:
            pass
        except WorkerDied:
            if not termination.is_noted:  # sent to the whole group, it ends workers as well
                raise
    kind, place = parse(dst)
    kept = f"What was packed so far is kept in {place}.partial"
    if kind == "mongodb":
        kept = "What was packed so far is kept beside the collection"
    text = f"stopped. {kept}: the same command with --resume goes on."
    if kind != "mongodb" and not Path(f"{place}.partial").exists():
        text = "stopped before anything was packed."
    say(f"penstock: {without_password(text)}", err=True)
    raise typer.Exit(TERMINATED if termination.is_noted else INTERRUPTED)


@contextlib.contextmanager
def _errors_of_samples(src: str) -> Iterator[None]:
    """Say at an error of a sample which one it was, and what to do.

    An exception of the user's own code keeps its type and traceback: its author needs them.
    """
    from penstock.cli.sources import names_a_dataset

    try:
        yield
    except StoreUnreachable:
        raise
    except Exception as error:
        notes = [
            _NAMED_TWICE.sub(r"\1", note)
            for note in map(str, getattr(error, "__notes__", ()))
            if not note.startswith(_OF_LIBRARY)
        ]
        if not any(note.startswith(_OF_SAMPLE) for note in notes):
            raise
        if isinstance(error, StoreError):
            raise StoreError(f"{error} {_HINT}") from error
        if isinstance(error, PenstockError):
            raise
        if names_a_dataset(src):
            error.__notes__ = [*notes, _HINT]
            raise
        where = [note for note in notes if note.startswith(_OF_RECORD)] or notes
        raise StoreError(f"{text_of(error)} ({'; '.join(where)}). {_HINT}") from error


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
        say(name, without_password(reason))
    is_complete = is_resumed and 0 < report.num_records == report.num_resumed
    parts = [counted(report.num_records, "record")]
    parts += ["already complete"] if is_complete else _speed(report)
    if report.num_left_out:
        parts.append(f"{report.num_left_out:,} left out")
    say(f"{without_password(report.address)}: {', '.join(parts)}")


def _speed(report: PackReport) -> Iterator[str]:
    num_new = report.num_records - report.num_resumed
    wall_s = max(1e-9, report.wall_s)
    if report.num_resumed:
        yield f"{report.num_resumed:,} of them from the interrupted run"
    yield (
        f"{amount(report.num_bytes)} in {wall_s:.1f} s "
        f"({report.num_bytes / 1e6 / wall_s:,.1f} MB/s, {num_new / wall_s:,.0f} records/s)"
    )
