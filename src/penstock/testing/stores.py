# SPDX-License-Identifier: Apache-2.0
"""The contracts of `penstock.stores.Store` and `StoreWriter`."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.stores.index import Index, labels_from
from penstock.stores.records import EncodedImage, decode_record, encode_record
from penstock.stores.registry import create_store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from penstock.stores.records import EncodedRecord
    from penstock.stores.store import Store, StoreWriter

__all__ = ["StoreContract", "StoreReaderContract"]

_CLASSES: Final = ("cat", "dog", "hen")
# What begins like a JPEG file: a store keeps image files, whether they can be decoded or not.
_JPEG: Final = bytes.fromhex("ffd8ffe000104a46494600")


def _image(number: int) -> EncodedImage:
    generator = np.random.default_rng(number)
    return EncodedImage(_JPEG + generator.integers(0, 256, 500 + 97 * number, np.uint8).tobytes())


def _images(count: int = 30, suffix: str = ".jpg") -> list[EncodedRecord]:
    """Return image files with labels, as a folder with a subfolder for each class has them."""
    labels = sorted(number % 3 for number in range(count))
    return [
        encode_record(f"{_CLASSES[label]}/{number:04}{suffix}", (_image(number), label), label)
        for number, label in enumerate(labels)
    ]


def _trees() -> list[EncodedRecord]:
    samples: list[Any] = [
        {"pixels": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "name": "a", "box": [1, 2.5]},
        (np.float32(0.5), (), [None, True, -(2**63), 2**64 - 1]),
        [b"", b"short", b"long" * 100, "text ☃", {}],
        {1: np.zeros((0, 3)), "when": np.datetime64("2020-01-01"), "words": np.array(["a", "bc"])},
        (_image(1), _image(2), np.array([[1, 2], [3, 4]], ">i4")),
        None,
    ]
    return [encode_record(f"sample {i}", sample) for i, sample in enumerate(samples)]


def _refused(call: Callable[[], object], kind: type[Exception] = StoreError) -> str:
    """Return the text of the error that a call raises."""
    # Not pytest.raises: the suite needs nothing but the package.
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Return whether two trees are equal in types, shapes and values."""
    return encode_record("", one).data == encode_record("", other).data


def _compare_in_child(store: Store, positions: list[int], expected: list[Any]) -> None:
    with store:
        assert _same([record.sample for record in store.get_many(positions)], expected)


