# SPDX-License-Identifier: Apache-2.0
"""Tuning grid: throughput of a loader under several settings, measured in turn."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from penstock.cli.loadable import has_torch, is_iterable, loader_class
from penstock.cli.reasons import reason_of
from penstock.errors import ConfigError
from penstock.plural import counted
from penstock.usage import cpu_seconds, memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from penstock.cli.given_loader import GivenLoader

__all__ = [
    "Length",
    "Setting",
    "SettingResult",
    "Trainer",
    "TrialWork",
    "Turn",
    "best_of",
    "usual_workers",
]

_WARM_UP: Final = 5  # batches, beyond those under way
_CALIBRATION: Final = 10_000  # some 5 ms
_NEAR: Final = 0.97  # of the best rate: not worth more workers


class Setting(NamedTuple):
    """One point of the grid.

    Attributes:
        num_workers: 0 loads in the main process.
        prefetch_factor: Batches under way per worker; None without workers.
        backend: "process" or "thread".
    """

    num_workers: int
    prefetch_factor: int | None
    backend: str

    def __str__(self) -> str:
        """Return it in a few words.

        Example:
            >>> str(Setting(2, 4, "process"))
            '2 workers, prefetch 4, process'
        """
        if not self.num_workers:
            return "0 workers"
        workers = counted(self.num_workers, "worker")
        return f"{workers}, prefetch {self.prefetch_factor}, {self.backend}"


class Length(NamedTuple):
    """How long a turn is measured: for so many batches, or for so many seconds if they are given.

    Attributes:
        batches: At least 1.
        seconds: Instead of them; None for batches.
    """

    batches: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Trainer:
    """Something that takes as long per batch as a training step.

    Attributes:
        seconds: For each batch.
        takes_cpu: Whether a core is busy meanwhile, or only the main process waits, as for a GPU.
    """

    seconds: float = 0.0
    takes_cpu: bool = False

    def get_ready(self) -> None:
        """Do what the first step would do besides: find out how quick a core is."""
        if self.takes_cpu:
            _rounds_per_s()

    def step(self) -> None:
        """Take that long."""
        if self.takes_cpu:
            _burn(max(round(self.seconds * _rounds_per_s()), 1))
        elif self.seconds:
            time.sleep(self.seconds)


def _burn(num_rounds: int) -> None:
    """Keep a core busy, but not the interpreter's lock, as a training step does."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", num_rounds)


