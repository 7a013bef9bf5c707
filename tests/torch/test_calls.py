# SPDX-License-Identifier: Apache-2.0
"""How many of our functions a batch passes in the main process: cheap samples wait for these."""

from __future__ import annotations

import os
import sys

import pytest

import penstock
from penstock.torch import DataLoader

OURS = os.path.dirname(penstock.__file__) + os.sep
NUM_BATCHES = 200


class Numbers:
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return index


def calls_per_batch(batches):
    """Return how many functions of ours are called for a batch, on average."""
    num_calls = 0

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(OURS)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(NUM_BATCHES):
            next(batches)
    finally:
        sys.setprofile(before)
    return num_calls / NUM_BATCHES


@pytest.mark.parametrize(("num_workers", "most"), [(0, 40), (2, 70)])
def test_a_batch_passes_few_functions(num_workers, most):
    batches = iter(DataLoader(Numbers(), batch_size=8, num_workers=num_workers))
    next(batches)
    assert calls_per_batch(batches) <= most
