# SPDX-License-Identifier: Apache-2.0
"""`labels_of`: the class of every sample, known, or read from all samples once."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np

from penstock.data.combinators import Subset
from penstock.data.labels.cache import LabelCache
from penstock.data.labels.known import of_splits
from penstock.data.labels.objects import Objects, labels_by_objects
from penstock.data.labels.of_sample import Found, ReadLabels, as_found, label_of_sample
from penstock.data.labels.progress_line import ProgressLine
from penstock.data.labels.search import LabelSearch, is_iterable, kind_of, length_of
from penstock.data.labels.values import NotLabelsError, check_no_columns, numbered
from penstock.data.names import describe_sample
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, PenstockError, UnpicklableError
from penstock.faults import annotate
from penstock.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Labels = NDArray[np.int64] | RaggedArray

__all__ = ["labels_of"]

_BATCH: Final = 32  # samples whose labels travel together
_FEW: Final = 64  # starting workers takes longer than reading as many
_NUM_CHECKED: Final = 16  # samples that are compared with a cache
_MOST_ALONE: Final = 20  # samples of which each may have a class of its own
_STEP: Final = re.compile(r"(^in |, )epoch \d+, step \d+$")
_ADVICE: Final = (
    "labels_of(scan=True) reads every sample for its label. Repair this one, leave it out with a "
    "`Subset`, or give the dataset an attribute `labels`."
)


def labels_of(
    dataset: Any,  # noqa: ANN401 - anything with an index and a length
    *,
    scan: bool = False,
    get_label: Callable[[Any], Any] | None = None,
    column: str | int | None = None,
    objects: Objects = "all",
    num_workers: int | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool | None = None,
) -> NDArray[np.int64] | RaggedArray:
    """Return the class of every sample, without reading one if the dataset tells them.

    Where it looks is what `penstock.data.labels.known` says. Labels that are strings become
    numbers, in the order of their sorted texts: those of this dataset, so that two datasets with
    other texts are not numbered alike (`penstock.data.labels.known.class_names_of` tells them).

    With `scan=True` the labels of a dataset that does not tell them are read from its samples, once
    and by worker processes, and kept in a file beside its folder, also for subsets of it. That file
    is used again while the dataset's fingerprint and settings are the same. Where it has no
    fingerprint, up to 32 samples, spread over it and of its rarest classes, are compared first, so
    a change elsewhere may go unseen: `cache=False` reads all of them again. Under several ranks,
    scan on rank 0 first and let the others wait, or each reads everything.

    Args:
        dataset: Map-style, with a length.
        scan: Whether every sample may be read.
        get_label: Returns the label of a sample, with `scan=True`; then the dataset is not asked.
            An integer, bool or string, or several of them, or a row of bools, one for each class.
            By default it is the last of a tuple, or in a dict what is called "labels", "label",
            "targets" or "target".
        column: What the labels are called: a field of annotations ("pose"), a Hugging Face column
            ("objects.category" for a field), an attribute, a part of a `StackDataset`, a key of
            samples that are dicts; or their place in tuples.
        objects: Which of a sample's classes are returned where it has several: "all", that of its
            "first" object, or the "rarest", which the fewest samples have.
        num_workers: Processes that read; None is one for each usable core.
        cache: Whether to keep what was read beside the dataset's `root` or `path` or its store; or
            a folder or file (`*.npz`) for it. Without such a place it is not kept, nor is it where
            `get_label` depends on something that cannot be pickled.
        progress: Whether to show how far it has come, and where the labels are kept, on stderr;
            None if that is a terminal.

    Returns:
        int64, shape (len(dataset),), which may be the dataset's own array; or a `RaggedArray` where
        samples have several classes, or none.

    Raises:
        ConfigError: the labels are not known and `scan` is False, a sample has none, the dataset
            is a stream or empty, or `cache` names a file of something else. A sample
            that cannot be read raises its own error, with its name.

    Warns:
        UserWarning: the samples' labels are all different, or cannot be kept where `cache` says.

    Example:
        >>> from penstock.data import ArrayDataset, Subset
        >>> pairs = ArrayDataset(np.zeros((4, 2)), np.array([5, 6, 6, 5]))
        >>> labels_of(Subset(pairs, [0, 2]))
        array([5, 6])
        >>> labels_of([("a", "dog"), ("b", "cat"), ("c", "dog")], scan=True)
        array([1, 0, 1])
    """
    _check(dataset, objects, scan=scan, get_label=get_label)
    search = LabelSearch(column)
    known = search.find(dataset) if get_label is None else None
    if known is None and not scan:
        raise ConfigError(_not_known(dataset, search, column))
    try:
        if known is not None:
            known = labels_by_objects(known, objects)
            return known if isinstance(known, RaggedArray) else numbered(known)
    except NotLabelsError as error:
        raise ConfigError(f"The labels of {kind_of(dataset)} are {error}.") from None
    if not len(dataset):
        raise ConfigError(
            f"{kind_of(dataset)} has no samples, so none to read a label from: look at the path or "
            "pattern that it was made with."
        )
    view = _LabelView(dataset, get_label, column)
    kept = LabelCache(dataset, get_label, column, cache)
    read = kept.load()
    if read is None or not (kept.is_certain or _agrees(view, read)):
        line = ProgressLine(len(view), progress)
        read = _scanned(view, num_workers, line)
        if kept.save(read):
            line.tell(f"kept in {kept.path}")
        elif kept.why_not:
            line.tell(f"not kept: {kept.why_not}")
    return labels_by_objects(read.labels, objects)


def _check(dataset: Any, objects: Objects, *, scan: bool, get_label: object) -> None:  # noqa: ANN401
    if objects not in get_args(Objects):
        raise ConfigError(f"objects is 'all', 'first' or 'rarest', not {objects!r}.")
    if is_iterable(dataset):
        raise ConfigError(
            f"{kind_of(dataset)} is a stream: its samples have no numbers, so no sampler can "
            "choose among them and labels_of cannot list their labels. "
            "`penstock.sampling.BalancedShuffle` balances a stream while it is read."
        )
    if isinstance(dataset, Mapping):
        raise ConfigError(of_splits(dataset, "labels_of"))
    if length_of(dataset) is None or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            "labels_of takes a dataset with __len__ and __getitem__; "
            f"{kind_of(dataset)} has not both."
        )
    if get_label is not None and not scan:
        raise ConfigError("get_label reads samples: allow it by scan=True, or leave get_label out.")


def _not_known(dataset: Any, search: LabelSearch, column: str | int | None) -> str:  # noqa: ANN401
    cures = (
        "Give it an attribute `labels` (an array with one label per sample), name what holds them "
        "by `column=`, or let labels_of(dataset, scan=True) read every sample once."
    )
    if search.refusal:
        return f"{kind_of(dataset)}: {search.refusal}"
    if column is not None:
        cures = (
            f"Name another column, or let labels_of(dataset, column={column!r}, scan=True) read it "
            "from every sample once."
        )
    return (
        f"{kind_of(dataset)} does not tell the labels of its {len(dataset)} samples: "
        f"{search.report()}. {cures}"
    )


class _LabelView:
    """A dataset of which only the labels are seen, so that nothing else leaves a worker."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        get_label: Callable[[Any], Any] | None,
        column: str | int | None,
    ) -> None:
        self._dataset = dataset
        self._get_label = get_label
        self._column = column

    @property
    def is_by_rule(self) -> bool:
        return self._get_label is None

    @property
    def kind(self) -> str:
        return kind_of(self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Found:
        sample = self._dataset[index]
        try:
            if self._get_label is not None:
                return as_found(self._get_label(sample))
            return label_of_sample(sample, self._column)
        except NotLabelsError as error:
            raise ConfigError(
                f"{self.name(index)} of {kind_of(self._dataset)} {error}. Give `get_label=`, a "
                "function of a sample that returns its class: an integer, a bool, a string, or "
                "several."
            ) from error

    def name(self, index: int) -> str:
        described = describe_sample(self._dataset, index)
        return f"Sample {index}" if described is None else f"Sample {index} ({described})"

    def describe(self, index: int) -> str:
        described = describe_sample(self._dataset, index)
        if described is None:
            raise LookupError(f"sample {index} has no name")
        return described


def _as_they_are(labels: list[Found]) -> list[Found]:
    return labels


def _agrees(view: _LabelView, read: ReadLabels) -> bool:
    """Whether some samples, spread over the dataset and its classes, have the labels kept."""
    spread = np.linspace(0, len(view) - 1, min(len(view), _NUM_CHECKED)).astype(int)
    positions = np.union1d(spread, _rarest(read.labels))
    some: Subset[Found] = Subset(view, positions.tolist())
    loader: Loader[Found] = Loader(some, batch_size=_BATCH, collate_fn=_as_they_are)
    try:
        found = [label for batch in loader for label in batch]
    except Exception:  # the scan comes to it as well, and says it
        return False
    return read.agree(positions.tolist(), found)


def _rarest(labels: Labels) -> NDArray[np.int64]:
    """Return the first sample of each of the classes that have the fewest."""
    values = labels.values if isinstance(labels, RaggedArray) else labels
    _, first, counts = np.unique(values, return_index=True, return_counts=True)
    first = first[np.argsort(counts, kind="stable")[:_NUM_CHECKED]]
    if isinstance(labels, RaggedArray):
        first = np.searchsorted(labels.offsets, first, side="right") - 1
    return first.astype(np.int64)


def _scanned(view: _LabelView, num_workers: int | None, line: ProgressLine) -> ReadLabels:
    found: list[Found] = []
    loader: Loader[Found] = Loader(
        view,
        batch_size=_BATCH,
        num_workers=_usable(len(view)) if num_workers is None else num_workers,
        collate_fn=_as_they_are,
    )
    try:
        batches: Any = iter(loader)
        # Closed at once: after an error the traceback would keep it, and its workers, alive.
        with contextlib.closing(batches), line:
            for batch in batches:
                found += batch
                line.show(len(found))
                if len(found) == len(batch) and len(batch) == _BATCH:  # rather than after hours
                    _read_labels(view, found)
    except UnpicklableError as error:
        annotate(error, "Or read in this process: labels_of(..., num_workers=0).")
        raise
    except Exception as error:
        if not isinstance(error, PenstockError):
            _say_as_scan(error)
        raise
    read = _read_labels(view, found)
    _warn_of_indices(view, read.labels)
    return read


def _read_labels(view: _LabelView, found: list[Found]) -> ReadLabels:
    try:
        read = ReadLabels.of(found, view.name)
    except NotLabelsError as error:
        raise ConfigError(
            f"Read from the samples, {error}. Give `get_label=`, a function that returns labels of "
            "one kind."
        ) from None
    try:
        if view.is_by_rule:
            check_no_columns(read.labels)
    except NotLabelsError:
        width = int(read.labels.offsets[1])  # type: ignore[union-attr]
        raise ConfigError(
            f"Every sample's label is a row of {width} zeros and ones. If there is one for each "
            "class, give get_label=lambda sample: np.asarray(sample[-1], bool); if they are "
            "numbers of classes, get_label=lambda sample: sample[-1]."
        ) from None
    return read


def _say_as_scan(error: Exception) -> None:
    """Tell a sample's own error as one of this scan; the loader's options and steps are not it."""
    notes = [note for note in getattr(error, "__notes__", ()) if "on_error=" not in note]
    notes = [_STEP.sub("", note) for note in notes]
    error.__notes__ = [note for note in notes if note]
    annotate(error, _ADVICE)


def _warn_of_indices(view: _LabelView, labels: Labels) -> None:
    """Warn where each sample has a class of its own."""
    if isinstance(labels, RaggedArray) or len(labels) <= _MOST_ALONE:
        return
    if len(np.unique(labels)) == len(labels):
        warnings.warn(
            f"The labels of all {len(labels)} samples of {view.kind} are different: they may be "
            "numbers of the samples, not classes. If the class has another place in a sample, give "
            "its position or key, as column=1.",
            stacklevel=4,
        )


def _usable(num_samples: int) -> int:
    """Return as many workers as there are cores for this process, and work for them."""
    if num_samples < _FEW:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, -(-num_samples // _BATCH))
