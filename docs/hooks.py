# SPDX-License-Identifier: Apache-2.0
"""Brings into the site what lies outside docs/ and is linked to, and makes those links lead there.

Pages link to each other as files of the repository, so that they can be followed there as well:
`../examples/README.md`. MkDocs knows docs/ alone. So the changelog, the examples' pages and every
other file that a page links to are added to the site under their paths in the repository, and links
from or to them are rewritten: in the site, what was in docs/ is at the top.

The search puts what says what to do before what says how it is made, by the tab a page is under.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "examples/*/README.md")
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
IMAGES = {".svg", ".png", ".jpg"}
# How much a hit counts, by tab or page. Words of headings count a thousandfold,
# and the reference has a heading for every name.
WEIGHTS = {
    "Start": 3,
    "Guides": 3,
    "Clients": 2,
    "Reference": 0.5,
    "Design": 0.2,
    "Project": 0.2,
    "troubleshooting.md": 5,
    "reference/testing.md": 0.1,
}
CHINESE = {
    "Back to top": "回到页面顶部",
    "Next": "下一页",
    "Previous": "上一页",
    "Skip to content": "跳转至内容",
    "Table of contents": "目录",
}
LANGUAGES = {".py": "python", ".yml": "yaml", ".toml": "toml", "": "text"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and the files that any page links to."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for page in list(files.documentation_pages()):
        for _, place in _links_across(page.content_string, _place(page)):
            if files.get_file_from_path(_uri(place)) is None:
                files.append(_mounted(place, config))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links that lead into docs/ or out of it, and say how much the page weighs."""
    here = posixpath.dirname(page.file.src_uri)
    for link, place in set(_links_across(markdown, _place(page.file))):
        target = posixpath.relpath(_uri(place), here or ".")
        markdown = markdown.replace(link, LINK.sub(rf"\g<1>{target}\g<3>", link))
    _weigh(page)
    return markdown


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Name the language of the Chinese pages, by which browsers choose fonts and translate.

    The theme has one language for a site: its words around the page are put into Chinese, too.
    """
    if not page.file.src_uri.startswith("zh/"):
        return output
    for english, chinese in CHINESE.items():
        output = re.sub(rf'(>\s*|="){english}(?=\s*<|"|: )', rf"\g<1>{chinese}", output)
    return output.replace('<html lang="en"', '<html lang="zh-Hans"', 1)


def _weigh(page: Page) -> None:
    tab = page.ancestors[-1].title if page.ancestors else ""
    weight = WEIGHTS.get(page.file.src_uri, WEIGHTS.get(tab, 1))
    page.meta.setdefault("search", {}).setdefault("boost", weight)


def _links_across(markdown: str, page: str) -> Iterator[tuple[str, str]]:
    """Yield links between docs/ and the rest: their text, and the file's path in the repository."""
    for link in LINK.finditer(markdown):
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
        if (ROOT / place).is_dir():
            place = f"{place}/README.md"
        is_in_docs = place.startswith("docs/") and page.startswith("docs/")
        if not is_in_docs and not place.startswith("..") and (ROOT / place).is_file():
            yield link[0], place


def _place(file: File) -> str:
    """Return where in the repository a file of the site lies."""
    return os.path.relpath(file.abs_src_path, ROOT) if file.abs_src_path else file.src_uri


def _uri(place: str) -> str:
    """Return what the site calls a file of the repository."""
    if place == "README.md":
        return "index.md"
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    return place if Path(place).suffix in {".md", *IMAGES} else f"{place}.md"


def _mounted(place: str, config: MkDocsConfig) -> File:
    """Return a file of the repository for the site: as it is, or shown on a page."""
    path, level = ROOT / place, InclusionLevel.NOT_IN_NAV
    if path.suffix in {".md", *IMAGES}:
        return File.generated(config, _uri(place), abs_src_path=str(path), inclusion=level)
    language = LANGUAGES.get(path.suffix, "text")
    # Searching finds pages, not programs.
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    shown = f"{head}# {path.name}\n\n`{place}`\n\n````{language}\n{path.read_text()}````\n"
    return File.generated(config, _uri(place), content=shown, inclusion=level)
