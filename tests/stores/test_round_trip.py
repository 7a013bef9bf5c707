# SPDX-License-Identifier: Apache-2.0
"""Real photos and annotations through every kind of store, and back to what they were."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tests.stores.mongod import mongod, mongod_program  # noqa: F401 - fixtures

from penstock.stores import open_store, pack
from penstock.vision import ImageFolder, parse_voc


def contents(folder, pattern):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob(pattern))
    }


def sent_around(source, tmp_path, server, collection):
    """Pack into LMDB, MongoDB, LMDB, a folder; return it, and the fingerprint of each."""
    stops = [
        f"lmdb:{tmp_path}/one.lmdb",
        server.uri(f"tests.{collection}"),
        f"lmdb:{tmp_path}/two.lmdb",
        f"folder:{tmp_path}/back",
    ]
    fingerprints = []
    for stop in stops:
        report = pack(source, stop, num_workers=2)
        source = stop
        with open_store(stop) as store:
            assert len(store) == report.num_records
            fingerprints.append(store.fingerprint)
    return tmp_path / "back", fingerprints


def test_photos_come_back_byte_for_byte_with_their_labels(data_dir, tmp_path, mongod):  # noqa: F811
    original = data_dir / "clothing" / "train"
    back, fingerprints = sent_around(original, tmp_path, mongod, "clothing")
    assert len(contents(original, "*.jpg")) > 400
    assert contents(back, "*.jpg") == contents(original, "*.jpg")
    before, after = ImageFolder(original), ImageFolder(back)
    assert after.class_names == before.class_names
    assert np.array_equal(after.labels, before.labels)
    assert list(after.store.keys) == list(before.store.keys)
    assert len(set(fingerprints)) == 1


def test_blood_cells_come_back_with_the_boxes_of_their_xml(data_dir, tmp_path, mongod):  # noqa: F811
    original = data_dir / "bccd"
    back, fingerprints = sent_around(original, tmp_path, mongod, "bccd")
    assert len(set(fingerprints)) == 1
    for pattern in ("*.jpg", "*.xml"):
        assert contents(back, pattern) == contents(original, pattern)
        assert len(contents(back, pattern)) == 364
    num_boxes = 0
    with open_store(original) as before, open_store(f"lmdb:{tmp_path}/two.lmdb") as after:
        assert after.class_names == before.class_names == ("Platelets", "RBC", "WBC")
        assert after.labels == before.labels
        for one, other in zip(before.scan(), after.scan(), strict=True):
            there, here = parse_voc(one.sample[1]), parse_voc(other.sample[1])
            assert np.array_equal(there.boxes_xyxy_px, here.boxes_xyxy_px)
            assert there.class_names == here.class_names
            assert [after.class_names[label] for label in other.label] == list(here.class_names)
            num_boxes += len(here.boxes_xyxy_px)
    assert num_boxes == 4155 + 372 + 361


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_pack_into_mongodb_killed_at_any_moment_is_finished_by_resuming(
    tmp_path,
    mongod,  # noqa: F811
    num_kills,
):
    import random

    from tests.stores.test_packing import is_complete, kill_at, packing

    generator = random.Random(num_kills)
    for number in range(num_kills):
        address = mongod.uri(f"tests.killed{num_kills}_{number}")
        has_old = bool(number % 2)
        if has_old:
            pack([(np.arange(3), 1)], address)
        kill_at(packing(address), generator.randrange(1, 27), generator.randrange(9**6))
        with open_store(address) as store, mongod.client() as client:
            name = f"killed{num_kills}_{number}"
            if name in client["tests"].list_collection_names():
                assert len(store) in ({1, 400} if has_old else {400})
            else:
                assert not has_old
        output, errors = packing(address, 1, 1, "resume").communicate()
        assert "end" in output, errors
        assert is_complete(address)
