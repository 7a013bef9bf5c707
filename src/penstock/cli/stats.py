# SPDX-License-Identifier: Apache-2.0
"""`penstock stats`: classes, counts, imbalance and sizes of a folder or store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer

from penstock.cli.arguments import (
    ANNOTATED_HELP,
    SOURCE_HELP,
    ClassOf,
    ClassOfOption,
    Column,
    ImageField,
    KeyField,
    LabelField,
    tell_bad_boxes,
)
from penstock.cli.list_options import takes_list_options
from penstock.cli.outputs import check_output
from penstock.cli.progress import Bar
from penstock.cli.sampler_options import SamplerChoice, SamplerKind
from penstock.cli.stats_tables import print_tables
from penstock.errors import ConfigError, StoreError
from penstock.lines import amount, say, say_json
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.cli.dataset_stats import Objects, Sizes
    from penstock.cli.stats_chart import Panel
    from penstock.sampling.balance import BalanceReport
    from penstock.sampling.repeat_factor import RepeatFactorSampler

__all__ = ["stats"]

_SAMPLED: Final = 1000  # records: a mean to some 3 % where sizes vary as much as their mean

_PARTS: Final = frozenset(("train", "training", "val", "valid", "validation", "test", "testing"))


@takes_list_options
def stats(
    src: Annotated[str, typer.Argument(metavar="SRC", help=SOURCE_HELP + ANNOTATED_HELP)],
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw a chart into this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Give one JSON object instead of tables.")
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Records to read for the sizes; 0 is all of them.",
            show_default=str(_SAMPLED),
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which part of a folder, as in VOC's.")
    ] = None,
    image_field: ImageField = None,
    label_field: LabelField = None,
    key_field: KeyField = None,
    column: Column = None,
    class_of: ClassOfOption = ClassOf.all,
    sampler: Annotated[
        SamplerKind | None,
        typer.Option(
            "--sampler",
            help="Show the balance of classes before and after it. Only samples of a module:name "
            "that does not know its labels are read.",
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="A",
            help="Of balanced: 0 is natural, 0.5 the square root, 1 equal.",
            show_default="1",
        ),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="B",
            help="Of effective: below 1; near 1 is equal.",
            show_default="0.999",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="T",
            help="Of repeat-factor, 0.5 for 50 %: images of a class that a smaller share of all "
            "images has are repeated.",
        ),
    ] = None,
    num_samples: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help='Samples in an epoch; of balanced and effective also "oversample", "undersample".',
            show_default="as the sampler has it",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Of balanced, effective: exact counts, not by chance.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Of the sampler's draws.", show_default="0"),
    ] = None,
    *,
    list_columns: dict[str, Any],
) -> None:
    """Count the classes of a folder or dataset, and measure its images.

    Classes are counted from the index, without reading a record. Sizes come from records spread
    evenly over the store, and of an image its header alone is read. A dataset without a list of its
    labels is read as a whole. With --sampler, the classes alone are counted: as they are, and as a
    sampler shows them.
    """
    if sampler is not None and sample is not None:
        raise ConfigError("--sample is for the sizes, and --sampler shows none: leave out one.")
    choice = SamplerChoice(sampler, alpha, beta, threshold, num_samples, exact, seed)
    choice.check()
    from penstock.cli.dataset_stats import DatasetStore, Sizes, count_classes, count_objects
    from penstock.cli.decoding import tell_passed_over
    from penstock.cli.sources import attributes_for, labels_by, names_a_dataset
    from penstock.data.labels.known import class_names_of, known_labels
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.store import Store

    if png is not None:
        import matplotlib  # noqa: F401 - where it is missing, the error names the extra

        check_output("--png", png)
    fields = {"image_field": image_field, "label_field": label_field, "key_field": key_field}
    by_field = column is not None or class_of is not ClassOf.all
    # What is balanced or split by is what training sees; objects alone are counted as they are.
    options: dict[str, Any] = {
        "bad_boxes": "fix" if by_field else "keep",
        "attributes": attributes_for(column),
    }
    panels: list[Panel] = []
    with _opened(src, split, list_columns, fields, options) as (found, why_none):
        # Of a dataset over a store that is counted: transforms change nothing of it.
        is_own = not isinstance(found, Store | StoreDataset)
        store = DatasetStore(found, src) if is_own else getattr(found, "store", found)
        address = without_password(src if names_a_dataset(src) else store.address)
        _hint_at_parts(src, () if is_own else store.index.class_names)
        tell_passed_over(src)
        labels: Any = None
        if by_field:
            if why_none is not None:
                raise StoreError(why_none)
            tell_bad_boxes(found)
            dataset = StoreDataset(found) if isinstance(found, Store) else found
            labels, names = labels_by(dataset, column, class_of)
        elif is_own and sampler is not None:  # they may be texts
            labels, names = known_labels(found), class_names_of(found)
        if labels is None:
            labels, names = store.index.labels, store.index.class_names or None
        if sampler is not None:
            record, lines, panels = _balance(address, labels, names, choice, column)
        else:
            with Bar() as bar:
                sizes = Sizes.measure(
                    store,
                    _SAMPLED if sample is None else sample,
                    lambda done, of: bar.show(done, of, "read for sizes"),
                )
            record = {
                "address": address,
                "num_records": sizes.num_records,
                **count_classes(labels, names or ()),
                "sizes": sizes.record(),
            }
            objects = None
            if hasattr(found, "box_counts") and not by_field:  # `AnnotatedImages` needs OpenCV
                objects = count_objects(found)
                record["objects"] = objects.record()
            if why_none is not None:
                record["objects_error"] = why_none
    if column is not None:
        record["column"] = column
    if png is not None:
        from penstock.cli.stats_chart import draw

        title = address if sampler is None else f"{address}\nsampler: {choice}"
        draw(png, title, panels or _panels(record, sizes, objects))
    if as_json:
        say_json(record)
    elif sampler is None:
        print_tables(record)
    else:
        for line in lines:
            say(line)
    if png is not None:  # beside JSON nothing is on stdout
        say(f"{png}: chart", err=as_json)


@contextlib.contextmanager
def _opened(
    src: str,
    split: str | None,
    columns: dict[str, Any],
    fields: dict[str, str | None],
    options: dict[str, Any],
) -> Iterator[tuple[Any, str | None]]:
    """Return the dataset or store that SRC names, and why its boxes cannot be read, if so.

    A VOC folder is a store as well, whose classes and sizes are known whatever its boxes are like.
    """
    from penstock.cli.sources import (
        described_dataset,
        described_form,
        errors_of_code,
        source_named,
    )
    from penstock.stores.folder.annotated_folder import looks_like_voc

    found, why_none = None, None
    try:
        found = described_dataset(src, split, columns, stores_only=fields, **options)
    except StoreError as error:
        if described_form(src) != "voc" or not looks_like_voc(Path(src)):
            raise
        why_none = str(error)
    if found is not None:
        yield found, None
        return
    with errors_of_code(src), source_named(src, split=split, **fields) as samples:
        yield samples, why_none


def _hint_at_parts(src: str, names: Sequence[str]) -> None:
    """Say it where the folders of a data set's parts were taken for classes."""
    if names and Path(src).is_dir() and {name.lower() for name in names} <= _PARTS:
        say(
            f"The classes are called {', '.join(names)}, as parts of a data set are. If they are "
            f"parts, name one of them: {Path(src) / names[0]}",
            err=True,
        )


