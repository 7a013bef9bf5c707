# SPDX-License-Identifier: Apache-2.0
"""Stores of shards, in a folder and in a bucket."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from tests.blobs.object_storage import bucket, object_server  # noqa: F401 - fixtures

from penstock import Loader
from penstock.blobs.blobs import ByteRange, open_blobs
from penstock.cli import main
from penstock.errors import StoreError
from penstock.stores import StoreDataset, create_store, open_store, pack
from penstock.stores.records import EncodedImage, encode_record
from penstock.stores.shards.store import read_index
from penstock.testing.stores import StoreContract


class TestFolder(StoreContract):
    def place(self, tmp_path):
        return f"shards:{tmp_path}/store"

    def blobs(self, address):
        return open_blobs(address.removeprefix("shards:"))

    def ranges(self, blobs):
        found = read_index(blobs, blobs.address)
        ranges = found.shards.ranges().at(np.arange(len(found.index)))
        return dict(zip(found.index.keys, ranges, strict=True))

    def raw(self, address):
        with self.blobs(address) as blobs:
            ranges = self.ranges(blobs)
            views = blobs.read(list(ranges.values()))
            return dict(zip(ranges, map(bytes, views), strict=True))

    def damage(self, address, key, data):
        with self.blobs(address) as blobs:
            one = self.ranges(blobs)[key]
            (whole,) = blobs.read([ByteRange(one.name)])
            size = one.stop - one.start
            parts = whole[: one.start], (data + bytes(size))[:size], whole[one.stop :]
            blobs.write(one.name, b"".join(parts))

    def remove(self, address, key):
        self.damage(address, key, b"")


class TestS3(TestFolder):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket):  # noqa: F811
        self.bucket = bucket

    def place(self, tmp_path):
        return f"shards:{self.bucket}"

    test_a_second_writer_is_refused_while_the_first_is_at_it = None  # nothing keeps it off


def numbers(start, stop):
    return [(np.full(50, number, np.int32), number % 3) for number in range(start, stop)]


def samples_of(address):
    with open_store(address) as store:
        return [int(record.sample[0][0]) for record in store.scan()]


@pytest.fixture(params=["folder", "bucket"])
def address(request, tmp_path, object_server):  # noqa: F811
    if request.param == "folder":
        return f"shards:{tmp_path}/store"
    return request.getfixturevalue("bucket")


def names_in(address):
    with open_blobs(address.removeprefix("shards:")) as blobs:
        return {blob.name for blob in blobs.list()}


def test_records_are_appended_and_who_has_the_store_open_keeps_his(address):
    pack(numbers(0, 40), address, shard_size=2000)
    with open_store(address) as before:
        assert len(before) == 40
        first = names_in(address)
        pack(numbers(40, 100), address, append=True, shard_size=2000)
        assert names_in(address) > first
        assert [int(record.sample[0][0]) for record in before.scan()] == list(range(40))
    assert samples_of(address) == list(range(100))
    with open_store(address) as store:
        assert store.labels.tolist() == [number % 3 for number in range(100)]
        assert len(set(store.keys)) == 100
        assert store.fingerprint != before.fingerprint


def test_an_interrupted_append_goes_on_and_the_store_is_the_old_one_until_then(address):
    pack(numbers(0, 40), address, shard_size=2000)

    class Breaks(list):
        def __getitem__(self, index):
            if index == 45 and armed:
                raise LookupError("on purpose")
            return super().__getitem__(index)

    armed = True
    source, options = Breaks(numbers(40, 100)), {"append": True, "shard_size": 2000}
    with pytest.raises(LookupError):
        pack(source, address, num_workers=0, **options)
    assert samples_of(address) == list(range(40))
    armed = False
    report = pack(source, address, num_workers=0, resume=True, **options)
    assert 0 < report.num_resumed < 60
    assert samples_of(address) == list(range(100))


def test_other_classes_and_a_key_that_is_there_are_not_appended(tmp_path):
    address = f"shards:{tmp_path}/store"
    record = encode_record("1", 1)
    with contextlib.closing(create_store(address, class_names=["a", "b"])) as writer:
        writer.put_many([record])
        writer.finish()
    with pytest.raises(StoreError, match=r"\['a', 'b'\].*\['b', 'a'\]"):
        create_store(address, class_names=["b", "a"], append=True)
    writer = create_store(address, class_names=["a", "b"], append=True)
    with contextlib.closing(writer), pytest.raises(StoreError, match="'1' is there twice"):
        writer.put_many([record])
    assert samples_of_one(address) == [1]


def samples_of_one(address):
    with open_store(address) as store:
        return [record.sample for record in store.scan()]


def test_a_store_that_is_replaced_leaves_no_shard_of_the_old_one(address):
    pack(numbers(0, 40), address, shard_size=2000)
    old = names_in(address)
    pack(numbers(40, 60), address, overwrite=True, shard_size=2000)
    assert samples_of(address) == list(range(40, 60))
    assert names_in(address) & old == {"index"}


def test_other_objects_of_a_prefix_stay_and_are_a_warning(bucket):  # noqa: F811
    with open_blobs(bucket) as blobs:
        blobs.write("cat/1.jpg", b"an image")
        with pytest.warns(UserWarning, match=rf"{bucket} has other objects, such as 'cat/1.jpg'"):
            pack(numbers(0, 40), bucket, shard_size=2000)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a store that is there it is known
            pack(numbers(40, 60), bucket, append=True)
            pack(numbers(0, 40), bucket, overwrite=True)
            pack(numbers(0, 40), f"{bucket}-new", shard_size=2000)
        assert bytes(blobs.read([ByteRange("cat/1.jpg")])[0]) == b"an image"


def test_other_files_of_the_folder_stay_as_they_are(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    others = "README.md", "00000.shard", "12345678-00000.shard", ".a.partial", "shards/notes.txt"
    (folder / "shards").mkdir()
    (folder / "loop").symlink_to("loop")
    for name in others:
        (folder / name).write_text(name)
    for _ in range(2):
        pack(numbers(0, 40), f"shards:{folder}", overwrite=True)
    assert [(folder / name).read_text() for name in others] == list(others)


@pytest.mark.parametrize("append", [False, True])
def test_of_two_runs_in_a_bucket_the_second_to_end_makes_no_store(bucket, append):  # noqa: F811
    records = [encode_record(str(number), number) for number in range(6)]
    if append:
        with contextlib.closing(create_store(bucket)) as writer:
            writer.put_many(records[:2])
            writer.finish()
    first = create_store(bucket, shard_size=1, append=append)
    second = create_store(bucket, append=append)
    with contextlib.closing(first), contextlib.closing(second):
        first.put_many(records[2:3])
        second.put_many(records[4:])
        second.finish()
        with pytest.raises(StoreError, match=r"are not there|another run has packed"):
            first.finish()
    assert samples_of_one(bucket) == [*([0, 1] if append else []), 4, 5]


def test_what_could_not_be_written_is_written_by_the_next_attempt(bucket, object_server):  # noqa: F811
    records = [encode_record(str(number), number) for number in range(4)]
    pack([1, 2, 3], bucket)
    with contextlib.closing(create_store(bucket, timeout_s=0.5)) as writer:
        writer.put_many(records)
        object_server.faults = ["403"]
        with pytest.raises(StoreError, match="refuses"):
            writer.finish()
        assert samples_of_one(bucket) == [1, 2, 3]
        writer.finish()
    assert samples_of_one(bucket) == [0, 1, 2, 3]


def test_appending_with_resume_needs_an_interrupted_run(tmp_path):
    address = f"shards:{tmp_path}/store"
    pack(numbers(0, 3), address)
    with pytest.raises(StoreError, match="no interrupted run"):
        pack(numbers(0, 3), address, append=True, resume=True)
    assert samples_of(address) == [0, 1, 2]


def test_a_damaged_index_is_replaced_where_the_store_may_be(tmp_path):
    address = f"shards:{tmp_path}/store"
    pack(numbers(0, 3), address)
    path = tmp_path / "store" / "index"
    path.write_bytes(path.read_bytes()[:-1])
    for options in ({}, {"append": True}):
        with pytest.raises(StoreError):
            pack(numbers(0, 5), address, **options)
    pack(numbers(0, 5), address, overwrite=True)
    assert samples_of(address) == [0, 1, 2, 3, 4]


def test_an_object_of_the_index_s_name_that_is_no_index_is_not_replaced(tmp_path):
    path = tmp_path / "index"
    path.write_text("of a book")
    for overwrite in (False, True):
        with pytest.raises(StoreError):
            pack(numbers(0, 5), f"shards:{tmp_path}", overwrite=overwrite)
    assert path.read_text() == "of a book"


def test_a_store_that_was_replaced_is_read_by_the_index_that_was_read(address):
    pack(numbers(0, 40), address, shard_size=2000)
    with open_store(address) as store:
        len(store)
        pack(numbers(40, 60), address, append=True)
        assert [int(record.sample[0][0]) for record in store.scan()] == list(range(40))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_run_that_was_killed_goes_on_behind_its_last_whole_shard(tmp_path, at):
    address, folder = f"shards:{tmp_path}/store", tmp_path / "store"
    program = f"""
