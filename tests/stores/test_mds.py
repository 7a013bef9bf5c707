# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Shards of MosaicML Streaming, in a folder and in a bucket."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal

import numpy as np
import pytest
from tests.blobs.object_storage import InBucket, bucket, object_server, put, website  # noqa: F401 - fixtures
from tests.support.stores import Program, refused

from penstock.errors import ConfigError, StoreError
from penstock.stores import EncodedImage, open_store
from penstock.stores.mds import LABELS_NAME
from penstock.stores.records import decode_record, encode_record
from penstock.testing.stores import StoreReaderContract

SIZES = {"int": 8, "uint8": 1, "int16": 2, "int64": 8, "uint64": 8, "float16": 2, "float64": 8}


def shard_of(columns, samples, sizes=None):
    """Return a shard as MDSWriter writes it; columns are name: encoding, values are encoded."""
    columns = dict(sorted(columns.items()))
    sizes = [SIZES.get(e) if sizes is None else sizes.get(n) for n, e in columns.items()]
    said = {
        "column_names": list(columns),
        "column_encodings": list(columns.values()),
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    config = json.dumps(said, sort_keys=True).encode()
    packed = []
    for sample in samples:
        values = [sample[name] for name in columns]
        lengths = [len(v) for v, size in zip(values, sizes, strict=True) if size is None]
        packed.append(np.array(lengths, "<u4").tobytes() + b"".join(values))
    ends = np.cumsum([8 + 4 * len(packed) + len(config), *map(len, packed)])
    head = np.array([len(packed), *ends], "<u4").tobytes()
    return said | {"samples": len(packed)}, head + config + b"".join(packed)


def files_of(*shards, folder=""):
    """Return the files of a data set."""
    files, said = {}, []
    for number, (facts, data) in enumerate(shards):
        name = f"{folder}shard.{number:05}.mds"
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        said.append({**facts, "raw_data": raw, "zip_data": None})
        files[name] = data
    return files | {"index.json": json.dumps({"version": 2, "shards": said}).encode()}


def pairs(start, count=10, names=("class", "jpg"), kind="int"):
    """Return a shard of images with a class."""
    samples = [
        {
            names[0]: np.int64(number % 3).tobytes()[: SIZES[kind]],
            names[1]: b"image %d" % number * number,
        }
        for number in range(start, start + count)
    ]
    return shard_of({names[0]: kind, names[1]: "jpeg"}, samples)


class TestMDS(StoreReaderContract):
    has_class_names = False

    def records(self, count=30):
        samples = [decode_record(record.data).sample for record in super().records(count)]
        return [encode_record(str(n), pair, pair[1]) for n, pair in enumerate(samples)]

    def place(self, tmp_path):
        return f"mds:{tmp_path}"

    def fill(self, address, records, class_names=(), metadata=None):
        samples = [decode_record(record.data).sample for record in records]
        rows = [{"y": np.int64(y).tobytes(), "x": x.data} for x, y in samples]
        columns = {"x": "png", "y": "int"}
        parts = [shard_of(columns, rows[:17]), shard_of(columns, rows[17:])]
        put(address.removeprefix("mds:"), files_of(*parts))


class TestMDSObjects(InBucket, TestMDS):
    kind = "mds"


@pytest.mark.parametrize("names", [("class", "jpg"), ("y", "x")])
@pytest.mark.parametrize("kind", ["int", "uint8", "int16", "int64"])
def test_an_image_and_a_class_are_a_pair(tmp_path, names, kind):
    shards = [pairs(start, names=names, kind=kind) for start in (0, 10)]
    put(tmp_path, files_of(*shards, shard_of({names[0]: kind, names[1]: "jpeg"}, [])))
    with open_store(f"mds:{tmp_path}") as store:
        assert store.labels.tolist() == [number % 3 for number in range(20)]
        assert store.index.are_pairs
        assert [r.sample for r in store.get_many([13, 2])] == [
            (EncodedImage(b"image 13" * 13), 1),
            (EncodedImage(b"image 2" * 2), 2),
        ]
    with open_store(f"mds:{tmp_path}", labels=False) as store:
        assert store.labels is None
        sample = store.get_many([2])[0].sample
        assert sample == {names[0]: 2, names[1]: EncodedImage(b"image 2" * 2)}


def test_classes_in_a_bucket_are_read_once(bucket, object_server):
    put(bucket, files_of(pairs(0), pairs(10)))
    counts = []
    for options in ({}, {}, {"labels": False}):
        object_server.requests.clear()
        with open_store(f"mds:{bucket}", **options) as store:
            assert len(store) == 20
            counts.append(len(object_server.requests))
            object_server.requests.clear()
            store.get_many([3, 17])
            assert len(object_server.requests) == 2
    # Index, and size and table of each shard; the kept labels, two shards of near ones, a write.
    assert counts == [5 + 4, 5 + 1, 5]
    put(bucket, files_of(pairs(1), pairs(11)))
    with open_store(f"mds:{bucket}") as store:
        assert store.labels.tolist() == [number % 3 for number in range(1, 21)]


@pytest.mark.parametrize("tree", [None, {"digest": 3}, {"labels": 3}, {"labels": np.zeros(3, int)}])
def test_kept_classes_that_do_not_fit_are_read_anew(bucket, object_server, tree):
    put(bucket, files_of(pairs(0)))
    with open_store(f"mds:{bucket}") as store:
        labels = store.labels.tolist()
    name = f"{bucket.removeprefix('s3://')}/{LABELS_NAME}"
    good = object_server.contents[name]
    whole = decode_record(good).sample
    object_server.contents[name] = (
        b"..." if tree is None else encode_record(LABELS_NAME, whole | tree).data
    )
    with open_store(f"mds:{bucket}") as store:
        assert store.labels.tolist() == labels
    assert object_server.contents[name] == good


def test_classes_that_cannot_be_kept_are_a_warning(bucket, website, object_server):
    put(bucket, files_of(pairs(0)))
    object_server.faults = [*5 * [""], "403"]
    with (
        open_store(f"mds:{bucket}") as store,
        pytest.warns(match=r"labels of .* are read whenever it is opened: .* \(403"),
    ):
        assert len(store) == 10
    for name, data in files_of(pairs(0)).items():
        object_server.contents[f"data/{name}"] = data
    object_server.requests.clear()
    with open_store(f"mds:{website}") as store:
        assert store.labels.tolist() == [number % 3 for number in range(10)]
    assert {method for method, *_ in object_server.requests} == {"GET", "HEAD"}


ARRAY = np.arange(6, dtype=np.int16).reshape(2, 3)
SCALAR = np.float64(0.25)


@pytest.mark.parametrize(
    ("encoding", "data", "value"),
    [
        ("bytes", b"\0\1", b"\0\1"),
        ("str", "grüß".encode(), "grüß"),
        ("str", b"", ""),
        ("int", np.int64(-3).tobytes(), -3),
        ("uint64", np.uint64(2**64 - 1).tobytes(), np.uint64(2**64 - 1)),
        ("float16", np.float16(0.5).tobytes(), np.float16(0.5)),
        ("float64", SCALAR.tobytes(), SCALAR),
        ("str_int", b"123456789012345678901234567890", 123456789012345678901234567890),
        ("str_float", b"0.1", 0.1),
        ("str_decimal", b"1.50", Decimal("1.50")),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("ndarray:int16:2,3", ARRAY.tobytes(), ARRAY),
        ("ndarray:int16", bytes([2 << 2, 2, 3]) + ARRAY.tobytes(), ARRAY),
        ("ndarray", bytes([17, 2 << 2 | 1, 2, 0, 3, 0]) + ARRAY.tobytes(), ARRAY),
        ("png", b"photo", EncodedImage(b"photo")),
        (
            "list[jpeg]",
            np.array([0, 2, 1, 2], "<u4").tobytes() + b"abb",
            [EncodedImage(b"a"), EncodedImage(b"bb")],
        ),
        ("jpeg_array", np.array([1, 3], "<u4").tobytes() + b"abc", [EncodedImage(b"abc")]),
        (
            "pil",
            np.array([3, 2, 1], "<u4").tobytes() + b"L" + bytes(range(6)),
            np.arange(6, dtype=np.uint8).reshape(2, 3),
        ),
        (
            "pil",
            np.array([1, 2, 3], "<u4").tobytes() + b"RGB" + bytes(range(6)),
            np.arange(6, dtype=np.uint8).reshape(2, 1, 3),
        ),
    ],
    ids=str,
)
def test_each_encoding_gives_its_value(tmp_path, encoding, data, value):
    sizes = {"a": SIZES.get(encoding, 12 if encoding.count(":") == 2 else None)}
    columns, row = {"a": encoding, "%20 ü": "str"}, {"a": data, "%20 ü": b"other"}
    put(tmp_path, files_of(shard_of(columns, [row], sizes)))
    with open_store(f"mds:{tmp_path}") as store:
        assert (store.labels, store.keys[0]) == (None, "0")
        sample = store.get_many([0])[0].sample
        assert list(sample) == ["%20 ü", "a"]
        assert sample["%20 ü"] == "other"
        found = sample["a"]
        assert type(found) is type(value)
        assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value
        assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
        if isinstance(value, np.ndarray):
            assert found.flags.writeable


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("str", b"\xff"),
        ("str_int", b"x"),
        ("json", b"["),
        ("json", b"[" * 200_000),
        ("ndarray", b""),
        ("ndarray", bytes([99, 1 << 2, 1, 1])),
        ("ndarray", bytes([17, 2 << 2, 2, 9]) + ARRAY.tobytes()),
        ("ndarray:object", bytes([1 << 2, 1]) + bytes(8)),
        ("ndarray:int16", bytes([1 << 2 | 3]) + bytes(7) + b"\xff"),
        ("list[png]", np.array([0, 2**32 - 1], "<u4").tobytes()),
        ("jpegarray", np.array([1, 3], "<u4").tobytes() + b"ab"),
        ("pil", np.array([1, 2, 4], "<u4").tobytes() + b"CMYK" + bytes(8)),
        ("pil", np.array([9, 2, 1], "<u4").tobytes() + b"L" + bytes(8)),
        ("pil", b"..."),
    ],
)
def test_a_value_that_is_damaged_names_its_record(tmp_path, encoding, data):
    put(tmp_path, files_of(shard_of({"a": encoding}, [{"a": data}], {})))
    with (
        open_store(f"mds:{tmp_path}") as store,
        pytest.raises(
            StoreError, match=r"record 0 .'0'. of mds:.*shard\.00000\.mds.* cannot be re"
        ),
    ):
        store.get_many([0])


