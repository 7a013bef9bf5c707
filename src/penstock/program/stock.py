# SPDX-License-Identifier: Apache-2.0
"""Monitoring of torch's own loader: how long the program waits for each batch.

    DataLoader.__init__     the line that makes it       ┐
    DataLoader.__iter__     the start of an epoch        ├─▶ StockMonitor ─▶ History
    iterator._next_index    the samples per batch        │   one for each loader
    iterator._next_data     the time that a batch takes  ┘

`_next_data` is wrapped, not `__next__`: torch's warnings in `__next__` name its caller's line.
The dataset is not accessed, and no random numbers are drawn.
"""

from __future__ import annotations

import datetime
import functools
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from penstock.data.dataset import length_of
from penstock.engine.timing import EpochEnd, TimingRow
from penstock.insight.budgets import cores_of_rank
from penstock.insight.history import History
from penstock.insight.monitor import Accounts, settings_of
from penstock.insight.stats import Verdict
from penstock.lines import percent
from penstock.warn import users_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.insight.verdict import Inputs

# Attributes set on torch's iterators, which cannot be pickled and live as long as their loop.
_ASKED: Final = "_penstock_asked"
_CLOCK: Final = "_penstock_clock"


def watch(watcher: Callable[[StockMonitor, Any], object]) -> None:
    """Monitor all of torch's loaders in this process from now on.

    `watcher` is called with a monitor and its loader when its first epoch begins. What it returns
    lives as long as the monitor.
    """
    monitors: dict[int, StockMonitor] = {}  # by the loader's id: not every loader has a hash

    def monitor_of(loader: Any) -> StockMonitor:  # noqa: ANN401
        monitor = monitors.get(id(loader))
        if monitor is None:  # a copy, made without the constructor, gets its first loop's line
            monitor = monitors[id(loader)] = StockMonitor(users_place(), watcher)
            weakref.finalize(loader, monitors.pop, id(loader), None).atexit = False
        return monitor

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        original(self, *args, **kwargs)
        monitor_of(self)

    def iterate(original: Any, self: Any) -> Any:  # noqa: ANN401
        begun_ns = time.monotonic_ns()
        # With persistent workers: of batches that the loop left behind.
        vars(getattr(self, "_iterator", None) or self).pop(_ASKED, None)
        iterator = original(self)
        is_torchs = isinstance(iterator, _BaseDataLoaderIter)  # Penstock's has a monitor already
        if is_torchs and get_worker_info() is None:
            monitor_of(self).begin_epoch(self, iterator, begun_ns)
        return iterator

    _wrap(DataLoader, "__init__", init)
    _wrap(DataLoader, "__iter__", iterate)
    _wrap(_BaseDataLoaderIter, "_next_index", _next_index)
    for kind in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
        _wrap(kind, "_next_data", _next_data)


def _wrap(kind: Any, name: str, around: Callable[..., Any]) -> None:  # noqa: ANN401
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return around(original, self, *args, **kwargs)

    setattr(kind, name, wrapped)


class StockMonitor:
    """The monitor of one loader, over all its epochs; it holds no reference to the loader."""

    def __init__(self, made_at: str, watcher: Callable[[StockMonitor, Any], object]) -> None:
        """Make a monitor of a loader without epochs."""
        self.made_at = made_at
        self.history = History(judge=_judge)
        self._watcher = watcher
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._num_epochs = 0

    def begin_epoch(self, loader: Any, iterator: Any, begun_ns: int) -> None:  # noqa: ANN401
        """Start an epoch of `loader`, and time the batches of its iterator."""
        if not self._num_epochs:
            self._watched = self._watcher(self, loader)
        setattr(iterator, _CLOCK, _Clock(self, self._num_epochs, loader, begun_ns))
        self._num_epochs += 1

    def accounts(self, loader: Any) -> Accounts:  # noqa: ANN401
        """Return the loader's settings and statistics, which hold no reference to it or to this."""
        history, started, settings = self.history, self._started, settings_of(loader)
        stats = functools.partial(
            history.stats,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor or 0,
            cores=cores_of_rank(),
        )
        return Accounts(
            settings,
            stats,
            lambda: history.recording(settings, (), stats(), started=started),
            tuple,  # a bad sample ends the epoch
        )


class _Clock:
    """The timing of one epoch: waiting for batches, and the program's own code between them."""

    def __init__(self, monitor: StockMonitor, epoch: int, loader: Any, begun_ns: int) -> None:  # noqa: ANN401
        self._monitor = monitor  # the iterator may outlive its loader
        self._starting_ns = time.monotonic_ns() - begun_ns
        self.taken_ns = 0  # when the last batch was given
        self._batch_size = loader.batch_size or 1
        lookahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._row = TimingRow(epoch=epoch, num_workers=loader.num_workers, lookahead=lookahead)

    def give(self, asked_ns: int, num_samples: int | None) -> None:
        now = time.monotonic_ns()
        row = self._row._replace(
            asked_ns=asked_ns - self._starting_ns,
            given_ns=now,
            consumer_ns=asked_ns - self.taken_ns if self.taken_ns else 0,
            # The last batch of a stream may be smaller, which is not looked at.
            num_samples=self._batch_size if num_samples is None else num_samples,
        )
        self._monitor.history.add(row)
        self._row = self._row._replace(step=row.step + 1)
        self._starting_ns = 0
        self.taken_ns = now

    def end(self, asked_ns: int) -> None:
        consumer_ns = asked_ns - self.taken_ns if self.taken_ns else 0
        self._monitor.history.epoch_ended(self._row.epoch, EpochEnd(asked_ns, consumer_ns))


def _next_index(original: Any, self: Any) -> Any:  # noqa: ANN401
    """Note the number of samples in a batch of a map-style dataset."""
    index = original(self)
    if self._dataset_kind == _DatasetKind.Map:
        count = length_of(index) if self._auto_collation else None
        vars(self).setdefault(_ASKED, deque()).append(1 if count is None else count)
    return index


def _next_data(original: Any, self: Any) -> Any:  # noqa: ANN401
    clock: _Clock | None = getattr(self, _CLOCK, None)
    if clock is None:  # a loader inside a worker
        return original(self)
    asked_ns = time.monotonic_ns()
    try:
        batch = original(self)
    except StopIteration:
        clock.end(asked_ns)
        raise
    except BaseException:
        _num_asked(self)
        # The wait for an error is no time of the program's own.
        clock.taken_ns = clock.taken_ns and time.monotonic_ns()
        raise
    clock.give(asked_ns, _num_asked(self))
    return batch


def _num_asked(iterator: Any) -> int | None:  # noqa: ANN401
    """Return the number of samples in the next batch in order; None for an iterable dataset.

    With `in_order=False` it may belong to another batch; the sum over an epoch is right.
    """
    asked: deque[int] = getattr(iterator, _ASKED, deque())
    return asked.popleft() if asked else None


def _judge(inputs: Inputs) -> Verdict:
    run = inputs.run or inputs.span
    return Verdict(
        "unknown",
        f"The main process waits {percent(run.wait_share)} of the time. A run without --engine "
        "torch shows why.",
    )
