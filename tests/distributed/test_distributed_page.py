# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/distributed.md shows runs, under torchrun too, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.distributed.launching import TORCHRUN, environment, started
from tests.support.processes import ended

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "guide" / "distributed.md"
SCRIPT = "# train.py\n"
# Runs the script. In the first try rank 0 is killed in its fourth save, with the file half written.
KILLED_IN_A_SAVE = """
import os, runpy, signal
import torch

saves, save = [], torch.save

def save_or_die(*arguments):
    saves.append(arguments)
    save(*arguments)
    if len(saves) == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

torch.save = save_or_die
runpy.run_path("train.py", run_name="__main__")
"""

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def said_in(block):
    return re.findall(r"^# (?!train\.py)(.*)$", block, re.MULTILINE)


def test_the_python_of_the_page_runs_and_prints_what_it_says(capsys):
    pytest.importorskip("torch")
    names, num_lines = {}, 0
    for block in blocks():
        if block.startswith(SCRIPT):
            continue
        exec(compile(block, str(PAGE), "exec"), names)
        said = said_in(block)
        assert capsys.readouterr().out.splitlines() == said
        num_lines += len(said)
    assert num_lines == 4


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_script_of_the_page_runs_on_two_ranks_and_goes_on_where_it_was(tmp_path, is_killed):
    pytest.importorskip("torch")
    script = [block for block in blocks() if block.startswith(SCRIPT)]
    assert len(script) == 4
    (tmp_path / "train.py").write_text("\n".join(script))
    (tmp_path / "killed.py").write_text(KILLED_IN_A_SAVE)
    text = PAGE.read_text(encoding="utf-8")
    ((variable, options),) = re.findall(r"^\$ (\w+)=1 torchrun (.*) train\.py$", text, re.MULTILINE)
    process = started(
        [*TORCHRUN, *options.split(), "killed.py" if is_killed else "train.py"],
        folder=tmp_path,
        name="printed",
        cwd=tmp_path,
        env=environment(**{variable: "1"}),
    )
    assert ended([process]) == [0], (tmp_path / "printed.txt").read_text()
    printed = (tmp_path / "printed.txt").read_text().splitlines()
    found = [line for line in printed if re.match(r"\d+ |batches of|goes on", line)]
    said = [line for block in script for line in said_in(block)]
    # 16 batches an epoch, a save after 5: the fourth is the first of the second epoch.
    again = [*said[:-1], "goes on with epoch 0 batch 15"] if is_killed else []
    assert found == [*said, *again]


def test_links_lead_to_pages():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]+)?\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target
