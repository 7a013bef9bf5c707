# SPDX-License-Identifier: Apache-2.0
"""Links of every Markdown file lead to files that are there, and to headings that they have."""

from __future__ import annotations

import functools
import re
from urllib.parse import unquote, urlsplit

import pytest
from tests.docs.pages import ROOT

FOLDERS = ("docs", "examples", "tests", "benchmarks")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]
)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def links_of(text):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", FENCED.sub("", text)))


@functools.cache
def anchors_of(path):
    """Return the anchors of a page's headings, as the site and code hosts name them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text("utf-8")), re.MULTILINE)
    words = [re.sub(r"\]\([^)]*\)", "]", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in words}


def check_links(page, text):
    """Raise if one leads nowhere; return how many lead somewhere here."""
    checked = 0
    for address in links_of(text):
        parts = urlsplit(address)
        if parts.scheme:
            continue
        target = page.parent / unquote(parts.path) if parts.path else page
        assert target.exists(), f"{address} is not there"
        if parts.fragment and target.suffix == ".md":
            assert unquote(parts.fragment) in anchors_of(target), f"{address}: no such heading"
        checked += 1
    return checked


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name):
    check_links(ROOT / name, (ROOT / name).read_text("utf-8"))
