# SPDX-License-Identifier: Apache-2.0
"""docs/zh says in Chinese what the English pages say: the same code, tables, links and figures.

docs/zh/guide/NAME.md is docs/guide/NAME.md. That code is run where the English page has its test.
Sections are compared in their order, so a fact that is mended in English has to be mended here.
terms.md has no English page: it is where each word is explained, and links to it are free.
Of troubleshooting.md the entries met most are translated, under their English titles. examples.md
takes commands, output, names and figures from the examples' own pages.
"""

from __future__ import annotations

import functools
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.docs.pages import blocks_of

DOCS = Path(__file__).parents[2] / "docs"
TERMS = DOCS / "zh/terms.md"
EXAMPLES = DOCS / "zh/examples.md"
PAGES = sorted(
    path.relative_to(DOCS / "zh").as_posix()
    for path in (DOCS / "zh").rglob("*.md")
    if path not in (TERMS, EXAMPLES)
)
SELECTED = "troubleshooting.md"

pytestmark = pytest.mark.skipif(not PAGES, reason="the pages are not there")


FENCED = re.compile(r"^ *```.*?^ *```[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]+))?\)")
ELSEWHERE = re.compile(r"\]\((\w+:[^)]+)\)")
COMMENT = re.compile(r"  # .*$", re.MULTILINE)  # of a shell
NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?: ?(million|万|亿))?")
UNITS = {"": 1, "million": 10**6, "万": 10**4, "亿": 10**8}


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
    return (selected(english, chinese) if page == SELECTED else english), chinese


def selected(english: str, chinese: str) -> str:
    """Return the introduction and the sections with whose titles Chinese headings begin."""
    introduction, *sections = re.split(r"^(?=##)", english, flags=re.MULTILINE)
    by_title = {section.partition("\n")[0]: section for section in sections}
    titles = re.findall(r"^(##+ .*?)\uff1a", chinese, re.MULTILINE)
    return introduction + "".join(by_title[title] for title in titles)


def pairs_of(page: str) -> list[tuple[Section, Section]]:
    english, chinese = map(sections_of, texts_of(page))
    return list(zip(english, chinese, strict=True))


@functools.cache
def original_anchors(page: str) -> dict[str, str]:
    """Return the anchors of a Chinese page, and those of the same headings in English."""
    return {anchor_of(zh.heading): anchor_of(en.heading) for en, zh in pairs_of(page)} | {"": ""}


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


def figures_of(prose: str) -> set[float]:
    numbers = NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", CODE.sub("", prose)))
    return {float(number.replace(",", "")) * UNITS[unit] for number, unit in numbers}


@pytest.mark.parametrize("page", PAGES)
def test_code_is_the_same_up_to_comments(page):
    english, chinese = map(blocks_of, texts_of(page))
    assert len(english) == len(chinese) == len(FENCED.findall(texts_of(page)[0])) > 0
    for original, translated in zip(english, chinese, strict=True):
        assert translated._replace(body="") == original._replace(body="")
        assert translated.promises == original.promises
        if original.language in ("python", "py"):
            assert without_comments(translated.body) == without_comments(original.body)
        elif original.language in ("console", "sh"):
            assert COMMENT.sub("", translated.body) == COMMENT.sub("", original.body)
        else:
            assert translated.body == original.body


@pytest.mark.parametrize("page", PAGES)
def test_headings_are_as_many_and_as_deep(page):
    english, chinese = map(sections_of, texts_of(page))
    assert [s.heading.split()[0] for s in chinese] == [s.heading.split()[0] for s in english]
    assert len({anchor_of(section.heading) for section in chinese}) == len(chinese)


@pytest.mark.parametrize("page", PAGES)
def test_sections_name_the_same_code_and_figures(page):
    for english, chinese in pairs_of(page):
        original, translated = (set(CODE.findall("\n".join(both))) for both in (english, chinese))
        assert translated == original, chinese.heading
        figures, same = figures_of(english.prose), figures_of(chinese.prose)
        assert figures <= same, chinese.heading
        assert max(same - figures, default=0) <= 10, chinese.heading  # words in English: "two"


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_the_same_rows_and_defaults(page):
    for english, chinese in pairs_of(page):
        tables = (rows_of(english.prose), rows_of(chinese.prose))
        for original, translated in zip(*tables, strict=True):
            assert len(translated) == len(original), translated
            for cell, same in zip(translated, original, strict=True):
                assert sorted(CODE.findall(cell)) == sorted(CODE.findall(same)), translated
                assert bool(cell) == bool(same), translated


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_where_the_english_ones_lead(page):
    here = DOCS / "zh" / page
    for english, chinese in pairs_of(page):
        expected = [
            ((DOCS / page).parent / target if target else DOCS / page, anchor)
            for target, anchor in LINK.findall(english.prose)
        ]
        found = []
        for target, anchor in LINK.findall(chinese.prose):
            path = (here.parent / target).resolve() if target else here
            assert path.is_file(), target
            if path == TERMS or (path, anchor) == (DOCS / page, ""):  # the English page, as such
                continue
            if path.is_relative_to(DOCS / "zh"):
                name = path.relative_to(DOCS / "zh").as_posix()
                found.append((DOCS / name, original_anchors(name)[anchor]))
            else:
                name = path.relative_to(DOCS.parent).as_posix().removeprefix("docs/")
                assert name not in PAGES or anchor not in original_anchors(name).values(), (
                    f"{name} is translated: zh/{name} is the page to link to"
                )
                found.append((path, anchor))
        assert sorted(found) == sorted((path.resolve(), anchor) for path, anchor in expected)
        elsewhere = (sorted(ELSEWHERE.findall(section.prose)) for section in (english, chinese))
        assert next(elsewhere) == next(elsewhere), chinese.heading


def test_each_word_is_explained_once():
    rows = [row for row in rows_of(TERMS.read_text("utf-8")) if row and row[0] != "术语"]
    words = [row[0] for row in rows]
    assert len(set(words)) == len(words) > 20
    assert all(len(row) == 3 and all(row) for row in rows)


@pytest.mark.parametrize("page", PAGES)
def test_pages_lead_to_the_words_that_are_explained(page):
    anchors = {anchor_of(section.heading) for section in sections_of(TERMS.read_text("utf-8"))}
    links = re.findall(r"\]\((?:\.\./)*terms\.md(?:#([^)]+))?\)", texts_of(page)[1])
    assert links
    assert set(links) <= anchors | {""}


def test_examples_are_shown_as_their_own_pages_show_them():
    folder = DOCS.parent / "examples"
    overview = (folder / "README.md").read_text("utf-8")
    _, *sections = re.split(r"^(?=## )", EXAMPLES.read_text("utf-8"), flags=re.MULTILINE)
    examples = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\)", overview, re.MULTILINE)
    assert [section.partition("\uff1a")[0] for section in sections] == [
        f"## {name.strip('/')}" for name, _ in examples
    ]
    for section, (_, page) in zip(sections, examples, strict=True):
        own = overview + (folder / page).read_text("utf-8")
        shown = {line.strip() for line in COMMENT.sub("", own).splitlines()} | set(
            CODE.findall(own)
        )
        for block in blocks_of(section):
            assert {line.strip() for line in COMMENT.sub("", block.body).splitlines()} <= shown
        prose = FENCED.sub("", section)
        assert [code for code in CODE.findall(prose) if code not in own] == []
        assert max(figures_of(prose) - figures_of(FENCED.sub("", own)), default=0) <= 10
        assert f"](../../examples/{page})" in section
