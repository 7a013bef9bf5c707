# SPDX-License-Identifier: Apache-2.0
"""docs/quickstart.md followed to the letter, in an empty folder: it prints what it says.

Its trainings take most of a minute: `make docs` runs this.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.docs import pages

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"

pytestmark = pytest.mark.docs

BLOCK = re.compile(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What another machine may have otherwise: percentages, times, rates, sizes of packed files.
VARIES = re.compile(r"\d+%|[\d.,]+ (?:s|kB|MB|MB/s|records/s)\b")


def comparable(text: str) -> list[str]:
    return VARIES.sub("#", text).splitlines()


def run(commands: str, folder: Path, until: float) -> str:
    """Run shell commands as a reader would; returns what they print, stderr left out."""
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = pages.run(
        ["bash", "-e", "-c", commands],
        until=until,
        cwd=folder,
        # Two tests on two cores: torch's threads would wait for each other far longer than compute.
        env={**os.environ, **here, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"
    return done.stdout


SECTIONS = {
    "A first loader": 1,
    "Train, stop, resume": 2,
    "A broken photo": 2,
    "Pack the photos": 2,
    "Why does my GPU wait?": 0,
}


def blocks_of(heading: str) -> list[tuple[str, str, str]]:
    """File name or "", kind, and text of each block of a section."""
    text = PAGE.read_text(encoding="utf-8")
    return BLOCK.findall(text.split(f"\n## {heading}\n")[1].split("\n## ")[0])


# The last three go on from one another; they and the others need the photos alone.
@pytest.mark.parametrize("sections", [[0], [1], [2, 3, 4]])
def test_what_the_page_says_is_what_comes_out(sections, tmp_path, until):
    pytest.importorskip("lmdb")
    assert follow("Photos", tmp_path, until) == 1
    for number in sections:
        heading = list(SECTIONS)[number]
        assert follow(heading, tmp_path, until) == SECTIONS[heading]


def follow(heading: str, folder: Path, until: float) -> int:
    """Do what a section says, and compare what it prints; returns how often that was done."""
    printed, compared = "", 0
    for name, kind, body in blocks_of(heading):
        if kind == "python":
            (folder / name).write_text(body)
        elif kind == "sh":
            printed = run(body, folder, until)
        # the verdict, whose words follow from the figures
        elif body.startswith("The main process"):
            assert re.search(r"The main process .*\d+ %", printed)
        else:
            # `check` has its last line on stderr, which a terminal shows as well.
            said = [line for line in comparable(body) if " broken, " not in line]
            assert said == comparable(printed)
            compared += 1
    return compared


def test_every_section_with_blocks_is_followed():
    headings = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    with_blocks = {heading for heading in headings if blocks_of(heading)}
    # Nothing is installed here: the installation is tried by hand, in an environment of its own.
    assert with_blocks == {*SECTIONS, "Install", "Check the machine", "Photos"}


def test_the_doctor_runs_and_knows_the_lines_of_the_page(tmp_path, until):
    (_, _, command), (_, _, shown) = blocks_of("Check the machine")
    output = run(command, tmp_path, until)
    checks = re.findall(r"^  (?:ok|ADVICE|PROBLEM) +(\S.*?)  ", shown, re.MULTILINE)
    assert len(checks) == 5
    for check in checks:
        assert re.search(rf"^  (?:ok|ADVICE|PROBLEM) +{re.escape(check)}  ", output, re.MULTILINE)
    assert re.search(r"^problems: \d+, advice: \d+$", output, re.MULTILINE)
