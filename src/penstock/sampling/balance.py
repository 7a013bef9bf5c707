# SPDX-License-Identifier: Apache-2.0
"""What a sampler does to the balance of classes: counted before and after, of images and objects.

For detection the two differ. A class that is in nearly every image comes along with whatever image
is shown, so that a sampler of images can even out the images of the classes and hardly their boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.dataset import is_current
from penstock.data.labels.known import class_names_of, labels_given_or_known
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling.balance_text import table_of, verdict_of
from penstock.sampling.label_blocks import LabelBlocks
from penstock.sampling.samplers import IndexSampler, check_positive

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.sampling.label_blocks import LabelBlock

__all__ = ["BalanceReport", "ClassCounts", "balance_report"]

_BLOCK: Final = 1 << 20  # indices counted at a time: no array of a whole order is made for it


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
        """How much of the way to equal classes was made, of ln(classes) - entropy.

        1 is all of it, 0 nothing, below 0 the wrong way. 0 too where classes were equal before.
        """
        equal = math.log(max(len(self.before), 1))
        way = equal - math.log(self.effective_before or 1)
        left = equal - math.log(self.effective_after or 1)
        return 1 - left / way if way > 1e-9 else 0.0

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


@dataclass(frozen=True, eq=False)
class BalanceReport:
    """Balance of classes before and after a sampler; see `balance_report`.

    `str(report)` is a table for 80 to 100 columns, with the verdict below. Its arrays are its own.

    Attributes:
        sampler: The name of its kind.
        classes: The classes that occur, ascending; shape (classes,).
        class_names: A name for each.
        images: Samples that hold each class.
        objects: Labels of each class, as of boxes; None where each sample has one class.
        num_different: Different samples with each class that were shown in all the epochs counted;
            int64 of shape (classes,).
        num_samples: Samples of the data set.
        num_unlabelled: Of them, those without any class.
        epoch_size: Indices in an epoch; the mean of the epochs.
        num_epochs: Epochs counted.
        num_shown: Different samples in all of them together.
        most_repeats: How often the sample that came most came in all of them together.
    """

    sampler: str
    classes: NDArray[Any]
    class_names: tuple[str, ...]
    images: ClassCounts
    objects: ClassCounts | None
    num_different: NDArray[np.int64]
    num_samples: int
    num_unlabelled: int
    epoch_size: float
    num_epochs: int
    num_shown: int
    most_repeats: int

    @property
    def num_never_shown(self) -> int:
        """Samples that came in none of the epochs counted."""
        return self.num_samples - self.num_shown

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
            "most_repeats": self.most_repeats,
            "images": self.images.record(),
            "objects": None if self.objects is None else self.objects.record(),
            "classes": rows,
            "verdict": self.verdict,
        }

    def _row(self, position: int) -> dict[str, Any]:
        row = {
            "class": self.classes[position].item(),
            "name": self.class_names[position],
            "images_before": int(self.images.before[position]),
            "images_after": float(self.images.after[position]),
            "different_images": int(self.num_different[position]),
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
        sampler: A sampler of indices, of batches of them, or the indices themselves. Epochs are
            counted from the one it is in, and it is put back into that. What it draws from global
            generators, as torch's samplers do, is drawn.
        labels: The class of each sample or the classes of each, or a dataset that knows them. None
            takes the attribute `labels` of the sampler, or of the one that it wraps.
        class_names: Names by class number, or by class. None takes those that the dataset has.
        epochs: How many epochs to draw and count, at least 1.

    Returns:
        The counts. Of several epochs they are means, and "different" and "never shown" are of all
        together. Where samples have any number of classes there are counts of objects as well.

    Raises:
        ConfigError: labels are not known, or an index is beyond them; indices themselves have
            one epoch.

    Example:
        >>> from penstock.sampling import WeightedRandomSampler
        >>> labels = np.array([0] * 90 + [1] * 10)
        >>> sampler = WeightedRandomSampler(1 / np.bincount(labels)[labels], num_samples=100)
        >>> report = balance_report(sampler, labels)
        >>> report.images.before, report.images.ratio_before, report.images.ratio_after < 2
        (array([90, 10]), 9.0, True)
    """
    check_positive("epochs", epochs)
    given = _labels_of(sampler) if labels is None else labels
    known = labels_given_or_known(given, "balance_report")
    times, num_drawn = _times_shown(sampler, len(known), epochs)
    blocks = LabelBlocks(known)
    images, objects = _counted(blocks, times)
    names = class_names_of(given) if class_names is None else class_names
    return BalanceReport(
        sampler=_kind_of(sampler),
        classes=blocks.classes,
        class_names=_names(blocks.classes, names),
        images=ClassCounts(images[0].astype(np.int64), images[1] / epochs),
        objects=ClassCounts(objects[0].astype(np.int64), objects[1] / epochs)
        if blocks.is_ragged
        else None,
        num_different=images[2].astype(np.int64),
        num_samples=len(known),
        num_unlabelled=_num_unlabelled(known),
        epoch_size=num_drawn / epochs,
        num_epochs=epochs,
        num_shown=int(np.count_nonzero(times)),
        most_repeats=int(times.max(initial=0)),
    )


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