def _balance(
    address: str,
    labels: Any,  # noqa: ANN401 - in any form
    names: Sequence[str] | None,
    choice: SamplerChoice,
    column: str | None,
) -> tuple[dict[str, Any], list[str], list[Panel]]:
    """Return the balance of classes before and after a sampler: as JSON, as lines, as a chart.

    Raises:
        ConfigError: there are no labels, or the sampler cannot be made of them.
    """
    from penstock.sampling.balance import balance_report
    from penstock.sampling.repeat_factor import RepeatFactorSampler

    if labels is None or not len(labels):
        raise ConfigError(
            f"{address}: its samples have no labels, so --sampler {choice.kind} has no classes to "
            "go by."
        )
    if isinstance(labels, np.ndarray) and labels.dtype.kind not in "biu":
        names = None  # names go by number; strings are names themselves
    sampler = choice.sampler_of(labels)
    report = balance_report(sampler, labels, class_names=names)
    chosen = {"name": str(choice.kind), **choice.settings}
    record: dict[str, Any] = {
        "address": address,
        "sampler": chosen,
        "balance": report.record(),
    }
    by = "" if column is None else f", by {column}"
    lines = [f"{address}{by}, sampler: {choice}", ""]
    if isinstance(sampler, RepeatFactorSampler):
        record["threshold"] = _about_threshold(sampler, report)
        lines += [record["threshold"], ""]
    return record, [*lines, *str(report).splitlines()], _balance_panels(report)


