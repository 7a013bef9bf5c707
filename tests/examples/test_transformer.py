# SPDX-License-Identifier: Apache-2.0
"""examples/transformer: the same losses packed and padded, on 1 rank and 2, killed and not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed import launching
from tests.distributed.launching import environment
from tests.examples.programs import imported, run
from tests.support.processes import completed

FOLDER = Path(__file__).parents[2] / "examples" / "transformer"
TORCHRUN = (*launching.TORCHRUN, "--standalone", "--nproc-per-node", 2)
STEPS = 12
OPTIONS = ("--steps", STEPS, "--save-every", 5, "--rows", 4, "--row-tokens", 128)
OPTIONS += ("--width", 64, "--layers", 1, "--print-every", 1)

IN_PROGRAMS = ["tokenizers", "matplotlib"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    run(FOLDER / "texts.py", folder, "--num-files", 40, "--vocabulary-size", 400)
    return folder


def command_of(texts, out, *options, launcher=(sys.executable,)):
    command = (*launcher, FOLDER / "train.py", texts, "--out", out, *OPTIONS, *options)
    return [str(part) for part in command]


def history_of(out):
    lines = torch.load(out / "checkpoint.pt")["history"]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def trained(texts, out, *options, launcher=(sys.executable,)):
    """Train; return the line of each step, without the time that it took."""
    done = completed(command_of(texts, out, *options, launcher=launcher), env=environment())
    assert done.returncode == 0, done.stderr
    return history_of(out)


@pytest.fixture(scope="module")
def packed(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed")
    return out, trained(texts, out)


@pytest.fixture(scope="module")
def mixture(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("mixture")
    return out, trained(texts, out, "--data", "mixture")


def assert_about_equal(history, other):
    assert [line["step"] for line in history] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in history] == [line["tokens"] for line in other]
    for line, same in zip(history, other, strict=True):
        assert line == pytest.approx(same, rel=1e-4)


def test_the_loss_falls(packed, mixture):
    for _, history in (packed, mixture):
        assert history[-1]["loss"] < history[0]["loss"] - 0.3
        assert [line["step"] for line in history if "prose" in line] == [5, 10, 12]


def test_padded_batches_of_the_same_documents_have_the_same_losses(texts, packed, tmp_path):
    assert_about_equal(trained(texts, tmp_path, "--data", "padded"), packed[1])


@pytest.mark.parametrize("data", ["packed", "mixture"])
def test_a_run_that_was_killed_goes_on_with_the_same_losses(request, texts, data, tmp_path):
    options = ("--data", data)
    killed = subprocess.Popen(
        command_of(texts, tmp_path, *options), stdout=subprocess.PIPE, env=environment()
    )
    with killed:
        for line in killed.stdout:
            if line.startswith(b"step 7 "):
                killed.kill()
    assert killed.returncode == -9
    assert len(history_of(tmp_path)) == 5
    history = trained(texts, tmp_path, *options, "--resume", "--workers", 1)
    assert history == request.getfixturevalue(data)[1]


@pytest.mark.parametrize("data", ["packed", "mixture"])
def test_two_ranks_have_the_losses_of_one_and_go_on_where_it_ended(request, texts, data, tmp_path):
    options = ("--data", data)
    trained(texts, tmp_path, *options, "--max-steps", 5)
    history = trained(texts, tmp_path, *options, "--resume", launcher=TORCHRUN)
    assert_about_equal(history, request.getfixturevalue(data)[1])


def test_the_losses_are_drawn(packed, mixture, tmp_path):
    image = tmp_path / "losses.svg"
    run(FOLDER / "plot_losses.py", packed[0], packed[0], mixture[0], image)
    assert "<svg" in image.read_text()


def test_docstrings_and_code_are_split():
    source = '"""Of a module."""\n\n@f\ndef one(x):\n    """Doc\n    string."""\n    return x\n'
    with imported(FOLDER, ("texts",)) as modules:
        assert list(modules["texts"].split_up(source)) == [
            ("prose", "Of a module."),
            ("prose", "Doc\nstring."),
            ("code", "def one(x):\n    return x\n"),
        ]


def test_nothing_to_resume_is_told_in_a_line(texts, tmp_path):
    done = completed(command_of(texts, tmp_path, "--resume"))
    assert (done.returncode, done.stderr) == (
        1,
        f"--resume: there is no {tmp_path / 'checkpoint.pt'}\n",
    )


def test_image_text_pairs_are_learned_and_their_cost_is_balanced():
    printed = run(FOLDER / "image_text.py", "--steps", 20)
    by_tokens, by_cost = map(float, re.findall(r"one is (\S+)% above the mean", printed))
    assert by_cost < 0.1 < by_tokens
    first, last = map(float, re.findall(r"loss (\S+),", printed))
    assert last < first - 0.3


def test_an_image_reaches_the_logits_of_its_own_document_and_of_no_other():
    with imported(FOLDER, ("model", "image_text")) as modules:
        example = modules["image_text"]
        pairs = example.Pairs()
        batch = example.collated([pairs[index] for index in range(6)])
        torch.manual_seed(0)
        model = example.ImageText().eval()
    assert int(batch["document_ids"].max()) > 0
    assert batch["cost"].tolist() == pairs.costs[:6].tolist()
    with torch.inference_mode():
        before = model(batch)
        batch["patches"][int(pairs.num_patches[0]) :][: pairs.num_patches[1]] += 1
        changed = (model(batch) != before).any(dim=2)
    assert changed.nonzero()[:, 0].unique().tolist() == [0]
    assert batch["document_ids"][changed].unique().tolist() == [1]
    assert int(changed.sum()) == pairs.lengths[1]
