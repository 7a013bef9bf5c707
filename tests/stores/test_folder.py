# SPDX-License-Identifier: Apache-2.0
"""Folders as stores: class folders, images alone, Pascal VOC, and what release 0.1 packed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from tests.support.stores import refused

from penstock.data import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, StoreDataset, create_store, open_store, pack
from penstock.stores.folder.listing import INDEX_NAME, PAIR, RECORD
from penstock.stores.folder.store import FolderStore
from penstock.stores.index import Index
from penstock.stores.records import decode_record, encode_record
from penstock.testing.stores import _CLASSES, StoreReaderContract, _images
from penstock.vision.datasets.annotated import PackedAnnotations

JPEG = bytes.fromhex("ffd8ffe000104a464946")
XML = "<annotation>{}</annotation>\n"
OBJECT = "<object><name>{}</name></object>"


class TestFolder(StoreReaderContract):
    def place(self, tmp_path):
        return f"folder:{tmp_path}/images"

    def fill(self, address, records, class_names=(), metadata=None):
        for record in records:
            (image, _) = decode_record(record.data).sample
            touch(address.removeprefix("folder:"), record.key, data=image.data)

    def test_a_missing_record_is_named(self, tmp_path):
        """One that is removed after the folder was listed; the path is in the message."""
        address, records = self.place(tmp_path), _images()
        with self.made(address, records, _CLASSES) as store:
            assert len(store) == 30
            (tmp_path / "images" / records[11].key).unlink()
            with pytest.raises(StoreError, match=f"not there: .*/images/{records[11].key}"):
                store.get_many([10, 11, 12])
            assert [r.key for r in store.get_many([12, 10])] == [records[12].key, records[10].key]
        assert len(open_store(address)) == 29


def touch(root, *names, data=b"..."):
    for name in names:
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def facts_of(store):
    labels = [store.index.label_of(position) for position in range(len(store))]
    return list(store.keys), labels, store.class_names, [r.sample for r in store.scan()]


# Reading


def test_class_folders_give_pairs_and_empty_ones_keep_their_number(tmp_path):
    touch(tmp_path, "c/2.JPG", "c/sub/1.png", "a/x.webp", "a/notes.txt", "README.md")
    (tmp_path / "b").mkdir()
    store = open_store(tmp_path)
    assert list(store.keys) == ["a/x.webp", "c/2.JPG", "c/sub/1.png"]
    assert store.class_names == ("a", "b", "c")
    assert store.labels.tolist() == [0, 2, 2]
    assert store.labels.dtype == np.int64
    assert store.index.are_pairs
    assert store.get(["c/sub/1.png"])[0].sample == (EncodedImage(b"..."), 2)


def test_images_without_folders_have_no_labels(tmp_path):
    touch(tmp_path, "2.jpg", "10.jpg", "notes.txt", ".git/x.jpg")
    store = open_store(f"folder:{tmp_path}")
    assert list(store.keys) == ["10.jpg", "2.jpg"]
    assert store.labels is None
    assert store.class_names == ()
    assert store.get_many([1])[0].sample == EncodedImage(b"...")
    with pytest.raises(StoreError, match=r"has 2 image.s. in itself, .* but no class folders"):
        len(FolderStore(tmp_path, layout="classes"))


def test_images_beside_class_folders_are_left_out_with_a_warning(tmp_path):
    touch(tmp_path, "cat/1.jpg", "preview.jpg")
    with pytest.warns(UserWarning, match="1 image.s. lie in .* itself, .* 'preview.jpg' is one"):
        assert list(FolderStore(tmp_path).keys) == ["cat/1.jpg"]
    assert list(FolderStore(tmp_path, layout="flat").keys) == ["preview.jpg"]


def test_files_are_bytes_whatever_is_in_them(tmp_path):
    touch(tmp_path / "a", "empty.jpg", data=b"")
    touch(tmp_path / "a", "pointer.jpg", data=b"version https://git-lfs")
    store = FolderStore(tmp_path)
    assert [r.sample[0].data for r in store.scan()] == [b"", b"version https://git-lfs"]
    with store.borrow_images(np.array([1, 0])) as images:
        assert images == [b"version https://git-lfs", b""]


def test_links_are_followed_once_and_no_class_loses_an_image_to_a_link(tmp_path):
    root = tmp_path / "images"
    touch(root, "b/1.jpg", "c/1.jpg")
    touch(tmp_path, "elsewhere/9.jpg")
    (root / "a").mkdir()
    (root / "a" / "to b").symlink_to(root / "b")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "x").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "y").symlink_to(tmp_path / "elsewhere")
    (root / "d").symlink_to(tmp_path / "nowhere")
    assert list(FolderStore(root).keys) == ["a/x/9.jpg", "b/1.jpg", "c/1.jpg"]
    (root / "e").symlink_to(root / "b")
    refused(FolderStore(root), r"the classes 'b' and 'e' of .* are one folder")


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path):
    # Root may list any folder, but not one whose path is too long.
    touch(tmp_path, "a/1.jpg")
    folders = [os.open(tmp_path / "a", os.O_RDONLY)]
    for _ in range(17):
        os.mkdir("x" * 250, dir_fd=folders[-1])
        folders.append(os.open("x" * 250, os.O_RDONLY, dir_fd=folders[-1]))
    for folder in folders:
        os.close(folder)
    refused(FolderStore(tmp_path), r"cannot list .*/a/x.*: File name too long")


def test_a_folder_that_vanishes_is_an_error(tmp_path):
    from penstock.stores.folder.listing import scan

    with pytest.raises(StoreError, match=r"cannot list .*/gone: No such file"):
        scan(str(tmp_path / "gone"))


def test_a_pipe_is_not_waited_for_and_what_is_missing_is_named(tmp_path):
    touch(tmp_path, "a/1.jpg")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    (tmp_path / "a" / "link.jpg").symlink_to("nowhere")
    (tmp_path / "a" / "ring.jpg").symlink_to("ring.jpg")
    store = FolderStore(tmp_path)
    named = dict(zip(store.keys, range(4), strict=True))
    with pytest.raises(StoreError, match=r"cannot read .*/a/pipe\.jpg: not a regular file"):
        store.get_many([named["a/pipe.jpg"]])
    with pytest.raises(StoreError, match=r"not there: .*/a/link\.jpg"):
        store.get_many([named["a/link.jpg"]])
    with pytest.raises(StoreError, match=r"cannot read .*/a/ring\.jpg: Too many levels"):
        store.get_many([named["a/ring.jpg"]])


def test_options_that_do_not_fit_are_config_errors(tmp_path):
    touch(tmp_path, "a/1.jpg")
    with pytest.raises(ConfigError, match=r"layout is 'auto', .*, not 'b'"):
        open_store(tmp_path, layout="b")
    for layout in ("flat", "auto"):
        with pytest.raises(ConfigError, match=r"split='train' is for Pascal VOC.* Annotations"):
            open_store(tmp_path, layout=layout, split="train")
    touch(tmp_path, "a.tar.gz")
    refused(open_store(tmp_path / "a.tar.gz"), "unpack a compressed tar file")


def test_the_fingerprint_changes_with_name_size_and_time(tmp_path):
    touch(tmp_path, "a/1.jpg", "b/1.jpg")
    prints = [FolderStore(tmp_path).fingerprint]
    assert FolderStore(tmp_path).fingerprint == prints[0]
    os.utime(tmp_path / "a/1.jpg", ns=(1, 1))
    prints.append(FolderStore(tmp_path).fingerprint)
    touch(tmp_path, "a/1.jpg", data=b"....")
    os.utime(tmp_path / "a/1.jpg", ns=(1, 1))
    prints.append(FolderStore(tmp_path).fingerprint)
    os.rename(tmp_path / "a/1.jpg", tmp_path / "b/2.jpg")
    prints.append(FolderStore(tmp_path).fingerprint)
    os.rename(tmp_path / "a", tmp_path / "c")
    prints.append(FolderStore(tmp_path).fingerprint)
    assert len(set(prints)) == 5


# Pascal VOC


def voc(root, images, **splits):
    for stem, names in images.items():
        touch(root, f"JPEGImages/{stem}.jpg", data=stem.encode())
        xml = XML.format("".join(map(OBJECT.format, names)))
        touch(root, f"Annotations/{stem}.xml", data=xml.encode())
    for split, text in splits.items():
        touch(root, f"ImageSets/Main/{split}.txt", data=text.encode())


def test_voc_gives_image_and_xml_with_the_classes_of_its_objects(tmp_path):
    voc(tmp_path, {"2": ["dog", "cat", "dog"], "10": []}, train="2\n\n10 -1\n", val="10")
    store = open_store(tmp_path)
    assert facts_of(store) == (
        ["10", "2"],
        [(), (1, 0, 1)],
        ("cat", "dog"),
        [
            (EncodedImage(b"10"), XML.format("")),
            (EncodedImage(b"2"), XML.format("".join(map(OBJECT.format, ("dog", "cat", "dog"))))),
        ],
    )
    assert list(open_store(tmp_path, split="train").keys) == ["2", "10"]
    val = open_store(tmp_path, split="val")
    assert (list(val.keys), val.class_names) == (["10"], ("cat", "dog"))
    assert val.fingerprint != store.fingerprint
    with pytest.raises(StoreError, match="no split 'test' in ImageSets/Main; it has 'train', 'val"):
        len(open_store(tmp_path, split="test"))


def test_voc_with_parts_missing_or_damaged_says_which(tmp_path):
    voc(tmp_path, {"1": ["cat"], "2": ["dog"]}, train="1\n3")
    refused(open_store(tmp_path, split="train"), r"names 1 image.s. without annotations: 3\.xml")
    (tmp_path / "JPEGImages/1.jpg").unlink()
    with pytest.raises(StoreError, match=r"not there: .*/JPEGImages/1\.jpg"):
        open_store(tmp_path).get_many([0])
    store = open_store(tmp_path)
    assert len(store) == 2
    (tmp_path / "Annotations/2.xml").unlink()
    with pytest.raises(StoreError, match=r"not there: .*/Annotations/2\.xml"):
        store.get_many([1])
    with pytest.warns(UserWarning, match="1 image.s. in .* have no file in Annotations .* '2' is"):
        assert list(open_store(tmp_path).keys) == ["1"]
    touch(tmp_path, "JPEGImages/2.PNG")
    refused(open_store(tmp_path), r"has '2.PNG' and '2.jpg': which of them")


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        ("<annotation>", "not well-formed XML"),
        ("<!DOCTYPE a><annotation/>", "it has a DOCTYPE"),
        ("<html/>", "the root element is <html>"),
        (XML.format("<object/>"), "object 0 has no name"),
    ],
)
def test_a_damaged_annotation_is_named(tmp_path, xml, message):
    voc(tmp_path, {"1": ["cat"]})
    touch(tmp_path, "Annotations/1.xml", data=xml.encode())
    refused(open_store(tmp_path), rf"cannot read .*/Annotations/1\.xml: {message}")


def test_an_image_that_a_voc_folder_lacks_is_named_with_its_annotation(tmp_path):
    voc(tmp_path, {"1": ["cat"], "2": ["dog"]})
    (tmp_path / "JPEGImages/1.jpg").unlink()
    with pytest.raises(StoreError) as caught:
        pack(str(tmp_path), f"lmdb:{tmp_path}/a.lmdb")
    assert str(caught.value) == (
        f"a file of folder:{tmp_path} is not there: {tmp_path}/JPEGImages/1.jpg. Its annotation is "
        f"{tmp_path}/Annotations/1.xml. It was removed, renamed, or never there. Restore it, or "
        "leave out what lacks one with on_error='skip'."
    )


def test_a_pipe_or_a_huge_file_among_annotations_is_not_read(tmp_path):
    voc(tmp_path, {"1": ["cat"]}, train="1")
    pipe = tmp_path / "Annotations/2.xml"
    os.mkfifo(pipe)
    refused(open_store(tmp_path), r"cannot read .*/2\.xml: .*not a regular file")
    pipe.unlink()
    with pipe.open("wb") as file:
        file.truncate(300 << 20)  # takes no room on the disk
    refused(open_store(tmp_path), r"2\.xml: it has 314,572,800 bytes, and 268,435,456 is")
    pipe.unlink()
    (tmp_path / "ImageSets/Main/train.txt").unlink()
    os.mkfifo(tmp_path / "ImageSets/Main/train.txt")
    refused(open_store(tmp_path, split="train"), r"train\.txt: .*not a regular file")


# Packed by release 0.1


def utf8(texts):
    text, offsets = PackedList(texts).to_utf8()
    return {"text": text, "offsets": offsets}


def packed(root, **parts):
    """Leave the index of a folder with an image and a record, as release 0.1 wrote it."""
    index = Index(PackedList(["1.jpg", "b"]), np.array([1, 0]), ("a", "b"))
    kinds = np.array([PAIR, RECORD], np.uint8)
    touch(root, "b/1.jpg", data=JPEG)
    touch(root, "b.record", data=encode_record("b", {"x": 5}, 0).data)
    index_parts = {name: parts.pop(name) for name in ("labels", "keys") if name in parts}
    tree = {
        "index": {**index.to_tree(), **index_parts},
        "paths": utf8(["b/1.jpg", "b.record"]),
        "kinds": kinds,
        "checksums": np.zeros(2, np.uint64),
        **parts,
    }
    touch(root, INDEX_NAME, data=encode_record("folder", tree).data)


def test_a_folder_with_an_index_is_read_by_it(tmp_path):
    packed(tmp_path)
    assert facts_of(open_store(tmp_path)) == (
        ["1.jpg", "b"],
        [1, 0],
        ("a", "b"),
        [(EncodedImage(JPEG), 1), {"x": 5}],
    )
    (tmp_path / "b.record").write_bytes(encode_record("another", 5).data)
    with pytest.raises(StoreError, match="is another record, called 'another'"):
        open_store(tmp_path).get_many([1])


@pytest.mark.parametrize("path", ["../1.jpg", "/1.jpg", "a/../../1.jpg", "a\\b.jpg"])
def test_an_index_that_names_files_elsewhere_is_not_followed(tmp_path, path):
    packed(tmp_path, paths=utf8(["b/1.jpg", path]))
    refused(FolderStore(tmp_path), "names a file outside of the folder")


NONSENSE = {
    "an unknown kind": {"kinds": np.full(2, 9, np.uint8)},
    "kinds of too few": {"kinds": np.zeros(1, np.uint8)},
    "paths that are no text": {"paths": {"text": np.full(2, 255, "u1"), "offsets": [0, 1, 2]}},
    "paths that are none": {"paths": [1]},
    "a pair without a label": {"labels": None},
    "labels of too many": {"labels": np.zeros(3, np.int64)},
    "labels in rows for too many": {
        "labels": {"values": np.zeros(2, np.int64), "offsets": np.array([0, 2, 2])}
    },
    "keys that are no text": {"keys": {"text": np.full(2, 255, "u1"), "offsets": np.arange(3)}},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_an_index_that_says_nonsense_is_named(tmp_path, name):
    packed(tmp_path, **NONSENSE[name])
    refused(FolderStore(tmp_path), rf"the index {tmp_path}/{INDEX_NAME} is damaged: ")


@pytest.mark.parametrize("damage", ["cut", "flip", "pickle"])
def test_a_damaged_index_is_named(tmp_path, damage):
    packed(tmp_path)
    path = tmp_path / INDEX_NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    changed = {"cut": bytes(data[:-1]), "flip": bytes(data), "pickle": pickle.dumps([1])}
    path.write_bytes(changed[damage])
    with pytest.raises(StoreError, match=str(path)):
        FolderStore(tmp_path).index  # noqa: B018


# Packing


@pytest.mark.parametrize("place", ["folder:made", "made", "made.lmbd", "v1.2", "tar:a.tar"])
def test_nothing_is_packed_into_what_is_only_read(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    for make in (lambda: pack([1], place), lambda: create_store(place)):
        with pytest.raises(ConfigError, match=r"can be read, not written, .* Pack into .*lmdb:"):
            make()
    assert os.listdir(tmp_path) == []


def test_a_folder_of_classes_is_packed_byte_for_byte(tmp_path, data_dir):
    source = data_dir / "clothing" / "validation"
    pack(source, f"lmdb:{tmp_path}/a.lmdb", num_workers=0)
    with open_store(f"lmdb:{tmp_path}/a.lmdb") as packed_store:
        assert facts_of(packed_store) == facts_of(open_store(source))


def test_bccd_is_packed_with_its_images_and_xml(tmp_path, data_dir):
    pack(data_dir / "bccd", f"lmdb:{tmp_path}/a.lmdb", num_workers=0)
    with open_store(f"lmdb:{tmp_path}/a.lmdb") as packed_store:
        assert facts_of(packed_store) == facts_of(open_store(data_dir / "bccd"))
        assert packed_store.class_names == ("Platelets", "RBC", "WBC")
        assert sum(map(len, packed_store.labels)) == 4888


@pytest.mark.parametrize("value", [None, 1.5, True, "x", ["a"], {"a": 1}, {"num_objects": "x"}])
def test_metadata_of_ours_that_say_what_cannot_be_are_an_error_with_their_name(tmp_path, value):
    names = ("object_columns", "attribute_names", "landmark_names", "num_landmarks", "sizes_px")
    record = encode_record("1", {"image": EncodedImage(JPEG)}, (0,))
    writer = create_store(tmp_path / "a.lmdb", metadata=dict.fromkeys(names, value))
    writer.put_many([record])
    writer.finish()
    dataset = PackedAnnotations(tmp_path / "a.lmdb")
    for name, use in {
        "object_columns": lambda: dataset.column("pose"),
        "attribute_names": lambda: dataset.attribute_names,
        "landmark_names": lambda: dataset.landmark_names,
        "(num_landmarks|landmark_names)": lambda: dataset.num_landmarks,
    }.items():
        if (name, value) == ("landmark_names", ["a"]):
            continue
        with pytest.raises(StoreError, match=f"the metadata '{name}' of the store are damaged"):
            use()
    assert dataset.sizes_px.tolist() == [[0, 0]]  # nothing is said; and it has no header


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_class_folder_that_is_no_utf8_is_named_at_once(tmp_path, num_shards):
    touch(tmp_path, "photos/a/1.jpg", data=JPEG)
    os.mkdir(os.fsencode(tmp_path) + b"/photos/caf\xe9")
    with pytest.raises(StoreError, match=r"the class 'caf\\udce9' cannot be stored: .* not UTF-8"):
        pack(tmp_path / "photos", f"lmdb:{tmp_path}/made", num_shards=num_shards)
    assert os.listdir(tmp_path) == ["photos"]


def test_a_dataset_over_a_folder_gives_batches_of_files(tmp_path):
    from penstock import Loader

    touch(tmp_path, "a/1.jpg", "b/2.jpg", data=b"....")
    dataset = StoreDataset(tmp_path, decode=None)
    assert dataset.can_get_batch
    ((files, labels),) = list(Loader(dataset, batch_size=2))
    assert (files, labels.tolist()) == ((b"....", b"...."), [0, 1])
