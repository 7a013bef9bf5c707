# SPDX-License-Identifier: Apache-2.0
"""A worker whose dataset does not use torch never imports it, and still gives its batches."""

from __future__ import annotations

import pytest
import torch
from tests.process.plain_datasets import ImportsLate, Mixed, Plain, Unstackable
from tests.support.comparing import assert_same
from tests.support.processes import python

from penstock.torch import DataLoader


def batches_of(loader_class, dataset, method="spawn", **options):
    torch.manual_seed(11)
    loader = loader_class(
        dataset, num_workers=2, multiprocessing_context=method, shuffle=True, **options
    )
    return list(loader)


def torchs(dataset, **options):
    """Torch's batches, which do not depend on the start method: a fork has torch already."""
    return batches_of(torch.utils.data.DataLoader, dataset, "fork", **options)


def without_workers(dataset, **options):
    """What torch raises it raises without workers too, and leaves none that take 5 s to end."""
    return list(torch.utils.data.DataLoader(dataset, **options))


@pytest.mark.parametrize("batch_size", [5, None])
def test_batches_of_a_worker_without_torch_are_bit_identical(batch_size):
    theirs = torchs(Plain(), batch_size=batch_size)
    ours = batches_of(DataLoader, Plain(), batch_size=batch_size)
    assert all(torch.as_tensor(batch.pop("torch")).all() for batch in theirs)
    assert not any(torch.as_tensor(batch.pop("torch")).any() for batch in ours)
    assert_same(theirs, ours)


def test_torch_is_seeded_and_set_up_when_a_sample_imports_it():
    theirs = torchs(ImportsLate(), batch_size=5)
    ours = batches_of(DataLoader, ImportsLate(), batch_size=5)
    for batch in (*theirs, *ours):
        del batch["torch"]
    assert_same(theirs, ours)
    assert all((batch["threads"] == 1).all() for batch in ours)


def test_what_has_no_tensor_type_is_refused_as_torch_does():
    with pytest.raises(TypeError, match="default_collate: batch must contain tensors"):
        without_workers(Unstackable(), batch_size=2)
    with pytest.raises(TypeError, match="default_collate: batch must contain tensors"):
        batches_of(DataLoader, Unstackable(), batch_size=2)


def test_values_of_mixed_types_become_what_torch_makes_of_them():
    theirs = torchs(Mixed(), batch_size=4)
    ours = batches_of(DataLoader, Mixed(), batch_size=4)
    assert_same(theirs, ours)


LATE = """
import sys
import numpy as np
import random
{early}

class Late:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        import torch
        return random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()

if __name__ == "__main__":
    from penstock import Loader
    loader = Loader(Late(), num_workers={workers}, multiprocessing_context={context!r}, seed=7)
    print([[part.tolist() for part in batch] for batch in loader])
"""


def test_torch_imported_by_a_sample_draws_what_it_would_have_drawn(tmp_path):
    outputs = []
    for number, (early, workers, context) in enumerate(
        [("import torch", 0, None), ("", 1, "spawn"), ("", 0, None)]
    ):
        script = tmp_path / f"late_{number}.py"
        script.write_text(LATE.format(early=early, workers=workers, context=context))
        outputs.append(python(script).stdout)
    assert outputs[0] == outputs[1] == outputs[2] != ""
