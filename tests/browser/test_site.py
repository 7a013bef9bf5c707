# SPDX-License-Identifier: Apache-2.0
"""The site opened from the disk, as a reader without a network and without a server does."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
DESK = (1280, 900)
PHONE = (360, 740)
PAGES = ("index.html", "design/arena.html", "guide/threads.html", "reference/torch.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=100,
        check=True,
    )
    return folder


def opened(page, path, *, scheme="light", size=DESK):
    """Open a page of the site and wait until the theme's script has begun."""
    page.driver.get("about:blank")
    page.console()
    page.requests()
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.command("Emulation.setEmulatedMedia", features=media, media="")
    page.resize(*size)
    page.driver.get(path.as_uri())
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
    """Return where the first results of a search lead."""
    opened(page, site / "index.html")
    page.js("document.querySelector('label[for=__search]').click()")
    page.find("input[name=query]").send_keys(words)
    page.wait_until(lambda: page.count(".md-search-result__link"))
    links = page.js(
        "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    )
    assert not page.console()
    return [Path(link.split("?")[0].split("#")[0]).name for link in links]


@pytest.mark.parametrize(
    ("words", "page_name"),
    [
        ("WorkerDied", "troubleshooting.html"),
        ("ClassBalancedSampler", "sampling.html"),
        ("pin_memory", "device.html"),
        ("数据", "quickstart.html"),
    ],
)
def test_the_search_finds_pages_without_a_server(page, site, words, page_name):
    assert page_name in found(page, site, words)


def brightness_of_picture(page):
    """Return how bright the corner of the first picture is shown, 0 to 255."""
    place = page.js(
        "const image = document.querySelector('img[src$=\".svg\"]');"
        "image.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const box = image.getBoundingClientRect();"
        "return [box.left + 20, box.top + 10, image.complete, image.naturalWidth]"
    )
    assert place[2:] == [True, 960]
    taken = base64.b64decode(page.command("Page.captureScreenshot", format="png")["data"])
    with Image.open(io.BytesIO(taken)) as image:
        return image.convert("L").getpixel((int(place[0]), int(place[1])))


def test_pictures_follow_the_scheme_that_the_reader_chooses(page, site):
    opened(page, site / "design" / "arena.html", scheme="light")
    assert brightness_of_picture(page) > 240
    for _ in range(2):  # light instead of the system's, then dark
        page.js("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
    page.wait_until(lambda: page.js("return document.body.dataset.mdColorScheme") == "slate")
    page.wait_until(lambda: brightness_of_picture(page) < 60)
