# SPDX-License-Identifier: Apache-2.0
"""`penstock state` says what is in a saved state, and runs nothing that is in a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Loader
from penstock.cli import main
from penstock.data import IterableDataset
from penstock.sampling import RandomSampler


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def state_after(loader, num_batches):
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    return loader.state_dict()


def read_bytes():
    """Return how many bytes this process has read by calls, not through mapped memory."""
    return int(Path("/proc/self/io").read_text().split()[1])


def loader_state():
    loader = Loader(np.arange(10_000), 8, shuffle=True, seed=7)
    loader.set_epoch(3)
    return state_after(loader, 2)


TEXT = """\
epoch 3, after 2 batches, 16 samples of all ranks
seed 7
length: 10,000
sampler: RandomSampler
    length: 10,000
    seed: 7
    source: 10,000
    replacement: False
global_batch_size: 8
drop_last: False
"""


def test_a_state_is_said_in_words(tmp_path, capsys):
    (tmp_path / "state.json").write_text(json.dumps(loader_state()))
    assert main(["state", f"{tmp_path}/state.json"]) == 0
    assert capsys.readouterr().out.startswith(TEXT)


def test_states_are_found_in_a_checkpoint_of_torch(tmp_path, capsys):
    sampler = RandomSampler(range(50), seed=1)
    indices = iter(sampler)
    next(indices)
    saved = {
        "model": {"weight": torch.zeros(3)},
        "loaders": [loader_state(), {"inner": sampler.state_dict()}],
        "stream": state_after(Loader(Stream(), 4), 1),
    }
    torch.save(saved, tmp_path / "run.pt")
    assert main(["state", f"{tmp_path}/run.pt"]) == 0
    out = capsys.readouterr().out
    assert f"loaders[0]:\n{TEXT}" in out
    assert "loaders[1].inner:\nepoch 0, after 1 item of all ranks\n" in out
    assert "stream:\nepoch 0, after 1 batch\n" in out
    assert "a stream: the positions of 1 worker\n" in out


class Runs:
    def __reduce__(self):
        return Path.touch, (Path("it-ran"),)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1, 2", "is neither JSON nor a checkpoint of torch"),
        (b'{"epoch": 3}', "holds no state of a Penstock loader"),
        (b"[" * 100_000, "is neither JSON nor a checkpoint of torch"),
        (json.dumps(loader_state() | {"fingerprint": []}).encode(), "holds no state of a Penstock"),
        (b"PK\x03\x04 cut off", "torch cannot read file as plain data"),
        (None, "torch cannot read file as plain data"),
    ],
)
def test_what_is_no_state_is_an_error_and_no_program(content, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content is None:
        torch.save({"loader": loader_state(), "other": Runs()}, "file")
    else:
        Path("file").write_bytes(content)
    assert main(["state", "file"]) == 1
    assert says in capsys.readouterr().err
    assert not Path("it-ran").exists()


def test_a_file_that_is_not_there_is_an_error(tmp_path, capsys):
    for path, says in ((tmp_path / "absent", "No such file"), (tmp_path, "a folder")):
        assert main(["state", f"{path}"]) == 1
        assert f"penstock: cannot read {path}: " in (said := capsys.readouterr().err)
        assert says in said


def test_the_weights_of_a_checkpoint_are_not_read(tmp_path, capsys):
    torch.save({"weights": torch.zeros(8 << 20), "loader": loader_state()}, tmp_path / "run.pt")
    before = read_bytes()
    assert main(["state", f"{tmp_path}/run.pt"]) == 0
    assert TEXT in capsys.readouterr().out
    assert read_bytes() - before < 8 << 20
