# SPDX-License-Identifier: Apache-2.0
"""The report as a browser shows it: nothing goes wrong, and what it shows is what was measured."""

from __future__ import annotations

import itertools
import re

import pytest
from tests.insight.recordings import Photos, Run, change, failure, recording_of

from penstock.insight.report import write_report

from .conftest import PHONE

HOSTILE = "</script><img src=x onerror=\"alert(1)\"><a href='javascript:alert(2)'>x</a>"


@pytest.fixture(scope="module")
def recording():
    return recording_of(
        failures=[failure(index=n, name=f"photos/{n}.jpg") for n in range(3)],
        changes=[change(40, 2, "workers are busy"), change(90, 3, "it brought 41 %", epoch=1)],
    )


@pytest.fixture(scope="module")
def path(recording, tmp_path_factory):
    return write_report(recording, tmp_path_factory.mktemp("report") / "run.html")


def test_nothing_is_wrong_in_the_console_and_nothing_is_asked_of_a_network(page, path):
    page.open(path)
    assert page.console() == []
    assert page.requests() == [path.as_uri()]


def test_figures_are_those_of_the_stats(page, path, recording):
    page.open(path)
    run, stats = recording.stats.run, recording.stats
    shown = {
        element.get_attribute("data-figure"): (element.get_attribute("data-value"), element.text)
        for element in page.all("#figures [data-figure]")
    }
    assert {name: float(value) for name, (value, _) in shown.items()} == {
        "samples_per_s": run.samples_per_s,
        "wait_share": run.wait_share,
        "batches": run.batches,
        "failed": run.failed,
        "num_workers": stats.num_workers,
        "slot_bytes": stats.slot_bytes,
    }
    texts = {name: text for name, (_, text) in shown.items()}
    assert texts["samples_per_s"] == f"{run.samples_per_s:,.0f}"
    assert texts["wait_share"] == f"{run.wait_share:.0%}".replace("%", " %")
    assert texts["batches"] == f"{run.batches:,}"
    assert texts["failed"] == f"{run.failed}"


def test_the_verdict_stands_on_top_with_remedy(page, path, recording):
    page.open(path)
    verdict = recording.stats.verdict
    assert page.find("#verdict .answer").text == verdict.text
    assert page.find("#verdict .remedy").text == verdict.remedy
    tops = page.js("return [...document.querySelectorAll('main > *')].map(e => e.id)")
    assert tops[0] == "verdict"


def test_strips_are_cut_as_the_time_was_spent(page, path, recording):
    page.open(path)
    width = page.js(
        "const part = document.querySelector('.strip [data-part=wait]');"
        "return part.offsetWidth / part.parentElement.offsetWidth"
    )
    assert width == pytest.approx(recording.stats.run.wait_share, abs=0.01)


def test_tables_have_a_row_for_each_entry(page, path, recording):
    page.open(path)
    assert page.count("#table-slowest tbody tr") == len(recording.stats.slowest) > 0
    assert page.count("#table-failures tbody tr") == len(recording.failures) == 3
    assert page.count("#table-changes tbody tr") == len(recording.stats.changes) == 2
    assert page.count("#table-epochs tbody tr") == len(recording.epochs) == 3
    first = page.find("#table-slowest tbody tr").text
    assert recording.stats.slowest[0].name in first


def test_bands_are_as_high_as_the_seconds_of_the_workers(page, path, recording):
    page.open(path)
    areas = page.js("""
      return [...document.querySelectorAll("#chart-workers polygon")].map(e => {
        const points = e.getAttribute("points").split(" ").map(p => p.split(",").map(Number));
        const sum = (total, [x, y], n) => {
          const [nextX, nextY] = points[(n + 1) % points.length];
          return total + x * nextY - nextX * y;
        };
        return [e.dataset.band, Math.abs(points.reduce(sum, 0)) / 2];
      });
    """)
    areas, run = dict(areas), recording.stats.run
    for name in ("read", "collate", "send"):
        expected = getattr(run, f"{name}_s") / run.compute_s
        assert areas[name] / areas["compute"] == pytest.approx(expected, rel=0.03), name


