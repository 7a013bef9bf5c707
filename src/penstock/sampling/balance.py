# SPDX-License-Identifier: Apache-2.0
"""`balance_report`: the balance of classes before and after a sampler, of images and of objects.

For detection the two differ. A class that is in nearly every image comes along with whatever image
is shown, so that a sampler of images can even out the images of the classes and hardly their boxes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.data.labels.known import class_names_of, labels_given_or_known
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.balance_text import table_of, verdict_of
from penstock.sampling.class_items import ClassItems, class_codes
from penstock.sampling.samplers import check_positive
from penstock.sampling.shown_times import is_loader, name_of, parts_of, sampler_in, times_shown
from penstock.summary import Summarized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.sampling.shown_times import ShownTimes

__all__ = ["BalanceReport", "ClassCounts", "balance_report"]


@dataclass(frozen=True, eq=False, slots=True)
class ClassCounts:
    """How many of something each class has: in the data set, and in a mean epoch of a sampler.

    Attributes:
        before: In the data set, where each sample comes once; int64 of shape (classes,).
        after: In an epoch; float64 of shape (classes,), the mean of the epochs that were counted.
    """

    before: NDArray[np.int64]
    after: NDArray[np.float64]

    @property
    def shares_before(self) -> NDArray[np.float64]:
        """Part of all classes' sum that each has, 0 to 1; a fresh array."""
        return _shares(self.before)

    @property
    def shares_after(self) -> NDArray[np.float64]:
        """Likewise, in an epoch."""
        return _shares(self.after)

    @property
    def ratio_before(self) -> float:
        """Largest class to smallest; infinite if one has none, 1 if there is no class."""
        return _ratio(self.before)

    @property
    def ratio_after(self) -> float:
        """Likewise, in an epoch."""
        return _ratio(self.after)

    @property
    def effective_before(self) -> float:
        """Number of equal classes of the same entropy, exp(-sum(p ln p)); 0 if all are empty."""
        return _effective(self.before)

    @property
    def effective_after(self) -> float:
        """Likewise, in an epoch."""
        return _effective(self.after)

    @property
    def progress(self) -> float:
        """How much of the way to equal classes was made, of ln(classes) - entropy; -1 to 1.

        1 is all of it, 0 nothing. Below 0 it is the wrong way: so much of the way that is left now
        was added. -1 is all of it, where classes were equal before.
        """
        equal = math.log(max(len(self.before), 1))
        before = equal - math.log(self.effective_before or 1)
        after = equal - math.log(self.effective_after or 1)
        longer = max(before, after)
        return (before - after) / longer if longer > 1e-9 else 0.0

    def record(self) -> dict[str, Any]:
        """Return the sums of it as JSON has them; null where the smallest class has none."""
        before, after = self.ratio_before, self.ratio_after
        return {
            "total_before": int(self.before.sum()),
            "total_after": float(self.after.sum()),
            "largest_to_smallest_before": before if math.isfinite(before) else None,
            "largest_to_smallest_after": after if math.isfinite(after) else None,
            "effective_classes_before": self.effective_before,
            "effective_classes_after": self.effective_after,
            "progress": self.progress,
        }


