# SPDX-License-Identifier: Apache-2.0
"""Tar shards in WebDataset's layout, read by position."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc

import numpy as np
import psutil
import pytest
from tests.support.stores import refused

from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, open_store
from penstock.stores import tar as module
from penstock.stores.records import decode_record
from penstock.stores.tar import TarStore, expand_braces
from penstock.testing.stores import StoreReaderContract


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


def files_of(records):
    """Return the files that stand for records of images with their classes."""
    files = {}
    for record in records:
        image, label = decode_record(record.data).sample
        files[f"{record.key}.jpg"], files[f"{record.key}.cls"] = image.data, b"%d" % label
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


class TestTar(StoreReaderContract):
    suffix = ""
    has_class_names = False  # a .cls file holds a number

    def place(self, tmp_path):
        return f"tar:{tmp_path}"

    def fill(self, address, records, class_names=(), metadata=None):
        for number, part in enumerate((records[:17], records[17:])):
            write(f"{address.removeprefix('tar:')}/{number}.tar", files_of(part))


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
        assert found.flags.writeable
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


def test_where_shards_share_a_name_all_keys_get_their_shard_in_front(tmp_path):
    for folder in ("x/a", "x/b", "y/a"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder / "000.tar", {"1.txt": folder.encode(), f"{folder}.txt": b""})
    for name in ("a", "b"):
        write(tmp_path / f"{name}.tar", {"1.txt": name.encode(), f"only {name}.txt": b""})
    for pattern, keys in {
        "": ["a/1", "a/only a", "b/1", "b/only b"],
        "/x/{a,b}/000.tar": ["a/000/1", "a/000/x/a", "b/000/1", "b/000/x/b"],
        "/{x/a,y/a}/000.tar": ["x/a/000/1", "x/a/000/x/a", "y/a/000/1", "y/a/000/y/a"],
    }.items():
        with TarStore(f"{tmp_path}{pattern}") as store:
            assert list(store.keys) == keys
            assert store.get([keys[2]])[0].sample["txt"].endswith(("b", "y/a"))


def test_a_key_that_two_shards_would_give_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("x")
    write("x.tar", {"y/1.txt": b"", "1.txt": b""})
    write("x/y.tar", {"1.txt": b""})
    write("y.tar", {"1.txt": b""})
    refused(TarStore("{x,x/y,y}.tar"), r"two samples of .* would be called 'x/y/1'")


@pytest.mark.parametrize("keep", [300, 512, 700, 1024, 5000, 9999, "end mark"])
def test_a_truncated_shard_is_an_error(tmp_path, keep):
    path = write(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 600 for i in range(7)})
    whole = path.read_bytes()
    end = 7 * (512 + 1024)
    path.write_bytes(whole[: end if keep == "end mark" else keep])
    refused(TarStore(path), r"a\.tar is truncated")
    path.write_bytes(whole[: end + 512])
    assert len(TarStore(path)) == 7


def test_a_damaged_header_is_an_error_and_not_the_end(tmp_path):
    path = write(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 600 for i in range(7)})
    data = bytearray(path.read_bytes())
    data[3 * 1536 + 10] ^= 0xFF
    path.write_bytes(data)
    refused(TarStore(path), "damaged: at byte 4,608 there is neither")


@pytest.mark.parametrize("number", range(7))
def test_a_header_of_zeros_is_an_error_and_not_the_end(tmp_path, number):
    path = write(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 600 for i in range(7)})
    data = bytearray(path.read_bytes())
    data[number * 1536 : number * 1536 + 512] = bytes(512)
    path.write_bytes(data)
    refused(TarStore(path), rf"a\.tar is .*damaged: at byte {number * 1536:,} there")


@pytest.mark.parametrize("start", [0, 512, 1536, 4608, 5000, 20 * 1536 + 600])
def test_a_tail_of_zeros_is_an_error_and_not_the_end(tmp_path, start):
    """As a download leaves it that took the whole size from the disk, and was cut."""
    path = write(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 600 for i in range(40)})
    size_bytes = path.stat().st_size
    os.truncate(path, start)
    os.truncate(path, size_bytes)
    refused(TarStore(path), r"a\.tar is .*damaged: .* more is zeros than")


@pytest.mark.parametrize("record_bytes", [512, 1024, 10_240, 1 << 14, 1 << 20])
def test_zeros_that_fill_up_the_last_record_are_the_end(tmp_path, record_bytes):
    path = write(tmp_path / "a.tar", {f"{i}.jpg": b"x" * 600 for i in range(7)})
    os.truncate(path, 7 * 1536 + 1024)
    os.truncate(path, -(-path.stat().st_size // record_bytes) * record_bytes)
    assert len(TarStore(path)) == 7


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
def test_a_header_that_would_fill_the_memory_is_an_error_before_it_is_read(tmp_path, kind):
    """tarfile reads long names and PAX's fields whole; a hole in a file has any length."""
    header = tarfile.TarInfo("long")
    header.type, header.size = kind, 1 << 32
    path = tmp_path / "a.tar"
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, (1 << 32) + 2048)
    tracemalloc.start()
    try:
        refused(TarStore(path), r"a\.tar is .*: a header of 4,294,967,296 bytes")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_padded", [True, False])