def test_sizes_that_do_not_fit_their_sample_are_an_error(tmp_path):
    facts, data = shard_of({"a": "str"}, [{"a": b"text"}])
    put(tmp_path, files_of((facts, data[:-8] + b"\xff\xff\xff\xff" + data[-4:])))
    with open_store(f"mds:{tmp_path}") as store, pytest.raises(StoreError, match="columns should"):
        store.get_many([0])


@pytest.mark.parametrize("encoding", ["pkl", "list[pil]", "a new one"])
def test_pickles_and_what_is_not_known_are_refused_before_anything_is_read(tmp_path, encoding):
    data = pickle.dumps(Program(str(tmp_path / "made")))
    put(tmp_path / "x", files_of(shard_of({"a": encoding}, [{"a": data}])))
    message = "pickles, .* json, ndarray" if encoding == "pkl" else "which is not known"
    refused(open_store(f"mds:{tmp_path}/x"), rf"column 'a' of mds:.*{message}")
    assert not (tmp_path / "made").exists()


def index_with(change, **whole):
    said = json.loads(files_of(pairs(0))["index.json"])
    said["shards"][0] |= change
    return json.dumps(said | whole).encode()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b'{"version": 2, "shards": []}', "damaged"),
        (index_with({}, version=1), "version 2"),
        (index_with({"format": "json"}), "format MDS"),
        (index_with({"compression": "zstd:3"}), r"compressed \(zstd:3\).* without compression="),
        (index_with({"raw_data": None}), "damaged"),
        (index_with({"samples": 0}), "damaged.*no sample"),
        (index_with({"samples": -1}), "damaged"),
        (index_with({"samples": 9}), r"'shard\.00000\.mds' in .* damaged or cut off"),
        (index_with({"samples": 1 << 40}), "cut off"),
        (index_with({"column_sizes": [8]}), "damaged"),
        (index_with({"column_sizes": [-8, None]}), "damaged"),
        (index_with({"raw_data": {"basename": "../x", "bytes": 1}}), r"damaged.*\.\./x"),
        (index_with({"raw_data": {"basename": "gone", "bytes": 1}}), "no object 'gone'"),
    ],
    ids=range(15),
)
def test_an_index_that_is_not_of_its_shards_is_an_error(tmp_path, index, message):
    put(tmp_path, files_of(pairs(0)) | {"index.json": index})
    refused(open_store(f"mds:{tmp_path}"), message)


