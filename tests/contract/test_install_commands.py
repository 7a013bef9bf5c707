# SPDX-License-Identifier: Apache-2.0
"""What pages, messages and files tell pip to install is ours, with extras that there are.

The distribution called `penstock`, as our package, is another project's.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from penstock import optional

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests")
# Not CHANGELOG.md: it tells what was.
FILES = (".ci/run", "CONTRIBUTING.md", "Makefile", "README.md", "SECURITY.md", "pyproject.toml")
KINDS = {".md", ".py", ".sh", ".toml", ".txt"}

ANOTHERS = re.compile(
    r"""(?<![\w./-])penstock(?:
        \[[\w{]                          # penstock[cli]
        | [ ]?(?:[=~!]=|[<>]=?)[ ]?[\dXv]  # penstock>=0.2
    )
    | \binstall\b[^\n`]*?[\s"']penstock(?![\w./\[-])     # pip install penstock
    | \bmetadata\.\w+\(["']penstock["']
    | ^penstock\s*(?:\#.*)?$               # in a file of requirements""",
    re.VERBOSE | re.MULTILINE,
)
WITH_EXTRAS = re.compile(r"""(?:penstock-loader|(?<=["'/ .]\.))\[([\w, -]+)\]""")
CALLED = re.compile(r"""\b(?:install_command\(|missing_extra\(error, )([^)]*)\)""")
IN_WORDS = re.compile(r"""\bextras?((?:,|[ ]and|[ ]or|[ ]?[`"]\w+[`"])+)|可选依赖[ ]?(`\w+`)""")


def texts():
    """The name and the text of each file that a person may read; long lines are whole."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
    inside = (path for path in inside if path.suffix in KINDS and path != Path(__file__))
    for path in (*inside, *(ROOT / name for name in FILES)):
        yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8").replace("\\\n", "")


def not_ours(text):
    return [found[0] for found in ANOTHERS.finditer(text)]


def extras_named_in(text):
    lists = WITH_EXTRAS.findall(text)
    quoted = [*CALLED.findall(text), *("".join(pair) for pair in IN_WORDS.findall(text))]
    quoted = [name for each in quoted for name in re.findall(r"""[`"'](\w+)[`"']""", each)]
    return {name.strip() for each in lists for name in each.split(",")} | set(quoted)


def test_no_file_names_a_distribution_that_is_not_ours():
    found = {name: not_ours(text) for name, text in texts()}
    assert found.pop("src/penstock/cli/doctor.py") == ["metadata.version('penstock'"]  # warns of it
    assert {name: named for name, named in found.items() if named} == {}


def test_every_extra_that_is_named_exists():
    named = {name: extras_named_in(text) for name, text in texts()}
    assert {name: found - EXTRAS for name, found in named.items() if found - EXTRAS} == {}
    assert {"torch", "vision", "cli", "ray", "coco", "records"} <= set().union(*named.values())
    assert set(optional._EXTRA_OF.values()) <= EXTRAS


def test_messages_name_our_distribution():
    assert PROJECT["name"] == optional.DISTRIBUTION == "penstock-loader"


# The tests above fail where they should.


@pytest.mark.parametrize(
    "text",
    ["pip install penstock", "pip install \\\n    penstock", 'run([*pip, "install", "penstock"])',
     'It needs `pip install "penstock[cli,lmdb]"`.', "f'pip install \"penstock[{extras}]\"'",
     "`penstock>=0.1,<0.2` is a safe bound", "penstock == 0.2.0", "of requirements:\npenstock\n",
     'version = metadata.version("penstock")'],
)  # fmt: skip
def test_anothers_distribution_is_found_out(text):
    assert not_ours(text.replace("\\\n", ""))


@pytest.mark.parametrize(
    "text",
    ['pip install "penstock-loader[cli]"', "pip install -e ../penstock", 'modules["penstock"]',
     "`pip uninstall penstock penstock-loader`, then install Penstock again",
     "`pip install .` gives the command `penstock`", "penstock_batches == 1"],
)  # fmt: skip
def test_what_is_ours_is_not(text):
    assert not not_ours(text)


@pytest.mark.parametrize(
    "text",
    ['pip install "penstock-loader[torhc,cli]"', "pip install '.[torhc]'", "-e .[cli,torhc]",
     'pip install "../..[torhc]"', 'install_command("torhc")', "还需要可选依赖 `torhc`",
     "with the extras `cli`, `lmdb` and `torhc`"],
)  # fmt: skip
def test_an_extra_that_there_is_not_is_found_out(text):
    assert extras_named_in(text) - EXTRAS == {"torhc"}
