# SPDX-License-Identifier: Apache-2.0
"""A trace keeps the rules of the trace event format, and holds its recording."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.insight.recording import Recording
from penstock.insight.segments import WORKER_STAGES, columns_of, stages_of
from penstock.insight.stats import Stats, Verdict
from penstock.insight.trace import read_trace, trace_events, write_trace

from .recordings import Run, change, failure, recording_of

PHASES = {"M", "X", "C", "i"}
ROUNDING_US = 0.001  # nanoseconds are written as microseconds


@pytest.fixture(scope="module")
def recording():
    return recording_of(
        failures=[failure(step=5), failure(index="gone", step=99_999)],
        changes=[change(40, 2, "workers are busy"), change(99_999, 3, "no batch of it is kept")],
    )


@pytest.fixture(scope="module")
def written(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    assert write_trace(recording, path) == path

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_every_event_has_what_the_format_asks_for(written):
    events = written["traceEvents"]
    assert {event["ph"] for event in events} == PHASES
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
    assert all(event["dur"] > 0 for event in of_phase(events, "X"))
    assert all(event["s"] == "p" for event in of_phase(events, "i"))


def test_events_come_in_order_of_time_after_the_names(written):
    events = written["traceEvents"]
    names = of_phase(events, "M")
    assert events[: len(names)] == names
    times = [event["ts"] for event in events[len(names) :]]
    assert times == sorted(times)


def rows_of(events):
    rows = {}
    for event in of_phase(events, "X"):
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    return rows


def assert_nothing_overlaps(events):
    for row in rows_of(events).values():
        row.sort(key=lambda event: (event["ts"], event["dur"]))
        for one, other in itertools.pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + ROUNDING_US


def test_events_of_one_row_do_not_overlap(written):
    assert_nothing_overlaps(written["traceEvents"])


def test_every_row_has_a_name(written):
    events = written["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(events, "M")}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in of_phase(events, "M")
        if e["name"] == "thread_name"
    }
    assert set(rows_of(events)) == set(threads)
    assert sorted(threads.values()) == ["training loop", "worker 0", "worker 1", "worker 2"]
    assert len(named) == 5  # of the two processes, one has no thread 0


def test_rows_hold_the_seconds_that_the_stats_add_up_to(written, recording):
    run = recording.stats.run
    sums = {}
    for event in of_phase(written["traceEvents"], "X"):
        sums[event["name"]] = sums.get(event["name"], 0.0) + event["dur"] / 1e6
    assert sums.pop("own code") == pytest.approx(run.consumer_s, rel=1e-6)
    assert sums.pop("wait for batch") == pytest.approx(run.wait_s, rel=1e-6)
    assert sums.pop("idle") >= run.idle_s  # which is without that between epochs
    for name in ("read", "compute", "collate", "send"):
        assert sums.pop(name) == pytest.approx(getattr(run, f"{name}_s"), rel=1e-6)
    assert not sums


def test_failures_and_changes_are_marked_where_their_batch_is_kept(written):
    bad, change = of_phase(written["traceEvents"], "i")
    assert bad["name"] == "bad sample"
    assert bad["args"].items() >= {"name": "photos/broken.jpg", "index": 7}.items()
    assert change["name"] == "2 workers, 2 batches each"
    assert change["args"]["reason"] == "workers are busy"


def test_counters_have_the_value_of_each_batch(written, recording):
    noted = [e["args"] for e in of_phase(written["traceEvents"], "C") if e["name"] == "workers"]
    assert noted == [{"workers": 3}] * len(recording.batches["step"])
    ready = [
        e["args"]["ready batches"]
        for e in of_phase(written["traceEvents"], "C")
        if e["name"] == "ready batches"
    ]
    assert ready == recording.batches["ready"]


def test_the_recording_is_read_back_from_the_trace(recording, tmp_path):
    path = write_trace(recording, tmp_path / "run.json")
    assert read_trace(path) == recording


def test_an_empty_run_has_a_trace(tmp_path):
    empty = Recording({}, Stats(Verdict("nothing yet", "")))
    assert read_trace(write_trace(empty, tmp_path / "run.json")) == empty
    assert {event["ph"] for event in trace_events(empty)} == {"M"}


def test_a_file_that_is_no_trace_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(ConfigError, match=r"cannot read .*run.json: No such file"):
        read_trace(path)
    path.write_text("[1, 2")
    with pytest.raises(ConfigError, match=r"is not JSON"):
        read_trace(path)
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"no trace of a loader: it has no otherData.recording"):
        read_trace(path)
    path.write_text('{"otherData": {"recording": {"format": "penstock recording"}}}')
    with pytest.raises(ConfigError, match=r"version None"):
        read_trace(path)


@st.composite
def batch_columns(draw):
    """Columns as no sane run has them: tasks that overlap, parts longer than their whole."""
    number = draw(st.integers(0, 12))
    moments = st.integers(0, 2_000)
    names = ("begun_ns", "ended_ns", "asked_ns", "given_ns", "consumer_ns", "idle_ns")
    names += ("fetch_ns", "read_ns", "collate_ns", "send_ns")
    columns = {name: [0] * number for name in Recording({}, Stats(Verdict("trainer", ""))).batches}
    for name in names:
        columns[name] = draw(st.lists(moments, min_size=number, max_size=number))
    columns["worker"] = draw(st.lists(st.integers(0, 2), min_size=number, max_size=number))
    columns["step"] = list(range(number))
    return columns


@settings(max_examples=200, deadline=None)
@given(batch_columns())
def test_whatever_was_measured_nothing_overlaps_and_nothing_ends_before_it_begins(columns):
    recording = Recording({}, Stats(Verdict("trainer", "")), columns)
    for stage in stages_of(columns_of(recording)).values():
        assert (stage.stops >= stage.starts).all()
    assert_nothing_overlaps(trace_events(recording))


def test_what_goes_beyond_the_end_of_a_task_is_cut_off():
    one = {name: [0] for name in recording_of(Run(batches=0)).batches}
    one |= {"begun_ns": [1000], "ended_ns": [2000], "fetch_ns": [700], "read_ns": [500]}
    one |= {"collate_ns": [200], "send_ns": [150], "idle_ns": [400]}
    stages = stages_of(columns_of(Recording({}, Stats(Verdict("trainer", "")), one)))
    lengths = {name: int((stages[name].stops - stages[name].starts)[0]) for name in WORKER_STAGES}
    assert lengths == {"idle": 400, "read": 500, "compute": 200, "collate": 200, "send": 100}


def test_own_code_is_work_on_the_batch_before(written, recording):
    assert [e["args"]["step"] for e in of_phase(written["traceEvents"], "X")
            if e["name"] == "own code"][:3] == [0, 1, 2]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [("given_ns", 10**30), ("worker", -3)])
def test_a_damaged_trace_is_told_as_such(name, value, tmp_path):
    path = write_trace(recording_of(Run(batches=5)), tmp_path / "run.json")
    content = json.loads(path.read_text())
    content["otherData"]["recording"]["batches"][name][0] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="damaged"):
        read_trace(path)


def test_a_number_of_400_digits_is_damage(tmp_path):
    path = write_trace(recording_of(Run(batches=5)), tmp_path / "run.json")
    content = json.loads(path.read_text())
    content["otherData"]["recording"]["stats"]["cores"] = 10**400
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="recording is damaged"):
        read_trace(path)
