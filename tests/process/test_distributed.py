# SPDX-License-Identifier: Apache-2.0
"""Ranks share one global order, and a run goes on with another number of them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.process.distributed_run import LENGTH, SEED, content, loader_of, source_of, taken

from penstock.errors import StateError
from penstock.sampling import DistributedSampler

ROOT = Path(__file__).parents[2]
KINDS = ["dataset", "weighted", "torch weighted", "torch weighted, own generator", "user's"]
CUT = 3  # batches, of 7 per rank
NUM_BATCHES = 7


@pytest.fixture(autouse=True, scope="module")
def no_rank():
    """This process trains alone, wherever the tests themselves run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.delenv("WORLD_SIZE", raising=False)
        yield


def two_ranks(folder, runs):
    """Run two processes to their end; what each run gave, on rank 0 and rank 1."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"world_size": 2, "runs": runs}))
    command = [sys.executable, "-m", "tests.process.distributed_run", str(plan)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        messages = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stderr.close()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(messages)
    results = [json.loads(Path(f"{plan}.{rank}").read_text()) for rank in (0, 1)]
    return list(zip(*results, strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Kind -> what two processes gave in epochs 0 and 1, and in epoch 2 up to the cut.

    The first has a worker, the second has none.
    """
    runs = [{"kind": kind, "num_workers": [1, 0], "num_epochs": 2, "cut": CUT} for kind in KINDS]
    return dict(zip(KINDS, two_ranks(tmp_path_factory.mktemp("saved"), runs), strict=True))


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory):
    """Kind -> what two more processes gave from there on: the rest of epoch 2, and of epoch 3.

    Each has another number of workers than before, and loads the state of rank 0.
    """
    runs = [
        {"kind": kind, "num_workers": [0, 2], "num_epochs": 1, "cut": 1, "state": one["state"]}
        for kind, (one, _) in saved.items()
    ]
    return dict(zip(KINDS, two_ranks(tmp_path_factory.mktemp("resumed"), runs), strict=True))


def together(*shares):
    """The k-th batches of all ranks as one, for each k: the ranks take turns."""
    width = max(map(len, shares))
    padded = [[*share, *[[]] * (width - len(share))] for share in shares]
    return [
        [sample for turn in itertools.zip_longest(*batches) for sample in turn if sample]
        for batches in zip(*padded, strict=True)
    ]


