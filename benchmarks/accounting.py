# SPDX-License-Identifier: Apache-2.0
"""What does it cost to know where the time goes?

Question
    With monitor="full" every batch tells what it took, and whom. What does that cost per batch, in
    CPU time over all processes and in wall time? The limit is 50 us: 1 % of a batch of 5 ms.

Method
    Each contender has two loaders of the same data set in one process, with workers of their own
    that are kept: one as it is, and one without accounts, whose stream has no observer, so that its
    workers measure nothing. After an epoch of each, a batch of the
    one and a batch of the other are taken in turn (on off, off on, ...), so that whatever else the
    machine does meets both. Before it takes a batch of 5 ms that workers make, the main process
    multiplies matrices for 5 ms: what is measured is a loader that keeps up. The CPU time of the
    main process's thread is read around each `next()`; that of the workers every 100 batches, per
    thread, from the scheduler's own count in nanoseconds. The figure is the median, over these
    hundreds, of how much more CPU a batch takes with accounts: "us/batch", of which "trainer us" in
    the main process's thread; "off us" is what a batch takes without. In half of them the loader
    with accounts began first.

    tiny            8-byte samples, 32 to a batch: nothing to hide behind, and samples too quick to
                    be timed one by one.
    5 ms            32 samples to a batch that burn 156 us of CPU each: so short that they are
                    timed in one batch of 16.
    5 ms slept      the first of 32 sleeps for 5 ms: what reading looks like, and what threads can
                    do side by side. They are timed in one batch of 16, too.

    torch, profiler torch has no accounts of its own. What its profiler takes, which sees the
                    main process's side alone: `torch.profiler.profile`, epochs with and without in
                    turn, CPU time of all processes. Starting and stopping it is not counted.

    The parts, each alone, with made-up records of 32 timed samples, us per call: `History.add` with
    the folding of every 128 batches; `Tuner.observe`; `ProgressBar.advance` without drawing; and
    `stats()` with 10,000 batches kept, which a program calls every few seconds, not for each batch.

Left out
    Reports and traces, which are written when training is over. Drawing the progress bar, at most
    ten times a second.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/accounting.py --save

Result
    2026-11-22, one round. Without workers the limit is kept: 46 us, 0.9 % of 5 ms. With two it is
    missed by this measure, of all processes' CPU: 127 us with processes that compute, 86 with ones
    that sleep, 106 with threads; in the main process's thread 57 to 65. The same code takes 28, 56
    and 58 us beside tiny batches, 28 to 37 of it in the main process: half or more is caches that
    are cold after 5 ms of something else. Rounds differ by 30 us. `History.add` takes 4.7 us with
    its folding, `Tuner.observe` 2.2. What torch's profiler takes could not be told from noise. (The
    file in results is of a round before the last change, which costs a look at the CPU clock per
    piece: 35, 113, 106, 122.)

What it does not show
    More workers than cores, where microseconds of workers are those of the main process, too: there
    "CPU us" is what to look at. What is noted for messages about dead workers, which was there
    before the accounts, is in both.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from _meter import Meter
from _plain_dataset import EightByteSamples
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BATCH_SIZE = 32
_BATCH_S = 0.005
_LIMIT_US = 50.0
_HUNDRED = 100  # batches between two looks at the workers


@dataclass(frozen=True, slots=True)
class Size:
    """Hundreds of batches of each kind of data set; pairs of epochs of torch; calls of a part."""

    tiny: int
    slow: int
    torch_pairs: int
    num_calls: int


class Slow(EightByteSamples):
    """The same numbers; 32 of them take 5 ms."""

    def __init__(self, num_samples: int, *, sleeps: bool) -> None:
        """Burn CPU, or sleep."""
        super().__init__(num_samples)
        self._sleeps = sleeps

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - an int64 scalar
        """Return a number after a while."""
        if self._sleeps:
            if index % _BATCH_SIZE == 0:  # one sleep: waking up costs more than what is measured
                time.sleep(_BATCH_S)
        else:
            end_s = time.thread_time() + _BATCH_S / _BATCH_SIZE
            while time.thread_time() < end_s:
                pass
        return super().__getitem__(index)


def samples(kind: str, num_batches: int) -> Any:  # noqa: ANN401 - any data set
    """Return the data set of a contender."""
    num_samples = num_batches * _BATCH_SIZE
    if kind == "tiny":
        return EightByteSamples(num_samples)
    return Slow(num_samples, sleeps=kind == "5 ms slept")


@contextlib.contextmanager
def no_accounts() -> Iterator[None]:
    """Let loaders that begin to iterate in here keep none; forked workers inherit it."""
    from unittest.mock import patch

    from penstock.engine.stream import BatchStream

    begin = BatchStream.__init__

    def begin_unobserved(
        self: Any,  # noqa: ANN401
        plan: Any,  # noqa: ANN401
        epoch: Any,  # noqa: ANN401
        faults: Any,  # noqa: ANN401
        observer: Any,  # noqa: ANN401
        *rest: Any,  # noqa: ANN401
        **clock: Any,  # noqa: ANN401
    ) -> None:
        begin(self, plan, epoch, faults, None, *rest, **clock)

    with patch.object(BatchStream, "__init__", begin_unobserved):
        yield


class Side:
    """One of the two loaders, and what was spent on it."""

    def __init__(self, loader: Any, pause_s: float) -> None:  # noqa: ANN401
        """Read an epoch, and begin another; whatever has begun to run since then is its own."""
        self._pause_s = pause_s
        self._work = np.ones((128, 128), np.float32)
        before = set(running())
        self.loader = loader
        check(sum(1 for _ in loader) == len(loader), "an epoch is not whole")
        self._batches = iter(loader)
        self._workers = [path for path in running() if path not in before]
        self.trainer_ns = 0
        self._total = 0

    def take(self) -> None:
        """Take a batch, after some work."""
        end_s = time.thread_time() + self._pause_s
        while time.thread_time() < end_s:
            self._work @ self._work
        begun_ns = time.thread_time_ns()
        batch = next(self._batches)
        self.trainer_ns += time.thread_time_ns() - begun_ns
        self._total += int(batch[0])

    def workers_ns(self) -> int:
        """Return the CPU time of the workers so far."""
        return sum(int(path.read_text(encoding="ascii").split()[0]) for path in self._workers)

    def end(self) -> None:
        """End the epoch, and check what came of it."""
        num_batches = len(self.loader)
        check(next(self._batches, None) is None, "there are more batches")
        right = _BATCH_SIZE * num_batches * (num_batches - 1) // 2
        check(self._total == right, f"first numbers of the batches make {self._total}, not {right}")


def running() -> list[Path]:
    """Return where the scheduler tells of each thread of this process and of its workers."""
    import psutil

    this = psutil.Process()
    pids = [this.pid, *(child.pid for child in this.children())]
    return [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]


def differ(
    size: Size, kind: str, num_workers: int, backend: Literal["process", "thread"] = "process"
) -> Reading:
    """Take batches with and without accounts in turn; each begins first in half of them."""
    num_hundreds = size.tiny if kind == "tiny" else size.slow
    spent = []
    with Meter() as meter:
        for on_first in (True, False):
            spent += differ_once(num_hundreds, kind, num_workers, backend, on_first=on_first)
    value, trainer_us = (
        # Whoever began first takes up to 20 us more.
        statistics.fmean(
            statistics.median(getattr(s, name) for s in spent if s.on_first is on_first)
            for on_first in (True, False)
        )
        for name in ("more_us", "more_in_trainer_us")
    )
    more = {
        "trainer us": trainer_us,
        "off us": statistics.median(s.off_us for s in spent),
        "% of 5 ms": value / _BATCH_S / 1e6 * 100,
    }
    return Reading.of(meter, value, 2 * len(spent) * _HUNDRED, more)


def differ_once(
    num_hundreds: int,
    kind: str,
    num_workers: int,
    backend: Literal["process", "thread"],
    *,
    on_first: bool,
) -> list[Spent]:
    """Take some hundreds from two new loaders."""
    from penstock.loader import Loader

    # For who waits, it is the slower of the two that always does, and waking up costs 50 us.
    pause_s = _BATCH_S if num_workers and kind != "tiny" else 0.0

    def side(*, with_accounts: bool) -> Side:
        loader = Loader(
            samples(kind, num_hundreds * _HUNDRED),
            batch_size=_BATCH_SIZE,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context="fork" if num_workers and backend == "process" else None,
            backend=backend,
            monitor="full",
        )
        off = contextlib.nullcontext() if with_accounts else no_accounts()
        with off:
            return Side(loader, pause_s)

    first, second = side(with_accounts=on_first), side(with_accounts=not on_first)
    on, off = (first, second) if on_first else (second, first)
    spent = [hundred_of(on, off, on_first=on_first) for _ in range(num_hundreds)]
    on.end()
    off.end()
    told(on.loader, off.loader)
    return spent


@dataclass(frozen=True, slots=True)
class Spent:
    """What a hundred batches took with and without accounts: us of CPU per batch."""

    on_first: bool
    off_us: float
    more_us: float
    more_in_trainer_us: float


def hundred_of(on: Side, off: Side, *, on_first: bool) -> Spent:
    """Take a hundred of each."""
    workers = [side.workers_ns() for side in (on, off)]
    trainer = [side.trainer_ns for side in (on, off)]
    for number in range(_HUNDRED):
        for side in (off, on) if number % 2 else (on, off):
            side.take()
    on_trainer, off_trainer = (
        side.trainer_ns - before for side, before in zip((on, off), trainer, strict=True)
    )
    on_workers, off_workers = (
        side.workers_ns() - before for side, before in zip((on, off), workers, strict=True)
    )
    to_us = 1 / _HUNDRED / 1e3
    return Spent(
        on_first,
        off_us=(off_trainer + off_workers) * to_us,
        more_us=(on_trainer + on_workers - off_trainer - off_workers) * to_us,
        more_in_trainer_us=(on_trainer - off_trainer) * to_us,
    )


def told(with_accounts: Any, without: Any) -> None:  # noqa: ANN401 - two loaders
    """Check that one loader knows of its batches, and that the other does not."""
    run = with_accounts.stats().run
    check(run.batches > 0 and run.compute_s + run.read_s > 0, "the accounts are empty")
    check(without.stats().run.batches == 0, "there are accounts where there should be none")


def differ_torch(size: Size) -> Reading:
    """Run epochs of torch's loader with and without its profiler in turn."""
    import torch

    num_batches = size.tiny * _HUNDRED
    loader = data_loader("torch")(
        samples("tiny", num_batches),
        batch_size=_BATCH_SIZE,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )

    def on() -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return epoch_of(loader)

    def off() -> float:
        return epoch_of(loader)

    off()
    with Meter() as meter:
        spent = [(on(), off()) for _ in range(size.torch_pairs)]
    value = statistics.median(on_us - off_us for on_us, off_us in spent)
    more = {
        "trainer us": value,  # its workers know nothing of it
        "off us": statistics.median(off_us for _, off_us in spent),
        "% of 5 ms": value / _BATCH_S / 1e6 * 100,
    }
    return Reading.of(meter, value, 2 * size.torch_pairs * num_batches, more)


