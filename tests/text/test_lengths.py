# SPDX-License-Identifier: Apache-2.0
"""`lengths_of` finds lengths without reading tokens, or says what to give."""

from __future__ import annotations

import numpy as np
import pytest
from tests.text.documents import some_documents

from penstock.data import ConcatDataset, IterableDataset, RaggedArray, Subset
from penstock.errors import ConfigError
from penstock.text import TokenFile, lengths_of

DOCUMENTS = some_documents()
LENGTHS = list(map(len, DOCUMENTS))


class Unreadable:
    """Says its lengths, and cannot be read."""

    lengths = np.array([3, 1, 2], np.uint16)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise AssertionError("a document was read")


def test_a_token_file_says_its_lengths(tmp_path):
    TokenFile.write(tmp_path / "t", DOCUMENTS)
    lengths = lengths_of(TokenFile(tmp_path / "t"))
    assert lengths.dtype == np.int32
    assert lengths.tolist() == LENGTHS
    assert lengths_of(TokenFile(tmp_path / "t").blocks(7)).tolist() == [7] * (sum(LENGTHS) // 7)


def test_no_document_is_read_where_the_lengths_are_known():
    assert lengths_of(Unreadable()).tolist() == [3, 1, 2]
    both = ConcatDataset([Subset(Unreadable(), [2, 0]), Unreadable()])
    assert lengths_of(both).tolist() == [2, 3, 3, 1, 2]


def test_torchs_subsets_and_concatenations_are_looked_through():
    data = pytest.importorskip("torch.utils.data")
    both = data.ConcatDataset([data.Subset(Unreadable(), [2, 0]), Unreadable()])
    assert lengths_of(both).tolist() == [2, 3, 3, 1, 2]


@pytest.mark.parametrize(
    "documents",
    [
        DOCUMENTS,
        [document.tolist() for document in DOCUMENTS],
        [{"input_ids": document} for document in DOCUMENTS],
        RaggedArray.of(DOCUMENTS),
        LENGTHS,
        np.array(LENGTHS, np.int32),
    ],
)
def test_lists_and_arrays_are_taken(documents):
    assert lengths_of(documents).tolist() == LENGTHS


def test_the_columns_of_a_hugging_face_dataset_are_taken():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"input_ids": [d.tolist() for d in DOCUMENTS], "x": LENGTHS})
    assert lengths_of(table).tolist() == LENGTHS
    chosen = table.select([4, 2])
    assert lengths_of(chosen).tolist() == [LENGTHS[4], LENGTHS[2]]
    joined = datasets.concatenate_datasets([table, table])
    assert lengths_of(joined).tolist() == LENGTHS * 2
    named = table.rename_column("x", "length").remove_columns("input_ids")
    assert lengths_of(named).tolist() == LENGTHS
    with pytest.raises(ConfigError, match=r"'length' or 'input_ids', and the dataset has \['x'\]"):
        lengths_of(table.remove_columns("input_ids"))
    with pytest.raises(ConfigError, match="how many tokens a transform makes"):
        lengths_of(table.with_transform(lambda rows: rows))
    missing = datasets.Dataset.from_dict({"input_ids": [[1], None]})
    with pytest.raises(ConfigError, match="1 rows have no 'input_ids'"):
        lengths_of(missing)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DOCUMENTS)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Stream(), "does not know how many tokens the samples of Stream have"),
        ("text", "does not know how many tokens"),
        ([1.5], "document 0 is a float"),
        ([{"text": "a"}], "document 0 is a dict"),
        (np.array([0.5]), r"should be integers, one per document; got float64 of shape \(1,\)"),
        (np.zeros((2, 2), int), r"got int64 of shape \(2, 2\)"),
        ([3, -1], "document 1 of list of 2 has -1 tokens"),
    ],
)
def test_what_has_no_lengths_says_what_to_give(dataset, said):
    with pytest.raises(ConfigError, match=said):
        lengths_of(dataset)
