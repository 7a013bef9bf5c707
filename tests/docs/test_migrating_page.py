# SPDX-License-Identifier: Apache-2.0
"""docs/migrating-from-torch.md: its tables are the signatures, its recipes run."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch.utils.data
from tests.docs.pages import DEADLINE_S, run

import penstock.torch

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-torch.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")

REQUIRED = inspect.Parameter.empty


def defaults_of(loader: type) -> dict[str, object]:
    parameters = inspect.signature(loader).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def rows_of(heading: str) -> list[dict[str, object]]:
    """Argument -> default, of each table whose rows begin with both, below the heading."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"^\| argument \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [
        {
            name: REQUIRED if default == "required" else ast.literal_eval(default.strip("`"))
            for name, default in re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE)
        }
        for table in tables
    ]


def test_every_argument_of_torch_has_a_row_with_its_default_in_its_order():
    torchs, _ = rows_of("Every argument")
    assert list(torchs.items()) == list(defaults_of(torch.utils.data.DataLoader).items())
    ours = defaults_of(penstock.torch.DataLoader)
    assert list(torchs.items()) == list(ours.items())[: len(torchs)]


def test_every_argument_that_torch_does_not_have_has_a_row():
    torchs, added = rows_of("Every argument")
    ours = defaults_of(penstock.torch.DataLoader)
    assert list(added.items()) == list(ours.items())[len(torchs) :]
    kinds = inspect.signature(penstock.torch.DataLoader).parameters
    assert {kinds[name].kind for name in added} == {inspect.Parameter.KEYWORD_ONLY}


def test_every_other_name_has_a_row():
    text = PAGE.read_text(encoding="utf-8")
    section = text.split("\n## Every other name\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| .* \|$", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    beyond = {
        *("DataLoader", "DevicePrefetcher", "NormalizeImages", "StatefulDataLoader"),
        *("install", "uninstall"),
    }
    assert set(penstock.torch.__all__) - beyond <= named
    assert named <= set(torch.utils.data.__all__)


def test_the_attributes_of_the_page_are_those_of_torch():
    text = PAGE.read_text(encoding="utf-8")
    (paragraph,) = re.findall(r"^\*\*Attributes\.\*\*(.*?) are what torch", text, re.M | re.S)
    names = re.findall(r"`(\w+)`", paragraph)
    stock = torch.utils.data.DataLoader([1, 2])
    ours = penstock.torch.DataLoader([1, 2])
    assert len(names) == 15
    for name in names:
        assert type(getattr(ours, name)) is type(getattr(stock, name)), name
    assert penstock.torch.DataLoader([1, 2], num_workers="auto").num_workers == "auto"


def recipes() -> dict[str, str]:
    """Recipe -> its Python, that of torch included; blocks marked `py` need what is not here."""
    text = PAGE.read_text(encoding="utf-8")
    parts = text.split("\n## Recipes\n")[1].split("\n## ")[0].split("\n### ")
    blocks = [re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in parts]
    data, *found = blocks
    assert len(data) == 1
    titles = [part.partition("\n")[0] for part in parts[1:]]
    return {title: "\n".join(own) for title, own in zip(titles, found, strict=True)}


def head() -> str:
    """What all recipes begin with: the one line that changes, and their data."""
    first, second = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[:2]
    return first + second


# Each recipe in a fork of one program that has torch already: recipes set limits and strategies of
# the whole process, and an import of torch takes as long as all of them.
IN_TURN = """
import gc, json, os, sys
import penstock.torch
gc.collect()
gc.freeze()  # or each fork collects all of torch at its end
for number, code in enumerate(json.loads(sys.argv[1])):
    if (pid := os.fork()) == 0:
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
        exec(compile(code, f"recipe {number}", "exec"), {"__name__": "__main__"})
        sys.exit(0)
    with open(f"{number}.status", "w") as file:
        file.write(str(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Recipe -> its exit status, what it prints, and what it writes on stderr."""
    folder = tmp_path_factory.mktemp("recipes")
    programs = json.dumps([head() + code for code in recipes().values()])
    command = [sys.executable, "-W", "ignore", "-c", IN_TURN, programs]
    done = run(command, until=time.monotonic() + DEADLINE_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {
        title: tuple((folder / f"{number}.{kind}").read_text() for kind in ("status", "out", "err"))
        for number, title in enumerate(recipes())
    }


@pytest.mark.parametrize("title", recipes() if PAGE.exists() else [])
def test_a_recipe_runs_and_prints_what_it_says(title, printed):
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"\n### {title}\n")[1].split("\n## ")[0].split("\n### ")[0]
    assert "Before" in section
    assert "After" in section
    status, out, err = printed[title]
    assert status == "0", err
    assert out.splitlines() == re.findall(r"^# (.*)$", recipes()[title], re.MULTILINE), err
