# SPDX-License-Identifier: Apache-2.0
"""Generators that a dataset keeps are found and named, and nothing else is."""

from __future__ import annotations

import random
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock import Loader
from penstock.randomness.kept import kept_generators, warn_of_kept_generators
from penstock.sampling import RandomSampler


class Kept:
    """A dataset with the attributes that it is given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index

    @property
    def asked(self):
        raise AssertionError("a property was asked")

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked")


class Jitter:
    def __init__(self, rng):
        self.rng = rng


class Module(torch.nn.Module):
    """A transform with state, and one that holds another: torch keeps it in a dict."""

    def __init__(self, rng=None, inner=None):
        super().__init__()
        self.rng, self.inner = rng, inner


def paths_of(**attributes):
    return [path for path, _, _ in kept_generators(Kept(**attributes))]


@pytest.mark.parametrize(
    "rng",
    [
        np.random.default_rng(0),
        np.random.RandomState(0),
        random.Random(0),
        torch.Generator(),
    ],
    ids=lambda rng: type(rng).__name__,
)
def test_every_kind_is_found_in_the_dataset_its_transforms_and_lists_of_them(rng):
    assert paths_of(rng=rng) == ["Kept.rng"]
    assert paths_of(transform=Jitter(rng)) == ["Kept.transform.rng"]
    chain = SimpleNamespace(transforms=[Jitter(None), Jitter(rng)])
    assert paths_of(transform=chain) == ["Kept.transform.transforms[1].rng"]
    subset = torch.utils.data.Subset(Kept(transform=Jitter(rng)), [0])
    assert [path for path, _, _ in kept_generators(subset)] == ["Subset.dataset.transform.rng"]


def test_the_processs_own_generators_samplers_and_data_are_none():
    assert not (
        paths_of(
            a=np.random.mtrand._rand,
            b=random._inst,
            c=torch.default_generator,
            d=random.SystemRandom(),
            e=random,
            f=RandomSampler(range(8)),
            g=torch.utils.data.RandomSampler(range(8), generator=torch.Generator()),
            h=np.arange(8),
            i=Jitter,
        )
    )


def test_lists_and_dicts_of_them_are_looked_into_and_plain_values_take_nobodys_place():
    rng = np.random.default_rng(0)
    assert paths_of(rngs=[rng, None, rng]) == ["Kept.rngs[0]", "Kept.rngs[2]"]
    found = paths_of(steps={"train": Jitter(rng), 3: rng})
    assert found == ["Kept.steps[3]", "Kept.steps['train'].rng"]
    columns = {f"column_{k}": [f"{k}.{n}" for n in range(32)] for k in range(20)}
    assert paths_of(**columns, transform=Jitter(rng)) == ["Kept.transform.rng"]
    outer = Module(inner=Module(rng))
    assert paths_of(module=outer) == ["Kept.module._modules['inner'].rng"]


def test_no_code_of_what_is_kept_runs():
    class Lazy:
        @property
        def __class__(self):
            raise AssertionError("it was asked for its class")

    lazy, rng = Lazy(), np.random.default_rng(0)
    dead = weakref.proxy(Jitter(None))
    odd = type("Odd", (), {"__module__": None})()
    odd.rng = rng
    assert paths_of(lazy=lazy, dead=dead, odd=odd) == ["Kept.odd.rng"]
    mute = type("Mute", (), {"__repr__": lambda self: 1 / 0})()
    assert paths_of(by={mute: rng, 3: rng}) == ["Kept.by[...]", "Kept.by[3]"]


def test_what_penstock_keeps_itself_is_no_cause_for_alarm():
    pytest.importorskip("cv2")
    vision = pytest.importorskip("penstock.vision")
    albumentations = pytest.importorskip("albumentations")
    chain = albumentations.Compose([albumentations.HorizontalFlip()])
    wrapped = vision.Albumentations(chain)
    wrapped(np.zeros((8, 8, 3), np.uint8))
    assert paths_of(transform=wrapped) == []
    with pytest.warns(UserWarning, match=r"Wrap the chain: penstock\.vision\.Albumentations"):
        warn_of_kept_generators(Kept(transform=chain), 7)


def test_a_loader_with_a_seed_says_so_where_it_is_made():
    dataset = Kept(rng=np.random.default_rng(0))
    with pytest.warns(UserWarning, match=r"seed=7 does not reach .*: Kept\.rng \(numpy") as warned:
        Loader(dataset, seed=7)
    assert [warning.filename for warning in warned] == [__file__]
    from penstock.torch import DataLoader

    with pytest.warns(UserWarning, match=r"seed=7 .* penstock\.sample_rng\(\)") as warned:
        DataLoader(dataset, seed=7)
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(dataset)  # torch's semantics: no seed is promised
