# SPDX-License-Identifier: Apache-2.0
"""Labels of Hugging Face datasets are read from their Arrow columns, by the real package."""

from __future__ import annotations

import numpy as np
import pytest
import torch.utils.data as torch_data

from penstock.data import ConcatDataset, Subset
from penstock.data.labels.known import class_names_of, known_labels, labels_given_or_known
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError

hf = pytest.importorskip("datasets")


READ = hf.Dataset.__getitem__


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    """No row is read."""

    def read(self, key):
        raise AssertionError(f"row {key} was read")

    monkeypatch.setattr(hf.Dataset, "__getitem__", read)
    monkeypatch.setattr(hf.Dataset, "__iter__", lambda self: read(self, "iter"))


def of_columns(features=None, **columns):
    typed = None if features is None else hf.Features(features)
    return hf.Dataset.from_dict(columns, features=typed)


def rows_of(labels):
    assert isinstance(labels, RaggedArray)
    return [row.tolist() for row in labels]


PETS = hf.ClassLabel(names=["cat", "dog", "eel"])


def pets():
    return of_columns({"x": hf.Value("int64"), "kind": PETS}, x=[1, 2, 3, 4], kind=[2, 0, 1, 1])


def test_the_only_class_column_is_the_labels_whatever_its_name():
    assert known_labels(pets()).tolist() == [2, 0, 1, 1]
    assert class_names_of(pets()) == ("cat", "dog", "eel")


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # of its sort()
def test_rows_are_in_the_order_of_select_shuffle_sort_and_concatenation():
    dataset = pets()
    assert known_labels(dataset.select([3, 0, 0, 2])).tolist() == [1, 2, 2, 1]
    assert known_labels(dataset.select(range(1, 3))).tolist() == [0, 1]
    shuffled = dataset.shuffle(seed=2)
    assert known_labels(shuffled).tolist() == READ(shuffled, slice(None))["kind"]
    both = hf.concatenate_datasets([dataset, shuffled.select([1])])
    assert known_labels(both).tolist() == [2, 0, 1, 1, known_labels(shuffled)[1]]
    assert known_labels(dataset.sort("x", reverse=True)).tolist() == [1, 1, 0, 2]
    split = dataset.train_test_split(2, seed=0)
    assert sorted([*known_labels(split["train"]), *known_labels(split["test"])]) == [0, 1, 1, 2]


def test_formats_and_transforms_of_rows_change_nothing():
    dataset = pets()
    assert known_labels(dataset.with_format("numpy")).tolist() == [2, 0, 1, 1]
    assert known_labels(dataset.with_transform(lambda rows: {})).tolist() == [2, 0, 1, 1]
    assert known_labels(dataset.rename_column("kind", "k")).tolist() == [2, 0, 1, 1]
    assert known_labels(dataset.remove_columns("kind")) is None


@pytest.mark.parametrize("name", ["label", "labels", "target"])
def test_a_column_called_label_will_do(name):
    assert known_labels(of_columns(x=[0.5, 1.5], **{name: [3, 1]})).tolist() == [3, 1]
    assert known_labels(of_columns(**{name: ["b", "a"]})).tolist() == ["b", "a"]
    assert known_labels(of_columns(**{name: [True, False]})).tolist() == [True, False]
    assert rows_of(known_labels(of_columns(**{name: [[3, 3], [], [1]]}))) == [[3, 3], [], [1]]
    assert rows_of(known_labels(of_columns(**{name: [["b", "a"], []]}))) == [[1, 0], []]
    one_hot = of_columns(**{name: [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]})
    assert rows_of(known_labels(one_hot)) == [[1, 2], []]
    assert known_labels(of_columns(**{name: [0.5, 1.5]})) is None
    assert known_labels(of_columns(**{name: [1, None]})) is None
    assert known_labels(of_columns(**{name: [[1], None]})) is None
    assert known_labels(of_columns(**{name: [[1, None]]})) is None
    assert known_labels(of_columns(**{name: [[[1]], [[2]]]})) is None


