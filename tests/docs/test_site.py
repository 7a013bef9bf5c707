# SPDX-License-Identifier: Apache-2.0
"""The site: it builds without a warning, fetches nothing, and all its links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("", "data", "errors", "ray", "sampling", "stores", "testing", "torch", "vision")
# Modules that are imported by their names.
MODULES = (
    "insight/stats.py", "testing/stores.py", "integrations/accelerate.py",
    "integrations/huggingface.py", "integrations/jax.py", "integrations/lightning.py",
    "integrations/mindspore.py", "integrations/mmengine.py", "integrations/opentelemetry.py",
    "integrations/prometheus.py", "integrations/tensorboard.py", "integrations/transformers.py",
)  # fmt: skip
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
    images: list[dict[str, str | None]] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self):
        super().__init__()
        self._open: list[str] = []
        self.feed(self.path.read_text())
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._open.append(tag)
        self.fetched += [value for name, value in attrs if (tag, name) in FETCHED and value]
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "img":
            self.images.append(values)
        elif tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.text += data
        if "p" in self._open and "code" not in self._open:
            self.paragraphs[-1] += data


def build(folder):
    """Build the site as `make docs` does, and return what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"the site cannot be built:\n{done.stdout}{done.stderr}"
    return done.stderr


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "site"
    return folder, build(folder)


@pytest.fixture(scope="module")
def site(said):
    folder, _ = said
    return {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}


def test_it_is_built_without_a_warning(said):
    folder, output = said
    assert "WARNING" not in output
    assert (folder / "index.html").is_file()
    assert (folder / "search" / "search_index.js").is_file()


def test_pages_fetch_nothing_from_elsewhere(site):
    for name, page in site.items():
        outside = [address for address in page.fetched if urlsplit(address).netloc]
        assert not outside, f"{name} would fetch {outside}"
    assert any(page.fetched for page in site.values())


def test_styles_fetch_nothing_from_elsewhere(said):
    folder, _ = said
    styles = list(folder.rglob("*.css"))
    assert styles
    for style in styles:
        fetched = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", style.read_text())
        assert not [address for address in fetched if urlsplit(address).netloc], style.name


def test_all_links_within_the_site_lead_somewhere(said, site):
    folder, _ = said
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


def test_links_lead_somewhere_in_the_repository_too():
    checked = 0
    for page in DOCS.rglob("*.md"):
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for address in re.findall(r"\]\(([^)\s]+)\)", prose):
            parts = urlsplit(address)
            if parts.path and not parts.scheme:
                assert (page.parent / parts.path).exists(), f"{page.name} links to {address}"
                checked += 1
    assert checked > 100


def pages_of(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages_of(value)


def test_every_page_is_in_the_navigation_once_and_in_the_site(site):
    named = list(pages_of(load_config(str(ROOT / "mkdocs.yml")).nav))
    assert len(named) == len(set(named))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert written <= set(named)
    for name in named:
        built = re.sub(r"README\.md$", "index.md", name).removesuffix(".md") + ".html"
        assert built in site, f"{name} is in the navigation and not in the site"


def public_names(file):
    tree = ast.parse(file.read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names


def test_every_public_name_is_in_the_reference(site):
    anchors = set().union(*(p.anchors for n, p in site.items() if n.startswith("reference/")))
    source = ROOT / "src" / "penstock"
    for name in PACKAGES:
        file = source / f"{name}.py" if name == "errors" else source / name / "__init__.py"
        package = ".".join(filter(None, ("penstock", name)))
        missing = [n for n in public_names(file) if f"{package}.{n}" not in anchors]
        assert not missing, f"the reference lacks {missing} of {package}"
    for name in MODULES:
        module = "penstock." + name.removesuffix(".py").replace("/", ".")
        missing = [n for n in public_names(source / name) if f"{module}.{n}" not in anchors]
        assert not missing, f"the reference lacks {missing} of {module}"


def test_every_integration_that_a_guide_names_is_in_the_reference():
    guides = "".join(path.read_text() for path in (DOCS / "guide").glob("*.md"))
    named = set(re.findall(r"from penstock\.integrations\.(\w+) import", guides))
    assert named
    assert {f"integrations/{name}.py" for name in named} <= set(MODULES)


def test_markup_is_not_left_in_the_text(site):
    for name, page in site.items():
        for paragraph in page.paragraphs:
            left = re.search(r"^\s*(- |\d+\. |\|.*\||```|#+ )|\]\(|\*\*\w", paragraph, re.MULTILINE)
            assert not left, f"{name}: {left[0]!r} in {paragraph[:200]!r}"


def test_every_picture_says_in_words_what_it_shows(site):
    pictures = [(name, image) for name, page in site.items() for image in page.images]
    assert len(pictures) >= 4
    for name, image in pictures:
        assert len(image.get("alt") or "") >= 10, f"{name}: {image['src']} has no alt text"


def test_the_changelog_is_the_one_of_the_repository(site):
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    for line in lines:
        if line.startswith("#"):
            assert line.lstrip("# ") in site["CHANGELOG.html"].text


def test_the_program_of_the_front_page_prints_what_it_says(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    file = tmp_path / "squares.py"
    file.write_text(program)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=100, check=True
    )
    assert set(done.stdout.splitlines()) == {re.search(r"\)  # (.*)$", program, re.MULTILINE)[1]}
