# SPDX-License-Identifier: Apache-2.0
"""`global_rng=False`: the seed is for `sample_rng()` alone, and other draws are named."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from tests.support.processes import but_of_forks

import penstock
from penstock import Loader, sample_rng
from penstock.errors import ConfigError
from penstock.randomness import generator_watch
from penstock.torch import DataLoader

LOADERS = [Loader, DataLoader]


class Clean:
    """Draws from the sample's own generator."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return np.float64(index + sample_rng().random())


class Draws(Clean):
    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return np.float64(self.draw())


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch):
    monkeypatch.setattr(generator_watch, "_warned_of", set())


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("loader_of", LOADERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_draw_the_same_as_with_it_and_nothing_is_named(loader_of, num_workers):
    options = {"batch_size": 4, "shuffle": True, "seed": 7, "num_workers": num_workers}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [np.asarray(b).tolist() for b in loader_of(Clean(), global_rng=False, **options)]
    assert found == [np.asarray(b).tolist() for b in loader_of(Clean(), **options)]


@pytest.mark.parametrize("loader_of", LOADERS)
def test_the_global_generators_are_left_alone(loader_of):
    before = states()
    seen = []

    class Watching(Clean):
        def __getitem__(self, index):
            seen.append(states() == before)
            return super().__getitem__(index)

    assert len(list(loader_of(Watching(), 4, seed=7, global_rng=False))) == 6
    assert all(seen)
    assert states() == before


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (random.random, "Draws.__getitem__ .* uses random"),
        (lambda: np.random.random(), "<lambda> .* uses numpy.random"),
        (lambda: torch.rand(()), "<lambda> .* uses torch"),
    ],
    ids=["random", "numpy", "torch"],
)
def test_a_draw_from_a_global_generator_is_named_once(draw, named, num_workers):
    context = {"multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoader(
        Draws(draw), 4, seed=7, global_rng=False, num_workers=num_workers, **context
    )
    with pytest.warns(UserWarning, match=named) as caught:
        list(loader) + list(loader)
    (warned,) = but_of_forks(caught)
    assert "global_rng=False" in str(warned.message)


@pytest.mark.parametrize("options", [{}, {"generator": torch.Generator()}])
def test_without_a_seed_it_is_refused(options):
    with pytest.raises(ConfigError, match="there is no seed"):
        DataLoader(Clean(), global_rng=False, **options)


def test_a_loader_says_so():
    assert "global_rng=False" in repr(DataLoader(Clean(), seed=1, global_rng=False))
    assert "global_rng" not in repr(DataLoader(Clean(), seed=1))
    assert penstock.Loader(Clean(), global_rng=False).global_rng is False
