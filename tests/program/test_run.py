# SPDX-License-Identifier: Apache-2.0
"""A program without torch finds the same process under `penstock run` as under `python`."""

from __future__ import annotations

import json
import os
import sys
import zipfile

import pytest
from tests.program.running import (
    PYTHON,
    RUN,
    environment,
    in_terminal,
    ran,
    script,
    with_first,
    written,
)

from penstock.cli import main

PROBE = """
import json, os, re, signal, sys, threading
NAMES = ("PYTHONPATH", "PENSTOCK_RUN", "_")
found = {
    "name": __name__, "file": __file__, "package": __package__,
    "spec": re.sub("0x[0-9a-f]+", "", repr(__spec__)), "argv": sys.argv,
    "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "cwd": os.getcwd(),
    "executable": sys.executable, "write_through": sys.stdout.write_through,
    "encoding": [sys.stdout.encoding, sys.stdin.errors, sys.getfilesystemencoding()],
    "modules": sorted(set(sys.modules) - {"__future__", "torch"}),
    "threads": threading.active_count(), "descriptors": sorted(os.listdir("/proc/self/fd")),
    "signals": [str(signal.getsignal(n)) for n in range(1, 32)],
    "environment": {k: v for k, v in os.environ.items() if k not in NAMES},
    "typed": sys.stdin.read(),
}
print(json.dumps(found))
"""
OPTIONS = (
    ["-W", "error", "-W", "ignore::DeprecationWarning", "-X", "dev", "-Xutf8=1", "-u", "-B"],
    ["-OO", "-P", "-s", "-Werror", "-b", "-X", "mine=3"],
)
PROGRAMS = {
    "script": ["probe.py"],
    "options like ours": ["probe.py", "--seed", "3", "--quiet", "-m", "--help", "--", "-x"],
    "deep script": ["folder/probe.py", "--a", ""],
    "package": ["-m", "package", "-m", "--seed=1"],
    "module": ["-m", "package.inner", "a", "b c"],
    "folder": ["folder", "x"],
    "zip": ["archive.zip", "x"],
}