def _about_threshold(sampler: RepeatFactorSampler, report: BalanceReport) -> str:
    """Return how the threshold lies among the shares of images that have the classes."""
    frequencies = sampler.class_frequencies
    if not len(frequencies):
        return "No image has a class: none is repeated."
    least, most = int(np.argmin(frequencies)), int(np.argmax(frequencies))
    num_below = int(np.count_nonzero(frequencies < sampler.threshold))
    return (
        f"Classes are in {100 * frequencies[least]:.3g}% ({report.class_names[least]}) to "
        f"{100 * frequencies[most]:.3g}% ({report.class_names[most]}) of the images; "
        f"{num_below:,} of {len(frequencies):,} in less than the threshold, "
        f"{100 * sampler.threshold:g}%" + ("." if num_below else ": nothing changes.")
    )


def _balance_panels(report: BalanceReport) -> list[Panel]:
    """Return the share of each class before and after, of images and of objects."""
    from penstock.cli.stats_chart import Panel

    images, objects = report.images, report.objects
    order = np.argsort(-(objects or images).before, kind="stable")
    names = [report.class_names[n] for n in order.tolist()]

    def panel(what: str, label: str, before: Any, after: Any) -> Panel:  # noqa: ANN401
        values = {"before": before[order], "after": after[order]}
        return Panel(what, label, values, names, are_shares=True)

    if objects is None:
        shares = images.shares_before, images.shares_after
        return [panel("Samples", "share of all samples", *shares)]
    frequencies = report.frequencies_before, report.frequencies_after
    shares = objects.shares_before, objects.shares_after
    what = "objects" if report.has_boxes else "labels"
    return [
        panel("Images", "share of images that have the class", *frequencies),
        panel(what.capitalize(), f"share of all {what}", *shares),
    ]


def _panels(record: dict[str, Any], sizes: Sizes, objects: Objects | None) -> list[Panel]:
    """Return the counts of classes, the sizes, and what boxes are like."""
    from penstock.cli.stats_chart import Panel

    panels: list[Panel] = []
    if rows := record.get("classes"):
        values = {"records": np.array([row["count"] for row in rows])}
        if "images" in rows[0]:
            images = np.array([row["images"] for row in rows])
            values = {"objects": values["records"], "images with such objects": images}
        ratio = record["largest_to_smallest"]
        title = f"{len(rows):,} classes, " + (f"{ratio:,.1f} : 1" if ratio else "all empty")
        names = [row["name"] for row in rows]
        panels.append(Panel(title, f"{next(iter(values))} of a class", values, names))
    if sizes.shapes_px:
        shapes = np.array(sizes.shapes_px)
        values = {"height": shapes[:, 0], "width": shapes[:, 1]}
        panels.append(Panel("Sizes of images", "pixels", values, counted="images"))
    else:
        title = f"{amount(record['sizes']['total_bytes'])} in all"
        values = {"bytes": np.array(sizes.num_bytes)}
        panels.append(Panel(title, "bytes of a record", values, counted="records"))
    if objects is not None:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in record["objects"]["boxes_by_size"].items())
        for title, label, values, counted in (
            ("Boxes", "boxes per image", {"boxes": objects.boxes_per_image}, "images"),
            (kinds, "area of a box in square pixels", {"areas": objects.areas_px}, "boxes"),
        ):
            panels.append(Panel(title, label, values, counted=counted))
    return panels
