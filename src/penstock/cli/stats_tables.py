# SPDX-License-Identifier: Apache-2.0
"""What `penstock stats` prints."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.lines import amount, printable, say
from penstock.plural import counted
from penstock.sampling.balance_text import aligned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cli.dataset_stats import Classes, Sizes
    from penstock.cli.object_stats import Objects

__all__ = ["WIDTH", "print_tables"]

_FIRST_ROWS, _LAST_ROWS = 30, 10  # of more classes than these, the middle is left out
WIDTH: Final = 88  # columns, of what is wrapped


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
    if classes is None:
        lines = ["Its records have no labels."]
    else:
        counts = f"{counted(sizes.num_records, 'record')}, {counted(len(classes.ids), 'class')}"
        lines = [counts, "", *aligned(_class_rows(classes)), "", *_wrapped(_about_classes(classes))]
    lines += ["", *aligned([[printable(address), ""], *_size_rows(sizes)]), ""]
    lines += _wrapped(_about_sizes(sizes))
    if objects is not None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        *histograms, about = objects.lines(in_ascii=not encoding.lower().startswith("utf"))
        lines += ["", *histograms, *_wrapped(about)]
    if why_none is not None:
        lines += ["", f"Its boxes: {why_none}"]
    for line in lines:
        say(line)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _class_rows(classes: Classes) -> list[list[str]]:
    several = classes.num_images is not None
    counts = ("objects", "share", "images") if several else ("records", "share")
    rows = [["class", *counts]]
    first, last = _rows_shown(len(classes.ids))
    rows += [_class_row(classes, row) for row in first]
    if num_hidden := len(classes.ids) - len(first) - len(last):
        hidden = slice(len(first), len(first) + num_hidden)
        number = int(classes.counts[hidden].sum())
        share = f"{float(classes.shares[hidden].sum()):.2%}"
        rows.append([f"... {num_hidden:,} more", f"{number:,}", share, *[""] * several])
    return rows + [_class_row(classes, row) for row in last]


def _rows_shown(num_classes: int) -> tuple[range, range]:
    if num_classes <= _FIRST_ROWS + _LAST_ROWS:
        return range(num_classes), range(0)
    return range(_FIRST_ROWS), range(num_classes - _LAST_ROWS, num_classes)


def _class_row(classes: Classes, row: int) -> list[str]:
    cells = [f"{classes.counts[row]:,}", f"{classes.shares[row]:.2%}"]
    if classes.num_images is not None:
        cells.append(f"{classes.num_images[row]:,}")
    return [printable(classes.names[row]), *cells]


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


def _size_rows(sizes: Sizes) -> list[list[str]]:
    num_read = len(sizes.num_bytes)
    is_all = num_read == sizes.num_records
    rows = [["records", f"{sizes.num_records:,}"]]
    if num_read:
        total = amount(sizes.total_bytes)
        least, most = amount(int(sizes.num_bytes.min())), amount(int(sizes.num_bytes.max()))
        mean = amount(float(sizes.num_bytes.mean()))
        rows.append(["size of all" if is_all else "size of all, estimated", total])
        rows.append(["size of a record, min / mean / max", f"{least} / {mean} / {most}"])
    if len(sizes.heights_px):
        for what, values in (("height", sizes.heights_px), ("width", sizes.widths_px)):
            name = f"{what} of an image in pixels, min / median / max"
            rows.append([name, _range(values, "median")])
    if sizes.num_unreadable:
        rows.append(["images whose header cannot be read", f"{sizes.num_unreadable:,}"])
    if sizes.num_damaged:
        rows.append(["records that cannot be read", f"{sizes.num_damaged:,}"])
    return rows


def _about_sizes(sizes: Sizes) -> str:
    num_read = len(sizes.num_bytes)
    is_all = num_read == sizes.num_records
    read = "all records" if is_all else f"{counted(num_read, 'record')}, spread evenly"
    advice = " `penstock check` lists those that cannot be read." if sizes.num_damaged else ""
    return (
        f"Sizes from {read}: bytes of images, arrays, strings and bytes; pixels from the images' "
        f"headers.{advice}"
    )
