# SPDX-License-Identifier: Apache-2.0
"""Batch history: recent batches one by one, older ones as sums.

    light ──────────────────────▶
    add(row) ──────▶ pending ──▶ fold ──▶ rows: the last 10,000 batches, 320 bytes each
                                      ──▶ sums: of each epoch, and of the run
                                      ──▶ samples: the slowest

The *window* that verdicts are made by: the last 64 batches, or those of the last 10 seconds if
these are more; 4,096 at most. After a change of workers it begins when all workers of the new one
are at work.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.names import describe_sample
from penstock.insight.plain import plain_text
from penstock.insight.rows import Ring, Sums, mean_ready, rows_of, window_of, without_pauses
from penstock.insight.stats import SlowSample, Stats, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.engine.timing import EpochEnd, TimingRow
    from penstock.faults import Failure
    from penstock.insight.recording import Recording
    from penstock.insight.rows import Rows
    from penstock.insight.stats import Change
    from penstock.insight.verdict import Inputs

_FOLD_AT: Final = 128  # batches: bounds what their indices take until then
_FOLD_AT_SAMPLES: Final = 8192
_MOST_IN_WINDOW: Final = 4096
_MOST_EPOCHS: Final = 1000
_MOST_SLOWEST: Final = 20
_SLOW_FACTOR: Final = 8  # times the median: beyond what sizes of images explain
_SLOW_US: Final = 1000
_FEWEST_FOR_MEDIAN: Final = 32
_STARVED: Final = 10  # a batch that lacked a core for more than a tenth of its time


class History:
    """What is known of the batches of a loader.

    Concurrency:
        `add` from the main process's thread, which it makes wait for no other: `deque.append` and
        `popleft` are atomic. Everything else from any thread.

    Example:
        >>> from penstock.engine.timing import TimingRow
        >>> history = History()
        >>> for step in range(3):
        ...     history.add(TimingRow(step=step, given_ns=6_000_000, consumer_ns=2_000_000,
        ...                           num_samples=32, num_workers=1, fetch_ns=8_000_000))
        >>> stats = history.stats(num_workers=1, prefetch_factor=2, cores=2.0)
        >>> stats.run.batches, stats.run.samples, round(stats.run.wait_share, 3)
        (3, 96, 0.75)
    """

    def __init__(
        self,
        dataset: object = None,
        *,
        backend: str = "process",
        keep: int = 10_000,
        persistent_workers: bool = False,
        judge: Callable[[Inputs], Verdict] | None = None,
    ) -> None:
        """Know nothing yet.

        Args:
            dataset: Asked for the names of samples, never for a sample; None leaves them out.
            backend: "serial", "process", "thread" or "ray"; 0 workers are always "serial".
            keep: How many batches are kept one by one; 320 bytes each.
            persistent_workers: Whether workers are kept from epoch to epoch.
            judge: Returns the verdict; None is `penstock.insight.verdict.judge`.
        """
        self._dataset = dataset
        self._backend = backend
        self._keeps_workers = persistent_workers
        self._judge = judge
        self._pending_samples = 0
        self._pending: deque[tuple[TimingRow, object, bytes]] = deque()
        self.light: deque[tuple[int, ...]] = deque()
        self._lock = threading.Lock()
        self._rows = Ring(keep)
        self._samples = SampleAccounts()
        self._epochs: dict[int, Sums] = {}
        self._epoch = 0
        self._is_over = False  # that epoch; another of its number is another one
        self._run = Sums()
        self._first_wait_ns: int | None = None
        self.changes: list[Change] = []  # of workers, in order
        self._num_replaced = 0
        self._pool_bytes: dict[int, int] = {}
        self._peak_pool_bytes = 0
        self._rss_bytes: dict[int, int] = {}
        self._since_ns: tuple[int, ...] = ()  # of the iterator that goes on, once there is one

    def add(self, row: TimingRow, indices: object = None, sample_us: bytes = b"") -> None:
        """Take note of a batch (see `Monitor.batch_given`); 3 us, but for calls that fold."""
        self._pending.append((row, indices, sample_us))
        self._pending_samples += row.num_samples
        if len(self._pending) >= _FOLD_AT or self._pending_samples >= _FOLD_AT_SAMPLES:
            self.fold()

    def fold(self) -> None:
        """Add up what is pending, unless another thread is at it."""
        if self._lock.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.release()

    def epoch_ended(self, epoch: int, end: EpochEnd | None = None) -> None:
        """Take note that an epoch is over; its sums stay those of the epoch until the next."""
        with self._lock:
            self._fold()
            if epoch not in self._epochs:
                self._begin_epoch(epoch)
            elif end is not None and epoch == self._epoch and not self._is_over:
                for sums in (self._rows, self._epochs[epoch], self._run):
                    sums.add_tail(end.consumer_ns, end.num_failed)
            self._is_over = True

    def note_replacement(self) -> None:
        """Take note that a worker died, and another takes its place."""
        self._num_replaced += 1

    def _fold(self) -> None:
        """Turn what is pending into rows and sums. Holds the lock."""
        light, pending = self.light, self._pending
        self._pending_samples = 0
        if light:  # they came before the others: who measures goes on to do so
            self._keep(rows_of([light.popleft() for _ in range(len(light))], *self._since_ns))
        if not pending:
            return
        noted, indices, sample_us = zip(
            *(pending.popleft() for _ in range(len(pending))), strict=True
        )
        rows = rows_of(noted, *self._since_ns)
        self._samples.fold(rows, indices, sample_us)
        self._keep(rows)
        self._note_memory(rows)

    def _keep(self, rows: Rows) -> None:
        begins = rows["is_first"] | rows["is_workers_first"]
        rows["first_wait_ns"] = rows["wait_ns"] * begins
        self._since_ns = (int(rows["since_ns"][-1]),)
        self._rows.extend(rows)
        self._run.add(rows)
        if self._first_wait_ns is None:
            self._first_wait_ns = int(rows["wait_ns"][0])
        self._add_to_epochs(rows)

    def _add_to_epochs(self, rows: Rows) -> None:
        epochs = rows["epoch"]
        again = (rows["step"] == 0) & (rows["is_first"] == 1)
        edges = (np.flatnonzero((np.diff(epochs) != 0) | again[1:]) + 1).tolist()
        for start, stop in itertools.pairwise([0, *edges, len(rows)]):
            self._begin_epoch(int(epochs[start]), is_again=bool(again[start]))
            self._epochs[self._epoch].add(rows[start:stop])

    def _begin_epoch(self, epoch: int, *, is_again: bool = False) -> None:
        if is_again or epoch not in self._epochs or (epoch == self._epoch and self._is_over):
            self._epochs.pop(epoch, None)  # so that it is the last one
            self._epochs[epoch] = Sums()
            if len(self._epochs) > _MOST_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
        self._epoch, self._is_over = epoch, False

    def _note_memory(self, rows: Rows) -> None:
        noted = rows[["worker_id", "pool_bytes", "rss_bytes"]].tolist()
        for worker_id, pool_bytes, rss_bytes in noted:
            self._pool_bytes[worker_id] = pool_bytes
            self._peak_pool_bytes = max(self._peak_pool_bytes, sum(self._pool_bytes.values()))
            if rss_bytes > self._rss_bytes.get(worker_id, 0):
                self._rss_bytes[worker_id] = rss_bytes

    def stats(
        self, *, num_workers: int, prefetch_factor: int, cores: float, is_auto: bool = False
    ) -> Stats:
        """Return sums, and a verdict on the window.

        Takes some milliseconds, in which `add` goes on in the main process's thread.
        """
        with self._lock:
            self._fold()
            rows = window_of(self._rows.last(_MOST_IN_WINDOW))
            is_measured = bool(rows["is_measured"].any()) or not len(rows)
            if is_measured:
                rows = rows.take(np.flatnonzero(rows["is_measured"]))
            slowest = self._samples.slowest()
            epoch, run = self._epochs.get(self._epoch, Sums()).span(), self._run.span()
            window, num_ready = Sums.of(rows).span(), mean_ready(rows)
            stats = Stats(
                verdict=Verdict("nothing yet", ""),
                window=window,
                epoch=epoch,
                run=run,
                epoch_number=self._epoch,
                backend=self._backend if num_workers else "serial",
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                num_ready=num_ready,
                slot_bytes=self._peak_pool_bytes,
                worker_rss_bytes=dict(sorted(self._rss_bytes.items())),
                changes=tuple(self.changes),
                slowest=slowest,
                cores=cores,
                replaced_workers=self._num_replaced,
                first_batch_s=(self._first_wait_ns or 0) / 1e9,
                reading=self._reading(),
            )
        from penstock.insight import verdict as verdicts  # not before stats are asked for

        steady = Sums.of(without_pauses(rows)).span() if is_measured else window
        slowest = tuple(replace(sample, name=self._name(sample.index)) for sample in slowest)
        verdict = (self._judge or verdicts.judge)(
            verdicts.Inputs(
                steady,
                # Workers that were added a moment ago have made none of these yet.
                num_workers=int(rows["num_workers"][-1]) if len(rows) else num_workers,
                cores=cores,
                num_ready=num_ready,
                lookahead=int(rows["lookahead"][-1]) if len(rows) else 0,
                slowest=slowest,
                backend=stats.backend,
                run=run,
                pause_s=max(window.seconds - steady.seconds, 0.0),
                keeps_workers=self._keeps_workers,
                is_auto=is_auto,
                is_measured=is_measured,
                has_local_cache=bool(stats.reading),
            )
        )
        return replace(stats, verdict=verdict, slowest=slowest)

    def _reading(self) -> str:
        traffic = None
        if hasattr(type(self._dataset), "traffic"):  # not what a __getattr__ makes up
            traffic = self._dataset.traffic  # type: ignore[attr-defined]
        return "" if traffic is None else str(traffic)

    def _name(self, index: object) -> str | None:
        if index is None or self._dataset is None:
            return None
        name = describe_sample(self._dataset, index)
        return None if name is None else plain_text(name)  # an address may hold a password

    def recording(
        self,
        settings: Mapping[str, Any],
        failures: Sequence[Failure],
        stats: Stats,
        *,
        started: str = "",
    ) -> Recording:
        """Return all that reports and traces show; `started` is when the run began, ISO 8601."""
        from penstock.insight.recording import make_recording

        with self._lock:
            self._fold()
            rows = self._rows.last()
            epochs = {number: sums.span() for number, sums in self._epochs.items()}
        return make_recording(settings, failures, stats, rows, epochs, started)


class SampleAccounts:
    """The samples that took longest, and how many are slow, by the times of a batch's samples.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._typical_us = 0.0
        self._pids: dict[int, int] = {}  # of the workers there are
        self._slowest: dict[str, tuple[int, SlowSample]] = {}

    def fold(self, rows: Rows, indices: Sequence[object], sample_us: Sequence[bytes]) -> None:
        """Take note of the samples of some batches, in the fields of their rows as well.

        Times of a worker's first batch are left out, and those of batches for which no core was
        free: they tell nothing of the samples.
        """
        for number, (worker_id, pid) in enumerate(rows[["worker_id", "pid"]].tolist()):
            # Such a batch may have cost what its samples do not: opening files, importing.
            rows["is_workers_first"][number] = self._pids.get(worker_id) != pid
            self._pids[worker_id] = pid
        took_ns = rows["ended_ns"] - rows["begun_ns"]
        tells_nothing = (rows["is_workers_first"] > 0) | (_STARVED * rows["starved_ns"] > took_ns)
        timed = [b"" if no else us for no, us in zip(tells_nothing, sample_us, strict=True)]
        rows["timed"] = sizes = np.array([len(us) // 4 for us in timed], np.int64)
        took_us = np.frombuffer(b"".join(timed), np.uint32).astype(np.int64)
        if not len(took_us):
            return
        if len(took_us) >= _FEWEST_FOR_MEDIAN or not self._typical_us:
            self._typical_us = float(np.median(took_us))
        self._note_slowest(rows, indices, took_us)
        slow = took_us >= max(_SLOW_FACTOR * self._typical_us, _SLOW_US)
        sums = ("timed_us", took_us), ("slow", slow), ("slow_us", took_us * slow)
        for name, of_samples in sums:
            rows[name] = _sums(of_samples, sizes)

    def _note_slowest(
        self, rows: Rows, indices: Sequence[object], took_us: NDArray[np.int64]
    ) -> None:
        floor = 0
        if len(self._slowest) >= _MOST_SLOWEST:
            floor = min(us for us, _ in self._slowest.values())
        # Of a key that is slow again and again only the worst counts: so more are looked at.
        most = min(4 * _MOST_SLOWEST, len(took_us))
        ends, batches = np.cumsum(rows["timed"]), rows[["epoch", "step", "worker_id"]]
        for flat in np.argpartition(took_us, len(took_us) - most)[-most:].tolist():
            if (us := int(took_us[flat])) > floor:
                number = int(np.searchsorted(ends, flat, side="right"))
                size = int(rows["timed"][number])
                place = flat - int(ends[number]) + size
                index = _index_at(indices[number], place, size)
                epoch, step, worker_id = batches[number].item()
                key = f"{epoch} {step} {place}" if index is None else repr(index)
                if us > self._slowest.get(key, (0,))[0]:
                    sample = SlowSample(index, None, us / 1e6, epoch, step, worker_id)
                    self._slowest[key] = us, sample
        ranked = sorted(self._slowest.items(), key=lambda item: -item[1][0])
        self._slowest = dict(ranked[:_MOST_SLOWEST])

    def slowest(self) -> tuple[SlowSample, ...]:
        """Return the samples that took longest, each once, the longest first; without names."""
        return tuple(sample for _, sample in self._slowest.values())


def _sums(of_samples: NDArray[Any], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum over the samples of each batch; batches may be empty."""
    running = np.concatenate([[0], np.cumsum(of_samples, dtype=np.int64)])
    ends = np.cumsum(sizes)
    sums: NDArray[np.int64] = running[ends] - running[ends - sizes]
    return sums


def _index_at(indices: object, place: int, size: int) -> object:
    """Return the key of one sample of a batch; None if it is not known."""
    if indices is None:
        return None
    try:
        if isinstance(indices, (str, bytes)) or len(indices) != size:  # type: ignore[arg-type]
            return indices if size == 1 else None  # a batch of one sample is a key by itself
        index = indices[place]  # type: ignore[index]  # or it raises
        return index.item() if isinstance(index, np.generic) else index
    except Exception:  # keys of any kind
        return indices if size == 1 else None
