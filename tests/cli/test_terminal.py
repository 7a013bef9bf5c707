# SPDX-License-Identifier: Apache-2.0
"""One function writes to the terminal: names of strangers command none, and stdout may be gone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.cli import main

cv2 = pytest.importorskip("cv2")
pytest.importorskip("rich")

PACKAGE = Path(penstock.__file__).parent
# Colours, the bell, a title, C1 as one character and as a bare byte, a bidi override, and lines of
# its own; and what has to stay readable.
HOSTILE = "é\x1b[31m\x07\x1b]0;x\x1b\\\x9b2J\u202e\npenstock: all is well\r日本"
FILE = f"{HOSTILE}\udc9b2J"


# The contract


def _writes_itself(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "print"
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id in ("typer", "click"):
        return node.attr in ("echo", "secho")
    is_stream = isinstance(owner, ast.Attribute) and owner.attr.strip("_") in ("stdout", "stderr")
    return is_stream and node.attr in ("write", "writelines", "flush", "buffer")


def test_no_module_of_the_commands_or_of_insight_writes_to_a_stream_itself():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for folder in ("cli", "insight")
        for path in (PACKAGE / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if _writes_itself(node)
    ]
    assert found == []


def test_rich_is_for_bars_alone_which_show_numbers():
    modules = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"^\s*(from|import) rich\b", path.read_text(), re.MULTILINE)
    ]
    assert modules == ["cli/terminal.py"]


# Names


def image(path, side=32):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(side).integers(0, 255, (side, side, 3), np.uint8)
    path.write_bytes(cv2.imencode(".png", noise)[1].tobytes())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with class folders, and much that is named by a stranger."""
    folder = tmp_path / "images"
    for number in range(4):
        image(folder / HOSTILE / f"{number}.png")
        image(folder / "b" / f"{number}.png")
    (folder / "b" / f"{FILE}.png").write_bytes(b"\x89PNG no image")
    (folder / "b" / f"{FILE}.doc").write_bytes(b"")
    image(tmp_path / "voc" / "0.png")
    voc = "<annotation><filename>0.png</filename><object><name>x</name></object></annotation>"
    (tmp_path / "voc" / f"{FILE}.xml").write_text(voc[:-5])
    line = HOSTILE.translate(dict.fromkeys(b"\n\r\\ "))  # a space would be another column
    (tmp_path / "list.txt").write_text(f"{line}.png {line}\n")
    code = (
        "import logging, warnings\n"
        f"HOSTILE = {HOSTILE!r}\n"
        "class Raises:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): raise ZeroDivisionError(HOSTILE)\n"
        "    def describe(self, index): return HOSTILE\n"
        "def warns():\n"
        "    warnings.warn(HOSTILE)\n"
        "    logging.getLogger('penstock').warning(HOSTILE)\n"
        "    return Raises()\n"
        "def leaves(): raise SystemExit(HOSTILE)\n"
    )
    (tmp_path / "theirs.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("theirs", None)


QUICK = ["--workers", "0", "--batches", "4"]
NAMED = {
    "check": ["check", "images"],
    "check a file that is not there": ["check", FILE],
    "check a broken annotation": ["check", "voc"],
    "check a list": ["check", "list.txt"],
    "check a store": ["check", f"lmdb:{FILE}"],
    "pack": ["pack", "images", "out.lmdb", "--skip-bad", "--workers", "0"],
    "pack what is not there": ["pack", FILE, "out.lmdb"],
    "pack what raises": ["pack", "theirs:Raises", "out.lmdb", "--workers", "0"],
    "pack what warns and logs": ["pack", "theirs:warns", "out.lmdb", "--workers", "0"],
    "pack what leaves": ["pack", "theirs:leaves", "out.lmdb"],
    "convert": ["convert", "voc", "out", "--to", "yolo"],
    "convert a list": ["convert", "image-list:list.txt", "out", "--to", "voc"],
    "split": ["split", "lists", "--into", "train=0.5,val=0.5", "--stratify"],
    "stats": ["stats", "images"],
    "view": ["view", "images", "-n", "9", "--output", f"{HOSTILE}.png"],
    "view what raises": ["view", "theirs:Raises", "--output", "a.png"],
    "tune what raises": ["tune", "theirs:Raises", *QUICK, "--batch-size", "2"],
    "report a trace": ["report", f"{FILE}.json"],
    "explain": ["explain", FILE],
    "a wrong option": ["check", f"--{FILE}"],
    "a wrong command": [FILE],
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("arguments", NAMED.values(), ids=NAMED)
def test_a_name_stays_in_its_line_and_commands_no_terminal(arguments, here, capsys):
    if arguments[0] == "split":
        (here / "images").rename("lists")
        for suffix in ("png", "doc"):
            os.unlink(f"lists/b/{FILE}.{suffix}")  # lists are UTF-8
    main(arguments)
    shown = capsys.readouterr()
    assert_harmless(shown.out + shown.err)


def assert_harmless(text):
    assert [c for c in text if not c.isprintable() and c not in "\n\t"] == []
    # A traceback has the lines of its message, at the margin.
    if "Traceback" not in text:
        assert not re.search("^penstock: all is well", text, re.MULTILINE)
    assert "é" in text
    assert "日本" in text


# stdout

CLOSED = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("how", ["full", "closed", "no reader"])
@pytest.mark.parametrize(
    "arguments",
    [["check", "images"], ["stats", "images", "--json"], ["check", "-h"]],
    ids=["check", "json", "help"],
)
def test_stdout_that_takes_no_more_is_one_line_and_its_own_status(how, arguments, here):
    command = [sys.executable, "-m", "penstock", *arguments]
    if how == "closed":
        command = [sys.executable, "-c", CLOSED, *command[1:]]
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    out = {"full": full, "closed": None, "no reader": writer}[how]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(full)
    os.close(writer)
    reason = {"full": "No space left on device", "closed": "it is closed"}.get(how, "Broken pipe")
    if arguments[-1] == "-h" and how != "full":  # typer's own: nothing is lost
        assert done.stderr == ""
        assert done.returncode == (74 if how == "no reader" else 0)
        return
    said = done.stderr.splitlines()
    assert said[-1] == f"penstock: cannot write to stdout: {reason}."
    assert len([line for line in said if "looked at" not in line and "broken" not in line]) == 1
    assert done.returncode == 74


def test_a_closed_stderr_changes_nothing(here):
    close = CLOSED.replace("os.close(1)", "os.close(2)")
    command = [sys.executable, "-m", "penstock", "check", "images/b"]
    quiet = [sys.executable, "-c", close, *command[1:]]
    done = subprocess.run(quiet, capture_output=True, text=True, timeout=60)
    usual = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (usual.returncode, usual.stdout)


# Modules in the current folder


def run_script(folder, *arguments):
    """Run a command as a user does, in a folder: by a script that lies elsewhere."""
    script = folder / "bin" / "penstock"
    script.parent.mkdir()
    code = (
        "import sys\nfrom penstock.cli import main\nif __name__ == '__main__': sys.exit(main())\n"
    )
    script.write_text(code)
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


THEIRS = """
import multiprocessing
import random

def method():
    multiprocessing.set_start_method({method!r}, force=True)
    return Numbers()

class Numbers:
    def __len__(self): return 8
    def __getitem__(self, index):
        import their_helper
        assert multiprocessing.current_process().name != "MainProcess"
        return their_helper.twice(index)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_find_the_users_module_and_take_no_other_from_its_folder(tmp_path, method):
    (tmp_path / "their_data.py").write_text(THEIRS.format(method=method))
    (tmp_path / "their_helper.py").write_text("def twice(index): return 2 * index\n")
    (tmp_path / "multiprocessing.py").write_text("open('imported', 'w')\n")
    options = ["--workers", "1", "--batches", "2", "--batch-size", "2", "--rounds", "1"]
    done = run_script(tmp_path, "tune", "their_data:method", *options)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()


# Files that commands write


def test_a_sheet_that_there_is_no_room_for_leaves_the_file_before(here, capsys, monkeypatch):
    written = here / "drawn.png"
    written.write_bytes(b"before")
    monkeypatch.setattr("os.replace", raise_full)
    assert main(["view", "images/b", "--output", str(written)]) == 1
    assert f"{written}: No space left on device." in capsys.readouterr().err
    assert written.read_bytes() == b"before"
    assert list(here.glob(".*")) == []


def raise_full(*_):
    raise OSError(28, "No space left on device")
