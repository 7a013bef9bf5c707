# SPDX-License-Identifier: Apache-2.0
"""A trace in which any value is any other is refused, or drawn, and its page runs nothing of it.

python -m tests.hostile.test_traces PATH VALUE
"""

from __future__ import annotations

import contextlib
import copy
import html.parser
import itertools
import json
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from tests.insight.recordings import Run, change, failure, recording_of

from penstock.errors import ConfigError
from penstock.insight.report.page import page
from penstock.insight.trace import read_trace, write_trace

MARKUP = "</script><img src=x onerror=alert(7)><script>alert(7)</script>'\"&{{7*7}}"
GONE = object()
VALUES = {
    "gone": GONE,
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "2**63": 2**63,
    "-10**30": -(10**30),
    "10**400": 10**400,
    "1e308": 1e308,
    "half": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "empty text": "",
    "markup": MARKUP,
    "link": "javascript:alert(7)",
    "odd text": "\0\x1b]0;x\a\ud800\u202e\u2028",
    "long text": "x" * 200_000,
    "empty list": [],
    "empty dict": {},
    "deep": [[[[[[[[{"a": [MARKUP]}]]]]]]]],
    "markup as key": {MARKUP: MARKUP},
}


def places_in(value, path=()):
    """Yield the path of every value; of long lists the first and the last."""
    yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places_in(part, (*path, key))
    elif isinstance(value, list):
        for place in sorted({0, len(value) - 1}) if value else ():
            yield from places_in(value[place], (*path, place))


def mutated(recording, path, value):
    """Return a copy of a recording with another value at a path."""
    if not path:
        return value
    recording = copy.deepcopy(recording)
    above = recording
    for key in path[:-1]:
        above = above[key]
    if value is GONE:
        del above[path[-1]]
    else:
        above[path[-1]] = value
    return recording


class Elements(html.parser.HTMLParser):
    """Collects what a browser would run, and what it would load."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.num_scripts = 0

    def handle_starttag(self, tag, attributes):
        names = {name for name, _ in attributes}
        self.num_scripts += tag in ("script", "svg")
        if tag in ("img", "iframe", "object", "embed", "base", "form", "link"):
            self.found.append(tag)
        self.found += [name for name in names if name.startswith("on") or name == "srcdoc"]
        self.found += [
            f"{name}={value!r:.40}"
            for name, value in attributes
            if name in ("href", "src", "action") and not (value or "").startswith("#")
        ]


def complaint(folder, recording, path, value, num_scripts):
    """Return what is wrong with what comes of a trace; None if nothing is."""
    trace = folder / "run.json"
    content = {"otherData": {"recording": mutated(recording, path, value)}}
    if not path and value is GONE:
        content = {"otherData": {}}
    trace.write_text(json.dumps(content))
    try:
        read = read_trace(trace)
    except ConfigError:
        return None
    except Exception as error:
        return f"read: {type(error).__name__}: {error}"[:200]
    try:
        text = page(read)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None  # which the command tells as a damaged trace
    except Exception as error:
        return f"drawn: {type(error).__name__}: {error}"[:200]
    elements = Elements()
    elements.feed(text)
    if elements.found or elements.num_scripts > num_scripts:
        return f"the page has {elements.found}, {elements.num_scripts} scripts and pictures"
    return None


@pytest.fixture(scope="module")
def recording():
    return sample_recording()


def sample_recording():
    """Return a recording with something in each of its parts, as JSON has it."""
    run = recording_of(
        Run(batches=8, per_epoch=4),
        failures=[failure(step=1), failure(index="gone", step=3)],
        changes=[change(2, 2, "workers are busy")],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_trace(run, Path(folder, "run.json"))
        return json.loads(path.read_text())["otherData"]["recording"]


def scripts_of(folder, recording):
    """Return how many scripts and pictures the page of the recording itself has."""
    path = folder / "whole.json"
    path.write_text(json.dumps({"otherData": {"recording": recording}}))
    elements = Elements()
    elements.feed(page(read_trace(path)))
    return elements.num_scripts


def tried(folder, recording, cases):
    """Return what is wrong with each case."""
    num_scripts, wrong = scripts_of(folder, recording), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path, name in cases:
            if why := complaint(folder, recording, path, VALUES[name], num_scripts):
                one = f"python -m tests.hostile.test_traces {json.dumps(path)!r} {name!r}"
                wrong.append(f"{path}: {name}: {why}\n    alone: {one}")
    return wrong


def all_cases(recording):
    return list(itertools.product(places_in(recording), VALUES))


def test_a_mutated_trace_is_refused_or_drawn_without_injection(recording, tmp_path):
    cases = all_cases(recording)
    texts = [case for case in cases if "markup" in case[1] or case[1] == "link"]
    wrong = tried(tmp_path, recording, [*cases[::61], *texts[::7]])
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_every_mutated_trace_is_refused_or_drawn_without_injection(recording, tmp_path):
    cases = all_cases(recording)
    assert len(cases) > 4864
    wrong = tried(tmp_path, recording, cases)
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        told = sample_recording()
        cases = all_cases(told)
        if len(sys.argv) > 1:
            cases = [(tuple(json.loads(sys.argv[1])), sys.argv[2])]
        sys.exit("\n".join(tried(Path(folder), told, cases)) or f"{len(cases)} cases hold")