def test_tar_files_one_behind_the_other_are_read_to_the_end(tmp_path, is_padded):
    with open(tmp_path / "all.tar", "wb") as joined:
        for first in (0, 3, 6):
            files = {f"{i}.txt": b"text %d" % i for i in range(first, first + 3)}
            data = write(tmp_path / "a.tar", files).read_bytes()
            joined.write(data if is_padded else data[: 3 * 1024 + 1024])
    with TarStore(tmp_path / "all.tar") as store:
        assert [record.sample["txt"] for record in store.get_many(range(9))] == [
            f"text {i}" for i in range(9)
        ]


def test_what_follows_the_end_and_is_no_tar_file_is_an_error(tmp_path):
    path = write(tmp_path / "a.tar", pairs(0))
    size_bytes = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"more" * 200)
    refused(TarStore(path), rf"a\.tar is .*damaged: at byte {size_bytes:,} there is")


def test_shards_without_a_sample_are_an_error_and_one_beside_others_is_none(tmp_path):
    write(tmp_path / "a.tar", {})
    refused(TarStore(tmp_path / "a.tar"), r"a\.tar has no sample")
    write(tmp_path / "b.tar", pairs(0))
    assert len(TarStore(tmp_path)) == 10
    (tmp_path / "a.tar").write_bytes(bytes(1 << 14))
    refused(TarStore(tmp_path), r"a\.tar is .*damaged: .* more is zeros")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(bytes(2000), mtime=0), "a.tar is compressed.* gunzip --keep"),
        (b"\x28\xb5\x2f\xfd" + bytes(2000), "is compressed.* unzstd"),
        (b"", r"a\.tar is .*no tar file, or truncated: empty file"),
        (b"no tar file, but a text" * 100, r"a\.tar is .*no tar file, or truncated"),
    ],
    # Without names of their own they are named by their bytes, in which gzip notes the time: two
    # processes that share the tests have to find the same ones.
    ids=["gzip", "zstd", "empty", "text"],
)
def test_a_file_of_another_kind_says_what_to_do(tmp_path, content, message):
    (tmp_path / "a.tar").write_bytes(content)
    refused(TarStore(tmp_path / "a.tar"), message)


@pytest.mark.parametrize("name", ["../1.jpg", "a/../../1.jpg", "/a/../1.jpg"])
def test_a_name_that_leads_out_of_a_folder_is_an_error(tmp_path, name):
    write(tmp_path / "a.tar", {"0.jpg": b"...", "..a/1..jpg": b"...", name: b"..."})
    refused(TarStore(tmp_path / "a.tar"), rf"a\.tar has a file '{name}', outside of its folder")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_an_error(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "1.jpg", b"...")
        add(tar, "2.jpg", type=kind, linkname="/etc/passwd")
    refused(TarStore(tmp_path / "a.tar"), r"has a link or a sparse file, '2\.jpg'")


def hostile(**options):
    """A tar file of one file, with a header that says what it should not."""
    size, file = options.pop("size", None), io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "1.jpg", b"abc", **options)
    data = bytearray(file.getvalue())
    if size is not None:
        data[124:136] = size
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


