# SPDX-License-Identifier: Apache-2.0
"""`penstock split`: lists of train, val and test, each with its share of every class."""

from __future__ import annotations

import collections
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from penstock.cli.arguments import ClassOf, ClassOfOption, Column, tell_bad_boxes
from penstock.cli.list_options import takes_list_options
from penstock.cli.outputs import writing
from penstock.errors import ConfigError, StoreError
from penstock.lines import say
from penstock.opening import MAX_ANNOTATION_BYTES, read_file
from penstock.plural import counted
from penstock.whole_file import refuse_special, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.data.ragged import RaggedArray

__all__ = ["split"]

_PART: Final = re.compile(r"([\w][\w.-]*)=(\d*\.?\d+)")
_MOST_ROWS: Final = 25  # classes in the table, the rarest


@takes_list_options
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
    column: Column = None,
    class_of: ClassOfOption = ClassOf.all,
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
    list_columns: Mapping[str, Any],
) -> None:
    """Split a data set into lists of train, val and test.

    A list is what the data set's own reader takes: ImageSets/Main/NAME.txt in a VOC folder, a list
    NAME.txt of paths and classes in a folder of class folders, lines of the txt list beside it.
    With --to they go elsewhere, and their reader is to be told where paths start from. All lines of
    an image go into one part. The same seed gives the same parts. Lists of other parts that are
    there stay: those with images of the new ones are named.
    """
    from penstock.sampling.stratified import stratified_parts

    if not stratify and (column is not None or class_of is not ClassOf.all):
        raise ConfigError("--column and --class-of say what --stratify goes by: add --stratify.")
    shares = _shares(into)
    units = _units(src, column, class_of, list_columns)
    if to is not None:
        units = _moved(units, to)
    paths = [units.folder / f"{name}.txt" for name in shares]
    _refuse_to_replace(paths, src, overwrite=overwrite)
    for line in (line for lines in units.lines for line in lines):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise StoreError(
                f"{line!r} cannot be in a list: it is not UTF-8, as the name of a file from "
                "another system may be. Rename the file."
            ) from error
    labels = units.labels if stratify else _no_labels(len(units.lines))
    parts = stratified_parts(labels, list(shares.values()), seed)
    for number, path in enumerate(paths):
        lines = (line for place in (parts == number).nonzero()[0] for line in units.lines[place])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}.") from error
    for line in _of_other_splits(units, parts, paths, src):
        say(line, err=True)
    for line in [*_table(units, parts, tuple(shares)), *map(str, paths), *units.notes]:
        say(line)


class _Units(NamedTuple):
    """What is dealt out: images, each with the lines that stand for it.

    Attributes:
        folder: Where the lists go.
        lines: Of each image.
        labels: The class, or classes, of each.
        class_names: By number.
        root: Where the paths in lines start from; None where there are none.
        notes: What a reader of the lists has to know.
    """

    folder: Path
    lines: Sequence[Sequence[str]]
    labels: NDArray[Any] | RaggedArray
    class_names: Sequence[str]
    root: Path | None
    notes: tuple[str, ...] = ()


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


def _refuse_to_replace(paths: Iterable[Path], src: Path, *, overwrite: bool) -> None:
    for path in paths:
        if path.exists() and src.exists() and path.samefile(src):
            raise ConfigError(f"{path} is the list that is split: call the part something else.")
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} is there already. Replace it with --overwrite.")
        with writing("the list", path):
            refuse_special(path)


def _of_other_splits(
    units: _Units, parts: NDArray[Any], paths: Sequence[Path], src: Path
) -> Iterator[str]:
    """Say which other lists of the folder have images of the new parts: a test set that leaks."""
    part_of = {line: part for lines, part in zip(units.lines, parts, strict=True) for line in lines}
    for path in sorted(units.folder.glob("*.txt")):
        if path in paths or path.resolve() == src.resolve():
            continue
        try:
            data = read_file(path, MAX_ANNOTATION_BYTES)
        except OSError:  # no list: a folder, a FIFO
            continue
        lines = data.decode("utf-8", "replace").splitlines()
        if units.root is None:  # in VOC's lists of a class 1 or -1 comes after the name
            lines = [line if line in part_of else line.split(" ")[0] for line in lines]
        found = collections.Counter(part_of[line] for line in lines if line in part_of)
        for part, count in found.most_common(1):
            yield (
                f"{path} is of another split: {count:,} of its {counted(len(lines), 'image')} are "
                f"in {paths[part].name} too."
            )


def _units(
    src: Path, column: str | None, class_of: ClassOf, list_columns: Mapping[str, Any]
) -> _Units:
    from penstock.cli.named_dataset import (
        attributes_for,
        described_dataset,
        folder_form,
        is_landmark_list,
    )

    if src.suffix.lower() == ".txt" and src.is_file():
        if is_landmark_list(src, list_columns):
            return _of_landmarks(src, column, class_of, list_columns)
        return _of_images(src, column, list_columns)
    form = folder_form(src) if src.is_dir() else None
    if form == "voc":
        found = described_dataset(
            str(src),
            columns=list_columns,
            attributes=attributes_for(column),
        )
        keys = [[key] for key in found.store.keys]  # type: ignore[union-attr]
        return _of_dataset(found, src / "ImageSets" / "Main", keys, column, class_of)
    if form is not None or not src.is_dir():
        raise StoreError(
            f"{src} is not a VOC folder, a folder of class folders, or a txt list, which "
            "`penstock split` takes. `penstock convert --to voc` makes a VOC folder of others."
        )
    return _of_classes(src, column, class_of)


