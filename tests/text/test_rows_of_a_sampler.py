# SPDX-License-Identifier: Apache-2.0
"""The rows that `PackingSampler` plans are those that `PackedCollate` makes."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.documents import some_documents

from penstock import FaultPolicy, Loader
from penstock.data import Dataset
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


class _DiesOnce(Dataset):
    """Documents, of which one ends the worker that reads it first."""

    def __init__(self, documents, deadly, marker):
        self._documents, self._deadly, self._marker = documents, deadly, marker

    def __len__(self):
        return len(self._documents)

    def __getitem__(self, index):
        if index == self._deadly and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._documents[index]


@pytest.mark.parametrize(("ranks", "ranks_later"), [(1, 4), (2, 1), (4, 2)])
def test_every_token_comes_once_over_dead_workers_and_another_number_of_ranks(
    tmp_path, ranks, ranks_later
):
    documents = some_documents(210)  # they fill a multiple of four rows: none comes twice
    lengths = np.array([len(document) for document in documents])

    def loader(rank, num_ranks, data):
        sampler = PackingSampler(lengths, 64, 4 // num_ranks, num_replicas=num_ranks, rank=rank)
        return Loader(
            data,
            batch_sampler=sampler,
            collate_fn=PackedCollate(64, pad_id=-1),
            num_workers=2,
            seed=5,
            on_error=FaultPolicy(max_respawns=1),
        )

    def tokens_of(batch):
        return [token for token in batch["input_ids"].ravel().tolist() if token >= 0]

    seen, states = [], []
    for rank in range(ranks):
        data = _DiesOnce(documents, 1, tmp_path / f"{rank}")
        first = loader(rank, ranks, data)
        batches = iter(first)
        for _ in range(3):
            seen += tokens_of(next(batches))
        states.append(first.state_dict())
        del batches
    assert all(state == states[0] for state in states)
    for rank in range(ranks_later):
        data = _DiesOnce(documents, 2, tmp_path / f"later {rank}")
        later = loader(rank, ranks_later, data)
        later.load_state_dict(states[0])
        for batch in later:
            seen += tokens_of(batch)
    assert sorted(seen) == sorted(np.concatenate(documents).tolist())
    assert list(tmp_path.iterdir())  # a worker died
