# SPDX-License-Identifier: Apache-2.0
"""`labels_of` returns what is known, and otherwise reads every sample once and remembers it."""

from __future__ import annotations

import io
import multiprocessing
import operator
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from PIL import Image

from penstock.data import ArrayDataset, ConcatDataset, IterableDataset, StackDataset, Subset
from penstock.data.labels.of_sample import label_of_sample
from penstock.data.labels.values import NotLabelsError
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.labels import labels_of
from penstock.loader import Loader

CACHES = ".penstock-labels-*"


class Folder:
    """Images in folders by class, which are decoded; the classes are told by the samples alone."""

    def __init__(self, root):
        self.root = root
        self.paths = sorted(Path(root).glob("*/*.jpg"))
        self.num_read = multiprocessing.Value("i", 0)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with self.num_read.get_lock():
            self.num_read.value += 1
        with Image.open(self.paths[index]) as image:
            return np.asarray(image), self.label(index)

    def label(self, index):
        return int(self.paths[index].parent.name)

    def describe(self, index):
        return self.paths[index].name


class Named(Folder):
    def label(self, index):
        return f"class {self.paths[index].parent.name}"


class Rows(Folder):
    def label(self, index):
        return np.full(index % 3, index % 5)


class Typed(list):
    """Samples as they are; a list subclass, so that it may have attributes."""


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(5)
    for number in range(40):
        folder = tmp_path / "images" / str(number % 4 * 10)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.jpg")
    return tmp_path / "images"


def caches(folder):
    return sorted(folder.glob(CACHES))


def rows_of(labels):
    assert isinstance(labels, RaggedArray)
    return [row.tolist() for row in labels]


def expected(dataset):
    return [dataset.label(index) for index in range(len(dataset))]


def test_known_labels_are_returned_and_nothing_is_read(root):
    dataset = Folder(root)
    dataset.labels = expected(dataset)
    labels = labels_of(Subset(dataset, [3, 39]), scan=True)
    assert (labels.dtype, labels.tolist()) == (np.int64, [0, 30])
    assert dataset.num_read.value == 0
    assert not caches(root.parent)


