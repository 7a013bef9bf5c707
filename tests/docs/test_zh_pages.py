# SPDX-License-Identifier: Apache-2.0
"""docs/zh says in Chinese what the English pages say: the same code, tables, links and figures.

That code is run where the English page has its test. Sections are compared in their order, so a
fact that is mended in English has to be mended here.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.docs.pages import blocks_of

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path.name for path in sorted((DOCS / "zh").glob("*.md"))]

pytestmark = pytest.mark.skipif(not PAGES, reason="the pages are not there")


FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]+))?\)")


class Section(NamedTuple):
    """A heading, with its marks, and the prose below it: code blocks left out."""

    heading: str
    prose: str


def sections_of(text: str) -> list[Section]:
    title, *parts = re.split(r"^(#+ .*)$", FENCED.sub("", text), flags=re.MULTILINE)
    assert not title.strip()
    return [Section(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def texts_of(page: str) -> tuple[str, str]:
    """Return the English page and the Chinese one."""
    both = (DOCS / page, DOCS / "zh" / page)
    english, chinese = (path.read_text(encoding="utf-8") for path in both)
    return english, chinese


def pairs_of(page: str) -> list[tuple[Section, Section]]:
    english, chinese = map(sections_of, texts_of(page))
    return list(zip(english, chinese, strict=True))


def without_comments(code: str) -> str:
    lines = code.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return "\n".join(lines)


def rows_of(prose: str) -> list[list[str]]:
    lines = [line for line in prose.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r" \|", line[1:])[:-1]] for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_code_is_the_same_up_to_comments(page):
    english, chinese = map(blocks_of, texts_of(page))
    assert len(english) == len(chinese) > 20
    for original, translated in zip(english, chinese, strict=True):
        assert translated._replace(body="") == original._replace(body="")
        assert translated.promises == original.promises
        if original.language in ("python", "py"):
            assert without_comments(translated.body) == without_comments(original.body)
        else:
            assert translated.body == original.body


@pytest.mark.parametrize("page", PAGES)
def test_headings_are_as_many_and_as_deep(page):
    english, chinese = map(sections_of, texts_of(page))
    assert [s.heading.split()[0] for s in chinese] == [s.heading.split()[0] for s in english]
    assert len({anchor_of(section.heading) for section in chinese}) == len(chinese)


@pytest.mark.parametrize("page", PAGES)
def test_sections_name_the_same_code(page):
    for english, chinese in pairs_of(page):
        original, translated = (set(CODE.findall("\n".join(both))) for both in (english, chinese))
        assert translated == original, chinese.heading


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_the_same_rows_and_defaults(page):
    num_tables = 0
    for english, chinese in pairs_of(page):
        tables = (rows_of(english.prose), rows_of(chinese.prose))
        for original, translated in zip(*tables, strict=True):
            assert len(translated) == len(original), translated
            for cell, same in zip(translated, original, strict=True):
                assert sorted(CODE.findall(cell)) == sorted(CODE.findall(same)), translated
                assert bool(cell) == bool(same), translated
        num_tables += bool(tables[0])
    assert num_tables


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_where_the_english_ones_lead(page):
    english, chinese = map(sections_of, texts_of(page))
    original_of = {
        anchor_of(translated.heading): anchor_of(original.heading)
        for original, translated in zip(english, chinese, strict=True)
    }
    for original, translated in zip(english, chinese, strict=True):
        expected = [(target or page, anchor) for target, anchor in LINK.findall(original.prose)]
        found = []
        for target, anchor in LINK.findall(translated.prose):
            path = (DOCS / "zh" / (target or page)).resolve()
            assert path.is_file(), target
            if path.parent.name == "zh":
                assert not anchor or not target, f"{target}#{anchor} cannot be compared"
                found.append((path.name, original_of[anchor] if anchor else ""))
            else:
                name = path.relative_to(DOCS).as_posix()
                assert name not in PAGES, f"{name} is translated: zh/{name} is the page to link to"
                found.append((name, anchor))
        assert sorted(found) == sorted(expected), translated.heading
