# SPDX-License-Identifier: Apache-2.0
"""Which line of a program a loader is said to be made at."""

from __future__ import annotations

import sysconfig
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.warn import users_place

PROGRAM = "/home/a/train.py"
CONSOLE_SCRIPT = f"{sysconfig.get_path('scripts')}/train"
USERS_PACKAGE = "/home/a/.local/lib/python3.11/site-packages/framework/data.py"


def calling(filename, function):
    """Return a function of that file, which calls another one in its third line."""
    namespace = {"function": function}
    exec(compile("def call():\n\n    return function()\n", filename, "exec"), namespace)
    return namespace["call"]


@pytest.mark.parametrize(
    "filename",
    [
        f"{sysconfig.get_path('purelib')}/framework/data.py",
        f"{sysconfig.get_path('stdlib')}/runpy.py",
        USERS_PACKAGE,
        "/another/environment/lib/python3.11/site-packages/framework/data.py",
        "/usr/lib/python3/dist-packages/framework/data.py",
        CONSOLE_SCRIPT,
        "<string>",  # python -c
    ],
)
def test_a_loader_that_a_package_makes_is_its_programs(filename):
    assert calling(PROGRAM, calling(filename, users_place))() == f"{PROGRAM}:3"


def test_a_program_beside_the_folder_of_scripts_is_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # below it, paths are shown from there
    program = f"{sysconfig.get_path('scripts')}-mine/train.py"
    assert calling(program, calling(USERS_PACKAGE, users_place))() == f"{program}:3"


@pytest.mark.parametrize("program", [CONSOLE_SCRIPT, "<string>"])
def test_where_all_is_installed_the_line_that_made_a_loader_is_named(program):
    make = calling(USERS_PACKAGE, users_place)
    with ThreadPoolExecutor(1) as pool:  # in a thread no test is below it
        assert pool.submit(calling(program, make)).result() == f"{USERS_PACKAGE}:3"
