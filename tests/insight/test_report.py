# SPDX-License-Identifier: Apache-2.0
"""The page's content, as far as it can be told without a browser; see also tests/browser."""

from __future__ import annotations

import html
import importlib.metadata
import platform
import re
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import FaultPolicy, Loader
from penstock.data import IterableDataset, shard
from penstock.errors import MissingExtraError
from penstock.insight.report import write_report
from penstock.insight.report.chart import mark_text
from penstock.insight.report.markup import data_block, element, to_html
from penstock.insight.report.page import charts_of, page
from penstock.insight.report.series import Timescale, series_of, spread
from penstock.insight.segments import Columns
from penstock.insight.stats import Verdict
from penstock.sampling import ClassBalancedSampler

from .recordings import Photos, Run, change, failure, recording_of

ALL_CHARTS = [
    "throughput", "waiting", "ready", "stages", "timeline", "slots", "classes", "rss",
]  # fmt: skip


@pytest.fixture(scope="module")
def recording():
    return recording_of(
        failures=[failure()], changes=[change(40, 2, "busy"), change(99_999, 3, "not kept")]
    )


@pytest.fixture(scope="module")
def charts(recording):
    return {chart.key: chart for chart in charts_of(recording)}


def test_a_full_run_has_every_chart(charts):
    assert list(charts) == ALL_CHARTS


def test_plotly_knows_every_property_that_the_charts_use(charts):
    graph_objects = pytest.importorskip("plotly.graph_objects")

    def coloured(value):
        if isinstance(value, dict):
            return {key: coloured(item) for key, item in value.items()}
        if isinstance(value, list):
            return [coloured(item) for item in value]
        is_colour = isinstance(value, str) and re.fullmatch(r"@\w+(/[\d.]+)?", value)
        return "#123456" if is_colour else value

    for chart in charts.values():
        graph_objects.Figure(coloured(chart.traces), coloured(chart.layout))


def test_colours_of_charts_are_in_the_palette(charts, recording):
    style = page(recording, "")
    palette = set(re.findall(r"--(\w+): light-dark", style))
    found = {
        word
        for chart in charts.values()
        for word in re.findall(r"'@(\w+)", f"{chart.traces} {chart.layout}")
    }
    found |= {colour for chart in charts.values() for colour, _ in chart.legend}
    assert found <= palette
    assert {"read", "compute", "collate", "send", "idle", "own", "wait"} <= found


def test_the_throughput_line_adds_up_to_the_samples_of_the_run(recording):
    series = series_of(Columns(recording))
    run = recording.stats.run
    assert series.samples.sum() == pytest.approx(run.samples, rel=1e-6)
    assert series.own_s.sum() == pytest.approx(run.consumer_s, rel=1e-6)
    assert series.wait_s.sum() == pytest.approx(run.wait_s, rel=1e-6)


def test_the_bands_add_up_to_the_seconds_of_the_workers():
    recording = recording_of(Run(between_epochs_ms=0))
    series = series_of(Columns(recording))
    for name in ("read", "compute", "collate", "send"):
        total = getattr(recording.stats.run, f"{name}_s")
        assert series.stages_s[name].sum() == pytest.approx(total, rel=0.01)


def test_a_night_between_two_epochs_takes_no_time_of_the_charts():
    hours = recording_of(Run(between_epochs_ms=8 * 3600_000))
    series = series_of(Columns(hours))
    assert series.edges_s[-1] == pytest.approx(hours.stats.run.seconds, rel=1e-6)
    drawn = {chart.key: chart for chart in charts_of(hours)}
    for key in ("throughput", "waiting", "ready", "stages", "slots"):
        assert all(None not in trace["y"] for trace in drawn[key].traces), key
    start, end = drawn["timeline"].layout["xaxis"]["range"]
    assert end - start < 10
    assert len(drawn["throughput"].layout["shapes"]) == 2


def test_an_epoch_that_begins_with_ready_batches_makes_no_peak(charts, recording):
    lines = [trace["y"] for trace in charts["throughput"].traces if trace["mode"] == "lines"]
    assert max(max(line) for line in lines) < 2 * recording.stats.run.samples_per_s