import os
from penstock.stores import create_store
from penstock.stores.records import EncodedImage, encode_record
writer = create_store({address!r}, what="numbers", shard_size=100)
writer.put_many([encode_record("a", bytes(100))])
writer.put_many([encode_record("b", bytes(100))])
writer.put_many([encode_record("c", b"waits")])
os._exit(1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
    shards = sorted(folder.glob("shards/*.shard"))
    if at < 2:  # as a disk that lost power may leave it
        shards[at].write_bytes(shards[at].read_bytes()[:-1])
    with contextlib.closing(create_store(address, what="numbers", resume=True)) as writer:
        assert [key for key, _ in writer.written()] == ["a", "b"][:at]
        writer.put_many([encode_record(key, key) for key in "xyz"])
        writer.finish()
    with open_store(address) as store:
        assert [record.key for record in store.scan()] == [*["a", "b"][:at], *"xyz"]


def test_an_index_that_lies_is_refused(tmp_path):
    address = f"shards:{tmp_path}/store"
    pack(numbers(0, 9), address)
    found = read_index(open_blobs(f"{tmp_path}/store"), address)
    index, good = found.index, found.shards.to_tree()
    lies = [
        {"ends": good["ends"][::-1].copy()}, {"ends": good["ends"][:-1]},
        {"ends": good["ends"] + 1}, {"ends": [0]}, {"firsts": good["firsts"] + 1},
        {"firsts": np.array([0, 99])}, {"names": []}, {"names": ["../../../etc/passwd"]},
        {"ends": np.array([0, *range(2**62, 2**62 + 9)])}, {"names": ["a\0b"]},
        {"ends": np.array([0, *range(2**40, 2**40 + 9)])},
    ]  # fmt: skip
    for lie in lies:
        tree = index.to_tree() | {"shards": good | lie}
        (tmp_path / "store" / "index").write_bytes(encode_record("index", tree).data)
        with open_store(address) as store, pytest.raises(StoreError):
            store.get_many([0])


@pytest.mark.parametrize(
    ("num_workers", "backend"), [(0, "process"), (2, "process"), (2, "thread")]
)
def test_batches_of_a_bucket_are_those_of_a_folder(bucket, tmp_path, num_workers, backend):  # noqa: F811
    options = {"backend": backend}
    if num_workers and backend == "process":  # a fork server has the environment of its start
        options["multiprocessing_context"] = "fork"
    batches = {}
    for address in (bucket, f"shards:{tmp_path}/store"):
        pack(numbers(0, 60), address, shard_size=2000)
        dataset = StoreDataset(address)
        loader = Loader(dataset, 7, shuffle=True, seed=3, num_workers=num_workers, **options)
        stream = iter(loader)
        got = [next(stream) for _ in range(3)]
        state = loader.state_dict()
        del stream
        loader.load_state_dict(state)
        batches[address] = got + list(loader)
        dataset.store.close()
    for one, other in zip(*batches.values(), strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])


def test_the_command_packs_appends_and_checks(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (40, 30), (number, 0, 0)).save(folder / f"{number}.png")
    address = f"shards:{tmp_path}/store"
    assert main(["pack", str(folder), address, "--limit", "3", "--shard-size", "1kB"]) == 0
    for number in range(3):
        (folder / f"{number}.png").unlink()
    assert main(["pack", str(folder), address, "--append"]) == 0
    assert main(["check", address]) == 0
    assert "6 records, 6 images decoded, 0 broken" in capsys.readouterr().err


@pytest.mark.usefixtures("workers_by_fork")
def test_the_python_of_the_page_runs(bucket, tmp_path, monkeypatch, capsys):  # noqa: F811
    page = Path(__file__).parents[2] / "docs" / "guide" / "object-storage.md"
    photo = EncodedImage(cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes())
    with contextlib.closing(create_store(bucket)) as writer:
        writer.put_many([encode_record(str(number), (photo, 0), 0) for number in range(16)])
        writer.finish()
    text = page.read_text().replace("s3://bucket/photos", bucket)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
        names["dataset"].close()
    assert len(names["images"]) == 8
    assert capsys.readouterr().out == f"16 <ShardStore shards:{bucket}>\n"
