# SPDX-License-Identifier: Apache-2.0
"""Monitor of a loader: records every batch, for stats, report, trace and autotuning.

Stream ── TimingRow ────▶ Monitor ──▶ History      stats(), report(), trace()
       ◀── WorkerSettings ─────────    │  ├───▶ Tuner        num_workers="auto"
                             │  └───▶ ProgressBar  progress=True
                             └──────▶ subscribers  subscribe(callback)
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from penstock.engine.backends import traits_of
from penstock.errors import ConfigError
from penstock.faults import FaultPolicy
from penstock.insight.budgets import Auto, cores_of_rank, local_ranks
from penstock.summary import Summarized, kind_of, length_or_none
from penstock.system_limits import memory_now
from penstock.warn import users_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from penstock.engine.fault_log import FaultLog
    from penstock.engine.plan import Epoch
    from penstock.engine.timing import EpochEnd, TimingRow, WorkerSettings
    from penstock.faults import Failure
    from penstock.insight.history import History
    from penstock.insight.progress import ProgressBar
    from penstock.insight.recording import Recording
    from penstock.insight.stats import Stats
    from penstock.insight.tuner import Tuner
    from penstock.options import LoaderOptions

_PREFETCH: Final = 2

_log = logging.getLogger("penstock")

# Called with a monitor and its loader when its first epoch begins; `penstock run` is one. What it
# returns lives as long as the monitor.
watchers: list[Callable[[Monitor, Any], object]] = []


class AutoWorkers(int):
    """`num_workers` of a loader that chooses it: the number it begins with, and still "auto".

    Programs that make a loader anew from the attributes of another (Lightning, Accelerate) take it
    for the integer it is, and hand it on as what it means.

    Attributes:
        limits: What it may take.
    """

    limits: Auto

    def __new__(cls, number: int, limits: Auto) -> Self:
        """Begin with `number` workers."""
        self = super().__new__(cls, number)
        self.limits = limits
        return self

    def __repr__(self) -> str:
        """Say what it means."""
        return "'auto'" if self.limits == Auto() else repr(self.limits)

    def __str__(self) -> str:
        """Say what was given, as a text."""
        return repr(self).strip("'")

    def __eq__(self, other: object) -> bool:
        """Equal to "auto", and to the number."""
        return other == "auto" or int.__eq__(self, other) is True

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[type[AutoWorkers], tuple[int, Auto]]:
        """Pickle as what it is."""
        return AutoWorkers, (int(self), self.limits)


class Accounts(NamedTuple):
    """Settings and figures of a loader, also once it is gone."""

    settings: dict[str, Any]
    stats: Callable[[], Stats]
    recording: Callable[[], Recording]
    failures: Callable[[], Sequence[Failure]]


class Monitor:
    """The accounts of one loader, over all its epochs; a pickled copy knows nothing yet.

    Attributes:
        num_workers: As a loader has it: `AutoWorkers` where "auto" was asked for.
        measures: Whether each batch is measured. Else only when it was asked for and given.
        made_at: The line of the program that made the loader, as "train.py:31"; empty where
            there are no `watchers`.
    """

    def __init__(self, dataset: object, options: LoaderOptions) -> None:
        """Measure nothing yet.

        Raises:
            MissingExtraError: a progress bar needs a package that is not installed.
        """
        self._arguments = dataset, options
        traits = traits_of(options.backend)
        self.made_at = users_place() if watchers else ""
        self.is_iterable = options.is_iterable
        self._cores = cores_of_rank()
        self._tuner: Tuner | None = None
        self.num_workers: Any = options.num_workers
        if options.limits is not None:
            from penstock.insight.tuner import Tuner

            left_bytes = memory_now().left_bytes
            self._tuner = Tuner(
                options.limits,
                cores=self._cores,
                memory_left_bytes=None if left_bytes is None else left_bytes // local_ranks(),
                prefetch_factor=options.prefetch_factor,
                shares_lock=traits.shares_interpreter,
                is_forked=_is_forked(options.context),
            )
            self.num_workers = AutoWorkers(self._tuner.workers.num_workers, options.limits)
        self._workers = int(self.num_workers), options.prefetch_factor or _PREFETCH
        from penstock.insight.history import History  # not before there is a loader

        keeps_workers = options.persistent_workers
        self._history = History(dataset, backend=options.backend, persistent_workers=keeps_workers)
        # A stream appends the fields of `timing.LIGHT`, and calls the two functions.
        self.light, self.fold = self._history.light, self._history.fold
        self.worker_replaced = self._history.note_replacement
        self._started = ""
        self._newest: Epoch | None = None  # that was begun last, and goes on
        self._bar: ProgressBar | None = None
        if options.progress:
            from penstock.insight.progress import open_progress

            self._bar = open_progress("" if options.progress is True else options.progress)
        self._subscribers: list[_Subscriber] = []
        self._may_measure = options.monitor != "light"
        # From workers on other machines batches take milliseconds, and are always measured there.
        is_free = not traits.is_local and self._may_measure
        is_wanted = options.monitor == "full" or options.is_auto or bool(options.progress)
        self.measures = is_wanted or is_free
        self._watched: list[object] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a monitor that has seen nothing."""
        return Monitor, self._arguments

    @property
    def workers(self) -> tuple[int, int]:
        """Workers and prefetch factor, of now or of the next iterator."""
        return self._workers if self._tuner is None else self._tuner.workers

    def workers_of(self, num_workers: Any, prefetch_factor: int | None) -> tuple[int, int]:  # noqa: ANN401
        """Return with how many workers, and what prefetch factor, an iterator is to begin.

        Args:
            num_workers: As the loader has it now.
            prefetch_factor: As the loader has it now.
        """
        if isinstance(num_workers, AutoWorkers):
            return self.workers
        self._tuner = None  # a number that was assigned since is what counts
        self._workers = int(num_workers), prefetch_factor or _PREFETCH
        return self._workers

    @property
    def max_workers(self) -> int:
        """How many workers there may come to be; 0: as many as there are."""
        return 0 if self._tuner is None else self._tuner.max_workers

    def epoch_begun(self, epoch: Epoch, loader: Any) -> None:  # noqa: ANN401
        """Take note that `loader` begins an epoch, or goes on in one."""
        self._newest = epoch
        if not self._started:
            now = datetime.datetime.now(datetime.UTC)
            self._started = now.isoformat(timespec="seconds")
            self._watched = [watcher(self, loader) for watcher in watchers]
            if watchers:
                self.measure()
        if self._bar is not None:
            # An iterable's length is its user's guess, and torch's loader counts who asks.
            num_batches = None if self.is_iterable else length_or_none(loader)
            self._bar.begin(epoch.number, num_batches, epoch.progress.given.num_steps)

    def measure(self) -> None:
        """Measure from now on, unless the user has said "light"."""
        self.measures = self.measures or self._may_measure

    batches_are_long = measure  # then it costs next to nothing

    def batch_given(
        self, row: TimingRow, indices: object, sample_us: bytes, epoch: Epoch
    ) -> WorkerSettings | None:
        """Take note of a batch of `epoch`; return new settings, or None."""
        self._history.add(row, indices, sample_us)
        # Of several iterators at once, one shows its progress and has its workers chosen.
        is_newest = epoch is self._newest
        if self._bar is not None and is_newest:
            self._bar.advance(row)
        for subscriber in self._subscribers:
            if row.given_ns >= subscriber.next_ns:
                subscriber.next_ns = row.given_ns + subscriber.every_ns
                self._call(subscriber)
        if self._tuner is None or not is_newest:
            return None
        workers = self._tuner.observe(row)
        if workers is not None:
            from penstock.insight.stats import Change

            reason = self._tuner.reason
            self._history.changes.append(Change(row.epoch, row.step, *workers, reason))
            _log.info("%d workers, prefetch_factor %d: %s", *workers, reason)
        return workers

    def epoch_ended(self, epoch: Epoch, end: EpochEnd) -> None:
        """Take note that the consumer asked for a batch after the last one."""
        self._history.epoch_ended(epoch.number, end)
        if self._bar is not None and epoch is self._newest:
            self._bar.add_failed(end.num_failed)
        self.epoch_left(epoch)
        for subscriber in list(self._subscribers):
            self._call(subscriber)

    def epoch_left(self, epoch: Epoch) -> None:
        """Take note that `epoch` is over, or left; another iterator may have begun since."""
        if self._newest is epoch:
            self._newest = None
            if self._bar is not None:
                self._bar.end()

    def _call(self, subscriber: _Subscriber) -> None:
        try:
            subscriber.callback(self.stats())
        except Exception:
            # Training is not to end because a chart cannot be drawn.
            self._drop(subscriber)
            _log.exception(
                "%r, a subscriber of the loader's stats, failed. It is not called again; training "
                "goes on.",
                subscriber.callback,
            )

    def subscribe(self, callback: Any, every_s: float) -> Callable[[], None]:  # noqa: ANN401
        """See `Observed.subscribe`."""
        if not callable(callback) or not every_s >= 0:
            raise ConfigError(
                "subscribe takes a function of Stats and every_s, a number of seconds from 0 on, "
                f"got {callback!r} and {every_s!r}"
            )
        self.measures = True
        subscriber = _Subscriber(callback, every_s * 1e9)
        self._subscribers = [*self._subscribers, subscriber]
        return lambda: self._drop(subscriber)

    def _drop(self, subscriber: _Subscriber) -> None:
        self._subscribers = [other for other in self._subscribers if other is not subscriber]

    def stats(self) -> Stats:
        """Return sums and a verdict; any thread."""
        self.measure()
        return _stats(self._history, self._tuner, self._workers, self._cores)

    def accounts(self, loader: Observed) -> Accounts:
        """Return settings and figures of the loader, which hold no reference to it or to this.

        They keep the dataset.
        """
        settings, faults, started = loader._settings(), loader._faults, self._started
        history = self._history
        stats = functools.partial(_stats, history, self._tuner, self._workers, self._cores)
        return Accounts(
            settings,
            stats,
            lambda: history.recording(settings, faults.failures, stats(), started=started),
            lambda: faults.failures,
        )