@functools.cache
def _rounds_per_s() -> float:
    """Return how many of them take a second of CPU time: the most of three tries."""
    rates = []
    for _ in range(3):
        begun_s = time.thread_time()
        _burn(_CALIBRATION)
        rates.append(_CALIBRATION / max(time.thread_time() - begun_s, 1e-6))
    return max(rates)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one setting gave and cost in one round.

    Attributes:
        num_samples: Samples given.
        seconds: That took.
        wait_s: Of these the main process waited.
        cpu_s: CPU seconds of main process and workers; None where the system does not tell.
        memory_bytes: Of main process and workers, at the turn's begin or its end, whichever is
            more; None where the system does not tell.
        num_epochs: Epochs that began meanwhile; what that took is in the time.
    """

    num_samples: int
    seconds: float
    wait_s: float
    cpu_s: float | None
    memory_bytes: int | None
    num_epochs: int = 0


@dataclass(frozen=True, slots=True)
class SettingResult:
    """A setting with its timed turns.

    Attributes:
        setting: Which.
        turns: One of each round.
    """

    setting: Setting
    turns: list[Turn]

    @property
    def samples_per_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(turn.num_samples / turn.seconds for turn in self.turns)

    @property
    def wait_share(self) -> float:
        """Of the time in all rounds, from 0 to 1."""
        return sum(t.wait_s for t in self.turns) / sum(t.seconds for t in self.turns)

    @property
    def cpu_s_per_1000(self) -> float | None:
        """CPU seconds for 1,000 samples."""
        costs = [turn.cpu_s for turn in self.turns if turn.cpu_s is not None]
        return 1000 * sum(costs) / sum(t.num_samples for t in self.turns) if costs else None

    @property
    def memory_bytes(self) -> int | None:
        """Most of the rounds."""
        return max((turn.memory_bytes for turn in self.turns if turn.memory_bytes), default=None)


@dataclass(frozen=True, slots=True)
class TrialWork:
    """The loading work that every setting is timed on.

    Attributes:
        dataset: Of any kind.
        batch_size: Samples in a batch.
        collate_fn: As the loaders take it.
        main process: What takes the batches.
        length: How long a turn is measured.
        on_error: What becomes of samples that cannot be made, as the loaders take it.
        given: The loader that was named, whose class and arguments are kept; None for a dataset.
        bad_samples: Those that were not, by name, with the reason: it grows with the turns.
    """

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    trainer: Trainer
    length: Length
    on_error: Literal["raise", "replace"] = "raise"
    given: GivenLoader | None = None
    bad_samples: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise where there is not one batch.

        Raises:
            ConfigError: the dataset is smaller than a batch.
        """
        if not is_iterable(self.dataset) and len(self.dataset) < self.batch_size:
            raise ConfigError(
                f"the dataset has {len(self.dataset)} samples, fewer than --batch-size "
                f"{self.batch_size}; lower it."
            )

    def take_turn(self, setting: Setting) -> Turn:
        """Run one setting, with workers of its own, from its warm-up to its end.

        Raises:
            Exception: what the dataset raises.
        """
        loader = self._loader(setting)
        epochs = _Epochs(loader)
        batches = epochs.batches()
        try:
            for _ in range(_WARM_UP + setting.num_workers * (setting.prefetch_factor or 0)):
                next(batches)
            return self._measure(batches, epochs)
        finally:
            batches.close()  # and with it the loader's workers go
            for failure in getattr(loader, "failures", ()):
                name = failure.name or f"sample {failure.index}"
                self.bad_samples[name] = reason_of(failure.error)

    def _measure(self, batches: Iterator[object], epochs: _Epochs) -> Turn:
        own, num_epochs = os.getpid(), epochs.num_begun
        self.trainer.get_ready()
        memory_before = memory_bytes(own)
        cpu_before = cpu_seconds(own)
        begun_s = now_s = time.perf_counter()
        num_batches, wait_s = 0, 0.0
        while not self._is_over(num_batches, now_s - begun_s):
            next(batches)
            wait_s += time.perf_counter() - now_s
            self.trainer.step()
            num_batches += 1
            now_s = time.perf_counter()
        cpu_after = cpu_seconds(own)
        return Turn(
            num_batches * self.batch_size,
            now_s - begun_s,
            wait_s,
            None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
            None if memory_before is None else max(memory_before, memory_bytes(own) or 0),
            epochs.num_begun - num_epochs,
        )

    def _is_over(self, num_batches: int, seconds: float) -> bool:
        if self.length.seconds is not None:
            return num_batches > 0 and seconds >= self.length.seconds
        return num_batches >= self.length.batches

    def _loader(self, setting: Setting) -> Any:  # noqa: ANN401 - one of two classes
        options = self._options(setting)
        if self.given is not None:
            options.pop("progress", None)  # bars of its own would cover this command's
            return self.given.kind(self.dataset, **options)
        return loader_class()(
            self.dataset, collate_fn=self.collate_fn, on_error=self.on_error, **options
        )

    def _options(self, setting: Setting) -> dict[str, Any]:
        options: dict[str, Any] = {"batch_size": self.batch_size}
        if self.given is not None:
            options = dict(self.given.arguments)
        else:
            if not is_iterable(self.dataset):
                options["shuffle"] = True
            options["drop_last"] = True  # all of one size
        options["num_workers"] = setting.num_workers
        if setting.num_workers:
            options["prefetch_factor"] = setting.prefetch_factor
            options["persistent_workers"] = True  # a small dataset has many epochs in one turn
            if setting.backend != "process":
                options["backend"] = setting.backend
        return options

    def lines(self, setting: Setting) -> list[str]:
        """Return the lines to paste: the loader that was measured, and its import.

        What becomes of bad samples is in it where there were some.
        """
        words = ["dataset"]
        words += [f"{name}={_written(name, v)}" for name, v in self._options(setting).items()]
        if self.given is not None:
            return [self.given.import_line, f"{self.given.kind.__name__}({', '.join(words)})"]
        if self.bad_samples:
            words.append(f'on_error="{self.on_error}"')
        if self.collate_fn is not None:
            words.append(f"collate_fn={getattr(self.collate_fn, '__name__', '...')}")
        if has_torch():
            return ["from penstock.torch import DataLoader", f"DataLoader({', '.join(words)})"]
        return ["from penstock import Loader", f"Loader({', '.join(words)})"]


def _written(name: str, value: Any) -> str:  # noqa: ANN401
    """Return an argument as it is written; an object by the name it has, or its argument's."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str) or type(value).__name__ == "device":  # torch's
        return f'"{value}"'
    return getattr(value, "__name__", None) or name


class _Epochs:
    """A loader's batches, epoch by epoch, without end."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401
        self._loader = loader
        self.num_begun = 0

    def batches(self) -> Generator[object, None, None]:
        while True:
            num_batches = 0
            self.num_begun += 1
            for batch in self._loader:
                num_batches += 1
                yield batch
                del batch  # or its slot is held while the next one is awaited
            if not num_batches:
                raise ConfigError("the dataset gives no full batch; lower --batch-size.")


def usual_workers(cores: float) -> list[int]:
    """Return counts of workers worth a try: 0, 1, 2, 4, … to twice the cores.

    Workers that wait for storage take no core, so more of them than cores may be right.

    Example:
        >>> usual_workers(2.0), usual_workers(6.0)
        ([0, 1, 2, 4], [0, 1, 2, 4, 6, 8, 12])
    """
    most = max(2 * math.ceil(cores), 1)
    doubling = (1 << power for power in range(most.bit_length()))
    return sorted({0, math.ceil(cores), most, *(n for n in doubling if n <= most)})


def best_of(results: Sequence[SettingResult]) -> SettingResult:
    """Return the one with the fewest workers, and the least prefetched, within 3 % of the best."""
    most = max(result.samples_per_s for result in results)
    near = [result for result in results if result.samples_per_s >= _NEAR * most]
    return min(near, key=lambda s: (s.setting.num_workers, s.setting.prefetch_factor or 0))