def epoch_of(loader: Any) -> float:  # noqa: ANN401
    """Read an epoch to its end; return us of CPU per batch, of this process and its workers."""

    def cpu_now_ns() -> int:
        return sum(int(path.read_text(encoding="ascii").split()[0]) for path in running())

    begun_ns = cpu_now_ns()
    num_batches = sum(1 for _ in loader)
    check(num_batches == len(loader), "an epoch is not whole")
    return (cpu_now_ns() - begun_ns) / num_batches / 1e3


class MadeUpRecords:
    """Records of batches of 32 timed samples that take a worker 5 ms, and the main process 4 ms."""

    def __init__(self) -> None:
        """Begin at the first step."""
        from penstock.engine.timing import TimingRow, WorkerSettings

        self.workers = WorkerSettings(2, 2)
        self._row = TimingRow
        self._step = self._now_ns = 0
        self._sample_us = np.full(_BATCH_SIZE, 156, np.uint32).tobytes()
        self._indices = np.arange(_BATCH_SIZE)

    def make(self) -> tuple[Any, Any, bytes]:
        """Return what `History.add` takes of the next batch."""
        (num_workers, prefetch), step = self.workers, self._step
        work_ns, trainer_ns = int(_BATCH_S * 1e9), 4_000_000
        asked_ns = self._now_ns + trainer_ns
        given_ns = asked_ns + 60_000 + max(work_ns // num_workers - trainer_ns, 0)
        self._step, self._now_ns = step + 1, given_ns
        worker_id = step % num_workers
        row = self._row(
            worker_id=worker_id,
            pid=worker_id + 1,
            num_ready=1,
            trainer_cpu_ns=trainer_ns // 2,
            trainer_starved_ns=10_000,
            asked_ns=asked_ns,
            given_ns=given_ns,
            consumer_ns=trainer_ns,
            step=step,
            num_workers=num_workers,
            lookahead=num_workers * prefetch,
            num_samples=_BATCH_SIZE,
            begun_ns=given_ns - work_ns - 100_000,
            ended_ns=given_ns - 100_000,
            idle_ns=500_000,
            fetch_ns=work_ns - 200_000,
            collate_ns=100_000,
            send_ns=100_000,
            cpu_ns=work_ns - 50_000,
            starved_ns=20_000,
            num_bytes=_BATCH_SIZE * 8,
        )
        return row, self._indices + step % 1000 * _BATCH_SIZE, self._sample_us


def time_part(size: Size, part: str) -> Reading:
    """Time the calls of one part, less what it takes to read the clock."""
    records = MadeUpRecords()
    call, num_calls = PARTS[part](size, records)
    made = [records.make() for _ in range(8)]
    for record in made:
        call(*record)
    spent_ns = clock_ns = 0
    with Meter() as meter:
        for _ in range(num_calls):
            record = records.make()
            before_ns = time.perf_counter_ns()
            call(*record)
            after_ns = time.perf_counter_ns()
            clock_ns += time.perf_counter_ns() - after_ns
            spent_ns += after_ns - before_ns
    value = (spent_ns - clock_ns) / num_calls / 1e3
    more = {"trainer us": value, "off us": 0.0, "% of 5 ms": value / _BATCH_S / 1e6 * 100}
    return Reading.of(meter, value, num_calls, more)


_Part = tuple["Callable[..., object]", int]


def add(size: Size, records: MadeUpRecords) -> _Part:
    from penstock.insight.history import History

    return History(range(1000 * _BATCH_SIZE)).add, size.num_calls


def observe(size: Size, records: MadeUpRecords) -> _Part:
    from penstock.insight.budgets import Auto
    from penstock.insight.tuner import Tuner

    tuner = Tuner(Auto(), cores=8.0)
    records.workers = tuner.workers

    def call(row: Any, *_: object) -> None:  # noqa: ANN401
        workers = tuner.observe(row)
        if workers is not None:
            records.workers = workers

    return call, size.num_calls


def advance(size: Size, records: MadeUpRecords) -> _Part:
    import functools

    from tqdm import tqdm

    from penstock.insight.progress import ProgressBar

    bar = ProgressBar("train", functools.partial(tqdm, disable=True))
    bar.begin(0, size.num_calls)
    return lambda row, *_: bar.advance(row), size.num_calls


def ask(size: Size, records: MadeUpRecords) -> _Part:
    from penstock.insight.history import History

    history = History(range(1000 * _BATCH_SIZE))
    for _ in range(size.num_calls // 2):
        history.add(*records.make())

    def call(*_: object) -> None:
        stats = history.stats(num_workers=2, prefetch_factor=2, cores=8.0)
        check(stats.run.batches == size.num_calls // 2, f"{stats.run.batches} batches")

    return call, max(size.num_calls // 200, 2)


PARTS: dict[str, Callable[[Size, MadeUpRecords], _Part]] = {
    "History.add": add,
    "Tuner.observe": observe,
    "ProgressBar.advance": advance,
    "stats()": ask,
}

_DIFFERENCES: dict[str, Callable[[Size], Reading]] = {
    "penstock, tiny, 0 workers": partial(differ, kind="tiny", num_workers=0),
    "penstock, tiny, 2 processes": partial(differ, kind="tiny", num_workers=2),
    "penstock, tiny, 2 threads": partial(differ, kind="tiny", num_workers=2, backend="thread"),
    "penstock, 5 ms, 0 workers": partial(differ, kind="5 ms", num_workers=0),
    "penstock, 5 ms, 2 processes": partial(differ, kind="5 ms", num_workers=2),
    "penstock, 5 ms slept, 2 processes": partial(differ, kind="5 ms slept", num_workers=2),
    "penstock, 5 ms slept, 2 threads": partial(
        differ, kind="5 ms slept", num_workers=2, backend="thread"
    ),
}

BENCHMARK = Benchmark(
    file=__file__,
    unit="us/batch",
    better="lower",
    contenders={
        **_DIFFERENCES,
        **{f"penstock, {part}": partial(time_part, part=part) for part in PARTS},
        "torch, profiler, tiny, 2 processes": differ_torch,
    },
    full=Size(tiny=25, slow=10, torch_pairs=2, num_calls=20_000),
    smoke=Size(tiny=1, slow=1, torch_pairs=1, num_calls=400),
    targets=(
        *(Target(name, at_most=_LIMIT_US) for name in _DIFFERENCES),
        *(Target(f"penstock, {part}") for part in PARTS),
        Target("penstock, tiny, 2 processes", "torch, profiler, tiny, 2 processes"),
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
