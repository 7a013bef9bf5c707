# SPDX-License-Identifier: Apache-2.0
"""`PackedCollate` makes what a plain loop over documents makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.documents import some_documents

from penstock import Loader
from penstock.data import RaggedArray
from penstock.errors import CollateError, ConfigError
from penstock.text import PackedCollate, TokenFile

PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids")


def packed_by_a_loop(documents, max_tokens, labels=None, *, flat=False, shifted=False, pad=0):
    """The batch, document after document and token after token."""
    rows = [[]]
    for number, document in enumerate(documents):
        if not flat and sum(len(documents[k]) for k in rows[-1]) + len(document) > max_tokens:
            rows.append([])
        rows[-1].append(number)
    width = sum(map(len, documents)) if flat else max_tokens
    batch = {name: [] for name in PER_TOKEN}
    bounds = [0]
    for row in rows:
        made = {name: [] for name in PER_TOKEN}
        for place, number in enumerate(row):
            document = list(documents[number])
            own = document if labels is None else list(labels[number])
            made["input_ids"] += document
            made["position_ids"] += range(len(document))
            made["document_ids"] += [place] * len(document)
            if document:
                made["labels"] += [*own[1:], -100] if shifted else [-100, *own[1:]]
            bounds.append(bounds[-1] + len(document))
        rest = width - len(made["input_ids"])
        if rest:
            made["input_ids"] += [pad] * rest
            made["position_ids"] += range(rest)
            made["document_ids"] += [-1] * rest
            made["labels"] += [-100] * rest
            bounds.append(bounds[-1] + rest)
        for name in PER_TOKEN:
            batch[name].append(made[name])
    batch["cu_seqlens"] = bounds
    batch["max_seqlen"] = max(np.diff(bounds))
    batch["num_tokens"] = sum(label != -100 for row in batch["labels"] for label in row)
    return batch


def plain(batch):
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in batch.items()
    }


documents_of_tokens = st.lists(st.lists(st.integers(0, 99), max_size=8), min_size=1, max_size=12)


@given(documents_of_tokens, st.integers(8, 20), st.booleans(), st.booleans(), st.booleans())
def test_a_batch_is_that_of_a_plain_loop(documents, max_tokens, flat, shifted, in_a_row):
    samples = RaggedArray.of(documents) if in_a_row else documents
    layout = "flat" if flat else "rows"
    collate = PackedCollate(max_tokens, layout=layout, shift_labels=shifted, pad_id=7)
    expected = packed_by_a_loop(documents, max_tokens, flat=flat, shifted=shifted, pad=7)
    assert plain(collate(samples)) == expected


@given(documents_of_tokens, st.booleans())
def test_labels_of_their_own_are_masked_and_shifted_likewise(documents, shifted):
    labels = [[-100 if k % 3 else token for k, token in enumerate(d)] for d in documents]
    samples = [{"input_ids": d, "labels": x} for d, x in zip(documents, labels, strict=True)]
    expected = packed_by_a_loop(documents, 16, labels, shifted=shifted)
    assert plain(PackedCollate(16, shift_labels=shifted)(samples)) == expected


def test_dtypes_are_those_that_models_take():
    batch = PackedCollate(8)([[1, 2], np.array([3], np.uint16)])
    assert {key: value.dtype.name for key, value in batch.items() if hasattr(value, "dtype")} == {
        "input_ids": "int64",
        "labels": "int64",
        "position_ids": "int64",
        "document_ids": "int32",
        "cu_seqlens": "int32",
    }
    assert type(batch["max_seqlen"]) is type(batch["num_tokens"]) is int


def test_rows_are_those_of_a_sampler_that_filled_them_in_this_order():
    rows = [[5, 3], [8], [4, 2, 2], [1]]
    documents = [np.arange(length) for row in rows for length in row]
    batch = PackedCollate(8)(documents)
    counts = (batch["document_ids"].max(axis=1) + 1).tolist()
    assert counts == [len(row) for row in rows]


def test_what_is_beside_the_tokens_is_collated_by_the_default():
    samples = [
        {"input_ids": [1, 2], "image": np.full((2, 2), k, np.uint8), "name": f"n{k}", "id": k}
        for k in range(3)
    ]
    batch = PackedCollate(4)(samples)
    assert batch["image"].shape == (3, 2, 2)
    assert batch["id"].tolist() == [0, 1, 2]
    assert list(batch["name"]) == ["n0", "n1", "n2"]
    assert batch["input_ids"].tolist() == [[1, 2, 1, 2], [1, 2, 0, 0]]


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_same_with_any_workers(tmp_path, backend, num_workers):
    documents = some_documents(200)
    TokenFile.write(tmp_path / "t", documents, np.uint16)
    order = np.random.default_rng(1).permutation(200).tolist()
    batches = [order[k : k + 16] for k in range(0, 200, 16)]
    options = {"num_workers": num_workers} | ({"backend": backend} if num_workers else {})
    loader = Loader(
        TokenFile(tmp_path / "t"), batch_sampler=batches, collate_fn=PackedCollate(64), **options
    )
    made = [plain(batch) for batch in loader]
    assert made == [packed_by_a_loop([documents[k].tolist() for k in b], 64) for b in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_of_torch_gives_tensors(tmp_path, num_workers):
    torch = pytest.importorskip("torch")
    from penstock.torch import DataLoader

    TokenFile.write(tmp_path / "t", some_documents(), np.uint16)
    samples = [{"input_ids": d, "image": torch.ones(2)} for d in some_documents()]
    for dataset in (TokenFile(tmp_path / "t"), samples):
        loader = DataLoader(
            dataset, batch_size=10, collate_fn=PackedCollate(64), num_workers=num_workers
        )
        for batch in loader:
            tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
            assert len(tensors) == 5 + ("image" in batch)
            assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
            assert batch["cu_seqlens"].dtype == torch.int32


def test_bad_documents_are_left_out_of_a_batch_where_the_policy_says_so():
    documents = [[1, 2], [3] * 99, [4]]
    with pytest.warns(UserWarning, match="1 bad sample left out"):
        (batch,) = Loader(
            documents, batch_size=3, collate_fn=PackedCollate(8), on_error="skip", num_workers=0
        )
    assert batch["input_ids"].tolist() == [[1, 2, 4, 0, 0, 0, 0, 0]]


def test_a_document_that_is_longer_than_a_row_is_named():
    said = r"sample 1 \(number 1 of the batch\) has 9 tokens, and a row takes max_tokens=8"
    with pytest.raises(CollateError, match=said) as caught:
        list(Loader([[1], [0] * 9], batch_size=2, collate_fn=PackedCollate(8)))
    assert "TokenFile(path, max_tokens=8)" in str(caught.value)
    with pytest.raises(CollateError, match="has 9 tokens"):
        PackedCollate(8, layout="flat")([[1], [0] * 9])


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([[1], "text"], "sample 1 of the batch is not a document: a str"),
        ([[0.5]], r"not a document: a list of float64, shape \(1,\)"),
        ([[[1, 2]]], r"not a document: a list of int64, shape \(1, 2\)"),
        ([{"text": "a"}], r"all dicts with 'input_ids'\. .* a dict of \['text'\]"),
        ([{"input_ids": [1]}, [2]], "all dicts with 'input_ids'"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "all dicts with 'labels'"),
    ],
)
def test_what_is_no_document_is_an_error(samples, said):
    with pytest.raises(TypeError, match=said):
        PackedCollate(8)(samples)


def test_labels_of_another_length_are_an_error():
    with pytest.raises(CollateError, match="has 2 input_ids and 1 labels"):
        PackedCollate(8)([{"input_ids": [1, 2], "labels": [1]}])


def test_a_value_per_token_beside_the_tokens_says_what_to_do():
    samples = [{"input_ids": [1] * n, "attention_mask": [1] * n} for n in (2, 3)]
    with pytest.raises(CollateError) as caught:
        PackedCollate(8)(samples)
    assert any("such as attention_mask" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("arguments", [{"max_tokens": 0}, {"max_tokens": 8, "layout": "padded"}])
def test_arguments_are_checked(arguments):
    with pytest.raises(ConfigError):
        PackedCollate(**arguments)
