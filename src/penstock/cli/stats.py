# SPDX-License-Identifier: Apache-2.0
"""`penstock stats`: classes, counts, imbalance and sizes of a folder or store."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast

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
from penstock.cli.sampler_options import (
    Alpha,
    Beta,
    Exact,
    NumSamples,
    SamplerChoice,
    SamplerName,
    Seed,
    Threshold,
)
from penstock.cli.stats_tables import print_tables
from penstock.errors import ConfigError, StoreError
from penstock.lines import say, say_json
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cli.dataset_stats import Classes, Sizes
    from penstock.cli.object_stats import Objects
    from penstock.stores.index import Index
    from penstock.stores.store import Store
    from penstock.vision.datasets.annotated import AnnotatedImages
    from penstock.vision.datasets.rules import BadBoxes

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
    sampler: SamplerName = None,
    alpha: Alpha = None,
    beta: Beta = None,
    threshold: Threshold = None,
    num_samples: NumSamples = None,
    exact: Exact = False,
    seed: Seed = None,
    *,
    list_columns: Mapping[str, Any],
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
    from penstock.cli.dataset_stats import count_classes, measure
    from penstock.cli.object_stats import count_objects
    from penstock.cli.passed_over import tell_passed_over
    from penstock.cli.stats_record import record_of

    if png is not None:
        import matplotlib  # noqa: F401 - where it is missing, the error names the extra

        check_output("--png", png)
    fields = {"image_field": image_field, "label_field": label_field, "key_field": key_field}
    by_field = column is not None or class_of is not ClassOf.all
    # What is balanced or split by is what training sees; objects alone are counted as they are.
    boxes: BadBoxes = "fix" if by_field else "keep"
    with _opened(src, split, list_columns, fields, column, boxes) as source:
        _hint_at_parts(src, source)
        tell_passed_over(src)
        if by_field:
            tell_bad_boxes(source.objects if source.dataset is None else source.dataset)
            source = source.by(column, class_of)
        if sampler is not None:
            _show_balance(source, choice, png, as_json=as_json)
            return
        classes = count_classes(source.counted)
        with Bar() as bar:
            sizes = measure(
                source.store,
                _SAMPLED if sample is None else sample,
                lambda done, of: bar.show(done, of, "read for sizes"),
            )
        address = source.address
    counted = None if source.objects is None else count_objects(source.objects)
    if png is not None:
        _draw(png, address, classes, sizes, counted)
    if as_json:
        record = record_of(address, classes, sizes, counted, source.why_none)
        if column is not None:
            record["column"] = column
        say_json(record)
    else:
        print_tables(address, classes, sizes, counted, source.why_none)
    if png is not None:  # beside JSON nothing is on stdout
        say(f"{png}: chart", err=as_json)


class _Source(NamedTuple):
    """What is counted.

    Attributes:
        store: With classes and sizes.
        objects: Annotations with boxes; None where there are none.
        why_none: Why boxes that are there cannot be read.
        name: `module:name`, if it was named so.
        dataset: What it named, which may know its labels where a store would read them.
        labels: Of its samples, where a field of their objects was asked for, or one object of each.
        class_names: Of these labels.
        column: The field.
    """

    store: Store
    objects: AnnotatedImages | None = None
    why_none: str | None = None
    name: str | None = None
    dataset: Any = None
    labels: Any = None
    class_names: tuple[str, ...] | None = None
    column: str | None = None

    @property
    def address(self) -> str:
        return without_password(self.name or self.store.address)

    @property
    def counted(self) -> Index:
        """Labels and class names to count, and the rest of the store's."""
        if self.labels is None:
            return self.store.index
        return replace(self.store.index, labels=self.labels, class_names=self.class_names or ())

    def by(self, column: str | None, class_of: ClassOf) -> _Source:
        """Return it with the labels of one field, of all objects or one of each sample."""
        from penstock.cli.named_dataset import labels_by
        from penstock.stores.dataset import StoreDataset

        if self.why_none is not None:
            raise StoreError(self.why_none)
        found = self.objects if self.dataset is None else self.dataset
        dataset = StoreDataset(self.store) if found is None else found
        labels, names = labels_by(dataset, column, class_of)
        return self._replace(objects=None, labels=labels, class_names=names, column=column)


