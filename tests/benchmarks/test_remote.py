# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of far storage compares with is right, and its server is as far as it says."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def remote(monkeypatch):
    """`benchmarks/remote.py` as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("remote")


def orders_of(num_samples, num_epochs, seed):
    draw = random.Random(seed)
    return [draw.sample(range(num_samples), num_samples) for _ in range(num_epochs)]


def least(orders, capacity):
    """Return the least number of samples fetched after the first epoch, by trying everything."""
    states = {frozenset(): 0}
    for number, order in enumerate(orders):
        for sample in order:
            after = {}
            for kept, cost in states.items():
                paid = cost + (sample not in kept and number > 0)
                grown = kept | {sample}
                for one in (grown, *(grown - {out} for out in grown)):
                    if len(one) <= capacity:
                        after[one] = min(after.get(one, paid), paid)
            states = after
    return min(states.values())


@pytest.mark.parametrize("capacity", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_for_equal_samples_is_the_least_of_all_ways_and_lru_is_no_less(
    remote, capacity, seed
):
    orders = orders_of(5, 3, seed)
    found = remote.optimal_bytes(orders, [1] * 5, capacity)
    assert found == least(orders, capacity)
    assert remote.lru_bytes(orders, [1] * 5, capacity) >= found


def test_with_room_for_all_nothing_is_fetched_twice_and_without_any_all_is(remote):
    orders, sizes = orders_of(50, 3, 0), list(range(100, 150))
    for fetched in (remote.optimal_bytes, remote.lru_bytes):
        assert fetched(orders, sizes, sum(sizes)) == 0
        assert fetched(orders, sizes, 0) == 2 * sum(sizes)


@pytest.fixture
def server(tmp_path):
    """Its address: 30 ms and 10 MB/s away, with one object of 500 kB."""
    (tmp_path / "bucket" / "some").mkdir(parents=True)
    (tmp_path / "bucket" / "some" / "thing").write_bytes(bytes(range(250)) * 2000)
    command = [sys.executable, BENCHMARKS / "_far_server.py", tmp_path]
    command += ["--latency-ms", "30", "--mbs", "10"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
        assert process.wait() == 0


def answer(url, **fields):
    with urllib.request.urlopen(urllib.request.Request(url, headers=fields)) as found:
        return found.read()


def test_the_server_is_far_away_and_narrow_and_counts(server):
    started = time.monotonic()
    whole = answer(f"{server}/bucket/some/thing")
    assert time.monotonic() - started >= 0.03 + 0.05 - 0.005  # latency, and 500 kB at 10 MB/s
    assert whole == bytes(range(250)) * 2000
    assert answer(f"{server}/bucket/some/thing", Range="bytes=10-19") == bytes(range(10, 20))
    assert answer(f"{server}/bucket/some/thing", Range="bytes=-2") == bytes((248, 249))
    assert b"<Key>some/thing</Key><Size>500000</Size>" in answer(f"{server}/bucket?list-type=2")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        answer(f"{server}/bucket/other")
    assert b'"gets": 4, "others": 1' in answer(f"{server}/-/counts")
