# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Folders of images in object storage."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
from tests.blobs.object_storage import InBucket, bucket, object_server, put, website  # noqa: F401 - fixtures
from tests.support.stores import refused

from penstock import Loader
from penstock.blobs.blobs import open_blobs
from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, StoreDataset, open_store
from penstock.stores.folder.objects import LISTING_NAME
from penstock.stores.records import decode_record, encode_record
from penstock.testing.stores import StoreReaderContract
from penstock.vision import ImageFolder


def touch(root, files):
    for name, data in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestFolderObjects(InBucket, StoreReaderContract):
    kind = "folder"

    def fill(self, address, records, class_names=(), metadata=None):
        put(self.bucket, {r.key: decode_record(r.data).sample[0].data for r in records})


@pytest.mark.parametrize("layout", ["auto", "classes", "flat"])
@pytest.mark.parametrize(
    "names",
    [
        ["c/2.JPG", "c/sub/1.png", "a/x.webp", "a/notes.txt", "README.md", "b/only notes.txt"],
        ["100% ü/%20 1.jpg", "a b/1.jpg", "a/b/1.jpg", "a/a.jpg", "a-/1.jpg", "a/b c/1.jpg"],
        ["2.jpg", "10.jpg", "notes.txt", ".git/x.jpg", "%2F.jpg", "ü ☃.jpg"],
        ["cat/1.jpg", "preview.jpg", "cat/.hidden/1.jpg", "__MACOSX/cat/1.jpg", "cat/.1.jpg"],
        ["train/images/1.jpg", "val/1.jpg"],
    ],
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_records_are_those_of_the_same_folder_on_this_machine(
    tmp_path, bucket, names, layout, is_kept
):
    files = {name: name.encode() for name in names}
    touch(tmp_path, files)
    put(bucket, files)
    facts = []
    for address, options in [(f"folder:{tmp_path}", {})] + 2 * [
        (f"folder:{bucket}", {"index": is_kept})
    ]:
        with (
            warnings.catch_warnings(record=True) as warned,
            open_store(address, layout=layout, **options) as store,
        ):
            warnings.simplefilter("always")
            try:
                labels = store.index.to_tree()["labels"]
                facts.append(
                    (
                        list(store.keys),
                        None if labels is None else labels.tolist(),
                        store.class_names,
                        store.index.are_pairs,
                        [record.sample for record in store.scan()],
                        len(warned),  # of a listing, not of one that was kept
                    )
                )
            except StoreError as error:
                facts.append(str(error).replace(bucket, str(tmp_path)))
    assert facts[0] == facts[1]
    assert facts[2][:5] == facts[0][:5]


def test_a_listing_takes_a_request_for_a_page_and_a_kept_one_is_read(bucket, object_server):
    put(bucket, {f"a/{n}.jpg": b"%d" % n for n in range(7)})
    counts = []
    for options in ({}, {"index": True}, {"index": True}):
        object_server.requests.clear()
        with open_store(f"folder:{bucket}", **options) as store:
            assert len(store) == 7
            counts.append(len(object_server.requests))
            object_server.requests.clear()
            assert [r.sample[0].data for r in store.get_many([5, 2])] == [b"5", b"2"]
            assert len(object_server.requests) == 2
    assert counts == [3, 5, 1]  # the server's pages have three objects


def test_a_kept_listing_is_what_counts_until_it_is_deleted(bucket):
    put(bucket, {"a/1.jpg": b"1", "b/1.jpg": b"2"})
    address = f"folder:{bucket}"
    with open_store(address, index=True) as store:
        fingerprint = store.fingerprint
    put(bucket, {"a/0.jpg": b"0", "a/1.jpg": b"3"})
    with open_store(address, index=True) as store:
        assert list(store.keys) == ["a/1.jpg", "b/1.jpg"]
        assert store.fingerprint == fingerprint
        assert store.get_many([1])[0].sample == (EncodedImage(b"2"), 1)
        with pytest.raises(StoreError, match=r"'a/1\.jpg' in s3://.* replaced in the meantime"):
            store.get_many([0])
    with open_blobs(bucket) as blobs:
        blobs.delete(LISTING_NAME)
        blobs.delete("b/1.jpg")
    with open_store(address, index=True) as store:
        assert list(store.keys) == ["a/0.jpg", "a/1.jpg"]
        assert store.fingerprint != fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "flat"}, "no listing for layout='auto', .*: it is one for layout='flat'"),
        ({"sizes": np.zeros(2, np.int64)}, "not of the same records"),
        ({"sizes": np.full(1, -1)}, "not of the same records"),
        ({"sizes": None}, "no array"),
        ({"index": None}, "damaged"),
        (None, "damaged"),
    ],
    ids=str,
)
def test_a_kept_listing_that_is_damaged_is_named(bucket, object_server, change, message):
    put(bucket, {"a/1.jpg": b"1"})
    with open_store(f"folder:{bucket}", index=True) as store:
        assert len(store) == 1
    name = f"{bucket.removeprefix('s3://')}/{LISTING_NAME}"
    tree = decode_record(object_server.contents[name]).sample
    data = b"..." if change is None else encode_record("", tree | change).data
    object_server.contents[name] = data
    refused(open_store(f"folder:{bucket}", index=True), rf"{LISTING_NAME}' in s3://.*{message}")
    assert object_server.contents[name] == data