def test_changes_are_marked_on_the_throughput_where_their_batch_is_kept(charts, recording):
    marks = charts["throughput"].traces[-1]
    assert marks["mode"] == "markers"
    assert marks["text"] == ["2 workers, 2 batches each: busy"]
    columns = recording.batches
    at = columns["given_ns"][columns["step"].index(40)] / 1e9
    time = series_of(Columns(recording)).time
    assert marks["x"] == [pytest.approx(float(time(np.array(at * 1e9))), abs=1e-5)]


@pytest.mark.parametrize("batches", [1, 2, 11, 13, 959, 10_000])
def test_no_chart_over_time_has_more_than_240_points(batches):
    recording = recording_of(Run(batches=batches))
    for chart in charts_of(recording):
        if chart.key in ("throughput", "waiting", "ready", "stages", "slots"):
            assert 1 <= len(chart.table.rows) <= 240
            assert all(len(trace["x"]) <= 240 for trace in chart.traces)


def test_the_timeline_shows_the_last_batches_of_every_worker(charts, recording):
    timeline = charts["timeline"]
    rows = {row for trace in timeline.traces for row in trace["y"]}
    assert rows == {0, 1, 2, 3}
    assert timeline.layout["yaxis"]["ticktext"] == ["trainer", "worker 0", "worker 1", "worker 2"]
    assert [row[1] for row in timeline.table.rows] == [str(n) for n in range(40, 80)]
    since = timeline.layout["xaxis"]["range"][0]
    assert since == 0.0
    assert all(base >= since - 1e-6 for trace in timeline.traces for base in trace["base"])
    assert all(length > 0 for trace in timeline.traces for length in trace["x"])


def test_without_workers_the_timeline_has_one_row_for_loading():
    recording = recording_of(Run(workers=0))
    timeline = {chart.key: chart for chart in charts_of(recording)}["timeline"]
    assert timeline.layout["yaxis"]["ticktext"] == ["trainer", "loading"]


@pytest.mark.parametrize(("classes", "bars", "rows"), [(3, 3, 3), (50, 50, 50), (300, 50, 300)])
def test_the_50_largest_classes_have_bars_and_all_have_rows(classes, bars, rows):
    counts = np.arange(classes) + 1
    dataset = Photos([f"class {n}" for n in range(classes)], counts)
    recording = recording_of(dataset=dataset)
    chart = {chart.key: chart for chart in charts_of(recording)}["classes"]
    assert [len(trace["x"]) for trace in chart.traces] == [bars, bars]
    assert len(chart.table.rows) == rows
    in_dataset = [int(row[1].replace(",", "")) for row in chart.table.rows]
    shown = [int(row[3].replace(",", "")) for row in chart.table.rows]
    assert sum(in_dataset) == counts.sum()
    assert sum(shown) == recording.stats.run.samples
    assert in_dataset[: min(classes, 50)] == sorted(counts, reverse=True)[:50]


def test_memory_of_slots_is_that_of_all_workers(charts, recording):
    last = charts["slots"].traces[-1]["y"][-1]
    assert last == pytest.approx(recording.stats.slot_bytes / 1e6, rel=1e-3)


def test_where_batches_take_no_slots_there_is_no_chart_of_them():
    recording = recording_of()
    recording = replace(recording, stats=replace(recording.stats, slot_bytes=0))
    assert "slots" not in {chart.key for chart in charts_of(recording)}


def test_an_empty_run_says_of_each_part_that_there_is_nothing():
    empty = page(recording_of(Run(batches=0), dataset=[]), "")
    for sentence in (
        "No batch was given yet.",
        "No epoch has begun yet.",
        "The dataset does not tell its classes.",
        "No sample was bad.",
        "Nothing is known of the memory of workers yet.",
    ):
        assert sentence in empty


def test_the_page_says_that_older_batches_are_not_drawn():
    text = page(recording_of(Run(batches=300), keep=100), "")
    assert "Charts over time show the last 100 of 300 batches." in text


def test_a_text_is_escaped_wherever_it_goes():
    hostile = "</script><img src=x onerror=alert(1)>\"'&"
    made = to_html(element("p", hostile, element("b", hostile), hostile, title=hostile))
    assert made.count("<img") == 1  # in the attribute, where it is a text
    assert 'title="&lt;' in made or "&quot;" in made
    assert "<" not in to_html(data_block("data", {hostile: [hostile]}))[len("<script") : -9]
    assert "<" not in mark_text(hostile)


