# SPDX-License-Identifier: Apache-2.0
"""Cores are counted by affinity and quotas, and a user's limits are checked."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.insight.budgets import Auto, cores_allowed, cores_of_rank, local_ranks


@pytest.mark.parametrize(
    ("memberships", "files", "cores"),
    [
        ("", {}, 8),  # affinity alone
        ("0::/app\n", {"app/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/app\n", {"app/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/../host/path\n", {"cpu.max": "300000 100000\n"}, 3),  # a container's root
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
        (
            "4:cpu,cpuacct:/app\n",
            {"cpu/app/cpu.cfs_quota_us": "50000\n", "cpu/app/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            "4:cpu,cpuacct:/app\n",
            {"cpu/app/cpu.cfs_quota_us": "-1\n", "cpu/app/cpu.cfs_period_us": "100000\n"},
            8,
        ),
    ],
)
def test_cores_are_the_least_of_affinity_and_quotas(
    memberships, files, cores, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    texts = {"proc/self/cgroup": memberships} | {f"groups/{k}": v for k, v in files.items()}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores_allowed(tmp_path / "proc", tmp_path / "groups") == cores


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "2", True])
def test_a_cpu_budget_that_is_no_number_above_0_is_refused(value):
    with pytest.raises(ConfigError, match=r"^Auto\(cpu=\) must be a number of cores above 0, got "):
        Auto(cpu=value)


@pytest.mark.parametrize("value", [0, -5, "1GB", math.nan, math.inf, True])
def test_a_memory_budget_that_is_no_number_above_0_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"^Auto\(memory=\) must be a number of bytes above 0, got"
    ):
        Auto(memory=value)


@pytest.mark.parametrize("value", [2e8, np.int64(200_000_000), np.float32(2e8), 200_000_000])
def test_a_memory_budget_becomes_an_int(value):
    limits = Auto(memory=value)
    assert type(limits.memory) is int
    assert limits.memory == 200_000_000


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8,4"}, 1),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "-3"}, 1),
        ({"LOCAL_WORLD_SIZE": "two", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
    ],
)
def test_launchers_tell_how_many_share_the_machine(environ, ranks):
    assert local_ranks(environ) == ranks


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores_of_rank() == cores_allowed() / 4


def test_a_rank_that_is_bound_to_its_own_cores_has_them_all(monkeypatch):
    mine = os.sched_getaffinity(0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    # What a launcher does that has more cores than it leaves to each rank.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine | {1000} if pid else mine)
    assert cores_of_rank() == cores_allowed()
