# SPDX-License-Identifier: Apache-2.0
"""`BlobsContract`: what a place of objects has to do."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from penstock.blobs.blobs import ByteRange, open_blobs
from penstock.blobs.errors import BlobChanged, BlobNotFound
from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.blobs.blobs import Blobs

_CONTENTS = bytes(range(256)) * 1000


class BlobsContract:
    """Say where a place that is not there yet, or is empty, may lie.

    Example:
        class TestFolder(BlobsContract):
            def place(self, tmp_path):
                return f"{tmp_path}/objects"
    """

    def place(self, tmp_path: Path) -> str:
        """Return an address; another one for each test."""
        raise NotImplementedError

    def open(self, address: str) -> Blobs:
        """Return the place at `address`."""
        return open_blobs(address)

    def made(self, tmp_path: Path) -> Blobs:
        """Return a place with some objects."""
        blobs = self.open(self.place(tmp_path))
        for name in ("a/1", "a/2", "ab", "b"):
            blobs.write(name, name.encode() + _CONTENTS)
        return blobs

    def test_ranges_come_whole_and_in_the_order_asked_for(self, tmp_path: Path) -> None:
        """Near and far, overlapping, empty, to the end, twice, of several objects."""
        blobs = self.made(tmp_path)
        whole = {name: name.encode() + _CONTENTS for name in ("a/1", "ab")}
        asked = [
            ("ab", 9, 20), ("a/1", 5, 9), ("ab", 0, None), ("a/1", 4, 9), ("a/1", 7, 7),
            ("a/1", 200_000, 200_001), ("ab", 255_000, None), ("a/1", 5, 9), ("ab", 0, 1),
        ]  # fmt: skip
        views = blobs.read([ByteRange(*one) for one in asked])
        assert [bytes(view) for view in views] == [whole[n][a:b] for n, a, b in asked]
        assert all(view.readonly for view in views)
        assert list(blobs.read([])) == []
        blobs.close()

    def test_objects_are_listed_by_name_with_size_and_version(self, tmp_path: Path) -> None:
        """As `stat` says them; a prefix may end anywhere."""
        blobs = self.made(tmp_path)
        listed = list(blobs.list())
        assert [(blob.name, blob.size_bytes) for blob in listed] == [
            (name, len(name) + len(_CONTENTS)) for name in ("a/1", "a/2", "ab", "b")
        ]
        assert listed == [blobs.stat(blob.name) for blob in listed]
        assert [blob.name for blob in blobs.list("a")] == ["a/1", "a/2", "ab"]
        assert [blob.name for blob in blobs.list("a/")] == ["a/1", "a/2"]
        assert list(blobs.list("c/")) == []
        blobs.close()

    def test_an_object_that_was_replaced_is_not_the_one_that_was_listed(
        self, tmp_path: Path
    ) -> None:
        """Asked for by its version it is an error, and otherwise the new one."""
        blobs = self.made(tmp_path)
        before = blobs.stat("b")
        assert bytes(blobs.read([ByteRange("b", 0, 1, before.version)])[0]) == b"b"
        blobs.write("b", b"another")
        assert blobs.stat("b").version != before.version
        said = _refused(
            lambda: blobs.read([ByteRange("a/1", 0, 1), ByteRange("b", 0, 1, before.version)])
        )
        assert "'b'" in said
        assert "replaced" in said
        assert bytes(blobs.read([ByteRange("b")])[0]) == b"another"
        blobs.close()

    def test_what_is_not_there_is_named(self, tmp_path: Path) -> None:
        """An object, bytes behind its end, a name that leads elsewhere."""
        blobs = self.made(tmp_path)
        for name in ("c", "a/1/2"):
            for ask in (
                lambda n=name: blobs.read([ByteRange("b"), ByteRange(n)]),
                lambda n=name: blobs.stat(n),
            ):
                assert repr(name) in _refused(ask, BlobNotFound)
        assert "cut off" in _refused(lambda: blobs.read([ByteRange("b", 0, 1 << 20)]))
        for name in ("../b", "/etc/passwd", "a/../b", ""):
            _refused(lambda n=name: blobs.read([ByteRange(n)]), ConfigError)
            _refused(lambda n=name: blobs.write(n, b""), ConfigError)
        blobs.close()

    def test_a_write_may_say_what_it_replaces(self, tmp_path: Path) -> None:
        """Something else that is there stays."""
        blobs = self.made(tmp_path)
        blobs.write("c", b"1", replaces="")
        version = blobs.stat("c").version
        blobs.write("c", b"22", replaces=version)
        for wrong in ("", version):
            said = _refused(lambda v=wrong: blobs.write("c", b"333", replaces=v), BlobChanged)
            assert "'c'" in said
        _refused(lambda: blobs.write("d", b"1", replaces=version), BlobChanged)
        assert bytes(blobs.read([ByteRange("c")])[0]) == b"22"
        assert [blob.name for blob in blobs.list("c")] == ["c"]
        blobs.close()

    def test_what_was_deleted_is_gone(self, tmp_path: Path) -> None:
        """Once more is no error."""
        blobs = self.made(tmp_path)
        for _ in range(2):
            blobs.delete("ab")
        assert [blob.name for blob in blobs.list()] == ["a/1", "a/2", "b"]
        blobs.close()

    def test_other_processes_and_threads_read_it_at_the_same_time(self, tmp_path: Path) -> None:
        """Forked from one that has read, spawned, and after it was closed."""
        blobs = self.made(tmp_path)
        blobs.read([ByteRange("b", 0, 1)])
        for method in ("fork", "spawn"):
            child = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
                target=_read_in_child, args=(blobs,)
            )
            child.start()
            child.join()
            assert child.exitcode == 0, method
        with ThreadPoolExecutor(4) as pool:
            asked = [ByteRange("b", n, n + 1000) for n in range(100)]
            found = pool.map(lambda one: bytes(blobs.read([one])[0]), asked)
            contents = b"b" + _CONTENTS
            assert list(found) == [contents[one.start : one.stop] for one in asked]
        blobs.close()
        blobs.close()
        with pickle.loads(pickle.dumps(blobs)) as copy:
            assert bytes(copy.read([ByteRange("b", 0, 1)])[0]) == b"b"


def _read_in_child(blobs: Blobs) -> None:
    assert bytes(blobs.read([ByteRange("b", 0, 3)])[0]) == b"b" + _CONTENTS[:2]
    blobs.close()


def _refused(ask: object, kind: type[Exception] = StoreError) -> str:
    try:
        ask()  # type: ignore[operator]
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
