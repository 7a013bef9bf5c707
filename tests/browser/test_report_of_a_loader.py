# SPDX-License-Identifier: Apache-2.0
"""The page of a real loader: what it shows is what the loader says, and what the dataset knows."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pytest

from penstock import Loader

LENGTH = 64
BAD = (3, 45)


class Photos:
    """64 samples, two of which cannot be read."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index in BAD:
            raise ValueError(f"truncated image {index}")
        return np.full(1000, index, np.float32), index

    def describe(self, index):
        return f"photos/{index}.jpg"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two epochs of a loader, its stats, and its page and trace of the same moment."""
    folder = tmp_path_factory.mktemp("loader")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"epoch \d+: .* bad sample", UserWarning)
        options = {"num_workers": 2, "on_error": "skip", "monitor": "full"}
        loader = Loader(Photos(), 8, shuffle=True, seed=1, **options)
        samples = sum(len(images) for _ in range(2) for images, _ in loader)
    assert samples == 2 * (64 - len(BAD))
    return loader.stats(), loader.report(folder / "run.html"), loader.trace(folder / "run.json")


def noted(element):
    return float(element.get_attribute("data-value"))


def test_the_key_figures_are_those_of_the_loader_and_of_the_dataset(page, run):
    stats, path, _ = run
    page.open(path)
    assert page.console() == []
    figures = {e.get_attribute("data-figure"): e for e in page.all("#figures [data-figure]")}
    known = {"batches": 16, "failed": 2 * len(BAD), "num_workers": 2}
    assert {name: noted(figures[name]) for name in known} == known
    assert {name: figures[name].text for name in known} == {k: str(v) for k, v in known.items()}
    assert stats.run.samples == 2 * (64 - len(BAD))
    assert f"{stats.run.samples} samples" in page.find("#figures").text
    assert noted(figures["samples_per_s"]) == stats.run.samples_per_s
    assert noted(figures["wait_share"]) == stats.run.wait_share
    assert noted(figures["slot_bytes"]) == stats.slot_bytes
    assert page.find("#verdict .answer").text == stats.verdict.text


def rows(page, selector):
    cells = page.js(
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))",
        selector,
    )
    assert cells
    return cells


def test_the_tables_list_every_epoch_and_every_failure(page, run):
    _, path, _ = run
    page.open(path)
    assert [row[:4] for row in rows(page, "#table-epochs")] == [
        ["0", "8", "62", "2"], ["1", "8", "62", "2"],
    ]  # fmt: skip
    assert sorted(row[:3] for row in rows(page, "#table-failures")) == sorted(
        [f"{n}", f"photos/{n}.jpg", f"ValueError: truncated image {n}"] for n in BAD * 2
    )


def test_what_is_drawn_adds_up_to_what_the_loader_counted(page, run):
    stats, path, trace = run
    page.open(path)
    noted = [
        title.get_attribute("textContent") for title in page.all("#chart-throughput rect title")
    ]
    rates = [float(re.search(r"per second ([\d,.]+)", text)[1].replace(",", "")) for text in noted]
    samples = sum(rates) / len(rates) * stats.run.seconds
    assert samples == pytest.approx(stats.run.samples, rel=0.05)
    events = json.loads(trace.read_text())["traceEvents"]
    sums = dict.fromkeys(("own code", "wait for batch"), 0.0)
    for event in events:
        if event["ph"] == "X" and event["name"] in sums:
            sums[event["name"]] += event["dur"] / 1e6
    assert sums["own code"] == pytest.approx(stats.run.consumer_s, rel=0.01, abs=1e-4)
    assert sums["wait for batch"] == pytest.approx(stats.run.wait_s, rel=0.01)
