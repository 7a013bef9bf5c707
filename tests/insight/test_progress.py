# SPDX-License-Identifier: Apache-2.0
"""The progress bar, in real pseudo-terminals and in IPython's shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from tests.insight.screen import IMPORTS_FROM, PRELUDE, run, without_bar

from penstock.optional import install_command

pytest.importorskip("tqdm")

EPOCH = """
bar = open_progress("train")
if bar is None:
    print("no bar")
else:
    bar.begin(3, 8)
    for n in range(8):
        bar.advance(batch(n)._replace(num_failed=n // 3))
    bar.end()
"""
LAST_LINE = "train epoch 3: 8/8, 137 samples/s, 53 % waiting, 7 bad"


def test_the_last_line_says_what_the_epoch_was():
    got = run(EPOCH)
    assert [without_bar(line) for line in got.lines] == [LAST_LINE]
    assert got.returncode == 0
    assert "\x1b[?" not in got.written  # neither the cursor nor any mode is touched


def test_while_it_goes_the_line_is_of_the_last_seconds_of_a_resumed_epoch():
    got = run("""
        bar = open_progress()
        bar.begin(0, 4000, done=1000)
        for n in range(1000):
            bar.advance(batch(n))
        print("here")
        os._exit(0)
    """)
    # 4 batches of 32 samples per second, half of the time waiting.
    line = "epoch 0: 2000/4000, 128 samples/s, 50 % waiting"
    assert [without_bar(line) for line in got.lines] == ["here", line]
    assert re.search(r"\[[\d:]+<[\d:]+, ", got.lines[-1])  # elapsed and left


def test_an_epoch_of_unknown_length_has_no_bar():
    got = run("""
        bar = open_progress("stream")
        bar.begin(0, None)
        for n in range(4):
            bar.advance(batch(n))
        bar.end()
    """)
    (line,) = got.lines
    assert re.fullmatch(r"stream epoch 0: 4 \[[\d:]+, 146 samples/s, 57 % waiting\]", line)


def test_it_is_drawn_at_most_ten_times_a_second():
    got = run("""
        bar = open_progress()
        bar.begin(0, 10_000)
        for n in range(10_000):  # 10 s in steps of 1 ms
            bar.advance(batch(0)._replace(asked_ns=n * 10**6, given_ns=(n + 1) * 10**6))
        os._exit(0)
    """)
    assert 90 <= got.written.count("samples/s") <= 100


def test_it_goes_on_when_batches_come_more_slowly_than_before():
    got = run("""
        bar = open_progress()
        bar.begin(0, 10_000)
        for n in range(3000):  # 3 s in steps of 1 ms, then one each second
            bar.advance(batch(0)._replace(asked_ns=n * 10**6, given_ns=(n + 1) * 10**6))
        for n in range(3, 8):
            bar.advance(batch(0)._replace(asked_ns=n * 10**9, given_ns=(n + 1) * 10**9))
        os._exit(0)
    """)
    assert without_bar(got.lines[-1]).startswith("epoch 0: 3005/10000, ")


def test_what_others_print_stands_above_it_as_it_was_printed():
    got = run("""
        import logging, tqdm
        logging.basicConfig(format="%(message)s")  # takes hold of stderr before the bar does
        bar = open_progress("train")
        bar.begin(0, 8)
        for n in range(8):
            bar.advance(batch(n))
            print("loss", n, "[/bold] [red]")
            print("half", end="")
            print(" a line", "x" * 150, sep="")
            logging.warning("careful")
            sys.stderr.writelines(["one\\n", "two\\n"])
            tqdm.tqdm.write("tqdm's")
        bar.end()
        print("after")
    """)
    assert got.returncode == 0, got.written
    *lines, bar, after = got.lines
    assert without_bar(bar).startswith("train epoch 0: 8/8, ")
    assert after == "after"
    for n in range(8):
        printed = [f"loss {n} [/bold] [red]", "half a line" + "x" * 150, "careful", "one", "two"]
        assert lines[n * 6 : n * 6 + 6] == [*printed, "tqdm's"]


def test_half_a_line_keeps_it_away_until_the_line_ends():
    got = run("""
        bar = open_progress()
        bar.begin(0, None)
        print("Continue? ", end="", flush=True)
        for n in range(20):
            bar.advance(batch(n))
        print("# 20 shown")
        bar.advance(batch(20))
        print("on", end="")
        bar.end()
    """)
    question, on, bar = got.lines
    assert (question, on) == ("Continue? # 20 shown", "on")
    assert bar.startswith("epoch 0: 21 ")


@pytest.mark.parametrize("what", ["is killed", "presses Ctrl-C", "forgets it"])
def test_a_program_that_ends_leaves_the_line_where_it_was(what):
    then = {
        "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
        "presses Ctrl-C": "wait_for_ctrl_c()",
        "forgets it": "",
    }[what]
    got = run(
        f"""
        bar = open_progress("train")
        bar.begin(0, 100)
        for n in range(4):
            bar.advance(batch(n))
        print("begun")
        {then}
        """,
        press_ctrl_c=what == "presses Ctrl-C",
    )
    assert got.returncode == {"is killed": -9, "presses Ctrl-C": -2, "forgets it": 0}[what]
    assert got.lines[0] == "begun"
    assert without_bar(got.lines[-1]).startswith("train epoch 0: 4/100, ")
    if what != "is killed":
        assert got.written.endswith("\n")
    assert "\x1b[?" not in got.written


def test_a_forked_process_draws_nothing_and_prints_as_it_is():
    got = run("""
        bar = open_progress()
        bar.begin(0, 100)
        bar.advance(batch(0))
        if not os.fork():
            bar.advance(batch(9))
            print("child")
            bar.end()
            os._exit(0)
        os.wait()
        bar.end()
    """)
    assert "child\r\n" in got.written
    assert sum("epoch 0" in line for line in got.lines) <= 2
    assert got.lines[-1].startswith("epoch 0:   1%|")


def test_streams_are_afterwards_as_they_were():
    got = run("""
        raw = sys.stdout.write
        sys.stdout.write = loud = lambda text: raw(text.upper())
        outer, inner = open_progress(), open_progress()
        for bar in (outer, inner):
            bar.begin(0, 100)
            bar.advance(batch(0))
            print("while")
        inner.end()
        outer.end()
        assert sys.stdout.write is loud
        assert sys.stderr.write == type(sys.stderr).write.__get__(sys.stderr)
    """)
    assert got.returncode == 0, got.written
    assert got.lines[:2] == ["WHILE", "WHILE"]
    assert [without_bar(line)[:14] for line in got.lines[2:]] == ["epoch 0: 1/100"] * 2


@pytest.mark.parametrize("stdout", ["closed", "without attributes of its own"])
def test_stdout_may_be_anything(stdout):
    got = run(f"""
        class Slotted:
            __slots__ = ()
            isatty = sys.stdout.isatty
            write = sys.stdout.write
            flush = sys.stdout.flush

        if {stdout!r} == "closed":
            sys.stdout.close()
        else:
            sys.stdout = Slotted()
        bar = open_progress()
        bar.begin(0, 100)
        bar.advance(batch(0))
        bar.end()
    """)
    assert got.returncode == 0, got.written
    assert without_bar(got.lines[-1]).startswith("epoch 0: 1/100, ")


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1", "WORLD_SIZE": "2"}, {"TERM": "dumb"}],
    ids=str,
)
def test_it_is_quiet_where_it_would_not_be_seen(environment):
    assert run(EPOCH, **environment).lines == ["no bar"]


def test_nothing_is_written_where_stderr_is_piped():
    command = [sys.executable, "-c", PRELUDE + EPOCH]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": IMPORTS_FROM}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"no bar\n", b"")


def test_what_the_program_prints_can_be_piped_while_the_bar_is_watched(tmp_path):
    with (tmp_path / "out.txt").open("w") as out:
        got = run(EPOCH + "print('the result')\n", stdout=out)
    assert [without_bar(line) for line in got.lines] == [LAST_LINE]
    assert (tmp_path / "out.txt").read_text() == "the result\n"


@pytest.mark.parametrize("total", ["8", "None"])
@pytest.mark.parametrize("columns", [10, 40, 60, 300])
def test_the_line_fits_into_the_terminal(columns, total):
    (line,) = run(EPOCH.replace("8)", f"{total})", 1), columns=columns).lines
    assert len(line) <= columns
    assert line.startswith("train ep")


def test_a_terminal_that_writes_ascii_only_gets_ascii_only_and_a_name_is_one_line():
    program = EPOCH.replace('"train"', '"tr\\u65e5\\nain"')
    got = run(program, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert got.returncode == 0
    assert got.written.isascii()
    (line,) = got.lines
    assert re.match(r"tr\S+ ain epoch 3: 100%", line)


def test_a_terminal_that_hangs_up_does_not_end_the_training():
    got = run("""
        bar = open_progress()
        bar.begin(0, 100)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ours, theirs = os.openpty()
        os.dup2(theirs, 2)
        os.close(ours)
        for n in range(4):
            bar.advance(batch(n))
        bar.end()
        os._exit(5)
    """)
    assert got.returncode == 5


def test_without_tqdm_the_error_names_the_extra():
    got = run("""
        sys.modules["tqdm.auto"] = None
        from penstock.errors import MissingExtraError
        try:
            open_progress()
        except MissingExtraError as error:
            print(error)
    """)
    message = "".join(got.lines)
    assert message.startswith("progress=True needs tqdm, which is not installed.")
    assert install_command("progress") in message


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

class Kernel(InteractiveShell):  # as ipykernel's is one with an attribute `kernel`
    kernel = "here"

shell = Kernel.instance()
shell.run_cell('''
from penstock import Loader
for batch in Loader(range(40), 4, progress=True):
    pass
''')
print("the cell has ended", file=sys.stderr)
"""


def test_in_a_notebook_the_bar_is_drawn():
    pytest.importorskip("IPython")
    command = [sys.executable, "-c", PRELUDE + NOTEBOOK]
    environment = {**os.environ, "PYTHONPATH": IMPORTS_FROM}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *bar, last = done.stderr.replace("\r", "\n").splitlines()
    assert last == "the cell has ended"
    assert without_bar(bar[-1]).startswith("epoch 0: 10/10, ")


def test_a_bar_leaves_the_start_method_of_multiprocessing_open():
    got = run(
        EPOCH
        + """
    import multiprocessing
    print(multiprocessing.get_start_method(allow_none=True))
    """.replace("\n    ", "\n")
    )
    assert got.lines[-1] == "None"
