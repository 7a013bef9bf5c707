# SPDX-License-Identifier: Apache-2.0
"""The page's content, as far as it shows without a browser; see also tests/browser."""

from __future__ import annotations

import html
import platform
import re
import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import penstock
from penstock import FaultPolicy, Loader
from penstock.insight.report import write_report
from penstock.insight.report.charts import over_time, series_of, spread
from penstock.insight.report.markup import element, to_html
from penstock.insight.report.page import page
from penstock.insight.segments import columns_of
from penstock.sampling import ClassBalancedSampler

from .recordings import Photos, Run, change, failure, recording_of


@pytest.fixture(scope="module")
def recording():
    return recording_of(
        failures=[failure()], changes=[change(40, 2, "busy"), change(99_999, 3, "not kept")]
    )


def charts_of(recording):
    return {chart.get("id"): chart for chart in over_time(recording)}


def test_a_full_run_has_every_chart_in_colours_of_the_palette(recording):
    charts = charts_of(recording)
    assert list(charts) == ["chart-throughput", "chart-workers", "chart-trainer"]
    bands = {name: [e.get("data-band") for e in c.iter("polygon")] for name, c in charts.items()}
    assert bands["chart-workers"] == ["read", "compute", "collate", "send", "idle"]
    assert bands["chart-trainer"] == ["own", "wait"]
    text = page(recording)
    palette = set(re.findall(r"^  --(\w+): #", text, re.MULTILINE))
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= palette | {"tone"}


def test_the_throughput_adds_up_to_the_samples_of_the_run(recording):
    series = series_of(columns_of(recording))
    run = recording.stats.run
    assert series.samples.sum() == pytest.approx(run.samples, rel=1e-6)
    assert series.stages_s["own"].sum() == pytest.approx(run.consumer_s, rel=1e-6)
    assert series.stages_s["wait"].sum() == pytest.approx(run.wait_s, rel=1e-6)


def test_the_bands_add_up_to_the_seconds_of_the_workers():
    recording = recording_of(Run(between_epochs_ms=0))
    series = series_of(columns_of(recording))
    for name in ("read", "compute", "collate", "send"):
        total = getattr(recording.stats.run, f"{name}_s")
        assert series.stages_s[name].sum() == pytest.approx(total, rel=0.01)


def test_a_night_between_two_epochs_takes_no_time_of_the_charts():
    hours = recording_of(Run(between_epochs_ms=8 * 3600_000))
    series = series_of(columns_of(hours))
    assert series.edges_s[-1] == pytest.approx(hours.stats.run.seconds, rel=1e-6)
    rates = series.samples / series.edges_s[1]
    assert max(rates) < 2 * hours.stats.run.samples_per_s


@pytest.mark.parametrize("batches", [1, 2, 11, 13, 959, 10_000])
def test_no_chart_has_more_than_240_points(batches):
    series = series_of(columns_of(recording_of(Run(batches=batches))))
    assert 1 <= len(series.samples) <= 240


@pytest.mark.parametrize(("trainer_ms", "unit"), [(18, "s"), (3_000, "min"), (60_000, "h")])
def test_a_long_run_is_told_in_minutes_or_hours(trainer_ms, unit):
    (first, *_) = over_time(recording_of(Run(trainer_ms=trainer_ms)))
    assert re.search(rf"time of training: [\d.]+ {unit}<", to_html(first))


def test_an_empty_run_says_of_each_part_that_there_is_nothing():
    empty = page(recording_of(Run(batches=0), dataset=[]))
    for sentence in ("No batch was given yet.", "No epoch has begun yet.", "No sample was bad."):
        assert sentence in empty
    assert "<svg" not in empty


def test_the_page_says_that_older_batches_are_not_drawn():
    text = page(recording_of(Run(batches=300), keep=100))
    assert "Charts over time show the last 100 of 300 batches." in text


def test_a_text_is_escaped_wherever_it_goes():
    hostile = "</script><img src=x onerror=alert(1)>\"'&"
    made = to_html(element("p", hostile, element("b", hostile), hostile, title=hostile))
    assert made.count("<img") == 1  # in the attribute, where it is a text
    assert 'title="&lt;' in made or "&quot;" in made


