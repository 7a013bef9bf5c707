# SPDX-License-Identifier: Apache-2.0
"""Folders as stores: the contract, layouts, and what keeps a writer from harm."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, StoreDataset, create_store, open_store, pack
from penstock.stores.folder.listing import list_classes
from penstock.stores.folder.marks import INDEX_NAME
from penstock.stores.folder.store import FolderStore
from penstock.stores.folder.writer import FolderWriter
from penstock.stores.records import decode_record, encode_record, header_of
from penstock.testing.stores import _CLASSES, StoreContract, _images
from penstock.vision.datasets.annotated import PackedAnnotations

JPEG = bytes.fromhex("ffd8ffe000104a464946")
PNG = bytes.fromhex("89504e470d0a1a0a")
XML = "<annotation>{}</annotation>\n"
OBJECT = "<object><name>{}</name></object>"


class FolderContract(StoreContract):
    def raw(self, address):
        root = Path(address.removeprefix("folder:"))
        files = (path for path in root.rglob("*") if path.is_file())
        named = {str(path.relative_to(root)): path.read_bytes() for path in files}
        return {name: data for name, data in named.items() if not name.startswith(".penstock")}

    def damage(self, address, key, data):
        Path(address.removeprefix("folder:"), key).write_bytes(data)

    def remove(self, address, key):
        Path(address.removeprefix("folder:"), key).unlink()

    def place(self, tmp_path):
        return f"folder:{tmp_path}/images"


class TestFolderWithAnIndex(FolderContract):
    def create(self, address, **facts):
        return create_store(address, index="always", **facts)


class TestPlainFolder(FolderContract):
    has_checksums = False

    def test_the_index_is_known_without_reading_a_record(self, tmp_path):
        """It is the listing: what is removed is not in it, and classes stay."""
        address, records = self.place(tmp_path), _images()
        self.made(address, records, _CLASSES, {"made by": "a test"}).close()
        for record in records[10:]:
            self.remove(address, record.key)
        with self.open(address) as store:
            assert list(store.keys) == [record.key for record in records[:10]]
            assert store.labels.tolist() == [record.label for record in records[:10]]
            assert store.class_names == _CLASSES
            assert dict(store.metadata) == {"made by": "a test"}

    def test_a_missing_record_is_named(self, tmp_path):
        """One that is removed after the folder was listed; the path is in the message."""
        address, records = self.place(tmp_path), _images()
        with self.made(address, records, _CLASSES) as store:
            assert len(store) == 30
            self.remove(address, records[11].key)
            with pytest.raises(StoreError, match=f"not there: .*/images/{records[11].key}"):
                store.get_many([10, 11, 12])
            assert [r.key for r in store.get_many([12, 10])] == [records[12].key, records[10].key]
        assert len(open_store(address)) == 29


def touch(root, *names, data=b"..."):
    for name in names:
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def image(key, label=None, data=JPEG):
    sample = EncodedImage(data) if label is None else (EncodedImage(data), label)
    return encode_record(key, sample, label)


def write(path, records, **facts):
    writer = FolderWriter(path, **facts)
    try:
        writer.put_many(records)
        writer.finish()
    finally:
        writer.close()
    return FolderStore(path)


def files_of(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and not path.name.startswith(".penstock")
    }


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
    with pytest.raises(StoreError, match=r"the classes 'b' and 'e' of .* are one folder"):
        len(FolderStore(root))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path):
    # Root may list any folder, but not one whose path is too long.
    touch(tmp_path, "a/1.jpg")
    folders = [os.open(tmp_path / "a", os.O_RDONLY)]
    for _ in range(17):
        os.mkdir("x" * 250, dir_fd=folders[-1])
        folders.append(os.open("x" * 250, os.O_RDONLY, dir_fd=folders[-1]))
    for folder in folders:
        os.close(folder)
    with pytest.raises(StoreError, match=r"cannot list .*/a/x.*: File name too long"):
        len(FolderStore(tmp_path))


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
    with pytest.raises(ConfigError, match="layout is one of auto, classes, flat, voc, not 'b'"):
        FolderStore(tmp_path, layout="b")
    with pytest.raises(ConfigError, match="split='train' is for Pascal VOC, and layout is 'flat'"):
        FolderStore(tmp_path, layout="flat", split="train")
    with pytest.raises(ConfigError, match=r"split='train' is for Pascal VOC, and .* lacks"):
        len(FolderStore(tmp_path, split="train"))
    touch(tmp_path, "a.tar.gz")
    with pytest.raises(StoreError, match="compressed tar file: unpack it"):
        len(open_store(tmp_path / "a.tar.gz"))


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
    assert list(FolderStore(tmp_path, split="train").keys) == ["2", "10"]
    val = FolderStore(tmp_path, split="val")
    assert (list(val.keys), val.class_names) == (["10"], ("cat", "dog"))
    assert val.fingerprint != store.fingerprint
    with pytest.raises(StoreError, match="no split 'test' in ImageSets/Main; it has 'train', 'val"):
        len(FolderStore(tmp_path, split="test"))


def test_voc_with_parts_missing_or_damaged_says_which(tmp_path):
    voc(tmp_path, {"1": ["cat"], "2": ["dog"]}, train="1\n3")
    with pytest.raises(StoreError, match=r"names 1 image.s. without .* Annotations/3\.xml"):
        len(FolderStore(tmp_path, split="train"))
    (tmp_path / "JPEGImages/1.jpg").unlink()
    with pytest.raises(StoreError, match=r"not there: .*/JPEGImages/1\.jpg"):
        FolderStore(tmp_path).get_many([0])
    store = FolderStore(tmp_path)
    assert len(store) == 2
    (tmp_path / "Annotations/2.xml").unlink()
    with pytest.raises(StoreError, match=r"not there: .*/Annotations/2\.xml"):
        store.get_many([1])
    with pytest.warns(UserWarning, match="1 image.s. in .* have no file in Annotations .* '2' is"):
        assert list(FolderStore(tmp_path).keys) == ["1"]
    touch(tmp_path, "JPEGImages/2.PNG")
    with pytest.raises(StoreError, match=r"has '2.PNG' and '2.jpg': which of them"):
        len(FolderStore(tmp_path))


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        ("<annotation>", "not well-formed XML"),
        ("<!DOCTYPE a><annotation/>", "it has a DOCTYPE"),
        ("<html/>", "its root element is <html>"),
        (XML.format("<object/>"), "object 0 has no name"),
    ],
)
def test_a_damaged_annotation_is_named(tmp_path, xml, message):
    voc(tmp_path, {"1": ["cat"]})
    touch(tmp_path, "Annotations/1.xml", data=xml.encode())
    with pytest.raises(StoreError, match=rf"cannot read .*/Annotations/1\.xml: {message}"):
        len(FolderStore(tmp_path))


# There and back


def test_a_folder_of_classes_comes_back_from_lmdb_byte_for_byte(tmp_path, data_dir):
    source = data_dir / "clothing" / "validation"
    pack(source, f"lmdb:{tmp_path}/a.lmdb", num_workers=0)
    pack(f"lmdb:{tmp_path}/a.lmdb", tmp_path / "back", num_workers=0)
    assert files_of(tmp_path / "back") == files_of(source)
    assert not (tmp_path / "back" / ".penstock-index").exists()
    with open_store(f"lmdb:{tmp_path}/a.lmdb") as packed, open_store(tmp_path / "back") as back:
        assert facts_of(back) == facts_of(packed) == facts_of(open_store(source))
        assert back.fingerprint == packed.fingerprint


def test_bccd_comes_back_from_lmdb_with_its_images_and_xml(tmp_path, data_dir):
    pack(data_dir / "bccd", f"lmdb:{tmp_path}/a.lmdb", num_workers=0)
    pack(f"lmdb:{tmp_path}/a.lmdb", tmp_path / "back", num_workers=0)
    files = files_of(data_dir / "bccd")
    kept = {name: data for name, data in files.items() if name.startswith(("JPEG", "Annot"))}
    assert files_of(tmp_path / "back") == kept
    assert len(kept) == 728
    source, back = open_store(data_dir / "bccd"), open_store(tmp_path / "back")
    assert facts_of(back) == facts_of(source)
    assert back.class_names == ("Platelets", "RBC", "WBC")
    assert sum(map(len, back.labels)) == 4888
    assert not (tmp_path / "back" / ".penstock-index").exists()


def test_a_part_of_bccd_keeps_the_order_of_its_split_and_its_classes(tmp_path, data_dir):
    split = FolderStore(data_dir / "bccd", split="val")
    pack(split, tmp_path / "val", limit=2, num_workers=0)
    back = open_store(tmp_path / "val")
    assert back.class_names == split.class_names
    assert list(back.scan()) == list(split.scan(0, 2))


ANY = [
    ("images of one class", [image("a/1.jpg", 1), image("a/2.png", 1)], ("b", "a")),
    ("keys without a folder", [image("1", 0), image("2.jpg", 1), image("3", 2, PNG)], ("a", "b")),
    ("keys not in order", [image("b/1.jpg", 1), image("a/1.jpg", 0)], ("a", "b")),
    ("a class of another name", [image("x/1.jpg", 0)], ("a",)),
    ("names that are none for folders", [image("1.jpg", 1), image("2.jpg", 0)], ("a/b", "..")),
    ("images alone", [image("1.jpg"), image("2.png")], ()),
    ("images alone, in folders", [image("a/1.jpg"), image("2")], ()),
    ("an image that is none", [image("1", data=b"text"), image("2", 0, b"")], ("a",)),
    ("a gif", [image("a/1.gif", 0)], ("a",)),
    ("an image with a caption", [encode_record("1", (EncodedImage(JPEG), "a cat"), None)], ()),
    ("an image with a number", [encode_record("1", (EncodedImage(JPEG), 5), None)], ()),
    ("annotations without labels", [encode_record("1", (EncodedImage(JPEG), XML))], ()),
    ("images and others", [image("a/1.jpg", 0), encode_record("x", {"a": [1]}, 0)], ("a",)),
    ("no record", [], ("a", "b")),
]


@pytest.mark.parametrize(("records", "names"), [c[1:] for c in ANY], ids=[c[0] for c in ANY])
def test_any_records_come_back_with_keys_labels_and_classes(tmp_path, records, names):
    expected = [decode_record(record.data) for record in records]
    store = write(tmp_path / "made", records, class_names=names, metadata={"by": "me"})
    assert list(store.scan()) == expected
    assert list(store.keys) == [record.key for record in expected]
    assert store.class_names == names
    assert store.metadata == {"by": "me"}
    if not records:  # which `pack` refuses
        return
    with_lmdb = tmp_path / "a.lmdb"
    pack(store, with_lmdb, num_workers=0)
    with open_store(with_lmdb) as packed:
        assert packed.fingerprint == store.fingerprint
        assert type(packed.labels) is type(store.labels)
        assert np.all(
            [packed.index.label_of(i) == store.index.label_of(i) for i in range(len(store))]
        )


def test_images_get_the_folder_of_their_class_and_the_extension_of_their_content(tmp_path):
    riff = b"RIFF....WEBPVP8 "
    contents = [JPEG, PNG, riff, b"GIF89a", b"BM", b"II*\0", b"?"]
    records = [image(f"{i}", i % 2, data) for i, data in enumerate(contents)]
    write(tmp_path / "made", records, class_names=("cat", "dog"))
    assert sorted(files_of(tmp_path / "made")) == [
        "cat/0.jpg", "cat/2.webp", "cat/4.bmp", "cat/6.bin", "dog/1.png", "dog/3.gif", "dog/5.tiff",
    ]  # fmt: skip


def test_xml_in_an_old_encoding_is_written_in_it_again(tmp_path):
    head = '<?xml version="1.0" encoding="ISO-8859-1"?>\r\n'
    data = (head + XML.format(OBJECT.format("räuber"))).encode("latin-1")
    touch(tmp_path, "voc/Annotations/1.xml", data=data)
    touch(tmp_path, "voc/JPEGImages/1.jpg", data=JPEG)
    pack(tmp_path / "voc", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "voc")


# Writing safely


HOSTILE = [
    "../out.jpg", "a/../../out.jpg", "/out.jpg", "a//b.jpg", "a/./b.jpg", "./a.jpg", "a\0b.jpg",
    "..\\out.jpg", "C:\\out.jpg", ".penstock/x.jpg", "x" * 300 + ".jpg", "é" * 130 + ".jpg",
    "a/" * 100 + "x.jpg", "a/" * 2500 + "x.jpg",
]  # fmt: skip


@pytest.mark.parametrize("key", HOSTILE)
@pytest.mark.parametrize("sample", ["image", "record"])
def test_a_key_that_would_leave_the_folder_is_refused_and_named(tmp_path, key, sample):
    record = image(key, 0) if sample == "image" else encode_record(key, {"a": 1})
    writer = FolderWriter(tmp_path / "in" / "made", class_names=("a",))
    try:
        with pytest.raises(StoreError, match="cannot be a file") as caught:
            writer.put_many([record])
        assert repr(key)[:200].rstrip("'") in str(caught.value)
    finally:
        writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["made.partial"]


@pytest.mark.parametrize("key", [".penstock", ".penstock-index", ".penstock-journal"])
def test_a_key_with_the_name_of_a_file_of_ours_is_refused(tmp_path, key):
    for record in (image(key), encode_record(key, 1)):
        writer = FolderWriter(tmp_path / "made")
        with pytest.raises(StoreError, match=r"begins with '.penstock'"):
            writer.put_many([record])
        writer.close()


PARTS = st.sampled_from(["..", ".", "", "a", "b", "\\", "\0", "/", "~", "C:", "x" * 256, "\n"])
KEYS = st.one_of(st.text(), st.lists(PARTS, min_size=1).map("/".join))


@settings(max_examples=150, deadline=None)
@given(st.lists(KEYS, max_size=4), st.booleans())
@example(["a", "a/b"], True)
@example(["", ".", "..", "a/"], False)
@example(["", ".", "a/"], True)
@example(["a.jpg", "a.jpg/b.jpg"], True)
def test_whatever_keys_are_nothing_is_written_outside_and_what_is_written_comes_back(keys, images):
    def record(key):
        return image(key, 0) if images else encode_record(key, {"a": 1}, 0)

    with tempfile.TemporaryDirectory() as folder:
        writer = FolderWriter(f"{folder}/in/made", class_names=("a",))
        num_kept, messages = 0, []
        try:
            for key in keys:
                try:
                    writer.put_many([record(key)])
                    num_kept += 1
                except StoreError as error:
                    messages.append((repr(key)[:100], str(error)))
            if num_kept == len(keys):  # a writer that has failed is not gone on with
                writer.finish()
                found = list(FolderStore(f"{folder}/in/made").scan())
                assert found == [decode_record(record(key).data) for key in keys]
        finally:
            writer.close()
        assert all(key in message for key, message in messages)
        assert os.listdir(folder) == ["in"]
        assert set(os.listdir(f"{folder}/in")) <= {"made", "made.partial"}


def test_a_store_that_collides_with_itself_is_refused(tmp_path):
    for other in ("a", "a.jpg/b.jpg"):
        writer = FolderWriter(tmp_path / "made")
        with pytest.raises(StoreError, match=f"record '{other}' cannot be a file: .* record's"):
            writer.put_many([image("a.jpg"), image(other)])
        writer.close()
    assert not (tmp_path / "made").exists()


def test_a_folder_of_somebodys_own_files_is_never_replaced(tmp_path):
    touch(tmp_path / "home", "letters.txt", "photos/1.jpg")
    before = files_of(tmp_path)
    for place in ("home", "home/letters.txt", "home/photos"):
        with pytest.raises(StoreError, match="would be replaced as a whole"):
            pack([1, 2], f"folder:{tmp_path / place}")
    touch(tmp_path, "made.partial/letters.txt")
    with pytest.raises(StoreError, match=r"made\.partial is in the way"):
        pack([1, 2], tmp_path / "made")
    with pytest.raises(StoreError, match="would be replaced as a whole"):
        FolderWriter("/")
    assert files_of(tmp_path) == {**before, "made.partial/letters.txt": b"..."}


VOC_XML = XML.format(OBJECT.format("cat"))
PACKED = {
    "classes": [image("a/1.jpg", 0)],
    "flat": [image("1.jpg")],
    "voc": [encode_record("1", (EncodedImage(JPEG), VOC_XML), (0,))],
    "index": [encode_record("1", {"a": 1})],
}


@pytest.mark.parametrize("added", ["a/mine.jpg", "annotations/work.csv", "mine.jpg", "notes.txt"])
@pytest.mark.parametrize("layout", PACKED)
def test_files_added_to_a_packed_folder_are_never_removed(tmp_path, layout, added):
    place = tmp_path / "made"
    write(place, PACKED[layout], class_names=("a",) if layout == "classes" else ())
    touch(place, added, data=b"my work")
    before = files_of(place)
    message = f"files that Penstock did not write, '{added}' for one, and would be replaced"
    with pytest.raises(StoreError, match=message):
        pack([(1.5, 0)], f"folder:{place}")
    assert files_of(place) == before
    assert os.listdir(tmp_path) == ["made"]
    (place / added).unlink()
    pack([(1.5, 0)], f"folder:{place}", overwrite=True)
    assert len(open_store(place)) == 1


@pytest.mark.parametrize("how", ["another size", "the same size", "a link"])
def test_files_that_were_edited_after_packing_are_never_removed(tmp_path, how):
    place = tmp_path / "made"
    write(place, PACKED["voc"])
    xml = place / "Annotations" / "1.xml"
    if how == "a link":
        xml.rename(tmp_path / "1.xml")
        xml.symlink_to(tmp_path / "1.xml")
    else:
        xml.write_text(VOC_XML if how == "the same size" else "<annotation/>")
        os.utime(xml, ns=(10**18, 10**18))
    with pytest.raises(StoreError, match=r"changed since .* 'Annotations/1\.xml' for one"):
        FolderWriter(place)
    assert xml.exists()


def test_a_packed_folder_that_lost_its_list_or_some_files_is_handled_with_care(tmp_path):
    records = [image("a/1.jpg", 0), image("a/2.jpg", 0)]
    write(tmp_path / "made", records, class_names=("a",))
    (tmp_path / "made" / "a" / "1.jpg").unlink()
    write(tmp_path / "made", records, class_names=("a",))  # nothing is lost by that
    path = tmp_path / "made" / ".penstock-files"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"\.penstock-files is truncated"):
        FolderWriter(tmp_path / "made")
    path.write_bytes(encode_record("files", {"paths": 1}).data)
    with pytest.raises(StoreError, match=r"\.penstock-files is damaged: .* move the folder away"):
        FolderWriter(tmp_path / "made")
    path.unlink()
    with pytest.raises(StoreError, match=r"'a/1\.jpg' for one"):
        FolderWriter(tmp_path / "made")
    assert (tmp_path / "made" / "a" / "1.jpg").exists()


def test_a_file_added_to_a_packed_folder_while_it_is_packed_anew_is_kept(tmp_path):
    write(tmp_path / "made", [image("1.jpg")])
    writer = FolderWriter(tmp_path / "made")
    writer.put_many([image("2.jpg")])
    touch(tmp_path, "made/mine.jpg")
    with pytest.raises(StoreError, match=r"'mine\.jpg' for one"):
        writer.finish()
    writer.close()
    assert sorted(files_of(tmp_path / "made")) == ["1.jpg", "mine.jpg"]


def test_files_that_somebody_puts_there_meanwhile_are_not_replaced_either(tmp_path):
    writer = FolderWriter(tmp_path / "made")
    writer.put_many([image("1.jpg")])
    touch(tmp_path, "made/letters.txt")
    with pytest.raises(StoreError, match="would be replaced as a whole"):
        writer.finish()
    writer.close()
    assert os.listdir(tmp_path / "made") == ["letters.txt"]


def test_an_empty_folder_one_of_ours_and_the_target_of_a_link_are_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for records in ([image("1.jpg")], [image("2.jpg"), image("3.jpg")]):
        store = write(tmp_path / "link", records)
        assert list(store.keys) == [record.key for record in records]
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
    assert sorted(os.listdir(tmp_path / "real")) == [
        ".penstock", ".penstock-files", "2.jpg", "3.jpg",
    ]  # fmt: skip


def test_an_index_that_names_files_elsewhere_is_not_followed(tmp_path):
    from penstock.data import PackedList
    from penstock.stores.folder.marks import Listing, write_index

    touch(tmp_path, "secret.jpg", "folder/1.jpg")
    for path in ("../secret.jpg", f"{tmp_path}/secret.jpg", "a/../../secret.jpg"):
        kinds, labels = np.zeros(1, np.uint8), np.zeros(1, np.int64)
        listing = Listing(PackedList(["a"]), PackedList([path]), kinds, labels)
        write_index(tmp_path / "folder", listing)
        with pytest.raises(StoreError, match="names a file outside of the folder"):
            len(FolderStore(tmp_path / "folder"))


NONSENSE = {
    "an unknown kind": {"kinds": np.full(1, 9, np.uint8)},
    "kinds in rows and columns": {"kinds": np.zeros((1, 2), np.uint8)},
    "kinds that are fractions": {"kinds": np.zeros(1)},
    "checksums that are fractions": {"checksums": np.zeros(1)},
    "checksums of too many": {"checksums": np.zeros(2, np.uint64)},
    "paths that are no text": {"paths": {"text": np.full(1, 255, "u1"), "offsets": [0, 1]}},
    "paths that are none": {"paths": [1]},
    "no index": {"index": None},
    "a pair without a label": {"labels": None},
    "labels of too many": {"labels": np.zeros(2, np.int64)},
    "labels in rows and columns": {"labels": np.zeros((1, 2), np.int64)},
    "labels that are fractions": {"labels": np.zeros(1)},
    "labels in rows for too many": {
        "labels": {"values": np.zeros(2, np.int64), "offsets": np.arange(3)}
    },
    "keys that are no text": {"keys": {"text": np.full(1, 255, "u1"), "offsets": np.arange(2)}},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_an_index_that_says_nonsense_is_named(tmp_path, name):
    write(tmp_path / "made", [image("1.jpg", 0)], class_names=("a",), index="always")
    path = tmp_path / "made" / ".penstock-index"
    tree = decode_record(path.read_bytes()).sample
    parts = {**NONSENSE[name]}
    if "labels" in parts or "keys" in parts:
        parts = {"index": {**tree["index"], "are_pairs": False, **parts}}
    path.write_bytes(encode_record("folder", {**tree, **parts}).data)
    with pytest.raises(StoreError, match=rf"the index {path} is damaged: "):
        len(FolderStore(tmp_path / "made"))


@pytest.mark.parametrize("damage", ["cut", "flip", "pickle", "lengths", "version"])
def test_an_index_or_a_marker_that_is_damaged_is_named(tmp_path, damage):
    import pickle

    write(tmp_path / "made", [image("1.jpg", 0)], class_names=("a",), index="always")
    path = tmp_path / "made" / ".penstock-index"
    data = bytearray(path.read_bytes())
    if damage == "version":
        path = tmp_path / "made" / ".penstock"
        data = json.dumps({**json.loads(path.read_text()), "version": 2}).encode()
    elif damage == "flip":
        data[-1] ^= 1
    elif damage == "lengths":
        tree = decode_record(data).sample
        data = encode_record("folder", {**tree, "kinds": np.zeros(2, np.uint8)}).data
    else:
        data = data[:-1] if damage == "cut" else pickle.dumps([1])
    path.write_bytes(data)
    with pytest.raises(StoreError, match=str(path)):
        FolderStore(tmp_path / "made").index  # noqa: B018


def test_a_folder_that_lost_its_index_is_not_read_without_its_labels_unasked(tmp_path):
    pack([(EncodedImage(JPEG), 0), (EncodedImage(JPEG), 2)], f"folder:{tmp_path}/a")
    (tmp_path / "a" / INDEX_NAME).unlink()
    with pytest.raises(StoreError, match=r"\.penstock-index is missing: .* packed with an index"):
        len(FolderStore(tmp_path / "a"))
    assert len(FolderStore(tmp_path / "a", layout="flat")) == 2


def test_somebody_elses_file_called_as_our_marker_is_passed_over(tmp_path):
    touch(tmp_path, "a/1.jpg", ".penstock", data=b'{"format": "a plan of the pipes"}')
    assert list(FolderStore(tmp_path).keys) == ["a/1.jpg"]


@pytest.mark.parametrize("field", ["layout", "num_records", "fingerprint", "files", "what"])
@pytest.mark.parametrize("value", [None, 1.5, True, ["a"], {}, "absent"], ids=str)
def test_a_marker_that_says_what_cannot_be_is_an_error_with_its_name(tmp_path, field, value):
    write(tmp_path / "made", [image("a/1.jpg", 0)], class_names=("a",), what="x")
    path = tmp_path / "made" / ".penstock"
    marker = json.loads(path.read_text())
    marker.pop(field)
    if value != "absent":
        marker[field] = value
    path.write_text(json.dumps(marker))
    for use in (
        lambda: len(FolderStore(tmp_path / "made")),
        lambda: FolderStore(tmp_path / "made").fingerprint,
        lambda: FolderWriter(tmp_path / "made", what="x", resume=True),
    ):
        with pytest.raises(StoreError, match=rf"made/\.penstock is damaged: .*{field}"):
            use()


@pytest.mark.parametrize("value", [None, 1.5, True, "x", ["a"], {"a": 1}, {"num_objects": "x"}])
def test_metadata_of_ours_that_say_what_cannot_be_are_an_error_with_their_name(tmp_path, value):
    names = ("object_columns", "attribute_names", "landmark_names", "num_landmarks", "sizes_px")
    record = encode_record("1", {"image": EncodedImage(JPEG)}, (0,))
    write(tmp_path / "made", [record], metadata=dict.fromkeys(names, value))
    dataset = PackedAnnotations(tmp_path / "made")
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


@pytest.mark.parametrize(("kind", "num_shards"), [("lmdb:", 1), ("lmdb:", 2), ("folder:", 1)])
def test_a_class_folder_that_is_no_utf8_is_named_at_once(tmp_path, kind, num_shards):
    touch(tmp_path, "photos/a/1.jpg", data=JPEG)
    os.mkdir(os.fsencode(tmp_path) + b"/photos/caf\xe9")
    with pytest.raises(StoreError, match=r"the class 'caf\\udce9' cannot be stored: .* not UTF-8"):
        pack(tmp_path / "photos", f"{kind}{tmp_path}/made", num_shards=num_shards)
    assert os.listdir(tmp_path) == ["photos"]


def test_metadata_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(StoreError, match="metadata of a folder are JSON"):
        write(tmp_path / "made", [image("1.jpg")], metadata={"a": object()})


# Going on


def test_a_resumed_writer_keeps_what_is_whole_and_removes_the_rest(tmp_path):
    records = [image(f"a/{i}.jpg", 0, JPEG + bytes([i])) for i in range(6)]
    writer = FolderWriter(tmp_path / "made", class_names=("a",), what="x")
    writer.put_many(records[:5])
    writer.close()
    partial = tmp_path / "made.partial"
    touch(partial, "a/3.jpg", data=JPEG)  # damaged: it and what follows are written anew
    touch(partial, "a/5.jpg", ".penstock-new")  # written, and their line was lost in a crash
    with (partial / ".penstock-journal").open("ab") as journal:
        journal.write(b'["a/5.jpg", 0, "a/5.j')  # cut off
    writer = FolderWriter(tmp_path / "made", class_names=("a",), what="x", resume=True)
    assert writer.written() == [(f"a/{i}.jpg", 0) for i in range(3)]
    writer.put_many(records[3:4])
    writer.close()
    writer = FolderWriter(tmp_path / "made", class_names=("a",), what="x", resume=True)
    assert len(writer.written()) == 4
    writer.put_many(records[4:])
    writer.finish()
    writer.close()
    expected = {record.key: decode_record(record.data).sample[0].data for record in records}
    assert files_of(tmp_path / "made") == expected
    assert sorted(os.listdir(tmp_path)) == ["made"]


def test_files_of_others_in_an_unfinished_folder_are_never_removed(tmp_path):
    partial = tmp_path / "made.partial"
    for _ in range(2):
        with contextlib.closing(FolderWriter(tmp_path / "made", what="x")) as writer:
            writer.put_many([image("1.jpg"), image("2.jpg")])  # the second time all is ours
    (partial / "2.jpg").write_bytes(b"changed")
    touch(partial, "notes/letter.txt")
    touch(tmp_path, "made.partial.lock")
    with pytest.raises(StoreError, match=r"made\.partial is in the way: .* 'notes/letter\.txt'"):
        FolderWriter(tmp_path / "made", what="x")
    for _ in range(2):
        with contextlib.closing(FolderWriter(tmp_path / "made", what="x", resume=True)) as writer:
            assert writer.written() == [("1.jpg", None), ("2.jpg", None)][: 1 + _]
            writer.put_many([image("2.jpg")][_:])
            with pytest.raises(StoreError, match=r"in the way: .* 'notes/letter\.txt'"):
                writer.finish()
    assert files_of(tmp_path / "made.partial") == {
        "1.jpg": JPEG, "2.jpg": JPEG, "notes/letter.txt": b"...",
    }  # fmt: skip
    shutil.rmtree(partial / "notes")
    with contextlib.closing(FolderWriter(tmp_path / "made", what="x", resume=True)) as writer:
        writer.finish()
    assert sorted(os.listdir(tmp_path)) == ["made"]


def test_a_folder_that_only_a_lock_says_is_ours_is_never_removed(tmp_path):
    touch(tmp_path, "made.partial/letter.txt", "made.partial.lock")
    for resume in (False, True):
        with pytest.raises(StoreError, match=r"made\.partial is in the way: .* 'letter\.txt'"):
            FolderWriter(tmp_path / "made", what="x", resume=resume)
        touch(tmp_path, "made.partial.lock")
    assert files_of(tmp_path / "made.partial") == {"letter.txt": b"..."}


@pytest.mark.parametrize("name", [".penstock", ".penstock-journal", "1.jpg", "b"])
def test_a_link_in_an_unfinished_folder_is_not_followed(tmp_path, name):
    touch(tmp_path, "own/secret.txt")
    with contextlib.closing(FolderWriter(tmp_path / "made", what="x")) as writer:
        writer.put_many([image("1.jpg")])
    place = tmp_path / "made.partial" / name
    target = tmp_path / "own"
    if name == ".penstock-journal":
        target = place.rename(tmp_path / "journal")
    elif name != "b":
        target = tmp_path / "own/secret.txt"
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    before = files_of(tmp_path)
    for resume in (True, False):
        with pytest.raises(StoreError, match=rf"made\.partial is in the way: .* '{name}'"):
            FolderWriter(tmp_path / "made", what="x", resume=resume)
    assert files_of(tmp_path) == before


def test_a_kill_while_an_old_folder_is_removed_leaves_what_is_known_as_ours(tmp_path, monkeypatch):
    write(tmp_path / "made", [image(f"{i}.jpg") for i in range(5)], what="x")
    removed = []

    def unlink(path, *, real=os.unlink):
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(path)
        real(path)

    with contextlib.closing(FolderWriter(tmp_path / "made", what="y")) as writer:
        writer.put_many([image("1.jpg")])
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink)
            with pytest.raises(KeyboardInterrupt):
                writer.finish()
    with contextlib.closing(FolderWriter(tmp_path / "made", what="y", resume=True)) as writer:
        assert writer.finished
    assert sorted(os.listdir(tmp_path)) == ["made"]
    assert list(files_of(tmp_path / "made")) == ["1.jpg"]


def test_a_resumed_writer_finds_a_folder_that_is_finished(tmp_path):
    records = [image("a/1.jpg", 0), encode_record("x", {"a": 1}), encode_record("y", 1, (0, 0))]
    write(tmp_path / "made", records, class_names=("a",), what="x")
    before = files_of(tmp_path / "made"), (tmp_path / "made").stat().st_ino
    writer = FolderWriter(tmp_path / "made", class_names=("a",), what="x", resume=True)
    assert writer.finished
    assert writer.written() == [("a/1.jpg", 0), ("x", ()), ("y", (0, 0))]
    with pytest.raises(StoreError, match="made is complete"):
        writer.put_many([image("b.jpg")])
    writer.finish()
    writer.close()
    assert (files_of(tmp_path / "made"), (tmp_path / "made").stat().st_ino) == before
    assert os.listdir(tmp_path) == ["made"]


def test_a_folder_of_another_source_or_one_with_less_in_it_is_not_finished(tmp_path):
    write(tmp_path / "made", [image("1.jpg"), image("2.jpg")], what="x")
    for facts in ({"what": "y", "resume": True}, {"what": "x"}):
        with contextlib.closing(FolderWriter(tmp_path / "made", **facts)) as writer:
            assert not writer.finished
            assert writer.written() == []
    (tmp_path / "made" / "1.jpg").unlink()
    with contextlib.closing(FolderWriter(tmp_path / "made", what="x", resume=True)) as writer:
        assert not writer.finished


def test_an_interrupted_writer_comes_before_a_finished_folder(tmp_path):
    write(tmp_path / "made", [image("1.jpg")], what="x")
    with contextlib.closing(FolderWriter(tmp_path / "made", what="x")) as writer:
        writer.put_many([image("1.jpg")])
    with contextlib.closing(FolderWriter(tmp_path / "made", what="x", resume=True)) as writer:
        assert not writer.finished
        assert writer.written() == [("1.jpg", None)]
        assert writer.checksum_at(0) == header_of(image("1.jpg").data, "")[1]


def test_a_key_that_comes_twice_is_refused_before_anything_is_written(tmp_path):
    with contextlib.closing(FolderWriter(tmp_path / "made", what="x")) as writer:
        writer.put_many([image("1.jpg")])
        for records in ([image("2.jpg"), image("1.jpg")], [image("3.jpg"), image("3.jpg")]):
            with pytest.raises(StoreError, match=r"the key '[13]\.jpg' is there twice"):
                writer.put_many(records)
        assert sorted(files_of(tmp_path / "made.partial")) == ["1.jpg"]
        writer.put_many([image("2.jpg")])
        writer.finish()
    assert list(FolderStore(tmp_path / "made").keys) == ["1.jpg", "2.jpg"]


def test_a_folder_that_lacks_a_record_is_not_finished(tmp_path):
    with contextlib.closing(FolderWriter(tmp_path / "made")) as writer:
        with pytest.raises(StoreError, match="cannot be a file"):
            writer.put_many([image("1.jpg"), image("../2.jpg")])
        with pytest.raises(StoreError, match="lacks a record that could not be written"):
            writer.finish()
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_slow_listing_holds_up_no_other_folder_and_no_forked_child(tmp_path, monkeypatch):
    from penstock.stores.folder import store as module

    touch(tmp_path, "slow/a/1.jpg", "fast/a/1.jpg")
    is_listing, may_go_on = threading.Event(), threading.Event()

    def list_slowly(root):
        if root.name == "slow":
            is_listing.set()
            assert may_go_on.wait(20)
        return list_classes(root)

    monkeypatch.setattr(module, "list_classes", list_slowly)
    thread = threading.Thread(target=len, args=[FolderStore(tmp_path / "slow")])
    thread.start()
    try:
        assert is_listing.wait(20)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(lambda: list(FolderStore(tmp_path / "fast").keys))
            assert found.result(timeout=20) == ["a/1.jpg"]
        child = multiprocessing.get_context("fork").Process(
            target=len, args=[FolderStore(tmp_path / "fast")]
        )
        child.start()
        child.join(20)
        is_hanging = child.exitcode is None
        child.kill()
        child.join()
        assert not is_hanging
    finally:
        may_go_on.set()
        thread.join()


def test_a_journal_that_names_files_elsewhere_is_not_followed(tmp_path):
    touch(tmp_path, "secret.jpg", data=JPEG)
    writer = FolderWriter(tmp_path / "made", what="x")
    writer.put_many([image("1.jpg")])
    writer.close()
    journal = tmp_path / "made.partial" / ".penstock-journal"
    journal.write_text(journal.read_text().replace('"1.jpg", 1', '"../secret.jpg", 1'))
    writer = FolderWriter(tmp_path / "made", what="x", resume=True)
    assert writer.written() == []
    writer.close()
    assert (tmp_path / "secret.jpg").exists()


PACK = """
import sys
from penstock.stores import EncodedImage
from penstock.stores.folder.writer import FolderWriter
from penstock.stores.records import encode_record
def record(i):
    return encode_record(f"{i % 3}/{i:03}.jpg", (EncodedImage(b"%03d" % i * 1000), i % 3), i % 3)
