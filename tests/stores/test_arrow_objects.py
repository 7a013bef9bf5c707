# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Parquet files in object storage."""

from __future__ import annotations

import base64
import io
import pickle
import threading

import numpy as np
import pytest
from tests.blobs.object_storage import InBucket, bucket, object_server, put, website  # noqa: F401 - fixtures
from tests.support.stores import refused

from penstock import Loader
from penstock.errors import ConfigError, StoreError
from penstock.sampling import ShardSampler
from penstock.stores import EncodedImage, StoreDataset, open_store

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

from tests.stores.test_arrow import COUNT, IMAGES, LABELS, TestParquet, pair_table  # noqa: E402

pytest.importorskip("obstore", reason="obstore is not installed")


def parquet_of(table, rows=7):
    data = io.BytesIO()
    pq.write_table(table, data, row_group_size=rows)
    return data.getvalue()


@pytest.fixture
def files(bucket):
    """Return a place of 3 files, each of two row groups."""
    table = pair_table()
    put(bucket, {f"{k}.parquet": parquet_of(table[10 * k : 10 * k + 10], 5) for k in range(3)})
    return bucket


class TestParquetObjects(InBucket, TestParquet):
    kind = "arrow"

    def fill(self, address, records, class_names=(), metadata=None):
        table = self.table_of(records, class_names)
        files = {"0.parquet": parquet_of(table[:17]), "1.parquet": parquet_of(table[17:])}
        put(self.bucket, files)


@pytest.mark.parametrize("pattern", ["{}", "{}/{{0..2}}.parquet"])
def test_a_row_group_is_one_request(files, pattern, object_server):
    object_server.requests.clear()
    with open_store("arrow:" + pattern.format(files)) as store:
        assert store.labels.tolist() == LABELS
        assert store.shard_lengths.tolist() == 6 * [5]
        assert str(store) == f"<ParquetObjectStore arrow:{pattern.format(files)}>"
        ranges = [asked for asked in object_server.ranges if asked]
        assert len(ranges) == 3 + 3  # a footer, and a column of classes, of each
        with pickle.loads(pickle.dumps(store)) as copy:
            object_server.requests.clear()
            order = [29, 0, 27, 13]
            found = copy.get_many(order)
            assert [r.sample for r in found] == [
                (EncodedImage(IMAGES[i]), LABELS[i]) for i in order
            ]
            assert len(object_server.requests) == 3
            assert copy.index.fingerprint == store.index.fingerprint


def test_the_row_groups_of_a_batch_are_one_round_trip(files, object_server, monkeypatch):
    with open_store(f"arrow:{files}", timeout_s=5) as store:
        assert len(store) == 30
        monkeypatch.setattr(object_server, "barrier", threading.Barrier(3, timeout=10))
        found = store.get_many([29, 0, 27, 13])  # else the first is waited for alone
        assert [r.sample[1] for r in found] == [LABELS[i] for i in (29, 0, 27, 13)]


def test_row_groups_that_are_large_together_are_several(files, object_server, monkeypatch):
    monkeypatch.setattr("penstock.stores.arrow_objects._AHEAD_BYTES", 1)
    with open_store(f"arrow:{files}") as store:
        assert len(store) == 30
        object_server.requests.clear()
        assert [r.sample[1] for r in store.get_many([*range(30)])] == LABELS
        assert len(object_server.requests) == 6  # and not 3, of two neighbours each


def test_one_file_and_a_web_server(website, object_server):
    object_server.contents["data/a.parquet"] = parquet_of(pair_table())
    with open_store(f"arrow:{website}/a.parquet") as store:
        assert store.get_many([-1])[0].sample == (EncodedImage(IMAGES[-1]), LABELS[-1])
    refused(open_store(f"arrow:{website}"), r"no lists: name its files, as arrow:http", ConfigError)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("limit", [None, "1GB", "10kB"])
def test_a_loader_reads_them_by_way_of_a_cache_as_without(
    files, tmp_path, object_server, num_workers, limit
):
    cache = {} if limit is None else {"local_cache": f"{tmp_path}/cache:{limit}"}
    context = {"multiprocessing_context": "fork"} if num_workers else {}
    seen = []
    for of_store in ({}, cache):
        dataset = StoreDataset(f"arrow:{files}", decode=None, **of_store)
        sampler = ShardSampler(dataset, open_shards=2, seed=3)
        loader = Loader(
            dataset, 4, sampler=sampler, collate_fn=list, num_workers=num_workers, **context
        )
        dataset.store.index  # noqa: B018 - is read now
        object_server.requests.clear()
        seen.append([list(loader), list(loader)])
        if limit == "1GB" and of_store:
            # Two groups that lie next to each other may be one request.
            asked = [asked for asked in object_server.ranges if asked]
            assert len(set(asked)) == len(asked) <= 6
            assert "records were there" in str(loader.stats())
        dataset.close()
    assert seen[0] == seen[1]
    for epoch in seen[0]:
        labels = [label for batch in epoch for _, label in batch]
        assert sorted(labels) == sorted(LABELS)


