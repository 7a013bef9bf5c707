# SPDX-License-Identifier: Apache-2.0
"""Places of objects: the contract in a folder and a bucket, and servers that do wrong."""

from __future__ import annotations

import os
import pickle

import psutil
import pytest
from tests.blobs.object_storage import KEY_ID, SECRET, bucket, object_server, website  # noqa: F401

from penstock.blobs.blobs import ByteRange, open_blobs
from penstock.blobs.requests import REQUEST_BYTES, parts_of, plan_requests
from penstock.errors import ConfigError, StoreError, StoreUnreachable
from penstock.redact import without_password
from penstock.stores import open_store
from penstock.testing.blobs import BlobsContract

SECRETS = KEY_ID, SECRET


class TestFolder(BlobsContract):
    def place(self, tmp_path):
        return f"{tmp_path}/objects"


class TestS3(BlobsContract):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket):  # noqa: F811
        self.bucket = bucket

    def place(self, tmp_path):
        return self.bucket


class TestGoogle(TestS3):
    def place(self, tmp_path):
        return self.bucket.replace("s3:", "gs:")


class TestAzure(TestS3):
    def place(self, tmp_path):
        return self.bucket.replace("s3:", "az:")


@pytest.fixture
def faulty(website):  # noqa: F811
    with open_blobs(website, timeout_s=5) as blobs:
        yield blobs


@pytest.mark.parametrize("fault", ["429", "503", "500", "reset", "cut"])
def test_what_goes_wrong_for_a_moment_is_asked_for_again(faulty, object_server, fault):  # noqa: F811
    object_server.faults = [fault, fault]
    whole = object_server.contents["data/a"]
    assert bytes(faulty.read([ByteRange("a", 10, 5000)])[0]) == whole[10:5000]
    if fault != "cut":  # then the library asks for the rest
        assert object_server.ranges == 3 * ["bytes=10-4999"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("403", "refuses 'a' .*403 Forbidden, Bad"),
        ("401", "refuses 'a' .*401 Unauthorized, Bad"),
        ("503", "503 Service Unavailable, Bad"),
        ("reset", "did not come within"),
        ("cut", "did not come within"),
        ("whole", "serves no ranges"),
    ],
)
def test_what_goes_wrong_again_and_again_is_said_without_a_secret(
    object_server,  # noqa: F811
    website,  # noqa: F811
    fault,
    says,
):
    object_server.faults = [fault] * 1000
    blobs = open_blobs(website, timeout_s=1)
    with pytest.raises(StoreError, match=says) as caught:
        blobs.read([ByteRange("a", 10, 5000)])
    blobs.close()
    assert website in str(caught.value)
    assert not [secret for secret in SECRETS if secret in repr(caught.getrepr(chain=True))]


def test_a_clock_that_is_off_is_not_said_to_be_missing_credentials(object_server, bucket):  # noqa: F811
    object_server.faults = ["clock"]
    with (
        open_blobs(bucket, timeout_s=5) as blobs,
        pytest.raises(StoreError, match=r"RequestTimeTooSkewed.* Set this machine's") as caught,
    ):
        blobs.read([ByteRange("a")])
    assert bucket in str(caught.value)
    assert "KEY" not in str(caught.value)


def test_another_version_in_the_middle_of_a_run_is_an_error_that_says_so(faulty, object_server):  # noqa: F811
    before = faulty.stat("a")
    object_server.etag = "2"
    with pytest.raises(StoreError, match=r"'a' .* replaced in the meantime"):
        faulty.read([ByteRange("a", 0, 9, before.version)])


def test_near_spans_are_one_request_and_long_ones_several(faulty, object_server, monkeypatch):  # noqa: F811
    ranges = [
        ByteRange("a", 900, 950),
        ByteRange("a", 0, 10),
        ByteRange("a", 5, 700),
        ByteRange("b", 1, 2),
    ]
    views = faulty.read(ranges)
    contents = object_server.contents
    assert [bytes(view) for view in views] == [
        contents[f"data/{s.name}"][s.start : s.stop] for s in ranges
    ]
    assert sorted(object_server.ranges) == ["bytes=0-949", "bytes=1-1"]


def test_the_parts_of_a_long_request_are_all_of_it():
    size = 5 * REQUEST_BYTES // 2
    (request,), _ = plan_requests([ByteRange("a", 7, 7 + size)])
    parts = parts_of(request)
    assert [part.start for part in parts] == [7, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == 7 + size
    assert max(part.stop - part.start for part in parts) <= REQUEST_BYTES


def fetchers():
    return [
        p for p in psutil.Process().children() if "penstock.blobs.fetcher" in " ".join(p.cmdline())
    ]


def test_a_fetcher_ends_while_a_forked_process_lives(faulty):
    assert len(faulty.read([ByteRange("b")])[0]) == 10
    go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go[0], 1)
        os._exit(0)
    faulty.close()
    left = fetchers()
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    for end in go:
        os.close(end)
    assert left == []


