# SPDX-License-Identifier: Apache-2.0
"""`labels_of` returns what a dataset knows, or what a function says of every sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch.utils.data as torch_data

from penstock import labels_of
from penstock.data import ArrayDataset, IterableDataset, RaggedArray, StackDataset, Subset
from penstock.errors import ConfigError


class Samples(list):
    """Samples as they are; a list subclass, so that it may have attributes."""


class Files(Samples):
    """Counts what is read of it."""

    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        return super().__getitem__(index)

    def describe(self, index):
        return f"{index:02}.jpg"


def rows_of(labels):
    assert isinstance(labels, RaggedArray)
    return [row.tolist() for row in labels]


def test_known_labels_are_returned_and_nothing_is_read():
    dataset = Files("abcd")
    dataset.labels = [0, 10, 20, 30]
    labels = labels_of(Subset(dataset, [0, 3]))
    assert (labels.dtype, labels.tolist(), dataset.num_read) == (np.int64, [0, 30], 0)


def test_known_texts_and_bools_become_numbers():
    texts = StackDataset(image=range(4), label=["eel", "cat", "dog", "cat"])
    assert labels_of(texts).tolist() == [2, 0, 1, 0]
    bools = labels_of(ArrayDataset(np.zeros(2), np.array([True, False])))
    assert (bools.dtype, bools.tolist()) == (np.int64, [1, 0])
    rows = labels_of(StackDataset(image=range(2), labels=[[4], [2, 2]]))
    assert rows_of(rows) == [[4], [2, 2]]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([3, np.int16(4), 3], [3, 4, 3]),
        (["b", "a", "b"], [1, 0, 1]),
        ([[1], [], [2, 2]], [[1], [], [2, 2]]),
        ([["b"], ["a", "b"], []], [[1], [0, 1], []]),
        ([np.array([True, False]), np.array([True, True]), np.zeros(2, bool)], [[0], [0, 1], []]),
    ],
    ids=["numbers", "texts", "rows", "rows of texts", "columns"],
)
def test_a_function_is_asked_for_the_label_of_every_sample(labels, expected):
    dataset = Files([("x", label) for label in labels])
    dataset.labels = [9, 9, 9]  # is not asked
    found = labels_of(dataset, get_label=lambda sample: sample[1])
    assert (rows_of(found) if isinstance(found, RaggedArray) else found.tolist()) == expected
    assert dataset.num_read == 3


def test_a_sample_that_cannot_be_read_is_named():
    with pytest.raises(ZeroDivisionError) as caught:
        labels_of(Files([1, 0, 1]), get_label=lambda sample: 1 // sample)
    assert caught.value.__notes__ == ["labels_of was reading sample 1 (01.jpg)."]


def test_what_a_function_returns_has_to_be_labels():
    with pytest.raises(ConfigError, match=r"labels of Samples are a list of NoneType and int\."):
        labels_of(Samples([1, None]), get_label=lambda sample: sample)
    with pytest.raises(ConfigError, match="rows of 2 zeros and ones each"):
        labels_of(Samples([[0, 1], [1, 0]]), get_label=lambda sample: sample)


def test_an_argument_that_is_gone_says_what_to_use():
    with pytest.raises(TypeError, match=r"no argument scan= any more: use get_label="):
        labels_of(Samples([("x", 1)]), scan=True)


def test_a_hugging_face_column_can_be_named():
    hf = pytest.importorskip("datasets")
    dataset = hf.Dataset.from_dict({"label": [1, 2, 3], "breed": ["b", "a", "b"]})
    assert labels_of(dataset).tolist() == [1, 2, 3]
    assert labels_of(dataset.select([2, 1]), column="breed").tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"DatasetDict holds \['test', 'train'\]: give labels_of"):
        labels_of(hf.DatasetDict(train=dataset, test=dataset))


def test_unknown_labels_are_refused_with_what_to_give():
    dataset = Files([("x", 1)])
    with pytest.raises(ConfigError) as caught:
        labels_of(Subset(dataset, [0]))
    message = str(caught.value)
    assert message.startswith("labels_of cannot see the labels of the samples of Subset of Files")
    assert "`labels`, `targets`, `_labels`, `samples`, `_samples`, `imgs`" in message
    assert "an attribute `labels`" in message
    assert "one label per sample" in message
    assert "labels_of(dataset, get_label=lambda sample: sample[1])" in message
    with pytest.raises(ConfigError, match="nothing called 'age' holds them"):
        labels_of(dataset, column="age")
    assert dataset.num_read == 0


@pytest.mark.parametrize("base", [IterableDataset, torch_data.IterableDataset])
def test_a_stream_is_sent_to_the_shuffle_that_balances(base):
    class Stream(base):
        def __iter__(self):
            return iter([("x", 1)])

    with pytest.raises(ConfigError, match=r"Stream is a stream.*BalancedShuffle"):
        labels_of(Stream())


@pytest.mark.parametrize("wrong", [5, iter([]), None, {1, 2}], ids=lambda value: type(value))
def test_what_is_no_dataset_is_refused(wrong):
    with pytest.raises(ConfigError, match="labels_of cannot see the labels"):
        labels_of(wrong)


def test_a_dataset_with_several_classes_per_sample_is_packed_with_them(tmp_path):
    stores = pytest.importorskip("penstock.stores")
    dataset = StackDataset(text=["a", "b", "c"], labels=RaggedArray.of([[4, 4], [], [1]]))
    stores.pack(dataset, tmp_path / "store.lmdb", num_workers=0)
    with stores.open_store(tmp_path / "store.lmdb") as store:
        assert rows_of(store.labels) == [[4, 4], [], [1]]
        assert rows_of(labels_of(stores.StoreDataset(store))) == [[4, 4], [], [1]]
