# SPDX-License-Identifier: Apache-2.0
"""Labels are found where datasets keep them, and no sample is read for it."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import (
    ArrayDataset,
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    PackedList,
    StackDataset,
    Subset,
    random_split,
)
from penstock.data.labels.known import class_names_of, known_labels, labels_given_or_known
from penstock.data.labels.values import NotLabelsError, to_labels
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError


class Images(torch_data.Dataset):
    """Samples that must not be read."""

    def __init__(self, length=4, **attributes):
        self.length = length
        self.__dict__.update(attributes)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError(f"sample {index} was read")


def rows_of(labels):
    assert isinstance(labels, RaggedArray)
    return [row.tolist() for row in labels]


PAIRS = [("a.jpg", 2), ("b.jpg", 0), ("c.jpg", 2), ("d.jpg", 1)]


@pytest.mark.parametrize(
    "attributes",
    [
        {"labels": [2, 0, 2, 1]},
        {"targets": torch.tensor([2, 0, 2, 1])},
        {"_labels": np.array([2, 0, 2, 1], np.uint8)},
        {"samples": PAIRS},
        {"_samples": tuple(PAIRS)},
        {"imgs": [list(pair) for pair in PAIRS]},
        {"samples": PackedList(PAIRS)},
        {"labels": np.array([[2], [0], [2], [1]])},
        {"labels": None, "targets": (2, 0, 2, 1)},
        {"labels": lambda: 3, "targets": (2, 0, 2, 1)},
        {"labels": ["a/1.png", "a/2.png", "a/3.png", "a/4.png"], "samples": PAIRS},
        {"labels": np.array([0.5, 1.5, 2.5, 3.5]), "targets": [2, 0, 2, 1]},
        {"get_labels": lambda: [2, 0, 2, 1]},
        {"targets": [torch.tensor(n) for n in (2, 0, 2, 1)]},
    ],
    ids=lambda attributes: "-".join(attributes),
)
def test_labels_are_found_in_what_datasets_keep(attributes):
    assert known_labels(Images(**attributes)).tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize(
    "attributes",
    [
        {"labels": [1, 2, 3]},
        {"samples": PAIRS[:3]},
        {"get_labels": lambda: [1, 2, 3]},
        {"targets": [1, 2, 3], "samples": PAIRS},  # one of the two is out of date
        {"samples": [("a.jpg", "a.png")] * 4},
        {"samples": ["a.jpg"] * 4},
        {"samples": [("a.jpg", 0), ("b.jpg", None), ("c.jpg", 0), ("d.jpg", 0)]},
        {"targets": np.zeros((4, 2, 2), int)},
        {"targets": np.array([[3, 0], [0, 1], [1, 1], [0, 0]])},
        {"targets": [1, None, 2, 3]},
        {"targets": [1, "a", 2, 3]},
        {"targets": {0: 1, 1: 1, 2: 1, 3: 1}},
        {"targets": [10**30, 1, 2, 3]},
        {"targets": [2**63, -1, 2, 3]},
        {"get_labels": lambda index: index},
        {},
    ],
    ids=lambda attributes: "-".join(attributes) or "nothing",
)
def test_what_does_not_fit_or_is_no_class_is_no_answer(attributes):
    assert known_labels(Images(**attributes)) is None


def test_a_property_that_fails_is_no_answer_and_hides_no_other():
    class Failing(Images):
        targets = (3, 1, 3, 1)

        @property
        def labels(self):
            raise FileNotFoundError("annotations.csv")

    assert known_labels(Failing()).tolist() == [3, 1, 3, 1]


def test_an_array_is_returned_as_it_is_and_a_range_of_it_as_a_view():
    labels = np.arange(4, dtype=np.int16)
    dataset = Images(labels=labels)
    assert known_labels(dataset) is labels
    every_other = known_labels(torch_data.Subset(dataset, range(1, 4, 2)))
    assert np.shares_memory(every_other, labels)
    assert every_other.tolist() == [1, 3]
    assert known_labels(torch_data.Subset(dataset, range(3, -1, -2))).tolist() == [3, 1]
    assert known_labels(torch_data.Subset(dataset, range(2, 6))) is None


@pytest.mark.parametrize("module", [torch_data, None], ids=["torch", "penstock"])
def test_labels_are_found_through_what_datasets_are_made_of(module):
    subset, concat = (
        (Subset, ConcatDataset) if module is None else (module.Subset, module.ConcatDataset)
    )
    a, b = Images(labels=[5, 6, 7, 8]), Images(2, targets=torch.tensor([0, 9]))
    whole = concat([a, subset(b, [1]), concat([b, a])])
    assert known_labels(whole).tolist() == [5, 6, 7, 8, 9, 0, 9, 5, 6, 7, 8]
    assert known_labels(subset(whole, torch.tensor([4, -1, 0]))).tolist() == [9, 8, 5]
    assert known_labels(subset(subset(whole, np.array([4, 5, 6])), [2, 0])).tolist() == [9, 9]
    assert known_labels(subset(a, np.array([2, 0], np.uint64))).tolist() == [7, 5]
    assert known_labels(concat([a, Images()])) is None
    assert known_labels(concat([a, Images(labels=["a", "b", "c", "d"])])) is None
    assert known_labels(subset(a, [4])) is None
    assert known_labels(subset(a, ["b", "a"])) is None
    assert known_labels(subset(whole, [])).tolist() == []


def test_splits_have_the_labels_of_their_samples():
    dataset = Images(100, labels=np.arange(100) * 3)
    for parts in (
        random_split(dataset, [70, 30]),
        torch_data.random_split(dataset, [70, 30]),
    ):
        for part in parts:
            assert known_labels(part).tolist() == [3 * index for index in part.indices]


@given(st.data())
def test_labels_of_nested_parts_are_those_that_reading_gives(data):
    def part(depth):
        kind = data.draw(st.sampled_from(["leaf", "subset", "concat"] if depth else ["leaf"]))
        if kind == "leaf":
            labels = data.draw(st.lists(st.integers(-3, 300), max_size=6))
            return ArrayDataset(np.zeros(len(labels)), np.array(labels, np.int64))
        if kind == "concat":
            return ConcatDataset([part(depth - 1) for _ in range(data.draw(st.integers(1, 3)))])
        inner = part(depth - 1)
        last = len(inner) - 1
        indices = st.lists(st.integers(0, last), max_size=6) if last >= 0 else st.just([])
        return Subset(inner, data.draw(indices))

    dataset = part(3)
    labels = known_labels(dataset)
    assert labels.tolist() == [int(dataset[n][1]) for n in range(len(dataset))]


def test_numbers_of_two_types_are_joined_without_becoming_floats():
    a = Images(2, labels=np.array([1, 2], np.uint64))
    b = Images(2, labels=np.array([-1, 2]))
    c = Images(2, labels=np.array([True, False]))
    joined = known_labels(ConcatDataset([a, b, c]))
    assert (joined.dtype, joined.tolist()) == (np.int64, [1, 2, -1, 2, 1, 0])
    a.labels[0] = 2**63
    assert known_labels(ConcatDataset([a, b])) is None


def test_single_labels_and_rows_are_joined_as_rows():
    rows = Images(2, labels=RaggedArray.of([[4, 4], []]))
    both = ConcatDataset([Images(2, labels=[1, 0]), rows])
    assert rows_of(known_labels(both)) == [[1], [0], [4, 4], []]
    assert rows_of(known_labels(Subset(both, [2, 2, 1]))) == [[4, 4], [4, 4], [0]]


def test_datasets_that_are_dealt_out_in_turn_are_no_concatenation():
    class InTurn(Images):
        pass

    parts = [Images(2, labels=[0, 0]), Images(2, labels=[1, 1])]
    assert known_labels(InTurn(4, datasets=parts)) is None


@pytest.mark.parametrize("stack", [StackDataset, torch_data.StackDataset])
def test_a_stack_has_the_labels_of_the_part_that_is_them(stack):
    images, labelled = Images(3), Images(3, labels=[7, 8, 9])
    assert known_labels(stack(images, [1, 0, 1])).tolist() == [1, 0, 1]
    assert known_labels(stack(np.array([1, 0, 1]), images)).tolist() == [1, 0, 1]
    assert known_labels(stack(labelled, [0.1, 0.2, 0.3])).tolist() == [7, 8, 9]
    assert known_labels(stack(labelled, range(3))).tolist() == [7, 8, 9]
    assert known_labels(stack(labelled, ["a.png", "b.png", "c.png"])).tolist() == [7, 8, 9]
    assert known_labels(stack(image=images, target=["b", "a", "b"])).tolist() == ["b", "a", "b"]
    assert rows_of(known_labels(stack(image=images, labels=[[1], [], [2]]))) == [[1], [], [2]]
    assert known_labels(stack(image=images, number=[1, 0, 1])) is None
    assert known_labels(stack(images, images)) is None
    corners = [[8, 9], [3, 4], [5, 6]]
    assert known_labels(stack(images, corners)) is None  # which may be anything, unless named
    assert rows_of(known_labels(stack(images, corners), 1)) == corners
    assert known_labels(stack(images, corners, [1, 0, 1])).tolist() == [1, 0, 1]


def test_the_classes_of_tensors_and_arrays_are_the_last_if_nothing_else_may_be_them():
    x, y = torch.zeros(3, 2), torch.tensor([4, 2, 4])
    assert known_labels(torch_data.TensorDataset(x, y)).tolist() == [4, 2, 4]
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    assert known_labels(torch_data.TensorDataset(images, y)).tolist() == [4, 2, 4]
    assert known_labels(torch_data.TensorDataset(images, y, images)).tolist() == [4, 2, 4]
    tokens = torch.tensor([[1, 5], [7, 0], [2, 2]])
    assert known_labels(torch_data.TensorDataset(tokens, y)).tolist() == [4, 2, 4]
    assert known_labels(torch_data.TensorDataset(x.bfloat16(), y)).tolist() == [4, 2, 4]
    assert known_labels(torch_data.TensorDataset(x)) is None
    assert known_labels(torch_data.TensorDataset(x, torch.zeros(3))) is None
    assert known_labels(ArrayDataset(np.zeros((3, 2)), np.array([4, 2, 4]))).tolist() == [4, 2, 4]
    one_hot = torch.tensor([[1, 0], [1, 1], [0, 0]])
    assert rows_of(known_labels(torch_data.TensorDataset(x, one_hot))) == [[0], [0, 1], []]
    assert known_labels(torch_data.TensorDataset(one_hot)) is None  # it may be the samples


def test_a_wrapper_of_the_same_length_is_looked_through():
    inner = Images(targets=[3, 1, 3, 1])
    assert known_labels(Images(dataset=inner)).tolist() == [3, 1, 3, 1]
    assert known_labels(Images(3, dataset=inner)) is None
    assert known_labels(Images(dataset=Images(dataset=inner))).tolist() == [3, 1, 3, 1]


@pytest.mark.parametrize("order", [[3, 2, 1, 0], np.array([0, 2, 1, 3]), torch.arange(4)])
def test_a_wrapper_that_keeps_an_order_may_have_the_labels_in_it(order):
    inner = Images(targets=[3, 1, 3, 1])
    assert known_labels(Images(dataset=inner, order=order)) is None
    assert known_labels(Images(dataset=inner, weights=[0.5] * 4)).tolist() == [3, 1, 3, 1]


def test_a_loader_is_no_dataset():
    loader = torch_data.DataLoader(Images(targets=[3, 1, 3, 1]), shuffle=True)
    assert known_labels(loader) is None


def test_a_dataset_within_itself_ends_the_search():
    dataset = Images()
    dataset.dataset = dataset
    assert known_labels(dataset) is None
    deep = Images(labels=[1, 2, 3, 4])
    for _ in range(10_000):
        deep = Images(dataset=deep)
    assert known_labels(deep) is None


def test_streams_and_things_without_a_length_have_no_known_labels():
    for base in (IterableDataset, torch_data.IterableDataset):

        class Stream(base):
            labels = (1, 2)

            def __iter__(self):
                raise AssertionError("read")

            def __len__(self):
                return 2

        assert known_labels(Stream()) is None
        assert known_labels(ChainDataset([Stream()])) is None
    assert known_labels(5) is None
    assert known_labels([1, 2]) is None


def test_rows_are_taken_and_joined_as_lists_are():
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 9, size).tolist() for size in rng.integers(0, 4, 50)]
    ragged = RaggedArray.of(rows)
    chosen = rng.integers(-50, 50, 80)
    assert rows_of(ragged[chosen]) == [rows[n] for n in chosen]
    assert rows_of(ragged[chosen.tolist()]) == [rows[n] for n in chosen]
    assert rows_of(ragged[chosen.astype(np.int8)]) == [rows[n] for n in chosen]
    mask = rng.random(50) < 0.5
    assert rows_of(ragged[mask]) == [row for row, kept in zip(rows, mask, strict=True) if kept]
    for where in (slice(3, 20), slice(None, None, -3), slice(20, 3), slice(-5, None), slice(0)):
        assert rows_of(ragged[where]) == rows[where]
    assert rows_of(ragged[[]]) == []
    assert np.shares_memory(ragged[3:20].values, ragged.values)
    assert ragged[np.uint8(49)].tolist() == rows[49]
    assert ragged[np.arange(50, dtype=np.uint8)] == ragged
    for wrong in ([50], [-51], np.array([1.0]), np.ones(49, bool)):
        with pytest.raises(IndexError):
            ragged[wrong]
    with pytest.raises(TypeError):
        ragged[1.5]


@pytest.mark.parametrize(
    ("given_as", "rows"),
    [
        ([[1, 2], [], [2]], [[1, 2], [], [2]]),
        (np.array([[0, 1], [1, 0]]), [[1], [0]]),  # an array is a column for each class
        (torch.tensor([[0.0, 1.0], [1.0, 1.0]]), [[1], [0, 1]]),
        ([[True, False, True], [False] * 3], [[0, 2], []]),
        ([(True, False), (False, True)], [[0], [1]]),
        ([np.array([True, False]), np.array([True, True])], [[0], [0, 1]]),
        ([np.array([3, 3]), np.array([]), np.array([1])], [[3, 3], [], [1]]),
        ([torch.tensor([3]), torch.tensor([], dtype=torch.int64)], [[3], []]),
        ([("dog", "cat"), (), ("eel",)], [[1, 0], [], [2]]),
        (np.array([[1, 2], [3]], object), [[1, 2], [3]]),
    ],
    ids=lambda value: None,
)
def test_rows_are_taken_in_every_form(given_as, rows):
    assert rows_of(to_labels(given_as)) == rows
    assert rows_of(labels_given_or_known(given_as, "Sampler")) == rows


@pytest.mark.parametrize(
    "value",
    [None, 3, "abc", b"abc", {1: 2}, [[[1]]], [[1.5]], [1, [2]], [[True], [True, False]], object()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_labels_is_not_taken_for_them(value):
    with pytest.raises(NotLabelsError):
        to_labels(value)


def test_labels_that_a_pandas_column_holds_are_taken():
    pandas = pytest.importorskip("pandas")
    assert to_labels(pandas.Series([2, 1])).tolist() == [2, 1]
    assert to_labels(pandas.Series(["a", "b"])).tolist() == ["a", "b"]
    assert to_labels(pandas.Series(["a", "b", "a"]).astype("category")).tolist() == ["a", "b", "a"]
    with pytest.raises(NotLabelsError):
        to_labels(pandas.Series([1.0, None]))


def test_given_labels_that_are_none_are_refused_with_what_they_are():
    with pytest.raises(ConfigError, match=r"of list: it is a list of float\. Give one label"):
        labels_given_or_known([0.5, 1.5], "RepeatFactorSampler")


def test_a_dataset_that_does_not_tell_is_refused_with_what_was_looked_for():
    dataset = Images(targets=[0.5] * 4, samples=["a.jpg"] * 4)
    with pytest.raises(ConfigError) as caught:
        labels_given_or_known(ConcatDataset([dataset]), "ClassBalancedSampler")
    message = str(caught.value)
    assert message.startswith("ClassBalancedSampler cannot see the labels of the samples of Concat")
    assert "dataset 0 (Images) has none" in message
    assert "`targets` is a list of float" in message
    assert "`penstock.labels_of(dataset, get_label=lambda sample: sample[1])`" in message


def test_a_dataset_that_is_a_list_gives_its_own_labels():
    class Samples(list):
        labels = (1, 0)

    assert labels_given_or_known(Samples("ab"), "Sampler").tolist() == [1, 0]
    assert labels_given_or_known(Images(labels=[1, 0, 1, 0]), "S").tolist() == [1, 0, 1, 0]


def test_a_named_column_is_the_only_one_that_is_asked():
    dataset = Images(labels=[1, 2, 3, 4], identity=[4, 3, 2, 1])
    assert known_labels(dataset, "identity").tolist() == [4, 3, 2, 1]
    assert known_labels(Subset(dataset, [0]), "identity").tolist() == [4]
    assert known_labels(dataset, "age") is None
    stack = StackDataset(image=Images(), age=[1, 2, 2, 1], labels=[0, 0, 0, 0])
    assert known_labels(stack, "age").tolist() == [1, 2, 2, 1]
    arrays = ArrayDataset(np.array([5, 6]), np.array([7, 8]), np.array([1, 2]))
    assert known_labels(arrays, 1).tolist() == [7, 8]
    assert known_labels(arrays, -3).tolist() == [5, 6]
    assert known_labels(arrays, 3) is None
    assert known_labels(StackDataset([5, 6], [7, 8]), 0).tolist() == [5, 6]


def test_class_names_are_found_by_number():
    assert class_names_of(Images(classes=["a", "b"], labels=[0, 1, 1, 0])) == ("a", "b")
    assert class_names_of(Images(class_names=("a", "b"))) == ("a", "b")
    assert class_names_of(Images(labels=["dog", "cat", "dog", "eel"])) == ("cat", "dog", "eel")
    assert class_names_of(Images(classes=["a", "b"], labels=[0, 1, 2, 0])) is None
    assert class_names_of(Images(classes=3)) is None
    a, b = Images(classes=["a", "b"]), Images(classes=["b", "c"])
    assert class_names_of(ConcatDataset([a, a])) == ("a", "b")
    assert class_names_of(ConcatDataset([a, b])) is None


def test_our_own_datasets_tell_their_labels_and_names(data_dir):
    vision = pytest.importorskip("penstock.vision")
    photos = vision.ImageFolder(data_dir / "clothing" / "train")
    labels = known_labels(photos)
    assert labels is photos.labels
    assert class_names_of(Subset(photos, [0])) == tuple(photos.classes)
    cells = vision.VOCDetection(data_dir / "bccd", "train")
    assert known_labels(cells) == cells.labels
    mosaic = vision.Mosaic(cells, size=64)
    assert known_labels(Subset(mosaic, [5, 5])) == cells.labels[[5, 5]]
    assert class_names_of(mosaic) == cells.class_names


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([np.array([9, 8, 9])], "2 parts that may be the classes"),
        ([np.array([0.5, 1.5, 2.5])], "the last of its parts is of type float64"),
        ([np.array([[1, 5], [7, 0], [2, 2]])], "the last of its parts is of shape"),
    ],
    ids=["integers", "floats", "tokens"],
)
def test_arrays_of_which_several_may_be_the_classes_have_to_be_chosen_from(others, said):
    dataset = ArrayDataset(np.zeros((3, 2)), np.array([4, 2, 4]), *others)
    with pytest.raises(ConfigError, match=said) as caught:
        labels_given_or_known(dataset, "Sampler")
    assert "`penstock.labels_of(dataset, column=position)`" in str(caught.value)
    assert known_labels(dataset, 1).tolist() == [4, 2, 4]


def test_a_stack_of_two_columns_of_integers_has_to_be_chosen_from():
    stack = StackDataset(Images(3), np.array([4, 2, 4]), np.array([9, 8, 9]))
    assert known_labels(stack) is None
    assert known_labels(stack, 1).tolist() == [4, 2, 4]


@pytest.mark.parametrize("pairs", [[(7, 3)] * 4, [(0.5, 1)] * 4, [(np.int64(3), 1)] * 4])
def test_pairs_without_a_path_are_no_samples_of_classes(pairs):
    assert known_labels(Images(samples=pairs)) is None


@pytest.mark.parametrize("path", ["a.jpg", b"a.jpg", pathlib.Path("a.jpg"), None])
def test_pairs_of_a_path_of_any_kind_are(path):
    assert known_labels(Images(samples=[(path, n) for n in (1, 0, 1, 1)])).tolist() == [1, 0, 1, 1]


def test_texts_of_rows_are_numbered_by_all_parts_of_a_concatenation():
    a = Images(2, labels=[["bus"], ["bus", "cat"]])
    b = Images(2, labels=[["cat"], ["dog", "cat"]])
    both = ConcatDataset([a, b])
    assert rows_of(known_labels(both)) == [[0], [0, 1], [1], [2, 1]]
    assert class_names_of(both) == ("bus", "cat", "dog")
    assert rows_of(known_labels(Subset(both, [3, 2]))) == [[1, 0], [0]]
    assert class_names_of(Subset(both, [3, 2])) == ("cat", "dog")
    assert known_labels(Subset(both, [4])) is None
    flat = Images(2, labels=["eel", "cat"])
    nothing = Images(2, labels=[[], []])
    assert rows_of(known_labels(ConcatDataset([flat, nothing, a]))) == [
        [2],
        [1],
        [],
        [],
        [0],
        [0, 1],
    ]
    assert known_labels(ConcatDataset([a, Images(2, labels=[1, 2])])) is None
    assert known_labels(ConcatDataset([a, Images(2, labels=[[1], [2, 3]])])) is None


def test_datasets_that_number_the_classes_of_a_column_otherwise_are_not_joined():
    few, more, other = (
        Images(2, labels=[0, 1], classes=list(names)) for names in ("ab", "abc", "ba")
    )
    assert known_labels(ConcatDataset([few, more]), "labels").tolist() == [0, 1, 0, 1]
    with pytest.raises(
        ConfigError, match=r"of 'labels' differently: .* not \('a', 'b'\) and \('b'"
    ):
        labels_given_or_known(ConcatDataset([few, other]), "labels_of", "labels")


def test_rows_of_file_names_are_no_classes():
    rows = [["a/1.png", "a/2.png"], ["b/1.png"], ["b/2.png"], ["c/1.png"]]
    assert known_labels(Images(labels=rows, targets=[0, 1, 1, 0])).tolist() == [0, 1, 1, 0]


def test_a_subset_that_passes_attributes_on_has_its_own_labels():
    class Part(Images):
        def __init__(self, dataset, indices):
            super().__init__(len(indices))
            self.dataset, self.indices = dataset, indices

        def __getattr__(self, name):
            if name in ("dataset", "indices", "length"):
                raise AttributeError(name)
            return getattr(self.dataset, name)

    whole = Images(labels=[5, 6, 7, 8], get_labels=lambda: [5, 6, 7, 8])
    assert known_labels(Part(whole, [3, 2, 1, 0])).tolist() == [8, 7, 6, 5]
    assert known_labels(Part(Images(samples=PAIRS), [3, 2, 1, 0])).tolist() == [1, 2, 0, 2]


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1, 0], [1, 0, 0]],
        [np.array([0, 1]), np.array([1, 0])],
        [torch.tensor([0, 1]), torch.tensor([1, 0])],
        ((1, 0), (0, 1)),
    ],
    ids=["lists", "arrays", "tensors", "tuples"],
)
def test_rows_of_zeros_and_ones_may_be_columns_or_classes(rows):
    for source in (rows, Images(2, labels=rows)):
        with pytest.raises(ConfigError, match="zeros and ones each") as caught:
            labels_given_or_known(source, "Sampler")
        assert "np.asarray(rows)" in str(caught.value)
        assert "RaggedArray.of(rows)" in str(caught.value)
    classes = labels_given_or_known(RaggedArray.of(rows), "Sampler")
    assert rows_of(classes) == [list(map(int, row)) for row in rows]


@pytest.mark.parametrize("rows", [[[0, 1]], [[0, 1], [1]], [[0, 2], [1, 0]], [[], []]], ids=str)
def test_other_rows_are_classes(rows):
    assert rows_of(labels_given_or_known(rows, "Sampler")) == rows


def test_names_of_the_classes_do_not_speak_against_valid_targets():
    for labels in (["cat", "dog"], ("cat", "dog"), {"cat": 0, "dog": 1}):
        dataset = Images(labels=labels, targets=[1, 0, 1, 1])
        assert known_labels(dataset).tolist() == [1, 0, 1, 1]
        dataset = Images(targets=[1, 0, 1, 1], _labels=labels)
        assert known_labels(dataset).tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5], "integers; got float64"),
        ([True], "integers; got bool"),
        (["a"], "integers; got <U1"),
    ],
    ids=["floats", "bools", "texts"],
)
def test_a_ragged_array_holds_integers_of_64_bits_only(values, said):
    with pytest.raises(ValueError, match=said):
        RaggedArray(values, [0, 1])
    with pytest.raises(ValueError, match=said):
        RaggedArray.of([[1], values])
    with pytest.raises(ValueError, match="holds int64; got 9223372036854775808"):
        RaggedArray(np.array([2**63], np.uint64), [0, 1])
    assert rows_of(RaggedArray.of([[], (), np.empty(0)])) == [[], [], []]
