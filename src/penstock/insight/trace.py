# SPDX-License-Identifier: Apache-2.0
"""A recording in the trace event format, which chrome://tracing and ui.perfetto.dev show.

    main process 1 | own code | wait | own code | wait |         counters: ready batches, workers
                                         ▲ flow "batch"          instants: failures, changes
    workers      1 |  read | compute | collate | send | idle …
                 2 |  …

Stages of a worker are drawn one after the other, though samples are read and computed in turn: see
`penstock.insight.segments`.
"""

from __future__ import annotations

import json
import os
import typing
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.insight.marks import batches_of_changes, batches_of_failures
from penstock.insight.recording import Recording
from penstock.insight.segments import Columns, trainer_stages, worker_stages
from penstock.opening import MAX_TREE_BYTES, read_file
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.insight.plain import JSON
    from penstock.insight.segments import Stage

__all__ = ["read_json", "read_trace", "recording_in", "trace_events", "write_trace"]

Event = dict[str, Any]

_TRAINER: Final = 1  # processes of the trace; the real ones are in the arguments of the events
_WORKERS: Final = 2
_KEY: Final = "recording"
_NAMES: Final = {"own": "own code", "wait": "wait for batch"}
# Of the colours that the format knows by name.
_COLOURS: Final = {
    "own": "good",
    "wait": "terrible",
    "idle": "grey",
    "read": "thread_state_iowait",
    "compute": "thread_state_running",
    "collate": "rail_animation",
    "send": "rail_load",
}


