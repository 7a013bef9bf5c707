# SPDX-License-Identifier: Apache-2.0
"""97 samples on 4 and 2 ranks: training and validation with real collectives come to their end."""

from __future__ import annotations

import pytest
from tests.distributed.loaders import LENGTH
from tests.distributed.training import is_right, trained_alone

WORLDS = pytest.mark.parametrize("world", ["four", "two"])


@pytest.fixture
def ranks(world, request):
    return request.getfixturevalue(world)


@WORLDS
@pytest.mark.parametrize(("pad", "num_batches"), [("repeat", 7), ("drop", 6)])
def test_equal_shares_need_no_join(ranks, pad, num_batches):
    for rank in ranks:
        assert rank["training"][pad]["batches"] == [num_batches] * 2
        assert rank["training"][pad]["weights"] == ranks[0]["training"][pad]["weights"]
    expected = trained_alone(len(ranks), pad, drop_last=pad == "drop")
    assert ranks[0]["training"][pad]["weights"] == pytest.approx(expected, rel=1e-9)


@WORLDS
@pytest.mark.parametrize("name", ["join", "join context"])
def test_ranks_that_run_out_of_batches_join_those_that_have_more(ranks, name):
    num_batches = [rank["training"][name]["batches"] for rank in ranks]
    assert num_batches == [[7, 7], *[[6, 6]] * (len(ranks) - 1)]
    expected = trained_alone(len(ranks), "none")
    for rank in ranks:  # those that had ended too
        assert rank["training"][name]["weights"] == pytest.approx(expected, rel=1e-9)


@WORLDS
def test_a_validation_over_shares_of_pad_none_counts_each_sample_once(ranks):
    num_right = sum(is_right(index) for index in range(LENGTH))
    for rank in ranks:
        assert rank["validation"]["none"] == [LENGTH, num_right]


@WORLDS
@pytest.mark.parametrize("name", ["repeat", "torch's"])
def test_equal_shares_make_a_validation_count_the_first_samples_twice(ranks, name):
    num_right = sum(is_right(index) for index in range(LENGTH))
    num_more = -LENGTH % len(ranks)
    assert num_more > 0
    for rank in ranks:
        assert rank["validation"][name] == [LENGTH + num_more, num_right]
