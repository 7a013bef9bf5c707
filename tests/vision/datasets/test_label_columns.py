# SPDX-License-Identifier: Apache-2.0
"""A field of the annotations as labels: of files, of packed stores, and what samplers make of it.

None of the image files here can be decoded: whatever reads one fails.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from tests.vision.annotation_files import voc_object, voc_xml, write_split

from penstock import labels_of
from penstock.data import ConcatDataset, RaggedArray, Subset
from penstock.data.labels.known import class_names_of
from penstock.errors import ConfigError, StoreError
from penstock.sampling import (
    BalancedBatchSampler,
    ClassBalancedSampler,
    RepeatFactorSampler,
    balance_report,
)
from penstock.stores import StoreDataset, pack
from penstock.stores.index import COLUMNS, packed_columns
from penstock.vision import ImglabDetection, LandmarkColumns, LandmarkList, VOCDetection

POSES = ["frontal", "frontal", "", "profile", "frontal"]  # "" where the file has no such field
NAMED = ["(none)", "frontal", "profile"]


def write_photos(folder, number):
    folder.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "PNG")
    for position in range(number):
        (folder / f"{position}.jpg").write_bytes(file.getvalue()[:33])  # no more than its size


def write_voc(root, *images):
    """Write a VOC folder; an image is a list of (name, pose) for its objects."""
    write_photos(root / "JPEGImages", len(images))
    (root / "Annotations").mkdir()
    for position, objects in enumerate(images):
        found = [
            voc_object(
                name,
                (1, 1, 20, 20),
                (f"<pose>{pose}</pose>" if pose else "")
                + "<truncated>1</truncated><occluded>0</occluded>"
                + f"<difficult>{int(name == 'dog')}</difficult>"
                + f"<colour><hair>{name}s</hair></colour>",
            )
            for name, pose in objects
        ]
        (root / f"Annotations/{position}.xml").write_text(voc_xml(*found))
    return root


def faces_of_voc(folder):
    return faces_of(write_voc(folder / "voc", *([("face", pose)] for pose in POSES)))


def faces_of(root):
    return VOCDetection(root, attributes=["pose"])


def faces_of_imglab(folder):
    write_photos(folder, len(POSES))
    images = "".join(
        f"<image file='{n}.jpg' width='40' height='30'><box left='1' top='1' width='9' height='9' "
        + (f"pose='{pose}'" if pose else "")
        + "/></image>"
        for n, pose in enumerate(POSES)
    )
    (folder / "faces.xml").write_text(f"<dataset><images>{images}</images></dataset>")
    return ImglabDetection(folder / "faces.xml", attributes=["pose"])


def faces_of_list(folder):
    write_photos(folder, len(POSES))
    lines = (f"{n}.jpg,5,6,7,8,man,{pose}\n" for n, pose in enumerate(POSES))
    (folder / "faces.txt").write_text("".join(lines))
    return LandmarkList(
        folder / "faces.txt",
        LandmarkColumns(num_landmarks=2, classes=["gender", "pose"], separator=","),
    )


@pytest.fixture(params=[faces_of_voc, faces_of_imglab, faces_of_list])
def faces(request, tmp_path):
    return request.param(tmp_path)


@pytest.fixture(params=["files", "lmdb:{}/a.lmdb"])
def stored(request, tmp_path, faces):
    """Give the faces, from their files or packed."""
    if request.param == "files":
        yield faces
        return
    address = request.param.format(tmp_path)
    pack(faces, address)
    with StoreDataset(address).store as store:
        yield StoreDataset(store)


def named(dataset, labels, column):
    return [class_names_of(dataset, column)[number] for number in labels.tolist()]


def test_a_column_is_known_without_an_image_and_from_a_packed_store_alike(stored):
    labels = labels_of(stored, column="pose")
    assert labels.dtype == np.int64
    assert named(stored, labels, "pose") == [pose or "(none)" for pose in POSES]


def test_a_subset_has_its_part_of_a_column(faces):
    some = Subset(faces, [3, 2, 0])
    labels = labels_of(some, column="pose")
    assert named(some, labels, "pose") == ["profile", "(none)", "frontal"]


def test_every_sampler_balances_by_a_column(stored):
    balanced = ClassBalancedSampler(stored, column="pose", num_samples=9, exact=True)
    report = balance_report(balanced)
    assert report.class_names == tuple(NAMED)
    assert report.images.before.tolist() == [1, 3, 1]
    assert report.images.after.tolist() == [3, 3, 3]
    for sampler in (
        ClassBalancedSampler(stored, (0, 1), num_epochs=3, column="pose"),
        ClassBalancedSampler(stored, samples_per_class=1, column="pose"),
        RepeatFactorSampler(stored, 0.5, column="pose"),
        BalancedBatchSampler(stored, 3, 1, column="pose"),
    ):
        assert sampler.class_names == tuple(NAMED)
        assert sampler.labels.tolist() == balanced.labels.tolist()


def test_images_of_several_objects_have_the_classes_of_all_or_of_the_one_that_is_asked_for(
    tmp_path,
):
    images = [
        [("cat", "left"), ("cat", "right"), ("dog", "left")],
        [],
        [("cat", "left")],
        [("dog", "left"), ("cat", "left")],
        [("cat", "left"), ("fox", "left"), ("dog", "left")],
    ]
    dataset = VOCDetection(write_voc(tmp_path / "voc", *images), attributes=["pose"])
    cat, dog, fox = range(3)
    assert labels_of(dataset, column="name") == dataset.labels
    first = labels_of(dataset, objects="first")
    assert first == RaggedArray.of([[cat], [], [cat], [dog], [cat]])
    rarest = labels_of(dataset, objects="rarest")
    assert rarest == RaggedArray.of([[dog], [], [cat], [dog], [fox]])
    poses = labels_of(Subset(dataset, [0, 3]), column="pose", objects="rarest")
    assert [dataset.attribute_names["pose"][pose] for pose in poses] == ["right", "left"]


def test_a_column_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path):
    faces = faces_of_voc(tmp_path)
    with pytest.raises(ConfigError) as caught:
        labels_of(faces, column="gender")
    message = str(caught.value)
    assert "no column 'gender'; there are 'name', 'difficult', 'occluded', 'pose'" in message
    assert "attributes=['gender']" in message
    assert "name what holds them by `column=`" not in message  # it was just done
    assert "get_label" not in message  # samples do not have it either
    with pytest.raises(ConfigError, match="no column 'gender'"):
        ClassBalancedSampler(faces, column="gender")


def test_parts_of_a_set_number_the_texts_of_an_attribute_alike(tmp_path):
    root = write_voc(tmp_path / "voc", *([("face", pose)] for pose in POSES))
    write_split(root, "train", "1", "3")
    train, both = VOCDetection(root, "train", attributes=["pose"]), faces_of(root)
    assert train.attribute_names == both.attribute_names
    assert labels_of(train, column="pose").tolist() == [1, 2]
    assert labels_of(ConcatDataset([train, both]), column="pose").tolist()[:3] == [1, 2, 1]


def test_datasets_whose_columns_are_numbered_differently_are_not_joined(tmp_path):
    both = [
        VOCDetection(write_voc(tmp_path / str(n), [("face", pose)]), attributes=["pose"])
        for n, pose in enumerate(["left", "right"])
    ]
    apart = ConcatDataset(both)
    for dataset in (apart, ConcatDataset([both[0], ConcatDataset([both[1]])])):
        with pytest.raises(ConfigError, match="number the classes of 'pose' differently"):
            labels_of(dataset, column="pose")
    with pytest.raises(ConfigError, match="number the classes of 'pose' differently"):
        ClassBalancedSampler(apart, column="pose")
    alike = [
        VOCDetection(tmp_path / str(n), attributes={"pose": ["left", "right"]}) for n in range(2)
    ]
    assert labels_of(ConcatDataset(alike), column="pose").tolist() == [0, 1]


def test_a_damaged_column_is_an_error_that_names_it(tmp_path):
    store = faces_of_voc(tmp_path).store
    store.index.metadata[COLUMNS]["zlib_base64_u32"]["pose"] = "AAAA"
    with pytest.raises(StoreError, match="metadata 'pose' of the store are damaged"):
        store.column("pose")


def test_a_field_that_numbers_its_objects_is_no_column():
    packed = packed_columns({"track": np.arange(1001), "pose": np.arange(1001) % 3})
    assert list(packed["zlib_base64_u32"]) == ["pose"]
