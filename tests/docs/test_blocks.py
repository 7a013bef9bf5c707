# SPDX-License-Identifier: Apache-2.0
"""Every code block of the pages runs: here, or in the test that a page has of its own.

Python marked `python` is executed, and what it promises in comments at the margin is what it
prints; `py` is not, and is counted. Commands name what there is: subcommands and their options,
targets of make.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest
from tests.docs.page_setups import NOT_RUN, SETUPS, TESTED_BY
from tests.docs.pages import ROOT, blocks_of, code_of, num_fences, run_page
from tests.docs.promised import promised_modules, promised_names

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
    ]
    if path.is_file()
)
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
BLOCKS = {page: blocks_of(text) for page, text in TEXTS.items()}
WITH_PYTHON = [page for page in PAGES if any(b.language == "python" for b in BLOCKS[page])]

pytestmark = pytest.mark.skipif(len(PAGES) < 2, reason="the pages are not there")


def original_of(page):
    """Return the page of which this one is a translation with the same Python, or None."""
    parts = Path(page).parts
    if len(parts) < 3 or parts[:2] != ("docs", "zh"):
        return None
    original = str(Path("docs", *parts[2:]))
    is_same = original in BLOCKS and code_of(BLOCKS[original]) == code_of(BLOCKS[page])
    return original if is_same else None


def pages_run_here():
    return [page for page in WITH_PYTHON if page not in TESTED_BY and original_of(page) is None]


@pytest.mark.parametrize("page", pages_run_here())
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path, until):
    for printed, promised in run_page(TEXTS[page], tmp_path, until, SETUPS.get(page)):
        assert not promised or printed == promised


@pytest.mark.parametrize("page", TESTED_BY)
def test_a_page_with_a_test_of_its_own_is_named_there(page):
    assert page in WITH_PYTHON
    test = (ROOT / TESTED_BY[page]).read_text(encoding="utf-8")
    assert re.search(rf"\b{re.escape(Path(page).stem)}(\.md)?\b", test)
    assert "python" in test


@pytest.mark.parametrize("page", PAGES)
def test_no_block_of_python_is_overlooked(page):
    found = [block.language for block in BLOCKS[page]]
    for language in ("python", "py", "console", "sh", "bash"):
        assert found.count(language) == num_fences(TEXTS[page], language)
    assert set(found) <= {"", "python", "py", "console", "sh", "bash", "text", "json", "diff"}


@pytest.mark.parametrize("page", PAGES)
def test_python_that_is_not_run_is_counted_and_has_a_reason(page):
    parts = Path(page).parts
    original = str(Path("docs", *parts[2:])) if parts[:2] == ("docs", "zh") else page
    number, reason = NOT_RUN.get(original, (0, ""))
    assert sum(block.language == "py" for block in BLOCKS[page]) == number
    assert reason or not number


def names_taken_from_penstock(code):
    """Return (module, name) of each import of ours; the name is None where the module is meant."""
    taken = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            taken += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            taken += [(node.module, alias.name) for alias in node.names]
    return [pair for pair in taken if pair[0].split(".")[0] == "penstock"]


def check_imports(code):
    for module, name in names_taken_from_penstock(code):
        assert module in promised_names(), f"{module} is not promised"
        assert (
            name is None
            or name in promised_names()[module]
            or (f"{module}.{name}" in promised_modules())
        ), f"{name} of {module} is not promised"


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_takes_only_what_is_promised(page):
    for block in BLOCKS[page]:
        if block.language in ("python", "py") and "penstock" in block.body:
            check_imports(block.body)


# Commands


def commands_of(page):
    """Return the simple commands of a page's blocks for the shell, split into words."""
    shells = [block for block in BLOCKS[page] if block.language in ("console", "sh", "bash")]
    found = []
    for line in (line for block in shells for line in block.commands):
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                found.append(words)
                words = []
            else:
                words.append(word)
    return [without_redirections(words) for words in found if words]


def without_redirections(words):
    kept = list(words)
    while any(set(word) <= set("<>") for word in kept):
        place = next(k for k, word in enumerate(kept) if set(word) <= set("<>"))
        before = place - (place > 0 and kept[place - 1] in ("1", "2"))
        del kept[before : place + 2]
    return kept


def check_command(words):
    """Raise if what is called has no such subcommand, option or target."""
    for place, word in enumerate(words):
        if word == "penstock":
            check_penstock(words[place + 1 :])
            return
        if word == "make":
            check_make(words[place + 1 :])
            return


def check_penstock(words):
    typer = pytest.importorskip("typer")
    from penstock.cli.commands import make_app

    group = typer.main.get_command(make_app())
    name, *rest = words or ["--help"]
    # Options that do something by themselves are not to be parsed: they would do it.
    if name.startswith("-") or "--help" in rest:
        asked = rest if name in group.commands else [name]
        assert set(asked) <= options_of(group) | {"--help"}, words
        return
    assert name in group.commands, words
    group.commands[name].make_context(name, rest)


def options_of(command):
    return {option for parameter in command.params for option in parameter.opts}


def check_make(words):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = [word for word in words if "=" not in word and not word.startswith("-")]
    assert set(named) <= targets, words


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_there_is(page):
    for words in commands_of(page):
        check_command(words)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_a_sentence_name_what_there_is(page):
    typer = pytest.importorskip("typer")
    from penstock.cli.commands import make_app

    group = typer.main.get_command(make_app())
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for called in re.findall(r"`penstock ([^`]+)`", text):
        name, *rest = called.split()
        if name == "COMMAND":
            continue
        command = group if name.startswith("-") else group.commands[name]
        words = [name, *rest] if command is group else rest
        if name == "run":  # what follows the program is the program's
            words = itertools.takewhile(lambda word: word.startswith("-"), words)
        options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        assert set(options) <= options_of(command) | {"--help"}, called
    for called in re.findall(r"`make ([^`]+)`", text):
        check_make(called.split())


# The tests above fail where they should.


def test_files_and_commands_of_a_page_are_run_in_its_order(tmp_path, until):
    page = (
        "`one.py`:\n\n```python\nopen('a', 'x').close()\n```\n\n"
        "```sh\npip install x\nmkdir ~/x\npython one.py && ls a\n```\n\n"
        "`two.py`\n\n```python\nif __name__ == '__main__':\n    print(open('a').read() + 'b')\n"
        "# b\n```\n\n```python\nx = 1\n```\n\n```python\nprint(x)\n# 1\n```\n"
    )
    assert run_page(page, tmp_path, until) == [(["b"], ["b"]), ([], []), (["1"], ["1"])]
    assert not (tmp_path / "x").exists()  # a home of its own, and nothing made there
    (tmp_path / "a").unlink()
    with pytest.raises(AssertionError, match=r"'python one\.py && ls b' ended with 2"):
        run_page(page.replace("ls a", "ls b"), tmp_path, until)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("penstock pakc photos photos.lmdb", "pakc"),
        ("penstock pack photos photos.lmdb --rezise 256", "No such option: --rezise"),
        ("make tset", "tset"),
    ],
)
def test_a_command_that_there_is_not_is_found_out(command, said):
    with pytest.raises(Exception, match=said):  # click's own classes, or typer's copies of them
        check_command(shlex.split(command))
