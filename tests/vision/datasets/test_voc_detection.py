# SPDX-License-Identifier: Apache-2.0
"""`VOCDetection`: folders as they lie on the disk, and real ones."""

from __future__ import annotations

import os
import re
import warnings

import numpy as np
import pytest
from tests.vision.annotation_files import (
    is_red,
    painted,
    voc_object,
    voc_xml,
    write_photo,
    write_split,
    write_voc_image,
)

from penstock import Loader
from penstock.cli import main
from penstock.cli.files import check_annotations
from penstock.errors import ConfigError, StoreError
from penstock.stores import open_store, pack
from penstock.vision import AnnotationRules
from penstock.vision.datasets.detection import VOCDetection

LANDMARKS = "<landmarks><x1>11</x1><y1>8</y1><x2>21</x2><y2>9</y2></landmarks>"


@pytest.fixture
def root(tmp_path):
    pixels = painted(box=(4, 6, 20, 12))
    write_voc_image(tmp_path, "b", voc_object("dog", (5, 7, 20, 12), LANDMARKS), pixels=pixels)
    write_voc_image(tmp_path, "a", voc_object("cat", extra="<difficult>1</difficult>"))
    write_voc_image(tmp_path, "c")
    write_split(tmp_path, "train", "b", "c")
    return tmp_path


def test_boxes_and_landmarks_are_0_based_and_lie_on_their_pixels(root):
    dataset = VOCDetection(root)
    assert [dataset[i]["image_id"] for i in range(3)] == ["a", "b", "c"]
    sample = dataset[1]
    assert sample["boxes"].tolist() == [[4, 6, 20, 12]]
    assert is_red(sample["image"])[6:12, 4:20].all()
    assert sample["landmarks"].tolist() == [[[10, 7], [20, 8]]]
    assert (dataset.num_landmarks, dataset[0]["landmarks"].shape) == (2, (1, 2, 2))
    assert np.isnan(dataset[0]["landmarks"]).all()
    assert dataset[0]["difficult"].tolist() == [True]
    assert dataset.describe(1) == str(root / "JPEGImages/b.jpg")


def test_a_split_has_its_images_in_its_order_and_the_classes_of_all(root):
    dataset = VOCDetection(root, "train")
    assert [dataset[i]["image_id"] for i in range(2)] == ["b", "c"]
    assert dataset.class_names == ("cat", "dog")
    assert [row.tolist() for row in dataset.labels] == [[1], []]
    named = VOCDetection(root, "train", class_names=["dog"])  # the other file is not read
    assert named[0]["labels"].tolist() == [0]
    assert len(VOCDetection(root, "train", rules=AnnotationRules(keep_empty=False))) == 1


def test_a_box_that_begins_and_ends_at_one_number_has_no_area(tmp_path):
    objects = [voc_object("a", (5, 7, 5, 12)), voc_object("b", (5, 7, 6, 12))]
    write_voc_image(tmp_path, "1", *objects)
    dataset = VOCDetection(tmp_path)
    assert dataset[0]["labels"].tolist() == [1]
    assert dataset[0]["boxes"].tolist() == [[4, 6, 6, 12]]
    assert dataset.box_counts.zero_area == 1
    assert VOCDetection(tmp_path, rules=AnnotationRules(bad_boxes="keep"))[0]["boxes"].tolist()[
        0
    ] == [4, 6, 5, 12]
    edges = VOCDetection(tmp_path, origin=0)  # coordinates are edges: nothing is between 5 and 5
    assert edges[0]["boxes"].tolist() == [[5, 7, 6, 12]]


def test_the_size_in_the_file_says_in_which_frame_its_boxes_are(tmp_path):
    turned = np.ascontiguousarray(np.rot90(painted(64, 96, (16, 8, 56, 24)), 1))
    upright, stored = voc_object("a", (17, 9, 56, 24)), voc_object("a", (9, 41, 24, 80))
    write_voc_image(tmp_path, "1", upright, size=(64, 96), pixels=turned, orientation=6)
    write_voc_image(tmp_path, "2", stored, size=(96, 64), pixels=turned, orientation=6)
    for sample, shape in zip(VOCDetection(tmp_path), [(64, 96), (96, 64)], strict=False):
        assert sample["image"].shape[:2] == shape
        x1, y1, x2, y2 = sample["boxes"][0].astype(int)
        inside = is_red(sample["image"])[y1:y2, x1:x2]
        assert inside.all()
        assert inside.sum() == is_red(sample["image"]).sum() == 40 * 16


def test_a_transform_and_more_fields_may_be_asked_for(root):
    write_voc_image(root, "d", voc_object("cat", extra="<pose>Left</pose>"))
    dataset = VOCDetection(root, attributes=["pose"], transform=lambda sample: sample["pose"])
    assert dataset.attribute_names == {"pose": ("", "Left")}
    assert [dataset[i].tolist() for i in range(4)] == [[0], [0], [], [1]]


