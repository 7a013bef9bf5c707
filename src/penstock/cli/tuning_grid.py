# SPDX-License-Identifier: Apache-2.0
"""Tuning grid: throughput of a loader under several settings, measured in turn."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cli.loadable import is_iterable, loader_class
from penstock.cli.reasons import reason_of
from penstock.errors import ConfigError
from penstock.plural import counted
from penstock.usage import cpu_seconds, memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

__all__ = [
    "Setting",
    "SettingResult",
    "TrialWork",
    "Turn",
    "best_of",
    "endless",
    "imitate_step",
    "usual_workers",
]

_WARM_UP: Final = 5  # batches, beyond those under way
_NEAR: Final = 0.97  # of the best rate: not worth more workers

# Those that a setting decides, and those that `_batching` derives.
_NOT_KEPT: Final = (
    "dataset", "num_workers", "prefetch_factor", "persistent_workers", "backend", "batch_size",
    "drop_last", "shuffle", "sampler", "batch_sampler",
)  # fmt: skip


class Setting(NamedTuple):
    """One point of the grid.

    Attributes:
        num_workers: 0 loads in the main process.
        prefetch_factor: Batches under way per worker; None without workers.
        backend: "process" or "thread".
        loader: "penstock" or "torch".
    """

    num_workers: int
    prefetch_factor: int | None
    backend: str
    loader: str = "penstock"

    def __str__(self) -> str:
        """Return it in a few words.

        Example:
            >>> str(Setting(2, 4, "process"))
            '2 workers, prefetch 4, process'
        """
        words = [counted(self.num_workers, "worker")]
        if self.num_workers:
            words += [f"prefetch {self.prefetch_factor}", self.backend]
        return ", ".join([*words, "torch"] if self.loader == "torch" else words)


class Turn(NamedTuple):
    """What one setting gave and cost in one round.

    Attributes:
        samples: Samples given.
        seconds: That took.
        wait_s: Of these the main process waited.
        cpu_s: CPU seconds of main process and workers; None where the system does not tell.
        memory_bytes: Of main process and workers, at the turn's begin or its end, whichever is
            more; None where the system does not tell.
    """

    samples: int
    seconds: float
    wait_s: float
    cpu_s: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class SettingResult:
    """A setting with its timed turns, one of each round."""

    setting: Setting
    turns: list[Turn]

    @property
    def samples_per_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(turn.samples / turn.seconds for turn in self.turns)

    @property
    def wait_share(self) -> float:
        """Of the time in all rounds, from 0 to 1."""
        return sum(t.wait_s for t in self.turns) / sum(t.seconds for t in self.turns)

    @property
    def cpu_s_per_1000(self) -> float | None:
        """CPU seconds for 1,000 samples."""
        costs = [turn.cpu_s for turn in self.turns if turn.cpu_s is not None]
        return 1000 * sum(costs) / sum(t.samples for t in self.turns) if costs else None

    @property
    def memory_bytes(self) -> int | None:
        """Most of the rounds."""
        return max((turn.memory_bytes for turn in self.turns if turn.memory_bytes), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWork:
    """The loading work that every setting is timed on.

    Attributes:
        dataset: Of any kind.
        kinds: The loader's class, by the name that a setting has for it.
        arguments: Of the loader, without those that a setting decides.
        batch_size: Samples in a batch.
        on_error: What becomes of samples that cannot be made; None leaves it to the arguments.
        num_batches: How many are measured in a turn.
        step_s: What a training step takes between two of them.
        takes_cpu: Whether the step keeps a core busy.
        bad_samples: Those that could not be made, by name, with the reason; it grows with the
            turns.
    """

    dataset: Any
    kinds: dict[str, Any]
    arguments: dict[str, Any]
    batch_size: int
    on_error: str | None = None
    num_batches: int
    step_s: float = 0.0
    takes_cpu: bool = False
    bad_samples: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_dataset(
        cls,
        dataset: Any,  # noqa: ANN401
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        compare: bool,
        **options: Any,  # noqa: ANN401
    ) -> TrialWork:
        """Return the work of a loader that shuffles a dataset, as its owner would make it.

        Args:
            dataset: Of any kind.
            batch_size: Samples in a batch.
            collate_fn: As the loaders take it.
            compare: Whether torch's loader is measured as well.
            options: As of this class.

        Raises:
            ConfigError: the dataset is smaller than a batch.
        """
        arguments: dict[str, Any] = {"batch_size": batch_size}
        if not is_iterable(dataset):
            if len(dataset) < batch_size:
                raise ConfigError(
                    f"the dataset has {len(dataset)} samples, fewer than --batch-size "
                    f"{batch_size}; lower it."
                )
            arguments["shuffle"] = True
        arguments["drop_last"] = True  # all of one size
        if collate_fn is not None:
            arguments["collate_fn"] = collate_fn
        kinds = _kinds(loader_class(), compare=compare)
        return cls(
            dataset=dataset, kinds=kinds, arguments=arguments, batch_size=batch_size, **options
        )

    @classmethod
    def of_loader(
        cls,
        loader: Any,  # noqa: ANN401
        batch_size: int | None,
        *,
        compare: bool,
        **options: Any,  # noqa: ANN401
    ) -> TrialWork:
        """Return the work of a loader that the user has made.

        Of a subclass it is that of the class of torch or Penstock below it, whose arguments are
        known.

        Args:
            loader: Of torch or Penstock.
            batch_size: Another one than its own.
            compare: Whether torch's loader is measured as well.
            options: As of this class.

        Raises:
            ConfigError: it is neither torch's nor Penstock's, or has no batch size to change.
        """
        kind = next((k for k in type(loader).__mro__ if _is_known(k)), None)
        if kind is None:
            raise ConfigError(
                f"a loader of type {type(loader).__qualname__} cannot be made anew: its arguments "
                "are not known. Name its dataset."
            )
        arguments = _batching(loader)
        if batch_size is not None:
            if arguments.get("batch_size") is None:
                raise ConfigError(
                    "--batch-size: the loader has a batch sampler, or batch_size=None."
                )
            arguments["batch_size"] = batch_size
        for name, parameter in inspect.signature(kind).parameters.items():
            value = getattr(loader, name, parameter.default)
            is_default = value is parameter.default or value == parameter.default
            if name == "collate_fn" and not is_default:
                written = getattr(value, "__name__", "")  # a partial or an object has none
                is_default = written in ("default_collate", "default_convert")
            if name not in _NOT_KEPT and not is_default:
                arguments[name] = value
        size = arguments.get("batch_size") or getattr(loader.batch_sampler, "batch_size", None)
        return cls(
            dataset=loader.dataset,
            kinds=_kinds(kind, compare=compare),
            arguments=arguments,
            batch_size=size or 1,
            **options,
        )

    def take_turn(self, setting: Setting) -> Turn:
        """Run one setting, with workers of its own, from its warm-up to its end.

        Raises:
            Exception: what the dataset raises.
        """
        loader = self._loader(setting)
        batches = endless(loader)
        own, wait_s = os.getpid(), 0.0
        try:
            for _ in range(_WARM_UP + setting.num_workers * (setting.prefetch_factor or 0)):
                next(batches)
            memory, cpu_before = memory_bytes(own), cpu_seconds(own)
            begun_s = now_s = time.perf_counter()
            for _ in range(self.num_batches):
                next(batches)
                wait_s += time.perf_counter() - now_s
                imitate_step(self.step_s, takes_cpu=self.takes_cpu)
                now_s = time.perf_counter()
            cpu_after = cpu_seconds(own)
            return Turn(
                self.num_batches * self.batch_size,
                now_s - begun_s,
                wait_s,
                None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
                None if memory is None else max(memory, memory_bytes(own) or 0),
            )
        except StopIteration:
            raise ConfigError("the dataset gives no full batch; lower --batch-size.") from None
        finally:
            batches.close()  # and with it the loader's workers go
            for failure in getattr(loader, "failures", ()):
                name = failure.name or f"sample {failure.index}"
                self.bad_samples[name] = reason_of(failure.error)

    def _loader(self, setting: Setting) -> Any:  # noqa: ANN401 - one of several classes
        kind, options = self.kinds[setting.loader], self._options(setting)
        options.pop("progress", None)  # bars of its own would cover this command's
        if self.on_error is not None:
            options["on_error"] = self.on_error
        known = inspect.signature(kind).parameters
        return kind(self.dataset, **{name: v for name, v in options.items() if name in known})

    def _options(self, setting: Setting) -> dict[str, Any]:
        options = {**self.arguments, "num_workers": setting.num_workers}
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
        options = self._options(setting)
        if self.bad_samples and self.on_error is not None:
            options["on_error"] = self.on_error
        words = ["dataset", *(f"{name}={_written(name, v)}" for name, v in options.items())]
        kind = self.kinds[setting.loader]
        package = kind.__module__.rpartition(".")[0]
        return [f"from {package} import {kind.__name__}", f"{kind.__name__}({', '.join(words)})"]


def _kinds(own: Any, *, compare: bool) -> dict[str, Any]:  # noqa: ANN401 - one of several classes
    """Return the classes to measure: a loader's own, or for a comparison Penstock's and torch's."""
    if not compare:
        return {"penstock": own}
    import torch.utils.data

    from penstock.torch import DataLoader

    ours = DataLoader if own.__module__.startswith("torch.") else own
    return {"penstock": ours, "torch": torch.utils.data.DataLoader}


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "penstock") and hasattr(kind, "__iter__")


