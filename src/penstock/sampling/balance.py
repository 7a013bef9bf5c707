# SPDX-License-Identifier: Apache-2.0
"""`balance_report`: the balance of classes before and after a sampler, of images and of objects."""

from __future__ import annotations

import array
import copy
import math
import random
import textwrap
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from penstock.data.labels.known import class_names_of, labels_given_or_known
from penstock.data.ragged import RaggedArray
from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.lines import counted
from penstock.randomness.generators import guarded_draws
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling.class_items import ClassItems, class_codes
from penstock.sampling.distributed import DistributedSampler
from penstock.sampling.samplers import BatchSampler, IndexSampler, Resumable, has_order
from penstock.summary import Summarized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_INNER: Final = ("sampler", "batch_sampler")
_LISTS: Final = (list, tuple, range, array.array)
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)

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


class ClassCounts:
    """How many of something each class has: in the data set, and in an epoch of a sampler.

    Attributes:
        before: In the data set, where each sample comes once; int64 of shape (classes,).
        after: In an epoch; likewise.
        shares_before: Part of all classes' sum that each has, 0 to 1, and the next.
        shares_after: Likewise, in an epoch.
        ratio_before: Largest class to smallest; infinite if one has none, 1 if there is no class.
        ratio_after: Likewise, in an epoch.
        effective_before: Number of equal classes of the same entropy, exp(-sum(p ln p)).
        effective_after: Likewise, in an epoch.
        progress: How much of the way to equal classes was made, of ln(classes) - entropy; -1 to 1.
            Below 0 it is the wrong way: so much of the way that is left now was added.
    """

    def __init__(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        """Measure both."""
        self.before, self.after = before, after
        self.shares_before, self.ratio_before, self.effective_before = _measured(before)
        self.shares_after, self.ratio_after, self.effective_after = _measured(after)
        equal = math.log(max(len(before), 1))
        way_before = equal - math.log(self.effective_before or 1)
        way_after = equal - math.log(self.effective_after or 1)
        longer = max(way_before, way_after)
        self.progress = (way_before - way_after) / longer if longer > 1e-9 else 0.0


def _measured(counts: NDArray[Any]) -> tuple[NDArray[np.float64], float, float]:
    """Return shares, the ratio of largest to smallest, and the effective number of classes."""
    shares = counts / max(float(counts.sum()), 1e-300)
    if not counts.any():
        return shares, 1.0, 0.0
    least, there = float(counts.min()), shares[counts > 0]
    ratio = float(counts.max()) / least if least else math.inf
    return shares, ratio, math.exp(-float((there * np.log(there)).sum()))


@dataclass(frozen=True, eq=False, repr=False)
class BalanceReport(Summarized):
    """Balance of classes before and after a sampler; see `balance_report`.

    `str(report)` is a table, with the verdict below. Its arrays are its own.

    Attributes:
        sampler: The name of its kind, and which ranks were counted where there are several.
        classes: The classes that occur, ascending; shape (classes,).
        class_names: A name for each.
        images: Samples that hold each class.
        objects: Labels of each class, as of boxes; None where each sample has one class.
        num_samples: Samples of the data set.
        num_unlabelled: Of them, those without any class.
        epoch_size: Indices in the epoch.
        num_shown: Different samples in it.
        most_repeats: How often the sample that came most came.
    """

    _shows: ClassVar = ("sampler", "num_samples", "epoch_size", "num_never_shown", "verdict")

    sampler: str
    classes: NDArray[Any]
    class_names: tuple[str, ...]
    images: ClassCounts
    objects: ClassCounts | None
    num_samples: int
    num_unlabelled: int
    epoch_size: int
    num_shown: int
    most_repeats: int

    @property
    def num_never_shown(self) -> int:
        """Samples that do not come in the epoch."""
        return self.num_samples - self.num_shown

    @property
    def has_boxes(self) -> bool:
        """Whether an image has several labels of a class, as of boxes; tags it has once."""
        return self.objects is not None and bool(np.any(self.objects.before != self.images.before))

    @property
    def frequencies_before(self) -> NDArray[np.float64]:
        """Part of all samples that hold each class, 0 to 1."""
        return self.images.before / max(self.num_samples, 1)

    @property
    def frequencies_after(self) -> NDArray[np.float64]:
        """Likewise, of the samples of an epoch."""
        return self.images.after / max(self.epoch_size, 1)

    @property
    def repeats(self) -> NDArray[np.float64]:
        """How often a sample of each class comes in an epoch, on average."""
        return self.images.after / np.maximum(self.images.before, 1)

    @property
    def verdict(self) -> str:
        """What changed, at what price, and what would help where it did not; in words."""
        if not len(self.classes):
            return "No sample has a class: there is nothing to balance."
        return " ".join(_sentences(self))

    def __str__(self) -> str:
        """Return a table, the sums and the verdict, as text."""
        lines = [
            f"{counted(len(self.classes), 'class')}, {counted(self.num_samples, 'sample')}, before "
            f"and after {self.sampler}: an epoch of {self.epoch_size:,}",
            "",
            *aligned(_class_rows(self)),
            "",
            *aligned(_sum_rows(self)),
            "",
        ]
        return "\n".join([*lines, *textwrap.wrap(self.verdict, _WIDTH)])


@removed_arguments(epochs="sampler.set_epoch(epoch), and a report of each epoch")
def balance_report(
    sampler: Any,  # noqa: ANN401 - any sampler, or indices
    labels: Any = None,  # noqa: ANN401 - labels in many forms, or a dataset that has them
    *,
    class_names: Sequence[str] | Mapping[Any, str] | None = None,
) -> BalanceReport:
    """Count the classes that a sampler shows, beside those of the data set. No sample is read.

    Args:
        sampler: A sampler of indices, of batches of them, or the indices themselves. The epoch that
            it is in is counted, on a copy: it stays as it is, also a state that it has loaded. What
            shares an epoch among ranks is counted as a whole, of all ranks; torch's own
            DistributedSampler as its rank alone. Samplers that draw from global or own torch
            generators draw what the epoch decides.
        labels: The class of each sample or the classes of each, or a dataset that has them. None
            takes the attribute `labels` of the sampler, or of the one that it wraps.
        class_names: Names by class number, or a dict by class; a class without one is its own
            name. None takes those that the dataset or the sampler has.

    Returns:
        The counts. Where samples have any number of classes there are counts of objects as well.

    Raises:
        ConfigError: labels are not known, or an index is beyond them; a dataset or a loader was
            given for the sampler.

    Example:
        >>> from penstock.sampling import WeightedRandomSampler
        >>> labels = np.array([0] * 90 + [1] * 10)
        >>> sampler = WeightedRandomSampler(1 / np.bincount(labels)[labels], num_samples=100)
        >>> report = balance_report(sampler, labels)
        >>> report.images.before, report.images.ratio_before, report.images.ratio_after < 2
        (array([90, 10]), 9.0, True)
    """
    is_loader = hasattr(sampler, "dataset") and hasattr(sampler, "collate_fn")
    if is_loader or (hasattr(sampler, "__getitem__") and not _is_indices(sampler)):
        raise ConfigError(
            f"balance_report counts what a sampler gives, but {type(sampler).__name__} gives "
            "samples. Give the sampler first: balance_report(loader.sampler, dataset)."
        )
    named = labels
    if labels is None:
        keepers = [part for part in _parts_of(sampler) if getattr(part, "labels", None) is not None]
        if not keepers:
            raise ConfigError(
                f"balance_report needs labels, and {_name_of(sampler)} keeps none (it has no "
                "attribute `labels`). Give them, or the data set, as the second argument."
            )
        named, labels = keepers[0], keepers[0].labels
    known = labels_given_or_known(labels, "balance_report")
    times = _times_shown(sampler, len(known))
    items, objects = ClassItems(known), None
    if isinstance(known, RaggedArray):  # a class that an image has twice is two objects, one item
        codes, counts = class_codes(known.values)[1], np.diff(known.offsets)
        before = np.bincount(codes, minlength=len(items.classes))
        after = np.bincount(codes, np.repeat(times, counts), len(items.classes))
        objects = ClassCounts(before, after.astype(np.int64))
    names = class_names_of(named) if class_names is None else class_names
    return BalanceReport(
        sampler=_name_of(sampler),
        classes=items.classes,
        class_names=_names(items.classes, names),
        images=ClassCounts(items.counts, items.sums(times)),
        objects=objects,
        num_samples=len(known),
        num_unlabelled=len(items.unlabelled),
        epoch_size=int(times.sum()),
        num_shown=int(np.count_nonzero(times)),
        most_repeats=int(times.max(initial=0)),
    )


def _names(
    classes: NDArray[Any], names: Sequence[str] | Mapping[Any, str] | None
) -> tuple[str, ...]:
    """Return a name for each class: the class itself where it has none."""
    if not isinstance(names, Mapping):
        is_numbered = classes.dtype.kind in "biu"
        names = dict(enumerate(names)) if names is not None and is_numbered else {}
    return tuple(_text(names.get(value, value)) for value in classes.tolist())


def _text(name: str | bytes | int) -> str:
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name)


