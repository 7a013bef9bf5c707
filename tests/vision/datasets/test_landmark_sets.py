# SPDX-License-Identifier: Apache-2.0
"""`LandmarkList` and `ImglabDetection`: faces from text files and from dlib's XML."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tests.vision.annotation_files import (
    HEIGHT,
    WIDTH,
    assert_equal_samples,
    painted,
    write_photo,
)

from penstock.errors import ConfigError, StoreError
from penstock.stores import StoreDataset, pack
from penstock.vision import AnnotationRules, LandmarkColumns
from penstock.vision.datasets.detection import ImglabDetection, LandmarkList

RED_POINTS = [(4, 6), (19, 11)]  # opposite corners of the rectangle, as pixels


@pytest.fixture
def folder(tmp_path):
    for name in ("faces/1.png", "faces/2.png"):
        write_photo(tmp_path / name, painted(box=(4, 6, 20, 12)))
    return tmp_path


def write_list(folder, text):
    path = folder / "train.txt"
    path.write_bytes(text.encode())
    return path


def test_landmarks_lie_on_their_pixels_and_lines_of_one_image_are_one_sample(folder):
    path = write_list(
        folder,
        "faces\\1.png 4 19 6 11\r\n  faces/2.png 1 2 3 4\r\n\r\nfaces/1.png 7 8 9 10\r\n",
    )
    dataset = LandmarkList(path)
    assert len(dataset) == 2
    sample = dataset[0]
    assert sample["landmarks"].tolist() == [[[4, 6], [19, 11]], [[7, 9], [8, 10]]]
    for x, y in sample["landmarks"][0].astype(int):
        assert (sample["image"][y, x] == painted(box=(4, 6, 20, 12))[6, 4]).all()
    assert sample["boxes"].tolist() == [[4, 6, 20, 12], [7, 9, 9, 11]]  # around the points
    assert sample["labels"].tolist() == [0, 0]
    assert (dataset.class_names, dataset.num_landmarks) == (("object",), 2)
    assert [dataset[i]["image_id"] for i in range(2)] == ["faces/1.png", "faces/2.png"]
    assert dataset.sizes_px.tolist() == [[HEIGHT, WIDTH]] * 2


ONE, OTHER, SAME = "faces/1.png 4 19 6 11\n", "faces/1.png 7 8 9 10\n", "faces/1.png 4.0 19 6 11\n"
TWO = "faces/2.png 1 nan 3 4\n"


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        (ONE * 5, [("1", 1)] * 5),
        (TWO + ONE + TWO + SAME, [("2", 1), ("1", 1), ("2", 1), ("1", 1)]),
        ((ONE + OTHER) * 3, [("1", 2)] * 3),
        (ONE * 2 + TWO + OTHER * 2, [("1", 2), ("1", 2), ("2", 1)]),
        (ONE + OTHER + TWO + OTHER, [("1", 2), ("2", 1), ("1", 2)]),  # as the most frequent line
    ],
)
def test_a_line_that_comes_again_repeats_the_sample(folder, text, samples):
    dataset = LandmarkList(write_list(folder, text))
    found = [dataset[i] for i in range(len(dataset))]
    assert [(s["image_id"][6:7], len(s["landmarks"])) for s in found] == samples
    equal = [s for s in found if s["image_id"] == found[0]["image_id"]]
    for sample in equal:
        assert sample.keys() == equal[0].keys()
        for name, value in sample.items():
            np.testing.assert_array_equal(value, equal[0][name])
    assert len(dataset.labels) == len(samples)


def test_class_columns_are_arrays_and_the_first_is_the_labels(folder):
    text = "faces/1.png 4 19 6 11 2 glasses\nfaces/2.png 4 19 6 11 0 none\n"
    path = write_list(folder, text)
    dataset = LandmarkList(path, LandmarkColumns(classes=["gender", "wears"]))
    assert [dataset[i]["labels"].tolist() for i in range(2)] == [[2], [0]]
    assert [row.tolist() for row in dataset.labels] == [[2], [0]]
    assert dataset.class_names == ("0", "1", "2")
    assert [dataset[i]["gender"].tolist() for i in range(2)] == [[2], [0]]
    assert [dataset[i]["wears"].tolist() for i in range(2)] == [[0], [1]]
    assert dataset[0]["wears"].dtype == np.int64
    assert dataset.attribute_names["wears"] == ("glasses", "none")
    other = LandmarkList(
        path,
        LandmarkColumns(classes=["wears", "class"]),
        class_names=["none", "glasses"],
        attributes={"wears": ["0", "1", "2"]},
    )
    assert [other[i]["labels"].tolist() for i in range(2)] == [[1], [0]]
    assert [other[i]["wears"].tolist() for i in range(2)] == [[2], [0]]
    assert "class" not in other[0]
    single = LandmarkList(
        write_list(folder, "faces/1.png 4 19 6 11 2\n"), LandmarkColumns(classes="gender")
    )
    assert single[0]["gender"].tolist() == [2]


def test_a_bad_line_or_argument_is_named(folder, tmp_path):
    with pytest.raises(StoreError, match=r"train.txt, line 2: it has 4 columns, not 5"):
        LandmarkList(write_list(folder, "faces/1.png 4 19 6 11\nfaces/2.png 4 19 6\n"))
    path = write_list(folder, "faces/1.png 4 19 6 11 2\n")
    with pytest.raises(StoreError, match=r"none of the 1 given: .'1',"):
        LandmarkList(path, LandmarkColumns(classes=["gender"]), class_names=["1"])
    with pytest.raises(StoreError, match=r"absent.txt"):
        LandmarkList(tmp_path / "absent.txt")
    with pytest.raises(ConfigError, match="layout is 'xxyy' or 'xyxy', not 'yyxx'"):
        LandmarkList(path, LandmarkColumns(layout="yyxx"))
    with pytest.raises(ConfigError, match="an attribute is called 'image'"):
        LandmarkList(path, LandmarkColumns(classes=["image"]))
    missing = LandmarkList(write_list(folder, "faces/3.png 4 19 6 11\n"))
    with pytest.raises(StoreError, match=r"3.png.* annotated in .*train.txt, line 1"):
        missing[0]


def imglab(*boxes, size="width='40' height='30'"):
    return (
        f"<dataset><images><image file='faces/1.png' {size}>{''.join(boxes)}</image>"
        "<image file='faces/2.png'/></images></dataset>"
    )


def part(name, x, y):
    return f"<part name='{name}' x='{x}' y='{y}'/>"


BOX = "<box top='6' left='4' width='16' height='6'{}>{}</box>"


def test_parts_are_landmarks_and_a_missing_part_is_not_marked(folder):
    both = part("nose", 4, 6) + part("chin", 19, 11)
    path = folder / "faces.xml"
    path.write_text(
        imglab(
            BOX.format("", both),
            BOX.format(" ignore='1'", "<label>cat</label>" + part("nose", 5, 7)),
            BOX.format(" gender='male'", ""),
        )
    )
    dataset = ImglabDetection(path, attributes=["gender"])
    sample = dataset[0]
    assert dataset.landmark_names == ("chin", "nose")
    nan = [np.nan, np.nan]
    expected = [[[19, 11], [4, 6]], [nan, [5, 7]], [nan, nan]]
    np.testing.assert_array_equal(sample["landmarks"], expected)
    assert sample["boxes"].tolist() == [[4, 6, 20, 12]] * 3
    assert dataset.class_names == ("cat", "object")
    assert sample["labels"].tolist() == [1, 0, 1]
    assert sample["difficult"].tolist() == [False, True, False]
    assert sample["gender"].tolist() == [0, 0, 1]
    assert len(dataset) == 2
    assert len(ImglabDetection(path, rules=AnnotationRules(keep_empty=False))) == 1
    assert ImglabDetection(path, rules=AnnotationRules(skip_difficult=True))[0][
        "labels"
    ].tolist() == [1, 1]
    nose = ImglabDetection(path, landmark_names=["nose"])
    assert nose[0]["landmarks"].shape == (3, 1, 2)


def test_real_faces_have_what_they_are_known_to_have(data_dir):
    found = [
        ImglabDetection(data_dir / f"faces/{name}_with_face_landmarks.xml")
        for name in ("training", "testing")
    ]
    assert [len(dataset) for dataset in found] == [4, 5]
    assert [len(dataset.labels.values) for dataset in found] == [18, 25]
    assert [dataset.num_landmarks for dataset in found] == [68, 68]
    assert found[0].landmark_names == tuple(f"{n:02}" for n in range(68))
    for dataset in found:
        for index in range(len(dataset)):
            sample = dataset[index]
            assert sample["image"].shape[:2] == tuple(dataset.sizes_px[index])
            assert sample["landmarks"].shape == (len(sample["boxes"]), 68, 2)
            centres = sample["landmarks"].mean(axis=1)
            assert (centres > sample["boxes"][:, :2]).all()
            assert (centres < sample["boxes"][:, 2:]).all()
    copy = pickle.loads(pickle.dumps(found[0]))
    assert copy.landmark_names == found[0].landmark_names


def test_real_faces_go_into_a_store_and_back(data_dir, tmp_path):
    pytest.importorskip("lmdb")
    dataset = ImglabDetection(data_dir / "faces/training_with_face_landmarks.xml")
    pack(dataset, f"lmdb:{tmp_path}/faces.lmdb", num_workers=0)
    packed = StoreDataset(f"lmdb:{tmp_path}/faces.lmdb")
    for index in range(len(dataset)):
        assert_equal_samples(packed[index], dataset[index])
    assert packed.store.metadata["landmark_names"] == list(dataset.landmark_names)
    packed.close()
