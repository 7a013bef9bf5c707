# SPDX-License-Identifier: Apache-2.0
"""Files of a data set that are no files, or far too large: all readers refuse them at once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_FILE_BYTES, open_file, read_annotation, read_file


@contextlib.contextmanager
def no_waiting(seconds=20):
    """Raise where something is waited for."""

    def on_alarm(*_):
        pytest.fail(f"waited for {seconds} s")  # no Exception: readers catch those

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make(path, kind):
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):
            bound.bind(path.name)
    elif kind == "a character device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a character device", "a folder"])
@pytest.mark.parametrize("read", [open_file, read_file])
def test_what_is_no_regular_file_is_named_with_its_kind(tmp_path, kind, read):
    path = make(tmp_path / "1.jpg", kind)
    with no_waiting(), pytest.raises(OSError, match=f"not a regular file, but {kind}") as caught:
        read(path)
    assert caught.value.filename == str(path)


def sparse(path, size_bytes, start=b""):
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size_bytes)
    return path


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "a"
    for data in (b"", b"abc", os.urandom(100_000)):
        path.write_bytes(data)
        assert read_file(path) == data
        assert read_file(path, len(data)) == data
        with open_file(path) as file:
            assert file.read() == data
    assert read_file("/proc/self/stat").startswith(f"{os.getpid()} ".encode())  # of no size before


def test_a_file_larger_than_the_limit_is_not_read(tmp_path):
    path = sparse(tmp_path / "a.jpg", MAX_FILE_BYTES + 1)
    with pytest.raises(OSError, match=r"1,073,741,825 bytes, and 1,073,741,824 .*max_file_size"):
        read_file(path)
    with pytest.raises(StoreError, match=r"a\.jpg: it has 1,073,741,825 bytes.*: split it\."):
        read_annotation(path)
    with pytest.raises(OSError, match="and 100 is the most"):
        read_file("/proc/self/smaps", 100)  # of no size before it is read


def test_a_file_that_shrinks_while_it_is_read_ends_where_it_ends(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"abcdef")
    opened = os.fstat

    def shrink(fd):
        status = opened(fd)
        os.truncate(path, 2)
        return status

    monkeypatch.setattr(os, "fstat", shrink)
    assert read_file(path) == b"ab"


def read_tar(path):
    from penstock.stores.tar import TarStore

    return TarStore(path).index


def read_arrow(path):
    pytest.importorskip("pyarrow")
    from penstock.stores.arrow import ArrowStore

    return ArrowStore(path).index


def read_lmdb(path):
    pytest.importorskip("lmdb")
    from penstock.stores.lmdb.store import LMDBStore

    return LMDBStore(path).index


def write_lmdb(path):
    pytest.importorskip("lmdb")
    from penstock.stores import pack

    path.rename(path.with_name("b.lmdb.partial"))
    return pack([(np.zeros(2), 0)], f"lmdb:{path.parent}/b.lmdb")


def read_trace_file(path):
    from penstock.insight.trace import read_trace

    return read_trace(path)


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a character device"])
@pytest.mark.parametrize("read", [read_tar, read_arrow, read_lmdb, write_lmdb, read_trace_file])
def test_no_reader_waits_for_what_is_no_file(tmp_path, read, kind):
    path = make(tmp_path / "a", kind)
    with no_waiting(), pytest.raises((StoreError, ConfigError)) as caught:
        read(path)
    text = "b.lmdb.partial is a" if read is write_lmdb else f"not a regular file, but {kind}"
    assert text in str(caught.value)


def test_check_goes_over_a_voc_folder_with_fifos_and_devices(tmp_path, capsys):
    pytest.importorskip("cv2")
    from penstock.cli import main

    annotations = tmp_path / "Annotations"
    for name in ("Annotations", "JPEGImages"):
        (tmp_path / name).mkdir()
    (tmp_path / "JPEGImages" / "1.ppm").write_bytes(b"P6 1 1 255\n\0\0\0")
    make(annotations / "1.xml", "a FIFO")
    make(annotations / "2.xml", "a character device")
    sparse(annotations / "3.xml", 3 << 30)
    with no_waiting(60):
        assert main(["check", str(tmp_path), "--workers", "1"]) == 1
    said = capsys.readouterr().out
    assert "1.xml\tnot a regular file, but a FIFO" in said
    assert "2.xml\tnot a regular file, but a character device" in said
    assert "3.xml\tit has 3,221,225,472 bytes, and 268,435,456 is the most" in said


def test_the_limit_is_raised_where_a_store_is_opened(tmp_path):
    from penstock.stores import StoreDataset, open_store

    (tmp_path / "1.ppm").write_bytes(b"P6 1 1 255\n\0\0\0")
    assert StoreDataset(open_store(tmp_path, max_file_size=14))[0].shape == (1, 1, 3)
    dataset = StoreDataset(open_store(tmp_path, max_file_size=13))
    with pytest.raises(StoreError, match=r"14 bytes, and 13 .*: raise max_file_size of its store"):
        dataset[0]
    dataset.store.max_file_size = 14
    assert dataset[0].shape == (1, 1, 3)


@pytest.mark.parametrize("limit", ["1G", -1, 0, None, True, 1.5])
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_a_limit_that_is_no_number_of_bytes_is_refused_where_a_store_is_opened(
    tmp_path, kind, limit
):
    from penstock.stores import open_store

    message = f"max_file_size is a number of bytes, 1 or more, not {limit!r}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_store(f"{kind}:{tmp_path}", max_file_size=limit)


HOSTILE = """
    import contextlib, io, resource, sys, tarfile
    import numpy as np
    import penstock.vision
    from penstock.images import decode_image
    from penstock.stores import open_store
    from penstock.stores.arrow import Tables

    def peak_mb():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    def tried(what, read):
        before = peak_mb()
        try:
            read()
            said = ""
        except (OSError, RuntimeError, ValueError) as error:
            said = str(error)
        print(what, peak_mb() - before, said, sep="|")

    root = sys.argv[1]
    tried("jpg", lambda: open_store(root + "/images").get_many([0]))
    tried("tar", lambda: open_store(root + "/a.tar").get_many([0]))
    tried("json", lambda: open_store("arrow:" + root + "/saved").index)
    tried("pnm", lambda: decode_image(b"P6\\n" + b"#\\n" * 1_000_000 + b"1 1\\n255\\n000"))
