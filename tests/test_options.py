# SPDX-License-Identifier: Apache-2.0
"""The arguments that both loaders share: one set of checks, and one plan of them."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from multiprocessing.context import SpawnContext

import pytest
from torch.utils.data import IterableDataset

from penstock import Loader
from penstock.engine.backends import BACKENDS, traits_of
from penstock.errors import ConfigError
from penstock.options import Auto, LoaderOptions
from penstock.torch import DataLoader

DATA = [0.0, 1.0, 2.0, 3.0]


class Threads(SpawnContext):
    Process = threading.Thread


def options_of(**given):
    return LoaderOptions(is_iterable=False, **given)


def test_options_cannot_be_changed_and_pickle():
    options = options_of(num_workers=2, on_error="skip", backend="thread")
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.backend = "process"
    assert pickle.loads(pickle.dumps(options)) == options


def test_options_hold_what_the_arguments_mean():
    options = options_of(num_workers=Auto(memory=1e9), multiprocessing_context="spawn")
    assert options.is_auto
    assert options.context.get_start_method() == "spawn"
    assert options.limits == Auto(memory=10**9)
    assert options.faults.on_error == "raise"
    assert options_of(multiprocessing_context=Threads()).backend == "thread"


def test_both_loaders_make_the_same_plan_of_the_same_arguments():
    given = {"num_workers": 2, "timeout": 3.0, "prefetch_factor": 4, "persistent_workers": True,
             "in_order": False, "seed": 7, "global_rng": False, "on_error": "skip",
             "backend": "thread"}  # fmt: skip
    ours, drop_in = Loader(DATA, 2, **given)._plan(), DataLoader(DATA, 2, **given)
    theirs = drop_in._plan(ours.base_seed, None)
    spec = dataclasses.replace(theirs.spec, framework=None)
    assert dataclasses.replace(theirs, spec=spec) == ours


def test_traits_tell_the_backends_apart():
    assert [name for name in BACKENDS if traits_of(name).shares_interpreter] == ["thread"]
    assert [name for name in BACKENDS if not traits_of(name).is_local] == ["ray"]
    assert [name for name in BACKENDS if traits_of(name).has_start_method] == ["process"]
    assert traits_of("serial").is_local


def test_single_samples_and_drop_last_contradict_each_other():
    with pytest.raises(ConfigError, match="single samples"):
        Loader(DATA, batch_size=None, drop_last=True)


def test_limits_stay_with_a_number_that_is_handed_on():
    loader = DataLoader(DATA, num_workers=Auto(cpu=1.5))
    assert (loader.num_workers, repr(loader.num_workers)) == ("auto", "Auto(cpu=1.5, memory=None)")
    assert str(Loader(range(4), 2, num_workers="auto").num_workers) == "auto"
    assert "num_workers=Auto(cpu=1.5, memory=None)" in repr(loader)
    assert loader._settings()["num_workers"] == "Auto(cpu=1.5, memory=None)"  # of the report
    for number in (loader.num_workers, pickle.loads(pickle.dumps(loader.num_workers))):
        assert DataLoader(DATA, num_workers=number)._options.limits == Auto(cpu=1.5)


def test_a_stream_of_torch_is_not_taken_for_a_map_style_dataset():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

    with pytest.raises(TypeError, match=r"Streams of torch are for penstock\.torch\.DataLoader"):
        Loader(Stream())


def test_after_batch_size_arguments_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        Loader(DATA, 2, True)
    assert DataLoader(DATA, 2, True).batch_size == 2  # torch's positions