@pytest.mark.parametrize(
    "options",
    [
        {"size": b"\xff" * 12},
        {"size": b"\x80" + (2**80).to_bytes(11, "big")},
        {"size": b"\x80" + (2**63).to_bytes(11, "big")},
        {"size": b"\x80" + (2**62).to_bytes(11, "big")},
        {"size": b"%011o\0" % 20_000},
        {"size": b"zzzzzzzzzzz\0"},
        {"pax_headers": {"size": "99999999999999999999999"}},
        {"pax_headers": {"size": "-512"}},
        {"pax_headers": {"size": "-1536"}},  # back to the header that says so, for ever
        {"pax_headers": {"size": "abc"}},
        {"pax_headers": {"GNU.sparse.map": "a,b"}},
        {"pax_headers": {"GNU.sparse.size": "x", "GNU.sparse.major": "1"}},
        {"pax_headers": {"GNU.sparse.size": "3", "GNU.sparse.map": "0,3"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_header_that_says_what_cannot_be_is_an_error(tmp_path, options, is_first):
    start = b"" if is_first else hostile()[:1024]
    (tmp_path / "a.tar").write_bytes(start + hostile(**options))
    refused(TarStore(tmp_path / "a.tar"), r"a\.tar (is|has)")


def test_a_missing_shard_is_named(shards):
    with pytest.raises(StoreError, match=r"cannot read .*shard-003\.tar: No such file"):
        len(TarStore(f"{shards}/shard-{{000..003}}.tar"))
    (shards / "none").mkdir()
    refused(TarStore(shards / "none"), r"none is a folder without a \.tar file")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("1.cls", b"cat", r"1\.cls in .*a\.tar should hold a 64-bit integer, not b'cat'"),
        ("1.cls", b"1" * 5000, r"1\.cls in .*a\.tar should hold a 64-bit"),
        ("1.cls", b"%d" % 2**63, r"1\.cls in .*a\.tar should hold a 64-bit"),
        ("1.cls", b"1_0", r"1\.cls in .*a\.tar should hold a 64-bit"),
        ("1.json", b"{", r"1\.json in .*a\.tar cannot be read: Expecting"),
        ("1.json", b"[" * 200_000, r"1\.json in .*a\.tar cannot be read"),
        ("1.txt", b"\xff", r"1\.txt in .*a\.tar cannot be read: 'utf-8'"),
        ("1.npy", b"\x93NUMPY", r"1\.npy in .*a\.tar cannot be read"),
        ("1.npy", npy(np.array([{}])), r"1\.npy in .*Object arrays cannot be loaded"),
        ("1.npy", npy(np.zeros(4))[:-1], r"1\.npy in .*expected 32 bytes got 31"),
        ("1.npy", npy(np.zeros(4)).replace(b"}", b"'"), r"1\.npy in .*a\.tar cannot be read"),
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


def test_a_sample_larger_than_the_limit_is_an_error_and_a_shard_may_be_larger(tmp_path):
    path = write(tmp_path / "a.tar", {"1.bin": b"12345", "1.txt": b"67", "2.bin": b"1234567"})
    with open_store(path, max_file_size=7) as store:
        assert [len(record.sample) for record in store.get_many([0, 1])] == [2, 1]
        store.max_file_size = 6
        with pytest.raises(StoreError, match=r"1\.txt in .*a\.tar: .* 7 bytes, and 6 is the most"):
            store.get_many([0])


def test_a_shard_that_changes_is_noticed(shards):
    store = TarStore(shards)
    assert len(store) == 30
    before = store.fingerprint
    write(shards / "shard-001.tar", pairs(10, 9))
    with store:
        assert store.get_many([0])[0].key == "000000"
        with pytest.raises(StoreError, match=r"shard-001\.tar was changed since it was listed"):
            store.get_many([12])
    assert TarStore(shards).fingerprint != before


def test_more_shards_than_are_kept_open_are_read(shards, monkeypatch):
    monkeypatch.setattr(module, "_MAX_OPEN", 1)
    with TarStore(shards) as store:
        for _ in range(2):
            assert [r.key for r in store.get_many([25, 5, 15])] == ["000025", "000005", "000015"]
        assert len(shards_open()) == 1


def shards_open():
    return [file.path for file in psutil.Process().open_files() if file.path.endswith(".tar")]


def test_a_store_that_is_dropped_leaves_nothing_open(shards):
    store = TarStore(shards)
    store.get_many([0, 15, 29])
    assert len(shards_open()) == 3
    del store
    assert shards_open() == []


def test_a_listing_is_pickled_as_arrays(tmp_path):
    sizes = []
    for count in (1000, 2000):
        store = TarStore(
            write(
                tmp_path / f"{count}.tar",
                pairs(0, 10)
                | dict.fromkeys(
                    (f"{i:07}.{e}" for i in range(count) for e in ("jpg", "cls")), b"1"
                ),
            )
        )
        assert isinstance(store.labels, np.ndarray)
        buffers = []
        sizes.append(len(pickle.dumps(store, 5, buffer_callback=buffers.append)))
        with pickle.loads(pickle.dumps(store)) as copy:
            assert copy.get_many([-1])[0].sample == (EncodedImage(b"1"), 1)
    assert sizes[1] - sizes[0] < 100  # the arrays go beside it, and are shared


def test_classes_that_some_samples_lack(tmp_path):
    files = {"1.jpg": b"a", "2.jpg": b"b", "2.cls": b"5", "3.jpg": b"c"}
    with TarStore(write(tmp_path / "a.tar", files)) as store:
        assert [row.tolist() for row in store.labels] == [[], [5], []]
        assert [record.label for record in store.scan()] == [None, 5, None]


@pytest.mark.parametrize("pattern", ["a{1}.tar", "a{}.tar", "{5..2}.tar", "{0..9999999}.tar"])
def test_patterns_that_stand_for_nothing_are_refused(pattern):
    with pytest.raises(ConfigError, match=r"tar"):
        expand_braces(pattern)


def test_two_files_of_one_name_in_a_sample_are_an_error(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.jpg", "2.jpg", "1.JPG"):
            add(tar, name, b"...")
    refused(TarStore(tmp_path / "a.tar"), r"a\.tar has two files 1\.jpg")