def test_classes_and_keys_are_read_alone(bucket, object_server):
    rng = np.random.default_rng(0)
    images = [rng.bytes(300_000) for _ in range(COUNT)]
    table = pa.table({"image": images, "label": LABELS, "name": [f"n{k}" for k in range(COUNT)]})
    put(bucket, {"a.parquet": parquet_of(table, 10)})
    object_server.requests.clear()
    with open_store(f"arrow:{bucket}", key_column="name") as store:
        assert store.labels.tolist() == LABELS
        assert store.keys[7] == "n7"
    ends = [asked.removeprefix("bytes=").split("-") for asked in object_server.ranges if asked]
    assert sum(int(last) - int(first) + 1 for first, last in ends) < 300_000
    assert len(ends) == 1 + 3 + 3  # a class and a key lie near each other, but are asked for apart


def test_what_cannot_be_read_is_an_error_that_names_it(files, bucket, object_server):
    put(bucket, {"3.parquet": parquet_of(pair_table().drop_columns(["label"]))})
    refused(open_store(f"arrow:{files}"), r"3\.parquet has other columns")
    put(bucket, {"3.parquet": b"no Parquet" * 10})
    refused(open_store(f"arrow:{files}"), r"cannot read s3://.*3\.parquet.*no Parquet file")
    put(bucket, {"3.parquet": b""})
    refused(open_store(f"arrow:{files}"), r"cannot read s3://.*3\.parquet.*no Parquet file")
    refused(open_store(f"arrow:{bucket}/none"), "no object directly in it that ends in .parquet")
    refused(open_store(f"arrow:{bucket}/none.parquet"), r"none\.parquet")
    data = bytearray(parquet_of(pair_table()))
    data[8:400] = bytes(392)
    put(bucket, {"4.parquet": bytes(data)})
    store = open_store(f"arrow:{bucket}/4.parquet", label_column=False)
    with store, pytest.raises(StoreError, match=r"4\.parquet is damaged"):
        store.get_many([0])


def test_a_file_that_changes_is_an_error(files, object_server):
    with open_store(f"arrow:{files}") as store:
        store.get_many([0])
        object_server.etag = "another"
        with pytest.raises(StoreError, match="is another object than the one that was listed"):
            store.get_many([29])


class Plain:
    """Keys that are kept as they are."""

    def wrap_key(self, key, _master):
        return base64.b64encode(key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_columns_are_an_error_and_end_no_process(bucket, tmp_path, plaintext_footer):
    encryption = pytest.importorskip("pyarrow.parquet.encryption")
    kind = type("Keys", (Plain, encryption.KmsClient), {})
    properties = encryption.CryptoFactory(lambda _: kind()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"k": ["image"]}, plaintext_footer=plaintext_footer
        ),
    )
    path = tmp_path / "a.parquet"
    table = pa.table({"image": IMAGES, "label": LABELS})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    put(bucket, {"a.parquet": path.read_bytes()})
    for address in (path, f"arrow:{bucket}"):
        refused(open_store(address), r"a\.parquet is encrypted")


def test_odd_files_are_those_of_this_machine(bucket, tmp_path):
    table = pa.table({"image": IMAGES, "label": LABELS})
    wide = pa.table({"image": IMAGES} | {f"{k}": [0.5] * COUNT for k in range(60)})
    for name, odd, rows in (
        ("empty", table[:0], 7),
        ("no columns", pa.table({}), 7),
        ("long footer", wide, 1),
    ):
        data = parquet_of(odd, rows)
        (tmp_path / f"{name}.parquet").write_bytes(data)
        put(bucket, {f"{name}.parquet": data})
        one, other = (open_store(f"arrow:{place}/{name}.parquet") for place in (tmp_path, bucket))
        with one, other:
            assert len(one) == len(other) == (COUNT if name == "long footer" else 0)
            assert other.get_many(range(len(one))) == one.get_many(range(len(one)))
    assert len(data) > 128 << 10


def test_names_of_files_that_cannot_be_are_errors(files):
    with pytest.raises(ConfigError, match="names no bucket or host"):
        open_store("arrow:s3://my.parquet")
    refused(open_store(f"arrow:{files}/{{0,0}}.parquet"), "names a file twice", ConfigError)
    refused(open_store(f"arrow:{files}/9.parquet"), r"slash at its end: .*/9\.parquet/")
