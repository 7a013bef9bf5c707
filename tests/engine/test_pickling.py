# SPDX-License-Identifier: Apache-2.0
"""Exceptions on their way from a worker."""

from __future__ import annotations

import functools
import threading

import pytest

from penstock.engine.plan import WorkerSpec
from penstock.engine.task import report_exception, revive_exception, unpicklable_error
from penstock.errors import CollateError


class NeedsKeyword(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class HoldsALock(Exception):
    def __init__(self):
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


def raised(error):
    try:
        raise error
    except Exception as caught:
        caught.add_note("a note of the worker")
        return caught


def collate_error():
    error = CollateError("{first} and {other} differ", (0, 3))
    error.name_samples([10, 11, 12, 13])
    return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        KeyError("several\nlines"),
        OSError(2, "No such file", "x.jpg"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        NeedsKeyword(code=7),
        collate_error(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_as_itself_with_the_notes_and_the_traceback(error):
    got = revive_exception(report_exception(raised(error)))
    assert type(got) is type(error)
    assert got.args == error.args
    assert str(got) == str(error)
    notes = [note for note in got.__notes__ if not note.startswith("Help: ")]
    assert notes == ["a note of the worker"]
    assert "test_pickling.py" in str(got.__cause__)
    assert getattr(got, "code", 7) == 7


def test_one_that_does_not_pickle_arrives_with_its_text():
    got = revive_exception(report_exception(raised(HoldsALock())))
    assert type(got) is RuntimeError
    assert "HoldsALock: it holds a lock" in str(got)
    assert "test_pickling.py" in str(got.__cause__)


def test_what_a_partial_function_holds_is_named():
    collate = functools.partial(print, end="", file=threading.Lock())
    error = unpicklable_error(WorkerSpec([], False, True, collate_fn=collate), TypeError())
    assert str(error).startswith("collate_fn.file cannot be sent to a worker: ")
