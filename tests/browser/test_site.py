# SPDX-License-Identifier: Apache-2.0
"""The site opened from the disk, as a reader without a network and without a server does."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from tests.docs.site import site_folder

pytestmark = pytest.mark.docs

DESK = (1280, 900)
PHONE = (360, 740)
PAGES = ("index.html", "design/arena.html", "guide/threads.html", "reference/torch.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return site_folder(tmp_path_factory)


def opened(page, path, *, scheme="light", size=DESK, query=""):
    """Open a page of the site and wait until the theme's script has begun."""
    page.driver.get("about:blank")
    page.console()
    page.requests()
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.command("Emulation.setEmulatedMedia", features=media, media="")
    page.resize(*size)
    page.driver.get(path.as_uri() + query)
    page.wait_until(lambda: page.js("return document.documentElement.className.includes('js')"))
    page.wait_until(lambda: page.js("return document.readyState") == "complete")
    return page


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_asks_for_nothing_but_files_and_fits_a_phone(page, site, name, scheme):
    opened(page, site / name, scheme=scheme, size=PHONE)
    asked = page.requests()
    assert asked
    assert {address.split(":")[0] for address in asked} <= {"file", "data", "about"}
    assert not page.console()
    assert page.js("return document.documentElement.scrollWidth") <= PHONE[0]
    shown = page.js("return document.body.dataset.mdColorScheme")
    assert shown == {"light": "default", "dark": "slate"}[scheme]


def found(page, site, words):
    """Return the first pages that a search finds, the best one first."""
    # Typed, the words would be searched for letter by letter, and results of the first be there.
    opened(page, site / "index.html", query=f"?q={quote(words)}")
    page.wait_until(lambda: page.count(".md-search-result__link"))
    links = page.js(
        "return [...document.querySelectorAll('.md-search-result__item')]"
        ".map(item => item.querySelector('.md-search-result__link').href)"
    )
    assert not page.console()
    paths = [Path(link.removeprefix(site.as_uri()).split("?")[0].split("#")[0]) for link in links]
    return [path.as_posix().lstrip("/") for path in paths]


@pytest.mark.parametrize(
    ("words", "page_name"),
    [
        ("WorkerDied", "troubleshooting.html"),
        ("ClassBalancedSampler", "reference/sampling.html"),
        ("checkpoint", "resume.html"),
        ("cuda out of memory", "troubleshooting.html"),
        ("worker killed", "troubleshooting.html"),
        ("slow", "troubleshooting.html"),
        ("jupyter", "guide/progress.html"),
    ],
)
def test_the_search_finds_first_what_says_what_to_do(page, site, words, page_name):
    assert found(page, site, words)[0] == page_name


@pytest.mark.parametrize(
    ("words", "page_name"),
    [
        ("worker_init_fn", "migrating-from-torch.html"),
        ("pin_memory", "guide/device.html"),
    ],
)
def test_names_with_underscores_are_found_by_their_words(page, site, words, page_name):
    assert page_name in found(page, site, words)


@pytest.mark.parametrize("words", ["数据", "共享内存"])
def test_chinese_words_are_found_on_chinese_pages_alone(page, site, words):
    pages = set(found(page, site, words))
    assert "zh/migrating-from-torch.html" in pages
    assert all(name.startswith("zh/") for name in pages)
