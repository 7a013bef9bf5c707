# SPDX-License-Identifier: Apache-2.0
"""Functions and datasets that give other labels have other keys, the same in every process."""

from __future__ import annotations

import functools
import operator
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.data import ConcatDataset, Subset
from penstock.data.labels.cache_key import UntoldError, dataset_key, value_key

FACTOR = 2


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, sample):
        return sample[1] * self.factor

    def of(self, sample):
        return sample[1] * self.factor


def enclosing(value):
    return lambda sample: (sample[1], value)


def with_default(value):
    def function(sample, value=value, *, also=value):
        return sample[1], value, also

    return function


def applied(sample, *args, **kwargs):
    return sample, args, kwargs


@pytest.mark.parametrize(
    ("one", "like_it", "other"),
    [
        (enclosing(1), enclosing(1), enclosing(2)),
        (enclosing({"a": 1}), enclosing({"a": 1}), enclosing({"a": 2})),
        (enclosing({"a", "b"}), enclosing({"b", "a"}), enclosing({"a", "c"})),
        (enclosing(np.arange(3)), enclosing(np.arange(3)), enclosing(np.array([0, 1, 3]))),
        (enclosing(torch.ones(2)), enclosing(torch.ones(2)), enclosing(torch.zeros(2))),
        (enclosing(enclosing(1)), enclosing(enclosing(1)), enclosing(enclosing(2))),
        (enclosing(1), enclosing(1), enclosing(True)),
        (with_default(1), with_default(1), with_default(2)),
        (functools.partial(applied, 1), functools.partial(applied, 1), functools.partial(applied)),
        (functools.partial(applied, a=1), functools.partial(applied, a=1), applied),
        (operator.itemgetter(1), operator.itemgetter(1), operator.itemgetter(2)),
        (operator.attrgetter("a"), operator.attrgetter("a"), operator.attrgetter("b")),
        (Scaled(1), Scaled(1), Scaled(2)),
        (Scaled(1).of, Scaled(1).of, Scaled(2).of),
        (lambda sample: sample[1], lambda sample: sample[1], lambda sample: sample[2]),
        (len, len, sum),
        (int, int, str),
    ],
    ids=lambda value: None,
)
def test_functions_are_told_by_all_that_they_have_been_given(one, like_it, other):
    assert value_key(one) == value_key(like_it)
    assert value_key(one) != value_key(other)


def test_globals_that_a_function_names_belong_to_it(monkeypatch):
    def scaled(sample):
        return [FACTOR * part for part in sample]

    before = value_key(scaled)
    assert value_key(scaled) == before
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
    assert value_key(scaled) != before


def test_a_function_that_holds_a_lock_cannot_be_told():
    with pytest.raises(UntoldError, match="lock"):
        value_key(enclosing(threading.Lock()))
    endless = []
    endless.append(endless)
    assert value_key(enclosing(endless))


def test_another_process_has_the_same_keys():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_cache_key import Scaled, enclosing, value_key\n"
        "print(value_key(enclosing({'a', 'b', 'c'})), value_key(Scaled(3).of))"
    )
    args = [sys.executable, "-c", code, str(Path(__file__).parent)]
    run = [
        subprocess.run(
            args, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert run[0] == run[1] != ""


class Configured(list):
    def __init__(self, **settings):
        super().__init__("abc")
        self.__dict__.update(settings)


def test_datasets_are_told_by_their_settings_at_every_depth():
    keys = [
        dataset_key(make(Configured(**settings)))
        for settings in ({}, {"task": "age"}, {"task": "sex"}, {"task": 1}, {"where": Path("a")})
        for make in (
            lambda dataset: dataset,
            lambda dataset: Subset(dataset, [0]),
            lambda dataset: ConcatDataset([Configured(), dataset]),
        )
    ]
    assert all(keys.count(key) == 1 for key in keys)
    assert dataset_key(Configured(task="age")) == dataset_key(Configured(task="age"))