def _labels_of(sampler: Any) -> Any:  # noqa: ANN401 - whatever stands for labels
    """The labels that a sampler keeps, or one of those that it is made of."""
    inner = sampler
    while inner is not None:
        if (labels := getattr(inner, "labels", None)) is not None:
            return labels
        inner = getattr(inner, "sampler", getattr(inner, "batch_sampler", None))
    raise ConfigError(
        f"balance_report needs labels, and {_kind_of(sampler)} keeps none (it has no attribute "
        "`labels`). Give them as the second argument: the class of each sample, or the data set."
    )


def _kind_of(sampler: Any) -> str:  # noqa: ANN401
    is_indices = isinstance(sampler, (list, tuple, range)) or hasattr(sampler, "__array__")
    return "indices" if is_indices else type(sampler).__name__


def _times_shown(sampler: Any, num_samples: int, epochs: int) -> tuple[NDArray[np.int64], int]:  # noqa: ANN401
    """Return how often each sample came in some epochs, and the number of indices in all."""
    times = np.zeros(num_samples, np.int64)
    set_epoch = getattr(sampler, "set_epoch", None)
    first = getattr(sampler, "epoch", 0)
    if epochs > 1 and _kind_of(sampler) == "indices":
        raise ConfigError(f"indices are one epoch, but got epochs={epochs}. Give the sampler.")
    try:
        for epoch in range(first, first + epochs):
            if callable(set_epoch):
                set_epoch(epoch)
            for part in _parts_of(sampler):
                _check_indices(part, num_samples)
                np.add.at(times, part, 1)
    finally:
        if callable(set_epoch):
            set_epoch(first)
    return times, int(times.sum())


def _parts_of(sampler: Any) -> Iterator[NDArray[Any]]:  # noqa: ANN401
    """Yield an epoch's indices, many at a time."""
    kind = type(sampler)
    if isinstance(sampler, IndexSampler) and is_current(kind, "indices", ("__iter__",)):
        order: Any = sampler.indices()
    elif hasattr(sampler, "__array__"):
        order = np.asarray(sampler)
    else:
        drawn = iter(sampler)
        while part := list(itertools.islice(drawn, _BLOCK)):
            is_batched = isinstance(part[0], (list, tuple, np.ndarray))
            yield np.asarray([*itertools.chain.from_iterable(part)] if is_batched else part)
        return
    for start in range(0, len(order), _BLOCK):
        yield order[start : start + _BLOCK]


def _check_indices(indices: NDArray[Any], num_samples: int) -> None:
    if not indices.size:
        return
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ConfigError(
            "balance_report counts integers, indices of samples, but the sampler gave "
            f"{indices[0]!r}."
        )
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= num_samples:
        raise ConfigError(
            f"the sampler gave index {least if least < 0 else most}, but there are labels of "
            f"{num_samples} samples: it was made for another data set."
        )


def _counted(
    blocks: LabelBlocks, times: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return counts of images and of objects: a row before, one after, one of different images."""
    num_classes = len(blocks.classes)
    images = np.zeros((3, num_classes))
    objects = np.zeros((3, num_classes))
    for block in blocks:
        objects += _of_block(block, times, num_classes)
        if blocks.is_ragged:
            images += _of_block(block.once(num_classes), times, num_classes)
    return (images if blocks.is_ragged else objects), objects


def _of_block(block: LabelBlock, times: NDArray[np.int64], num_classes: int) -> NDArray[np.float64]:
    shown = times[block.start : block.stop][block.rows]
    weights = (None, shown, shown > 0)
    return np.stack([np.bincount(block.codes, w, num_classes) for w in weights]).astype(np.float64)


def _num_unlabelled(labels: NDArray[Any] | RaggedArray) -> int:
    if isinstance(labels, RaggedArray):
        return int(np.count_nonzero(np.diff(labels.offsets) == 0))
    return 0


def _names(
    classes: NDArray[Any], names: Sequence[str] | Mapping[Any, str] | None
) -> tuple[str, ...]:
    """Return a name for each class: the class itself where it has none."""
    values = classes.tolist()
    if isinstance(names, Mapping):
        return tuple(str(names.get(value, value)) for value in values)
    if names is None or classes.dtype.kind not in "biu":
        return tuple(map(str, values))
    known = tuple(names)
    return tuple(known[v] if 0 <= v < len(known) else str(v) for v in values)
