# SPDX-License-Identifier: Apache-2.0
"""`ImageList`: a text file of images and classes, read like class folders."""

from __future__ import annotations

import numpy as np
import pytest
from tests.vision.annotation_files import painted, write_photo

from penstock.data.labels.known import known_labels
from penstock.errors import ConfigError, StoreError
from penstock.stores import StoreDataset, pack
from penstock.vision.datasets.classification import ImageList


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(["cat/1.png", "cat/2.png", "dog/3 a.png"]):
        write_photo(tmp_path / "images" / name, painted(height=10 + number))
    return tmp_path


def write_list(folder, text):
    path = folder / "train.txt"
    path.write_bytes(text.encode())
    return path


BY_NAME = "images/dog/3 a.png dog\r\nimages\\cat\\1.png cat\r\n\r\nimages/cat/2.png cat\r\n"


def test_samples_are_images_with_the_class_of_their_line(folder):
    dataset = ImageList(write_list(folder, BY_NAME))
    assert dataset.class_names == ("cat", "dog")
    assert dataset.labels.tolist() == [1, 0, 0]
    assert dataset.labels.dtype == np.int64
    assert [(image.shape[0], label) for image, label in map(dataset.__getitem__, range(3))] == [
        (12, 1), (10, 0), (11, 0),
    ]  # fmt: skip
    assert known_labels(dataset) is not None
    assert dataset.describe(0) == str(folder / "images/dog/3 a.png")
    assert dataset.store.keys[0] == "images/dog/3 a.png"


def test_numbers_stay_what_they_are(folder):
    path = write_list(folder, "images/cat/1.png 7\nimages/cat/2.png 2\n")
    assert ImageList(path).labels.tolist() == [7, 2]
    assert ImageList(path).class_names == ()
    assert ImageList(path, class_names=list("abcdefgh")).class_names == tuple("abcdefgh")
    with pytest.raises(StoreError, match=r"train.txt has the class 7, which class_names lacks"):
        ImageList(path, class_names=["a", "b", "c"])


def test_classes_may_be_given_in_their_order(folder):
    path = write_list(folder, BY_NAME)
    assert ImageList(path, class_names=["dog", "bird", "cat"]).labels.tolist() == [0, 2, 2]
    with pytest.raises(StoreError, match="has the class 'dog', which class_names lacks"):
        ImageList(path, class_names=["cat"])


def test_it_is_packed_with_keys_and_labels(folder):
    pytest.importorskip("lmdb")
    dataset = ImageList(write_list(folder, BY_NAME))
    address = f"lmdb:{folder}/packed.lmdb"
    pack(dataset, address, num_workers=0)
    packed = StoreDataset(address)
    assert packed.labels.tolist() == [1, 0, 0]
    assert packed.class_names == ("cat", "dog")
    assert list(packed.store.keys) == list(dataset.store.keys)
    np.testing.assert_array_equal(packed[0][0], dataset[0][0])
    packed.close()


def test_what_is_wrong_is_named(folder):
    with pytest.raises(ConfigError, match="class_names is a list of names, not the text 'cat'"):
        ImageList(write_list(folder, BY_NAME), class_names="cat")
    with pytest.raises(StoreError, match=r"absent.txt"):
        ImageList(folder / "absent.txt")
    missing = ImageList(write_list(folder, "images/cat/1.png 1\nimages/cat/9.png 1\n"))
    with pytest.raises(StoreError, match=r"train.txt is not there: .*images/cat/9.png"):
        missing[1]
    twice = ImageList(write_list(folder, "images/cat/1.png 1\nimages/cat/1.png 0\n"))
    assert twice.labels.tolist() == [1, 0]
    pack(twice, f"{folder}/packed.lmdb", num_workers=0)
    assert StoreDataset(f"{folder}/packed.lmdb").labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("line", "separator"),
    [
        ("a b.jpg 1 0 1", None),
        ("a b.jpg,1,0,1", ","),
        ("b.jpg\t1\t0\t1", None),
        ("b.jpg cat tabby", None),
    ],
)
def test_several_labels_in_a_line_are_an_error(folder, line, separator):
    path = write_list(folder, f"c.jpg{separator or ' '}1\n{line}\n")
    with pytest.raises(StoreError, match=r"line 2: it has [345] columns, not 2: a path"):
        ImageList(path, separator=separator)


def test_a_path_may_look_as_if_it_had_labels_if_it_is_there(folder):
    photo = folder / "images/1.jpg 0 copy"
    photo.write_bytes(write_photo(folder / "1.png").read_bytes())
    text = "images/1.jpg 0 copy 7\nimages/2.jpg 1.png 8\nnone 9\n"
    dataset = ImageList(write_list(folder, text))
    assert dataset.labels.tolist() == [7, 8, 9]
    assert dataset.describe(0) == str(photo)
