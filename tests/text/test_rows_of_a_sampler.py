# SPDX-License-Identifier: Apache-2.0
"""The rows that `PackingSampler` plans are those that `PackedCollate` makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.documents import some_documents

from penstock import Loader
from penstock.sampling import PackingSampler
from penstock.text import PackedCollate, TokenFile


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 9))
def test_each_batch_has_as_many_rows_as_were_planned(lengths, rows, seed):
    documents = [np.full(length, number) for number, length in enumerate(lengths)]
    sampler = PackingSampler(lengths, max_tokens=16, rows=rows, seed=seed)
    collate = PackedCollate(16, pad_id=-1)
    num_rows, seen = 0, []
    for indices in sampler:
        batch = collate([documents[index] for index in indices])
        num_rows += len(batch["input_ids"])
        assert len(batch["input_ids"]) <= rows
        seen += [int(token) for token in batch["input_ids"].reshape(-1) if token >= 0]
    assert num_rows == sampler.num_rows
    assert sorted(seen) == sorted(np.concatenate(documents).tolist())


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "backend": "thread"}]
)
def test_a_loader_of_rows_goes_on_where_it_was(tmp_path, options):
    TokenFile.write(tmp_path / "t", some_documents(300), np.uint16)
    file = TokenFile(tmp_path / "t", max_tokens=32)

    def loader():
        sampler = PackingSampler(file.lengths, max_tokens=32, rows=4, seed=5)
        return Loader(file, batch_sampler=sampler, collate_fn=PackedCollate(32), seed=5, **options)

    whole = [batch["input_ids"].tolist() for batch in loader()]
    first = loader()
    iterator = iter(first)
    begun = [next(iterator)["input_ids"].tolist() for _ in range(3)]
    state = first.state_dict()
    del iterator
    again = loader()
    again.load_state_dict(state)
    assert begun + [batch["input_ids"].tolist() for batch in again] == whole
