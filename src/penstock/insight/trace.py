# SPDX-License-Identifier: Apache-2.0
"""A recording in the trace event format, which chrome://tracing and ui.perfetto.dev show.

    main process | own code | wait for batch | own code | …     counters: ready batches, workers
    worker 0     | read | compute | collate | send | idle | …   marks: bad samples, changes

See `penstock.insight.segments` for what is approximate.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError
from penstock.insight.recording import Recording
from penstock.insight.segments import TRAINER_STAGES, columns_of, stages_of
from penstock.opening import MAX_TREE_BYTES, read_file
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.insight.plain import JSON
    from penstock.insight.segments import Columns

Event = dict[str, Any]

_TRAINER: Final = 1  # processes of the trace; the real ones are in the arguments of the events
_WORKERS: Final = 2
_KEY: Final = "recording"
_NAMES: Final = {"own": "own code", "wait": "wait for batch"}
_ARGUMENTS: Final = ("epoch", "step", "samples", "failed", "bytes", "pid")


def write_trace(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Write a run for chrome://tracing and ui.perfetto.dev, as JSON; returns the path.

    The recording itself is in it, under "otherData", so that `penstock report` can draw its page
    from the file.

    Reference:
        Trace Event Format, JSON object form: events of the phases X, M, C and i.
    """
    content = {"traceEvents": trace_events(recording), "otherData": {_KEY: recording.to_json()}}
    return write_whole(path, json.dumps(content, allow_nan=False, separators=(",", ":")))


def read_trace(path: str | os.PathLike[str]) -> Recording:
    """Return the recording in a file that `write_trace` wrote.

    Raises:
        ConfigError: it cannot be read, or is no such file; the message says why.
    """
    return recording_in(read_json(path), path)


def read_json(path: str | os.PathLike[str]) -> JSON:
    """Return what is in a file of JSON, which may be a trace.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        data = read_file(os.fspath(path), MAX_TREE_BYTES, remedy="record less")
        content: JSON = json.loads(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON ({error}). `loader.trace(path)` writes a trace, and "
            "`penstock run --save` the figures of a run."
        ) from error
    return content


def recording_in(content: JSON, path: str | os.PathLike[str]) -> Recording:
    """Return the recording in what `read_json` returned for `path`.

    Raises:
        ConfigError: it is no trace, or damaged; the message says where.
    """
    other = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(other, dict) or _KEY not in other:
        raise ConfigError(
            f"{path} is JSON, but no trace of a loader: it has no otherData.{_KEY}. "
            "`loader.trace(path)` writes one."
        )
    recording = Recording.from_json(other[_KEY])
    try:
        columns_of(recording)
    except (OverflowError, ValueError) as error:
        raise ConfigError(f"The recording in {path} is damaged: {error}.") from error
    return recording


def trace_events(recording: Recording) -> list[Event]:
    """Return the events, names first, then in order of time.

    Every one has "ph", "pid", "tid" and "ts", in microseconds from the first moment of the
    recording. Events of one row do not overlap.

    Example:
        >>> from penstock.insight.stats import Stats, Verdict
        >>> events = trace_events(Recording({}, Stats(Verdict("nothing yet", ""))))
        >>> [event["args"]["name"] for event in events]
        ['main process', 'training loop']
    """
    columns = columns_of(recording)
    timed = [*_stages(columns), *_counters(columns), *_marks(recording, columns)]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return [*_names(columns, recording.stats.backend), *timed]


def _names(columns: Columns, backend: str) -> Iterator[Event]:
    yield _event("M", _TRAINER, 0, "process_name", args={"name": "main process"})
    yield _event("M", _TRAINER, 0, "thread_name", args={"name": "training loop"})
    workers = sorted(set(columns["worker"].tolist()))
    if workers:
        yield _event("M", _WORKERS, 0, "process_name", args={"name": f"workers ({backend})"})
    for worker in workers:
        yield _event("M", _WORKERS, worker + 1, "thread_name", args={"name": f"worker {worker}"})


def _stages(columns: Columns) -> Iterator[Event]:
    values = zip(*(columns[name].tolist() for name in _ARGUMENTS), strict=True)
    batches = [dict(zip(_ARGUMENTS, batch, strict=True)) for batch in values]
    workers = columns["worker"].tolist()
    for name, stage in stages_of(columns).items():
        is_trainer = name in TRAINER_STAGES
        moments = zip(stage.starts.tolist(), stage.stops.tolist(), strict=True)
        for number, (start, stop) in enumerate(moments):
            if stop > start:
                yield _event(
                    "X",
                    _TRAINER if is_trainer else _WORKERS,
                    0 if is_trainer else workers[number] + 1,
                    _NAMES.get(name, name),
                    start,
                    # Added to "ts", it is the "ts" of what comes next, and not a bit more.
                    dur=round(stop / 1e3 - start / 1e3, 3),
                    # Own code is work on the batch before.
                    args=batches[max(number - 1, 0) if name == "own" else number],
                )


def _counters(columns: Columns) -> Iterator[Event]:
    moments = columns["asked_ns"].tolist()
    for name, column in (("ready batches", "ready"), ("workers", "num_workers")):
        for moment, value in zip(moments, columns[column].tolist(), strict=True):
            yield _event("C", _TRAINER, 0, name, moment, args={name: value})


def _marks(recording: Recording, columns: Columns) -> Iterator[Event]:
    """Yield a mark where the batch of a bad sample, or of a change, was given, if it is kept."""
    steps = zip(columns["epoch"].tolist(), columns["step"].tolist(), strict=True)
    given_ns = dict(zip(steps, columns["given_ns"].tolist(), strict=True))
    marks = [(f.epoch, f.step, "bad sample", asdict(f)) for f in recording.failures]
    for c in recording.stats.changes:
        name = f"{c.num_workers} workers, {c.prefetch_factor} batches each"
        marks.append((c.epoch, c.step, name, asdict(c)))
    for epoch, step, name, args in marks:
        if (epoch, step) in given_ns:
            yield _event("i", _TRAINER, 0, name, given_ns[epoch, step], s="p", args=args)


def _event(phase: str, pid: int, tid: int, name: str, moment_ns: int = 0, **more: Any) -> Event:  # noqa: ANN401
    return {"ph": phase, "ts": moment_ns / 1e3, "pid": pid, "tid": tid, "name": name, **more}
