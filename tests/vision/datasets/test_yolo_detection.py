# SPDX-License-Identifier: Apache-2.0
"""`YOLODetection`: text files of boxes and a yaml file of names."""

from __future__ import annotations

import numpy as np
import pytest
from tests.vision.annotation_files import is_red, painted, write_photo

from penstock import Loader
from penstock.errors import ConfigError, StoreError
from penstock.vision import AnnotationRules
from penstock.vision.datasets.detection import YOLODetection

HEIGHT, WIDTH = 64, 96
BOX = (16, 8, 56, 24)
LINE = "1 0.375 0.25 0.416667 0.25\n"  # the same, of 96 x 64


@pytest.fixture
def root(tmp_path):
    pixels = painted(HEIGHT, WIDTH, BOX)
    write_photo(tmp_path / "images/train/1.png", pixels)
    write_photo(tmp_path / "images/train/2.png", np.rot90(pixels, 1), orientation=6)
    write_photo(tmp_path / "images/train/3.png", pixels)
    write_photo(tmp_path / "images/val/1.png", pixels)
    (tmp_path / "labels/train").mkdir(parents=True)
    for name in ("1", "2"):
        (tmp_path / f"labels/train/{name}.txt").write_text(LINE)
    (tmp_path / "labels/val").mkdir()
    (tmp_path / "labels/val/1.txt").write_text("0 0.5 0.5 1 1\n")
    return tmp_path


def write_yaml(root, text="names: [dog, cat]\ntrain: images/train\nval: images/val\n"):
    (root / "data.yaml").write_text(text)
    return root / "data.yaml"


def test_boxes_are_pixels_of_the_upright_image(root):
    dataset = YOLODetection(write_yaml(root))
    assert (len(dataset), dataset.class_names) == (3, ("dog", "cat"))
    for index in range(2):
        sample = dataset[index]
        assert sample["image"].shape == (HEIGHT, WIDTH, 3)
        np.testing.assert_allclose(sample["boxes"], [BOX], atol=0.001)
        x1, y1, x2, y2 = np.rint(sample["boxes"][0]).astype(int)
        assert is_red(sample["image"])[y1:y2, x1:x2].all()
        assert sample["labels"].tolist() == [1]
    assert dataset[2]["boxes"].shape == (0, 4)
    assert len(YOLODetection(root, rules=AnnotationRules(keep_empty=False))) == 2
    assert YOLODetection(root, "val")[0]["boxes"].tolist() == [[0, 0, WIDTH, HEIGHT]]


def test_an_image_that_a_list_names_again_is_another_sample(root):
    path = write_yaml(root, "names: [dog, cat]\ntrain: train.txt\n")
    names = ["train/1", "train/3", "train/1", "train/1", "val/1"]
    (root / "train.txt").write_text("".join(f"images/{name}.png\n" for name in names))
    dataset = YOLODetection(path)
    found = [dataset[position] for position in range(len(dataset))]
    assert [sample["image_id"] for sample in found] == names
    np.testing.assert_array_equal(found[0]["boxes"], found[3]["boxes"])
    (root / "images/train/1.png").write_bytes(b"")
    assert len(YOLODetection(path)) == 5


def test_a_box_cut_short_after_six_digits_is_not_outside(root):
    (root / "labels/train/1.txt").write_text("0 0.833334 0.5 0.333333 1.000001\n")
    dataset = YOLODetection(write_yaml(root), rules=AnnotationRules(bad_boxes="raise"))
    assert dataset.box_counts.outside == 0
    assert dataset[0]["boxes"][0].tolist()[2:] == [WIDTH, HEIGHT]


def test_boxes_that_reach_beyond_are_cut(root):
    (root / "labels/train/1.txt").write_text("0 0.9 0.5 0.4 0.5\n1 0.5 0.5 0 0.5\n")
    dataset = YOLODetection(write_yaml(root))
    np.testing.assert_allclose(dataset[0]["boxes"], [[67.2, 16, 96, 48]], atol=0.001)
    counts = dataset.box_counts
    assert (counts.total, counts.clipped, counts.zero_area) == (3, 1, 1)


def test_classes_may_be_chosen_or_named(root):
    path = write_yaml(root)
    with pytest.warns(UserWarning, match="no object is of 1 of the 2 classes given: 'dog'"):
        dataset = YOLODetection(path, class_names=["cat", "dog"])
    assert [row.tolist() for row in dataset.labels] == [[0], [0], []]
    with pytest.raises(StoreError, match=r"is none of the 1 given: .'dog'"):
        YOLODetection(path, class_names=["dog"])
    with pytest.warns(UserWarning, match="2 of 2 objects .*: 2 'cat'|no object is of"):
        dropped = YOLODetection(
            path, class_names=["dog"], rules=AnnotationRules(unknown_classes="drop")
        )
    assert dropped.box_counts.unknown == 2
    path.unlink()
    assert YOLODetection(root).class_names == ("0", "1")
    named = YOLODetection(root, class_names=["a", "b", "c"])
    assert (named.class_names, named.labels[0].tolist()) == (("a", "b", "c"), [1])
    with pytest.raises(ConfigError, match=r"class_names are 1, and .* has objects of class 1"):
        YOLODetection(root, class_names=["a"])


def test_images_of_one_name_in_several_folders_are_told_apart(root):
    path = write_yaml(root, "names: [dog, cat]\ntrain: [images/train, images/val]\n")
    dataset = YOLODetection(path)
    assert [dataset.store.keys[i] for i in range(4)] == [
        "train/1.png", "train/2.png", "train/3.png", "val/1.png",
    ]  # fmt: skip
    assert dataset[3]["labels"].tolist() == [0]


def test_one_damaged_header_is_an_error_of_its_own_sample(root):
    (root / "labels/train/1.txt").write_text(LINE + LINE)
    (root / "images/train/1.png").write_bytes(b"<html>not found</html>")
    dataset = YOLODetection(write_yaml(root), rules=AnnotationRules(bad_boxes="raise"))
    assert str(dataset.box_counts) == "3 objects, 1 kept (2 unsized)"
    with pytest.raises(ValueError, match="text, not an image"):
        dataset[0]
    assert dataset[1]["labels"].tolist() == [1]
    with pytest.warns(UserWarning, match="1 bad sample left out"):
        loaded = list(Loader(dataset, batch_size=1, on_error="skip", collate_fn=list))
    assert [batch[0]["image_id"] for batch in loaded if batch] == ["2", "3"]


def test_a_folder_of_which_no_image_can_be_read_is_an_error_at_once(root):
    for name in ("1", "2", "3"):
        (root / f"images/train/{name}.png").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot read the size of .*/1.png: the file is empty"):
        YOLODetection(write_yaml(root))