def _of_dataset(
    dataset: Any,  # noqa: ANN401
    folder: Path,
    lines: Sequence[Sequence[str]],
    column: str | None,
    class_of: ClassOf,
    root: Path | None = None,
    *notes: str,
) -> _Units:
    from penstock.cli.named_dataset import labels_by

    tell_bad_boxes(dataset)
    labels, names = labels_by(dataset, column, class_of)
    return _Units(folder, lines, labels, names or (), root, notes)


def _of_classes(src: Path, column: str | None, class_of: ClassOf) -> _Units:
    from penstock.vision.datasets.classification import ImageFolder

    dataset = ImageFolder(src, allow_empty=True)
    names: Sequence[Any] = dataset.classes
    notes: tuple[str, ...] = ()
    if any(name.split() != [name] for name in names):  # it would be taken for a part of the path
        notes = (f"Classes are numbers, as names have blanks: ImageList(..., class_names={names})",)
        names = range(len(names))
    lines = [
        [f"{Path(path).relative_to(src).as_posix()} {names[number]}"]
        for path, number in dataset.samples
    ]
    return _of_dataset(dataset, src, lines, column, class_of, src, *notes)


def _of_landmarks(
    src: Path, column: str | None, class_of: ClassOf, list_columns: Mapping[str, Any]
) -> _Units:
    from penstock.vision.annotations.lists import CLASS_COLUMN, read_landmark_list

    classes = list_columns.get("classes", ())
    wanted = column or (CLASS_COLUMN if CLASS_COLUMN in classes else next(iter(classes), None))
    if column is not None and column not in classes:
        has = ", ".join(classes) or "none"
        raise ConfigError(f"--column {column} is none of the columns that --classes names: {has}.")
    images = read_landmark_list(src, **list_columns)
    said = [
        {**image.objects[0].extra, CLASS_COLUMN: image.objects[0].class_name}.get(wanted or "", "")
        for image in images
    ]
    root = list_columns.get("root")
    return _of_lines(src, [image.key for image in images], said, root, class_of)


def _of_images(src: Path, column: str | None, list_columns: Mapping[str, Any]) -> _Units:
    from penstock.vision.annotations.lists import read_labelled_paths

    if column is not None:
        raise ConfigError(
            f"--column is for XML and landmark lists; {src} has a class in each line."
        )
    root = list_columns.get("root")
    rows = read_labelled_paths(src, list_columns.get("separator"), root)
    return _of_lines(src, [path for _, path, _ in rows], [label for _, _, label in rows], root)


def _of_lines(
    src: Path,
    keys: Sequence[str],
    said: Sequence[str],
    root: Path | None,
    class_of: ClassOf = ClassOf.all,
) -> _Units:
    """Return the images of a list, in the order of their first lines."""
    import numpy as np

    from penstock.data.labels.objects import labels_by_objects
    from penstock.data.ragged import RaggedArray
    from penstock.vision.annotations.reading import numbered_lines

    names, codes = np.unique(list(said), return_inverse=True)
    rows: dict[str, tuple[list[str], list[int]]] = {}
    lines = (line for _, line in numbered_lines(src))
    for key, line, code in zip(keys, lines, codes.tolist(), strict=True):
        of_image = rows.setdefault(key, ([], []))
        of_image[0].append(line)
        of_image[1].append(code)
    labels = labels_by_objects(RaggedArray.of(row for _, row in rows.values()), class_of.value)
    lines_of = [of_image for of_image, _ in rows.values()]
    return _Units(src.parent, lines_of, labels, names.tolist(), root or src.parent)


def _moved(units: _Units, folder: Path) -> _Units:
    """Return the same with lists that go into another folder than their paths start from."""
    if units.root is None:
        raise ConfigError("--to is for lists of paths; VOC's stand in its ImageSets/Main.")
    note = f"Paths start from {units.root}: give the list's reader root={str(units.root)!r}"
    return units._replace(folder=folder, notes=(*units.notes, note))


def _no_labels(count: int) -> RaggedArray:
    import numpy as np

    from penstock.data.ragged import RaggedArray

    return RaggedArray(np.empty(0, np.int64), np.zeros(count + 1, np.int64))


def _table(units: _Units, parts: NDArray[Any], names: Sequence[str]) -> list[str]:
    """Return a row for each class, the rarest first, and one of all images."""
    import numpy as np

    from penstock.data.ragged import RaggedArray

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
    table = [["class", *names, "all"]]
    table += [
        [title, *(f"{n:,}" for n in (*row, sum(row)))]
        for title, row in zip(titles, counts[shown].tolist(), strict=True)
    ]
    sizes = np.bincount(parts, minlength=len(names)).tolist()
    table.append(["images", *(f"{n:,}" for n in (*sizes, sum(sizes)))])
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table
    ]
    more = len(classes) - len(shown)
    return [*lines, f"({counted(more, 'more class')})"] if more else lines
