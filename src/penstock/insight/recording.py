# SPDX-License-Identifier: Apache-2.0
"""`Recording`: everything that a report or a trace shows, as plain values that go through JSON."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from penstock.engine.timing import TimingRow
from penstock.errors import ConfigError
from penstock.faults import Failure, text_of
from penstock.insight.plain import JSON, key_of_sample, plain, plain_text, read_versioned
from penstock.insight.stats import Span, Stats  # noqa: TC001 - `from_json` asks for the types

if TYPE_CHECKING:
    from penstock.insight.rows import Rows

_FORMAT: Final = "penstock recording"
_VERSION: Final = 1
_RENAMED: Final = {
    "worker_id": "worker",
    "num_samples": "samples",
    "num_failed": "failed",
    "num_ready": "ready",
    "num_bytes": "bytes",
}
# By the name in the rows. A field that a row gets later is no column of this version.
_COLUMNS: Final = {
    name: _RENAMED.get(name, name) for name in (*TimingRow._fields, "read_ns") if name != "seed_ns"
}
_MOMENTS: Final = ("asked_ns", "given_ns", "begun_ns", "ended_ns")
_MAY_BE_UNKNOWN: Final = ("trainer_starved_ns", "starved_ns")


@dataclass(frozen=True, slots=True)
class FailedSample:
    """A sample that failed, in texts; `partner_of` is the sample that it was drawn for."""

    index: int | str | None
    name: str | None
    error: str
    worker_id: int | None
    epoch: int
    step: int
    partner_of: int | str | None = None


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """The sums of one epoch."""

    epoch: int
    span: Span


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what versions a run was, and when it began (ISO 8601); empty if not known."""

    cores: float = 0.0
    python: str = ""
    numpy: str = ""
    penstock: str = ""
    started: str = ""
    torch: str = ""


@dataclass(frozen=True, slots=True)
class Recording:
    """A run, as far as it was kept.

    Attributes:
        settings: Of the loader.
        stats: Sums and verdict; changes of workers, slowest samples and sources are in it. Keys
            of samples are numbers or texts.
        batches: Columns, all of one length, one entry per batch that was kept, the oldest first:
            "epoch", "step", "worker", "pid", "asked_ns", "given_ns", "consumer_ns",
            "trainer_cpu_ns", "trainer_starved_ns", "samples", "failed", "ready", "num_workers",
            "lookahead", "begun_ns", "ended_ns", "idle_ns", "fetch_ns", "read_ns", "collate_ns",
            "send_ns", "slot_ns", "cpu_ns", "starved_ns", "bytes", "pool_bytes", "rss_bytes", as
            `TimingRow` has them. Moments count from the first of all. Times starved are None where
            the system does not say.
        epochs: Sums of each epoch, in the order in which they began; the last 1,000 at most.
        failures: Samples that failed.
        machine: Where it ran.

    Example:
        >>> from penstock.insight.stats import Verdict
        >>> recording = Recording(settings={"num_workers": 2}, stats=Stats(Verdict("trainer", "")))
        >>> Recording.from_json(recording.to_json()) == recording
        True
    """

    settings: dict[str, JSON]
    stats: Stats
    batches: dict[str, list[int | None]] = field(
        default_factory=lambda: {name: [] for name in _COLUMNS.values()}
    )
    epochs: tuple[EpochSpan, ...] = ()
    failures: tuple[FailedSample, ...] = ()
    machine: Machine = field(default_factory=Machine)

    def to_json(self) -> dict[str, JSON]:
        """Return it as dicts, lists, numbers and texts that `json.dumps` takes; a copy."""
        content = plain(asdict(self))
        assert isinstance(content, dict)
        return {"format": _FORMAT, "version": _VERSION, **content}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the recording that `to_json` wrote.

        Raises:
            ConfigError: it is no recording, of a newer version, or damaged; the message says where.
        """
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            kind = type(data).__name__
            raise ConfigError(
                f'This is no recording of a loader: {kind} without "format": "{_FORMAT}". '
                "`loader.report` and `loader.trace` write them."
            )
        known = {key: value for key, value in data.items() if key != "classes"}  # of older ones
        if isinstance(stats := known.get("stats"), Mapping):  # as are the costs of parts
            known["stats"] = {key: value for key, value in stats.items() if key != "sources"}
        found: Self = read_versioned(cls, known, _VERSION, "recording")
        _check_columns(found.batches)
        return found


def _check_columns(batches: dict[str, list[int | None]]) -> None:
    num = len(batches.get("step", ()))
    wrong = [n for n in _COLUMNS.values() if n not in batches or len(batches[n]) != num]
    if wrong:
        raise ConfigError(f"The recording is damaged: columns {wrong} lack some of {num} batches.")


def make_recording(
    settings: Mapping[str, Any],
    failures: Sequence[Failure],
    stats: Stats,
    rows: Rows,
    epochs: Mapping[int, Span],
    started: str,
) -> Recording:
    """Return the recording of a run; `History.recording` calls it."""
    found = plain(settings)
    assert isinstance(found, dict)
    return Recording(
        settings=found,
        stats=_with_plain_keys(stats),
        batches=_batches(rows),
        epochs=tuple(EpochSpan(number, span) for number, span in epochs.items()),
        failures=tuple(_failed(failure) for failure in failures),
        machine=_machine(stats.cores, started),
    )


def _with_plain_keys(stats: Stats) -> Stats:
    slowest = tuple(replace(s, index=key_of_sample(s.index)) for s in stats.slowest)
    verdict = replace(stats.verdict, text=plain_text(stats.verdict.text))  # it may name samples
    return replace(stats, slowest=slowest, verdict=verdict)


def _batches(rows: Rows) -> dict[str, list[int | None]]:
    columns = {name: rows[name].tolist() for name in _COLUMNS}
    # A batch that was not measured has moments of 0.
    start = min((moment for name in _MOMENTS for moment in columns[name] if moment), default=0)
    for name in _MOMENTS:
        columns[name] = [max(moment - start, 0) for moment in columns[name]]
    for name in _MAY_BE_UNKNOWN:
        columns[name] = [None if took < 0 else took for took in columns[name]]
    return {column: columns[name] for name, column in _COLUMNS.items()}


def _failed(failure: Failure) -> FailedSample:
    return FailedSample(
        index=key_of_sample(failure.index),
        name=None if failure.name is None else plain_text(failure.name),
        error=plain_text(text_of(failure.error)),
        worker_id=failure.worker_id,
        epoch=failure.epoch,
        step=failure.step,
        partner_of=key_of_sample(failure.partner_of),
    )


def _machine(cores: float, started: str) -> Machine:
    version = sys.modules["penstock"].__version__
    torch = getattr(sys.modules.get("torch"), "__version__", "")
    return Machine(
        float(cores), platform.python_version(), np.__version__, version, started, str(torch)
    )
