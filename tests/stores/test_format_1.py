# SPDX-License-Identifier: Apache-2.0
"""What the first release wrote is read: states, stores and recordings of format 1.

docs/versioning.md promises it for all later releases. The files were written by format_1/write.py;
they stay as they are, whatever is written now.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock import Loader
from penstock.cli import main
from penstock.sampling import ClassBalancedSampler

pytest.importorskip("msgspec")

from tests.stores.mongod import mongod, mongod_program  # noqa: F401 - found by their names

from penstock.stores import StoreDataset

FILES = Path(__file__).parent / "format_1"


def sampler():
    return ClassBalancedSampler(np.arange(24) % 3 // 2, seed=5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_from_a_state(num_workers):
    written = json.loads((FILES / "state.json").read_text())
    loader = Loader(np.arange(24), batch_size=4, sampler=sampler(), seed=7, num_workers=num_workers)
    loader.load_state_dict(written["state"])
    assert [batch.tolist() for batch in loader] == written["rest"]
    assert [batch.tolist() for batch in loader] == written["next epoch"]
    assert len(written["rest"]) == 4


def test_a_sampler_by_itself_goes_on_from_a_state():
    written = json.loads((FILES / "sampler.json").read_text())
    loaded = sampler()
    loaded.load_state_dict(written["state"])
    assert list(loaded) == written["rest"]
    assert len(written["rest"]) == 14


def check_readings(address):
    """Compare a store with what was packed into it."""
    with contextlib.closing(StoreDataset(address, decode=None)) as dataset:
        assert dataset.labels.tolist() == [0, 1, 0, 1]
        assert dataset.class_names == ("odd", "even")
        assert list(dataset.store.keys) == ["0", "1", "2", "3"]
        for index in range(4):
            sample = dataset[index]
            expected = np.arange(6, dtype=np.float32).reshape(2, 3) * index
            np.testing.assert_array_equal(sample["values"], expected, strict=True)
            assert bytes(sample["file"]) == b"\xff\xd8\xff made up %d" % index
            assert sample["name"] == f"reading {index}"
            assert sample["tags"] == [index, None, 0.5, True, b"bytes"]


def test_an_lmdb_file_is_read(tmp_path):
    pytest.importorskip("lmdb")
    path = tmp_path / "readings.lmdb"
    path.write_bytes(gzip.decompress((FILES / "readings.lmdb.gz").read_bytes()))
    check_readings(f"lmdb:{path}")


def test_a_folder_is_read(tmp_path):
    check_readings(f"folder:{shutil.copytree(FILES / 'readings', tmp_path / 'readings')}")


def test_a_collection_is_read(mongod, tmp_path):  # noqa: F811
    import bson

    with mongod.client() as client:
        documents = bson.decode_all((FILES / "readings.bson").read_bytes())
        client.tests[tmp_path.name].insert_many(documents)
    check_readings(mongod.uri(f"tests.{tmp_path.name}"))


def test_a_recording_is_read(tmp_path, capsys):
    pytest.importorskip("typer")
    page = tmp_path / "page.html"
    assert main(["report", str(FILES / "trace.json"), "-o", str(page)]) == 0
    assert "3 batches" in capsys.readouterr().out
    assert re.search("<title>.*Penstock", page.read_text())
