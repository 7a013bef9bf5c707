# SPDX-License-Identifier: Apache-2.0
"""Real photos and annotations through every kind of store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.stores.mongod import mongod, mongod_program  # noqa: F401 - fixtures

from penstock.stores import EncodedImage, open_store, pack
from penstock.vision import ImageFolder, parse_voc


def sent_around(source, tmp_path, server, collection):
    """Pack into LMDB, MongoDB, LMDB; return the last one's address, and the fingerprint of each."""
    stops = [
        f"lmdb:{tmp_path}/one.lmdb",
        server.uri(f"tests.{collection}"),
        f"lmdb:{tmp_path}/two.lmdb",
    ]
    fingerprints = []
    for stop in stops:
        report = pack(source, stop, num_workers=2)
        source = stop
        with open_store(stop) as store:
            assert len(store) == report.num_records
            fingerprints.append(store.fingerprint)
    return source, fingerprints


def test_photos_come_back_byte_for_byte_with_their_labels(data_dir, tmp_path, mongod):  # noqa: F811
    original = data_dir / "clothing" / "train"
    address, fingerprints = sent_around(original, tmp_path, mongod, "clothing")
    before = ImageFolder(original)
    with open_store(address) as after:
        assert len(after) > 400
        assert after.class_names == before.class_names
        assert np.array_equal(after.labels, before.labels)
        for record, (path, label) in zip(after.scan(), before.samples, strict=True):
            assert record.sample == (EncodedImage(Path(path).read_bytes()), label)
    assert len(set(fingerprints)) == 1


def test_blood_cells_come_back_with_the_boxes_of_their_xml(data_dir, tmp_path, mongod):  # noqa: F811
    original = data_dir / "bccd"
    address, fingerprints = sent_around(original, tmp_path, mongod, "bccd")
    assert len(set(fingerprints)) == 1
    num_boxes = 0
    with open_store(original) as before, open_store(address) as after:
        assert after.class_names == before.class_names == ("Platelets", "RBC", "WBC")
        assert after.labels == before.labels
        for one, other in zip(before.scan(), after.scan(), strict=True):
            assert one.sample == other.sample
            image, xml = other.sample
            assert image.data == (original / f"JPEGImages/{other.key}.jpg").read_bytes()
            here = parse_voc(xml)
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