def test_a_hostile_name_is_nowhere_in_the_page_as_markup():
    hostile = "</script><img src=x onerror=alert(1)>"
    recording = recording_of(
        dataset=Photos([hostile, "<b>", "%{y}"], [5, 4, 3], hostile + "{}"),
        failures=[failure(index=hostile, name=hostile, error=ValueError(hostile))],
        changes=[change(40, 2, hostile)],
        settings={hostile: hostile},
    )
    text = page(recording, "")
    assert "<img" not in text
    assert text.count("</script>") == 3  # of the data, of Plotly, of page.js


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path):
    pytest.importorskip("plotly")
    recording = recording_of(
        dataset=Photos(["\udcff", "b"], [5, 4]), changes=[change(4, 2, "\udcff")]
    )
    assert write_report(recording, tmp_path / "run.html").stat().st_size > 1e6


def test_the_page_allows_its_own_scripts_and_nothing_else(recording):
    text = page(recording, "let library;")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy
    assert policy.count("sha256-") == 2
    assert not re.search(r"<(script|img|link|iframe)[^>]* (src|href)=", text)


def test_without_plotly_the_error_names_the_extra(recording, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[report\]"):
        write_report(recording, tmp_path / "run.html")
    assert not list(tmp_path.iterdir())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.floats(0, 50)), max_size=20),
    st.integers(1, 30),
)
def test_amounts_that_are_spread_over_time_stay_the_same_in_all(intervals, points):
    rows = [(start, start + length, amount) for start, length, amount in intervals]
    columns = [np.array(column, float) for column in zip(*rows, strict=True)]
    starts, stops, amounts = columns or [np.zeros(0)] * 3
    parts = spread(starts, stops, amounts, np.linspace(0, 200, points + 1))
    assert parts.shape == (points,)
    assert (parts >= 0).all()
    assert parts.sum() == pytest.approx(amounts.sum(), rel=1e-9, abs=1e-9)


def test_a_long_run_is_told_in_minutes_or_hours():
    assert Timescale.of(900.0)(np.array([90.0])) == [1.5]
    assert Timescale.of(4 * 3600.0)(np.array([5400.0])) == [1.5]


def test_classes_that_were_never_asked_for_are_named():
    dataset = Photos([f"class {n}" for n in range(40)], [1] * 40)
    recording = recording_of(Run(batches=1), dataset=dataset)
    counts = replace(recording.classes, shown=[1] + [0] * 39)
    chart = {c.key: c for c in charts_of(replace(recording, classes=counts))}["classes"]
    assert "39 classes were never asked for: class 1, class 2, " in chart.summary
    assert chart.summary.endswith("class 20, and 19 more.")
    assert {label for _, label in chart.legend} == {"in the dataset", "asked for"}


def test_one_class_is_no_classes():
    recording = recording_of(dataset=Photos(["cat"], [100]))
    chart = {c.key: c for c in charts_of(recording)}["classes"]
    assert chart.summary == "1 class, cat."


def test_of_many_failures_and_epochs_the_last_are_listed_and_no_number_is_made_up():
    many = recording_of(Run(batches=30, per_epoch=2), failures=[failure(n) for n in range(250)])
    text = page(many, "")
    assert "The last 200 of 250." in text
    assert '<td class="text">249</td>' in text
    assert '<td class="text">49</td>' not in text
    text = page(replace(many, epochs=many.epochs[5:]), "")
    assert "more than 10" in text


def test_a_partner_that_failed_is_listed_with_the_sample_that_it_was_drawn_for():
    text = page(recording_of(failures=[failure(7, "b.jpg", partner_of=3)]), "")
    assert ">b.jpg (a partner of sample 3)<" in text


def test_both_shares_of_waiting_are_named():
    recording = recording_of(Run(per_epoch=20, trainer_ms=40, between_epochs_ms=0, lookahead=1))
    assert "without the first one of each epoch" in page(recording, "")


