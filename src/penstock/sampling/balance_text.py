# SPDX-License-Identifier: Apache-2.0
"""A report of class balance as text: a table, and a verdict in words."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.plural import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.sampling.balance import BalanceReport, ClassCounts

_FIRST_ROWS, _LAST_ROWS = 15, 10  # of more classes than these, the middle is left out
_WIDTH: Final = 88  # columns, of what is wrapped
_EVEN: Final = 1.25  # largest to smallest: no imbalance to speak of
_COMMON: Final = 0.5  # of all images, or of all objects
_HARDLY: Final = 0.1  # of the way to equal classes: below it, training would not show it
_LITTLE: Final = 0.3
#: Up to which part of the way to equal classes (`ClassCounts.progress`) which words hold.
_WORDS: Final = (
    (-0.02, "gets worse"),
    (0.02, "does not change"),
    (_HARDLY, "hardly changes"),
    (_LITTLE, "improves a little"),
    (0.9, "improves"),
    (0.999, "is nearly even now"),
    (math.inf, "is even now"),
)


def table_of(report: BalanceReport) -> str:
    """Return the report as text: a line of what it is, the classes, sums, and the verdict."""
    lines = [
        f"{counted(len(report.classes), 'class')}, {counted(report.num_samples, 'sample')}, before "
        f"and after {report.sampler}: an epoch of {report.epoch_size:,}",
        "",
        *aligned(_class_rows(report)),
        "",
        *aligned(_sum_rows(report)),
        "",
    ]
    return "\n".join([*lines, *textwrap.wrap(report.verdict, _WIDTH)])


def _class_rows(report: BalanceReport) -> list[list[str]]:
    """Return the header and a row for each class shown, the largest class first."""
    images, objects = report.images, report.objects
    order = np.argsort(-(objects or images).before, kind="stable").tolist()
    rows = []
    for n in order:
        row = [_name(report, n), f"{images.before[n]:,}", f"{images.after[n]:,}"]
        if objects is None:
            row += [f"{report.repeats[n]:.2f}", *_shares(images, n)]
        else:
            row += [_percent(report.frequencies_before[n]), _percent(report.frequencies_after[n])]
            row += [f"{objects.before[n]:,}", f"{objects.after[n]:,}", *_shares(objects, n)]
        rows.append(row)
    header = ["class", "samples", "shown", "times", "share", "-> after"]
    if objects is not None:
        header = ["class", "images", "shown", "of all", "-> after"]
        header += [_labels(report), "shown", "share", "-> after"]
    num_hidden = len(rows) - _FIRST_ROWS - _LAST_ROWS
    if num_hidden > 1:
        rows[_FIRST_ROWS:-_LAST_ROWS] = [[f"... {num_hidden:,} more", *[""] * (len(header) - 1)]]
    return [header, *rows]


def _shares(counts: ClassCounts, n: int) -> list[str]:
    return [_percent(counts.shares_before[n]), _percent(counts.shares_after[n])]


def _labels(report: BalanceReport) -> str:
    """What images have any number of."""
    return "objects" if report.has_boxes else "labels"


def _sum_rows(report: BalanceReport) -> list[list[str]]:
    rows = [["", "before", "after"]]
    levels = [("", report.images)]
    if report.objects is not None:
        levels = [("images: ", report.images), (f"{_labels(report)}: ", report.objects)]
    for what, counts in levels:
        ratios = _ratio_text(counts.ratio_before), _ratio_text(counts.ratio_after)
        rows.append([f"{what}largest to smallest class", *ratios])
        both = counts.effective_before, counts.effective_after
        rows.append([f"{what}effective classes", *(f"{n:,.2f}" for n in both)])
    total = f"{report.num_samples:,}"
    rows.append(["samples of an epoch", total, f"{report.epoch_size:,}"])
    rows.append(["different samples", total, f"{report.num_shown:,}"])
    rows.append(["never shown", "0", f"{report.num_never_shown:,}"])
    rows.append(["most repeats of a sample", "1", f"{report.most_repeats:,}"])
    return rows


def verdict_of(report: BalanceReport) -> str:
    """Return what the sampler changed, at what price, and what would help where it did not."""
    if not len(report.classes):
        return "No sample has a class: there is nothing to balance."
    return " ".join(_sentences(report))


def _sentences(report: BalanceReport) -> Iterator[str]:
    images, objects = report.images, report.objects
    what = "samples" if objects is None else "images"
    yield _change(images, what)
    if objects is not None:
        yield _change(objects, _labels(report))
        if images.progress >= _HARDLY and objects.progress < min(_LITTLE, images.progress / 2):
            yield from _why_hardly(report, objects)
    if report.num_never_shown:
        part = _percent(report.num_never_shown / report.num_samples)
        yield f"{part} of the {what} are never shown in an epoch."
    lost = np.flatnonzero(images.after == 0).tolist()
    if lost:
        names = ", ".join(_name(report, n) for n in lost[:3])
        more = f" and {len(lost) - 3:,} more" if len(lost) > 3 else ""
        yield f"Class{'es' if len(lost) > 1 else ''} never shown: {names}{more}."
    rarest = int(np.argmin(images.before))
    if report.repeats[rarest] > _EVEN:
        yield (
            f"The rarest class, {_name(report, rarest)}, has "
            f"{counted(int(images.before[rarest]), what[:-1])}, shown "
            f"{report.repeats[rarest]:,.1f} times an epoch on average."
        )


def _change(counts: ClassCounts, what: str) -> str:
    """Say how far balance over one level has changed."""
    words = next(words for most, words in _WORDS if counts.progress < most)
    if max(counts.ratio_before, counts.ratio_after) <= _EVEN:
        words = "was even and stays so"
    return (
        f"Balance over {what} {words} (largest to smallest {_ratio_text(counts.ratio_before)} -> "
        f"{_ratio_text(counts.ratio_after)}, effective classes {counts.effective_before:,.2f} -> "
        f"{counts.effective_after:,.2f} of {len(counts.before):,})."
    )


def _why_hardly(report: BalanceReport, objects: ClassCounts) -> Iterator[str]:
    """Say why balance over objects has not followed, and what would do more."""
    top = int(np.argmax(objects.after))
    frequency, share = report.frequencies_after[top], objects.shares_after[top]
    if frequency >= _COMMON or share >= _COMMON:
        yield (
            f"Class {_name(report, top)} is in {_percent(frequency)} of the images shown and has "
            f"{_percent(share)} of their {_labels(report)}: it comes along, whichever images are "
            "chosen."
        )
    if report.has_boxes:
        yield (
            "What does more: crops around objects of rare classes (penstock.vision.ObjectCrop with "
            "class_weights), or weights of classes or a focal loss."
        )
    else:
        yield "Weights of classes in the loss would do more."


def aligned(rows: list[list[str]]) -> list[str]:
    """Return a table, the header first, as lines."""
    widths = [max(map(_columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0] + " " * (widths[0] - _columns(row[0]))]
        cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "-" * max(map(_columns, lines))
    return [lines[0], rule, *lines[1:]]


def _name(report: BalanceReport, n: int) -> str:
    """Return the name of a class, in one line."""
    return "".join(c if c.isprintable() else "?" for c in report.class_names[n])


def _columns(text: str) -> int:
    """Return the columns of a terminal that a text takes: signs of East Asia take two."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _percent(part: float) -> str:
    return f"{part:.1%}" if part >= 0.01 or not part else f"{part:.3%}"


def _ratio_text(ratio: float) -> str:
    return f"{ratio:,.1f} : 1" if math.isfinite(ratio) else "one has none"
