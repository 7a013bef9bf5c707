# SPDX-License-Identifier: Apache-2.0
"""Inputs of a verdict, and the phrases that its sentences are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.insight.units import duration, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.backends import BackendTraits
    from penstock.insight.means import Means
    from penstock.insight.stats import SlowSample, SourceTiming, Span

__all__ = [
    "READS",
    "WAITS",
    "Inputs",
    "count_of_workers",
    "names_of",
    "of_it",
    "per_second",
    "throughput",
    "times",
    "waits",
    "worth",
]

WAITS: Final = 0.05  # share of the time below which nobody would notice a remedy
READS: Final = 0.5  # share of a batch's cost
_WORTH: Final = 1.15  # a gain below it may be an error of the model


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a verdict is judged by."""

    span: Span
    at: Means
    num_ready: float
    lookahead: int
    sources: Sequence[SourceTiming]
    slowest: Sequence[SlowSample]
    traits: BackendTraits
    lock_share: float | None
    is_auto: bool


def worth(gain: float) -> bool:
    """Return whether a gain is clearly above what the model may be wrong by."""
    return gain >= _WORTH


def waits(inputs: Inputs) -> str:
    """Return how long the main process waits, as the beginning of a sentence."""
    return f"The main process waits {percent(inputs.at.wait_share)} of the time"


def of_it(inputs: Inputs) -> str:
    """Return what most of a batch's cost is."""
    at = inputs.at
    if at.share(at.read_s) >= READS:
        return f", {duration(at.read_s)} of it waiting for reads"
    return f", {duration(at.worker_cpu_s)} of it CPU"


def names_of(slowest: Sequence[SlowSample]) -> str:
    """Return a sentence with the slowest samples; empty if there are none with a key."""
    known = [s for s in slowest if s.name is not None or s.index is not None][:3]
    if not known:
        return ""
    listed = ", ".join(
        f"{s.name or f'sample {s.index!r:.40}'} ({duration(s.seconds)})" for s in known
    )
    return f" The slowest: {listed}."


def per_second(at: Means) -> float:
    """Return how many batches the workers make in a second."""
    return at.num_workers / at.made_s if at.made_s > 0 else math.inf


def count_of_workers(number: int) -> str:
    """Return a number of workers in words."""
    return "1 worker" if number == 1 else f"{number} workers"


def times(gain: float) -> str:
    """Return a factor in words."""
    return f"about {gain:.1f} x"


def throughput(gain: float) -> str:
    """Return how much throughput there would be."""
    return f"{times(gain)} the throughput"