class StoreReaderContract:
    """The contract of a store that is read: subclass it and say how one comes to be.

    pytest runs it. A store that is only read needs no more than this.

    The samples are pairs (`EncodedImage`, int) with keys "CLASS/NUMBER.jpg". A kind of store that
    cannot hold those defines `records`, and `expected` if a sample changes on its way.

    Attributes:
        suffix: What the keys of the images end with, in this kind of store.
        has_class_names: Whether this kind of store holds the names of classes.

    Example:
        import zipfile

        from penstock.stores.records import decode_record
        from penstock.testing.stores import StoreReaderContract


        class TestZip(StoreReaderContract):
            def place(self, tmp_path):
                return f"zip:{tmp_path}/images.zip"

            def fill(self, address, records, class_names=(), metadata=None):
                with zipfile.ZipFile(address.removeprefix("zip:"), "w") as file:
                    for record in records:
                        image, label = decode_record(record.data).sample
                        file.writestr(record.key, image.data)
    """

    suffix = ".jpg"
    has_class_names = True

    def records(self, count: int = 30) -> list[EncodedRecord]:
        """Return what `fill` gets: `count` different records with keys in order, classes 0 to 2."""
        return _images(count, self.suffix)

    def expected(self, record: EncodedRecord) -> Any:  # noqa: ANN401
        """Return the sample that the store gives for a record."""
        return decode_record(record.data).sample

    def place(self, tmp_path: Path) -> str:
        """Return the address of a store that is not there yet; the same one within a test."""
        raise NotImplementedError

    def fill(
        self,
        address: str,
        records: Sequence[EncodedRecord],
        class_names: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Put these records where a store at `address` finds them, in their order.

        A second call has the same keys and changed contents: replace the first ones.
        """
        raise NotImplementedError

    def open(self, address: str) -> Store:
        """Return the store at `address`."""
        return open_store(address)

    def made(self, address: str, records: Sequence[EncodedRecord], *facts: Any) -> Store:  # noqa: ANN401
        """Return a store of these records; `facts` as for `fill`."""
        self.fill(address, records, *facts)
        return self.open(address)

    def test_what_was_put_is_what_is_got(self, tmp_path: Path) -> None:
        """Records come back with keys and labels, in order; labels and class names in the index."""
        records = self.records()
        with self.made(self.place(tmp_path), records, _CLASSES) as store:
            found = store.get_many(range(len(records)))
            assert [(r.key, r.label) for r in found] == [(r.key, r.label) for r in records]
            assert _same([record.sample for record in found], list(map(self.expected, records)))

            assert store.class_names == (_CLASSES if self.has_class_names else ())
            labels = labels_from([record.label for record in records])  # as samplers take them
            expected = Index(store.keys, labels).to_tree()["labels"]
            assert _same(store.index.to_tree()["labels"], expected)

    def test_the_fingerprint_is_another_for_other_contents(self, tmp_path: Path) -> None:
        """It is not empty, and the same each time that the same store is opened."""
        address, records = self.place(tmp_path), self.records()
        other = self.records(150)[-1]
        other = encode_record(records[4].key, decode_record(other.data).sample, other.label)
        with self.made(address, records, _CLASSES) as store:
            before = store.fingerprint
        with self.open(address) as store:
            assert store.fingerprint == before != ""
        with self.made(address, [*records[:4], other, *records[5:]], _CLASSES) as store:
            assert store.fingerprint not in ("", before)

    def test_positions_may_come_in_any_order_repeatedly_and_from_the_end(
        self, tmp_path: Path
    ) -> None:
        """`get_many` and `borrow` agree."""
        records = self.records()
        with self.made(self.place(tmp_path), records, _CLASSES) as store:
            positions = [17, 3, 3, -1, 0, 29, 17]
            keys = [records[position].key for position in positions]
            assert [record.key for record in store.get_many(positions)] == keys
            with store.borrow(np.array(positions)) as borrowed:
                assert [record.key for record in borrowed] == keys
                for record, position in zip(borrowed, positions, strict=True):
                    assert _same(record.sample, self.expected(records[position]))
            assert store.get_many([]) == []

    def test_records_are_found_by_position_key_and_range(self, tmp_path: Path) -> None:
        """A position out of range is an IndexError, a key that is not there is named."""
        records = self.records(150)
        keys = [record.key for record in records]
        with self.made(self.place(tmp_path), records, _CLASSES) as store:
            for position in (150, -151):
                said = _refused(lambda p=position: store.get_many([0, p]), IndexError)  # type: ignore[misc]
                assert str(position) in said
            assert [record.key for record in store.get([keys[9], keys[2]])] == [keys[9], keys[2]]
            assert "no such record" in _refused(lambda: store.get([keys[9], "no such record"]))
            assert [record.key for record in store.scan()] == keys
            assert [record.key for record in store.scan(60, 140)] == keys[60:140]
            assert list(store.scan(150)) == []

    def test_a_store_in_use_goes_on_in_forked_and_spawned_processes(self, tmp_path: Path) -> None:
        """Each makes its own connection; this process's stays as it was."""
        records = self.records()
        with self.made(self.place(tmp_path), records, _CLASSES) as store:
            store.get_many([0])
            for method in ("fork", "spawn"):
                arguments = store, [7, 2], [self.expected(records[p]) for p in (7, 2)]
                child = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
                    target=_compare_in_child, args=arguments
                )
                child.start()
                child.join()
                assert child.exitcode == 0, method
            assert store.get_many([3])[0].key == records[3].key

    def test_threads_read_one_store_at_the_same_time(self, tmp_path: Path) -> None:
        """Each gets what it asked for."""
        records = self.records()
        samples = list(map(self.expected, records))
        asked = [[(number * 7 + k) % 30 for k in range(16)] for number in range(100)]
        made = self.made(self.place(tmp_path), records, _CLASSES)
        with made as store, ThreadPoolExecutor(4) as pool:
            for positions, found in zip(asked, pool.map(store.get_many, asked), strict=True):
                assert _same([r.sample for r in found], [samples[p] for p in positions])

    def test_a_closed_store_opens_again_and_so_does_a_pickled_one(self, tmp_path: Path) -> None:
        """Closed twice, and pickled before its index was read and after."""
        address, records = self.place(tmp_path), self.records()
        store = self.made(address, records, _CLASSES)
        for _ in range(2):
            with pickle.loads(pickle.dumps(store)) as copy:
                for one in (copy, store):
                    assert _same(one.get_many([2])[0].sample, self.expected(records[2]))
            store.close()
            store.close()
        assert store.address in repr(self.open(address))  # which opens nothing