def _shares(counts: NDArray[Any]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = counts / max(float(counts.sum()), 1e-300)
    return shares


def _ratio(counts: NDArray[Any]) -> float:
    if not counts.any():
        return 1.0
    least = float(counts.min())
    return float(counts.max()) / least if least else math.inf


def _effective(counts: NDArray[Any]) -> float:
    there = _shares(counts[counts > 0])
    return math.exp(-float((there * np.log(there)).sum())) if len(there) else 0.0


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
        num_different: Different samples with each class in an epoch; float64 of shape (classes,),
            the mean of the epochs.
        num_samples: Samples of the data set.
        num_unlabelled: Of them, those without any class.
        epoch_size: Indices in an epoch; the mean of the epochs.
        num_epochs: Epochs counted.
        num_shown: Different samples in an epoch; the mean of the epochs.
        num_in_no_epoch: Samples that came in none of the epochs counted.
        most_repeats: How often the sample that came most in one epoch came in that one.
    """

    _shows: ClassVar = ("sampler", "num_samples", "epoch_size", "num_never_shown", "verdict")

    sampler: str
    classes: NDArray[Any]
    class_names: tuple[str, ...]
    images: ClassCounts
    objects: ClassCounts | None
    num_different: NDArray[np.float64]
    num_samples: int
    num_unlabelled: int
    epoch_size: float
    num_epochs: int
    num_shown: float
    num_in_no_epoch: int
    most_repeats: int

    @property
    def num_never_shown(self) -> float:
        """Samples that do not come in an epoch; the mean of the epochs."""
        return self.num_samples - self.num_shown

    @property
    def has_boxes(self) -> bool:
        """Whether an image has several labels of a class, as of boxes; tags it has once."""
        return self.objects is not None and bool(np.any(self.objects.before != self.images.before))

    @property
    def frequencies_before(self) -> NDArray[np.float64]:
        """Part of all samples that hold each class, 0 to 1; a fresh array.

        Where samples have several classes the sum is above 1.
        """
        return self.images.before / max(self.num_samples, 1)

    @property
    def frequencies_after(self) -> NDArray[np.float64]:
        """Likewise, of the samples of an epoch."""
        return self.images.after / max(self.epoch_size, 1)

    @property
    def repeats(self) -> NDArray[np.float64]:
        """How often a sample of each class comes in an epoch, on average; float64 (classes,)."""
        return self.images.after / np.maximum(self.images.before, 1)

    @property
    def verdict(self) -> str:
        """What changed, at what price, and what would help where it did not; in words."""
        return verdict_of(self)

    def __str__(self) -> str:
        """Return a table, the sums and the verdict, as text."""
        return table_of(self)

    def record(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        rows = [self._row(position) for position in range(len(self.classes))]
        return {
            "sampler": self.sampler,
            "num_samples": self.num_samples,
            "num_unlabelled": self.num_unlabelled,
            "epoch_size": self.epoch_size,
            "num_epochs": self.num_epochs,
            "num_shown": self.num_shown,
            "num_never_shown": self.num_never_shown,
            "num_in_no_epoch": self.num_in_no_epoch,
            "most_repeats": self.most_repeats,
            "images": self.images.record(),
            "objects": None if self.objects is None else self.objects.record(),
            "classes": rows,
            "verdict": self.verdict,
        }

    def _row(self, position: int) -> dict[str, Any]:
        row = {
            "class": _plain(self.classes[position].item()),
            "name": self.class_names[position],
            "images_before": int(self.images.before[position]),
            "images_after": float(self.images.after[position]),
            "different_images": float(self.num_different[position]),
        }
        if self.objects is not None:
            row["objects_before"] = int(self.objects.before[position])
            row["objects_after"] = float(self.objects.after[position])
        return row


def balance_report(
    sampler: Any,  # noqa: ANN401 - anybody's, or indices
    labels: Any = None,  # noqa: ANN401 - labels in many forms, or a dataset that knows them
    *,
    class_names: Sequence[str] | Mapping[Any, str] | None = None,
    epochs: int = 1,
) -> BalanceReport:
    """Count the classes that a sampler shows, beside those of the data set. No sample is read.

    Args:
        sampler: A sampler of indices, of batches of them, or the indices themselves; or a loader,
            whose sampler is counted. Epochs are counted from the one that it is in, on a copy: it
            stays as it is, also a state that it has loaded. What shares an epoch among ranks is
            counted as a whole, of all ranks; torch's own DistributedSampler as its rank alone.
            Samplers that draw from global or own torch generators draw what the epoch decides.
        labels: The class of each sample or the classes of each, or a dataset that knows them. None
            takes the attribute `labels` of the sampler, or of the one that it wraps; else those
            that the loader's dataset knows.
        class_names: Names by class number, or a dict by class. None takes those that the dataset
            has, or the sampler by its attribute `class_names`.
        epochs: How many epochs to draw and count, at least 1.

    Returns:
        The counts. Of several epochs all are means per epoch, but for `num_in_no_epoch`, and for
        `most_repeats`, which is of one epoch. Where samples have any number of classes there are
        counts of objects as well.

    Raises:
        ConfigError: labels are not known, or an index is beyond them; a dataset was given for the
            sampler; names leave out a class, or are given for strings; indices themselves have one
            epoch.

    Example:
        >>> from penstock.sampling import WeightedRandomSampler
        >>> labels = np.array([0] * 90 + [1] * 10)
        >>> sampler = WeightedRandomSampler(1 / np.bincount(labels)[labels], num_samples=100)
        >>> report = balance_report(sampler, labels)
        >>> report.images.before, report.images.ratio_before, report.images.ratio_after < 2
        (array([90, 10]), 9.0, True)
    """
    check_positive("epochs", epochs)
    inner = sampler_in(sampler)
    given, named = _labels_of(sampler, inner) if labels is None else (labels, labels)
    known = labels_given_or_known(given, "balance_report")
    shown = times_shown(sampler, len(known), epochs)
    items = ClassItems.of(known)
    _check_names(items.classes, class_names)
    images, objects = _counted(items, known, shown)
    names = _names_known(named, items.classes) if class_names is None else class_names
    return BalanceReport(
        sampler=name_of(inner),
        classes=items.classes,
        class_names=_names(items.classes, names),
        images=ClassCounts(images[0], images[1] / epochs),
        objects=None if objects is None else ClassCounts(objects[0], objects[1] / epochs),
        num_different=images[2] / epochs,
        num_samples=len(known),
        num_unlabelled=len(items.unlabelled),
        epoch_size=int(shown.times.sum()) / epochs,
        num_epochs=epochs,
        num_shown=int(shown.epochs.sum()) / epochs,
        num_in_no_epoch=len(known) - int(np.count_nonzero(shown.times)),
        most_repeats=shown.most_repeats,
    )


def _names_known(source: Any, classes: NDArray[Any]) -> tuple[str, ...] | None:  # noqa: ANN401
    """Return the names that a sampler or a data set has, if they are by number and enough."""
    names = class_names_of(source)
    if names is None or classes.dtype.kind not in "biu":
        return None
    return names if len(classes) and len(names) > int(classes[-1]) else None


def _labels_of(given: Any, sampler: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the labels that a sampler keeps, or one inside it, and what has their names."""
    for part in parts_of(sampler):
        if (labels := getattr(part, "labels", None)) is not None:
            return labels, part
    if is_loader(given):
        return given.dataset, given.dataset
    raise ConfigError(
        f"balance_report needs labels, and {name_of(sampler)} keeps none (it has no attribute "
        "`labels`). Give them as the second argument: the class of each sample, or the data set."
    )


def _counted(
    items: ClassItems, labels: NDArray[Any] | RaggedArray, shown: ShownTimes
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return counts of images and of objects: a row before, one after, one of different images."""
    images = np.stack([items.counts, items.sums(shown.times), items.sums(shown.epochs)])
    if not isinstance(labels, RaggedArray):
        return images, None
    # A class that an image has twice is two objects, and one item.
    codes, num_labels = class_codes(labels.values)[1], np.diff(labels.offsets)
    times = np.repeat(shown.times, num_labels)
    before, after = (np.bincount(codes, w, len(items.classes)) for w in (None, times))
    return images, np.stack([before, after]).astype(np.int64)


def _names(
    classes: NDArray[Any], names: Sequence[str] | Mapping[Any, str] | None
) -> tuple[str, ...]:
    """Return a name for each class: the class itself where it has none."""
    values = classes.tolist()
    if isinstance(names, Mapping):
        return tuple(str(names.get(value, _plain(value))) for value in values)
    if names is None:
        return tuple(str(_plain(value)) for value in values)
    known = tuple(names)
    return tuple(str(known[v] if v >= 0 else v) for v in values)


def _check_names(classes: NDArray[Any], names: object) -> None:
    """Refuse names that would be those of other classes."""
    if names is None or isinstance(names, Mapping) or not len(classes):
        return
    if classes.dtype.kind not in "biu":
        raise ConfigError(
            f"class_names go by class number, but these labels are strings, as {classes[0]!r}. "
            "Leave them out, or give a dict of names by class."
        )
    if isinstance(names, str) or not hasattr(names, "__len__"):
        raise ConfigError(
            f"class_names should be a list of names or a dict, but got {type(names).__name__}."
        )
    if len(names) <= int(classes[-1]):
        raise ConfigError(
            f"class_names has {len(names)} names, for classes 0 to {len(names) - 1}, but the "
            f"labels have class {classes[-1]}. Give a name for each number, or a dict."
        )


def _plain(label: Any) -> Any:  # noqa: ANN401
    """Return a class as JSON has it."""
    return label.decode("utf-8", "backslashreplace") if isinstance(label, bytes) else label