def test_a_killed_fetcher_is_started_anew_and_ends_with_its_last_user(faulty, object_server):  # noqa: F811
    assert len(faulty.read([ByteRange("b")])[0]) == 10
    (fetcher,) = fetchers()
    fetcher.kill()
    fetcher.wait()
    assert len(faulty.read([ByteRange("b")])[0]) == 10
    faulty.close()
    left = fetchers()
    assert left == []


@pytest.mark.parametrize(
    "address",
    ["s3://user:secret@bucket/x", "https://host/x?signature=secret", "s3://", "http:///x"],
)
def test_an_address_with_a_secret_or_without_a_host_is_refused(address):
    with pytest.raises(ConfigError, match="has the form") as caught:
        open_blobs(address)
    assert "secret" not in str(caught.value)


def test_credentials_are_no_options_and_in_no_pickle(bucket):  # noqa: F811
    with pytest.raises(ConfigError, match="environment"):
        open_blobs(bucket, secret_access_key="x")
    blobs = open_blobs(bucket)
    blobs.write("a", b"a")
    assert not [secret for secret in SECRETS if secret.encode() in pickle.dumps(blobs)]
    blobs.close()


@pytest.mark.parametrize(
    ("scheme", "unset", "says"),
    [
        ("s3", "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        ("gs", "GOOGLE_BEARER_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("az", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_without_credentials_the_error_names_the_bucket_and_what_to_set(
    bucket,  # noqa: F811
    monkeypatch,
    scheme,
    unset,
    says,
):
    for name in unset.split():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    monkeypatch.setenv("IDENTITY_ENDPOINT", "http://127.0.0.1:9")
    address = bucket.replace("s3", scheme)
    with (
        open_blobs(address, timeout_s=2) as blobs,
        pytest.raises(StoreError, match=rf"{address} was given no .*{says}.*anonymous=True") as one,
    ):
        blobs.list()
    assert not [secret for secret in SECRETS if secret in repr(one.getrepr(chain=True))]
    assert "_SKIP_SIGNATURE, set to true" in without_password(str(one.value))  # as commands do


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_wrong_credentials_are_refused_whatever_is_asked(bucket, object_server, scheme):  # noqa: F811
    address = bucket.replace("s3", scheme)
    with open_blobs(address, timeout_s=2) as blobs:
        for ask in (blobs.list, lambda: blobs.stat("a"), lambda: blobs.write("a", b"a")):
            object_server.faults = ["403"]
            with pytest.raises(StoreError, match=rf"{address} refuses .*403 Forbidden"):
                ask()


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_endpoint_may_be_given_in_python(bucket, object_server, monkeypatch, scheme):  # noqa: F811
    for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name)
    address = bucket.replace("s3", scheme)
    with open_blobs(address, endpoint=object_server.endpoint, timeout_s=2) as blobs:
        blobs.write("a", b"a")
        assert [blob.name for blob in blobs.list()] == ["a"]


def test_a_server_that_is_not_there_is_unreachable():
    address = "http://127.0.0.1:9/data"
    with open_blobs(address, timeout_s=1) as blobs, pytest.raises(StoreUnreachable, match=address):
        blobs.stat("a")


def test_an_endpoint_that_is_not_there_is_named(bucket, monkeypatch):  # noqa: F811
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    says = r"no connection to http://127\.0\.0\.1:9\."
    with open_blobs(bucket, timeout_s=1) as blobs, pytest.raises(StoreUnreachable, match=says):
        blobs.stat("a")


def test_what_a_web_server_and_a_wrong_bucket_do_not_have_is_told(website, bucket):  # noqa: F811
    with open_blobs(website) as blobs:
        with pytest.raises(StoreError, match="a web server, which lists no objects: name them"):
            blobs.list()
        with pytest.raises(StoreError, match="a web server, and cannot be written to"):
            blobs.write("a", b"")
    with open_blobs("s3://bukcet/x") as blobs, pytest.raises(StoreError, match="no such bucket"):
        blobs.read([ByteRange("a")])
    with pytest.raises(ConfigError, match="lmdb is read on this machine alone"):
        open_store(f"lmdb:{bucket}")


def test_files_that_are_being_written_are_no_objects(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / ".1-2.partial").write_bytes(b"b")
    assert [blob.name for blob in open_blobs(os.fspath(tmp_path)).list()] == ["a"]
