# SPDX-License-Identifier: Apache-2.0
"""`penstock explain` prints sections of docs/troubleshooting.md, in any installation."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock.errors
from penstock.cli import main
from penstock.cli.explain import read_sections
from penstock.errors import StoreUnreachable, WorkerDied

PAGE = """# Page
Before the first.

## Errors

### WorkerDied

A worker ended, at once. And **more** of it,
in two lines.

## Without an error

### It hangs

No batch comes.
"""


@pytest.fixture
def page(monkeypatch, tmp_path):
    """The page of a checkout that Penstock is imported from."""
    package = tmp_path / "src" / "penstock"
    monkeypatch.setattr(penstock, "__file__", str(package / "__init__.py"))
    (tmp_path / "docs").mkdir()
    path = tmp_path / "docs" / "troubleshooting.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", penstock.errors.__all__)
def test_every_error_is_explained(name, capsys):
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}\n\n")
    assert len(out.splitlines()) > 3


@pytest.mark.parametrize("name", ["WorkerDied", "penstock.errors.WorkerDied", "#workerdied"])
def test_a_section_is_printed_by_a_name_as_it_was_found(page, name, capsys):
    assert main(["explain", name]) == 0
    text = "A worker ended, at once. And **more** of it,\nin two lines.\n"
    assert capsys.readouterr().out == f"WorkerDied\n\n{text}"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], ["Errors: workerdied", "Without an error: it-hangs"]),
        (["hang"], ["Without an error: it-hangs"]),
        (["NO batch"], ["Without an error: it-hangs"]),
    ],
)
def test_all_are_listed_and_other_words_are_searched_for(page, words, found, capsys):
    assert main(["explain", *words]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[::2] == found
    assert lines[-1] == "    No batch comes."
    assert last == "penstock explain NAME says what to do."


def test_a_wrong_name_gets_the_way_to_the_list(page, capsys):
    assert main(["explain", "xyz"]) == 1
    said = "nothing is called 'xyz' here. `penstock explain` lists all."
    assert capsys.readouterr().err == f"penstock: {said}\n"


def test_every_name_in_the_list_can_be_explained(capsys):
    for section in read_sections():
        assert main(["explain", section.anchor]) == 0
        assert capsys.readouterr().out.startswith(f"{section.title}\n")


@pytest.mark.parametrize("words", [["explain", "MissingExtraError"], ["explain"]])
def test_it_needs_no_extra(words, capsys):
    script = (
        "import sys; sys.modules['typer'] = sys.modules['rich'] = None\n"
        f"from penstock.cli import main; main({words!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main(words) == 0
    assert done.stdout == capsys.readouterr().out


def test_a_page_that_is_not_there_is_said(page, capsys):
    page.unlink()
    assert main(["explain"]) == 1
    assert "not there: no " in capsys.readouterr().err
    package = page.parents[1] / "src" / "penstock"
    package.mkdir(parents=True)
    (package / "troubleshooting.md").write_text(PAGE)  # as in a wheel
    assert main(["explain", "it-hangs"]) == 0


@pytest.mark.parametrize("error", [WorkerDied("it ended"), StoreUnreachable("no answer")])
def test_an_error_of_a_command_says_where_it_is_explained(error, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("penstock.cli._run", fail)
    assert main([]) == 1
    topic = type(error).__name__
    assert capsys.readouterr().err == f"penstock: {error}\nHelp: `penstock explain {topic}`\n"
