# SPDX-License-Identifier: Apache-2.0
"""LMDB stores: the contract, and what is LMDB's own."""

from __future__ import annotations

import contextlib
import gc
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import numpy as np
import psutil
import pytest
from tests.support.processes import completed, holds_in_child, python
from tests.support.stores import refused

from penstock.errors import StoreError
from penstock.stores import LMDBDataset, open_store, pack
from penstock.stores.index import Index
from penstock.stores.lmdb import environments
from penstock.stores.lmdb.store import LMDBStore, shard_name
from penstock.stores.lmdb.writer import LMDBWriter
from penstock.stores.records import EncodedImage, decode_record, encode_record
from penstock.testing.stores import StoreContract


@contextlib.contextmanager
def opened(path, *, write=False):
    """LMDB itself, without Penstock."""
    options = {"map_size": 1 << 30} if write else {"readonly": True}
    with (
        lmdb.open(str(path), subdir=False, lock=False, **options) as env,
        env.begin(write=write) as txn,
    ):
        yield txn


class LMDBContract(StoreContract):
    def files(self, address):
        raise NotImplementedError

    def places(self, address):
        """Where each record is: found once, while all can still be read."""
        if not hasattr(self, "_places"):
            self._places = {}
            for path in self.files(address):
                with opened(path) as txn:
                    for key, value in txn.cursor():
                        if len(key) == 8:
                            self._places[decode_record(value).key] = (path, key)
        return self._places

    def raw(self, address):
        found = {}
        for name, (path, key) in self.places(address).items():
            with opened(path) as txn:
                found[name] = txn.get(key)
        return found

    def damage(self, address, key, data):
        path, raw_key = self.places(address)[key]
        with opened(path, write=True) as txn:
            txn.put(raw_key, data)

    def remove(self, address, key):
        path, raw_key = self.places(address)[key]
        with opened(path, write=True) as txn:
            txn.delete(raw_key)


class TestLMDB(LMDBContract):
    def place(self, tmp_path):
        return f"lmdb:{tmp_path}/store.lmdb"

    def files(self, address):
        return [Path(address.removeprefix("lmdb:"))]

    def create(self, address, **facts):
        # Every few records are brought to disk, so that there is something to resume.
        writer = LMDBWriter(self.files(address)[0], **facts)
        writer._transaction_bytes = 1
        return writer


class TestShards(LMDBContract):
    def place(self, tmp_path):
        return f"lmdb:{tmp_path}/store.lmdb"

    def files(self, address):
        return sorted(Path(address.removeprefix("lmdb:")).iterdir())

    def create(self, address, **facts):
        # 10 in a shard: for the 30 records of most tests; others leave shards empty, or fill more.
        path = address.removeprefix("lmdb:")
        writer = LMDBWriter(path, num_shards=3, num_records=30, **facts)
        writer._transaction_bytes = 1
        return writer


def records_of(count, size=3000):
    generator = np.random.default_rng(1)
    images = [generator.integers(0, 256, size, np.uint8).tobytes() for _ in range(count)]
    return [
        encode_record(f"{i:06}", (EncodedImage(image), i % 5), i % 5)
        for i, image in enumerate(images)
    ]


def write(path, records, **options):
    writer = LMDBWriter(path, **options)
    try:
        writer.put_many(records)
        writer.finish()
    finally:
        writer.close()
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "numbers.lmdb", records_of(40))


def open_descriptors(path):
    return [file.path for file in psutil.Process().open_files()].count(str(path))


def test_making_a_dataset_leaves_no_environment_open(file):
    dataset = LMDBDataset(file, decode=None)
    assert open_descriptors(file) == 0
    _ = dataset[0]
    assert open_descriptors(file) > 0
    dataset.close()
    assert open_descriptors(file) == 0


def test_two_stores_of_one_file_share_one_environment_and_close_for_themselves(file, tmp_path):
    (tmp_path / "link.lmdb").symlink_to(file)
    one, other = LMDBStore(file), LMDBStore(tmp_path / "link.lmdb")
    one.get_many([0])
    alone = open_descriptors(file)
    other.get_many([0])
    assert open_descriptors(file) == alone
    one.close()
    assert other.get_many([1])[0].key == "000001"
    other.close()
    assert open_descriptors(file) == 0


def test_a_dropped_store_closes_its_file(file):
    store = LMDBStore(file)
    store.get_many([0])
    del store
    gc.collect()
    assert open_descriptors(file) == 0


