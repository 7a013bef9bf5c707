# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Tar shards of WebDataset's layout in object storage."""

from __future__ import annotations

import contextlib
import io
import pickle
import tarfile

import numpy as np
import pytest
from tests.blobs.object_storage import InBucket, bucket, object_server, put, website  # noqa: F401 - fixtures
from tests.stores.test_tar import files_of, pairs
from tests.support.stores import refused

from penstock import Loader
from penstock.blobs.blobs import Blob, open_blobs
from penstock.blobs.file import BlobFile, buffered
from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, StoreDataset, open_store
from penstock.stores.records import decode_record, encode_record
from penstock.testing.stores import StoreReaderContract


def tar_of(files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def shards(bucket):
    put(bucket, {f"shard-{number}.tar": tar_of(pairs(10 * number)) for number in range(3)})
    return bucket


class TestTarObjects(InBucket, StoreReaderContract):
    kind = "tar"
    suffix = ""
    has_class_names = False

    def fill(self, address, records, class_names=(), metadata=None):
        for number, part in enumerate((records[:17], records[17:])):
            put(self.bucket, {f"{number}.tar": tar_of(files_of(part))})


@pytest.mark.parametrize("pattern", ["{}/shard-{{0..2}}.tar", "{}", "{}/shard-{{0,1,2}}.tar"])
def test_any_sample_is_read_by_one_range_and_the_index_is_made_once(
    shards,
    pattern,
    object_server,
):
    address = "tar:" + pattern.format(shards)
    for is_new in (True, False):
        object_server.requests.clear()
        with open_store(address) as store:
            assert list(store.keys) == [f"{number:06}" for number in range(30)]
            assert store.labels.tolist() == [number % 3 for number in range(30)]
            assert store.index.are_pairs
            written = [path for method, path, _ in object_server.requests if method == "PUT"]
            assert len(written) == 3 * is_new
            ranges = [asked for asked in object_server.ranges if asked]
            assert len(ranges) == 3 * is_new  # a shard of less than 8 MiB is one piece
            object_server.requests.clear()
            found = store.get_many([29, 3, 13])
            assert [r.sample for r in found] == [
                (EncodedImage(b"image %d" % number * number), number % 3) for number in (29, 3, 13)
            ]
            assert len(object_server.requests) == 3
            with pickle.loads(pickle.dumps(store)) as copy:
                assert copy.get_many([5])[0].sample == (EncodedImage(b"image 5" * 5), 2)


def test_a_loader_reads_them_in_any_order(bucket):
    for start in (0, 10):
        put(bucket, {f"{start}.tar": tar_of({f"{start + n}.txt": b"%d" % n for n in range(10)})})
    dataset = StoreDataset(f"tar:{bucket}")
    loader = Loader(
        dataset, 4, shuffle=True, num_workers=1, collate_fn=list, multiprocessing_context="fork"
    )
    texts = [sample["txt"] for batch in loader for sample in batch]
    assert sorted(texts) == sorted(2 * list("0123456789"))


def test_other_samples_are_those_of_a_tar_file_on_this_machine(shards, tmp_path):
    array = io.BytesIO()
    np.save(array, np.arange(6.0).reshape(2, 3))
    files = {
        "dir.1/100% a ü.b.JPG": b"photo",
        "dir.1/100% a ü.json": b'{"boxes": [1, 2]}',
        "dir.1/100% a ü.txt": "grüß".encode(),
        "dir.1/100% a ü.npy": array.getvalue(),
        "dir.1/100% a ü.cls": b"-1",
        "README": b"no sample",
        "c%20.jpg": b"alone",
    }
    name = "train 50% ü %2F.tar"
    (tmp_path / name).write_bytes(tar_of(files))
    put(shards, {name: tar_of(files)})
    for _ in range(2):  # of its headers, and of its index
        with (
            open_store(f"tar:{tmp_path}/{name}") as here,
            open_store(f"tar:{shards}/{name}") as there,
        ):
            assert list(here.keys) == list(there.keys) == ["dir.1/100% a ü", "c%20"]
            assert [row.tolist() for row in there.labels] == [[-1], []]
            for one, other in zip(here.scan(), there.scan(), strict=True):
                assert encode_record("", one.sample).data == encode_record("", other.sample).data


def test_where_shards_share_a_name_all_keys_get_their_shard_in_front(bucket):
    put(bucket, {"x/a/0.tar": tar_of({"1.txt": b"a"}), "x/b/0.tar": tar_of({"1.txt": b"b"})})
    with open_store(f"tar:{bucket}/x/{{a,b}}/0.tar") as store:
        assert list(store.keys) == ["a/0/1", "b/0/1"]
        assert store.get(["b/0/1"])[0].sample == {"txt": b"b".decode()}


def test_a_shard_that_was_replaced_has_its_headers_read_anew(shards, object_server):
    with open_store(f"tar:{shards}/shard-0.tar") as before:
        assert len(before) == 10
        other = {name: data[::-1] for name, data in pairs(0).items() if name.endswith("jpg")}
        put(shards, {"shard-0.tar": tar_of(other)})
        with pytest.raises(StoreError, match=r"'shard-0\.tar' in .* replaced in the meantime"):
            before.get_many([1])
    with open_store(f"tar:{shards}/shard-0.tar") as store:
        assert store.labels is None
        assert store.get_many([1])[0].sample == {"jpg": EncodedImage(b"1 egami")}


def test_files_that_are_apart_cannot_be_read_by_one_range(bucket):
    put(bucket, {"a.tar": tar_of({"1.jpg": b"a", "2.jpg": b"b", "1.cls": b"1", "2.cls": b"2"})})
    refused(open_store(f"tar:{bucket}/a.tar"), r"sample '1' in 'a\.tar' .* `tar --sort=name`")


@pytest.mark.parametrize("is_record", [True, False])
def test_an_object_of_another_kind_that_has_the_name_of_the_index(
    bucket,
    object_server,
    is_record,
):
    """One that is no record is left alone, and the user hears of it; a bad index is made anew."""
    tree = {"version": 1, "names": [3], "counts": np.zeros(1), "files": [], "classes": None}
    data = encode_record("a.tar", tree).data if is_record else b"who knows what"
    put(bucket, {"a.tar": tar_of(pairs(0)), "a.tar.index": data})
    warned = contextlib.nullcontext() if is_record else pytest.warns(match="index cannot be kept")
    with open_store(f"tar:{bucket}/a.tar") as store, warned:
        assert len(store) == 10
    name = f"{bucket.removeprefix('s3://')}/a.tar.index"
    assert (object_server.contents[name] == data) != is_record


@pytest.mark.parametrize(
    "change",
    [
        {"counts": np.ones(11, np.int64)},
        {"counts": np.array([0, 20], np.int64)},
        {"files": np.full(60, 1 << 40)},
        {"files": np.full(60, -1)},
        {"files": np.zeros(3, np.int64)},
        {"files": np.zeros(60)},
        {"extension_names": []},
        {"classes": np.zeros(3, np.int64)},
        {"version": "another"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_index_that_does_not_fit_is_made_anew(bucket, object_server, change):
    put(bucket, {"a.tar": tar_of(pairs(0))})
    with open_store(f"tar:{bucket}/a.tar") as store:
        facts = list(store.keys), store.labels.tolist()
    name = f"{bucket.removeprefix('s3://')}/a.tar.index"
    good = object_server.contents[name]
    tree = decode_record(good).sample
    object_server.contents[name] = encode_record("a.tar", tree | change).data
    with open_store(f"tar:{bucket}/a.tar") as store:
        assert (list(store.keys), store.labels.tolist()) == facts
        assert store.get_many([3])[0].sample == (EncodedImage(b"image 3" * 3), 0)
    assert object_server.contents[name] == good


def test_a_place_that_cannot_be_written_to_says_so_once(shards, object_server):
    # Of the requests of one shard the third writes: HEAD, GET of the index, GET of the shard.
    object_server.faults = ["", "", "", "403"]
    with open_store(f"tar:{shards}/shard-0.tar") as store:
        with pytest.warns(match=r"headers of 1 shard.* refuses 'shard-0\.tar\.index' \(403"):
            assert len(store) == 10
        assert store.get_many([3])[0].sample == (EncodedImage(b"image 3" * 3), 0)


def test_shards_on_a_web_server(website, object_server):
    for number in range(2):
        object_server.contents[f"data/{number}.tar"] = tar_of(pairs(10 * number))
    with open_store(f"tar:{website}/{{0..1}}.tar") as store:
        assert store.labels.tolist() == [number % 3 for number in range(20)]
        assert store.get_many([13])[0].sample == (EncodedImage(b"image 13" * 13), 1)
    assert {method for method, *_ in object_server.requests} == {"HEAD", "GET"}
    refused(open_store(f"tar:{website}"), r"no lists: name its files, as tar:http", ConfigError)


def test_what_is_not_there_is_named(shards):
    refused(open_store(f"tar:{shards}/shard-{{0..3}}.tar"), r"no object 'shard-3\.tar' in s3://")
    refused(open_store(f"tar:{shards}/none"), r"none has no object .* ends in \.tar")
    put(shards, {"z.tar": b"no tar file, but a text" * 100})
    refused(open_store(f"tar:{shards}"), r"s3://.*/z\.tar is truncated or damaged: it is no tar")
    with pytest.raises(ConfigError, match="max_file_size"):
        open_store(f"tar:{shards}", max_file_size=0)


def test_a_sample_larger_than_the_limit_is_not_read(shards, object_server):
    with open_store(f"tar:{shards}/shard-1.tar", max_file_size=1000) as store:
        assert len(store) == 10
        object_server.requests.clear()
        with pytest.raises(StoreError, match=r"of 'shard-1\.tar' in .* raise max_file_size"):
            store.get_many([9])
        assert object_server.requests == []
        store.max_file_size = 2000
        assert store.get_many([9])[0].label == 1


def test_an_object_as_a_file_reads_large_pieces_and_skips_what_is_not_wanted(tmp_path):
    data = bytes(range(256)) * (100 << 10)  # 25 MiB
    (tmp_path / "a").write_bytes(data)
    asked = []
    with open_blobs(str(tmp_path)) as blobs:
        read = blobs.read
        blobs.read = lambda ranges: asked.extend(ranges) or read(ranges)
        with buffered(blobs, blobs.stat("a")) as file:
            assert file.read(3) == data[:3]
            file.seek(5)
            assert file.read(300) == data[5:305]
            file.seek(20 << 20)
            assert file.read(1 << 20) == data[20 << 20 : 21 << 20]
            file.seek(-2, 2)
            assert (file.read(10), file.read(10)) == (data[-2:], b"")
        assert sum(stop - start for _, start, stop, _ in asked) < 14 << 20
        assert len(asked) <= 3
        raw = BlobFile(blobs, Blob("a", 10, ""))
        assert (raw.size(), raw.seek(-1), raw.read(), raw.tell()) == (10, 0, data[:10], 10)