def test_a_shard_that_is_damaged_or_cut_off_is_an_error(tmp_path):
    files = files_of(pairs(0))
    data = files["shard.00000.mds"]
    for bad in (data[:-1], data[:20], data[:4] + data[8:12] + data[4:8] + data[12:]):
        put(tmp_path, files | {"shard.00000.mds": bad})
        refused(open_store(f"mds:{tmp_path}"), r"'shard\.00000\.mds' in .*cut off")
    put(tmp_path, files_of(pairs(0), pairs(10, names=("y", "x"))))
    refused(open_store(f"mds:{tmp_path}"), "different columns")


def test_shards_in_folders_of_a_merged_index_are_found(bucket):
    put(bucket, files_of(pairs(0), pairs(10), folder="a 50% ü/"))
    with open_store(f"mds:{bucket}") as store:
        assert store.get_many([19])[0].sample == (EncodedImage(b"image 19" * 19), 1)
    refused(open_store(f"mds:{bucket}/a"), r"has no index\.json.* split")


def test_a_sample_larger_than_the_limit_is_not_read(tmp_path):
    put(tmp_path, files_of(pairs(0)))
    with open_store(f"mds:{tmp_path}", max_file_size=60) as store:
        assert store.get_many([6])[0].label == 0
        with pytest.raises(StoreError, match=r"of 'shard\.00000\.mds' in .* raise max_file_size"):
            store.get_many([9])
    with pytest.raises(ConfigError, match="max_file_size"):
        open_store(f"mds:{tmp_path}", max_file_size=0)
