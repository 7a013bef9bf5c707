# SPDX-License-Identifier: Apache-2.0
"""examples/seeds: every claim of the seeding pages holds, and the README lists what is claimed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from tests.examples.programs import imported
from tests.support.processes import python

FOLDER = Path(__file__).parents[2] / "examples" / "seeds"
README = (FOLDER / "README.md").read_text("utf-8")
CLAIM = re.compile(r"^ ?\d+\. (.*)\n    (.*): (holds|DOES NOT HOLD|not compared)$", re.MULTILINE)
ROW = re.compile(r"^\| \d+ \| (.*?) \| .* \| (holds|DOES NOT HOLD|not compared) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def run():
    """The script, as a user runs it; small."""
    return python(FOLDER / "prove.py", "--quick", env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture
def modules():
    """The modules of the framework, without any claim entered."""
    with imported(FOLDER, ("proof", "prove")) as found:
        yield found


def test_every_claim_holds(run):
    found = CLAIM.findall(run.stdout)
    failed = [(text, said) for text, said, verdict in found if verdict == "DOES NOT HOLD"]
    assert failed == []
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    left_out = [text for text, _, verdict in found if verdict == "not compared"]
    assert left_out == (
        [] if torch.cuda.is_available() else [text for text in left_out if "CUDA" in text]
    )
    assert len(left_out) <= 1
    why = f", {len(left_out)} not compared (there is no CUDA here)" if left_out else ""
    said = rf"{len(found) - len(left_out)} hold, 0 do not{re.escape(why)}, in \d+ s"
    assert re.fullmatch(said, run.stdout.splitlines()[-1])
    last_line = re.search(r"`(\d+) hold, 0 do not, 1 not compared \(there is no CUDA", README)
    assert int(last_line[1]) == len(found) - 1


def test_the_readme_lists_the_claims(run):
    assert [text for text, _ in ROW.findall(README)] == [
        text for text, _, _ in CLAIM.findall(run.stdout)
    ]
    assert "DOES NOT HOLD" not in README


def test_a_claim_that_is_false_is_told_and_ends_with_status_1(modules, monkeypatch, capsys):
    proof, prove = modules["proof"], modules["prove"]

    def raises(_size):
        raise KeyError("seed")

    claims = [
        proof.Claim("page", "One is two", lambda _: proof.equal(one=1, two=2)),
        proof.Claim("page", "It can be shown", raises),
        proof.Claim("page", "One is one", lambda _: proof.equal(one=1, wanted=1)),
        proof.Claim("page", "There are GPUs", lambda _: proof.Proof("there are none", None)),
    ]
    monkeypatch.setattr(proof, "CLAIMS", claims)
    monkeypatch.setattr(prove, "PARTS", ())
    monkeypatch.setattr(sys, "argv", ["prove.py"])
    assert prove.main() == 1
    printed = capsys.readouterr().out
    assert CLAIM.findall(printed) == [
        ("One is two", "one: 1, two: 2", "DOES NOT HOLD"),
        ("It can be shown", "KeyError: 'seed'", "DOES NOT HOLD"),
        ("One is one", "one = wanted: 1", "holds"),
        ("There are GPUs", "there are none", "not compared"),
    ]
    assert re.search(
        r"^1 hold, 2 do not, 1 not compared \(there are none\), in \d+ s$", printed, re.M
    )