def test_the_map_grows_as_often_as_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(LMDBWriter, "_map_bytes", 64 << 10)
    monkeypatch.setattr(LMDBWriter, "_transaction_bytes", 1 << 20)
    records = records_of(3000)
    path = write(tmp_path / "a.lmdb", records)
    assert path.stat().st_size > 100 * (64 << 10)
    with LMDBStore(path) as store:
        assert [record.sample[0] for record in store.scan()] == [
            decode_record(record.data).sample[0] for record in records
        ]


@pytest.mark.parametrize("size", [40, 1500, 30_000])
def test_a_file_is_as_compact_as_lmdbs_own_copy_and_has_no_holes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(LMDBWriter, "_transaction_bytes", 300_000)
    records = records_of(3_000_000 // max(size, 1000), size)
    path = write(tmp_path / "a.lmdb", records)
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env:
        env.copy(str(tmp_path / "compact.mdb"), compact=True)
    compact = (tmp_path / "compact.mdb").stat().st_size
    assert path.stat().st_size <= 1.01 * compact + 16 * 4096
    assert path.stat().st_blocks * 512 >= path.stat().st_size - 4096


def test_a_truncated_file_is_an_error_and_no_bus_error(file):
    size = file.stat().st_size
    for kept in (size - 1, size // 2, 8192):
        with file.open("r+b") as data:
            data.truncate(kept)
        with LMDBStore(file) as store, pytest.raises(StoreError, match="is truncated: it"):
            store.get_many(range(40))


@pytest.mark.parametrize(
    "content", [b"", b"no database", bytes(range(256)) * 80], ids=["empty", "text", "binary"]
)
def test_what_is_no_lmdb_file_is_an_error(tmp_path, content):
    path = tmp_path / "a.lmdb"
    path.write_bytes(content)
    refused(LMDBStore(path), r"a\.lmdb")
    assert path.read_bytes() == content


def test_a_file_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(StoreError, match=r"No such file.*penstock pack SRC lmdb:"):
        LMDBDataset(tmp_path / "a.lmdb")


def test_an_lmdb_file_of_somebody_else_is_no_store(tmp_path):
    with opened(tmp_path / "a.lmdb", write=True) as txn:
        txn.put(b"key", b"value")
    with pytest.raises(StoreError, match="Penstock did not write"):
        LMDBDataset(tmp_path / "a.lmdb")


def test_an_unfinished_file_says_how_it_is_finished(tmp_path):
    writer = LMDBWriter(tmp_path / "a.lmdb")
    writer.put_many(records_of(3))
    writer.close()
    with pytest.raises(StoreError, match=r"unfinished.*--resume"):
        LMDBDataset(tmp_path / "a.lmdb.partial")


def test_what_an_unfinished_file_says_of_itself_may_be_damaged(tmp_path):
    path = tmp_path / "a.lmdb"
    writer = LMDBWriter(path, what="photos of cats")
    writer.close()
    partial = tmp_path / "a.lmdb.partial"
    partial.write_bytes(partial.read_bytes().replace(b"photos of cats", b"photos \xff\xfe cats"))
    with pytest.raises(StoreError, match="another source"):
        LMDBWriter(path, what="photos of cats", resume=True)


def test_an_unfinished_file_that_was_cut_is_an_error_and_no_bus_error(tmp_path):
    script = """
    import os, sys
    from penstock.stores.lmdb.writer import LMDBWriter
    from penstock.stores.records import encode_record
    writer = LMDBWriter(sys.argv[1])
    writer.put_many([encode_record(f"{k}", bytes(3000)) for k in range(20)])
    writer.close()
    os.truncate(sys.argv[1] + ".partial", 9 * 4096)
    LMDBWriter(sys.argv[1], resume=True)
    """
    done = python("-c", script, tmp_path / "a.lmdb")
    assert done.returncode == 1, done.stderr
    assert "a.lmdb.partial is damaged: page" in done.stderr


def test_a_shard_that_was_copied_over_another_is_named(tmp_path):
    pack([b"one", b"two", b"three", b"four"], f"lmdb:{tmp_path}/s", num_shards=2)
    first, second = sorted((tmp_path / "s").glob("*.lmdb"))
    second.write_bytes(first.read_bytes())
    refused(open_store(f"lmdb:{tmp_path}/s"), r"00001-of.* has the same records as another shard")


def test_a_missing_shard_is_named(tmp_path):
    writer = LMDBWriter(tmp_path / "a", num_shards=3, num_records=30)
    writer.put_many(records_of(30))
    writer.finish()
    (tmp_path / "a" / shard_name(1, 3)).unlink()
    with pytest.raises(StoreError, match=r"00001-of-00003\.lmdb is missing"):
        LMDBDataset(tmp_path / "a")


def test_a_file_replaced_under_its_name_is_another_file(file):
    old = LMDBStore(file)
    first = old.get_many([0])[0]
    write(file, records_of(10, 500))
    with LMDBStore(file) as new:
        assert len(new) == 10
        assert new.get_many([0])[0] != first
        # Who had it open goes on with what it had.
        assert old.get_many([0, 39])[0] == first
    old.close()
    with pytest.raises(StoreError, match="is not the file that it was"):
        old.get_many([0])


def test_a_file_replaced_between_its_verification_and_its_opening_is_refused(file, monkeypatch):
    def replace(_):
        monkeypatch.undo()
        write(file, records_of(10, 500))

    monkeypatch.setattr(environments, "check_pages", replace)
    refused(LMDBStore(file), "was replaced while it was opened")


def test_a_dataset_pickled_before_its_file_was_replaced_says_so(file):
    copy = pickle.loads(pickle.dumps(LMDBDataset(file)))
    write(file, records_of(10, 500))
    with pytest.raises(StoreError, match="make the dataset again"):
        _ = copy[0]
    copy.close()


def test_a_record_is_verified_once_in_a_process_or_as_often_as_asked(file):
    with LMDBStore(file) as once, LMDBStore(file, verify="always") as always:
        for store in (once, always):
            assert store.get_many([7])[0].key == "000007"
        flip(file, 7)
        assert once.get_many([7])[0].key == "000007"
        with pytest.raises(StoreError, match=r"record 7 \('000007'\) of lmdb:.*checksum"):
            always.get_many([7])
    with LMDBStore(file) as anew, pytest.raises(StoreError, match="checksum"):
        anew.get_many([7])
    with LMDBStore(file, verify="never") as never:
        assert never.get_many([7])[0].key == "000007"


def flip(path, position):
    """Change the last byte of a record in the file itself, as a failing disk does."""
    content, record = path.read_bytes(), records_of(40)[position].data
    place = content.index(record) + len(record) - 1
    with path.open("r+b") as data:
        data.seek(place)
        data.write(bytes([content[place] ^ 1]))


def test_what_is_got_outlives_the_store_and_what_is_borrowed_is_read_only(tmp_path):
    array = np.arange(10_000)
    path = write(tmp_path / "a.lmdb", [encode_record("a", {"x": array, "b": b"y" * 9000})])
    with LMDBStore(path) as store:
        kept = store.get_many([0])[0].sample
        with store.borrow([0]) as (record,):
            assert not record.sample["x"].flags.writeable
            assert record.sample["b"].readonly
            with pytest.raises(TypeError):
                record.sample["b"][0] = 1
    assert (kept["x"] == array).all()
    assert kept["x"].flags.writeable
    assert kept["b"] == b"y" * 9000


def test_a_child_forked_while_a_thread_reads_goes_on(file):
    store = LMDBStore(file)
    is_reading, may_end = threading.Event(), threading.Event()

    def read():
        with store.borrow([0]):
            is_reading.set()
            may_end.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    is_reading.wait(60)
    assert holds_in_child(lambda: store.get_many([5])[0].key == "000005")
    may_end.set()
    thread.join()
    assert store.get_many([6])[0].key == "000006"
    store.close()


def test_a_store_closed_by_one_thread_while_another_reads_is_read_on(file):
    store = LMDBStore(file)
    stop = threading.Event()

    def read():
        num_read = 0
        while not stop.is_set() or not num_read:
            num_read += len(store.get_many(range(40)))
        return num_read

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for _ in range(300):
            store.close()
        stop.set()
        assert all(reader.result() >= 40 for reader in readers)
    assert len(store.get_many(range(40))) == 40
    store.close()


def in_a_small_disk(tmp_path, megabytes, script):
    """Run a script whose folder `sys.argv[1]` is a disk of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no permission to make a mount namespace of our own")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={megabytes}m penstock-test "$1" && exec "$0" -c "$2" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, sys.executable, str(disk), script]
    return completed(command)


FILL = """
import sys, os, numpy as np
from penstock.errors import StoreError
from penstock.stores import pack, open_store
disk = sys.argv[1]
data = [(np.full(200_000, i, np.uint8), i) for i in range(100)]
pack(data[:3], f"lmdb:{disk}/a.lmdb")
try:
    pack(data, f"lmdb:{disk}/a.lmdb", overwrite=True)
except StoreError as error:
    print(error)
with open_store(f"lmdb:{disk}/a.lmdb") as store:
    print(len(store), [int(r.sample[0][0]) for r in store.scan()])
os.remove(f"{disk}/a.lmdb.partial")
print(sorted(os.listdir(disk)))
"""


def test_a_full_disk_is_a_clear_error_and_the_old_file_survives(tmp_path):
    done = in_a_small_disk(tmp_path, 8, FILL)
    assert done.stderr == ""
    error, old, left = done.stdout.splitlines()
    assert error.startswith("no space left on the disk of ")
    assert "What was there is untouched" in error
    assert "--resume" in error
    assert old == "3 [0, 1, 2]"
    assert left == "['a.lmdb']"


def test_children_forked_while_a_thread_opens_and_closes_the_file_read_it(file):
    stop = threading.Event()

    def open_and_close():
        while not stop.is_set():
            with LMDBStore(file) as store:
                store.get_many([0])

    def reads():
        return LMDBStore(file).get_many([5])[0].key == "000005"

    with ThreadPoolExecutor(1) as pool:
        pool.submit(open_and_close)
        are_right = [holds_in_child(reads) for _ in range(60)]
        stop.set()
    assert all(are_right)


def test_what_an_error_leaves_behind_can_be_looked_at_when_the_file_is_closed(file):
    def refuse(data):
        raise ValueError("no")

    for options in ({"transform": refuse, "decode": None}, {"decode": refuse}, {}):
        dataset = LMDBDataset(file, **options)  # without options: these files are no images
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            dataset.__getitems__([3, 4])
        dataset.close()
        assert any("000003" in note for note in raised.value.__notes__)
        traceback = raised.value.__traceback__
        while traceback is not None:  # as pytest -l and error trackers do
            for value in traceback.tb_frame.f_locals.values():
                repr(value)
                if isinstance(value, (list, tuple)):
                    assert not any(isinstance(getattr(v, "data", None), memoryview) for v in value)
            traceback = traceback.tb_next


SUMMARIES = [
    {"count": 2**50, "fingerprint": "a", "what": ""},
    {"count": -5, "fingerprint": "a", "what": ""},
    {"count": 2, "fingerprint": "a", "what": ""},
    {"count": 40, "fingerprint": "a"},
    [1, 2],
    None,
]


@pytest.mark.parametrize("summary", SUMMARIES)
def test_a_forged_summary_is_an_error(file, summary):
    with opened(file, write=True) as txn:
        txn.put(b"penstock.summary", encode_record("summary", summary).data)
    refused(LMDBStore(file), "summary")


def index_tree():
    keys = {"text": np.frombuffer(b"abc\xc3\xa4", np.uint8), "offsets": np.array([0, 1, 2, 5])}
    return {
        "keys": keys,
        "labels": np.array([1, 2, 3]),
        "class_names": [],
        "metadata": {},
        "fingerprint": "f",
        "are_pairs": False,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"labels": np.array([1.0, 2.0, 3.0])},
        {"labels": np.array([[1], [2], [3]])},
        {"labels": np.array(["a", "b", "c"])},
        {"labels": np.array([1, 2])},
        {"labels": {"values": np.array([1]), "offsets": np.array([0, 9, 1, 1])}},
        {"labels": None, "are_pairs": True},
        {"metadata": 3},
        {"class_names": 5},
        {"keys": None},
        {"keys": {"text": np.frombuffer(b"\xff\xfe", np.uint8), "offsets": np.array([0, 1, 1, 2])}},
        {"keys": {"text": index_tree()["keys"]["text"], "offsets": np.array([0, 1, 4, 5])}},
        {"keys": {"text": index_tree()["keys"]["text"], "offsets": np.array([0, 2**62, 5, 5])}},
        {"keys": {"text": np.zeros((5, 1), np.uint8), "offsets": np.array([0, 1, 2, 5])}},
    ],
)
def test_a_forged_index_is_an_error(change):
    assert len(Index.from_tree(index_tree(), "x")) == 3
    with pytest.raises(StoreError, match="the index of x is damaged"):
        Index.from_tree(index_tree() | change, "x")
