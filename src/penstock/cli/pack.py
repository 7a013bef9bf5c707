# SPDX-License-Identifier: Apache-2.0
"""`penstock pack`: a folder, a store or any dataset into a store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import options
from penstock.cli.reasons import reason_of
from penstock.cli.terminal import Bar, was_terminated
from penstock.errors import ConfigError, PenstockError, StoreError, WorkerDied
from penstock.faults import text_of
from penstock.lines import counted, format_bytes, parse_bytes, say
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.stores.packing import PackProgress, PackReport

_HINT: Final = (
    "--skip-bad leaves such samples out and lists them; with --resume it goes on from here."
)
_TOKENS: Final = "tokens:"
_OF_SAMPLES: Final = ("while encoding", "while reading sample")  # notes of an error


@options.takes(
    list_columns=options.LIST_OPTIONS, fields=options.FIELD_OPTIONS, texts=options.TEXT_OPTIONS
)
def pack(
    src: Annotated[str, typer.Argument(metavar="SRC", help=options.ANY_SOURCE)],
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="PATH.lmdb or lmdb:PATH, shards:PATH, s3://BUCKET/PREFIX, or "
            "mongodb://HOST/DB.COLLECTION; tokens:PATH for a corpus.",
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
    append: Annotated[
        bool,
        typer.Option("--append", help="Keep what a store of shards at DST has, and add to it."),
    ] = False,
    shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of each shard of a store of shards, as 64MB."),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Leave out and list what cannot be packed, and broken images: each is decoded to "
            "find them.",
        ),
    ] = False,
    follow_links: options.FollowLinks = False,
    split: options.Split = None,
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
    bad_boxes: options.BadBoxesOption = None,
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="SRC is an LMDB file of pickles, which may run code."),
    ] = False,
    *,
    list_columns: dict[str, Any],
    fields: dict[str, str],
    texts: dict[str, Any],
) -> None:
    """Pack a dataset into a store.

    A store that is at DST is replaced with --overwrite alone, and stays until the new one is
    complete. Image files are stored byte for byte, broken ones too, unless --resize, --quality or
    --skip-bad have them decoded; `penstock check` finds what is broken at any time. With --skip-bad
    a line goes to stdout for each sample left out: its name, a tab, and the reason. The last line
    says what was packed, how fast, and where.

    Of YOLO, COCO, imglab, lists of landmarks, and of VOC with --objects, a sample is the dict that
    the dataset of that form gives: image, boxes, labels, landmarks.

    With tokens:PATH, SRC is a corpus of texts: JSON lines, plain or compressed (.gz, .zst), Parquet
    or Arrow, a folder of these or one that Hugging Face's save_to_disk wrote. DST is what
    penstock.text.TokenFile reads. Of the options below, --workers, --resume, --overwrite and
    --skip-bad are for it.
    """
    if dst.startswith(_TOKENS):
        unfit = {
            "resize": resize,
            "quality": quality,
            "limit": limit,
            "shards": shards != 1,
            "append": append,
            "shard_size": shard_size,
            "follow_links": follow_links,
            "split": split,
            "objects": objects,
            "attributes": attributes,
            "bad_boxes": bad_boxes,
            "trust_pickle": trust_pickle,
            **list_columns,
            **fields,
        }
        if used := [name for name, value in unfit.items() if value]:
            raise ConfigError(f"{options.option_of(used[0])} is not for tokens:PATH.")
        given = {"num_workers": workers, "resume": resume, "overwrite": overwrite, **texts}
        _pack_tokens(src, dst.removeprefix(_TOKENS), skip_bad=skip_bad, **given)
        return
    if texts:
        raise ConfigError(f"{options.option_of(next(iter(texts)))} is for DST tokens:PATH.")
    from penstock.cli.files import say_passed_over
    from penstock.stores.packing import pack as pack_into

    given = {"split": split, "trust_pickle": trust_pickle, "fields": fields}
    of_objects = {
        "objects": objects,
        "bad_boxes": bad_boxes and bad_boxes.value,
        "attributes": tuple(name.strip() for name in attributes.split(",") if name.strip()),
    }

    def show(done: PackProgress) -> None:
        bar.show(done.num_done, done.num_records, format_bytes(done.num_bytes))

    with (
        _stopping(dst),
        _source(src, of_objects, list_columns, given) as samples,
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
            append=append,
            shard_size=None if shard_size is None else parse_bytes(shard_size),
            on_error="skip" if skip_bad else "raise",
            check_images=skip_bad,
            follow_links=follow_links,
            progress=show,
        )
        address = getattr(getattr(samples, "store", None), "address", "")
        counts = getattr(samples, "box_counts", None)
    if counts is not None and (boxes := options.bad_boxes_text(counts)):
        say(boxes)
    if split is None and address.startswith("YOLO "):
        say(f"{address}: name another part of it with --split")
    say_passed_over(src)
    _report(report)


def _pack_tokens(src: str, path: str, *, skip_bad: bool, **given: Any) -> None:  # noqa: ANN401
    """Pack a corpus, and say what became of it."""
    from penstock.text.packing import pack_tokens

    def show(num_done: int, num_all: int, num_tokens: int) -> None:
        bar.show(num_done, num_all, counted(num_tokens, "token"))

    with _stopping(f"folder:{path}"), Bar() as bar:
        on_error: Any = "skip" if skip_bad else "raise"
        report = pack_tokens(src, path, on_error=on_error, progress=show, **given)
    for where, why in report.left_out:
        say(where, why)
    parts = [counted(report.num_documents, "document"), counted(report.num_tokens, "token")]
    if report.num_resumed:
        parts.append(f"{report.num_resumed:,} of the documents from the interrupted run")
    parts.append(f"{report.wall_s:.1f} s")
    parts += [f"{report.num_empty:,} empty"] * (report.num_empty > 0)
    parts += [f"{report.num_left_out:,} left out"] * (report.num_left_out > 0)
    say(f"{_TOKENS}{report.path}: {', '.join(parts)}")


@contextlib.contextmanager
def _source(
    src: str, of_objects: dict[str, Any], columns: dict[str, Any], given: dict[str, Any]
) -> Iterator[Any]:
    """Return what is packed: a dataset of annotated images, a store, or a user's dataset."""
    from penstock.cli.sources import described_form, source_named
    from penstock.stores.folder.annotated_folder import looks_like_voc

    form = described_form(src, columns)
    is_with_objects = of_objects.pop("objects")
    attributes = of_objects["attributes"]
    used = [options.option_of(name) for name, value in of_objects.items() if value]
    used += map(options.option_of, columns) if form == "voc" else ()
    if form == "voc" and not is_with_objects and (used or not looks_like_voc(Path(src))):
        raise ConfigError(f"{src} is a VOC folder: its objects are packed with --objects.")
    if form is None and not attributes and (used or is_with_objects):
        raise ConfigError(f"{(used or ['--objects'])[0]} is for objects; {src} has none.")
    with source_named(
        src,
        columns=columns,
        is_described=is_with_objects or form != "voc",
        bad_boxes=of_objects["bad_boxes"] or "fix",
        attributes=attributes,
        **given,
    ) as found:
        absent = set(attributes) - set(getattr(found, "attribute_names", ()))
        if absent:
            raise ConfigError(f"--attributes is for VOC and imglab; {src} has no {min(absent)!r}.")
        yield found