def test_a_row_for_each_of_64_workers_fits_and_more_are_counted():
    for workers, said in ((64, ""), (100, "64 of 100 workers.")):
        run = Run(batches=300, workers=workers, lookahead=2 * workers, compute_ms=4000)
        chart = {c.key: c for c in charts_of(recording_of(run))}["timeline"]
        assert chart.height_px <= 1_250
        assert said in chart.summary


def test_threads_have_no_memory_of_their_own():
    stats = replace(recording_of().stats, backend="thread", worker_rss_bytes={0: 0})
    assert "Workers are threads" in page(replace(recording_of(), stats=stats), "")


class Numbers:
    """40 numbers, of which two cannot be read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in (3, 17):
            raise ValueError(f"number {index}")
        return np.full(2000, index, np.float32)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(shard(range(40)))


def content_of(loader, epochs=2):
    """Load some epochs, and return the texts of the page, and the rows of its last two tables."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
        for _ in range(epochs):
            for _ in loader:
                pass
    html_page = page(loader._recording(), "").partition("<body>")[2]
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
    _, rows = content_of(loader, epochs=1)
    told = {name: rows[name] for name in ("seed", "on_error", "sampler", "dataset")}
    assert told == {
        "seed": "not set",
        "on_error": "on_error: skip, max_failures: 9, max_respawns: 3, retries: 0",
        "sampler": "ClassBalancedSampler(seed=11)",
        "dataset": "Numbers",
    }
    assert content_of(Loader([1.0, 2.0], seed=5))[1]["seed"] == "5"
    versions = {name: rows[name] for name in ("Penstock", "Python", "NumPy", "PyTorch")}
    assert versions == {
        "Penstock": importlib.metadata.version("penstock"),
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "PyTorch": torch.__version__,
    }


def test_a_page_without_workers_speaks_of_none():
    texts, rows = content_of(Loader(Numbers(), 4, on_error="skip"))
    assert not {"backend", "prefetch_factor", "persistent_workers"} & rows.keys()
    whole = " ".join(texts)
    assert "in the main process's own thread" in whole
    for wrong in (
        "workers' time",
        "memory of workers",
        "workers and main process",
        "Worker by worker",
    ):
        assert wrong not in whole
    assert 'num_workers="auto" was not asked for.' in whole


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_workers": 2}, {"num_workers": "2", "prefetch_factor": "not set, 2 now"}),
        ({"num_workers": 1, "prefetch_factor": 3}, {"prefetch_factor": "3"}),
        ({"num_workers": 2, "backend": "thread"}, {"backend": "thread"}),
        ({"num_workers": "auto"}, {"num_workers": "auto, {} now"}),
    ],
    ids=str,
)
def test_settings_are_what_the_text_says(arguments, expected):
    loader = Loader(Numbers(), 4, on_error="skip", **arguments)
    texts, rows = content_of(loader)
    workers, prefetch_factor = loader._monitor.workers
    found = {name: rows[name] for name in expected}
    assert found == {name: value.format(workers) for name, value in expected.items()}
    each = "1 batch each" if prefetch_factor == 1 else f"{prefetch_factor} batches each"
    assert f"{loader.backend}, {each}" in texts
    if arguments["num_workers"] != "auto":
        assert 'Nothing was changed: num_workers="auto" was not asked for.' in texts


def test_bad_samples_are_no_part_of_those_given():
    texts, _ = content_of(Loader(Numbers(), 4, on_error="skip"), epochs=1)
    assert ["Bad samples", "2", "38 samples given"] in [texts[k : k + 3] for k in range(len(texts))]


def test_a_stream_without_slots_has_no_bytes_to_tell():
    texts, _ = content_of(Loader(Stream(), 4, num_workers=1), epochs=1)
    assert texts[texts.index("Batches") + 1 :][:2] == ["10", "40 samples"]


def test_what_is_judged_by_first_batches_says_so():
    run = recording_of()
    verdict = Verdict("start", "It waits for the first batches of epochs.")
    stats = replace(run.stats, verdict=verdict, run=replace(run.stats.run, starts=3))
    shown = page(replace(run, stats=stats), "")
    assert "Judged by the 3 first batches of epochs." in shown
    assert "without the first one" not in shown.partition('class="basis"')[2].partition("</p>")[0]
