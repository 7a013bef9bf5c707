# SPDX-License-Identifier: Apache-2.0
"""The site: it fetches nothing, all its links lead somewhere, and the reference is whole.

`make docs` builds it, any warning an error, and runs the tests that look at it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.config import load_config
from tests.docs.pages import ROOT
from tests.docs.promised import promised_names
from tests.docs.site import site_folder

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
# Attributes whose address a browser fetches by itself; a link it follows when it is clicked on.
FETCHED = {
    ("audio", "src"), ("embed", "src"), ("iframe", "src"), ("image", "href"), ("img", "src"),
    ("img", "srcset"), ("link", "href"), ("object", "data"), ("script", "src"), ("source", "src"),
    ("source", "srcset"), ("use", "href"), ("video", "src"),
}  # fmt: skip


@dataclass(repr=False)
class Page(HTMLParser):
    """What is asked here of a page of the site."""

    path: Path
    fetched: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self):
        super().__init__()
        self.feed(self.path.read_text())
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.fetched += [value for name, value in attrs if (tag, name) in FETCHED and value]
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return site_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def site(folder):
    return {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}


@pytest.mark.docs
def test_pages_fetch_nothing_from_elsewhere(site):
    for name, page in site.items():
        outside = [address for address in page.fetched if urlsplit(address).netloc]
        assert not outside, f"{name} would fetch {outside}"
    assert any(page.fetched for page in site.values())


@pytest.mark.docs
def test_styles_fetch_nothing_from_elsewhere(folder):
    styles = list(folder.rglob("*.css"))
    assert styles
    for style in styles:
        fetched = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", style.read_text())
        assert not [address for address in fetched if urlsplit(address).netloc], style.name


@pytest.mark.docs
def test_all_links_within_the_site_lead_somewhere(folder, site):
    checked = 0
    for name, page in site.items():
        if name == "404.html":  # is shown in the place of any page, so its links start at the top
            continue
        for address in page.links + page.fetched:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            target = (page.path.parent / path).resolve() if path else page.path
            assert target.is_file(), f"{name} links to {address}, which is not there"
            if parts.fragment and target.suffix == ".html":
                anchors = site[target.relative_to(folder).as_posix()].anchors
                assert unquote(parts.fragment) in anchors, f"{name} links to {address}: no anchor"
            checked += 1
    assert checked > 1000


def pages_of(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages_of(value)


def named_pages():
    return list(pages_of(load_config(str(ROOT / "mkdocs.yml")).nav))


def test_every_page_is_in_the_navigation_once():
    named = named_pages()
    assert len(named) == len(set(named))
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} <= set(named)


@pytest.mark.docs
def test_every_page_of_the_navigation_is_in_the_site(site):
    for name in named_pages():
        built = re.sub(r"README\.md$", "index.md", name).removesuffix(".md") + ".html"
        assert built in site, f"{name} is in the navigation and not in the site"


@pytest.mark.docs
def test_every_promised_name_is_in_the_reference(site):
    anchors = set().union(*(p.anchors for n, p in site.items() if n.startswith("reference/")))
    for module, names in promised_names().items():
        missing = [name for name in names if f"{module}.{name}" not in anchors]
        assert not missing, f"the reference lacks {missing} of {module}"


def test_every_integration_that_a_guide_names_is_in_the_reference():
    guides = "".join(path.read_text() for path in (DOCS / "guide").glob("*.md"))
    named = set(re.findall(r"from penstock\.integrations\.(\w+) import", guides))
    assert named
    assert {f"penstock.integrations.{name}" for name in named} <= set(promised_names())
