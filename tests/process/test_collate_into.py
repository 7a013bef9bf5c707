# SPDX-License-Identifier: Apache-2.0
"""A collate function with `collate_into` writes into the slot, in every kind of worker."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from tests.process.slot_collates import Doubled, Rows

from penstock import Loader
from penstock.collate import Collator
from penstock.errors import CollateError
from penstock.torch import DataLoader
from penstock.transport.arena import SlotPool, SlotWriter
from penstock.transport.packing import pack

START_METHODS = [(0, None), (2, "fork"), (2, "spawn")]


class Single(Doubled):
    """Has `collate_into`, which is for batches, and takes a sample by itself."""

    def collate_into(self, samples, out):
        raise AssertionError("a sample is no batch")

    def __call__(self, sample):
        return sample


@pytest.mark.parametrize(("num_workers", "method"), START_METHODS)
def test_a_loader_of_arrays_gives_what_was_written(num_workers, method):
    loader = Loader(
        Rows(), 4, num_workers=num_workers, multiprocessing_context=method, collate_fn=Doubled()
    )
    batches = list(loader)
    assert [type(batch) for batch, _, _ in batches] == [np.ndarray] * 3
    found = np.concatenate([batch for batch, _, _ in batches])
    assert np.array_equal(
        found, np.stack([row * 2 for row, _ in map(Rows().__getitem__, range(12))])
    )
    assert [list(names) for _, names, _ in batches][2] == [f"sample {n}" for n in range(8, 12)]
    batches[0][0][:] = 5  # it is the user's
    assert (batches[1][0][0] == 8).all()


@pytest.mark.parametrize(("num_workers", "method"), START_METHODS)
def test_a_loader_of_tensors_gives_tensors(num_workers, method):
    loader = DataLoader(
        Rows(), 4, num_workers=num_workers, multiprocessing_context=method, collate_fn=Doubled()
    )
    batches = list(loader)
    assert [type(batch) for batch, _, _ in batches] == [torch.Tensor] * 3
    assert [batch[:, 0, 0].tolist() for batch, _, _ in batches][1] == [8.0, 10.0, 12.0, 14.0]
    assert list(batches[0][1]) == [f"sample {n}" for n in range(4)]  # text has no tensor type


def test_what_lies_in_the_slot_is_not_placed_again():
    pool = SlotPool()
    writer = SlotWriter(pool)
    batch, _, _ = Doubled().collate_into([Rows()[0], Rows()[1]], Collator(writer.empty))
    taken = writer.reserve(64)
    packed = pack(batch, writer)
    (extent,) = packed.buffers
    assert extent.size_bytes == batch.nbytes
    assert taken.slot == extent.slot or extent.offset == 0  # before what was reserved after it
    assert np.array_equal(
        pool.mapping(extent.slot).bytes()[: batch.nbytes], batch.view(np.uint8).ravel()
    )
    del batch
    for new in pool.take_new():
        os.close(new.fd)


def test_a_spawned_worker_without_torch_stays_without_and_gives_tensors():
    loader = DataLoader(
        Rows(), 6, num_workers=1, multiprocessing_context="spawn", collate_fn=Doubled()
    )
    for batch, _, notes in loader:
        assert (notes["torch"], notes["kind"]) == (False, "late tensor")
        assert isinstance(batch, torch.Tensor)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_the_samples(num_workers):
    loader = Loader(Rows(odd={6}), 4, num_workers=num_workers, collate_fn=Doubled())
    with pytest.raises(CollateError) as caught:
        list(loader)
    assert str(caught.value) == (
        "sample 4 (number 0 of the batch) and sample 6 (number 2 of the batch) differ in width."
    )
    assert any("while collating samples" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_does_not_fit_is_left_out_by_a_policy(num_workers):
    loader = Loader(
        Rows(odd={6}), 4, num_workers=num_workers, collate_fn=Doubled(), on_error="skip"
    )
    with pytest.warns(UserWarning, match="1 bad sample"):
        batches = list(loader)
    assert [len(batch) for batch, _, _ in batches] == [4, 3, 4]
    assert batches[1][0][:, 0, 0].tolist() == [8.0, 10.0, 14.0]
    assert [failure.index for failure in loader.failures] == [6]
