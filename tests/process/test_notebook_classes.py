# SPDX-License-Identifier: Apache-2.0
"""Classes and functions of a prompt, a notebook or a function, for workers that are not forked."""

from __future__ import annotations

import pytest
from tests.support.processes import python

from penstock import Loader
from penstock.errors import UnpicklableError

PROGRAM = """
import sys
import numpy as np
from penstock import Loader

class Mine:
    def __init__(self):
        self.transform = lambda x: x + 0.5
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return np.full(2000, self.transform(index))

def firsts(samples):
    return [float(sample[0]) for sample in samples]

loader = Loader(Mine(), 2, num_workers=1, collate_fn=firsts, multiprocessing_context=METHOD)
print(list(loader))
sys.modules["cloudpickle"] = None  # as if it were not installed
loader = Loader(Mine(), 2, num_workers=1, collate_fn=firsts, multiprocessing_context=METHOD)
try:
    list(loader)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_class_of_a_prompt_reaches_the_workers_by_cloudpickle_or_is_explained(method):
    pytest.importorskip("cloudpickle")
    program = PROGRAM.replace("METHOD", repr(method))
    done = python("-c", program)
    batches, error = done.stdout.split("\n", 1)
    assert batches == "[[0.5, 1.5], [2.5, 3.5]]", done.stderr
    assert error.startswith("dataset.transform cannot be sent to a worker: ")
    assert "is defined in a notebook, or at a prompt (__main__)" in error
    assert "put it into a module" in error
    assert 'multiprocessing_context="fork"' in error
    assert "pip install cloudpickle" in error


def local_parts():
    class Local:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return index

    return Local(), lambda samples: [sample + 10 for sample in samples]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_lambdas_and_local_classes_reach_the_workers_by_cloudpickle(method):
    pytest.importorskip("cloudpickle")
    dataset, collate = local_parts()
    loader = Loader(dataset, 2, num_workers=1, collate_fn=collate, multiprocessing_context=method)
    assert list(loader) == [[10, 11], [12]]


def test_an_open_file_is_not_read_whole_to_be_sent(tmp_path):
    dataset, _ = local_parts()
    path = tmp_path / "lines.txt"
    path.write_text("one\n")
    with path.open() as dataset.file:
        loader = Loader(dataset, num_workers=1, multiprocessing_context="spawn")
        with pytest.raises(UnpicklableError, match=r"^dataset\.file cannot be sent"):
            iter(loader)