@pytest.mark.parametrize("class_names", [None, ["cat", "dog"]])
def test_an_image_that_a_split_names_again_is_another_sample(root, class_names):
    write_split(root, "balanced", "b", "a", "b", "b")
    dataset = VOCDetection(root, "balanced", class_names=class_names)
    found = [dataset[position] for position in range(4)]
    assert [sample["image_id"] for sample in found] == ["b", "a", "b", "b"]
    np.testing.assert_array_equal(found[0]["boxes"], found[3]["boxes"])
    assert len(dataset.labels) == 4
    store = open_store(root, split="balanced")
    assert list(store.keys) == ["b", "a", "b", "b"]
    pack(store, root / "packed.lmdb", num_workers=0)
    with open_store(root / "packed.lmdb") as packed:
        assert list(packed.keys) == ["b", "a", "b (2)", "b (3)"]
        assert [r.sample for r in packed.scan()] == [r.sample for r in store.scan()]


@pytest.mark.parametrize(
    ("annotations", "images", "given"),
    [
        ("annotations", "images", {}),
        ("Annotations", "images", {}),
        ("annots", "photos", {}),
        ("annots", "photos", {"images": "photos"}),  # with `thumbs`, it could be either
        ("old/annots", "photos", {"annotations": "old/annots"}),
        ("annots", "new/photos", {"annotations": "annots", "images": "new/photos"}),
    ],
)
def test_folders_of_other_names_are_found_or_given(root, annotations, images, given):
    for name, new in (("Annotations", annotations), ("JPEGImages", images)):
        (root / new).parent.mkdir(exist_ok=True)
        (root / name).rename(root / new)
    if "images" in given:
        write_photo(root / "thumbs/a.jpg")
    datasets = [VOCDetection(root, "train", **given)]
    if given:
        absolute = {name: root / folder for name, folder in given.items()}
        datasets.append(VOCDetection(root, "train", **absolute))
    for dataset in datasets:
        assert [sample["image_id"] for sample in dataset] == ["b", "c"]
        assert dataset.describe(0) == str(root / images / "b.jpg")


@pytest.mark.parametrize(
    "said",
    [
        "photo7.jpg", "photo7", " photo7.png ", "photo7.JPG", "images/photo7.jpg",
        "C:\\Users\\ada\\photo7.jpg", "../../photo7.jpg", "/home/ada/photo7.jpg",
    ],
)  # fmt: skip
def test_filename_counts_where_no_image_is_called_as_the_annotation(tmp_path, said):
    """For the data set, the store and `penstock check` alike."""
    write_photo(tmp_path / "JPEGImages/photo7.jpg")
    write_photo(tmp_path / "JPEGImages/10.jpg")
    for number, name in (("IMG_1", said), ("10", "photo7.jpg")):
        file = tmp_path / f"Annotations/{number}.xml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(voc_xml(voc_object(), before=f"<filename>{name}</filename>"))
    with warnings.catch_warnings(action="error"):  # of an image without annotation
        dataset, store = VOCDetection(tmp_path), open_store(tmp_path)
        keys = list(store.keys)
    assert keys == [dataset[i]["image_id"] for i in range(2)] == ["10", "IMG_1"]
    assert [os.path.basename(dataset.describe(i)) for i in range(2)] == ["10.jpg", "photo7.jpg"]
    images = [tmp_path / "JPEGImages" / name for name in ("10.jpg", "photo7.jpg")]
    assert [r.sample[0].data for r in store.scan()] == [path.read_bytes() for path in images]
    assert check_annotations(tmp_path, [*map(str, images)], []).broken == []


@pytest.mark.parametrize("said", ["../own/1.jpg", "{root}/own/1.jpg", "..\\own\\1.jpg", "..", "/"])
def test_filename_leads_to_no_file_outside_of_the_images(tmp_path, said):
    write_photo(tmp_path / "own/1.jpg")
    root = tmp_path / "set"
    write_voc_image(root, "a", voc_object())
    said = f"<filename>{said.format(root=tmp_path)}</filename>"
    (root / "Annotations/b.xml").write_text(voc_xml(voc_object(), before=said))
    dataset = VOCDetection(root)
    assert dataset.describe(1) == str(root / "JPEGImages/b.jpg")
    with pytest.raises(StoreError, match=r"cannot read .*b\.jpg.*annotated in .*b\.xml"):
        dataset[1]


