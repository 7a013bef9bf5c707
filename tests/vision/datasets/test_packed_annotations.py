# SPDX-License-Identifier: Apache-2.0
"""`PackedAnnotations`: what is known of a packed data set without an image being decoded."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tests.vision.annotation_files import one_image, painted, thing, write_photo

from penstock.data import Subset
from penstock.errors import StoreError
from penstock.sampling import BucketBatchSampler
from penstock.stores import StoreDataset, pack
from penstock.stores.records import EncodedImage
from penstock.vision.datasets.annotated import (
    AnnotatedImages,
    PackedAnnotations,
)

SIZES = [(30, 40), (40, 30), (20, 60), (20, 60)]
EYES = {"landmarks_xy_px": ((1.0, 2.0), (3.0, 2.0)), "landmark_names": ("left", "right")}


@pytest.fixture
def dataset(tmp_path):
    images = []
    for number, size in enumerate(SIZES):
        photo = write_photo(tmp_path / f"{number}.png", painted(*size))
        objects = [thing(extra={"hat": "red"}, **EYES)]
        images.append(one_image(photo, *objects, size=size, key=str(number)))
    return AnnotatedImages(images, attributes=["hat"])


def assert_known(packed, dataset):
    assert packed.sizes_px.tolist() == [list(size) for size in SIZES]
    assert packed.sizes_px.dtype == np.int64
    assert packed.landmark_names == dataset.landmark_names == ("left", "right")
    assert (packed.num_landmarks, packed.attribute_names) == (2, {"hat": ("red",)})
    assert packed[2]["landmarks"].tolist() == dataset[2]["landmarks"].tolist()


def test_sizes_and_names_are_there_from_the_index_alone(tmp_path, dataset):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(dataset, address)
    packed = PackedAnnotations(address)
    packed.store.get_many = None  # no record is read
    sampler = BucketBatchSampler(packed, 2, key="aspect_ratio")
    assert sorted(index for batch in sampler for index in batch) == [0, 1, 2, 3]
    del packed.store.get_many
    assert not packed.sizes_px.flags.writeable
    assert_known(packed, dataset)
    assert_known(pickle.loads(pickle.dumps(packed)), dataset)
    packed.close()


def test_sizes_of_a_part_are_read_from_the_records(tmp_path, dataset):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(dataset, address, limit=3)
    packed = PackedAnnotations(address)
    assert packed.sizes_px.tolist() == [list(size) for size in SIZES[:3]]
    packed.close()
    images = [dataset.annotation(number) for number in range(4)]
    files = AnnotatedImages(images, attributes=["hat"], decode=EncodedImage)
    pack(Subset(files, [2, 0]), address, overwrite=True)
    packed = PackedAnnotations(address)
    assert packed.sizes_px.tolist() == [[20, 60], [30, 40]]
    packed.close()


def test_sizes_that_annotations_do_not_say_are_read_from_the_records(tmp_path):
    turned = write_photo(tmp_path / "1.jpg", painted(30, 40), orientation=6)
    images = [one_image(turned, size=None), one_image(turned, size=(30, 40), key="2")]
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack(AnnotatedImages(images), address)
    packed = PackedAnnotations(address)
    assert [packed[n]["image"].shape[:2] for n in range(2)] == [(40, 30), (30, 40)]
    assert packed.sizes_px.tolist() == [[40, 30], [30, 40]]
    assert (packed.num_landmarks, packed.landmark_names, packed.attribute_names) == (0, (), {})
    packed.close()


def test_a_store_of_something_else_says_so(tmp_path):
    address = f"lmdb:{tmp_path}/a.lmdb"
    pack([("one", 1)], address)
    packed = PackedAnnotations(address)
    with pytest.raises(StoreError, match=r"has no entry 'image' .*read this store with StoreData"):
        packed.sizes_px  # noqa: B018
    packed.close()
    assert isinstance(packed, StoreDataset)


def test_damaged_sizes_are_an_error(dataset, tmp_path, monkeypatch):
    pack(dataset, f"lmdb:{tmp_path}/all.lmdb", num_workers=0)
    packed = PackedAnnotations(f"lmdb:{tmp_path}/all.lmdb")
    said = dict(packed.store.metadata)
    for text in ("?", "AAAA", said["sizes_px"]["zlib_base64_u32"][:8], 7, None):
        damaged = {**said, "sizes_px": {"num_images": 4, "zlib_base64_u32": text}}
        monkeypatch.setattr(type(packed.store), "metadata", damaged)
        with pytest.raises(StoreError, match="metadata 'sizes_px' of the store are damaged"):
            _ = packed.sizes_px
    packed.close()
