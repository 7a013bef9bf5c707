# SPDX-License-Identifier: Apache-2.0
"""A `worker_init_fn` that seeds workers alike is named once, with the cure; no other one is."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.processes import but_of_forks
from tests.torch.datasets_for_tests import Augmented

from penstock.torch import DataLoader


def constant_numpy(worker_id: int) -> None:
    np.random.seed(42)


def constant_random(worker_id: int) -> None:
    random.seed(0)


def constant_torch(worker_id: int) -> None:
    torch.manual_seed(0)


def numpy_by_worker(worker_id: int) -> None:
    np.random.seed(worker_id)


def torch_by_worker(worker_id: int) -> None:
    torch.manual_seed(1234 + worker_id)


def by_initial_seed(worker_id: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed() % 2**32)


def draws(worker_id: int) -> None:
    random.random(), np.random.rand(), torch.rand(1)


def touches_nothing(worker_id: int) -> None:
    torch.set_num_threads(1)


def messages(init: Any, num_epochs: int = 3, **options: Any) -> list[str]:
    def own(worker_id: int) -> None:  # each function is named once
        init(worker_id)

    loader = DataLoader(
        Augmented(6), batch_size=3, **{"num_workers": 2} | options, worker_init_fn=own
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_epochs):
            list(loader)
    return [str(warning.message) for warning in but_of_forks(caught)]


@pytest.mark.parametrize(
    ("init", "generator", "same", "options"),
    [
        (constant_numpy, "numpy.random", "as in worker ", {}),
        (constant_random, "random", "as in worker ", {"persistent_workers": True}),
        (constant_torch, "torch", "as in another epoch", {"num_workers": 1}),
        (numpy_by_worker, "numpy.random", "as in another epoch", {}),
        (torch_by_worker, "torch", "as in another epoch", {}),
    ],
)
def test_a_constant_seed_is_named_once_with_the_cure(
    init: Any, generator: str, same: str, options: dict[str, Any]
) -> None:
    (message,) = messages(init, **options)
    assert f"leaves {generator} in worker " in message
    assert same in message
    assert "seed=" in message
    assert "torch.initial_seed() % 2**32" in message


@pytest.mark.parametrize(
    ("init", "options"),
    [
        (by_initial_seed, {}),
        (draws, {}),
        (touches_nothing, {}),
        (constant_numpy, {"seed": 7}),
        (numpy_by_worker, {"persistent_workers": True}),
        (constant_numpy, {"num_workers": 1, "persistent_workers": True}),
    ],
)
def test_what_does_not_repeat_is_not_named(init: Any, options: dict[str, Any]) -> None:
    assert messages(init, **options) == []
