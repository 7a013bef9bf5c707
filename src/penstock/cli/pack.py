# SPDX-License-Identifier: Apache-2.0
"""`penstock pack`: a folder, a store or any dataset into a store."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
from penstock.cli.pack_errors import errors_of_samples, saying_what_is_kept
from penstock.cli.pack_places import check_places
from penstock.cli.progress import Bar
from penstock.cli.reasons import short_reason
from penstock.errors import ConfigError
from penstock.lines import amount, say
from penstock.plural import counted
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.cli.arguments import BadBoxes
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.packing import PackProgress, PackReport

__all__ = ["pack"]


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
    list_columns: Mapping[str, Any],
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
    from penstock.cli.passed_over import tell_passed_over
    from penstock.stores.packing import pack as pack_into

    options = {
        "split": split,
        "trust_pickle": trust_pickle,
        "copy_local": copy_local,
        "image_field": image_field,
        "label_field": label_field,
        "key_field": key_field,
    }
    check_places(src, dst, num_shards=shards)
    names = tuple(name.strip() for name in attributes.split(",") if name.strip())
    described = _Described(objects, bad_boxes, list_columns, names)
    with saying_what_is_kept(dst), _source(src, described, options) as samples, Bar() as bar:
        with errors_of_samples(src):
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
    if split is None and (others := _other_splits(src, address)):
        say(f"{address}; not packed: {others} (--split)")
    tell_passed_over(src)
    _report(report, address, is_resumed=resume)


class _Described(NamedTuple):
    """How annotations are to be read: the options for them."""

    as_objects: bool
    bad_boxes: BadBoxes | None
    columns: Mapping[str, Any]
    attributes: tuple[str, ...]


@contextlib.contextmanager
def _source(src: str, described: _Described, options: dict[str, Any]) -> Iterator[Any]:
    """Return what is packed; while that is a store, libraries are kept from writing to stderr.

    A dataset of the user's own may write there what it likes.
    """
    from penstock.cli.silence import silent_libraries
    from penstock.cli.sources import names_a_dataset, source_named

    silence = contextlib.nullcontext() if names_a_dataset(src) else silent_libraries()
    with silence:
        found = _annotated(src, described, options)
        if found is not None:
            yield found
            return
        with source_named(src, **options) as samples:
            yield samples


def _annotated(src: str, described: _Described, options: dict[str, Any]) -> StoreDataset | None:
    """Return the dataset of annotated images, if it is to be packed; None for all else.

    Raises:
        ConfigError: an option does not fit it.
        StoreError: it cannot be read.
    """
    from penstock.cli.named_dataset import described_dataset, folder_form
    from penstock.cli.sources import is_store, names_a_dataset
    from penstock.stores.folder.annotated_folder import looks_like_voc

    is_path = not names_a_dataset(src) and not is_store(src)
    is_voc = is_path and Path(src).is_dir() and folder_form(Path(src)) == "voc"
    found = None
    if described.as_objects or not is_voc:
        policy = described.bad_boxes.policy if described.bad_boxes else "fix"
        found = described_dataset(
            src,
            options["split"],
            described.columns,
            bad_boxes=policy,
            attributes=described.attributes,
        )
    used = {
        "--objects": described.as_objects,
        "--bad-boxes": described.bad_boxes is not None,
        "--attributes": bool(described.attributes),
        **{option_of(name): True for name in described.columns},
    }
    wrong = next((name for name, is_used in used.items() if is_used), None)
    if found is None and wrong is not None:
        advice = f"{without_password(src)} has none"
        if is_voc:
            advice = "a VOC folder is packed with them by --objects: give that as well"
        raise ConfigError(f"{wrong} is for objects marked in images; {advice}.")
    if found is None and is_voc and not looks_like_voc(Path(src)):
        raise ConfigError(f"{src} is VOC in other folders than VOC's own: give --objects.")
    absent = set(described.attributes) - set(getattr(found, "attribute_names", ()))
    if absent:
        raise ConfigError(f"--attributes is for VOC and imglab; {src} has no {min(absent)!r}.")
    others = [name for name, value in options.items() if value and name != "split"]
    if found is not None and others:
        raise ConfigError(f"--{others[0].replace('_', '-')} is for stores, and {src} is none.")
    return found


def _other_splits(src: str, address: str) -> str:
    """Return the parts of YOLO's that are not in its "train", which is taken if none is named."""
    if not address.startswith("YOLO "):
        return ""
    from penstock.vision.annotations.yolo import read_yolo_data

    return ", ".join(name for name in read_yolo_data(src).splits if name != "train")


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
