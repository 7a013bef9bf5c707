# SPDX-License-Identifier: Apache-2.0
"""What is told of a loader to those who collect metrics, and under which names.

Counters are the sums since the loader was made (`Stats.run`), so they only grow.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, get_args

from penstock.insight.stats import Bottleneck

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.insight.stats import Span, Stats

__all__ = ["MEASURES", "HasStats", "Measure", "Watched", "stage_seconds"]


class HasStats(Protocol):
    """A loader: what knows its own `Stats`. It can be referred to weakly."""

    def stats(self) -> Stats:
        """Return the sums so far; any thread may ask."""


class Measure(NamedTuple):
    """One thing that is told.

    Attributes:
        name: In words, joined by underscores, without its unit.
        unit: As UCUM has it: "s", "By", or what is counted, in braces.
        text: What it is, in a sentence.
        is_counter: It only grows; otherwise it goes up and down.
        label: What tells its values apart; empty if there is one value.
        values: Get them, by the value of the label; "" if there is one.
    """

    name: str
    unit: str
    text: str
    is_counter: bool
    label: str
    values: Callable[[Stats], dict[str, float]]


def stage_seconds(span: Span) -> dict[str, float]:
    """Return the seconds of workers by what they did, idleness included."""
    return {
        "idle": span.idle_s,
        "read": span.read_s,
        "compute": span.compute_s,
        "collate": span.collate_s,
        "send": span.send_s,
    }


class Watched:
    """A loader that is looked at, and not kept alive."""

    def __init__(self, loader: HasStats, labels: dict[str, str]) -> None:
        """Refer to the loader weakly.

        Args:
            loader: Whose stats they are.
            labels: What tells it from other loaders.
        """
        self._loader = weakref.ref(loader)
        self.labels = labels

    def stats(self) -> Stats | None:
        """Return its stats; None if there is no such loader any more."""
        loader = self._loader()
        return None if loader is None else loader.stats()

    @property
    def is_gone(self) -> bool:
        """Whether the loader is no more."""
        return self._loader() is None


def _counter(name: str, unit: str, text: str, value: Callable[[Span], float]) -> Measure:
    return Measure(name, unit, text, True, "", lambda stats: {"": value(stats.run)})


def _gauge(name: str, unit: str, text: str, value: Callable[[Stats], float]) -> Measure:
    return Measure(name, unit, text, False, "", lambda stats: {"": value(stats)})


def _memory(stats: Stats) -> dict[str, float]:
    """Return bytes by worker; threads have none of their own."""
    known = {number: size for number, size in stats.worker_rss_bytes.items() if size}
    is_serial = not stats.num_workers
    return {"trainer" if is_serial else str(number): size for number, size in known.items()}


def _bottlenecks(stats: Stats) -> dict[str, float]:
    return {name: float(name == stats.verdict.bottleneck) for name in get_args(Bottleneck)}


MEASURES: Final = (
    _counter("batches", "{batch}", "Batches given to the main process.", lambda run: run.batches),
    _counter("samples", "{sample}", "Samples given to the main process.", lambda run: run.samples),
    _counter(
        "samples_failed", "{sample}", "Bad samples, each once an epoch.", lambda run: run.failed
    ),
    _counter("data", "By", "Bytes of the batches in their slots.", lambda run: run.bytes),
    _counter("wait", "s", "Time that the main process waited for batches.", lambda run: run.wait_s),
    _counter("consumer", "s", "Time in the main process's own code.", lambda run: run.consumer_s),
    _counter("trainer_cpu", "s", "CPU time of the main process.", lambda run: run.trainer_cpu_s),
    _counter(
        "trainer_starved",
        "s",
        "Time that the main process could have run and no core was free.",
        lambda run: run.trainer_starved_s,
    ),
    Measure(
        "stage",
        "s",
        "Time of all workers, by what they did.",
        True,
        "stage",
        lambda stats: stage_seconds(stats.run),
    ),
    _counter("slot_making", "s", "Time that workers made new slots.", lambda run: run.slot_s),
    _counter("worker_cpu", "s", "CPU time of all workers.", lambda run: run.worker_cpu_s),
    _counter(
        "worker_starved",
        "s",
        "Time that workers could have run and no core was free.",
        lambda run: run.starved_s,
    ),
    _gauge("workers", "{worker}", "Workers now.", lambda stats: stats.num_workers),
    _gauge(
        "prefetch_factor",
        "{batch}",
        "Batches under way per worker.",
        lambda stats: stats.prefetch_factor,
    ),
    _gauge(
        "batches_ready",
        "{batch}",
        "Batches that lay ready when one was asked for, on average.",
        lambda stats: stats.num_ready,
    ),
    _gauge("slot_peak", "By", "Memory of all slots at its peak.", lambda stats: stats.slot_bytes),
    Measure(
        "worker_memory_peak",
        "By",
        "Largest resident memory of a worker; of the main process if there are none.",
        False,
        "worker",
        lambda stats: _memory(stats),
    ),
    _gauge("epoch", "{epoch}", "Number of the epoch.", lambda stats: stats.epoch_number),
    Measure(
        "bottleneck",
        "{verdict}",
        "1 for what limits the loader now, 0 for what does not.",
        False,
        "bottleneck",
        _bottlenecks,
    ),
)
