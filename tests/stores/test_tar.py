# SPDX-License-Identifier: Apache-2.0
"""Tar shards in WebDataset's layout, read by position."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, StoreDataset, open_store, pack
from penstock.stores.tar import store as module
from penstock.stores.tar.listing import expand_braces
from penstock.stores.tar.store import TarStore


def add(tar, name, data=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def write(path, files):
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            add(tar, name, data)
    return path


def pairs(start, count=10):
    files = {}
    for number in range(start, start + count):
        files[f"{number:06}.jpg"] = b"image %d" % number * number
        files[f"{number:06}.cls"] = b"%d\n" % (number % 3)
    return files


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.fixture
def shards(tmp_path):
    for number in range(3):
        write(tmp_path / f"shard-{number:03}.tar", pairs(10 * number))
    return tmp_path


@pytest.mark.parametrize("pattern", ["{}/shard-{{000..002}}.tar", "{}", "{}/shard-00{{0,1,2}}.tar"])
def test_images_with_classes_are_pairs_in_the_order_of_the_shards(shards, pattern):
    with open_store("tar:" + pattern.format(shards)) as store:
        assert list(store.keys) == [f"{number:06}" for number in range(30)]
        assert store.labels.tolist() == [number % 3 for number in range(30)]
        assert store.labels.dtype == np.int64
        assert store.index.are_pairs
        found = store.get_many([29, 3, -29, 3])
        assert [r.sample for r in found] == [
            (EncodedImage(b"image %d" % number * number), number % 3) for number in (29, 3, 1, 3)
        ]
        assert [r.key for r in store.get(["000017"])] == ["000017"]


def test_other_samples_are_dicts_by_extension(tmp_path):
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    bomb = pickle.dumps(os.getcwd)
    files = {
        "dir.1/a.b.JPG": b"photo",
        "dir.1/a.seg.png": b"mask",
        "dir.1/a.json": b'{"boxes": [1, 2]}',
        "dir.1/a.txt": "grüß".encode(),
        "dir.1/a.npy": npy(array),
        "dir.1/a.cls": b"-1",
        "dir.1/a.pkl": bomb,
        "dir.1/a.pyd": bomb,
        "b.npy": npy(np.zeros((0, 3), "i2")),
        "c.jpg": b"alone",
    }
    with TarStore(write(tmp_path / "a.tar", files)) as store:
        first, second, third = store.scan()
        assert [r.key for r in (first, second, third)] == ["dir.1/a", "b", "c"]
        found = first.sample.pop("npy")
        assert found.tolist() == array.tolist()
        assert found.flags.owndata
        assert first.sample == {
            "b.jpg": EncodedImage(b"photo"),
            "seg.png": EncodedImage(b"mask"),
            "json": {"boxes": [1, 2]},
            "txt": "grüß",
            "cls": -1,
            "pkl": bomb,
            "pyd": bomb,
        }
        assert (second.sample["npy"].shape, second.sample["npy"].dtype) == ((0, 3), np.int16)
        assert third.sample == {"jpg": EncodedImage(b"alone")}
        assert (first.label, second.label, third.label) == (-1, None, None)
        assert not store.index.are_pairs


def test_what_is_no_sample_is_passed_over(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "folder.d", type=tarfile.DIRTYPE)
        for name in ("README", "._1.jpg", "folder.d/.hidden.jpg", "1.jpg"):
            add(tar, name, b"...")
        add(tar, "x" * 300 + ".jpg", b"a long name")
    with TarStore(tmp_path / "a.tar") as store:
        assert list(store.keys) == ["1", "x" * 300]


def test_names_that_are_in_two_shards_get_their_shard_in_front(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.tar", {"1.txt": name.encode(), f"only {name}.txt": b""})
    with TarStore(tmp_path) as store:
        assert list(store.keys) == ["a/1", "a/only a", "b/1", "b/only b"]
        assert store.get(["b/1"])[0].sample == {"txt": "b"}


@pytest.mark.parametrize("keep", [300, 512, 700, 1024, 5000, 9999, "end mark"])
def test_a_truncated_shard_is_an_error(tmp_path, keep):
    path = write(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 600 for i in range(7)})
    whole = path.read_bytes()
    end = 7 * (512 + 1024)
    path.write_bytes(whole[: end if keep == "end mark" else keep])
    with pytest.raises(StoreError, match=r"a\.tar is truncated"):
        len(TarStore(path))
    path.write_bytes(whole[: end + 512])
    assert len(TarStore(path)) == 7


def test_a_damaged_header_is_an_error_and_not_the_end(tmp_path):
    path = write(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 600 for i in range(7)})
    data = bytearray(path.read_bytes())
    data[3 * 1536 + 10] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(StoreError, match="is damaged: at byte 4,608 there is neither"):
        len(TarStore(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(bytes(2000)), "is compressed by gzip.* gunzip --keep .*a.tar"),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), "is compressed by zstd.* unzstd --keep"),
        (b"", r"a\.tar is truncated, damaged, or no tar file: empty file"),
        (b"no tar file, but a text" * 100, r"a\.tar is truncated, damaged, or no tar file"),
    ],
)
def test_a_file_of_another_kind_says_what_to_do(tmp_path, content, message):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(StoreError, match=message):
        len(TarStore(tmp_path / "a.tar"))


def test_two_files_of_one_name_in_a_sample_are_an_error(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.jpg", "2.jpg", "1.JPG"):
            add(tar, name, b"...")
    with pytest.raises(StoreError, match=r"a\.tar has two files 1\.jpg"):
        len(TarStore(tmp_path / "a.tar"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_an_error(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "1.jpg", b"...")
        add(tar, "2.jpg", type=kind, linkname="/etc/passwd")
    with pytest.raises(StoreError, match=r"has a link or a sparse file, '2\.jpg'"):
        len(TarStore(tmp_path / "a.tar"))


def test_a_missing_shard_is_named(shards):
    with pytest.raises(StoreError, match=r"cannot read .*shard-003\.tar: No such file"):
        len(TarStore(f"{shards}/shard-{{000..003}}.tar"))
    (shards / "none").mkdir()
    with pytest.raises(StoreError, match=r"none is a folder without a \.tar file"):
        len(TarStore(shards / "none"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "1.cls",
            b"cat",
            r"1\.cls in .*a\.tar should hold the number of a class, and holds b'cat'",
        ),
        ("1.cls", b"1" * 5000, r"1\.cls in .*a\.tar should hold the number"),
        ("1.json", b"{", r"1\.json in .*a\.tar cannot be read: Expecting"),
        ("1.json", b"[" * 200_000, r"1\.json in .*a\.tar cannot be read"),
        ("1.txt", b"\xff", r"1\.txt in .*a\.tar cannot be read: 'utf-8'"),
        ("1.npy", b"\x93NUMPY", r"1\.npy in .*a\.tar cannot be read"),
        ("1.npy", npy(np.array([{}])), r"1\.npy in .*array of objects, which are pickles"),
        ("1.npy", npy(np.zeros(4))[:-1], r"1\.npy in .*does not fit its bytes"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_named(tmp_path, name, data, message):
    with (
        TarStore(write(tmp_path / "a.tar", {name: data, "2.jpg": b"..."})) as store,
        pytest.raises(StoreError, match=message),
    ):
        store.get_many([0])


def test_an_array_that_claims_a_terabyte_takes_no_memory(tmp_path):
    data = npy(np.zeros(10)).replace(b"(10,)", b"(%d,)" % 2**40)
    with (
        TarStore(write(tmp_path / "a.tar", {"1.npy": data})) as store,
        pytest.raises(StoreError, match=r"cannot be read"),
    ):
        store.get_many([0])


def test_a_shard_that_changes_is_noticed(shards):
    store = TarStore(shards)
    assert len(store) == 30
    before = store.fingerprint
    write(shards / "shard-001.tar", pairs(10, 9))
    with store:
        assert store.get_many([0])[0].key == "000000"
        with pytest.raises(StoreError, match=r"shard-001\.tar is not the file that was listed"):
            store.get_many([12])
    assert TarStore(shards).fingerprint != before


def test_more_shards_than_are_kept_open_are_read(shards, monkeypatch):
    monkeypatch.setattr(module, "_MAX_OPEN", 1)
    with TarStore(shards) as store:
        for _ in range(2):
            assert [r.key for r in store.get_many([25, 5, 15])] == ["000025", "000005", "000015"]
        assert len(store._open._kept) == 1


def test_threads_read_at_the_same_time(shards):
    with TarStore(shards) as store, ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda i: store.get_many([i % 30, (i * 7) % 30]), range(100)):
            for record in found:
                number = int(record.key)
                assert record.sample[0].data == b"image %d" % number * number


def _read_in_child(store, sender):
    sender.send([record.key for record in store.get_many([21, 2])])
    store.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_in_use_goes_on_in_another_process(shards, method):
    with TarStore(shards) as store:
        store.get_many([0])
        context = multiprocessing.get_context(method)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_read_in_child, args=(store, sender))
        child.start()
        sender.close()
        assert receiver.recv() == ["000021", "000002"]
        child.join()
        receiver.close()
        assert child.exitcode == 0
        assert store.get_many([9])[0].key == "000009"


def test_shards_are_packed_and_read_as_a_dataset(shards, tmp_path):
    pack(f"tar:{shards}", f"lmdb:{tmp_path}/a.lmdb", num_workers=0)
    with open_store(f"lmdb:{tmp_path}/a.lmdb") as packed, TarStore(shards) as store:
        assert list(packed.scan()) == list(store.scan())
    dataset = StoreDataset(TarStore(shards), decode=None)
    assert dataset[4] == (b"image 4" * 4, 1)
    dataset.close()


@pytest.mark.parametrize("pattern", ["a{1}.tar", "a{}.tar", "{5..2}.tar", "{0..9999999}.tar"])
def test_patterns_that_stand_for_nothing_are_refused(pattern):
    with pytest.raises(ConfigError, match=r"tar"):
        expand_braces(pattern)


def test_what_a_json_file_says_is_kept(tmp_path):
    tree = {"a": [1, 2.5, None, "x"]}
    with TarStore(write(tmp_path / "a.tar", {"1.json": json.dumps(tree).encode()})) as store:
        assert store.get_many([0])[0].sample == {"json": tree}
