# SPDX-License-Identifier: Apache-2.0
"""What a verdict is made of: all that is known, and the phrases in which it is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.insight.figures import duration, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.insight.figures import Figures
    from penstock.insight.stats import SlowSample, Source, Span

__all__ = [
    "READS",
    "WAITS",
    "Case",
    "bounded",
    "count_of_workers",
    "names_of",
    "of_it",
    "per_second",
    "throughput",
    "times",
    "waits",
    "wanted",
]

WAITS: Final = 0.05  # share of the time below which nobody would notice a remedy
READS: Final = 0.5  # share of a batch's cost


@dataclass(frozen=True, slots=True)
class Case:
    """All that is known."""

    span: Span
    at: Figures
    num_ready: float
    lookahead: int
    sources: Sequence[Source]
    slowest: Sequence[SlowSample]
    backend: str
    lock_share: float | None


def waits(case: Case) -> str:
    """Return how long the trainer waits, as the beginning of a sentence."""
    return f"The trainer waits {percent(case.at.wait_share)} of the time"


def of_it(case: Case) -> str:
    """Return what most of a batch's cost is."""
    at = case.at
    if at.share(at.read_s) >= READS:
        return f", {duration(at.read_s)} of it waiting for reads"
    return f", {duration(at.cpu_s)} of it CPU"


def names_of(slowest: Sequence[SlowSample]) -> str:
    """Return a sentence with the slowest samples; empty if there are none with a key."""
    known = [s for s in slowest if s.name is not None or s.index is not None][:3]
    if not known:
        return ""
    listed = ", ".join(
        f"{s.name or f'sample {s.index!r:.40}'} ({duration(s.seconds)})" for s in known
    )
    return f" The slowest: {listed}."


def wanted(at: Figures) -> int:
    """Return how many workers could be put to use."""
    return at.needed_workers(min(at.trainer_rate, at.core_rate))


def per_second(at: Figures) -> float:
    """Return how many batches the workers make in a second."""
    whole_s = at.busy_s + at.starved_s
    return at.num_workers / whole_s if whole_s > 0 else math.inf


def count_of_workers(number: int) -> str:
    """Return a number of workers in words."""
    return "1 worker" if number == 1 else f"{number} workers"


def times(gain: float | None) -> str:
    """Return a factor in words."""
    return "several times" if gain is None else f"about {gain:.1f} x"


def throughput(gain: float | None) -> str:
    """Return how much throughput there would be."""
    return f"{times(gain)} the throughput"


def bounded(gain: float) -> float | None:
    """Return a gain that is one."""
    return max(gain, 1.0) if math.isfinite(gain) else None
