# SPDX-License-Identifier: Apache-2.0
"""The code blocks of a page, and the program that a reader makes of them."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# What all programs of one test may take together: pytest ends the whole run after 120 s in a test.
DEADLINE_S = 95

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```[ \t]*$", re.MULTILINE | re.DOTALL)
_NAMED_ABOVE = re.compile(r"`([\w./-]+\.py)`\s*[:\uff1a]?\s*\Z")  # a colon, or a Chinese one
_NAMED_INSIDE = re.compile(r"# ([\w./-]+\.py)\n")
_GUARD = re.compile(r"^if __name__ == [\"']__main__[\"']:", re.MULTILINE)
_MARK = "\x1d"  # between what one block printed and the next
_SHELL = ("console", "sh", "bash")
# What a reader does once, and a test must not: installations, and folders of the reader's home.
_NOT_HERE = re.compile(r"(pip|make|python3? -m (venv|pip)|export|source)\b|\. |(mkdir|cd) (-p )?~")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: What stands behind the fence, as "python".
        body: Its text.
        file: The name of the file that it is, which stands above it or in its first line, or None.
        is_whole: Whether that name stands above it: the file is run by a command, or by itself.
    """

    language: str
    body: str
    file: str | None = None
    is_whole: bool = False

    @property
    def is_guarded(self):
        return _GUARD.search(self.body) is not None

    @property
    def promises(self):
        """The lines that it says it prints: comments at the margin, right below code."""
        promises = []
        after_code = False
        for line in self.body.splitlines():
            if after_code and line.startswith("# "):
                promises.append(line[2:])
            else:
                after_code = bool(line.strip()) and not line.startswith("#")
        return promises

    @property
    def commands(self):
        """The command lines of a block for the shell, whole, without their prompt."""
        joined = re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", self.body)
        lines = [line for line in joined.splitlines() if line.strip()]
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        return prompted or [line for line in lines if not line.startswith("#")]


def blocks_of(text):
    """Return the blocks of a page in its order."""
    blocks = []
    for fence in _FENCE.finditer(text):
        body = textwrap.dedent(fence[3])
        above = _NAMED_ABOVE.search(text[: fence.start()])
        inside = _NAMED_INSIDE.match(body)
        file = above or inside
        blocks.append(Block(fence[2], body, file[1] if file else None, above is not None))
    return blocks


def num_fences(text, language):
    """Return how many blocks of a language begin in `text`, however they end."""
    return len(re.findall(rf"^[ \t]*(?:```+|~~~+)[ \t]*{language}\b", text, re.MULTILINE))


def code_of(blocks):
    """Return the Python of a page without its comments, to compare it with a translation's."""
    return [ast.dump(ast.parse(block.body)) for block in blocks if block.language == "python"]


class Setup(NamedTuple):
    """What a page takes for granted.

    Attributes:
        before: Python that runs first, in the same program.
        replace: Pairs: what the page has, and what takes its place here.
        runs_commands: Whether its commands are run, too.
        skipped: Beginnings of commands that are not: what they need is not there.
    """

    before: str = ""
    replace: tuple[tuple[str, str], ...] = ()
    runs_commands: bool = False
    skipped: tuple[str, ...] = ()


def run(command, *, until, **options):
    """Run a program in a session of its own, of which nothing is left afterwards.

    Args:
        command: The program and its arguments.
        until: The end of the test's time, on the monotonic clock: the fixture `until`.
        options: As for `subprocess.Popen`.

    Returns:
        The `CompletedProcess`, with what was printed.

    Raises:
        AssertionError: it had not ended by then.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    is_late = False
    with subprocess.Popen(command, start_new_session=True, **options) as started:
        try:
            said = started.communicate(timeout=max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
                os.killpg(started.pid, signal.SIGKILL)
        if is_late:
            said = started.communicate()
    assert not is_late, f"{command} had not ended when the test's time was over:\n{said}"
    return subprocess.CompletedProcess(command, started.returncode, *said)


_HEAD = """
import subprocess as _subprocess
import sys as _sys


def _script(name):
    print(end="", flush=True)
    _subprocess.run([_sys.executable, name], check=True)


def _shell(command, *statuses):
    print(end="", flush=True)
    done = _subprocess.run(["bash", "-c", command])
    assert done.returncode in statuses, f"{command!r} ended with {done.returncode}"


def _begin(number):
    print(f"{chr(29)}{number}{chr(29)}", end="", flush=True)
"""


def run_page(text, folder, until, setup=None):
    """Run the Python of a page in `folder`, in its order and in one program, names shared.

    A block that is a whole script (it has the guard of a main script, or a file's name above it) is
    a program of its own; one with a name is run where a command of the page says so, or else in its
    place.

    Returns:
        What each block of Python printed, beside what it promises.

    Raises:
        AssertionError: a block raised, or a command failed.
    """
    setup = setup or Setup()
    for old, new in setup.replace:
        assert old in text, f"the page has no {old!r} any more"
        text = text.replace(old, new)
    blocks = blocks_of(text)
    program = folder / "page.py"
    program.write_text(_HEAD + setup.before + "".join(_lines_of(blocks, folder, setup)), "utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run(
        [sys.executable, program.name],
        until=until,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder), "HOME": str(folder)},
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    _, *parts = done.stdout.split(_MARK)
    printed = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))
    return [
        (printed[number].splitlines(), block.promises)
        for number, block in enumerate(blocks)
        if block.language == "python" and number in printed
    ]


def _lines_of(blocks, folder, setup):
    """Yield the program, and write the files that it is to run."""
    has_files = any(block.is_whole for block in blocks)
    commands = [c for block in blocks if block.language in _SHELL for c in block.commands]
    for number, block in enumerate(blocks):
        begin = f"\n_begin({number})\n"
        if block.language == "python":
            name = block.file or f"block_{number}.py"
            if block.file or block.is_guarded:
                (folder / name).write_text(block.body, "utf-8")
            if block.is_whole and any(f"python {name}" in command for command in commands):
                continue
            by_itself = block.is_whole or block.is_guarded
            yield begin + (f"_script({name!r})\n" if by_itself else block.body)
        elif block.language in _SHELL and (setup.runs_commands or has_files):
            yield begin
            for command in block.commands:
                if _NOT_HERE.match(command) or any(map(command.startswith, setup.skipped)):
                    continue
                # They end with 1 where they find something, as a page may show.
                statuses = (0, 1) if re.search("penstock (check|doctor)", command) else (0,)
                yield f"_shell({command!r}, *{statuses})\n"