@pytest.mark.parametrize(
    "objects",
    [
        {"box": hf.List(hf.Value("float32")), "category": hf.List(PETS)},
        hf.List({"box": hf.Value("float32"), "category": PETS}),
        hf.LargeList({"box": hf.Value("float32"), "category": PETS}),
    ],
    ids=["lists", "list of structs", "large list"],
)
def test_the_classes_of_objects_are_rows(objects):
    first = {"box": [0.5, 0.5], "category": [2, 2]}
    others = [{"box": [], "category": []}, {"box": [0.5], "category": [1]}]
    rows = [first, *others]
    if not isinstance(objects, dict):
        rows = [
            [dict(zip(row, pair, strict=True)) for pair in zip(*row.values(), strict=True)]
            for row in rows
        ]
    dataset = of_columns({"objects": objects}, objects=rows)
    assert rows_of(known_labels(dataset)) == [[2, 2], [], [1]]
    assert rows_of(known_labels(dataset.select([2, 0]))) == [[1], [2, 2]]
    assert rows_of(known_labels(dataset.select(range(1, 3)))) == [[], [1]]
    joined = hf.concatenate_datasets([dataset, dataset.select(range(1, 3))])
    assert rows_of(known_labels(joined)) == [[2, 2], [], [1], [], [1]]
    assert class_names_of(dataset) == ("cat", "dog", "eel")
    assert rows_of(known_labels(dataset, "objects.category")) == [[2, 2], [], [1]]
    if isinstance(objects, dict):
        assert rows_of(known_labels(dataset.flatten())) == [[2, 2], [], [1]]


def test_of_several_class_columns_one_has_to_be_named():
    dataset = of_columns({"fine": PETS, "coarse": PETS}, fine=[2, 1], coarse=[0, 0])
    assert known_labels(dataset) is None
    assert class_names_of(dataset) is None
    with pytest.raises(ConfigError, match=r"several columns are classes \(fine, coarse\): choose"):
        labels_given_or_known(dataset, "ClassBalancedSampler")
    assert known_labels(dataset, "coarse").tolist() == [0, 0]


def test_subsets_and_concatenations_of_them_are_looked_through():
    part = torch_data.Subset(pets(), [0, 2])
    assert known_labels(ConcatDataset([part, Subset(pets(), [1])])).tolist() == [2, 1, 0]
    assert class_names_of(part) == ("cat", "dog", "eel")


def test_a_stream_of_it_has_no_known_labels():
    assert known_labels(pets().to_iterable_dataset()) is None


def test_a_column_in_one_piece_is_not_copied():
    dataset = of_columns(label=list(range(100)))
    column = dataset.data.column("label").chunk(0).to_numpy()
    assert np.shares_memory(known_labels(dataset), column)


def test_a_dataset_without_a_class_column_is_refused_with_its_columns():
    with pytest.raises(ConfigError, match=r"none of its columns \(text, stars\)") as caught:
        labels_given_or_known(of_columns(text=["a", "b"], stars=[1, 2]), "Sampler")
    assert "`penstock.labels_of(dataset, column='text')`" in str(caught.value)
    splits = hf.DatasetDict(train=pets(), test=pets())
    with pytest.raises(
        ConfigError, match=r"DatasetDict holds \['test', 'train'\].*dataset\['test'"
    ):
        labels_given_or_known(splits, "Sampler")


def test_lists_of_zeros_and_ones_may_be_columns_or_classes():
    with pytest.raises(ConfigError, match="column 'labels' is rows of 2 zeros and ones each"):
        labels_given_or_known(of_columns(labels=[[0, 1], [1, 0]]), "Sampler")
    assert known_labels(of_columns(labels=[[3], [1]])).tolist() == [3, 1]


def test_texts_in_lists_are_numbered_by_the_rows_that_are_chosen_and_by_all_parts():
    a = of_columns(labels=[["bus"], ["bus", "cat"]])
    b = of_columns(labels=[["cat"], ["dog", "cat"]])
    assert rows_of(known_labels(ConcatDataset([a, b]))) == [[0], [0, 1], [1], [2, 1]]
    assert rows_of(known_labels(b.select([1, 0]))) == [[1, 0], [0]]


def test_a_sampler_takes_one_of_several_columns():
    from penstock.sampling import ClassBalancedSampler

    ages = hf.ClassLabel(names=["young", "old"])
    several = of_columns({"kind": PETS, "age": ages}, kind=[2, 0, 1, 1], age=[0, 1, 0, 0])
    sampler = ClassBalancedSampler(Subset(several, [0, 1, 2]), column="age")
    assert sampler.labels.tolist() == [0, 1, 0]
    assert sampler.class_names == ("young", "old")
    with pytest.raises(ConfigError, match=r"several columns are classes \(kind, age\)"):
        ClassBalancedSampler(several)
    with pytest.raises(ConfigError, match=r"there is no column 'sex'; there are kind, age"):
        ClassBalancedSampler(several, column="sex")
