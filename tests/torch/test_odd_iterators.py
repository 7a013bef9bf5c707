# SPDX-License-Identifier: Apache-2.0
"""Iterators and exits of the users' that are legal, and that few write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.torch import DataLoader


class Restarts:
    """Begins anew whenever it is asked for an iterator, and is its own."""

    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        self.number += 1
        if self.number == 6:
            raise StopIteration
        return self.number


class NextAlone:
    def __iter__(self):
        return self.Numbers()

    class Numbers:
        """An iterator without `__iter__`."""

        number = -1

        def __next__(self):
            self.number += 1
            if self.number == 6:
                raise StopIteration
            return self.number


@pytest.mark.parametrize("numbers", [Restarts, NextAlone])
@pytest.mark.parametrize("batch_size", [2, 4, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"monitor": "full"},
        {"seed": 3},
        {"on_error": "skip"},
        {"num_workers": 1},
        {"num_workers": 1, "monitor": "full"},
        {"num_workers": 1, "backend": "thread"},
    ],
    ids=str,
)
def test_an_iterator_is_asked_for_once(numbers, batch_size, options):
    dataset = type("Numbers", (numbers, torch.utils.data.IterableDataset), {})()
    expected = list(torch.utils.data.DataLoader(dataset, batch_size))
    found = list(DataLoader(dataset, batch_size, **options))
    assert [np.asarray(b).tolist() for b in found] == [np.asarray(b).tolist() for b in expected]


@pytest.mark.parametrize("options", [{}, {"monitor": "full"}, {"seed": 3}, {"on_error": "skip"}])
def test_a_generator_exit_of_a_sample_is_no_end(options):
    class Exits:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 3:
                raise GeneratorExit("a sample's")
            return index

    loader = DataLoader(Exits(), 2, **options)
    batches = iter(loader)
    next(batches)
    with pytest.raises(GeneratorExit, match="a sample's"):
        next(batches)
    assert loader.state_dict()["batches"] == 1