@pytest.mark.parametrize("class_names", [None, ["cat", "dog"]])
def test_a_set_of_which_no_image_is_there_is_one_error(root, class_names, capsys):
    (root / "JPEGImages").rename(root / "photos")
    (root / "JPEGImages").mkdir()
    for name in "abc":
        (root / f"photos/{name}.jpg").rename(root / f"photos/{name}7.jpg")
    given = {"class_names": class_names}
    message = r"none of 3 annotated images is there: .*/a\.xml, for one, .* 'a', .* in {}, {}"
    for images, has in (
        ("JPEGImages", "which has 0 images"),
        ("photos", r"which has 3 images, 'a7\.jpg' for one"),
        ("gone", "which is not there"),
    ):
        text = message.format(root / images, has)
        with pytest.raises(StoreError, match=text + r".* annotations=\.\.\., images=\.\.\."):
            VOCDetection(root, images=images, **given)
    with pytest.raises(StoreError, match="none of 2 annotated images"):
        VOCDetection(root, "train", **given)
    assert main(["check", str(root)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(f"{root}/JPEGImages\t" + message.format(root / "JPEGImages", ""), line)


def test_what_is_not_there_is_said_when_the_dataset_is_made(root, tmp_path):
    with pytest.raises(StoreError, match=r"absent is not there: looked for /.*/absent\."):
        VOCDetection(tmp_path / "absent")
    with pytest.raises(StoreError, match=r"has no split 'val' in ImageSets/Main; it has 'train'"):
        VOCDetection(root, "val")
    write_split(root, "wrong", "b", "x")
    with pytest.raises(StoreError, match=r"split 'wrong' .* names 1 image.* x.xml is not there"):
        VOCDetection(root, "wrong")
    with pytest.raises(StoreError, match=r"object 0 \(cat\) of .*a.xml.* is none of"):
        VOCDetection(root, class_names=["dog"])
    with pytest.raises(ConfigError, match=r"bad_boxes is .fix."):
        VOCDetection(root, rules=AnnotationRules(bad_boxes="mend"))
    (root / "JPEGImages/b.jpg").unlink()
    dataset = VOCDetection(root)
    with pytest.raises(StoreError, match=r"cannot read .*b.jpg.* annotated in .*b.xml"):
        dataset[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_may_go_on_without_what_cannot_be_read(root, num_workers):
    (root / "JPEGImages/b.jpg").unlink()
    write_voc_image(root, "d", voc_object("cat"), size=(99, 99))  # of another image
    loader = Loader(
        VOCDetection(root), batch_size=4, num_workers=num_workers, collate_fn=list, on_error="skip"
    )
    with pytest.warns(UserWarning, match="2 bad samples left out"):
        (batch,) = list(loader)
    assert [sample["image_id"] for sample in batch] == ["a", "c"]
    names = sorted(failure.name for failure in loader.failures)
    assert names == [str(root / "JPEGImages/b.jpg"), str(root / "JPEGImages/d.jpg")]


def test_a_real_data_set_has_what_it_is_known_to_have(data_dir):
    dataset = VOCDetection(data_dir / "bccd", rules=AnnotationRules(bad_boxes="keep"))
    assert len(dataset) == 364
    assert dataset.class_names == ("Platelets", "RBC", "WBC")
    assert np.bincount(dataset.labels.values).tolist() == [361, 4155, 372]
    counts = dataset.box_counts
    assert (counts.total, counts.kept, counts.zero_area) == (4888, 4888, 2)
    assert (counts.inverted, counts.outside, counts.unchecked) == (0, 0, 0)
    boxes = dataset.store.table.boxes
    on_the_far_edge = (boxes[:, 2] == 640) | (boxes[:, 3] == 480)
    assert on_the_far_edge.sum() == 545
    empty = [dataset.store.keys[i] for i in range(364) if (_sides(dataset, i) <= 1).any()]
    assert empty == ["BloodImage_00338", "BloodImage_00343"]
    sizes = {split: len(VOCDetection(data_dir / "bccd", split)) for split in ("train", "val")}
    assert sizes == {"train": 205, "val": 87}


def _sides(dataset, index):
    boxes = dataset.store.table.objects_of(index)["boxes"]
    return boxes[:, 2:] - boxes[:, :2]


def test_an_object_with_a_polygon_alone_is_bad(tmp_path):
    polygon = "<polygon><x1>1</x1><y1>2</y1></polygon>"
    marks = "<landmarks><x1>3</x1><y1>4</y1></landmarks>"
    objects = [voc_object("a"), voc_object("b", None, polygon), voc_object("c", None, marks)]
    write_voc_image(tmp_path, "1", *objects)
    for policy in ("fix", "drop"):
        dataset = VOCDetection(tmp_path, rules=AnnotationRules(bad_boxes=policy))
        assert dataset[0]["labels"].tolist() == [0, 2]
        assert (dataset.box_counts.unboxed, dataset.box_counts.dropped) == (2, 1)
    with pytest.raises(StoreError, match=r"object 1 \(b\) of .*1.xml.* has neither a box nor l"):
        VOCDetection(tmp_path, rules=AnnotationRules(bad_boxes="raise"))
    kept = VOCDetection(tmp_path, rules=AnnotationRules(bad_boxes="keep"))
    assert kept[0]["boxes"].tolist()[1] == [0, 0, 40, 30]


def test_the_folder_of_torchvision_is_told_from_its_parent(tmp_path):
    write_voc_image(tmp_path / "VOCdevkit/VOC2012", "1", voc_object())
    with pytest.raises(StoreError, match=r"no Annotations of its own. .*/VOCdevkit/VOC2012\."):
        VOCDetection(tmp_path)