"""


def test_hostile_files_take_no_memory(tmp_path):
    pytest.importorskip("cv2")
    pytest.importorskip("pyarrow")
    (tmp_path / "images").mkdir()
    sparse(tmp_path / "images" / "1.jpg", 5 << 29, b"\xff\xd8\xff")
    write_sparse_tar(tmp_path / "a.tar", 2 << 30)
    (tmp_path / "saved").mkdir()
    sparse(tmp_path / "saved" / "state.json", 1 << 30, b"{")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HOSTILE), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    found = dict(line.split("|", 1) for line in done.stdout.splitlines())
    assert {what: int(text.partition("|")[0]) < 60 for what, text in found.items()} == {
        "jpg": True, "tar": True, "json": True, "pnm": True,
    }, found  # fmt: skip
    assert "1.jpg: it has 2,684,354,560 bytes" in found["jpg"]
    assert "1.jpg in " in found["tar"]
    assert "2,147,483,648 bytes" in found["tar"]
    assert found["pnm"].endswith("|")


def write_sparse_tar(path, size_bytes):
    import tarfile

    member = tarfile.TarInfo("1.jpg")
    member.size = size_bytes
    with path.open("wb") as file:
        file.write(member.tobuf())
        file.truncate(512 + size_bytes + 10240)


def test_a_splits_neighbour_that_is_no_file_is_passed_over(tmp_path, capsys):
    pytest.importorskip("cv2")
    from penstock.cli import main

    for number in range(4):
        folder = tmp_path / "images" / f"class_{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.ppm").write_bytes(b"P6 1 1 255\n\0\0\0")
    os.mkfifo(tmp_path / "images" / "other.txt")
    with no_waiting(60):
        assert main(["split", str(tmp_path / "images"), "--into", "train=0.5,val=0.5"]) == 0


def test_a_saved_loader_state_is_not_waited_for(tmp_path):
    pytest.importorskip("torch")
    from penstock.integrations.dealing import file_of, read_state

    path = Path(file_of(tmp_path, "loader", 0))
    os.mkfifo(path)
    with no_waiting(), pytest.raises(OSError, match="not a regular file, but a FIFO"):
        read_state(tmp_path, "loader", 0)
    path.unlink()
    path.write_text(json.dumps({"epoch": 1}))
    assert read_state(tmp_path, "loader", 0) == {"epoch": 1}


def test_a_sparse_index_of_a_store_is_refused_before_memory_is_taken(tmp_path):
    stores = pytest.importorskip("penstock.stores")
    pytest.importorskip("msgspec")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".penstock-index").touch()
    os.truncate(tmp_path / "store" / ".penstock-index", 40 << 30)
    with pytest.raises(StoreError, match="it has 42,949,672,960 bytes"):
        len(stores.open_store(tmp_path / "store"))