# How often a sampler shows each sample: counted on a copy of it, so that it stays as it was.


def _times_shown(sampler: Any, num_samples: int) -> NDArray[np.int64]:  # noqa: ANN401
    """Return how often each sample comes in the epoch, of all ranks together, int64 (samples,).

    Samplers of others draw with the global generators seeded by the epoch, and those are put back.
    """
    twin = sampler if _is_indices(sampler) else _copied(sampler, {})
    # The innermost sampler that has an epoch is the one that draws.
    epochs = [getattr(part, "epoch", None) for part in _parts_of(twin)]
    epoch = next((number for number in reversed(epochs) if isinstance(number, int)), 0)
    with guarded_draws(twin, seed_sequence(0, Purpose.ORDER, epoch)):
        indices = _drawn(twin)
    wrong = indices[(indices < 0) | (indices >= num_samples)]
    if wrong.size:
        raise ConfigError(
            f"sampler and labels do not fit: it gave index {wrong[0]}, of {num_samples} samples."
        )
    return np.bincount(indices, minlength=num_samples)


def _parts_of(sampler: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield a sampler, the one inside it, the one inside that."""
    while sampler is not None:
        yield sampler
        sampler = next(
            (found for name in _INNER if (found := getattr(sampler, name, None)) is not None), None
        )


def _name_of(sampler: Any) -> str:  # noqa: ANN401
    """Return its kind, and which ranks are counted where there are several."""
    if _is_indices(sampler):
        return "indices"
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        name += f" of {type(sampler.sampler).__name__}"
    for part in _parts_of(sampler):
        if (ranks := getattr(part, "num_replicas", 1)) > 1:
            is_ours = isinstance(part, IndexSampler)
            return name + (f", all {ranks} ranks" if is_ours else f", rank {part.rank} of {ranks}")
    return name


def _is_indices(sampler: Any) -> bool:  # noqa: ANN401
    return isinstance(sampler, _LISTS) or hasattr(sampler, "__array__")


def _copied(sampler: Any, copies: dict[int, Any]) -> Any:  # noqa: ANN401
    """Return a copy, also of the samplers and generators in it, but of none of the data."""
    if id(sampler) in copies:
        return copies[id(sampler)]
    try:
        twin = copy.copy(sampler)
    except TypeError:  # as of an iterator: there is no way but to use it up
        return sampler
    copies[id(sampler)] = twin
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, Resumable) or (name in _INNER and value is not None):
            twin.__dict__[name] = _copied(value, copies)
        elif isinstance(value, _GENERATORS):
            twin.__dict__[name] = copy.deepcopy(value)
    if isinstance(twin, Resumable):
        twin.forget_state()
    if isinstance(twin, IndexSampler) and getattr(twin, "num_replicas", 1) > 1:
        twin.__dict__.update(rank=0, num_replicas=1)
        if isinstance(twin, DistributedSampler):
            twin.pad = "none"
    return twin


def _drawn(sampler: Any) -> NDArray[np.int64]:  # noqa: ANN401
    """Return the indices of an epoch."""
    if has_order(sampler):
        return np.asarray(sampler.indices()[:])
    if hasattr(sampler, "__array__"):
        return _as_indices(sampler)
    items = list(sampler.index_batches() if isinstance(sampler, BatchSampler) else sampler)
    if items and np.ndim(items[0]):
        return np.concatenate(list(map(_as_indices, items)))
    return _as_indices(items)


def _as_indices(items: Any) -> NDArray[np.int64]:  # noqa: ANN401
    found = np.asarray(items)
    if found.size and (found.ndim > 1 or found.dtype.kind not in "iu"):
        raise ConfigError(
            "balance_report counts integers, indices of samples, but the sampler gave a "
            f"{type(items).__name__} of {found.dtype}, shape {found.shape}."
        )
    return found.astype(np.int64, copy=False)  # what is empty has any type


# The report as text: a table, and a verdict in words.


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