def indices_of(batches):
    return [index for batch in batches for index, _ in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_come_from_the_process_group_and_save_the_same_state(saved, kind):
    one, other = saved[kind]
    assert (one["rank"], other["rank"]) == ([0, 2], [1, 2])
    assert one["states of all"] == [one["state"], one["state"]]
    assert len(one["state"]) < 1024
    assert json.loads(one["state"])["samples"] == CUT * 16


@pytest.mark.parametrize("kind", ["dataset", "user's"])
def test_shares_of_two_processes_are_disjoint_and_complete(saved, kind):
    one, other = saved[kind]
    for epoch in (0, 1):
        mine, theirs = indices_of(one["epochs"][epoch]), indices_of(other["epochs"][epoch])
        assert len(mine) == len(theirs) == LENGTH // 2
        assert sorted(mine + theirs) == list(range(LENGTH))
    assert one["epochs"][0] != one["epochs"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_processes_together_give_what_one_process_gives(saved, kind):
    one, other = saved[kind]
    alone = loader_of(kind, 16)
    for epoch in (0, 1):
        batches = together(one["epochs"][epoch], other["epochs"][epoch])
        assert len(batches) == NUM_BATCHES
        assert batches == taken(alone)


@pytest.mark.parametrize("kind", ["dataset", "weighted"])
def test_the_processes_together_give_the_order_of_the_sampler_that_is_wrapped(saved, kind):
    one, other = saved[kind]
    sampler = DistributedSampler(source_of(kind), seed=SEED).sampler
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = together(one["epochs"][epoch], other["epochs"][epoch])
        assert indices_of(batches) == list(sampler)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_where_two_were(saved, kind, num_workers):
    one, other = saved[kind]
    whole = loader_of(kind, 16)
    whole.set_epoch(2)
    expected = [taken(whole), taken(whole)]
    assert together(one["epochs"][2], other["epochs"][2]) == expected[0][:CUT]
    alone = loader_of(kind, 16, num_workers=num_workers)
    alone.load_state_dict(json.loads(one["state"]))
    assert alone.epoch == 2
    assert [taken(alone), taken(alone)] == [expected[0][CUT:], expected[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_with_other_numbers_of_workers(saved, resumed, kind):
    whole = loader_of(kind, 16)
    whole.set_epoch(2)
    expected = [taken(whole), taken(whole)]
    one, other = resumed[kind]
    assert together(one["epochs"][0], other["epochs"][0]) == expected[0][CUT:]
    assert together(one["epochs"][1], other["epochs"][1]) == expected[1][:1]


def test_a_state_of_two_ranks_is_refused_where_the_global_batch_is_another(saved):
    one, _ = saved["dataset"]
    with pytest.raises(StateError, match="global_batch_size is 16 in the state and 8 here"):
        loader_of("dataset", 8).load_state_dict(json.loads(one["state"]))


# From here on ranks are made in this process: the arguments say which.


def go_on(world_size, batch_size, count, state, rank_saved, epoch, **options):
    """All ranks up to `count` batches in all; their batches, and the state of one of them."""
    shares, states = [], []
    for rank in range(world_size):
        loader = loader_of(batch_size=batch_size, num_replicas=world_size, rank=rank, **options)
        if state is None:
            loader.set_epoch(epoch)
        else:
            loader.load_state_dict(json.loads(state))
        done = loader.state_dict()["batches"]
        batches = iter(loader)
        num_left = None if count is None else max(count - done, 0)
        shares.append([content(batch) for batch in itertools.islice(batches, num_left)])
        states.append(json.dumps(loader.state_dict()))
    return together(*shares), states[rank_saved % world_size]


def assert_equal_but_for_the_end(batches, expected, pad, world_size):
    """Padding may change the last samples, fewer than there are ranks, and nothing else."""
    found, right = (list(itertools.chain(*those)) for those in (batches, expected))
    if pad == "none":
        assert batches == expected
    elif pad == "repeat":
        assert found[: len(right)] == right
        assert 0 <= len(found) - len(right) < world_size
    else:
        assert found == right[: len(found)]
        assert 0 <= len(right) - len(found) < world_size
    assert batches[:-1] == expected[: len(batches[:-1])]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(1, LENGTH),
    batch_size=st.integers(1, 9),
    pad=st.sampled_from(["repeat", "drop", "none"]),
    epoch=st.integers(0, 3),
    cuts=st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted),
    rank_saved=st.integers(0, 3),
)
def test_four_ranks_then_two_then_one_give_the_global_batches_of_one(
    kind, length, batch_size, pad, epoch, cuts, rank_saved
):
    options = {"kind": kind, "length": length, "pad": pad}
    whole = loader_of(batch_size=4 * batch_size, num_replicas=1, rank=0, **options)
    whole.set_epoch(epoch)
    expected = taken(whole)
    # While all samples before a cut divide by the number of ranks, every rank is at the same one.
    num_even = length // (4 * batch_size)
    first, second = (min(cut, num_even) for cut in cuts)
    by_four, state = go_on(4, batch_size, first, None, rank_saved, epoch, **options)
    assert by_four == expected[:first]
    by_two, state = go_on(2, 2 * batch_size, second, state, rank_saved, epoch, **options)
    assert by_two == expected[first:second]
    by_one, _ = go_on(1, 4 * batch_size, None, state, 0, epoch, **options)
    assert by_one == expected[second:]
    # Or with two to the end.
    to_the_end, _ = go_on(2, 2 * batch_size, None, state, 0, epoch, **options)
    assert_equal_but_for_the_end(to_the_end, expected[second:], pad, 2)


@pytest.mark.parametrize("pad", ["repeat", "drop", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3, 16, 17, 47])
def test_whole_epochs_of_four_ranks_differ_from_one_process_at_their_end_alone(kind, length, pad):
    options = {"kind": kind, "length": length, "pad": pad}
    whole = loader_of(batch_size=16, num_replicas=1, rank=0, **options)
    ranks = [loader_of(batch_size=4, num_replicas=4, rank=r, **options) for r in range(4)]
    for _ in range(2):
        shares = [taken(loader) for loader in ranks]
        assert_equal_but_for_the_end(together(*shares), taken(whole), pad, 4)
        sizes = {sum(map(len, share)) for share in shares}
        assert len(sizes) == 1 or pad == "none"
