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
    from collections.abc import Iterable

    from penstock.sampling.balance import BalanceReport, ClassCounts

__all__ = ["aligned", "table_of", "verdict_of"]

_FIRST_ROWS, _LAST_ROWS = 15, 10  # of more classes than these, the middle is one row
_WIDTH: Final = 88  # columns, of what is wrapped
_GAP: Final = "  "
# Of the way to equal classes (`ClassCounts.progress`): below it, nobody would notice in training.
_HARDLY: Final = 0.1
_NOTHING: Final = 0.02
_LITTLE: Final = 0.3
_NEARLY_ALL: Final = 0.9
_EVEN: Final = 1.25  # largest to smallest: no imbalance to speak of
_MANY_CLASSES: Final = 50
_COMMON: Final = 0.5  # of all images, or of all objects


def table_of(report: BalanceReport) -> str:
    """Return the report as text: a line of what it is, the classes, sums, and the verdict."""
    lines = [_headline(report), ""]
    lines += aligned(_class_rows(report), divided_at=5 if report.objects is not None else None)
    lines += ["", *aligned(_sum_rows(report)), ""]
    return "\n".join([*lines, *textwrap.wrap(report.verdict, _WIDTH)])


def _headline(report: BalanceReport) -> str:
    epochs = "an epoch" if report.num_epochs == 1 else f"the mean of {report.num_epochs:,} epochs"
    return (
        f"{counted(len(report.classes), 'class')}, {counted(report.num_samples, 'sample')}, before "
        f"and after {report.sampler}: {epochs} of {_number(report.epoch_size)}"
    )


def _class_rows(report: BalanceReport) -> list[list[str]]:
    """Return the header and a row for each class shown, the largest class first."""
    levels = [report.images] if report.objects is None else [report.images, report.objects]
    order = np.argsort(-levels[-1].before, kind="stable")
    num_last = _LAST_ROWS if len(order) > _FIRST_ROWS + _LAST_ROWS + 1 else 0
    num_first = _FIRST_ROWS if num_last else len(order)
    rows = [_class_row(report, report.class_names[n], [n]) for n in order[:num_first].tolist()]
    middle = order[num_first : len(order) - num_last]
    if len(middle):
        rows.append(_class_row(report, f"... {len(middle):,} more", middle.tolist()))
    last = order[len(order) - num_last :].tolist()
    rows += [_class_row(report, report.class_names[n], [n]) for n in last]
    if report.objects is None:
        return [["class", "samples", "shown", "times", "share", "-> after"], *rows]
    images, labels = ["images", "shown", "of all", "-> after"], ["shown", "share", "-> after"]
    return [["class", *images, _labels(report), *labels], *rows]


def _labels(report: BalanceReport) -> str:
    """What images have any number of."""
    return "objects" if report.has_boxes else "labels"


def _class_row(report: BalanceReport, name: str, which: list[int]) -> list[str]:
    images = report.images
    before, after = images.before[which].sum(), images.after[which].sum()
    counts = [_in_its_line(name), f"{before:,}", _number(after)]
    if report.objects is None:
        times = f"{after / max(before, 1):.2f}"
        return [*counts, times, *_shares_of(images, which)]
    # An image may hold several of the classes: their sum is no number of images.
    frequencies = ["", ""]
    if len(which) > 1:
        counts[1:] = ["", ""]
    else:
        parts = report.frequencies_before[which[0]], report.frequencies_after[which[0]]
        frequencies = [_percent(part, len(report.classes)) for part in parts]
    objects = report.objects
    totals = [f"{objects.before[which].sum():,}", _number(objects.after[which].sum())]
    return [*counts, *frequencies, *totals, *_shares_of(objects, which)]


def _shares_of(counts: ClassCounts, which: list[int]) -> list[str]:
    both = counts.shares_before[which].sum(), counts.shares_after[which].sum()
    return [_percent(share, len(counts.before)) for share in both]


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
    rows.append(["samples of an epoch", total, _number(report.epoch_size)])
    rows.append(["different samples", total, _number(report.num_shown)])
    if report.num_epochs == 1:
        rows.append(["never shown", "0", _number(report.num_never_shown)])
        rows.append(["most repeats of a sample", "1", f"{report.most_repeats:,}"])
        return rows
    rows.append(["not shown in an epoch", "0", _number(report.num_never_shown)])
    rows.append(
        [f"in none of the {report.num_epochs:,} epochs", "0", f"{report.num_in_no_epoch:,}"]
    )
    rows.append(["most repeats in one epoch", "1", f"{report.most_repeats:,}"])
    return rows


def verdict_of(report: BalanceReport) -> str:
    """Return what the sampler changed, at what price, and what would help where it did not."""
    if not len(report.classes):
        return "No sample has a class: there is nothing to balance."
    if report.objects is None:
        return " ".join([_change(report.images, "samples"), *_prices(report)])
    return " ".join(
        [
            _change(report.images, "images"),
            _change(report.objects, _labels(report)),
            *_why_hardly(report, report.objects),
            *_prices(report),
        ]
    )