@pytest.fixture
def folder(tmp_path):
    for place in ("probe.py", "folder/probe.py", "folder/__main__.py", "package/__main__.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(PROBE)
    (tmp_path / "package" / "inner.py").write_text(PROBE)
    (tmp_path / "package" / "__init__.py").touch()
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    return tmp_path


def found_by(command, folder, **options):
    done = ran(command, folder, input="typed\n", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("options", "program"),
    [
        *(pytest.param([], words, id=name) for name, words in PROGRAMS.items()),
        *((options, PROGRAMS[name]) for options in OPTIONS for name in ("script", "zip")),
    ],
)
def test_the_program_finds_what_it_finds_without_us(program, options, folder):
    stock = found_by([*PYTHON, *options, *program], folder)
    assert found_by([*PYTHON, *options, *RUN[1:], *program], folder) == stock
    assert stock[1] == ""  # and nothing is said


def test_so_it_does_under_the_command_of_that_name(folder):
    stock = found_by([*PYTHON, *PROGRAMS["options like ours"]], folder)
    assert found_by([script(), "run", *PROGRAMS["options like ours"]], folder) == stock
    own = [*PYTHON, "-W", "error", "-u", script(), "run", "--quiet", "-m", "package"]
    assert found_by(own, folder) == found_by(
        [*PYTHON, "-W", "error", "-u", "-m", "package"], folder
    )


@pytest.mark.parametrize("joined", ["-mpenstock", "-umpenstock", "-um"])
def test_options_that_are_joined_to_m_stay(joined, folder):
    module = [] if joined.endswith("penstock") else ["penstock"]
    options = ["-u"] if "u" in joined else []
    got = found_by([*PYTHON, joined, *module, "run", "probe.py"], folder)
    assert got == found_by([*PYTHON, *options, "probe.py"], folder)


def test_the_terminal_is_the_programs(folder):
    program = written(
        folder / "terminal.py",
        """
        import os, sys
        print([s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)], os.get_terminal_size())
        print(os.tcgetpgrp(0) == os.getpgrp(), input("name: "))
        """,
    )

    shown, status = in_terminal([*PYTHON, program], b"Ada\n")
    assert b"[True, True, True] os.terminal_size(columns=77, lines=33)" in shown
    assert b"True Ada" in shown
    assert in_terminal([*RUN, program], b"Ada\n") == (shown, status)


def test_ones_own_startup_modules_still_run_and_ones_own_path_counts(folder):
    own = folder / "own"
    own.mkdir()
    # usercustomize is not for Python to import in a virtual environment.
    written(own / "sitecustomize.py", "import sys, usercustomize; sys.from_site = __file__")
    written(own / "usercustomize.py", "import sys; sys.from_user = __file__")
    written(own / "helper.py", "HERE = __file__")
    program = written(
        folder / "program.py",
        """
        import sys, helper, sitecustomize, usercustomize
        print(sys.from_site, sys.from_user, helper.HERE, sitecustomize.__file__)
        print(sys.modules["sitecustomize"] is sitecustomize, sys.path)
        """,
    )
    paths = {"PYTHONPATH": with_first(own)}
    stock = ran([*PYTHON, program], folder, env=environment(**paths))
    assert stock.stdout.startswith(f"{own}/sitecustomize.py {own}/usercustomize.py {own}/helper.py")
    got = ran([*RUN, program], folder, env=environment(**paths))
    assert (got.stdout, got.stderr) == (stock.stdout, stock.stderr)


def test_a_startup_module_that_fails_does_so_as_without_us(folder):
    written(folder / "sitecustomize.py", "raise ValueError('of my own')")
    written(folder / "program.py", "import sys; print('sitecustomize' in sys.modules)")
    paths = {"PYTHONPATH": with_first(folder)}
    stock = ran([*PYTHON, "program.py"], folder, env=environment(**paths))
    assert "of my own" in stock.stderr
    got = ran([*RUN, "program.py"], folder, env=environment(**paths))
    # `penstock run` itself is a Python that starts.
    assert (got.stdout, got.stderr) == (stock.stdout, stock.stderr * 2)


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_a_python_that_reads_no_environment_is_refused(option, folder):
    # As if Penstock were installed where each of them finds it.
    start = f"import sys; sys.path[:] = {sys.path!r}; from penstock.cli import main; main()"
    done = ran([*PYTHON, option, "-c", start, "run", "probe.py"], folder)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "penstock: `penstock run` needs PYTHONPATH and sitecustomize, which Python ignores under "
        "-E, -I and -S: leave out these options."
    ]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 2, "Missing argument"),
        (["--seed", "x", "probe.py"], 2, "--seed"),
        (["--seed", "-1", "probe.py"], 2, "--seed"),
        (["--workers", "many", "probe.py"], 1, 'must be a number from 0 on, or "auto"'),
        (["--backend", "gpu", "probe.py"], 2, "--backend"),
        (["--backend", "ray", "--workers", "auto", "probe.py"], 1, "Give a number"),
        (["--on-error", "ignore", "probe.py"], 2, "--on-error"),
        (["--report", "nowhere/page.html", "probe.py"], 1, "name a file in a folder that exists"),
        (["--trace", ".", "probe.py"], 1, "name a file in a folder that exists"),
        (["--sead", "3", "probe.py"], 2, "--sead"),
        (["--engine", "torch", "--seed", "3", "probe.py"], 1, "leave out --seed"),
    ],
)
def test_a_wrong_option_is_refused_before_the_program_starts(
    words, status, says, folder, monkeypatch, capsys
):
    monkeypatch.setattr(os, "execve", None)
    monkeypatch.chdir(folder)
    assert main(["run", *words]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err.splitlines()[-1]