class StoreContract(StoreReaderContract):
    """The contract of a store and its writer: say where it lies and how to get at it otherwise.

    What a store holds is looked at, and damaged, behind its back: a store that agrees with itself
    alone does not pass.

    Example:
        class TestLMDB(StoreContract):
            def place(self, tmp_path):
                return f"lmdb:{tmp_path}/store.lmdb"

            def raw(self, address): ...
            def damage(self, address, key, data): ...
            def remove(self, address, key): ...
    """

    def raw(self, address: str) -> Mapping[str, bytes]:
        """Return what is stored for each key: the record, or the image file."""
        raise NotImplementedError

    def damage(self, address: str, key: str, data: bytes) -> None:
        """Put `data` where the record called `key` is."""
        raise NotImplementedError

    def remove(self, address: str, key: str) -> None:
        """Take away the record called `key`, and leave the index as it is."""
        raise NotImplementedError

    def create(self, address: str, **facts: Any) -> StoreWriter:  # noqa: ANN401
        """Return a writer."""
        return create_store(address, **facts)

    def fill(
        self,
        address: str,
        records: Sequence[EncodedRecord],
        class_names: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the records."""
        facts = {"class_names": class_names, "metadata": metadata}
        with contextlib.closing(self.create(address, **facts)) as writer:
            writer.put_many(records[:7])
            writer.put_many(records[7:])
            writer.finish()

    def test_raw_access_finds_the_same_keys_and_bytes(self, tmp_path: Path) -> None:
        """What lies there is the record, or the image file itself."""
        address, records = self.place(tmp_path), _images()
        with self.made(address, records, _CLASSES):
            raw = self.raw(address)
        assert sorted(raw) == sorted(record.key for record in records)
        for number, record in enumerate(records):
            assert bytes(raw[record.key]) in (record.data, _image(number).data)

    def test_any_tree_comes_back_with_its_types_shapes_and_values(self, tmp_path: Path) -> None:
        """Samples need not be images."""
        records = _trees()
        with self.made(self.place(tmp_path), records) as store:
            for record, found in zip(records, store.scan(), strict=True):
                expected = decode_record(record.data)
                assert found.key == expected.key
                assert _same(found.sample, expected.sample), found

    def test_the_index_is_known_without_reading_a_record(self, tmp_path: Path) -> None:
        """Keys, labels, class names, metadata, also where no record can be read any more."""
        address, records = self.place(tmp_path), _images()
        metadata = {"made by": "a test", "numbers": [1, 2]}
        self.made(address, records, _CLASSES, metadata).close()
        for record in records:
            self.remove(address, record.key)
        with self.open(address) as store:
            assert list(store.keys) == [record.key for record in records]
            assert _same(store.labels, np.array([record.label for record in records], np.int64))
            assert store.class_names == _CLASSES
            assert dict(store.metadata) == metadata

    def test_labels_may_be_several_or_none(self, tmp_path: Path) -> None:
        """As objects in an image have them; a store without a record is one, too."""
        labels: list[tuple[int, ...] | None] = [(0, 2), None, (1,)]
        records = [encode_record(f"{i}", {"n": i}, label) for i, label in enumerate(labels)]
        with self.made(self.place(tmp_path), records, _CLASSES) as store:
            assert isinstance(store.labels, RaggedArray)
            assert [row.tolist() for row in store.labels] == [[0, 2], [], [1]]
            assert [r.label or () for r in store.scan()] == [label or () for label in labels]
        with self.made(self.place(tmp_path), []) as store:
            assert list(store.scan()) == []

    def test_a_bad_record_is_named_and_the_others_are_read(self, tmp_path: Path) -> None:
        """Truncated, overwritten, replaced by a pickle, removed: no other is given in its place."""
        address, records = self.place(tmp_path), _images()
        self.made(address, records, _CLASSES).close()
        good = bytes(self.raw(address)[records[4].key])
        flipped = bytearray(good)
        flipped[len(flipped) // 2] ^= 1
        program = pickle.dumps((b"image", 1))
        for damaged in (good[:-1], good[:10], b"", bytes(flipped), program, None):
            if damaged is None:
                self.remove(address, records[4].key)
            else:
                self.damage(address, records[4].key, damaged)
            with self.open(address) as store:
                said = _refused(lambda s=store: s.get_many([3, 4, 5]))  # type: ignore[misc]
                assert records[4].key in said, damaged
                found = [record.sample[0] for record in store.get_many([5, 3])]
                assert found == [_image(5), _image(3)]

    def test_until_it_is_finished_there_is_the_old_store_or_none(self, tmp_path: Path) -> None:
        """A writer that is closed before leaves what it wrote for one that resumes."""
        address, records = self.place(tmp_path), _images()
        with contextlib.closing(self.create(address, class_names=_CLASSES, what="a")) as writer:
            writer.put_many(records[:10])
        _refused(lambda: len(self.open(address)))
        self.made(address, records[:3], _CLASSES).close()
        with contextlib.closing(self.create(address, class_names=_CLASSES, what="b")) as writer:
            writer.put_many(records)
        with self.open(address) as store:
            assert len(store) == 3

    def test_a_resumed_writer_finds_what_was_written_and_finishes(self, tmp_path: Path) -> None:
        """The result is the same as in one go."""
        address, records = self.place(tmp_path), _images()
        with self.made(address, records, _CLASSES) as store:
            fingerprint = store.fingerprint
        facts: dict[str, Any] = {"class_names": _CLASSES, "what": "images"}
        self.interrupt(self.create(address, **facts), records[:20])
        with contextlib.closing(self.create(address, **facts, resume=True)) as writer:
            assert list(writer.written()) == [(r.key, r.label) for r in records[:20]]
            writer.put_many(records[20:])
            writer.finish()
        with self.open(address) as store:
            assert [record.key for record in store.scan()] == [record.key for record in records]
            assert store.fingerprint == fingerprint

    def interrupt(self, writer: StoreWriter, records: Sequence[EncodedRecord]) -> None:
        """Write records, have them kept, and stop. For writers that keep them some other way."""
        writer.put_many(records)
        writer.close()

    def test_a_writer_does_not_resume_what_is_of_another_source(self, tmp_path: Path) -> None:
        """It says so; without `resume` it begins anew."""
        address, records = self.place(tmp_path), _images()
        self.interrupt(self.create(address, class_names=_CLASSES, what="images"), records[:20])
        assert "resume" in _refused(lambda: self.create(address, what="others", resume=True))
        with contextlib.closing(self.create(address, what="others")) as writer:
            assert list(writer.written()) == []

    def test_a_second_writer_is_refused_while_the_first_is_at_it(self, tmp_path: Path) -> None:
        """And admitted afterwards."""
        address = self.place(tmp_path)
        with contextlib.closing(self.create(address)):
            _refused(lambda: self.create(address))
        self.create(address).close()

    def test_a_key_that_comes_twice_is_refused(self, tmp_path: Path) -> None:
        """At the latest at the end; there is no store then."""
        address, records = self.place(tmp_path), _images()
        with contextlib.closing(self.create(address, class_names=_CLASSES)) as writer:

            def write() -> None:
                writer.put_many([*records[:9], records[4]])
                writer.finish()

            assert records[4].key in _refused(write)
        _refused(lambda: len(self.open(address)))