writer = FolderWriter(sys.argv[1], class_names=("0", "1", "2"), what="x", resume=True)
start = len(writer.written())
assert [key for key, _ in writer.written()] == [record(i).key for i in range(start)]
print(start, flush=True)
for i in range(start, 300):
    writer.put_many([record(i)])
    print(i, flush=True)
print("finish", flush=True)
writer.finish()
writer.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_leaves_the_old_folder_or_the_new_and_what_resumes_finishes_it(tmp_path, replaces):
    if replaces:
        write(tmp_path / "made", [image("old.jpg")])
    command = [sys.executable, "-c", PACK, str(tmp_path / "made")]
    lines = []
    for stop_at in ("40", "41", "173", "299", "finish", "finish", None):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline().strip()]
            while lines[-1] and lines[-1] != stop_at:
                lines.append(process.stdout.readline().strip())
            if stop_at is not None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
        if (tmp_path / "made").exists():
            assert len(FolderStore(tmp_path / "made")) in (1, 300)
        else:
            assert not replaces
    assert lines[-2:] == ["done", ""]
    store = FolderStore(tmp_path / "made")
    assert [r.sample[0].data for r in store.get([f"{i % 3}/{i:03}.jpg" for i in range(300)])] == [
        b"%03d" % i * 1000 for i in range(300)
    ]
    assert sorted(os.listdir(tmp_path)) == ["made"]


