# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed go on from their states, bit for bit as if nothing had been."""

from __future__ import annotations

import collections
import itertools
import json

import psutil
import pytest
from tests.distributed import restarting_run
from tests.distributed.launching import torchrun
from tests.distributed.restarting_run import LENGTH, NUM_EPOCHS, NUM_STEPS


def log_of(folder, rank):
    return [json.loads(line) for line in (folder / f"log-{rank}.jsonl").read_text().splitlines()]


def effective(log, resumed_at):
    """The steps that count: of each start those up to the step that the next one went on from."""
    found = []
    for line in log:
        last = resumed_at[line["restarts"]] if line["restarts"] < len(resumed_at) else None
        if last is None or line["step"] <= last:
            found.append(line)
    return found


def end_orphans(log):
    """Wait for workers whose rank was killed; those that are left are killed, and returned."""
    pids = {tuple(child) for line in log for child in line["children"]}
    left = []
    for pid, created in pids:
        if psutil.pid_exists(pid):
            process = psutil.Process(pid)
            if process.create_time() == created:
                left.append(process)
    _, alive = psutil.wait_procs(left, timeout=10)
    for process in alive:
        process.kill()
    return alive


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format
)
def killed_twice(request, tmp_path_factory):
    """What each rank has logged over three starts."""
    folder = tmp_path_factory.mktemp("killed")
    torchrun("restarting_run", request.param, folder, str(folder), max_restarts=2)
    return [log_of(folder, rank) for rank in range(request.param)]


def uninterrupted(world_size, rank, monkeypatch):
    """Epochs of both loaders, made in this process."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    loader, stream = restarting_run.loaders_of(world_size)
    return [
        restarting_run.content(batch, items)
        for _ in range(NUM_EPOCHS)
        for batch, items in zip(loader, stream, strict=True)
    ]


# The state of step 6 is that of an epoch of which nothing is left; that of 8 is in mid-epoch.
RESUMED_AT = [6, 8]


def test_torchrun_starts_all_ranks_again_from_the_last_step_that_all_have_saved(killed_twice):
    for log in killed_twice:
        first = {
            restarts: next(lines)["step"]
            for restarts, lines in itertools.groupby(log, lambda line: line["restarts"])
        }
        assert first == {0: 1, 1: RESUMED_AT[0] + 1, 2: RESUMED_AT[1] + 1}


def test_what_is_resumed_is_the_uninterrupted_stream_bit_for_bit(killed_twice, monkeypatch):
    world_size = len(killed_twice)
    for rank, log in enumerate(killed_twice):
        counted = effective(log, RESUMED_AT)
        assert [line["step"] for line in counted] == list(range(1, NUM_EPOCHS * NUM_STEPS + 1))
        expected = uninterrupted(world_size, rank, monkeypatch)
        assert [line["content"] for line in counted] == expected


def test_no_sample_is_lost_and_none_doubled_over_the_restarts(killed_twice):
    for epoch, kind in itertools.product(range(NUM_EPOCHS), (0, 1)):
        counts = collections.Counter(
            index
            for log in killed_twice
            for line in effective(log, RESUMED_AT)
            if line["epoch"] == epoch
            for index, _ in line["content"][kind]
        )
        assert counts == dict.fromkeys(range(LENGTH), 1)


def test_steps_after_the_last_common_state_are_repeated_alike(killed_twice):
    num_repeated = 0
    for log in killed_twice:
        by_step = {}
        for line in log:
            assert by_step.setdefault(line["step"], line["content"]) == line["content"]
        num_repeated += len(log) - len(by_step)
    # Two after each death, and perhaps one that a survivor began before torchrun ended it.
    assert num_repeated >= 2 * 2 * len(killed_twice)


def test_workers_of_killed_ranks_end_by_themselves(killed_twice):
    num_workers = {len(line["children"]) for log in killed_twice for line in log}
    assert max(num_workers) == 4  # two of each loader
    assert end_orphans(list(itertools.chain(*killed_twice))) == []
