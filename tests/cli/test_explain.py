# SPDX-License-Identifier: Apache-2.0
"""`penstock explain` prints sections of docs/troubleshooting.md, in any installation."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import penstock.errors
from penstock.cli import main, troubleshooting
from penstock.cli.troubleshooting import explained, find_page, sections_of
from penstock.errors import PenstockError, StoreUnreachable, WorkerDied

PAGE = """# Page
Before the first.

## Errors

### WorkerDied

A worker ended, [at once](guide/threads.md#here). And **more** of it,
in two lines.

```text
### no heading
  kept as it is
```

- one, see [that](#it-hangs)
- two,
  in two lines

## Without an error

### It hangs

No batch comes.
"""


@pytest.fixture
def page(monkeypatch, tmp_path):
    path = tmp_path / "troubleshooting.md"
    path.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(troubleshooting, "find_page", lambda: path)
    monkeypatch.setenv("COLUMNS", "60")


@pytest.mark.parametrize("name", penstock.errors.__all__)
def test_every_error_is_explained(name, capsys):
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}\n\n")
    assert len(out.splitlines()) > 3


def test_a_section_is_plain_text(page, capsys):
    assert main(["explain", "WorkerDied"]) == 0
    assert capsys.readouterr().out == (
        "WorkerDied\n\n"
        "A worker ended, at once (docs/guide/threads.md#here). And\n"
        "more of it, in two lines.\n\n"
        "    ### no heading\n"
        "      kept as it is\n\n"
        "- one, see that (`penstock explain it-hangs`)\n"
        "- two, in two lines\n"
    )


def test_without_a_name_all_are_listed(page, capsys):
    assert main(["explain"]) == 0
    assert capsys.readouterr().out == (
        "Errors\n"
        "  WorkerDied\n"
        "      A worker ended, at once (docs/guide/threads.md#here).\n\n"
        "Without an error\n"
        "  it-hangs\n"
        "      No batch comes.\n\n"
        "penstock explain NAME says what to do.\n"
    )


@pytest.mark.parametrize(
    "name", ["workerdied", "penstock.errors.WorkerDied", "#workerdied", " WorkerDied "]
)
def test_a_name_may_be_written_as_it_was_found(page, name):
    assert explained(name).startswith("WorkerDied\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WorkerDead", "nothing is called 'WorkerDead' here. Did you mean WorkerDied?"),
        ("it-hnags", "nothing is called 'it-hnags' here. Did you mean it-hangs?"),
        ("xyz", "nothing is called 'xyz' here. `penstock explain` lists all."),
        ("", "nothing is called '' here. `penstock explain` lists all."),
    ],
)
def test_a_wrong_name_gets_the_nearest(page, name, said, capsys):
    assert main(["explain", name]) == 1
    assert capsys.readouterr().err == f"penstock: {said}\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("hang", ["it-hangs", "WorkerDied"]),  # in a title, then in a text
        ("no batch", ["it-hangs"]),  # in a text, whatever the case
        ("BATCH comes", ["it-hangs"]),
        ("worker", ["WorkerDied"]),
        ("ended nowhere", ["WorkerDied"]),  # one of them
        ("two", ["WorkerDied"]),
    ],
)
def test_other_words_are_searched_for(page, words, found, capsys):
    assert main(["explain", words]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == f"Nothing is called {words!r} here. Sections that have it:"
    assert [line.strip() for line in lines if re.match(r"  \S", line)] == found
    assert last == "penstock explain NAME says what to do."


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("bus error", "bus-error-and-a-small-devshm"),
        ("full /dev/shm", None),
        ("SIGKILL", "WorkerDied"),
        ("RuntimeError", "an-exception-of-your-own-code"),
        ("hang", "it-hangs"),
    ],
)
def test_what_people_have_before_them_is_found(words, first):
    found = re.findall(r"^  (\S+)$", explained(words), re.MULTILINE)
    assert "bus-error-and-a-small-devshm" in found if first is None else found[0] == first


def test_every_name_in_the_list_can_be_explained():
    for section in sections_of(find_page().read_text(encoding="utf-8")):
        assert explained(section.anchor) == explained(section.title)


@pytest.mark.parametrize("words", [["explain", "MissingExtraError"], ["explain"]])
def test_it_needs_no_extra(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # for both, whatever terminal there is
    script = (
        "import sys; sys.modules['typer'] = sys.modules['rich'] = None\n"
        f"from penstock.cli import main; main({words!r})\n"
        "if len(sys.argv) > 1: main(['explain', '--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words[1:]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert main(words) == 0
    help_text = f"{explained()}\n" if words[1:] else ""
    assert done.stdout == capsys.readouterr().out + help_text


def test_a_page_that_is_not_there_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(penstock, "__file__", str(tmp_path / "src" / "penstock" / "__init__.py"))
    with pytest.raises(PenstockError, match=r"not there: no .*penstock/troubleshooting.md or .*"):
        find_page()
    assert main(["explain"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "troubleshooting.md").write_text(PAGE)
    assert find_page() == tmp_path / "docs" / "troubleshooting.md"
    (tmp_path / "src" / "penstock").mkdir(parents=True)
    (tmp_path / "src" / "penstock" / "troubleshooting.md").write_text(PAGE)
    assert find_page() == tmp_path / "src" / "penstock" / "troubleshooting.md"


@pytest.mark.parametrize("error", [WorkerDied("it ended"), StoreUnreachable("no answer")])
def test_an_error_of_a_command_says_where_it_is_explained(error, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("penstock.cli._run", fail)
    assert main([]) == 1
    topic = type(error).__name__
    assert capsys.readouterr().err == f"penstock: {error}\nHelp: `penstock explain {topic}`\n"