def test_a_hostile_name_is_nowhere_in_the_page_as_markup_and_nothing_runs_or_loads():
    hostile = "</style><script>alert(1)</script><img src=x onerror=alert(1)>"
    recording = recording_of(
        dataset=Photos(["a", "b", "c"], [5, 4, 3], hostile + "{}"),
        failures=[failure(index=hostile, name=hostile, error=ValueError(hostile))],
        changes=[change(40, 2, hostile)],
        settings={hostile: hostile},
    )
    text = page(recording)
    assert "<img" not in text
    assert "<script" not in text
    assert text.count("</style>") == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'")
    assert "http" not in policy
    assert not re.search(r"<[^>]* (src|href)=", text)


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path):
    recording = recording_of(
        dataset=Photos(["a"], [9], "\udcff{}"), changes=[change(4, 2, "\udcff")]
    )
    assert write_report(recording, tmp_path / "run.html").stat().st_size > 10_000


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.floats(0, 50)), max_size=20),
    st.integers(1, 30),
)
@example(
    [
        (0, 0, a)
        for a in (1.4242939719947616, 31.992652192514832, 29.45421067116178, 1.4189150687580447)
    ],
    9,
)  # rounding makes less than nothing of it
def test_amounts_that_are_spread_over_time_stay_the_same_in_all(intervals, points):
    rows = [(start, start + length, amount) for start, length, amount in intervals]
    columns = [np.array(column, float) for column in zip(*rows, strict=True)]
    starts, stops, amounts = columns or [np.zeros(0)] * 3
    parts = spread(starts, stops, amounts, np.linspace(0, 200, points + 1))
    assert parts.shape == (points,)
    assert (parts >= 0).all()
    assert parts.sum() == pytest.approx(amounts.sum(), rel=1e-9, abs=1e-9)


def test_of_many_failures_the_last_are_listed():
    text = page(recording_of(Run(batches=30), failures=[failure(n) for n in range(250)]))
    assert "The last 200 of 250." in text
    assert '<td class="text">249</td>' in text
    assert '<td class="text">49</td>' not in text


class Numbers:
    """40 numbers, of which two cannot be read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in (3, 17):
            raise ValueError(f"number {index}")
        return np.full(2000, index, np.float32)


def content_of(loader, epochs=1):
    """Load some epochs, and return the texts of the page, and the rows of its last table."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
        for _ in range(epochs):
            for _ in loader:
                pass
    html_page = page(loader._recording()).partition("<body>")[2]
    rows = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td></tr>", html_page)
    texts = [html.unescape(text) for text in re.findall(r">([^<]+)<", html_page)]
    return texts, dict(rows)


def test_settings_and_versions_are_those_of_the_run():
    torch = pytest.importorskip("torch")
    from penstock.torch import DataLoader

    sampler = ClassBalancedSampler(np.arange(40) % 2, seed=11)
    loader = DataLoader(
        Numbers(), 4, sampler=sampler, num_workers=1, on_error=FaultPolicy("skip", max_failures=9)
    )
    _, rows = content_of(loader)
    expected = {
        "seed": "not set",
        "on_error": "on_error: skip, max_failures: 9, max_respawns: 3, retries: 0",
        "sampler": "ClassBalancedSampler(seed=11)",
        "dataset": "Numbers",
        "num_workers": "1",
        "Penstock": penstock.__version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "PyTorch": torch.__version__,
    }
    assert {name: rows[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "in the main process's own thread"),
        ({"num_workers": 1, "prefetch_factor": 3}, "process, 3 batches each"),
        ({"num_workers": 2, "backend": "thread"}, "thread, 2 batches each"),
    ],
    ids=str,
)
def test_the_page_says_who_made_the_batches_and_what_was_bad(arguments, text):
    texts, _ = content_of(Loader(Numbers(), 4, on_error="skip", **arguments))
    assert text in texts
    assert texts[texts.index("Bad samples") + 1] == "2"
    assert any(noted.startswith("38 samples, ") for noted in texts)