def _batching(loader: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments that decide which samples make a batch."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    arguments: dict[str, Any] = {"batch_size": loader.batch_size}
    sampler = loader.sampler
    name = type(sampler).__name__
    is_shuffle = name == "RandomSampler" and not getattr(sampler, "replacement", False)
    if is_shuffle and getattr(sampler, "num_samples", None) == len(loader.dataset):
        arguments["shuffle"] = True
    elif name != "SequentialSampler" and not is_iterable(loader.dataset):
        arguments["sampler"] = sampler
    if loader.drop_last:
        arguments["drop_last"] = True
    return arguments


def _written(name: str, value: Any) -> str:  # noqa: ANN401
    """Return an argument as it is written; an object by the name it has, or its argument's."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str) or type(value).__name__ == "device":  # torch's
        return f'"{value}"'
    return getattr(value, "__name__", None) or name


def endless(loader: Any) -> Generator[object, None, None]:  # noqa: ANN401
    """Yield a loader's batches, epoch by epoch, until one has none."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
            del batch  # or its slot is held while the next one is awaited


def imitate_step(seconds: float, *, takes_cpu: bool = False) -> None:
    """Take as long as a training step: wait as for a GPU, or keep a core busy."""
    if not takes_cpu:
        if seconds:
            time.sleep(seconds)
        return
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 500)  # 0.2 ms, without the interpreter's lock


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


def best_of(results: Iterable[SettingResult]) -> SettingResult:
    """Return the one with the fewest workers, and the least prefetched, within 3 % of the best."""
    all_of_them = list(results)
    most = max(result.samples_per_s for result in all_of_them)
    near = [result for result in all_of_them if result.samples_per_s >= _NEAR * most]
    return min(near, key=lambda s: (s.setting.num_workers, s.setting.prefetch_factor or 0))
