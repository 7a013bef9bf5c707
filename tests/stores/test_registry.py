# SPDX-License-Identifier: Apache-2.0
"""A kind of store of a user's own: one class and one line that registers it."""

from __future__ import annotations

import contextlib
import hashlib
import zipfile

import numpy as np
import pytest

from penstock.errors import ConfigError, MissingExtraError, StoreError
from penstock.stores import (
    EncodedImage,
    Index,
    Record,
    Store,
    StoreDataset,
    create_store,
    open_store,
    pack,
    register_store,
)
from penstock.stores import registry as module
from penstock.stores.records import decode_record
from penstock.stores.registry import Address
from penstock.testing.stores import StoreReaderContract


class ZipStore(Store):
    """Images CLASS/NAME in a zip file."""

    def __init__(self, path):
        self._path = path

    @property
    def address(self):
        return f"zip:{self._path}"

    def _load_index(self):
        with zipfile.ZipFile(self._path) as file:
            checksums = {info.filename: info.CRC for info in file.infolist()}
        keys = list(checksums)
        names, labels = np.unique([key.partition("/")[0] for key in keys], return_inverse=True)
        fingerprint = hashlib.sha256(repr(checksums).encode()).hexdigest()
        return Index(keys, labels, tuple(names.tolist()), {}, fingerprint, are_pairs=True)

    @contextlib.contextmanager
    def _read(self, positions, *, copy):
        with zipfile.ZipFile(self._path) as file:
            yield [self._record(file, position) for position in positions.tolist()]

    def _record(self, file, position):
        key, label = self.keys[position], self.index.label_of(position)
        return Record(key, label, (EncodedImage(file.read(key)), label))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(module, "_kinds", dict(module._kinds))
    monkeypatch.setattr(module, "_suffixes", dict(module._suffixes))
    register_store("zip", ZipStore, suffixes=[".zip"])


class TestZipStore(StoreReaderContract):
    def place(self, tmp_path):
        return f"zip:{tmp_path}/images.zip"

    def fill(self, address, records, class_names=(), metadata=None):
        with zipfile.ZipFile(address.removeprefix("zip:"), "w") as file:
            for record in records:
                file.writestr(record.key, decode_record(record.data).sample[0].data)


@pytest.mark.parametrize("labels", [[0, 1], (0, 1)])
def test_labels_of_an_index_that_are_no_array_are_an_error_that_names_them(labels):
    with pytest.raises(TypeError, match=r"labels of Index are .* not a (list|tuple)\."):
        Index(["a", "b"], labels)


def test_it_is_a_dataset_and_can_be_packed(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("cat/1.jpg", b"...")
        file.writestr("dog/2.jpg", b"....")
    dataset = StoreDataset(tmp_path / "a.zip", decode=None)
    assert dataset[1] == (b"....", 1)
    pack(f"zip:{tmp_path}/a.zip", tmp_path / "a.lmdb")
    with open_store(tmp_path / "a.lmdb") as packed:
        assert packed.class_names == ("cat", "dog")
        assert packed.get(["dog/2.jpg"])[0].sample == (EncodedImage(b"...."), 1)


def test_what_it_cannot_do_is_said(tmp_path):
    with pytest.raises(ConfigError, match="zip stores have no option 'split'"):
        open_store("a.zip", split="train")
    with pytest.raises(ConfigError, match="zip stores can be read, not written"):
        create_store("zip:a.zip")
    with pytest.raises(ConfigError, match="the scheme of an address is a word in lower case"):
        register_store("A B", ZipStore)


def test_a_writer_takes_what_create_store_gives(tmp_path):
    register_store("note", ZipStore, writer=lambda place, **facts: (place, facts))
    place, facts = create_store("note:x", what="w", metadata={"a": 1}, level=3)
    assert place == "x"
    assert facts == {
        "class_names": (),
        "metadata": {"a": 1},
        "what": "w",
        "resume": False,
        "overwrite": True,
        "level": 3,
    }


def test_a_name_is_imported_at_first_use_and_what_it_lacks_is_named(monkeypatch):
    register_store("far", "tests.stores.test_registry:ZipStore")
    assert open_store("far:x").address == "zip:x"
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    register_store("none", "pyarrow:Table")
    with pytest.raises(MissingExtraError, match="this store needs pyarrow"):
        open_store("none:x")


def test_known_kinds_are_listed_where_one_is_not_known():
    assert Address.parse("ZIP:a") == ("zip", "a")
    with pytest.raises(
        ConfigError,
        match=r"rar: are not known. Known are .*lmdb:PATH.*zip:PATH.* import the module that "
        "registers it, or name module:dataset",
    ):
        open_store("rar:a")
    with pytest.raises(StoreError, match="does not exist"):
        len(open_store("a.rar"))