def test_known_texts_and_bools_become_numbers():
    texts = StackDataset(image=range(4), label=["eel", "cat", "dog", "cat"])
    assert labels_of(texts).tolist() == [2, 0, 1, 0]
    bools = labels_of(ArrayDataset(np.zeros(2), np.array([True, False])))
    assert (bools.dtype, bools.tolist()) == (np.int64, [1, 0])
    rows = labels_of(StackDataset(image=range(2), labels=[[4], [2, 2]]))
    assert rows_of(rows) == [[4], [2, 2]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_is_read_once_for_its_label(root, num_workers):
    dataset = Folder(root)
    labels = labels_of(dataset, scan=True, num_workers=num_workers)
    assert (labels.dtype, labels.tolist()) == (np.int64, expected(dataset))
    assert dataset.num_read.value == 40


@pytest.mark.parametrize("num_workers", [0, 2])
def test_texts_and_rows_are_read_by_workers_too(root, num_workers):
    named = labels_of(Named(root), scan=True, num_workers=num_workers)
    assert named.tolist() == [number // 10 for number in range(40)]
    rows = Rows(root)
    read = labels_of(rows, scan=True, num_workers=num_workers)
    assert rows_of(read) == [label.tolist() for label in expected(rows)]


@pytest.mark.parametrize("kind", [Folder, Named, Rows])
def test_what_was_read_is_kept_and_compared_with_some_samples(root, kind):
    first = labels_of(kind(root), scan=True, num_workers=0)
    assert len(caches(root.parent)) == 1
    again = kind(root)
    second = labels_of(again, scan=True)
    assert 16 <= again.num_read.value <= 20  # and one of each class
    assert np.array_equal(getattr(first, "values", first), getattr(second, "values", second))
    assert type(first) is type(second)


def test_a_dataset_with_a_fingerprint_is_not_read_at_all_until_that_changes(root):
    dataset = Folder(root)
    dataset.fingerprint = "monday"
    labels_of(dataset, scan=True, num_workers=0)
    assert labels_of(dataset, scan=True).tolist() == expected(dataset)
    assert labels_of(Subset(dataset, range(40)), scan=True).tolist() == expected(dataset)
    assert dataset.num_read.value == 40
    dataset.fingerprint = "tuesday"
    labels_of(dataset, scan=True, num_workers=0)
    assert dataset.num_read.value == 80
    assert len(caches(root.parent)) == 2


def test_a_dataset_that_changed_is_read_anew(root):
    labels_of(Folder(root), scan=True, num_workers=0)
    (root / "30").rename(root / "70")
    changed = Folder(root)
    assert labels_of(changed, scan=True, num_workers=0).tolist() == expected(changed)
    num_compared = changed.num_read.value - 40
    assert 16 <= num_compared <= 20
    assert labels_of(changed, scan=True).tolist() == expected(changed)
    assert changed.num_read.value == 2 * num_compared + 40
    assert len(caches(root.parent)) == 1


def test_a_dataset_of_another_length_is_read_anew(root):
    labels_of(Folder(root), scan=True, num_workers=0)
    (root / "0" / "00.jpg").unlink()
    assert len(labels_of(Folder(root), scan=True, num_workers=0)) == 39
    assert len(caches(root.parent)) == 2


def test_subsets_and_functions_have_caches_of_their_own(root):
    dataset = Folder(root)
    dataset.fingerprint = "same"
    assert labels_of(Subset(dataset, [1, 39]), scan=True).tolist() == [0, 30]
    assert labels_of(Subset(dataset, [39, 1]), scan=True).tolist() == [30, 0]
    halved = labels_of(dataset, scan=True, num_workers=0, get_label=lambda pair: pair[1] // 20)
    assert halved.tolist() == [label // 20 for label in expected(dataset)]
    doubled = labels_of(dataset, scan=True, num_workers=0, get_label=lambda pair: pair[1] * 2)
    assert doubled.tolist() == [label * 2 for label in expected(dataset)]


def test_a_function_that_now_says_something_else_is_asked_anew(root):
    dataset = Folder(root)
    dataset.fingerprint = "same"
    factor = 1

    def scaled(pair):
        return pair[1] * factor

    labels_of(dataset, scan=True, get_label=scaled, num_workers=0)
    factor = 3
    again = labels_of(dataset, scan=True, get_label=scaled, num_workers=0)
    assert again.tolist() == [3 * label for label in expected(dataset)]


def test_the_fingerprint_of_what_is_wrapped_does_not_speak_for_the_wrapper(root):
    class Shifted:
        def __init__(self, dataset, shift):
            self.dataset, self.shift = dataset, shift

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            image, label = self.dataset[index]
            return image, label + self.shift

    dataset = Folder(root)
    dataset.fingerprint = "same"
    labels_of(Shifted(dataset, 1), scan=True, num_workers=0)
    shifted = labels_of(Shifted(dataset, 2), scan=True, num_workers=0)
    assert shifted.tolist() == [label + 2 for label in expected(dataset)]


def test_get_label_goes_before_what_the_dataset_says(root):
    dataset = Folder(root)
    dataset.labels = [0] * 40
    labels = labels_of(dataset, scan=True, get_label=lambda pair: pair[1], num_workers=0)
    assert labels.tolist() == expected(dataset)
    with pytest.raises(ConfigError, match="get_label reads samples: allow it by scan=True"):
        labels_of(dataset, get_label=len)


def test_a_row_of_bools_is_a_column_for_each_class(root):
    labels = labels_of(
        Folder(root),
        scan=True,
        num_workers=0,
        get_label=lambda pair: [pair[1] >= 10, pair[1] >= 30],
    )
    assert rows_of(labels[9:11]) == [[], [0]]
    assert rows_of(labels[39:]) == [[0, 1]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(b"PK\3\4" + bytes(400)),
        lambda path: path.write_bytes(pickle.dumps({"values": [1]})),
        lambda path: rewrite(path, values=np.zeros(39, np.int64)),
        lambda path: rewrite(path, values=np.zeros(40)),
        lambda path: rewrite(path, values=np.zeros((40, 1), np.int64)),
        lambda path: rewrite(path, description=np.array("another dataset")),
        lambda path: rewrite(path, values=np.zeros(40, np.int64), names=np.empty(0, "U3")),
        lambda path: rewrite(path, offsets=np.array([0, 3, 2])),
        lambda path: rewrite(path, values=np.array([Trap()] * 40, object)),
    ],
    ids=[
        "empty", "cut off", "no zip", "pickle", "short", "floats", "two-dimensional", "another's",
        "no names", "wild offsets", "objects",
    ],
)  # fmt: skip
def test_a_damaged_cache_is_overwritten(root, damage):
    dataset = Folder(root)
    dataset.fingerprint = "known"  # so that no sample is compared
    labels_of(dataset, scan=True, num_workers=0)
    (path,) = caches(root.parent)
    damage(path)
    assert labels_of(dataset, scan=True, num_workers=0).tolist() == expected(dataset)
    assert dataset.num_read.value == 80
    assert labels_of(dataset, scan=True, num_workers=0).tolist() == expected(dataset)
    assert dataset.num_read.value == 80
    assert not Trap.sprung


class Trap:
    """Its pickle runs something."""

    sprung: list[bool] = []  # noqa: RUF012

    def __reduce__(self):
        return self.sprung.append, (True,)


def rewrite(path, **arrays):
    with np.load(path) as file:
        kept = dict(file)
    np.savez(path, **{**kept, **arrays})


def test_the_cache_can_be_put_elsewhere_or_left_out(root, tmp_path):
    labels_of(Folder(root), scan=True, num_workers=0, cache=False)
    labels_of(Folder(root), scan=True, num_workers=0, cache=tmp_path / "new" / "place")
    labels_of(Folder(root), scan=True, num_workers=0, cache=str(tmp_path / "mine.npz"))
    assert not caches(root.parent)
    assert len(caches(tmp_path / "new" / "place")) == 1
    assert (tmp_path / "mine.npz").is_file()
    again = Folder(root)
    labels_of(again, scan=True, cache=tmp_path / "mine.npz")
    assert again.num_read.value < 40


def test_a_place_that_cannot_be_written_is_told_only_to_who_named_it(root, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="could not keep the labels in .*file/.penstock-") as told:
        labels = labels_of(Folder(root), scan=True, num_workers=0, cache=tmp_path / "file")
    assert told[0].filename == __file__
    assert labels.tolist() == expected(Folder(root))
    nowhere = Folder(root)
    nowhere.root = "mongodb://host/images"
    assert labels_of(nowhere, scan=True, num_workers=0).tolist() == expected(nowhere)
    assert not caches(root.parent)


def test_caches_lie_beside_files_and_stores_and_folders(root, tmp_path):
    dataset = Folder(root)
    dataset.root = None
    dataset.path = root / "0" / "00.jpg"
    labels_of(ConcatDataset([Typed([("x", 1)]), Subset(dataset, [2])]), scan=True)
    assert len(caches(root / "0")) == 1
    stored = Typed([("x", 1), ("y", 2)])
    stored.store = type("Store", (), {"path": root})()
    labels_of(stored, scan=True)
    assert len(caches(tmp_path)) == 1


def test_processes_that_read_at_once_leave_one_whole_cache(root):
    def read():
        dataset = Folder(root)
        assert labels_of(dataset, scan=True, num_workers=0).tolist() == expected(dataset)

    children = [multiprocessing.get_context("fork").Process(target=read) for _ in range(5)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 5
    (path,) = caches(root.parent)
    with np.load(path) as file:
        assert file["values"].tolist() == expected(Folder(root))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_sample_is_named_and_what_to_do_is_said(root, num_workers):
    (root / "20" / "06.jpg").write_bytes(b"no image")
    with pytest.raises(Image.UnidentifiedImageError) as caught:
        labels_of(Folder(root), scan=True, num_workers=num_workers)
    notes = "\n".join(caught.value.__notes__)
    assert "sample 21" in notes
    assert "06.jpg" in notes
    assert "leave it out with a `Subset`" in notes
    assert not caches(root.parent)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_without_a_label_is_named(root, num_workers):
    class Unlabelled(Folder):
        def label(self, index):
            return None if index == 21 else 1

    with pytest.raises(ConfigError) as caught:
        labels_of(Unlabelled(root), scan=True, num_workers=num_workers)
    assert str(caught.value).endswith(
        "Unlabelled has None where its label should be. Give `get_label=`, a function of a sample "
        "that returns its class: an integer, a bool, a string, or several."
    )
    assert str(caught.value).startswith("Sample 21 (06.jpg) of ")


def test_labels_of_two_kinds_are_refused_with_a_sample_of_each(root):
    class Mixed(Folder):
        def label(self, index):
            return "cat" if index == 11 else 1

    with pytest.raises(ConfigError) as caught:
        labels_of(Mixed(root), scan=True, num_workers=0)
    assert str(caught.value) == (
        "Read from the samples, labels are of several kinds: that of Sample 0 (00.jpg) is 1, that "
        "of Sample 11 (05.jpg) is 'cat'. Give `get_label=`, a function that returns labels of one "
        "kind."
    )


def test_rows_of_zeros_and_ones_have_to_be_explained():
    samples = Typed(("x", np.array(row)) for row in ([0, 1, 1], [1, 0, 0]))
    with pytest.raises(ConfigError, match="a row of 3 zeros and ones"):
        labels_of(samples, scan=True)
    as_columns = labels_of(samples, scan=True, get_label=lambda pair: np.asarray(pair[-1], bool))
    assert rows_of(as_columns) == [[1, 2], [0]]
    as_numbers = labels_of(samples, scan=True, get_label=lambda pair: pair[-1])
    assert rows_of(as_numbers) == [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("sample", "label"),
    [
        (("x", 3), 3),
        (["x", True], 1),
        (("x", "y", np.int16(4)), 4),
        (("x", torch.tensor(5)), 5),
        (("x", np.array("cat")), "cat"),
        (("x", np.str_("cat")), "cat"),
        (("x", torch.tensor([5, 5])), (5, 5)),
        (("x", [2, 1]), (2, 1)),
        (("x", ["dog", "cat"]), ("dog", "cat")),
        (("x", []), ()),
        (("x", np.empty(0)), ()),
        (("x", np.array([True, False, True])), (0, 2)),
        (("x", {"boxes": 0, "labels": torch.tensor([1])}), (1,)),
        ({"image": 0, "label": 7}, 7),
        ({"targets": "a"}, "a"),
        ({"label": 1, "labels": (2, 3)}, (2, 3)),
    ],
    ids=repr,
)
def test_the_label_of_a_sample_is_found_by_the_usual_rules(sample, label):
    found = label_of_sample(sample)
    assert (found, type(found)) == (label, type(label))


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (5, "is a int, neither a pair nor a dict"),
        ((5,), "is a tuple of 1, not a pair"),
        (("x", 0.5), "has a float where its label should be (float64, shape ())"),
        (("x", None), "has None where its label should be"),
        (("x", ["a", 1]), "has a list where its label should be"),
        (("x", np.zeros((2, 2), int)), "has a ndarray where its label should be (int64, shape"),
        ({"image": 0}, "is a dict of ['image'], without 'labels' or 'label' or 'targets' or"),
    ],
    ids=lambda value: None,
)
def test_a_sample_without_a_label_is_described(sample, said):
    with pytest.raises(NotLabelsError) as caught:
        label_of_sample(sample)
    assert str(caught.value).startswith(said)


def test_a_column_is_an_attribute_a_part_a_key_or_a_place(root):
    dataset = Folder(root)
    dataset.labels, dataset.age = [0] * 40, list(range(40))
    assert labels_of(dataset, column="age").tolist() == list(range(40))
    assert dataset.num_read.value == 0
    samples = Typed([{"image": 0, "labels": 1, "age": "old"}, {"labels": 1, "age": "new"}])
    assert labels_of(samples, column="age", scan=True).tolist() == [1, 0]
    with pytest.raises(ConfigError, match="is a tuple of 2, without 'age'"):
        labels_of(Typed([("x", "abc"), ("x", "def")]), column="age", scan=True)
    assert labels_of(samples, scan=True).tolist() == [1, 1]
    assert labels_of(Typed([(3, "x"), (4, "y")]), column=0, scan=True).tolist() == [3, 4]
    with pytest.raises(ConfigError, match=r"Sample 0 of Typed is a tuple of 2, without \[5\]"):
        labels_of(Typed([(3, "x"), (4, "y")]), column=5, scan=True)


def test_a_hugging_face_column_can_be_named():
    hf = pytest.importorskip("datasets")
    dataset = hf.Dataset.from_dict({"label": [1, 2, 3], "breed": ["b", "a", "b"]})
    assert labels_of(dataset).tolist() == [1, 2, 3]
    assert labels_of(dataset.select([2, 1]), column="breed").tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"DatasetDict holds \['test', 'train'\]: give labels_of"):
        labels_of(hf.DatasetDict(train=dataset, test=dataset))


def test_unknown_labels_are_refused_with_what_to_add(root):
    dataset = Folder(root)
    with pytest.raises(ConfigError) as caught:
        labels_of(Subset(dataset, [0, 1]))
    assert str(caught.value) == (
        "Subset of Folder does not tell the labels of its 2 samples: it has none of the attributes "
        "`labels`, `targets`, `_labels`, `samples`, `_samples`, `imgs`, nor a method "
        "`get_labels()`. Give it an attribute `labels` (an array with one label per sample), name "
        "what holds them by "
        "`column=`, or let labels_of(dataset, scan=True) read every sample once."
    )
    with pytest.raises(ConfigError, match="nothing called 'age' holds them"):
        labels_of(dataset, column="age")
    assert dataset.num_read.value == 0


@pytest.mark.parametrize("base", [IterableDataset, torch_data.IterableDataset])
def test_a_stream_is_sent_to_the_shuffle_that_balances(base):
    class Stream(base):
        def __iter__(self):
            return iter([("x", 1)])

    with pytest.raises(ConfigError, match=r"Stream is a stream.*BalancedShuffle"):
        labels_of(Stream(), scan=True)


def test_what_is_no_dataset_is_refused():
    for wrong in (5, iter([]), None, {1, 2}):
        with pytest.raises(ConfigError, match="takes a dataset with __len__ and __getitem__"):
            labels_of(wrong, scan=True)


def test_an_empty_dataset_is_refused_unless_its_labels_are_known():
    with pytest.raises(ConfigError, match=r"Typed has no samples.*look at the path or pattern"):
        labels_of(Typed(), scan=True)
    known = Typed()
    known.labels = []
    assert labels_of(known).tolist() == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_and_wiped_at_the_end(root, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    labels_of(Folder(root), scan=True, num_workers=0, cache=False)
    shown = sys.stderr.getvalue()
    assert "labels: 40 of 40 samples" in shown
    assert "\n" not in shown
    last = shown.split("\r")[-3:]
    assert last[0].startswith("labels: ")
    assert last[1:] == [" " * len(last[0]), ""]


@pytest.mark.parametrize(("stderr", "progress"), [(io.StringIO, None), (Terminal, False)])
def test_progress_is_not_shown_elsewhere_or_if_not_wanted(root, monkeypatch, stderr, progress):
    monkeypatch.setattr(sys, "stderr", stderr())
    labels_of(Folder(root), scan=True, num_workers=0, cache=False, progress=progress)
    assert sys.stderr.getvalue() == ""


def test_reading_samples_leaves_the_global_generators_alone(root):
    class Augmented(Folder):
        def __getitem__(self, index):
            np.random.random()
            return super().__getitem__(index)

    before = np.random.get_state()[1].tolist()
    for _ in range(2):  # read, and compared
        labels_of(Augmented(root), scan=True, num_workers=0)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="it is Linux that has it")
def test_a_folder_that_nobody_can_write_to_is_no_obstacle(root):
    dataset = Folder(root)
    dataset.root = "/proc/self"
    assert labels_of(dataset, scan=True, num_workers=0).tolist() == expected(dataset)


def test_a_dataset_with_several_classes_per_sample_is_packed_with_them(tmp_path):
    stores = pytest.importorskip("penstock.stores")
    dataset = StackDataset(text=["a", "b", "c"], labels=RaggedArray.of([[4, 4], [], [1]]))
    stores.pack(dataset, tmp_path / "store.lmdb", num_workers=0)
    store = stores.open_store(tmp_path / "store.lmdb")
    assert rows_of(store.labels) == [[4, 4], [], [1]]
    assert rows_of(labels_of(stores.StoreDataset(store))) == [[4, 4], [], [1]]
    store.close()


def test_a_bad_sample_of_several_classes_is_replaced_by_any():
    class OneBad(Typed):
        labels = RaggedArray.of([[1], [1, 2], [], [3]])

        def __getitem__(self, index):
            if index == 1:
                raise ValueError("broken")
            return index

    loader = Loader(OneBad("abcd"), batch_size=4, on_error="replace")
    with pytest.warns(UserWarning, match="1 bad sample replaced by others"):
        (batch,) = loader
    assert batch[[0, 2, 3]].tolist() == [0, 2, 3]
    assert batch[1] in (0, 2, 3)
    assert len(loader.failures) == 1


class Pairs:
    """Samples with labels of a rule; nothing tells them but reading."""

    def __init__(self, root, length=100, **settings):
        self.root, self.length = root, length
        self.__dict__.update(settings)
        self.num_read = multiprocessing.Value("i", 0)

    def __len__(self):
        return self.length

    def label(self, index):
        return index % 7

    def __getitem__(self, index):
        with self.num_read.get_lock():
            self.num_read.value += 1
        return index, self.label(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_end_before_the_last_sample_is_an_error_and_is_not_kept(tmp_path, num_workers):
    class Ending(Pairs):
        def label(self, index):
            return next(iter([])) if index == 70 else 1

    root = tmp_path / "data"
    root.mkdir()
    with pytest.raises(RuntimeError, match="StopIteration was raised while reading sample 70"):
        labels_of(Ending(root), scan=True, num_workers=num_workers)
    assert not caches(tmp_path)


def test_two_configurations_of_one_class_have_caches_of_their_own(tmp_path):
    class Task(Pairs):
        def label(self, index):
            return index % self.modulus

    (root := tmp_path / "data").mkdir()
    for modulus in (2, 3):
        read = labels_of(
            Subset(Task(root, modulus=modulus, fingerprint="same"), range(90)),
            scan=True,
            num_workers=0,
        )
        assert read.tolist() == [index % modulus for index in range(90)]
    assert len(caches(tmp_path)) == 2


def test_a_change_of_a_rare_class_is_seen_where_the_spread_samples_miss_it(tmp_path):
    class Rare(Pairs):
        def label(self, index):
            return 5 + self.values[0] if index == 3 else 0

    (root := tmp_path / "data").mkdir()
    first = labels_of(Rare(root, values=[0]), scan=True, num_workers=0)
    assert (first[3], first.sum()) == (5, 5)
    again = labels_of(Rare(root, values=[1]), scan=True, num_workers=0)
    assert (again[3], again.sum()) == (6, 6)

    class Rows(Rare):
        def label(self, index):
            return [1, super().label(index)] if index % 2 else [1]

    labels_of(Rows(root, values=[0]), scan=True, num_workers=0)
    assert labels_of(Rows(root, values=[1]), scan=True, num_workers=0)[3].tolist() == [1, 6]


def test_a_fingerprint_does_not_speak_for_what_changes_samples_on_the_way(tmp_path):
    class Transformed(Pairs):
        def label(self, index):
            return self.target_transform(super().label(index))

    class Shifting(Subset):
        shift = 0

        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image, label + type(self).shift

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    (root := tmp_path / "data").mkdir()
    for add in (1, 2):
        one = Transformed(root, fingerprint="same", target_transform=lambda n, add=add: n + add)
        assert labels_of(one, scan=True, num_workers=0)[:2].tolist() == [add, 1 + add]
        Shifting.shift = add
        shifted = Shifting(Pairs(root, fingerprint="same"), range(50))
        assert labels_of(shifted, scan=True, num_workers=0)[:2].tolist() == [add, 1 + add]


def test_a_subset_has_what_was_read_of_the_whole(tmp_path):
    class Texts(Pairs):
        def label(self, index):
            return "cab"[index % 3]

    class Rows(Pairs):
        def label(self, index):
            return list("dcab")[: index % 4]

    (root := tmp_path / "data").mkdir()
    for kind in (Pairs, Texts, Rows):
        labels_of(kind(root), scan=True, num_workers=0)
        whole = kind(root)
        for indices in ([0, 2, 3, 5, 8] * 8, [], np.array([1, 1])):
            part = Subset(whole, indices)
            if len(indices):
                read = labels_of(part, scan=True)
                fresh = labels_of(part, scan=True, cache=False, num_workers=0)
                assert isinstance(read, RaggedArray) == isinstance(fresh, RaggedArray)
                assert list(map(str, read)) == list(map(str, fresh))
    assert len(caches(tmp_path)) == 3


def test_a_file_of_something_else_is_never_overwritten(root, tmp_path):
    np.savez(tmp_path / "features.npz", values=np.arange(4))
    (tmp_path / "text.npz").write_text("notes")
    for name in ("features.npz", "text.npz"):
        before = (tmp_path / name).read_bytes()
        dataset = Folder(root)
        with pytest.raises(ConfigError, match=f"{name} holds something else than labels"):
            labels_of(dataset, scan=True, cache=tmp_path / name)
        assert dataset.num_read.value == 0
        assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("cache", [None, 1, 0, ["folder"]])
def test_a_cache_that_is_no_place_is_refused(root, cache):
    with pytest.raises(ConfigError, match="cache is True, False, a folder or a file"):
        labels_of(Folder(root), scan=True, cache=cache)


def test_nothing_is_written_into_the_folder_of_the_data(root):
    before = sorted(root.rglob("*"))
    labels_of(Folder(root), scan=True, num_workers=0)
    assert sorted(root.rglob("*")) == before
    (path,) = caches(root.parent)
    assert path.name.startswith(".penstock-labels-images-")


def test_where_labels_are_kept_is_said_with_the_progress(root, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    labels_of(Folder(root), scan=True, num_workers=0)
    (path,) = caches(root.parent)
    assert sys.stderr.getvalue().endswith(f"\rlabels: kept in {path}\n")
    labels_of(Typed([("x", 1)]), scan=True)
    assert sys.stderr.getvalue().endswith(
        "labels: not kept: no folder of the dataset is known: give cache='folder'\n"
    )
    lock = threading.Lock()
    labels_of(Folder(root), scan=True, num_workers=0, get_label=lambda pair: (lock, pair[1])[1])
    assert "not kept: what get_label depends on cannot be told (" in sys.stderr.getvalue()
    assert len(caches(root.parent)) == 1
    unwritable = Folder(root)
    unwritable.root = "/proc/self"
    labels_of(unwritable, scan=True, num_workers=0)
    assert "cannot be written to (" in sys.stderr.getvalue()


def test_functions_that_differ_in_what_they_were_given_have_caches_of_their_own(tmp_path):
    (root := tmp_path / "data").mkdir()
    for position in (0, 1):
        read = labels_of(
            Pairs(root, length=20),
            scan=True,
            num_workers=0,
            get_label=operator.itemgetter(position),
        )
        assert read.tolist() == [index if position == 0 else index % 7 for index in range(20)]
    assert len(caches(tmp_path)) == 2


def test_labels_that_are_all_different_may_be_numbers_of_samples(tmp_path):
    with pytest.warns(UserWarning, match=r"all 100 samples of Typed are different.*column=1") as w:
        labels_of(Typed((index % 3, index) for index in range(100)), scan=True, num_workers=0)
    assert w[0].filename == __file__


def test_zeros_and_ones_are_refused_after_a_batch_and_floats_get_the_hint(tmp_path):
    class OneHot(Pairs):
        def label(self, index):
            return np.eye(4, dtype=int)[index % 4]

    dataset = OneHot(tmp_path, length=10_000)
    with pytest.raises(ConfigError, match="a row of 4 zeros and ones"):
        labels_of(dataset, scan=True, num_workers=0)
    assert dataset.num_read.value <= 64
    with pytest.raises(ConfigError, match=r"float64, shape \(3,\)\): if it has a number for each"):
        labels_of(Typed([("x", np.array([0.0, 1.0, 0.0]))]), scan=True)


def test_a_column_of_one_number_per_sample_is_one_label_each():
    samples = Typed(("x", np.array([index % 3])) for index in range(9))
    assert labels_of(samples, scan=True).tolist() == [0, 1, 2] * 3
    texts = Typed(("x", [name]) for name in "bab")
    assert labels_of(texts, scan=True).tolist() == [1, 0, 1]


def test_an_error_of_a_sample_is_told_as_one_of_a_scan(root):
    (root / "20" / "06.jpg").write_bytes(b"no image")
    for num_workers in (0, 2):
        with pytest.raises(Image.UnidentifiedImageError) as caught:
            labels_of(Folder(root), scan=True, num_workers=num_workers)
        notes = "\n".join(caught.value.__notes__)
        assert "06.jpg" in notes
        assert "on_error" not in notes
        assert "epoch" not in notes


def test_a_function_that_cannot_be_sent_is_told_to_read_in_this_process():
    code = (
        "import multiprocessing, sys\n"
        "from penstock.labels import labels_of\n"
        "from penstock.errors import UnpicklableError\n"
        "sys.modules['cloudpickle'] = None\n"
        "multiprocessing.set_start_method('spawn')\n"
        "try:\n"
        "    labels_of([(0, 1)] * 9, scan=True, get_label=lambda pair: pair[1], num_workers=1)\n"
        "except UnpicklableError as error:\n"
        "    print(error.__notes__)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "labels_of(..., num_workers=0)" in told.stdout