FILL = """
import sys, os, numpy as np
from penstock.errors import StoreError
from penstock.stores import pack, open_store
disk = sys.argv[1]
data = [(np.full(200_000, i, np.uint8), i) for i in range(100)]
pack(data[:3], f"{disk}/a")
try:
    pack(data, f"{disk}/a", overwrite=True)
except StoreError as error:
    print(error)
with open_store(f"{disk}/a") as store:
    print(len(store), [int(r.sample[0][0]) for r in store.scan()])
print(sorted(os.listdir(disk)))
"""


def test_a_full_disk_is_a_clear_error_and_the_old_folder_survives(tmp_path):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no permission to make a mount namespace of our own")
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=8m penstock-test "$1" && exec "$0" -c "$2" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, sys.executable, str(tmp_path / "disk"), FILL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    error, old, left = done.stdout.splitlines()
    assert error.startswith("no space left on the disk of ")
    assert "--resume" in error
    assert old == "3 [0, 1, 2]"
    assert left == "['a', 'a.partial']"


def test_a_dataset_over_a_folder_gives_batches_of_files(tmp_path):
    from penstock import Loader

    touch(tmp_path, "a/1.jpg", "b/2.jpg", data=b"....")
    dataset = StoreDataset(tmp_path, decode=None)
    assert dataset.can_get_batch
    ((files, labels),) = list(Loader(dataset, batch_size=2))
    assert (files, labels.tolist()) == ((b"....", b"...."), [0, 1])


def test_a_lock_file_of_somebody_elses_stays(tmp_path):
    touch(tmp_path, "uv.lock")
    write(tmp_path / "uv", [image("1.jpg")])
    assert sorted(os.listdir(tmp_path)) == ["uv", "uv.lock"]


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
    with pytest.raises(StoreError, match=r"cannot read .*/2\.xml: .*not a regular file"):
        len(FolderStore(tmp_path))
    pipe.unlink()
    with pipe.open("wb") as file:
        file.truncate(300 << 20)  # takes no room on the disk
    with pytest.raises(StoreError, match=r"2\.xml: it has 314,572,800 bytes, and 268,435,456 is"):
        len(FolderStore(tmp_path))
    pipe.unlink()
    (tmp_path / "ImageSets/Main/train.txt").unlink()
    os.mkfifo(tmp_path / "ImageSets/Main/train.txt")
    with pytest.raises(StoreError, match=r"train\.txt: .*not a regular file"):
        len(FolderStore(tmp_path, split="train"))
