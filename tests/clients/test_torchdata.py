# SPDX-License-Identifier: Apache-2.0
"""torchdata's nodes around our loaders, and as what they read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torchdata.nodes as tn

import penstock.torch
from penstock import Loader


def squares(count=60):
    numbers = torch.arange(float(count))
    return torch.utils.data.TensorDataset(numbers, numbers * numbers)


def torch_loader(num_workers=0, **options):
    return penstock.torch.DataLoader(
        squares(), batch_size=8, shuffle=True, num_workers=num_workers, seed=5, **options
    )


def numpy_loader(num_workers=0):
    return Loader(np.arange(60.0), batch_size=8, shuffle=True, num_workers=num_workers, seed=5)


def first_values(batches):
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [torch_loader, numpy_loader])
def test_a_graph_over_a_loader_gives_its_batches_epoch_by_epoch(make, num_workers):
    graph = tn.Loader(tn.IterableWrapper(make(num_workers)))
    alone = make()
    for _ in range(2):
        assert first_values(graph) == first_values(alone)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [torch_loader, numpy_loader])
@pytest.mark.parametrize("num_read", [0, 3, 8])
def test_the_state_of_a_graph_goes_on_exactly(make, num_workers, num_read):
    graph = tn.Loader(tn.IterableWrapper(make(num_workers)))
    first_values(graph)  # an epoch before
    batches = iter(graph)
    for _ in range(num_read):
        next(batches)
    state = graph.state_dict()
    rest = first_values(batches) or first_values(graph)  # after its end the next epoch
    assert len(json.dumps(state)) < 2_000
    again = tn.Loader(tn.IterableWrapper(make(num_workers)))
    again.load_state_dict(state)
    assert first_values(again) == rest
    assert first_values(again) == first_values(graph)
