# SPDX-License-Identifier: Apache-2.0
"""examples/imagenet: five lines between the two programs, and not a bit between what they train."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.distributed import launching
from tests.distributed.launching import environment
from tests.support.processes import completed

FOLDER = Path(__file__).parents[2] / "examples" / "imagenet"
README = FOLDER / "README.md"
CLASSES = ("dress", "hat", "pants", "shirt")
OPTIONS = ("--arch", "tiny", "--size", 48, "--epochs", 2, "--batch-size", 6, "--print-every", 1)
TORCHRUN = (*launching.TORCHRUN, "--standalone")
STEPS = 6  # of an epoch: 32 images in sixes


@pytest.fixture(scope="module")
def clothing(data_dir, tmp_path_factory):
    """Eight photos of each of four classes, made small, and two to validate."""
    folder = tmp_path_factory.mktemp("clothing")
    for part, source, count in (("train", "train", 8), ("val", "validation", 2)):
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
            for path in sorted((data_dir / "clothing" / source / name).iterdir())[:count]:
                with Image.open(path) as image:
                    image.resize((80, 64)).save(folder / part / name / f"{path.stem}.png")
    return folder


def trained(program, data, checkpoint, *options, ranks=0):
    """Run a program; what it saved, and the losses and results that it printed."""
    launcher = (*TORCHRUN, "--nproc-per-node", ranks) if ranks else (sys.executable,)
    command = [*launcher, FOLDER / program, data, *OPTIONS]
    command += ["--checkpoint", checkpoint, *options]
    done = completed([str(part) for part in command], env=environment())
    assert done.returncode == 0, done.stderr
    said = re.findall(r"epoch \d+, step \d+|loss \S+|validation: .*", done.stdout)
    return torch.load(checkpoint), said


def assert_same_weights(one, other):
    assert one["epoch"] == other["epoch"]
    assert one["model"].keys() == other["model"].keys()
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name


def programs():
    return [(FOLDER / name).read_text().splitlines() for name in ("main_torch.py", "main.py")]


def test_five_lines_differ():
    lines = list(difflib.unified_diff(*programs(), lineterm=""))[2:]
    assert sum(line.startswith("+") for line in lines) == 5
    assert sum(line.startswith("-") for line in lines) == 1  # the import


def test_the_readme_shows_what_differs():
    lines = difflib.unified_diff(*programs(), "main_torch.py", "main.py", lineterm="")
    assert "```diff\n" + "\n".join(lines) + "\n```\n" in (FOLDER / "README.md").read_text()


def test_the_same_seed_trains_the_same_network_with_both_loaders(clothing, tmp_path):
    options = ("--seed", 1, "--workers", 2)
    theirs, said = trained("main_torch.py", clothing, tmp_path / "torch.pt", *options)
    ours, told_by_ours = trained("main.py", clothing, tmp_path / "penstock.pt", *options)
    assert said == told_by_ours
    assert len(said) == 2 * (2 * STEPS + 1)  # step and loss of each, and the validation
    assert said[-1].endswith("of 8 right")
    assert_same_weights(theirs, ours)


def test_under_torchrun_too(clothing, tmp_path):
    options = ("--seed", 1, "--workers", 1, "--epochs", 1)
    theirs, said = trained("main_torch.py", clothing, tmp_path / "torch.pt", *options, ranks=2)
    ours, told_by_ours = trained("main.py", clothing, tmp_path / "penstock.pt", *options, ranks=2)
    assert said == told_by_ours
    assert said[-1].endswith("of 8 right")
    assert_same_weights(theirs, ours)


def test_a_run_that_was_interrupted_in_mid_epoch_ends_as_if_it_had_not_been(clothing, tmp_path):
    options = ("--seed", 1, "--data-seed", 3)
    whole, said = trained("main.py", clothing, tmp_path / "whole.pt", *options, "--workers", 2)
    place = tmp_path / "parts.pt"
    cut, before = trained("main.py", clothing, place, *options, "--workers", 0, "--max-steps", 4)
    assert (cut["epoch"], cut["loader"]["epoch"], cut["loader"]["batches"]) == (0, 0, 4)
    again = ("--data-seed", 3, "--workers", 1, "--resume")  # another seed of torch: it is not asked
    parts, after = trained("main.py", clothing, place, *again)
    assert_same_weights(whole, parts)

    def losses(lines):
        return [line for line in lines if not line.startswith("epoch")]

    assert losses(before) + losses(after) == losses(said)


def test_another_number_of_ranks_goes_on_in_mid_epoch(clothing, tmp_path):
    options = ("--seed", 1, "--data-seed", 3, "--workers", 0, "--epochs", 1)
    place = tmp_path / "parts.pt"
    trained("main.py", clothing, place, *options, "--max-steps", 3, ranks=3)
    saved, said = trained("main.py", clothing, place, *options, "--resume", ranks=2)
    assert saved["epoch"] == 1
    assert sum(line.startswith("epoch") for line in said) == STEPS - 3


def test_the_order_of_one_process_does_not_go_on_with_ranks(clothing, tmp_path):
    place = tmp_path / "one.pt"
    trained("main.py", clothing, place, "--data-seed", 3, "--workers", 0, "--max-steps", 3)
    with pytest.raises(AssertionError, match=r"StateError: .* orders its samples otherwise"):
        trained("main.py", clothing, place, "--data-seed", 3, "--workers", 0, "--resume", ranks=2)


def test_the_readmes_commands_run_one_after_the_other(clothing, tmp_path):
    (tmp_path / "imagenet").symlink_to(clothing)
    for program in FOLDER.glob("*.py"):
        (tmp_path / program.name).symlink_to(program)
    (commands,) = re.findall(r"^```console\n(.*?)^```", README.read_text(), re.M | re.S)
    steps = []
    for command in commands.removeprefix("$ ").split("\n$ "):
        name, *words = command.split()
        assert name in ("python", "torchrun")
        launcher = TORCHRUN if name == "torchrun" else (sys.executable,)
        options = map(str, (*OPTIONS, "--workers", 0, "--max-steps", 4))
        done = completed([*launcher, *words, *options], cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stderr
        steps.append(re.findall(r"epoch (\d+), step (\d+)", done.stdout))
    assert [len(said) for said in steps] == [4] * 4
    # Two steps were left of the first epoch.
    assert steps[1] == steps[3] == [("0", "1"), ("0", "2"), ("1", "1"), ("1", "2")]


@pytest.mark.parametrize("program", ["main.py", "main_torch.py"])
@pytest.mark.parametrize(
    ("folders", "options", "said"),
    [
        (("train", "validation"), (), "{}: no folder val; there are train, validation"),
        ((), (), "{}: no folder train; there are none"),
        (("train", "val"), ("--resume",), "--resume: there is no checkpoint.pt"),
    ],
)
def test_what_is_missing_is_told_in_a_line(tmp_path, program, folders, options, said):
    for name in folders:
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [sys.executable, FOLDER / program, tmp_path, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (1, said.format(tmp_path) + "\n")
