# SPDX-License-Identifier: Apache-2.0
"""What is read about memory and descriptors is what the system means by it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock import Loader
from penstock.errors import ConfigError
from penstock.system_limits import (
    SystemMemory,
    advice_on_kill,
    check_descriptors,
    descriptors_needed,
    memory_now,
    memory_warning,
)

MB = 1_000_000
GB = 1000 * MB
MEMINFO = "MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:    5000000 kB\n"
NO_LIMIT_V1 = "9223372036854771712"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def read(tmp_path, memberships, cgroups):
    proc = {"meminfo": MEMINFO, "self/cgroup": memberships}
    write(tmp_path / "proc", proc)
    write(tmp_path / "cgroup", cgroups)
    return memory_now(tmp_path / "proc", tmp_path / "cgroup")


def group_v2(limit, used, cache=0, kills=0, folder="."):
    files = {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 9\n",
        "memory.events": f"low 0\nhigh 0\nmax 4\noom 9\noom_kill {kills}\noom_group_kill 0\n",
    }
    return {f"{folder}/{name}": text for name, text in files.items()}


def group_v1(limit, used, cache=0, kills=0):
    return {
        "memory/memory.limit_in_bytes": f"{limit}\n",
        "memory/memory.usage_in_bytes": f"{used}\n",
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}\n",
        "memory/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    }


def test_where_the_system_has_no_figures_nothing_is_known(tmp_path):
    memory = memory_now(tmp_path, tmp_path)
    assert memory == SystemMemory()
    assert memory.left_bytes is None
    assert advice_on_kill(memory, None, None).startswith("Something killed it from outside")
    assert memory_warning(10**15, 100, memory) is None


NESTED = (
    group_v2("max", 100 * MB, kills=1, folder="jobs/mine/inner")
    | group_v2(4 * GB, 1 * GB, kills=5, folder="jobs/mine")
    | group_v2(8 * GB, 7 * GB, cache=1 * GB, kills=9, folder="jobs")
)
OF_HOST = "9:name=systemd:/docker/abc\n4:cpu,memory:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("memberships", "cgroups", "limit", "left", "kills"),
    [
        ("", {}, None, 5_120_000_000, None),  # the machine alone
        ("0::/\n", group_v2(2 * GB, 1500 * MB, cache=600 * MB, kills=3), 2 * GB, 1100 * MB, 3),
        # the group nearest to its limit, and the own group's kills
        ("0::/jobs/mine/inner\n", NESTED, 8 * GB, 2 * GB, 1),
        # a container of version 1, whose path is the host's
        (OF_HOST, group_v1(2 * GB, 1 * GB, cache=250 * MB, kills=2), 2 * GB, 1250 * MB, 2),
        ("4:memory:/\n", group_v1(NO_LIMIT_V1, 1 * GB), None, 5_120_000_000, 0),
        ("0::/../other\n", group_v2(2 * GB, 1 * GB), 2 * GB, 1 * GB, 0),  # above the mount
        ("0::/\n", group_v2(100, 120), 100, 0, 0),  # beyond the limit
    ],
)
def test_what_is_left_is_what_the_nearest_limit_leaves(
    tmp_path, memberships, cgroups, limit, left, kills
):
    memory = read(tmp_path, memberships, cgroups)
    assert (memory.limit_bytes, memory.left_bytes) == (limit, left)
    assert (memory.total_bytes, memory.group_oom_kills) == (16_384_000_000, kills)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="not Linux")
def test_the_real_machine_is_read_as_psutil_reads_it():
    memory, peer = memory_now(), psutil.virtual_memory()
    assert memory.total_bytes == peer.total
    assert memory.available_bytes == pytest.approx(peer.available, rel=0.2)
    assert 0 < memory.left_bytes <= memory.total_bytes


NOW = SystemMemory(
    total_bytes=64 * GB,
    available_bytes=40 * GB,
    limit_bytes=12 * GB,
    left_in_group_bytes=200 * MB,
    group_oom_kills=4,
)


def test_a_death_is_described_with_all_that_is_known():
    before = replace(NOW, group_oom_kills=3)
    assert advice_on_kill(NOW, before, 11_200 * MB) == (
        "It had used up to 11.2 GB. The machine has 40.0 GB of 64.0 GB left. The control group "
        "(the container) has 200 MB of 12.0 GB left. The system's OOM killer ended it. Memory "
        "ran out: try fewer workers or a smaller prefetch_factor."
    )


@pytest.mark.parametrize("memory", [SystemMemory(25 * GB, GB), SystemMemory(group_oom_kills=1)])
def test_without_another_kill_of_the_group_other_causes_are_named(memory):
    advice = advice_on_kill(memory, SystemMemory(group_oom_kills=1), 200 * MB)
    assert advice.startswith("It had used up to 200 MB.")
    assert "Something killed it from outside (kill -9, a job scheduler" in advice
    assert "fewer workers or a smaller prefetch_factor" in advice


def test_batches_that_fit_give_no_warning_and_others_name_whose_limit_it_is():
    assert memory_warning(50 * MB, 4, NOW) is None
    assert memory_warning(51 * MB, 4, NOW) == (
        "4 batches of 51.0 MB on their way need 204 MB, and the control group (the container) "
        "has 200 MB left: workers may be killed. Lower num_workers, prefetch_factor or "
        "batch_size."
    )
    text = memory_warning(11 * GB, 4, replace(NOW, limit_bytes=None, left_in_group_bytes=None))
    assert "need 44.0 GB, and this machine has 40.0 GB left" in text


@pytest.fixture
def descriptor_limit():
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, old[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_one_descriptor_too_few_is_an_error_before_workers_start(descriptor_limit):
    num_open = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists the folder
    needed = descriptors_needed(5)
    descriptor_limit(num_open + needed)
    check_descriptors(5)
    descriptor_limit(num_open + needed - 1)
    with pytest.raises(ConfigError) as caught:
        check_descriptors(5)
    message = str(caught.value)
    assert f"num_workers=5 needs {needed} more open files" in message
    assert f"its limit is {num_open + needed - 1}, and {num_open} are open" in message
    assert f"at least {num_open + needed} (`ulimit -n`" in message


def test_workers_hold_no_more_descriptors_than_were_asked_for():
    before = psutil.Process().num_fds()
    stream = iter(Loader(list(range(100)), num_workers=3, multiprocessing_context="fork"))
    next(stream)
    held = psutil.Process().num_fds() - before
    assert 3 * 3 <= held <= descriptors_needed(3)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_descriptors_that_are_asked_for_are_enough(method, tmp_path):
    # A file, as spawn imports the main module anew.
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, resource, sys
        sys.path[:0] = {sys.path!r}
        import numpy as np
        from penstock import Loader
        from penstock.system_limits import check_descriptors, descriptors_needed

        def collate(samples):  # two new slots a batch: one for large arrays, one for small ones
            return [np.zeros(200_000, np.uint8), np.zeros(5000, np.uint8)]

        if __name__ == "__main__":
            import multiprocessing.popen_{"spawn_posix" if method == "spawn" else method}
            limit = len(os.listdir("/proc/self/fd")) - 1 + descriptors_needed(3)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            check_descriptors(3)
            loader = Loader(
                range(60),
                batch_size=2,
                num_workers=3,
                collate_fn=collate,
                multiprocessing_context="{method}",
            )
            print(len(list(loader)))
        """)
    )
    done = subprocess.run(
        [sys.executable, os.fspath(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("30\n", "")
