# SPDX-License-Identifier: Apache-2.0
"""Ranks share one global order, and a run goes on with another number of them.

They are made in this process: arguments say which rank is which. tests/distributed has ranks of a
process group.
"""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.process.seeded_datasets import Noise

from penstock.sampling import DistributedSampler, WeightedRandomSampler
from penstock.torch import DataLoader

KINDS = ["dataset", "weighted", "torch weighted", "torch weighted, own generator", "user's"]
CUT = 3  # batches
SEED = 7
LENGTH = 100
WEIGHTS = [1.0 + index % 5 for index in range(LENGTH)]


class Shuffled:
    """A user's sampler, written without a thought for seeds or ranks."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        np.random.shuffle(order)
        return iter(order)


def source_of(kind, length=LENGTH):
    """What a DistributedSampler wraps."""
    torch_weighted = torch.utils.data.WeightedRandomSampler
    return {
        "dataset": lambda: Noise(length),
        "weighted": lambda: WeightedRandomSampler(WEIGHTS[:length], length, seed=3),
        "torch weighted": lambda: torch_weighted(WEIGHTS[:length], length),
        "torch weighted, own generator": lambda: torch_weighted(
            WEIGHTS[:length], length, generator=torch.Generator()
        ),
        "user's": lambda: Shuffled(length),
    }[kind]()


def loader_of(kind, batch_size, *, length=LENGTH, num_workers=0, **ranks):
    return DataLoader(
        Noise(length),
        batch_size=batch_size,
        sampler=DistributedSampler(source_of(kind, length), **ranks),
        seed=SEED,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )


def content(batch):
    """The samples of a batch: [index, the bytes of its random numbers]."""
    indices, draws = batch
    return [[int(i), row.numpy().tobytes().hex()] for i, row in zip(indices, draws, strict=True)]


def taken(loader, count=None):
    """The next epoch, or so many batches of it."""
    return [content(batch) for batch in itertools.islice(loader, count)]


@pytest.fixture(autouse=True, scope="module")
def no_rank():
    """This process trains alone, wherever the tests themselves run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.delenv("WORLD_SIZE", raising=False)
        yield


def together(*shares):
    """The k-th batches of all ranks as one, for each k: the ranks take turns."""
    width = max(map(len, shares))
    padded = [[*share, *[[]] * (width - len(share))] for share in shares]
    return [
        [sample for turn in itertools.zip_longest(*batches) for sample in turn if sample]
        for batches in zip(*padded, strict=True)
    ]


def go_on(world_size, batch_size, count, state, rank_saved, epoch, **options):
    """All ranks up to `count` batches in all; their batches, and the state of one of them."""
    shares, states = [], []
    for rank in range(world_size):
        # The ranks' generators differ, as they do where no one has seeded them.
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1000 + rank)
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


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_with_workers_goes_on_where_two_ranks_were(kind):
    whole = loader_of(kind, 16)
    whole.set_epoch(2)
    expected = [taken(whole), taken(whole)]
    batches, state = go_on(2, 8, CUT, None, 1, 2, kind=kind)
    assert batches == expected[0][:CUT]
    assert len(state) < 1024
    assert json.loads(state)["samples"] == CUT * 16
    alone = loader_of(kind, 16, num_workers=2)
    alone.load_state_dict(json.loads(state))
    assert alone.epoch == 2
    assert [taken(alone), taken(alone)] == [expected[0][CUT:], expected[1]]
