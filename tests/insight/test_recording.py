# SPDX-License-Identifier: Apache-2.0
"""A run as plain values: through JSON without loss, without secrets, checked on its way in."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.insight.batches import batch

from penstock.errors import ConfigError
from penstock.faults import Failure
from penstock.insight.history import History
from penstock.insight.plain import plain
from penstock.insight.recording import Recording

MS = 1_000_000


class Pets(list):
    """A dataset that knows its classes, and whose samples must not be read."""

    labels = (0, 1, 1, 2)
    classes = ("cat", "dog", "cow", "owl")

    def __getitem__(self, index):
        raise AssertionError("a sample was read")

    def describe(self, index):
        return f"mongodb://me:secret@host/{index}"


def a_history(dataset=None, *, indices=(0, 1, 1)):
    history = History(dataset)
    for step in range(12):
        start = 10**15 + step * 10 * MS
        one = batch(
            begun_ns=start - 5 * MS,
            ended_ns=start - MS,
            fetch_ns=3 * MS,
            cpu_ns=2 * MS,
            starved_ns=None if step % 2 else 3,
            num_bytes=64,
            sample_us=np.array([10, 20, 3000], np.uint32).tobytes(),
            rss_bytes=99,
            indices=list(indices),
            epoch=step // 6,
            step=step % 6,
            worker_id=step % 2,
            pid=7,
            asked_ns=start,
            given_ns=start + MS,
            consumer_ns=4 * MS,
            trainer_cpu_ns=MS,
            num_samples=3,
            num_failed=1,
            num_ready=1,
            num_workers=2,
            lookahead=4,
        )
        history.add(*one)
    return history


def recorded(history, given=None, failures=()):
    stats = history.stats(num_workers=2, prefetch_factor=2, cores=2.0)
    return history.recording(given or {}, list(failures), stats, started="2030-01-01T00:00:00Z")


def a_failure(index=3, name=None, error=None):
    return Failure(index, name, error or ValueError("broken"), "trace", 1, 0, 5)


def test_a_recording_survives_json_exactly():
    recording = recorded(
        a_history(Pets("abcd")),
        {"batch_size": 3, "nested": {"on": [1, 2.5, None, True]}},
        [a_failure(), a_failure("key", "a.jpg")],
    )
    text = json.dumps(recording.to_json(), allow_nan=False)
    assert Recording.from_json(json.loads(text)) == recording


def test_moments_count_from_the_first_of_all_and_unknown_times_are_none():
    batches = recorded(a_history()).batches
    assert batches["begun_ns"][0] == 0
    assert batches["asked_ns"][:2] == [5 * MS, 15 * MS]
    assert batches["given_ns"][0] == 6 * MS
    assert batches["trainer_starved_ns"] == [None] * 12
    assert batches["starved_ns"][:2] == [3, None]
    assert batches["read_ns"][1] == 2 * MS
    assert batches["worker"][:3] == [0, 1, 0]
    assert {len(column) for column in batches.values()} == {12}


def test_a_batch_that_was_not_measured_leaves_the_others_their_moments():
    history = a_history()
    start = 10**15 + 120 * MS
    history.add(*batch(epoch=2, num_samples=3, asked_ns=start, given_ns=start + MS))
    batches = recorded(history).batches
    assert (batches["asked_ns"][0], batches["begun_ns"][-1]) == (5 * MS, 0)


def test_it_tells_of_every_epoch_and_of_the_machine():
    recording = recorded(a_history())
    assert [(e.epoch, e.span.batches) for e in recording.epochs] == [(0, 6), (1, 6)]
    assert recording.machine.started == "2030-01-01T00:00:00Z"
    assert recording.machine.numpy == np.__version__
    assert recording.machine.cores == 2.0


def test_a_recording_of_an_older_version_may_have_classes():
    recording = recorded(a_history())
    assert Recording.from_json({**recording.to_json(), "classes": {"names": []}}) == recording


def test_neither_settings_nor_names_nor_errors_hold_a_password():
    class Store:
        def __repr__(self):
            return "Store(mongodb://me:secret@host/db)"

    given = {
        "dataset": Store(),
        "uri": "mongodb://me:secret@host/db",
        "all": [Store(), {1: Store()}],
    }
    failure = a_failure(name="s3://k:secret@b/x", error=OSError("no mongodb://me:secret@host"))
    recording = recorded(a_history(Pets("abcd")), given, [failure])
    assert recording.settings["dataset"] == "Store"
    assert recording.settings["all"] == ["Store", {"1": "Store"}]
    assert "secret" not in json.dumps(recording.to_json())
    assert recording.stats.slowest[0].name == "mongodb://me:***@host/1"
    assert recording.failures[0].error == "OSError: no mongodb://me:***@host"


@pytest.mark.parametrize(
    "text",
    [
        "https://h/a.jpg?X-Amz-Date=1&X-Amz-Signature=SECRET",
        "https://h/a.jpg?sig=SECRET",
        "https://u:pa/SECRET@h",
        "s3://u:p@SECRET@h/b",
        "https://SECRET@github.com/me",
        "Authorization: Bearer SECRET",
        "{'password': 'SECRET'}",
        "api_key=SECRET",
    ],
)
def test_no_text_brings_a_secret_into_a_recording(text):
    recording = recorded(a_history(), {"where": text}, [a_failure(name=text, error=OSError(text))])
    assert "SECRET" not in json.dumps(recording.to_json())


def test_settings_with_the_name_of_a_secret_are_not_kept():
    given = {"store": {"secret": "SECRET", "access_token": ["SECRET"], "max_tokens": 3}}
    kept = recorded(a_history(), given).settings["store"]
    assert kept == {"secret": "***", "access_token": "***", "max_tokens": 3}


def test_a_slow_sample_with_an_odd_key_is_told_as_text():
    recording = recorded(a_history(indices=[(0, "x"), (1, "y"), {"a": 1}]))
    assert {s.index for s in recording.stats.slowest} == {"(0, 'x')", "(1, 'y')", "{'a': 1}"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int32(3), 3),
        (np.float32(0.5), 0.5),
        (float("inf"), None),
        (np.bool_(True), True),
        ((1, 2), [1, 2]),
        (len, "builtin_function_or_method"),
        (np.zeros(3), "ndarray"),
        ("broken \udc80", "broken ?"),
    ],
)
def test_values_become_what_json_has(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)


@pytest.mark.parametrize("data", [None, [], "text", {}, {"format": "other"}])
def test_what_is_no_recording_is_refused(data):
    with pytest.raises(ConfigError, match="This is no recording of a loader"):
        Recording.from_json(data)


def test_a_newer_version_is_refused():
    data = {**recorded(a_history()).to_json(), "version": 2}
    with pytest.raises(ConfigError, match="has version 2, and this Penstock reads 1"):
        Recording.from_json(data)


def test_what_is_damaged_is_named():
    def shorter(data):
        data["batches"]["step"].pop()

    for damage, where in [
        (lambda data: data.update(machine=3), "'int' object has no attribute"),
        (lambda data: data.update(extra=1), "unexpected keyword argument 'extra'"),
        (lambda data: data.update(batches={}), "columns .*'step'"),
        (shorter, r"lack some of \d+ batches"),
        (lambda data: data["stats"]["run"].update(batches="many"), "'many' stands where"),
    ]:
        data = recorded(a_history()).to_json()
        damage(data)
        with pytest.raises(ConfigError, match=where):
            Recording.from_json(data)


KEYS = st.one_of(st.none(), st.text(max_size=4), st.integers(0, 5))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(given=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_any_settings_survive_json(given):
    recording = recorded(History(), given)
    text = json.dumps(recording.to_json(), allow_nan=False)
    assert Recording.from_json(json.loads(text)) == recording


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_recording_with_a_part_replaced_is_read_or_refused(data):
    whole = recorded(a_history(), {}, [a_failure()]).to_json()
    place = whole
    while isinstance(place, (dict, list)) and place:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            place[key] = data.draw(VALUES)
            break
        place = place[key]
    try:
        Recording.from_json(whole)
    except ConfigError as error:
        refused = str(error)
    else:
        refused = "a recording"
    assert "recording" in refused
