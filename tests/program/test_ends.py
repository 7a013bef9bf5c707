# SPDX-License-Identifier: Apache-2.0
"""A program under `penstock run` ends as it does without; the summary comes last."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest
from tests.program.running import PYTHON, RUN, environment, ran, split, written

ENDS = {
    "sys.exit(3)": "import sys; sys.exit(3)",
    "sys.exit of a text": "import sys; sys.exit('enough')",
    "an exception": "def f(): raise ValueError('wrong')\ntry: f()\nexcept ValueError: 1 / 0",
    "a syntax error": "for x in",
    "an import that fails": "import nowhere.at_all",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit(5)": "import os; os._exit(5)",
    "an exception at exit": "import atexit\natexit.register(divmod, 1, 0)",
    "stdout that is closed": "import sys; print('x'); sys.stdout.close(); sys.exit(4)",
    "stderr that is closed": "import os, sys; os.close(2); sys.stderr.write('lost'); sys.exit(4)",
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_a_program_without_torch_ends_as_without_us(program, tmp_path):
    written(tmp_path / "program.py", program)
    stock = ran([*PYTHON, "program.py"], tmp_path)
    got = ran([*RUN, "program.py"], tmp_path)
    assert (got.returncode, got.stdout, got.stderr) == (
        stock.returncode, stock.stdout, stock.stderr,
    )  # fmt: skip


@pytest.mark.parametrize("words", [["nowhere.py"], ["-m", "nowhere"], ["-m", "nowhere.at.all"]])
def test_a_program_that_is_not_there_is_pythons_error(words, tmp_path):
    stock, got = ran([*PYTHON, *words], tmp_path), ran([*RUN, *words], tmp_path)
    assert stock.returncode in (1, 2)
    assert (got.returncode, got.stdout, got.stderr) == (
        stock.returncode, stock.stdout, stock.stderr,
    )  # fmt: skip


# Workers, and a loader that the traceback keeps alive.
TRAIN = """
import atexit, os, signal, sys
from torch.utils.data import DataLoader

class Numbers:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index

def train():
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=2):
        if batch[0] == 20:
            {end}

atexit.register(print, "the program's own end", file=sys.stderr)
train()
"""
ENDS_OF_TRAINING = {
    "its end": ("pass", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "an exception": ("raise ValueError('wrong')", 1),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "SIGTERM, handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); os.kill(os.getpid(), 15)",
        9,
    ),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.mark.parametrize(("end", "status"), ENDS_OF_TRAINING.values(), ids=ENDS_OF_TRAINING)
def test_a_training_ends_as_without_us_and_its_account_is_last(end, status, tmp_path):
    pytest.importorskip("torch")
    written(tmp_path / "train.py", TRAIN.format(end=end))
    files = ["--save", "run.json", "--report", "run.html", "--trace", "trace.json"]
    got = ran([*RUN, *files, "train.py"], tmp_path)
    program, said = split(got.stderr)
    assert (got.returncode, got.stdout) == (status, "")
    is_killed = status in (-signal.SIGKILL, -signal.SIGTERM)  # nothing of Python's runs any more
    for file in files[1::2]:
        assert (tmp_path / file).exists() != is_killed
    if is_killed:
        assert (program, said) == ("", [])
        return
    batches = 20 if status == 0 else 11
    assert said[0].startswith(
        f"penstock run: train.py:13: a loader of Numbers, 2 workers, {batches} batches. Waited "
    )
    assert program.endswith("the program's own end\n")
    traceback = program.removesuffix("the program's own end\n")
    traceback = re.sub(r"^ +[~^]+\n", "", traceback, flags=re.MULTILINE)  # Python 3.13 marks calls
    where = (
        f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 18, in <module>\n'
        f'    train()\n  File "{tmp_path}/train.py", line 15, in train\n    {end}\n'
    )
    shown = {1: f"{where}ValueError: wrong\n", -signal.SIGINT: f"{where}KeyboardInterrupt\n"}
    assert traceback == shown.get(status, "")


def test_a_process_that_cannot_be_written_to_ends_as_it_would(tmp_path):
    pytest.importorskip("torch")
    written(
        tmp_path / "train.py",
        """
        import os, sys
        from torch.utils.data import DataLoader
        print(len(list(DataLoader(range(20)))), flush=True)
        os.close(2) if sys.argv[1] == "closed" else None
        sys.exit(7)
        """,
    )
    closed = ran([*RUN, "train.py", "closed"], tmp_path)
    assert (closed.returncode, closed.stdout, closed.stderr) == (7, "20\n", "")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody_reads:
        command = [*RUN, "train.py", "open"]
        options = {"stderr": nobody_reads, "stdout": subprocess.PIPE, "env": environment()}
        piped = subprocess.run(command, cwd=tmp_path, check=False, **options)
    assert (piped.returncode, piped.stdout) == (7, b"20\n")


def test_a_process_forked_by_hand_says_nothing_of_its_parents_loaders(tmp_path):
    pytest.importorskip("torch")
    written(
        tmp_path / "train.py",
        """
        import os, sys
        from torch.utils.data import DataLoader
        list(DataLoader(range(20)))
        for ends in (lambda: sys.exit(3), lambda: list(DataLoader(range(11))) and sys.exit(4)):
            child = os.fork()
            if child == 0:
                ends()
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    got = ran([*RUN, "train.py"], tmp_path)
    assert (got.returncode, got.stdout) == (0, "3\n4\n")
    program, said = split(got.stderr)
    assert program == ""
    # That of the second child, then that of the process itself.
    assert [line.split(" Waited")[0] for line in said if line.startswith("penstock run: ")] == [
        "penstock run: train.py:5: a loader of range, 0 workers, 11 batches.",
        "penstock run: train.py:4: a loader of range, 0 workers, 20 batches.",
    ]


def test_an_interrupt_in_a_console_of_the_programs_own_is_not_its_end(tmp_path):
    pytest.importorskip("torch")
    written(
        tmp_path / "train.py",
        """
        import code
        from torch.utils.data import DataLoader
        list(DataLoader(range(20)))
        code.InteractiveInterpreter().runsource("raise KeyboardInterrupt")
        """,
    )
    assert ran([*RUN, "train.py"], tmp_path).returncode == 0
