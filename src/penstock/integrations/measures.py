# SPDX-License-Identifier: Apache-2.0
"""Metrics of loaders: names, units and values, as exporters publish them.

Counters are the sums since the loader was made (`Stats.run`), so they only grow.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import ConfigError
from penstock.insight.verdict import BOTTLENECKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.insight.monitor import Observed
    from penstock.insight.stats import Span, Stats


class Measure(NamedTuple):
    """One metric: its name without unit, its unit as UCUM has it, and its values by `label`."""

    name: str
    unit: str
    text: str
    values: Callable[[Stats], Mapping[str, float]]
    label: str = ""
    is_counter: bool = False


class WatchedLoaders:
    """Loaders whose stats are published; they are not kept alive."""

    def __init__(self) -> None:
        """Watch none yet."""
        self._watched: list[tuple[weakref.ref[Observed], dict[str, str]]] = []

    def add(self, loader: Observed, labels: dict[str, str]) -> None:
        """Watch one more loader, or give a watched one other labels.

        Raises:
            ConfigError: another loader has these labels.
        """
        others = [(ref, known) for ref, known in self._watched if ref() not in (None, loader)]
        if any(known == labels for _, known in others):
            raise ConfigError(
                f"another loader has the labels {labels}: give each its own, as in "
                '{"loader": "val"}'
            )
        self._watched = [*others, (weakref.ref(loader), labels)]  # at once, for threads that read

    def stats(self) -> list[tuple[dict[str, str], Stats]]:
        """Return labels and stats of each loader that there is."""
        found = [(ref(), labels) for ref, labels in self._watched]
        return [(labels, loader.stats()) for loader, labels in found if loader is not None]


def stage_seconds(span: Span) -> dict[str, float]:
    """Return the seconds of workers by what they did, idleness included."""
    names = ("idle", "read", "compute", "collate", "send")
    return {name: getattr(span, f"{name}_s") for name in names}


def _counter(name: str, unit: str, text: str, field: str) -> Measure:
    return Measure(name, unit, text, lambda stats: {"": getattr(stats.run, field)}, is_counter=True)


def _gauge(name: str, unit: str, text: str, field: str) -> Measure:
    return Measure(name, unit, text, lambda stats: {"": getattr(stats, field)})


def _memory(stats: Stats) -> dict[str, float]:
    """Return bytes by worker; threads have none of their own."""
    known = stats.worker_rss_bytes.items()
    return {str(n) if stats.num_workers else "trainer": size for n, size in known if size}


MEASURES: Final = (
    _counter("batches", "{batch}", "Batches given to the main process.", "batches"),
    _counter("samples", "{sample}", "Samples given to the main process.", "samples"),
    _counter("samples_failed", "{sample}", "Bad samples, each once an epoch.", "failed"),
    _counter("data", "By", "Bytes of the batches in their slots.", "bytes"),
    _counter("wait", "s", "Time that the main process waited for batches.", "wait_s"),
    _counter("consumer", "s", "Time in the main process's own code.", "consumer_s"),
    _counter("trainer_cpu", "s", "CPU time of the main process.", "trainer_cpu_s"),
    _counter(
        "trainer_starved", "s", "Time that the main process lacked a core.", "trainer_starved_s"
    ),
    Measure(
        "stage",
        "s",
        "Time of all workers, by what they did.",
        lambda stats: stage_seconds(stats.run),
        label="stage",
        is_counter=True,
    ),
    _counter("slot_making", "s", "Time that workers made new slots.", "slot_s"),
    _counter("worker_cpu", "s", "CPU time of all workers.", "worker_cpu_s"),
    _counter("worker_starved", "s", "Time that workers lacked a core.", "starved_s"),
    _gauge("workers", "{worker}", "Workers now.", "num_workers"),
    _gauge("prefetch_factor", "{batch}", "Batches under way per worker.", "prefetch_factor"),
    _gauge("batches_ready", "{batch}", "Batches that lay ready, on average.", "num_ready"),
    _gauge("slot_peak", "By", "Memory of all slots at its peak.", "slot_bytes"),
    Measure(
        "worker_memory_peak",
        "By",
        "Largest resident memory of a worker; of the main process if there are none.",
        _memory,
        label="worker",
    ),
    _gauge("epoch", "{epoch}", "Number of the epoch.", "epoch_number"),
    Measure(
        "bottleneck",
        "{verdict}",
        "1 for what limits the loader now, 0 for what does not.",
        lambda stats: {name: float(name == stats.verdict.bottleneck) for name in BOTTLENECKS},
        label="bottleneck",
    ),
)