@contextlib.contextmanager
def _stopping(dst: str) -> Iterator[None]:
    """Say at a Ctrl-C or SIGTERM how to go on."""
    from penstock.cli.sources import parse

    try:
        yield
    except (KeyboardInterrupt, WorkerDied) as error:
        # SIGTERM sent to the whole group ends workers as well.
        if isinstance(error, WorkerDied) and not was_terminated():
            raise
        kind, place = parse(dst)
        text = "Nothing was packed."
        if kind == "mongodb" or Path(f"{place}.partial").exists():
            kept = "beside the collection" if kind == "mongodb" else f"in {place}.partial"
            text = f"What was packed so far is kept {kept}: the same command with --resume goes on."
        say(f"penstock: stopped. {text}", err=True)
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def _errors_of_samples(src: str) -> Iterator[None]:
    """Say at an error of a sample which one it was, and what to do.

    An exception of the user's own code keeps its type and traceback: its author needs them.
    """
    from penstock.cli.sources import names_code

    try:
        yield
    except Exception as error:
        notes = [n for n in getattr(error, "__notes__", ()) if n.startswith(_OF_SAMPLES)]
        if not notes:
            raise
        if type(error) is StoreError:
            raise StoreError(f"{error} {_HINT}") from error
        if isinstance(error, PenstockError):
            raise
        if names_code(src):
            error.__notes__ = [*notes, _HINT]  # without the one for callers in Python
            raise
        raise StoreError(f"{text_of(error)} ({'; '.join(notes)}). {_HINT}") from error


def _report(report: PackReport) -> None:
    for failure in report.left_out:
        name = failure.name if failure.name is not None else f"sample {failure.index}"
        say(name, without_password(reason_of(failure.error)))
    num_new, wall_s = report.num_records - report.num_resumed, max(1e-9, report.wall_s)
    parts = [counted(report.num_records, "record")]
    if report.num_resumed:
        parts.append(f"{report.num_resumed:,} of them from the interrupted run")
    if num_new or not report.num_records:
        speed = f"{report.num_bytes / 1e6 / wall_s:,.1f} MB/s, {num_new / wall_s:,.0f} records/s"
        parts.append(f"{format_bytes(report.num_bytes)} in {wall_s:.1f} s ({speed})")
    else:
        parts[1:] = ["already complete"]
    if report.num_left_out:
        parts.append(f"{report.num_left_out:,} left out")
    say(f"{without_password(report.address)}: {', '.join(parts)}")
