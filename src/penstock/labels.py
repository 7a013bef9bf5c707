# SPDX-License-Identifier: Apache-2.0
"""`labels_of`: the class of every sample, known, or read from all samples once."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.combinators import Subset
from penstock.data.labels.cache import LabelCache
from penstock.data.labels.of_sample import Found, ReadLabels, as_found, label_of_sample
from penstock.data.labels.search import LabelSearch, is_iterable, length_of
from penstock.data.labels.values import NotLabelsError, numbered
from penstock.data.names import describe_sample
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, PenstockError
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
_REDRAW_S: Final = 0.1
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
    num_workers: int | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool | None = None,
) -> NDArray[np.int64] | RaggedArray:
    """Return the class of every sample, without reading one if the dataset tells them.

    Where it looks is what `penstock.data.labels.known` says. Labels that are strings become
    numbers, in the order of their sorted texts.

    With `scan=True` the labels of a dataset that does not tell them are read from its samples, once
    and by worker processes, and kept in a file beside it. That file is used again while the
    dataset's fingerprint is the same. Where it has no fingerprint, 16 samples spread over it are
    compared first, so a change elsewhere may go unseen: `cache=False` reads all of them again.

    Args:
        dataset: Map-style, with a length.
        scan: Whether every sample may be read.
        get_label: Returns the label of a sample, with `scan=True`; then the dataset is not asked.
            An integer, bool or string, or several of them, or a row of bools, one for each class.
            By default it is the last of a tuple, or in a dict what is called "labels", "label",
            "targets" or "target".
        column: What the labels are called: a Hugging Face column ("objects.category" for a field),
            an attribute, a part of a `StackDataset`, a key of samples that are dicts; or their
            place in tuples.
        num_workers: Processes that read; None is one for each usable core.
        cache: Whether to keep what was read in the dataset's `root`, `path` or beside its store; or
            a folder or file (`*.npz`) for it. Without such a place it is not kept.
        progress: Whether to show how far it has come, on stderr; None if that is a terminal.

    Returns:
        int64, shape (len(dataset),), which may be the dataset's own array; or a `RaggedArray` where
        samples have several classes, or none.

    Raises:
        ConfigError: the labels are not known and `scan` is False, a sample has none, or the dataset
            is a stream. A sample that cannot be read raises its own error, with its name.

    Example:
        >>> from penstock.data import ArrayDataset, Subset
        >>> pairs = ArrayDataset(np.zeros((4, 2)), np.array([5, 6, 6, 5]))
        >>> labels_of(Subset(pairs, [0, 2]))
        array([5, 6])
        >>> labels_of([("a", "dog"), ("b", "cat"), ("c", "dog")], scan=True)
        array([1, 0, 1])
    """
    _check(dataset, scan=scan, get_label=get_label)
    search = LabelSearch(column)
    known = search.find(dataset) if get_label is None else None
    if known is None and not scan:
        raise ConfigError(_not_known(dataset, search))
    try:
        if known is not None:
            return known if isinstance(known, RaggedArray) else numbered(known)
    except NotLabelsError as error:
        raise ConfigError(f"The labels of {_kind(dataset)} are {error}.") from None
    view = _LabelView(dataset, get_label, column)
    kept = LabelCache(dataset, get_label, column, cache)
    read = kept.load()
    if read is None or not (kept.is_certain or _agrees(view, read)):
        read = _scanned(view, num_workers, progress)
        kept.save(read)
    return read.labels


def _check(dataset: Any, *, scan: bool, get_label: object) -> None:  # noqa: ANN401
    if is_iterable(dataset):
        raise ConfigError(
            f"{_kind(dataset)} is a stream: its samples have no numbers, so no sampler can choose "
            "among them and labels_of cannot list their labels. "
            "`penstock.sampling.BalancedShuffle` balances a stream while it is read."
        )
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"{_kind(dataset)} holds {sorted(map(str, dataset))[:8]}: give labels_of one of them."
        )
    if length_of(dataset) is None or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            "labels_of takes a dataset with __len__ and __getitem__; "
            f"{_kind(dataset)} has not both."
        )
    if get_label is not None and not scan:
        raise ConfigError("get_label reads samples: allow it by scan=True, or leave get_label out.")


def _not_known(dataset: Any, search: LabelSearch) -> str:  # noqa: ANN401
    return (
        f"{_kind(dataset)} does not tell the labels of its {len(dataset)} samples: "
        f"{search.report()}. Give it an attribute `labels` (an array with one label per sample), "
        "name what holds them by `column=`, or let labels_of(dataset, scan=True) read every sample "
        "once."
    )


def _kind(dataset: object) -> str:
    return type(dataset).__qualname__


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
                f"{self.name(index)} of {_kind(self._dataset)} {error}. Give `get_label=`, a "
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
    """Whether some samples, spread over the dataset, have the labels that were kept."""
    positions = np.unique(np.linspace(0, len(view) - 1, min(len(view), _NUM_CHECKED)).astype(int))
    some: Subset[Found] = Subset(view, positions.tolist())
    loader: Loader[Found] = Loader(some, batch_size=_NUM_CHECKED, collate_fn=_as_they_are)
    try:
        found = [label for batch in loader for label in batch]
    except Exception:  # the scan comes to it as well, and says it
        return False
    return read.agree(positions.tolist(), found)


def _scanned(view: _LabelView, num_workers: int | None, progress: bool | None) -> ReadLabels:
    found: list[Found] = []
    loader: Loader[Found] = Loader(
        view,
        batch_size=_BATCH,
        num_workers=_usable(len(view)) if num_workers is None else num_workers,
        collate_fn=_as_they_are,
    )
    batches: Any = iter(loader)
    try:
        # Closed at once: after an error the traceback would keep it, and its workers, alive.
        with contextlib.closing(batches), _Line(len(view), progress) as line:
            for batch in batches:
                found += batch
                line.show(len(found))
    except Exception as error:
        if not isinstance(error, PenstockError):
            annotate(error, _ADVICE)
        raise
    try:
        read = ReadLabels.of(found, view.name)
    except NotLabelsError as error:
        raise ConfigError(
            f"Read from the samples, {error}. Give `get_label=`, a function that returns labels of "
            "one kind."
        ) from None
    if view.is_by_rule:
        _refuse_one_hot(read.labels)
    return read


def _refuse_one_hot(labels: Labels) -> None:
    """Raise where every label is a row of as many zeros and ones.

    One cannot see whether these are two classes or one column per class, and a wrong guess would
    go unseen.
    """
    if not isinstance(labels, RaggedArray) or len(labels) < 2:
        return
    widths = np.unique(np.diff(labels.offsets))
    if len(widths) == 1 and widths[0] > 1 and np.isin(labels.values, (0, 1)).all():
        raise ConfigError(
            f"Every sample's label is a row of {widths[0]} zeros and ones. If there is one for "
            "each class, give get_label=lambda sample: np.asarray(sample[-1], bool); if they are "
            "numbers of classes, get_label=lambda sample: sample[-1]."
        )


def _usable(num_samples: int) -> int:
    """Return as many workers as there are cores for this process, and work for them."""
    if num_samples < _FEW:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, -(-num_samples // _BATCH))


class _Line:
    """How far it has come, in one line of a terminal that is written over and wiped at the end."""

    def __init__(self, num_all: int, wanted: bool | None) -> None:
        self._num_all = num_all
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._is_shown = is_terminal if wanted is None else wanted
        self._start_s = self._drawn_s = time.monotonic()
        self._width = 0

    def __enter__(self) -> _Line:
        return self

    def show(self, num_done: int) -> None:
        """Write it anew, unless that was a moment ago."""
        now_s = time.monotonic()
        if not self._is_shown or (now_s - self._drawn_s < _REDRAW_S and num_done < self._num_all):
            return
        self._drawn_s = now_s
        rate = num_done / max(now_s - self._start_s, 1e-9)
        left_s = (self._num_all - num_done) / rate
        text = f"labels: {num_done} of {self._num_all} samples, {rate:.0f}/s, {left_s:.0f} s left"
        self._write(text.ljust(self._width))
        self._width = len(text)

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write(" " * self._width)
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()