def _change(counts: ClassCounts, what: str) -> str:
    """Say how far balance over one level has changed."""
    before, after = _ratio_text(counts.ratio_before), _ratio_text(counts.ratio_after)
    numbers = (
        f"(largest to smallest {before} -> {after}, effective classes "
        f"{counts.effective_before:,.2f} -> {counts.effective_after:,.2f} of "
        f"{len(counts.before):,})"
    )
    return f"Balance over {what} {_in_words(counts)} {numbers}."


def _in_words(counts: ClassCounts) -> str:
    progress = counts.progress
    if counts.ratio_before <= _EVEN and counts.ratio_after <= _EVEN:
        return "was even and stays so"
    if abs(progress) < _NOTHING:
        return "does not change"
    if progress < 0:
        return "gets worse"
    if progress < _HARDLY:
        return "hardly changes"
    if progress < _LITTLE:
        return "improves a little"
    if progress < _NEARLY_ALL:
        return "improves"
    return "is nearly even now" if counts.ratio_after > _EVEN else "is even now"


def _why_hardly(report: BalanceReport, objects: ClassCounts) -> Iterable[str]:
    """Say why balance over objects has not followed, and what would do more."""
    images = report.images
    is_behind = images.progress >= _HARDLY and objects.progress < min(_LITTLE, images.progress / 2)
    if objects.ratio_before <= _EVEN or not (is_behind or images.ratio_before <= _EVEN):
        return
    top = int(np.argmax(objects.after))
    name = _in_its_line(report.class_names[top])
    frequency, share = report.frequencies_after[top], objects.shares_after[top]
    if frequency >= _COMMON or share >= _COMMON:
        yield (
            f"Class {name} is in {_percent(frequency)} of the images shown and has "
            f"{_percent(share)} of their {_labels(report)}: it comes along, whichever images are "
            "chosen."
        )
    if report.has_boxes:
        yield (
            "While most images are to be shown, choosing among them changes that little. What does "
            "more: crops around objects of rare classes (penstock.vision.ObjectCrop with "
            "class_weights), or weights of classes or a focal loss."
        )
    else:
        yield "Weights of classes in the loss would do more."


def _prices(report: BalanceReport) -> Iterable[str]:
    """Say what it costs: samples never shown, classes never shown, few samples many times."""
    what = "samples" if report.objects is None else "images"
    if report.num_never_shown:
        part = _percent(report.num_never_shown / report.num_samples)
        if report.num_epochs == 1:
            yield f"{part} of the {what} are never shown in an epoch."
        else:
            never = _percent(report.num_in_no_epoch / report.num_samples)
            yield (
                f"{part} of the {what} are not shown in an epoch, in the mean, and {never} in none "
                f"of the {report.num_epochs:,} epochs."
            )
    lost = np.flatnonzero(report.images.after == 0)
    if len(lost):
        names = ", ".join(_in_its_line(report.class_names[n]) for n in lost[:3].tolist())
        more = f" and {len(lost) - 3:,} more" if len(lost) > 3 else ""
        yield f"Class{'es' if len(lost) > 1 else ''} never shown: {names}{more}."
    rarest = int(np.argmin(report.images.before))
    if report.repeats[rarest] > _EVEN:
        number, name = int(report.images.before[rarest]), _in_its_line(report.class_names[rarest])
        subject = f"Each of the {number:,} {what}" if number > 1 else f"The only {what[:-1]}"
        yield (
            f"{subject} of the rarest class, {name}, comes {report.repeats[rarest]:,.1f} times an "
            "epoch on average."
        )


def aligned(rows: list[list[str]], *, divided_at: int | None = None) -> list[str]:
    """Return a table, the header first, as lines; a bar stands before column `divided_at`."""
    widths = [max(map(_columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0] + " " * (widths[0] - _columns(row[0]))]
        cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        if divided_at is not None:
            cells.insert(divided_at, "|")
        lines.append(_GAP.join(cells).rstrip())
    rule = "-" * max(map(_columns, lines))
    return [lines[0], rule, *lines[1:]]


def _in_its_line(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


def _columns(text: str) -> int:
    """Return the columns of a terminal that a text takes: signs of East Asia take two."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _number(value: float) -> str:
    """Return a mean; whole numbers, and large ones, without a decimal."""
    return f"{value:,.0f}" if float(value).is_integer() or value >= 10_000 else f"{value:,.1f}"


def _percent(part: float, num_classes: int = 0) -> str:
    """Return a part of all; with more digits where many classes have a small part each."""
    return f"{part:.3%}" if num_classes > _MANY_CLASSES else f"{part:.1%}"


def _ratio_text(ratio: float) -> str:
    return f"{ratio:,.1f} : 1" if math.isfinite(ratio) else "one has none"
