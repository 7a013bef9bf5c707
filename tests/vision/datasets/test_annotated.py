# SPDX-License-Identifier: Apache-2.0
"""`AnnotatedImages`: samples, rules, errors, packing."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.vision.annotation_files import (
    HEIGHT,
    WIDTH,
    assert_equal_samples,
    is_red,
    one_image,
    painted,
    thing,
    write_photo,
)

from penstock.data import Subset
from penstock.errors import ConfigError, StoreError
from penstock.stores import StoreDataset, pack
from penstock.stores.records import EncodedImage
from penstock.vision.datasets.annotated import AnnotatedImages
from penstock.vision.datasets.rules import AnnotationRules
from penstock.vision.pipeline import ImagePipeline

NAN = math.nan
POINTS = ((1.0, 2.0), (NAN, NAN), (30.0, 4.0))


def dataset_of(*images, rules=None, **how):
    rules = None if rules is None else AnnotationRules(**rules)
    return AnnotatedImages(images, rules=rules, **how)


@pytest.fixture
def photo(tmp_path):
    return write_photo(tmp_path / "1.png", painted(box=(4, 6, 20, 12)))


def full(photo, **more):
    objects = (
        thing((4, 6, 20, 12), "dog", difficult=True, landmarks_xy_px=POINTS, visibility=(1, 0, 2)),
        thing((0, 0, 40, 30), "cat", truncated=False, occluded=True, extra={"hat": "yes"}),
    )
    return replace(one_image(photo, *objects), **more)


def test_a_sample_has_all_that_the_files_say(photo):
    dataset = dataset_of(full(photo), attributes=["hat"])
    sample = dataset[0]
    forms = {k: (v.shape, v.dtype.str) for k, v in sample.items() if isinstance(v, np.ndarray)}
    assert forms == {
        "image": ((HEIGHT, WIDTH, 3), "|u1"),
        "boxes": ((2, 4), "<f4"),
        "labels": ((2,), "<i8"),
        "landmarks": ((2, 3, 2), "<f4"),
        "visibility": ((2, 3), "|i1"),
        "difficult": ((2,), "|b1"),
        "truncated": ((2,), "|b1"),
        "occluded": ((2,), "|b1"),
        "hat": ((2,), "<i8"),
    }
    assert sample["image_id"] == "1"
    assert sample["labels"].tolist() == [1, 0]
    assert [dataset.class_names[label] for label in sample["labels"]] == ["dog", "cat"]
    np.testing.assert_array_equal(sample["landmarks"][0], POINTS)
    assert np.isnan(sample["landmarks"][1]).all()
    assert sample["difficult"].tolist() == [True, False]
    assert [dataset.attribute_names["hat"][n] for n in sample["hat"]] == ["", "yes"]
    x1, y1, x2, y2 = sample["boxes"][0].astype(int)
    assert is_red(sample["image"])[y1:y2, x1:x2].all()
    assert is_red(sample["image"]).sum() == (y2 - y1) * (x2 - x1)


def test_arrays_are_the_callers_own_and_a_transform_takes_the_sample(photo):
    dataset = dataset_of(full(photo), transform=lambda sample: {**sample, "seen": True})
    first = dataset[0]
    first["boxes"][:] = 7
    first["labels"][:] = 7
    assert first["seen"]
    assert dataset[0]["boxes"].tolist() == [[4, 6, 20, 12], [0, 0, 40, 30]]
    assert dataset[0]["labels"].tolist() == [1, 0]


def test_an_image_without_objects_has_empty_arrays_of_the_usual_shapes(photo):
    dataset = dataset_of(full(photo), one_image(photo, key="2"))
    sample = dataset[1]
    assert {k: v.shape for k, v in sample.items() if isinstance(v, np.ndarray)} == {
        "image": (HEIGHT, WIDTH, 3),
        "boxes": (0, 4),
        "labels": (0,),
        "landmarks": (0, 3, 2),
        "visibility": (0, 3),
        "difficult": (0,),
        "truncated": (0,),
        "occluded": (0,),
    }
    assert [len(dataset_of(full(photo), one_image(photo, key="2"), rules=rules)) for rules in (
        {"keep_empty": True}, {"keep_empty": False}
    )] == [2, 1]  # fmt: skip


def test_an_object_without_a_box_has_one_around_its_landmarks_or_the_whole_image(photo):
    points = ((3.0, 5.0), (NAN, NAN), (9.0, 2.0))
    image = one_image(
        photo,
        thing(None, landmarks_xy_px=points),
        thing(None, landmarks_xy_px=((NAN, NAN),) * 3),
        thing(None, landmarks_xy_px=((-3.0, 4.0), (NAN, NAN), (2.0, 4.0))),
        size=None,
    )
    dataset = dataset_of(image)
    boxes = dataset[0]["boxes"].tolist()
    assert boxes == [[3, 2, 10, 6], [0, 0, WIDTH, HEIGHT], [0, 4, 3, 5]]
    assert (dataset.box_counts.unboxed, dataset.box_counts.outside) == (3, 0)
    kept = dataset_of(image, rules={"bad_boxes": "keep"})
    assert kept[0]["boxes"].tolist()[1:] == [[0, 0, WIDTH, HEIGHT], [-3, 4, 3, 5]]
    assert dataset_of(image, rules={"bad_boxes": "raise"})[0]["boxes"].tolist() == boxes


def test_an_object_with_neither_box_nor_landmarks_is_bad(photo):
    image = one_image(photo, thing(), thing(None, "dog"), source="1.xml")
    for policy in ("fix", "drop"):
        dataset = dataset_of(image, rules={"bad_boxes": policy})
        assert str(dataset.box_counts) == "2 objects, 1 kept (1 dropped, 1 unboxed)"
        assert dataset[0]["boxes"].tolist() == [[0, 0, 8, 6]]
    with pytest.raises(StoreError, match=r"object 1 \(dog\) of 1.xml, .* has neither a box nor l"):
        dataset_of(image, rules={"bad_boxes": "raise"})
    kept = dataset_of(image, rules={"bad_boxes": "keep"})
    assert kept[0]["boxes"].tolist()[1] == [0, 0, WIDTH, HEIGHT]
    assert (kept.box_counts.unboxed, kept.box_counts.dropped) == (1, 0)


def test_a_class_that_is_not_given_is_an_error_or_left_out(photo):
    names = ["RBC", "WBC", "Platelet"]
    image = one_image(photo, thing(name="RBC"), thing(name="Platelets"), thing(name="Platelets"))
    with pytest.raises(
        StoreError, match=r"object 1 \(Platelets\) of 1.xml.* is none of the 3 given: \('RBC', 'WB"
    ):
        dataset_of(replace(image, source="1.xml"), class_names=names)
    with pytest.warns(UserWarning, match=r".") as warned:
        dataset_of(image, class_names=names, rules={"unknown_classes": "drop"})
    assert [str(one.message) for one in warned] == [
        "2 of 3 objects are of none of the classes asked for, and are left out: 2 'Platelets'.",
        "no object is of 2 of the 3 classes given: 'WBC', 'Platelet'. They keep their numbers.",
    ]


def test_names_that_every_object_would_have_room_for_are_bounded(photo):
    def named(number):
        names = tuple(f"n{number}_{n}" for n in range(1000))
        return thing(landmarks_xy_px=((1.0, 1.0),) * 1000, landmark_names=names)

    many = one_image(photo, named(1), named(2), named(3), source="1.xml")
    with pytest.raises(
        StoreError, match=r"object 2 \(cat\) of 1.xml: with its landmarks there are 3,000; 2,0"
    ):
        dataset_of(many)
    points = ((1.0, 1.0),) * 10_001
    with pytest.raises(
        StoreError, match=r"object 0 .* of 1.xml: .* there are 10,001; 10,000 is the"
    ):
        dataset_of(one_image(photo, thing(landmarks_xy_px=points), source="1.xml"))
    said = [thing(extra={f"q{i}_{n}": "1" for n in range(20)}) for i in range(60)]
    image = one_image(photo, *said, source="1.xml")
    assert not dataset_of(image).attribute_names
    with pytest.raises(StoreError, match=r"object 50 \(cat\) of 1.xml: 'q50_0' is one attribute m"):
        dataset_of(image, attributes=None)
    assert list(dataset_of(image, attributes=["q7_3"]).attribute_names) == ["q7_3"]


def test_the_policy_decides_which_boxes_and_labels_there_are(photo):
    image = one_image(
        photo,
        thing((4, 6, 20, 12), "a"),
        thing((4, 6, 4, 12), "b"),
        thing((20, 6, 4, 12), "c"),
        thing((-4, 6, 50, 12), "d"),
        thing((50, 6, 60, 12), "e"),
        size=None,
    )
    found = {
        policy: dataset_of(image, rules={"bad_boxes": policy}) for policy in ("fix", "drop", "keep")
    }
    rows = {policy: dataset[0]["labels"].tolist() for policy, dataset in found.items()}
    assert rows == {"fix": [0, 2, 3], "drop": [0], "keep": [0, 1, 2, 3, 4]}
    assert rows == {policy: dataset.labels[0].tolist() for policy, dataset in found.items()}
    fixed = found["fix"][0]["boxes"].tolist()
    assert fixed == [[4, 6, 20, 12], [4, 6, 20, 12], [0, 6, 40, 12]]
    counts = found["fix"].box_counts
    assert str(counts) == (
        "5 objects, 3 kept (1 zero_area, 1 inverted, 2 outside, 1 swapped, 1 clipped, 2 dropped)"
    )
    assert "boxes=5 objects, 3 kept (1 zero_area" in repr(found["fix"])
    assert found["keep"].box_counts.unchecked == 5  # no file was opened for its size
    assert found["keep"].box_counts.zero_area == 1


def test_a_format_whose_boxes_include_both_ends_can_say_so(photo):
    one_column = one_image(photo, thing(), thing((4, 6, 5, 12)))
    for added_px, count in ((0, 0), (1, 1)):
        dataset = dataset_of(one_column, rules={"added_px": added_px})
        assert dataset.box_counts.zero_area == count


def test_raising_names_the_first_bad_box_and_their_number(tmp_path):
    bad = thing((4.5, 6, 4.5, 12))
    images = [
        one_image(tmp_path / f"{n}.jpg", thing(), bad, key=str(n), source=f"{n}.xml")
        for n in range(5)
    ]
    expected = (
        r"5 bad box\(es\)\. The first, \(4\.5, 6, 4\.5, 12\) .*, of object 1 \(cat\) of 0\.xml, an "
        r"image of 30 x 40 px \(height x width\), is zero_area\. Correct the files, or choose bad_b"
    )
    with pytest.raises(StoreError, match=expected):
        dataset_of(*images, rules={"bad_boxes": "raise"})


def test_a_missing_image_is_an_error_when_it_is_read_and_names_its_annotation(tmp_path, photo):
    image = one_image(tmp_path / "absent.jpg", thing(), source="labels/7.xml", size=None)
    dataset = dataset_of(image, full(photo, key="2"))
    assert dataset[1]["image_id"] == "2"
    assert dataset.box_counts.unchecked == 1
    assert dataset.sizes_px.tolist() == [[0, 0], [HEIGHT, WIDTH]]
    with pytest.raises(StoreError, match=r"cannot read .*absent.jpg: No such file or directory"):
        dataset[0]
    with pytest.raises(StoreError, match=r"It is annotated in labels/7.xml"):
        dataset.__getitems__([1, 0])
    assert dataset.describe(0) == str(tmp_path / "absent.jpg")


def test_an_image_may_come_again_and_two_of_one_key_are_an_error(photo, tmp_path):
    one, other = full(photo), write_photo(tmp_path / "other.png")
    dataset = dataset_of(one, one)
    assert [dataset[position]["image_id"] for position in range(2)] == ["1", "1"]
    for different in (replace(one, path=other), replace(one, objects=())):
        with pytest.raises(StoreError, match="annotated images has two images called '1'"):
            dataset_of(one, different)


@pytest.mark.parametrize("orientation", [None, 6])
def test_a_packed_copy_gives_equal_samples(tmp_path, orientation):
    pytest.importorskip("lmdb")
    photo = write_photo(tmp_path / "1.jpg", painted(box=(4, 6, 20, 12)), orientation)
    images = [full(photo), one_image(photo, key="empty"), full(photo, key="3")]
    dataset = dataset_of(*images, attributes=["hat"])
    address = f"lmdb:{tmp_path}/packed.lmdb"
    pack(dataset, address, num_workers=0)
    packed = StoreDataset(address)
    assert len(packed) == 3
    for position in range(3):
        assert_equal_samples(packed[position], dataset[position])
    assert packed.labels == dataset.labels
    assert packed.class_names == dataset.class_names
    assert list(packed.store.keys) == ["1", "empty", "3"]
    assert packed.store.metadata["attribute_names"] == {"hat": ["", "yes"]}
    packed.close()


def test_a_part_of_it_is_packed_by_its_files(tmp_path, photo):
    pytest.importorskip("lmdb")
    images = [full(photo), full(photo, key="2")]
    address = f"lmdb:{tmp_path}/packed.lmdb"
    pack(Subset(dataset_of(*images, decode=EncodedImage), [1]), address, num_workers=0)
    packed = StoreDataset(address)
    assert_equal_samples(packed[0], dataset_of(*images)[1])
    assert packed.class_names == dataset_of(*images).class_names
    assert packed.labels[0].tolist() == packed[0]["labels"].tolist()
    packed.close()


def test_a_pipeline_of_images_alone_is_refused(photo):
    with pytest.raises(ConfigError, match="would leave the boxes behind"):
        dataset_of(full(photo), transform=ImagePipeline.eval(32))


def test_it_pickles_and_its_contents_have_a_fingerprint(photo):
    dataset = dataset_of(full(photo), attributes=["hat"])
    copy = pickle.loads(pickle.dumps(dataset))
    assert_equal_samples(copy[0], dataset[0])
    assert copy.fingerprint == dataset.fingerprint
    assert copy.labels == dataset.labels
    assert copy.box_counts == dataset.box_counts
    assert dataset_of(full(photo)).fingerprint != dataset.fingerprint
    dropped = dataset_of(full(photo), attributes=["hat"], rules={"skip_difficult": True})
    assert dropped.fingerprint != dataset.fingerprint


def test_workers_get_its_annotations_as_arrays_to_be_shared():
    images = (one_image(f"{n}.jpg", thing(), thing(), key=str(n)) for n in range(20_000))
    dataset = dataset_of(*images)
    shared = []
    pickled = pickle.dumps(dataset, protocol=5, buffer_callback=shared.append)
    assert len(pickled) < 8_000
    assert sum(buffer.raw().nbytes for buffer in shared) > 1_000_000
    copy = pickle.loads(pickled, buffers=shared)
    assert np.shares_memory(copy.store.table.boxes, dataset.store.table.boxes)


SIDES = st.integers(-30, 70) | st.floats(-30, 70)
SOME_OBJECTS = st.lists(
    st.builds(
        thing,
        st.none() | st.tuples(*[SIDES] * 4),
        st.sampled_from(["cat", "dog", "bird"]),
        difficult=st.booleans(),
    ),
    max_size=5,
)


@pytest.mark.filterwarnings("ignore:no object is of")
@pytest.mark.filterwarnings("ignore:.* objects are of none of the classes")
@given(
    st.lists(SOME_OBJECTS, min_size=1, max_size=4),
    st.sampled_from(["fix", "drop", "keep"]),
    st.booleans(),
    st.booleans(),
)
def test_whatever_the_boxes_labels_and_samples_agree_and_every_object_is_counted(
    several, policy, skip_difficult, keep_empty
):
    images = [one_image("absent.png", *some, key=str(n)) for n, some in enumerate(several)]
    dataset = dataset_of(
        *images,
        class_names=["dog", "cat"],
        rules={
            "bad_boxes": policy,
            "unknown_classes": "drop",
            "skip_difficult": skip_difficult,
            "keep_empty": keep_empty,
        },
    )
    counts = dataset.box_counts
    assert counts.total == sum(map(len, several))
    assert counts.total == counts.kept + counts.dropped + counts.unknown + counts.difficult
    assert counts.kept == len(dataset.labels.values)
    assert len(dataset) == len(dataset.labels)
    for index in range(len(dataset)):
        rows = dataset.store.table.objects_of(index)
        assert len({len(column) for column in rows.values()}) == 1
        assert rows["labels"].tolist() == dataset.labels[index].tolist()
        assert keep_empty or len(rows["labels"])
        names = [item.class_name for item in several[int(dataset.store.keys[index])]]
        assert {dataset.class_names[label] for label in rows["labels"]} <= set(names)
        boxes = rows["boxes"]
        if policy != "keep":
            assert (boxes[:, 2:] > boxes[:, :2]).all()
            assert (boxes[:, :2] >= 0).all()
            assert (boxes[:, 2:] <= (WIDTH, HEIGHT)).all()


def test_it_tells_what_is_marked_in_an_image(photo):
    found = dataset_of(full(photo)).annotation(-1)
    assert [item.class_name for item in found.objects] == ["dog", "cat"]
    assert found.objects[0].box_xyxy_px == (4, 6, 20, 12)
    assert (found.path, found.width_px) == (photo, WIDTH)