def _stats(history: History, tuner: Tuner | None, workers: tuple[int, int], cores: float) -> Stats:
    num_workers, prefetch_factor = workers if tuner is None else tuner.workers
    return history.stats(
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        cores=cores,
        is_auto=tuner is not None,
    )


def _is_forked(context: Any) -> bool:  # noqa: ANN401 - any context; None is the default one
    # Asking for the default decides it, unless it is decided.
    default = multiprocessing.get_start_method(allow_none=True)
    name = default if context is None else context.get_start_method()
    return (name or multiprocessing.get_all_start_methods()[0]) == "fork"


@dataclasses.dataclass(eq=False)
class _Subscriber:
    callback: Callable[[Stats], object]
    every_ns: float
    next_ns: float = 0.0


class Observed(Summarized):
    """The methods `stats`, `report`, `trace` and `subscribe` of both loaders."""

    _monitor: Monitor
    _faults: FaultLog
    failures: Any
    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    collate_fn: Any

    _shows = ("dataset", "length", "batch_size", "num_workers", "seed", "backend")
    _shows_unless: ClassVar = {
        "pin_memory": False, "drop_last": False, "timeout": 0, "worker_init_fn": None,
        "persistent_workers": False, "in_order": True, "on_error": "raise", "progress": False,
        "monitor": "auto", "global_rng": True, "device": None,
    }  # fmt: skip

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield from super()._summary()
        if not self._monitor.is_iterable:
            is_batched = self.batch_size is None and self.batch_sampler is not None
            order = self.batch_sampler if is_batched else self.sampler
            if type(order).__name__ != "SequentialSampler":
                yield "batch_sampler" if is_batched else "sampler", kind_of(order)
        name = getattr(self.collate_fn, "__name__", "")
        if self.collate_fn is not None and name not in _USUAL_COLLATES:
            yield "collate_fn", self.collate_fn

    def _known_length(self) -> int | None:
        # Not of a stream: torch remembers what `len` returned, and warns if there is more.
        return None if self._monitor.is_iterable else super()._known_length()

    def _settings(self) -> dict[str, Any]:
        """Return what the loader was made with, by name."""
        return settings_of(self)

    def stats(self) -> Stats:
        """Return where the time went, over the last batches, the epoch and the run.

        `print(loader.stats().verdict)` says in words why the main process waits, and what to do.

        Returns:
            A frozen record (`penstock.insight.stats.Stats`).

        Concurrency:
            Any thread, at any time.
        """
        return self._monitor.stats()

    def report(self, path: str | Path) -> Path:
        """Write what happened so far as one HTML page, which needs no network.

        Args:
            path: Where to; an existing file is replaced.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
        """
        from penstock.insight.report import write_report

        return write_report(self._recording(), path)

    def trace(self, path: str | Path) -> Path:
        """Write what happened so far for chrome://tracing and ui.perfetto.dev, as JSON.

        `penstock report` makes the page of it later.

        Args:
            path: Where to; an existing file is replaced.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
        """
        from penstock.insight.trace import write_trace

        return write_trace(self._recording(), path)

    def _recording(self) -> Recording:
        self._monitor.measure()
        return self._monitor.accounts(self).recording()

    def subscribe(
        self, callback: Callable[[Stats], object], *, every_s: float = 10.0
    ) -> Callable[[], None]:
        """Have `callback` called with the stats from time to time, and at every epoch's end.

        It is called in the main process's thread, between two batches. An error of it is logged,
        and it is not called again.

        Args:
            callback: Takes `Stats`.
            every_s: Least time between two calls, in seconds.

        Returns:
            Ends the subscription when called.

        Raises:
            ConfigError: a negative `every_s`; what is not callable.
        """
        return self._monitor.subscribe(callback, every_s)


_USUAL_COLLATES: Final = ("default_collate", "default_convert")
_SETTINGS: Final = (
    "dataset", "batch_size", "sampler", "batch_sampler", "num_workers", "backend", "collate_fn",
    "pin_memory", "drop_last", "timeout", "prefetch_factor", "persistent_workers", "in_order",
    "seed", "global_rng", "on_error", "monitor",
)  # fmt: skip


def settings_of(loader: object) -> dict[str, Any]:
    """Return what a loader was made with: numbers and texts, and of anything else its name."""
    found = {name: getattr(loader, name) for name in _SETTINGS if hasattr(loader, name)}
    return {name: _described(value) for name, value in found.items()}


def _described(value: object) -> Any:  # noqa: ANN401 - what JSON has
    if isinstance(value, AutoWorkers):
        return repr(value).strip("'")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FaultPolicy):
        return dataclasses.asdict(value)
    # Never what it holds, which may be the data.
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    seed = getattr(value, "seed", None)  # of a sampler: it decides the order as well
    return f"{name}(seed={seed})" if isinstance(seed, int) else name
