# SPDX-License-Identifier: Apache-2.0
"""`balance_report`: the balance of classes before and after a sampler, of images and of objects.

For detection the two differ. A class that is in nearly every image comes along with whatever image
is shown, so that a sampler of images can even out the images of the classes and hardly their boxes.
"""

from __future__ import annotations

import array
import copy
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np

from penstock.data.dataset import is_current
from penstock.data.labels.known import class_names_of, is_iterable, labels_given_or_known
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.randomness.guarded import guarded_draws
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling.balance_text import table_of, verdict_of
from penstock.sampling.batches import BatchSampler
from penstock.sampling.class_items import ClassItems, class_codes
from penstock.sampling.distributed import DistributedSampler
from penstock.sampling.sampler_state import Resumable
from penstock.sampling.samplers import IndexSampler, check_positive
from penstock.summary import Summarized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


__all__ = ["BalanceReport", "ClassCounts", "balance_report"]

_BLOCK: Final = 1 << 20  # indices counted at a time: no array of a whole order is made for it
_INNER: Final = ("sampler", "batch_sampler")
_LISTS: Final = (list, tuple, range, array.array)
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)


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
    inner = _sampler_in(sampler)
    given, named = _labels_of(sampler, inner) if labels is None else (labels, labels)
    known = labels_given_or_known(given, "balance_report")
    shown = _times_shown(sampler, len(known), epochs)
    items = ClassItems.of(known)
    _check_names(items.classes, class_names)
    images, objects = _counted(items, known, shown)
    names = _names_known(named, items.classes) if class_names is None else class_names
    return BalanceReport(
        sampler=_name_of(inner),
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
    for part in _parts_of(sampler):
        if (labels := getattr(part, "labels", None)) is not None:
            return labels, part
    if _is_loader(given):
        return given.dataset, given.dataset
    raise ConfigError(
        f"balance_report needs labels, and {_name_of(sampler)} keeps none (it has no attribute "
        "`labels`). Give them as the second argument: the class of each sample, or the data set."
    )


def _counted(
    items: ClassItems, labels: NDArray[Any] | RaggedArray, shown: _ShownTimes
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


# How often a sampler shows each sample: counted on a copy of it, so that it stays as it was.


class _ShownTimes(NamedTuple):
    """What some epochs showed.

    Attributes:
        times: How often each sample came in all of them together; int64 of shape (samples,).
        epochs: In how many of them it came; int64 of shape (samples,).
        most_repeats: How often the sample that came most in one epoch came in that one.
    """

    times: NDArray[np.int64]
    epochs: NDArray[np.int64]
    most_repeats: int


def _times_shown(given: Any, num_samples: int, num_epochs: int) -> _ShownTimes:  # noqa: ANN401
    """Count some epochs of a sampler, of indices or of a loader, from the one that it is in.

    Of what shares an epoch among ranks, the whole of it is counted. Samplers of others draw with
    the global generators seeded by the epoch, and those are put back.
    """
    sampler = _sampler_in(given)
    if num_epochs > 1 and _is_indices(sampler):
        raise ConfigError(f"indices are one epoch, but got epochs={num_epochs}. Give the sampler.")
    twin = sampler if _is_indices(sampler) else _copied(sampler, {})
    seed: Any = getattr(given, "seed", None) if _is_loader(given) else None
    for part in _parts_of(twin) if seed is not None else ():
        if isinstance(part, IndexSampler):
            part.take_seed(seed)
    # The innermost sampler that has an epoch is the one that draws.
    told = [part.epoch for part in _parts_of(twin) if isinstance(getattr(part, "epoch", 0.5), int)]
    first = told[-1] if told else 0
    times, epochs = np.zeros((2, num_samples), np.int64)
    most = 0
    for epoch in range(first, first + num_epochs):
        for part in _parts_of(twin) if epoch > first else ():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        shown = np.zeros(num_samples, np.int64)
        with guarded_draws(twin, seed_sequence(0, Purpose.ORDER, epoch)):
            for indices in _blocks_of(twin):
                _count(indices, shown)
        times += shown
        epochs += shown > 0
        most = max(most, int(shown.max(initial=0)))
    return _ShownTimes(times, epochs, most)


def _sampler_in(given: Any) -> Any:  # noqa: ANN401
    """Return what gives the indices: of a loader its batch sampler or its sampler.

    Raises:
        ConfigError: it is a loader of a stream, or a dataset. Nothing is read of it.
    """
    if _is_loader(given):
        if is_iterable(given.dataset):
            raise ConfigError(
                f"{type(given).__name__} has a stream, {type(given.dataset).__name__}, and no "
                "sampler to count."
            )
        return given.sampler if given.batch_sampler is None else given.batch_sampler
    if hasattr(given, "__getitem__") and not _is_indices(given):
        raise ConfigError(
            f"balance_report counts what a sampler gives, but {type(given).__name__} has "
            "__getitem__, as datasets have. Give the sampler first: balance_report(sampler, "
            "dataset)."
        )
    return given


def _is_loader(given: Any) -> bool:  # noqa: ANN401
    """Whether it has a dataset, a sampler and a way to make batches, as loaders have."""
    return all(hasattr(given, name) for name in ("dataset", *_INNER, "collate_fn"))


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


def _blocks_of(sampler: Any) -> Iterator[NDArray[Any]]:  # noqa: ANN401
    """Yield the indices of an epoch, many at a time."""
    if isinstance(sampler, IndexSampler) and is_current(type(sampler), "indices", ("__iter__",)):
        order: Any = sampler.indices()
    elif hasattr(sampler, "__array__"):
        order = np.asarray(sampler)
    else:
        drawn = sampler.index_batches() if isinstance(sampler, BatchSampler) else iter(sampler)
        for first in drawn:  # looked at before the others
            indices = _as_indices(first)
            if indices.ndim == 0:
                yield _as_indices([first, *itertools.islice(drawn, _BLOCK - 1)])
            else:
                yield indices
        return
    for start in range(0, len(order), _BLOCK):
        yield _as_indices(order[start : start + _BLOCK])


def _as_indices(items: Any) -> NDArray[Any]:  # noqa: ANN401
    error = None
    try:
        found = np.asarray(items)
    except (TypeError, ValueError, RuntimeError) as raised:
        found, error = np.empty(1), raised
    if found.size and (found.ndim > 1 or found.dtype.kind not in "iu"):
        raise ConfigError(
            "balance_report counts integers, indices of samples, but the sampler gave a "
            f"{type(items).__name__} of {found.dtype}, shape {found.shape}."
        ) from error
    return found


def _count(indices: NDArray[Any], shown: NDArray[np.int64]) -> None:
    if not indices.size:
        return
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= len(shown):
        raise ConfigError(
            f"the sampler gave index {least if least < 0 else most}, but there are labels of "
            f"{len(shown)} samples: it was made for another data set."
        )
    np.add.at(shown, indices, 1)