@contextlib.contextmanager
def _opened(
    src: str,
    split: str | None,
    columns: Mapping[str, Any],
    fields: Mapping[str, str | None],
    column: str | None,
    bad_boxes: BadBoxes,
) -> Iterator[_Source]:
    """Return what SRC names.

    A VOC folder is a store as well, whose classes and sizes are known whatever its boxes are like.
    """
    from penstock.cli.named_dataset import attributes_for, described_dataset
    from penstock.cli.sources import source_named

    is_voc = _is_voc(src)
    found: Any = None
    why_none = None
    try:
        found = described_dataset(
            src, split, columns, bad_boxes=bad_boxes, attributes=attributes_for(column)
        )
    except StoreError as error:
        if not is_voc:
            raise
        why_none = str(error)
    if found is not None and not is_voc:
        yield _source_of(found)
        return
    with _errors_of(src), source_named(src, split=split, **fields) as samples:
        if is_voc:
            yield _Source(samples, found, why_none)
        else:
            yield _source_of(samples, src)


def _errors_of(src: str) -> contextlib.AbstractContextManager[None]:
    """Let what a module of the user's raises be told in a line."""
    from penstock.cli.reasons import errors_in_code
    from penstock.cli.sources import names_a_dataset

    return errors_in_code(src) if names_a_dataset(src) else contextlib.nullcontext()


def _is_voc(src: str) -> bool:
    from penstock.cli.named_dataset import folder_form
    from penstock.cli.sources import is_store, names_a_dataset
    from penstock.stores.folder.voc import looks_like_voc

    if names_a_dataset(src) or is_store(src) or not looks_like_voc(Path(src)):
        return False
    return folder_form(Path(src)) == "voc"


def _source_of(samples: Any, name: str | None = None) -> _Source:  # noqa: ANN401
    """Return a source; of a dataset over a store that, as transforms are nothing to count by."""
    from penstock.cli.dataset_store import DatasetStore
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.store import Store

    if isinstance(samples, Store):
        return _Source(samples)
    if not isinstance(samples, StoreDataset):
        return _Source(DatasetStore(samples, name or ""), dataset=samples)
    has_boxes = hasattr(samples, "box_counts")  # as `AnnotatedImages` has, which needs OpenCV
    return _Source(samples.store, cast("Any", samples) if has_boxes else None, name=name)


def _hint_at_parts(src: str, source: _Source) -> None:
    """Say it where the folders of a data set's parts were taken for classes."""
    names = source.store.index.class_names or () if Path(src).is_dir() else ()
    if names and {name.lower() for name in names} <= _PARTS:
        say(
            f"The classes are called {', '.join(names)}, as parts of a data set are. If they are "
            f"parts, name one of them: {Path(src) / names[0]}",
            err=True,
        )


def _show_balance(
    source: _Source, choice: SamplerChoice, png: Path | None, *, as_json: bool
) -> None:
    from penstock.cli.balance_stats import show_balance
    from penstock.data.labels.known import class_names_of, known_labels

    labels, names = source.labels, source.class_names
    if labels is None and source.dataset is not None:
        labels, names = known_labels(source.dataset), class_names_of(source.dataset)
    if labels is None:
        index = source.store.index
        labels, names = index.labels, names or index.class_names or None
    show_balance(
        source.address, labels, names, choice, column=source.column, png=png, as_json=as_json
    )


def _draw(
    png: Path,
    address: str,
    classes: Classes | None,
    sizes: Sizes,
    objects: Objects | None,
) -> None:
    from penstock.cli.chart import draw_chart

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # shown as a box
        draw_chart(png, address, classes, sizes, objects)
