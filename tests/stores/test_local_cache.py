# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Batches of far stores of each kind, by way of the cache of this machine."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from tests.blobs.object_storage import bucket, object_server, put  # noqa: F401 - fixtures
from tests.stores.test_mds import files_of, shard_of
from tests.stores.test_tar_objects import tar_of

from penstock import Loader
from penstock.errors import ConfigError
from penstock.stores import EncodedImage, StoreDataset, create_store, open_store
from penstock.stores.records import encode_record

NUM = 40


def images():
    rng = np.random.default_rng(0)
    return [rng.bytes(int(size)) for size in rng.integers(66_000, 80_000, NUM)]


def fill_shards(place):
    with contextlib.closing(create_store(place, shard_size=1_000_000)) as writer:
        for k, image in enumerate(images()):
            writer.put_many([encode_record(str(k), (EncodedImage(image), k % 3), k % 3)])
        writer.finish()


def fill_tar(place):
    for part in range(2):
        files = {}
        for k, image in list(enumerate(images()))[20 * part : 20 * part + 20]:
            files |= {f"{k:03}.jpg": image, f"{k:03}.cls": b"%d" % (k % 3)}
        put(place, {f"{part}.tar": tar_of(files)})


def fill_folder(place):
    put(place, {f"class {k % 3}/{k:03}.jpg": image for k, image in enumerate(images())})


def fill_mds(place):
    samples = [
        {"class": np.int64(k % 3).tobytes(), "jpg": image} for k, image in enumerate(images())
    ]
    columns = {"class": "int", "jpg": "jpeg"}
    put(place, files_of(*(shard_of(columns, part) for part in (samples[:15], samples[15:]))))


def fill_arrow(place):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from tests.stores.test_arrow_objects import parquet_of

    table = pa.table({"image": images(), "label": [k % 3 for k in range(NUM)]})
    put(place, {"a.parquet": parquet_of(table[:25], 3), "b.parquet": parquet_of(table[25:], 3)})


FILL = {
    "shards": fill_shards, "tar": fill_tar, "folder": fill_folder, "mds": fill_mds,
    "arrow": fill_arrow,
}  # fmt: skip


@pytest.mark.parametrize("kind", FILL)
def test_a_damaged_copy_is_fetched_anew(bucket, tmp_path, object_server, kind):
    FILL[kind](bucket)
    address = bucket if kind == "shards" else f"{kind}:{bucket}"
    seen = []
    for is_damaged in (False, True):
        if is_damaged:
            for path in tmp_path.glob("cache/*/0/*"):
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
        with open_store(address, local_cache=f"{tmp_path}/cache:1GB") as store:
            object_server.requests.clear()
            seen.append(store.get_many(range(NUM)))
            num_first = len(object_server.requests)
            assert store.get_many(range(NUM)) == seen[0]
            assert len(object_server.requests) == num_first  # what came anew is kept
    assert seen[0] == seen[1]
    assert num_first > 0


@pytest.mark.parametrize(
    "text",
    ["fast:60", "fast:60XB", "fast:", ":60GB", "60GB", "ram:1GB", "ram", "s3://bucket/x:1GB"],
)
def test_a_cache_is_a_folder_with_a_size(text):
    with pytest.raises(ConfigError, match="is no folder"):
        open_store("s3://bucket/x", local_cache=text)


@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, method) for kind in FILL for method in (None, "fork")]
    + [("shards", "spawn"), ("folder", "spawn"), ("arrow", "spawn")],
)
def test_batches_are_those_without_it(bucket, tmp_path, kind, method):
    FILL[kind](bucket)
    options = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    seen = []
    for cache in ({}, {"local_cache": f"{tmp_path}/cache:2MB"}):
        address = bucket if kind == "shards" else f"{kind}:{bucket}"
        dataset = StoreDataset(address, decode=None, **cache)
        loader = Loader(dataset, 8, shuffle=True, seed=3, collate_fn=list, **options)
        seen.append([list(loader), list(loader)])
        if cache:
            traffic = dataset.traffic
            assert traffic.num_read > 0
            assert traffic.num_requests > 0
            assert 0 < traffic.num_found <= traffic.num_read
            assert sum(file.stat().st_size for file in tmp_path.glob("cache/*/*/*")) > 1_500_000
        dataset.close()
    assert seen[0] == seen[1]
    for epoch in seen[0]:
        assert sorted(image for batch in epoch for image, _ in batch) == sorted(images())
