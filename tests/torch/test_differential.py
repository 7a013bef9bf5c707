# SPDX-License-Identifier: Apache-2.0
"""Random sets of arguments: the drop-in shows a training loop what torch's loader shows it."""

from __future__ import annotations

import pytest
import torch
import torch.utils.data as theirs
from tests.torch.comparing import assert_same
from tests.torch.random_sets import LAZY, ArgumentSet, observe, set_of

import penstock.torch as ours

NUM_SETS = 40  # some 15 s
NUM_SETS_SLOW = 2000

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]


def is_known_to_differ(arguments: ArgumentSet) -> bool:
    """Return whether the set meets a difference of docs/differences-from-torch.md."""
    stacks = arguments.options.get("batch_size", 1) and not arguments.options["collate_fn"]
    if stacks and not arguments.options["num_workers"] and "channels last" in arguments.tree.leaves:
        return True  # torch's batch is contiguous with workers only, ours always
    # torch's workers send a tensor without its conj or neg bit, so that other values arrive; their
    # default collate refuses one.
    return bool(arguments.options["num_workers"] and arguments.tree.leaves & LAZY.keys())


def check(number: int) -> bool:
    """Compare both loaders; return whether the set is one that can be compared."""
    arguments = set_of(number)
    if is_known_to_differ(arguments):
        return False
    try:
        assert_same(observe(theirs, arguments), observe(ours, arguments), f"set {number}")
    except AssertionError as difference:
        difference.add_note(repr(arguments))
        raise
    return True


@pytest.mark.parametrize("number", range(NUM_SETS))
def test_a_random_set_of_arguments_gives_what_torch_gives(number: int) -> None:
    check(number)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(NUM_SETS, NUM_SETS_SLOW, 100))
def test_many_random_sets_of_arguments_give_what_torch_gives(start: int) -> None:
    assert sum(map(check, range(start, start + 100))) > 80


def conjugated(samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.complex(torch.ones(700), torch.full((700,), 2.0))
    return whole.conj(), whole.conj().imag


@pytest.mark.parametrize("num_workers", [0, 1])
def test_values_of_tensors_with_conj_and_neg_bits_arrive(num_workers: int) -> None:
    loader = ours.DataLoader(range(2), num_workers=num_workers, collate_fn=conjugated)
    assert_same([conjugated([])] * 2, list(loader))