def test_every_chart_has_a_text_that_says_the_same(page, path):
    page.open(path)
    pictures = page.all("figure svg")
    assert len(pictures) == 3
    for picture in pictures:
        assert picture.get_attribute("role") == "img"
        assert ". " in picture.get_attribute("aria-label")


def rgb(colour):
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour)]
    assert colour.startswith("rgb"), colour
    return numbers[:3]


def luminance(colour):
    parts = [value / 255 for value in rgb(colour)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def pairs_of_text_and_ground(page):
    """Return the colour of every text of the page, and of what lies behind it."""
    return page.js("""
      const found = new Map();
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        const isBlank = !walker.currentNode.textContent.trim();
        if (isBlank || node.closest("script, style, svg")) continue;
        const style = getComputedStyle(node);
        const text = style.color;
        let ground = node;
        while (ground) {
          const colour = getComputedStyle(ground).backgroundColor;
          if (colour !== "rgba(0, 0, 0, 0)" && colour !== "transparent") break;
          ground = ground.parentElement;
        }
        const behind = getComputedStyle(ground || document.body).backgroundColor;
        found.set(text + "|" + behind, [text, behind, node.textContent.slice(0, 30)]);
      }
      return [...found.values()];
    """)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(page, path, scheme):
    page.open(path, scheme=scheme)
    pairs = pairs_of_text_and_ground(page)
    assert len(pairs) >= 4
    for text, ground, example in pairs:
        assert contrast(text, ground) >= 4.5, f"{example}: {text} on {ground}"


def test_a_phone_scrolls_in_one_direction_only(page, path):
    page.open(path, size=PHONE)
    assert page.js("return document.documentElement.scrollWidth") <= PHONE[0]
    sticking_out = page.js("""
      return [...document.querySelectorAll("main *")]
        .filter(e => !e.closest(".scroll, svg"))
        .filter(e => e.getBoundingClientRect().right > innerWidth)
        .map(e => e.outerHTML.slice(0, 80));
    """)
    assert sticking_out == []


def test_the_keyboard_reaches_the_tables(page, path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.open(path)
    ActionChains(page.driver).send_keys(Keys.TAB).perform()
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "Epochs"
    outline = page.js("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_headings_and_landmarks_are_in_order(page, path):
    page.open(path)
    levels = page.js(
        "return [...document.querySelectorAll('h1,h2,h3,h4')].map(e => Number(e.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert [page.count(name) for name in ("header", "main", "footer")] == [1, 1, 1]
    assert page.js("return document.documentElement.lang") == "en"


def test_names_that_are_markup_do_nothing(page, tmp_path):
    names = [HOSTILE, "<b>bold</b>", "%{y} $x$", "@read"]
    recording = recording_of(
        dataset=Photos(names, [9, 8, 7, 6], HOSTILE + "/{}"),
        failures=[failure(index=HOSTILE, name=HOSTILE, error=ValueError(HOSTILE))],
        changes=[change(40, 2, HOSTILE)],
        settings={HOSTILE: HOSTILE},
    )
    path = write_report(recording, tmp_path / "run.html")
    page.open(path)
    assert page.console() == []
    assert page.requests() == [path.as_uri()]
    assert page.count("main img") == 0
    assert page.count("main a") == 0
    assert page.count("svg a") == 0
    assert HOSTILE in page.find("#table-failures").text


def test_scripts_do_not_run(page, path):
    page.open(path)
    page.js(
        "const s = document.createElement('script'); s.textContent = 'window.ran = true';"
        "document.body.append(s)"
    )
    assert page.js("return window.ran") is None
    assert any("Content Security Policy" in message for message in page.console())


def test_an_empty_run_has_a_page(page, tmp_path):
    page.open(write_report(recording_of(Run(batches=0), dataset=[]), tmp_path / "run.html"))
    assert page.console() == []
    assert page.count("svg") == 0
    assert page.find("#figures [data-figure=batches]").text == "0"


def test_a_run_of_10000_batches_has_a_page_of_bounded_size(page, tmp_path):
    path = write_report(recording_of(Run(batches=10_000, workers=8, lookahead=16)), tmp_path / "a")
    page.open(path.rename(tmp_path / "run.html"))
    assert page.console() == []
    assert page.find("#figures [data-figure=batches]").text == "10,000"
    assert page.count("*") < 6_000
