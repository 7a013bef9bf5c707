# SPDX-License-Identifier: Apache-2.0
"""`penstock split`: lists of train, val and test, each with its share of every class."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import numpy as np
import typer

from penstock.cli import options
from penstock.cli.terminal import writing
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, StoreError
from penstock.lines import counted, say
from penstock.opening import MAX_ANNOTATION_BYTES, read_file
from penstock.sampling.balance import aligned
from penstock.sampling.stratified import stratified_parts
from penstock.whole_file import refuse_special, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_PART: Final = re.compile(r"([\w][\w.-]*)=(\d*\.?\d+)")
_MOST_ROWS: Final = 25  # classes in the table, the rarest


@options.takes(list_columns=options.LIST_OPTIONS)
def split(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A VOC folder, a folder of class folders, or a txt list."
        ),
    ],
    into: Annotated[
        str,
        typer.Option(
            "--into",
            metavar="NAME=SHARE,...",
            help="The parts, as train=0.8,val=0.1,test=0.1; shares sum to 1.",
        ),
    ],
    stratify: Annotated[
        bool, typer.Option("--stratify", help="Give each part its share of every class.")
    ] = False,
    column: options.Column = None,
    class_of: options.ClassOfOption = options.ClassOf.all,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Decides what goes where.")] = 0,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Where lists of paths go; a VOC folder's go into its own ImageSets/Main.",
            show_default="beside the list, or into the folder",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace lists that are there.")
    ] = False,
    *,
    list_columns: dict[str, Any],
) -> None:
    """Split a dataset into lists of train, val and test.

    A list is what the dataset's own reader takes: ImageSets/Main/NAME.txt in a VOC folder, a list
    NAME.txt of paths and classes in a folder of class folders, lines of the txt list beside it.
    With --to they go elsewhere, and their reader needs the folder that paths start from as root=.
    All lines of an image go into one part. The same seed gives the same parts. Lists of other
    parts that are there stay: those with images of the new ones are named.
    """
    if not stratify and (column is not None or class_of is not options.ClassOf.all):
        raise ConfigError("--column and --class-of say what --stratify goes by: add --stratify.")
    shares = _shares(into)
    units = _units(src, column, class_of, list_columns)
    if to is not None:
        if units.root is None:
            raise ConfigError("--to is for lists of paths; VOC's stand in its ImageSets/Main.")
        note = f"Paths start from {units.root}: give the list's reader root={str(units.root)!r}"
        units = units._replace(folder=to, notes=(*units.notes, note))
    paths = [units.folder / f"{name}.txt" for name in shares]
    for path in paths:
        if path.exists() and path.samefile(src):
            raise ConfigError(f"{path} is the list that is split: call the part something else.")
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} is there already. Replace it with --overwrite.")
        with writing("the list", path):
            refuse_special(path)
    no_labels = RaggedArray(np.empty(0, np.int64), np.zeros(len(units.lines) + 1, np.int64))
    parts = stratified_parts(units.labels if stratify else no_labels, list(shares.values()), seed)
    texts = []
    for number in range(len(paths)):
        places = (parts == number).nonzero()[0]
        text = "".join(f"{line}\n" for place in places for line in units.lines[place])
        try:
            texts.append(text.encode())
        except UnicodeEncodeError as error:
            raise StoreError(
                f"{text[error.start - 20 : error.end]!r} cannot be in a list: it is not UTF-8, as "
                "the name of a file from another system may be. Rename the file."
            ) from error
    for path, data in zip(paths, texts, strict=True):
        with writing("the list", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
    for line in _of_other_splits(units, paths, src):
        say(line, err=True)
    for line in [*_table(units, parts, tuple(shares)), *map(str, paths), *units.notes]:
        say(line)


class _Units(NamedTuple):
    """What is dealt out: images, each with the lines that stand for it."""

    folder: Path  # of the lists
    lines: Sequence[Sequence[str]]  # of each image
    labels: NDArray[Any] | RaggedArray  # class or classes of each
    class_names: Sequence[str]  # by number
    root: Path | None = None  # where the paths in lines start from
    notes: tuple[str, ...] = ()  # what a reader of the lists needs


def _shares(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or match[1] in found or not float(match[2]):
            raise ConfigError(
                f"--into {text}: {part.strip()!r} is no part. Give NAME=SHARE for each, as "
                "train=0.8,val=0.1,test=0.1; each name once, each share above 0."
            )
        found[match[1]] = float(match[2])
    if not math.isclose(sum(found.values()), 1, abs_tol=1e-6):
        raise ConfigError(f"--into {text}: the shares sum to {sum(found.values()):g}, not to 1.")
    return found


def _of_other_splits(units: _Units, paths: Sequence[Path], src: Path) -> Iterator[str]:
    """Say which other lists of the folder have images of the new parts: a test set that leaks."""
    known = {line for lines in units.lines for line in lines}
    for path in sorted(units.folder.glob("*.txt")):
        if path in paths or path.resolve() == src.resolve() or not path.is_file():
            continue
        lines = read_file(path, MAX_ANNOTATION_BYTES).decode("utf-8", "replace").splitlines()
        if units.root is None:  # in VOC's lists of a class 1 or -1 comes after the name
            lines = [line if line in known else line.split(" ")[0] for line in lines]
        if count := sum(line in known for line in lines):
            yield (
                f"{path} is of another split: {count:,} of its {counted(len(lines), 'image')} are "
                "in the new ones too."
            )


def _units(
    src: Path, column: str | None, class_of: options.ClassOf, columns: dict[str, Any]
) -> _Units:
    from penstock.cli.sources import attributes_for, described_dataset, described_form, labels_by
    from penstock.vision import ImageFolder

    form = described_form(str(src), columns)
    if form in ("landmarks", "image-list"):
        return _of_list(src, form, column, class_of, columns)
    dataset: Any
    notes: tuple[str, ...] = ()
    if form == "voc":
        attributes = attributes_for(column)
        dataset = described_dataset(str(src), columns=columns, attributes=attributes)
        options.warn_of_bad_boxes(dataset)
        folder, root = src / "ImageSets" / "Main", None
        lines = [[key] for key in dataset.store.keys]
    elif form is None and src.is_dir():
        dataset = ImageFolder(src, allow_empty=True)
        names: Sequence[Any] = dataset.classes
        if any(name.split() != [name] for name in names):  # it would be taken for part of the path
            notes = (
                f"Classes are numbers, as names have blanks: ImageList(..., class_names={names})",
            )
            names = range(len(names))
        folder = root = src
        lines = [
            [f"{Path(path).relative_to(src).as_posix()} {names[number]}"]
            for path, number in dataset.samples
        ]
    else:
        raise StoreError(
            f"{src} is not a VOC folder, a folder of class folders, or a txt list, which "
            "`penstock split` takes. `penstock convert --to voc` makes a VOC folder of others."
        )
    labels, class_names = labels_by(dataset, column, class_of)
    return _Units(folder, lines, labels, class_names or (), root, notes)


def _of_list(
    src: Path, form: str, column: str | None, class_of: options.ClassOf, columns: dict[str, Any]
) -> _Units:
    """Return the images of a list, in the order of their first lines."""
    from penstock.data.labels.values import labels_by_objects
    from penstock.vision.annotations.lists import CLASS_COLUMN, IMAGE_LIST_COLUMNS, landmark_lines
    from penstock.vision.annotations.reading import numbered_lines

    root, named = columns.get("root"), columns.get("classes", ())
    if column is not None and column not in named:
        has = ", ".join(named) or "none"
        raise ConfigError(f"--column {column} is none of the columns that --classes names: {has}.")
    if form == "image-list":
        columns = {**columns, **IMAGE_LIST_COLUMNS}
        named = columns["classes"]
    wanted = column or (CLASS_COLUMN if CLASS_COLUMN in named else next(iter(named), ""))
    keys, said = [], []
    for image in landmark_lines(src, **columns):
        (found,) = image.objects
        keys.append(image.key)
        said.append({**found.extra, CLASS_COLUMN: found.class_name}.get(wanted, ""))
    names, codes = np.unique(said, return_inverse=True)
    lines: dict[str, list[str]] = {}
    classes: dict[str, list[int]] = {}
    for key, (_, line), code in zip(keys, numbered_lines(src), codes.tolist(), strict=True):
        lines.setdefault(key, []).append(line)
        classes.setdefault(key, []).append(code)
    which: Any = class_of.value
    labels = labels_by_objects(RaggedArray.of(classes.values()), which)
    return _Units(src.parent, list(lines.values()), labels, names.tolist(), root or src.parent)


def _table(units: _Units, parts: NDArray[Any], names: Sequence[str]) -> list[str]:
    """Return a row for each class, the rarest first, and one of all images."""
    labels = units.labels
    values = labels.values if isinstance(labels, RaggedArray) else labels
    rows_of = np.diff(labels.offsets) if isinstance(labels, RaggedArray) else 1
    images = np.repeat(np.arange(len(units.lines)), rows_of)
    pairs = np.unique(np.stack((values, images)), axis=1)  # an image once for each of its classes
    classes, codes = np.unique(pairs[0], return_inverse=True)
    counts = np.zeros((len(classes), len(names)), np.int64)
    np.add.at(counts, (codes, parts[pairs[1]]), 1)
    shown = np.argsort(counts.sum(axis=1), kind="stable")[:_MOST_ROWS]
    known = units.class_names
    titles = [known[c] if 0 <= c < len(known) else str(c) for c in classes[shown].tolist()]
    sizes = np.bincount(parts, minlength=len(names))
    rows = zip([*titles, "images"], [*counts[shown], sizes], strict=True)
    cells = [[title, *(f"{n:,}" for n in (*row.tolist(), row.sum()))] for title, row in rows]
    more = len(classes) - len(shown)
    table = aligned([["class", *names, "all"], *cells])
    return [*table, f"({counted(more, 'more class')})"] if more else table