def write_trace(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Write a run for chrome://tracing and ui.perfetto.dev, as JSON.

    The recording itself is in it, under "otherData", so that `penstock report` can draw its page
    from the file.

    Args:
        recording: The run; `loader.trace(path)` makes one.
        path: Where to; an existing file is replaced.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.

    Concurrency:
        Any thread.

    Reference:
        Trace Event Format, JSON object form: events of the phases X, M, C, i, s and f.
    """
    content = {
        "traceEvents": trace_events(recording),
        "displayTimeUnit": "ms",
        "otherData": {_KEY: recording.to_json()},
    }
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
        return typing.cast("JSON", json.loads(data))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not JSON ({error}). `loader.trace(path)` writes a trace, and "
            "`penstock run --save` the figures of a run."
        ) from error


def recording_in(content: JSON, path: str | os.PathLike[str]) -> Recording:
    """Return the recording in the content of a trace.

    Args:
        content: What `read_json` returned.
        path: Of the file, for messages.

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
        Columns(recording).check()
        _check_classes(recording)
    except (OverflowError, ValueError) as error:
        raise ConfigError(f"The recording in {path} is damaged: {error}.") from error
    return recording


def _check_classes(recording: Recording) -> None:
    known = recording.classes
    if known and not len(known.names) == len(known.dataset) == len(known.shown):
        raise ValueError("names and counts of classes differ in number")


def trace_events(recording: Recording) -> list[Event]:
    """Return the events, names first, then in order of time.

    Every one has "ph", "pid", "tid" and "ts", in microseconds from the first moment of the
    recording. Events of one row do not overlap.

    Example:
        >>> from penstock.insight.stats import Stats, Verdict
        >>> events = trace_events(Recording({}, Stats(Verdict("nothing yet", ""))))
        >>> [event["args"]["name"] for event in events]
        ['trainer', 'training loop']
    """
    columns = Columns(recording)
    backend = recording.stats.backend
    timed = [
        *_trainer_events(columns),
        *_worker_events(columns),
        *_flows(columns),
        *_counters(columns),
        *_failures(recording, columns),
        *_changes(recording, columns),
    ]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return [*_names(columns, backend), *timed]


def _names(columns: Columns, backend: str) -> Iterator[Event]:
    yield _named("process_name", _TRAINER, 0, "trainer")
    yield _named("thread_name", _TRAINER, 0, "training loop")
    if not len(columns):
        return
    yield _named("process_name", _WORKERS, 0, f"workers ({backend})")
    for seat, name in enumerate(columns.seat_names):
        yield _named("thread_name", _WORKERS, seat + 1, name)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _trainer_events(columns: Columns) -> Iterator[Event]:
    batches = _batch_arguments(columns)
    own, wait = trainer_stages(columns)
    for position, (start, stop) in _lengths(own):  # which is work on the batch before
        batch = batches[position - 1] if position else _before_first(batches[0])
        yield _complete(own.name, _TRAINER, 0, start, stop, batch)
    for position, (start, stop) in _lengths(wait):
        yield _complete(wait.name, _TRAINER, 0, start, stop, batches[position])


def _before_first(batch: Event) -> Event:
    return {"epoch": batch["epoch"], "step": batch["step"] - 1}


def _worker_events(columns: Columns) -> Iterator[Event]:
    batches, seats = _batch_arguments(columns), columns.seats.tolist()
    for stage in worker_stages(columns):
        for position, (start, stop) in _lengths(stage):
            yield _complete(
                stage.name, _WORKERS, seats[position] + 1, start, stop, batches[position]
            )


def _lengths(stage: Stage) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield position and moments of what took any time at all."""
    moments = zip(stage.starts.tolist(), stage.stops.tolist(), strict=True)
    return ((n, (start, stop)) for n, (start, stop) in enumerate(moments) if stop > start)


def _complete(name: str, pid: int, tid: int, start: int, stop: int, args: Event) -> Event:
    return {
        "ph": "X",
        "ts": start / 1e3,
        # Whoever adds it to "ts" gets the "ts" of what comes next, and not a bit more.
        "dur": round(stop / 1e3 - start / 1e3, 3),
        "pid": pid,
        "tid": tid,
        "name": _NAMES.get(name, name),
        "cat": "trainer" if pid == _TRAINER else "worker",
        "cname": _COLOURS[name],
        "args": args,
    }


def _batch_arguments(columns: Columns) -> list[Event]:
    names = {"epoch": "epoch", "step": "step", "samples": "samples", "failed": "failed"}
    names |= {"bytes": "bytes", "pid": "pid"}
    rows = zip(*(columns[column].tolist() for column in names), strict=True)
    return [dict(zip(names.values(), row, strict=True)) for row in rows]


def _flows(columns: Columns) -> Iterator[Event]:
    """Yield an arrow from a batch's making to the wait in which the main process got it."""
    send, wait = worker_stages(columns)[-1], trainer_stages(columns)[-1]
    made = (send.starts + send.stops) // 2  # within the event that it starts from
    taken = np.maximum(wait.starts, wait.stops - 1)  # within its event too, to the nanosecond
    places = zip(columns.seats.tolist(), made.tolist(), taken.tolist(), strict=True)
    for number, (seat, start, stop) in enumerate(places):
        if not columns["ended_ns"][number]:  # nothing is known of its making
            continue
        common = {"name": "batch", "cat": "batch", "id": number}
        place = {"pid": _WORKERS, "tid": seat + 1}
        yield {"ph": "s", "ts": min(start, stop) / 1e3, **place, **common}
        yield {"ph": "f", "bp": "e", "ts": stop / 1e3, "pid": _TRAINER, "tid": 0, **common}


def _counters(columns: Columns) -> Iterator[Event]:
    for name, column in (("ready batches", "ready"), ("workers", "num_workers")):
        before = None
        for moment, value in zip(
            columns["asked_ns"].tolist(), columns[column].tolist(), strict=True
        ):
            if value != before:
                yield _counter(name, moment, value)
            before = value


def _counter(name: str, moment: int, value: int) -> Event:
    return {
        "ph": "C",
        "ts": moment / 1e3,
        "pid": _TRAINER,
        "tid": 0,
        "name": name,
        "args": {name: value},
    }


def _failures(recording: Recording, columns: Columns) -> Iterator[Event]:
    given = columns["given_ns"].tolist()
    positions = batches_of_failures(columns, recording.failures)
    for failure, position in zip(recording.failures, positions, strict=True):
        if position is not None:  # else its batch is not kept any more
            arguments = {"index": failure.index, "name": failure.name, "error": failure.error}
            yield _instant("bad sample", given[position], arguments)


def _changes(recording: Recording, columns: Columns) -> Iterator[Event]:
    given, changes = columns["given_ns"].tolist(), recording.stats.changes
    for change, position in zip(changes, batches_of_changes(columns, changes), strict=True):
        if position is not None:
            name = f"{change.num_workers} workers, {change.prefetch_factor} batches each"
            yield _instant(name, given[position], {"reason": change.reason})


def _instant(name: str, moment: int, arguments: Mapping[str, Any]) -> Event:
    return {
        "ph": "i",
        "s": "p",  # across all rows of the main process
        "ts": moment / 1e3,
        "pid": _TRAINER,
        "tid": 0,
        "name": name,
        "cat": "note",
        "args": dict(arguments),
    }
