# SPDX-License-Identifier: Apache-2.0
"""A process group knows the rank, or else torchrun's variables do, or else there is one process."""

import os
import subprocess
import sys

import pytest

from penstock.distributed import Rank, current_rank
from penstock.errors import ConfigError

THROUGH_A_GROUP = """
import sys
import torch.distributed as dist
from penstock.distributed import current_rank

print(*current_rank())
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
print(*current_rank())
dist.destroy_process_group()
print(*current_rank())
"""


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_a_process_alone_is_rank_0_of_1():
    assert current_rank() == Rank(rank=0, world_size=1)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 4), (3, 4), (999, 1000)])
def test_the_variables_of_torchrun_count(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert current_rank() == (rank, world_size)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_one_variable_without_the_other_says_nothing(monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert current_rank() == (0, 1)


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [("4", "4"), ("-1", "4"), ("0", "0"), ("0", "-2"), ("one", "4"), ("1", ""), ("1.0", "4")],
)
def test_variables_that_contradict_each_other_are_refused_with_their_values(
    monkeypatch, rank, world_size
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ConfigError) as caught:
        current_rank()
    assert str(caught.value) == (
        f"the environment has RANK={rank!r} and WORLD_SIZE={world_size!r}, but RANK should be an "
        "integer from 0 to WORLD_SIZE - 1. torchrun sets both; unset them in a process that trains "
        "alone."
    )


def test_a_process_group_counts_more_than_the_variables_for_as_long_as_it_is_there(tmp_path):
    pytest.importorskip("torch")
    environment = {**os.environ, "RANK": "3", "WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", THROUGH_A_GROUP, str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split("\n")[:3] == ["3 4", "0 1", "3 4"]
