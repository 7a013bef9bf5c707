# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md has every error, and quotes what the code says."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from tests.docs.provoked import PROGRAMS

import penstock.errors
from penstock.cli.explain import sections_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "troubleshooting.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")

TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
SECTIONS = {section.title: section for section in sections_of(TEXT)}


def quotations():
    """Return all quoted messages by (heading, number), those above the first heading as ("", n)."""
    texts = {"": TEXT.partition("\n## ")[0], **{s.title: s.text for s in SECTIONS.values()}}
    return {
        (title, number): quoted
        for title, text in texts.items()
        for number, quoted in enumerate(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    }


def pattern_of(quoted):
    """Return what matches the message: other numbers, and anything for "..."."""
    parts = []
    for part in " ".join(quoted.split()).split("..."):
        escaped = re.escape(part.strip())
        escaped = re.sub(r"\\\[\d+(?:,\\ \d+)*\\\]", r"\\[[\\d, ]+\\]", escaped)
        escaped = re.sub(r"\d+(?:(?:,|\\\.)\d+)*", r"\\d[\\d.,]*", escaped)
        parts.append(re.sub(r"\b[kMGT]?B\b", "[kMGT]?B", escaped))
    return re.compile(".*".join(parts))


@pytest.mark.parametrize("name", penstock.errors.__all__)
def test_every_error_has_a_section_whose_anchor_is_its_name(name):
    assert SECTIONS[name].anchor == name.lower()
    assert SECTIONS[name].group == "Errors"
    assert SECTIONS[name].summary
    if name not in ("PenstockError", "WorkerError"):  # roots, which no message has
        assert name in PROGRAMS


def run(program):
    """Return what the program raises, class and message; else what it warned of, or returns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said = program()
        except Exception as error:
            return type(error), str(error)
    ours = [w for w in caught if not issubclass(w.category, (DeprecationWarning, ResourceWarning))]
    return None, said if isinstance(said, str) else str(ours[0].message)


@pytest.mark.parametrize(("title", "number"), quotations(), ids=lambda value: f"{value}")
def test_what_is_quoted_is_what_the_code_says(title, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, said = run(PROGRAMS[title][number])
    if title in penstock.errors.__all__:
        assert kind is getattr(penstock.errors, title), said
    quoted = quotations()[title, number]
    message = " ".join(said.split())
    assert pattern_of(quoted).fullmatch(message), f"{message}\nis not\n{quoted}"


def test_every_program_is_of_a_quotation():
    programs = {(title, n) for title, each in PROGRAMS.items() for n in range(len(each))}
    assert programs == set(quotations())
