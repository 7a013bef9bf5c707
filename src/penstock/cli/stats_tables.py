# SPDX-License-Identifier: Apache-2.0
"""What `penstock stats` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.lines import amount, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cli.census import Classes, Sizes
    from penstock.cli.object_census import Objects

__all__ = ["print_tables"]

_FIRST_ROWS, _LAST_ROWS = 30, 10  # of more classes than these, the middle is left out


def print_tables(
    address: str,
    classes: Classes | None,
    sizes: Sizes,
    objects: Objects | None,
    why_none: str | None,
) -> None:
    """Print the counts of classes, the sizes, and what is known of boxes.

    Args:
        address: Of what was counted.
        classes: None where there are no labels.
        sizes: Of the records.
        objects: None where there are no boxes.
        why_none: Why boxes that are there cannot be read.
    """
    console = Console()
    if not console.is_terminal:  # nothing is cut off in a file
        console = Console(width=max(console.width, 120))
    if classes is None:
        console.print("Its records have no labels.")
    else:
        console.print(_class_table(classes, sizes.num_records))
        console.print(_about_classes(classes) + "\n", highlight=False)
    console.print(_size_table(address, sizes))
    console.print(_about_sizes(sizes), highlight=False)
    if objects is not None:
        lines = objects.lines(in_ascii=not console.encoding.startswith("utf"))
        console.print("\n" + "\n".join(lines), highlight=False, markup=False)
    if why_none is not None:
        console.print(f"\nIts boxes: {printable(why_none)}", highlight=False, markup=False)


def _class_table(classes: Classes, num_records: int) -> Table:
    several = classes.num_images is not None
    table = Table(
        title=f"{num_records:,} records, {len(classes.ids):,} classes", title_justify="left"
    )
    table.add_column("class", overflow="fold")
    for heading in ("objects", "share", "images") if several else ("records", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    first, last = _rows_shown(len(classes.ids))
    for row in first:
        _add_class(table, classes, row)
    if num_hidden := len(classes.ids) - len(first) - len(last):
        hidden = slice(len(first), len(first) + num_hidden)
        counts = int(classes.counts[hidden].sum())
        share = f"{float(classes.shares[hidden].sum()):.2%}"
        table.add_row(f"… {num_hidden:,} more", f"{counts:,}", share, *[""] * several)
    for row in last:
        _add_class(table, classes, row)
    return table


def _rows_shown(num_classes: int) -> tuple[range, range]:
    if num_classes <= _FIRST_ROWS + _LAST_ROWS:
        return range(num_classes), range(0)
    return range(_FIRST_ROWS), range(num_classes - _LAST_ROWS, num_classes)


def _add_class(table: Table, classes: Classes, row: int) -> None:
    cells = [f"{classes.counts[row]:,}", f"{classes.shares[row]:.2%}"]
    if classes.num_images is not None:
        cells.append(f"{classes.num_images[row]:,}")
    table.add_row(Text(printable(classes.names[row])), *cells)


def _about_classes(classes: Classes) -> str:
    if classes.imbalance is None or classes.effective_classes is None:
        return "All classes are empty."
    num_filled = len(classes.ids) - classes.num_empty
    empty = f" Empty classes: {classes.num_empty:,}." if classes.num_empty else ""
    text = (
        f"Largest to smallest class: {classes.imbalance:,.1f} : 1.{empty} Effective classes: "
        f"{classes.effective_classes:,.1f} of {num_filled:,}, the number of equally large classes "
        "with the same entropy, exp(-sum of p ln p)."
    )
    if classes.objects_per_image is None:
        return text
    objects = classes.objects_per_image
    return (
        f"{text} Objects per image: {_range(objects, 'mean')} (min / mean / max). "
        f"Images without any: {int((objects == 0).sum()):,}."
    )


def _range(values: NDArray[np.int64], middle: str) -> str:
    """Return min, middle and max of values that are there."""
    if middle == "mean":
        return f"{values.min():,} / {values.mean():,.1f} / {values.max():,}"
    return f"{values.min():,} / {np.median(values):,.0f} / {values.max():,}"


def _size_table(address: str, sizes: Sizes) -> Table:
    num_read = len(sizes.num_bytes)
    is_all = num_read == sizes.num_records
    title = Text(printable(address), overflow="fold")
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_row("records", f"{sizes.num_records:,}")
    if num_read:
        total = amount(sizes.total_bytes)
        least, most = amount(int(sizes.num_bytes.min())), amount(int(sizes.num_bytes.max()))
        mean = amount(float(sizes.num_bytes.mean()))
        table.add_row("size of all" if is_all else "size of all, estimated", total)
        table.add_row("size of a record, min / mean / max", f"{least} / {mean} / {most}")
    if len(sizes.heights_px):
        for what, values in (("height", sizes.heights_px), ("width", sizes.widths_px)):
            row = f"{what} of an image in pixels, min / median / max"
            table.add_row(row, _range(values, "median"))
    if sizes.num_unreadable:
        table.add_row("images whose header cannot be read", f"{sizes.num_unreadable:,}")
    if sizes.num_damaged:
        table.add_row("records that cannot be read", f"{sizes.num_damaged:,}")
    return table


def _about_sizes(sizes: Sizes) -> str:
    num_read = len(sizes.num_bytes)
    is_all = num_read == sizes.num_records
    read = "all records" if is_all else f"{num_read:,} records, spread evenly"
    advice = " `penstock check` lists those that cannot be read." if sizes.num_damaged else ""
    return (
        f"Sizes from {read}: bytes of images, arrays, strings and bytes; pixels from the images' "
        f"headers.{advice}"
    )