def test_a_listing_that_cannot_be_kept_is_a_warning(bucket, object_server):
    put(bucket, {"a/1.jpg": b"1"})
    object_server.faults = ["", "", "403"]  # GET of the listing, list, PUT
    with (
        open_store(f"folder:{bucket}", index=True) as store,
        pytest.warns(match=r"listed whenever it is opened: .* \(403"),
    ):
        assert len(store) == 1


def test_an_image_that_was_removed_is_named(bucket):
    put(bucket, {"a/1.jpg": b"1", "a/2.jpg": b"2"})
    with open_store(f"folder:{bucket}") as store:
        assert len(store) == 2
        with open_blobs(bucket) as blobs:
            blobs.delete("a/1.jpg")
        with pytest.raises(StoreError, match=r"not there: 'a/1\.jpg'"):
            store.get_many([1, 0])
        store.max_file_size = 0
        with pytest.raises(StoreError, match=r"of 'a/2\.jpg' in .* raise max_file_size"):
            store.get_many([1])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["Annotations/1.xml", "JPEGImages/1.jpg"], r"Annotations beside JPEGImages"),
        (["train/labels/1.txt", "train/images/1.jpg"], r"train/images beside train/labels"),
        (["notes.txt"], r"no image in s3://"),
    ],
)
def test_what_is_no_folder_of_classes_is_refused(bucket, names, message):
    put(bucket, dict.fromkeys(names, b"..."))
    refused(open_store(f"folder:{bucket}"), message)


def test_what_a_folder_far_away_cannot_be_is_an_error(bucket, website):
    with pytest.raises(ConfigError, match="layout='voc' is read on this machine alone"):
        open_store(f"folder:{bucket}", layout="voc")
    with pytest.raises(ConfigError, match="split"):
        open_store(f"folder:{bucket}", split="train")
    refused(open_store(f"folder:{website}"), "a web server, which lists no objects")


def test_image_folder_reads_photos_where_they_are(bucket, tmp_path):
    files = {}
    for number in range(6):
        pixels = np.full((4, 6, 3), 40 * number, np.uint8)
        files[f"{('cat', 'dog')[number % 2]}/{number}.png"] = cv2.imencode(".png", pixels)[1]
    files = {name: data.tobytes() for name, data in files.items()}
    touch(tmp_path, files)
    put(bucket, files)
    here, there = ImageFolder(tmp_path), ImageFolder(bucket)
    assert (there.root, there.classes) == (bucket, ["cat", "dog"])
    assert there.samples == [
        (f"{bucket}/{Path(p).relative_to(tmp_path)}", c) for p, c in here.samples
    ]
    assert there.describe(0) == f"{bucket}/cat/0.png"
    cached = ImageFolder(bucket, index=True, local_cache=f"{tmp_path}/cache:1GB")
    copy = pickle.loads(pickle.dumps(there))
    for dataset in (there, StoreDataset(f"folder:{bucket}"), copy, cached):
        loader = Loader(dataset, 2, num_workers=1, collate_fn=list, multiprocessing_context="fork")
        found = [sample for batch in loader for sample in batch]
        for (image, label), (expected, expected_label) in zip(found, here, strict=True):
            assert (image == expected).all()
            assert label == expected_label
        with contextlib.closing(dataset.store):
            assert dataset.store.labels.tolist() == here.labels.tolist()
