# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor --storage` asks as a loader does, says what comes, and only reads."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from tests.blobs.object_storage import bucket, object_server, website  # noqa: F401 - fixtures

pytest.importorskip("typer")
pytest.importorskip("obstore")

from penstock.blobs.blobs import Blob, ByteRange
from penstock.blobs.requests import GAP_BYTES, plan_requests
from penstock.cli import main, storage
from penstock.cli.storage import StoragePlan, StorageRate, _advice, _far_ones, _rate_of, _spread
from penstock.stores import create_store
from penstock.stores.records import encode_record

NUM = 80


@pytest.fixture(autouse=True)
def _little(monkeypatch):
    monkeypatch.setattr(storage, "_STEP_S", 1000.0)  # bytes alone end a step
    monkeypatch.setattr(storage, "_STEP_BYTES", 1)
    monkeypatch.setattr(storage, "_NUM_SMALL", 3)


@pytest.fixture
def photos(bucket):  # noqa: F811
    rng = np.random.default_rng(0)
    with contextlib.closing(create_store(bucket, shard_size=1_000_000)) as writer:
        for number in range(NUM):
            writer.put_many([encode_record(str(number), (rng.bytes(70_000), number), 0)])
        writer.finish()
    return bucket


def measured(capsys, address):
    """Return the rows that the command gives, by name: mark, text, and what to do."""
    assert main(["doctor", "--storage", address, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["findings"]
    assert {row["topic"] for row in rows} == {"storage"}
    return {row["name"]: (row["status"], row["found"], row["remedy"]) for row in rows}


def test_a_store_is_measured_by_its_records_and_only_read(photos, object_server, capsys):  # noqa: F811
    object_server.requests.clear()
    rows = measured(capsys, f"shards:{photos}")
    assert rows["place"][1].startswith(f"{photos}: {NUM} records in shards, 5.6 MB; the index of ")
    assert rows["ranges"] == ("ok", "served", "")
    assert rows["32 at once"][1].endswith(" requests a second")
    assert rows["64 at once"][1].startswith("not measured: what lies there is enough for ")
    status, found, remedy = rows["a loader"]
    assert (status, "samples of 70.1 kB a second" in found) == ("advice", True)
    assert "local_cache=" in remedy
    asked = [(method, path) for method, path, _ in object_server.requests]
    assert {method for method, _ in asked} == {"GET", "HEAD"}
    assert all(path.startswith(f"{photos.removeprefix('s3://')}/") for _, path in asked)


def test_objects_of_a_bucket_are_found_and_one_is_enough(bucket, object_server, capsys):  # noqa: F811
    place = bucket.removeprefix("s3://")
    object_server.contents[f"{place}/a/large"] = bytes(9_000_000)
    object_server.contents[f"{place}/a/small"] = b"little"
    object_server.contents[f"{place}/a/empty"] = b""
    rows = measured(capsys, f"{bucket}/a")
    assert rows["place"][1] == f"{bucket}/a: 2 objects, the largest of 9.0 MB"
    assert "ranges of 100 kB a second" in rows["a loader"][1]
    assert measured(capsys, f"{bucket}/a/small")["place"][1].endswith(
        ": 1 object, the largest of 6 bytes"
    )


def test_an_object_of_a_web_server_is_measured(website, capsys):  # noqa: F811
    rows = measured(capsys, f"{website}/a")
    assert rows["place"][1] == f"{website}/a: 1 object, the largest of 10.0 kB"


@pytest.mark.parametrize(
    ("place", "fault", "says"),
    [
        ("a", "whole", "it serves no ranges. Copy the data"),
        ("a", "403", "refuses 'index' (403 Forbidden"),
        ("none", "", "there is nothing at "),
    ],
)
def test_what_a_server_says_is_told(website, object_server, capsys, place, fault, says):  # noqa: F811
    object_server.faults = [fault] * 99
    if fault == "403":
        says = "the server refuses 'index' in "
    assert main(["doctor", "--storage", f"{website}/{place}"]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert says in written.err


def test_wrong_buckets_keys_and_addresses_are_told(bucket, monkeypatch, capsys):  # noqa: F811
    for address, says in (
        ("s3://no/photos", "there is no such bucket: s3://no/photos (404 Not Found, NoSuch"),
        (bucket, f"there is nothing at {bucket}: "),
        ("mongodb://ada:hunter2@h/lab", "--storage takes an address as s3://BUCKET/PREFIX"),
    ):  # fmt: skip
        assert main(["doctor", "--storage", address]) == 1
        err = capsys.readouterr().err
        assert says in err
        assert "hunter2" not in err
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert main(["doctor", "--storage", bucket]) == 1
    assert "refuses 'index' (403 Forbidden). Credentials are taken from the environment: " in (
        capsys.readouterr().err
    )


def test_each_range_is_a_request_of_its_own():
    records = [ByteRange(name, at, at + 3000) for name in "ab" for at in range(0, 900_000, 3000)]
    blob = Blob("c", 5_000_001, "")
    for ranges in (records, list(_spread(blob, 100_000))):
        far = _far_ones(ranges)
        assert len(far) > 10
        assert len(plan_requests(far)[0]) == len(far)
        assert set(far) <= set(ranges)
    assert _far_ones([ByteRange("a", 7, 9_000_007)]) == [ByteRange("a", 7, 1_000_007)]
    assert sum(one.stop - one.start for one in _spread(Blob("d", 8, ""), 100_000)) == 8
    assert [one.start for one in _spread(Blob("d", 2 * GAP_BYTES + 21, ""), 10)] == [
        0, GAP_BYTES + 11
    ]  # fmt: skip


def test_what_would_take_minutes_is_left_out():
    ranges = [ByteRange("a", k << 20, (k << 20) + 100_000) for k in range(64)]
    said = _rate_of(None, ranges, 64, [StorageRate(1, 1000.0, 0.01)])
    assert said == "not measured: 6.4 MB would take long"


@pytest.mark.parametrize(
    ("last", "begins"), [(48e6, "A worker asks for "), (11e6, "More at once would bring little")]
)
def test_the_advice_is_by_what_more_requests_brought(last, begins):
    rates = [StorageRate(32, 10e6, 100.0), StorageRate(64, last, last / 1e5)]
    finding = _advice(rates, StoragePlan(None, "", "sample", 100_000, []))
    assert finding.found.endswith(
        f"0 MB/s with 64 requests at once: {last / 1e5:.0f} samples of 100 kB a second"
    )
    assert finding.remedy.startswith(begins)
