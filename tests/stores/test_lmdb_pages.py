# SPDX-License-Identifier: Apache-2.0
"""Damaged LMDB files: an error that names the page, or the record, and never a signal."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

lmdb = pytest.importorskip("lmdb")

from tests.stores.damage_lmdb import PAGE, Layout, write  # noqa: E402

from penstock.errors import StoreError  # noqa: E402
from penstock.stores import LMDBDataset  # noqa: E402
from penstock.stores.lmdb.store import LMDBStore  # noqa: E402
from penstock.stores.lmdb.writer import LMDBWriter  # noqa: E402
from penstock.stores.records import encode_record  # noqa: E402

ROOT = Path(__file__).parents[2]


def attacked(folder, kind, seed, count, form="now"):
    """Return how often each outcome came when so many damaged files were read."""
    arguments = [str(folder), kind, str(seed), str(count), form]
    done = subprocess.run(
        [sys.executable, "-m", "tests.stores.damage_lmdb", *arguments],
        capture_output=True, text=True, timeout=3000, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["wrong"] == []
    return said["outcomes"]


@pytest.mark.parametrize(
    ("kind", "form"), [("small", "now"), ("large", "now"), ("mixed", "now"), ("mixed", "0.1")]
)
def test_damage_anywhere_is_an_error_and_ends_no_process(tmp_path, kind, form):
    """Of a page that is named, or of one record; without checksums at least an error or nothing."""
    outcomes = attacked(tmp_path, kind, 1, 60, form)
    assert sum(outcomes.values()) > 50


@pytest.mark.slow
@pytest.mark.parametrize("form", ["now", "0.1"])
@pytest.mark.parametrize("kind", ["small", "large", "mixed"])
def test_thousands_of_damaged_files_end_no_process(tmp_path, kind, form):
    faulthandler.cancel_dump_traceback_later()  # pytest's 2 minutes a test; each read has its own
    outcomes = attacked(tmp_path, kind, 2, 5000, form)
    assert sum(outcomes.values()) > 4500


def change_unused_byte(path):
    """Change a byte of a leaf that LMDB never looks at, and leave no trace in the file's times."""
    page = Layout(path.read_bytes()).pages["leaf"][0]
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(page * PAGE + 8)  # the field that is called pad
        file.write(b"\xff")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return f"page {page}, "


@pytest.mark.parametrize("verify", ["once", "always", "never"])
def test_the_tree_is_verified_once_each_time_a_process_opens_the_file_or_never(tmp_path, verify):
    path = tmp_path / "a.lmdb"
    samples = write(path, "mixed")
    dataset = LMDBDataset(path, verify=verify)
    page = change_unused_byte(path)
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):  # as a worker gets it
        if verify == "always":
            with pytest.raises(StoreError, match=page):
                _ = one[5]
        else:
            assert one[5] == samples[5]
        one.close()
    if verify == "never":
        assert len(LMDBDataset(path, verify=verify)) == len(samples)
        return
    with pytest.raises(StoreError, match=page):
        LMDBDataset(path, verify=verify)
    os.utime(path, ns=(1, 1))  # to "once" it is another file now
    with pytest.raises(StoreError, match=page):
        _ = dataset[5]


def test_a_file_that_other_code_has_written_to_since_is_read(tmp_path):
    path = tmp_path / "a.lmdb"
    samples = write(path, "mixed")
    for value in (b"x", bytes(40_000)):  # in free pages, and over the checksums
        with (
            lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as env,
            env.begin(write=True) as txn,
        ):
            txn.put(b"other", value)
        with LMDBStore(path) as store:
            assert [record.sample for record in store.scan()] == samples


def test_lmdbs_own_copy_which_has_no_checksums_is_read(tmp_path):
    samples = write(tmp_path / "a.lmdb", "mixed")
    for compact in (False, True):
        with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, readonly=True, lock=False) as env:
            env.copy(str(tmp_path / f"{compact}.mdb"), compact=compact)
        with LMDBStore(tmp_path / f"{compact}.mdb") as store:
            assert [record.sample for record in store.scan()] == samples


def test_a_file_finished_before_its_writer_was_killed_has_new_checksums_when_it_is_resumed(
    tmp_path,
):
    path = tmp_path / "a.lmdb"
    samples = write(path, "mixed")
    path.rename(tmp_path / "a.lmdb.partial")
    writer = LMDBWriter(path, resume=True)
    assert len(writer.written()) == len(samples)
    writer.put_many([encode_record("more", b"one more")])
    writer.finish()
    with LMDBStore(path) as store:
        assert [record.sample for record in store.scan()] == [*samples, b"one more"]
    page = change_unused_byte(path)
    with pytest.raises(StoreError, match=page):
        len(LMDBStore(path))
