# SPDX-License-Identifier: Apache-2.0
"""Writes the files beside it: what the first release wrote, for tests/stores/test_format_1.py.

They are evidence, so they are not made anew: a later release that writes another format gets files
of its own. The argument is the address of a collection of MongoDB that may be made for it.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

import bson
import numpy as np
import pymongo

from penstock import Loader
from penstock.sampling import ClassBalancedSampler
from penstock.stores import EncodedImage, pack

HERE = Path(__file__).parent


def loader_of(**options):
    """Return a seeded loader with a sampler that has a state of its own."""
    sampler = ClassBalancedSampler(np.arange(24) % 3 // 2, seed=5)
    return Loader(np.arange(24), batch_size=4, sampler=sampler, seed=7, **options)


class Readings:
    """Samples of every kind that a record may hold."""

    class_names = ("odd", "even")
    labels = (0, 1, 0, 1)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {
            "values": np.arange(6, dtype=np.float32).reshape(2, 3) * index,
            "file": EncodedImage(b"\xff\xd8\xff made up %d" % index),
            "name": f"reading {index}",
            "tags": [index, None, 0.5, True, b"bytes"],
        }


def state_in_mid_epoch():
    """Return a state, and the batches that come after it, in this epoch and the next."""
    loader = loader_of()
    list(loader)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    return {"state": state, "rest": rest, "next epoch": [batch.tolist() for batch in loader]}


def sampler_in_mid_epoch():
    """Return the state of a sampler by itself, and what comes after it."""
    sampler = ClassBalancedSampler(np.arange(24) % 3 // 2, seed=5)
    items = iter(sampler)
    for _ in range(10):
        next(items)
    return {"state": sampler.state_dict(), "rest": list(map(int, items))}


def main(address):
    """Write all files."""
    (HERE / "state.json").write_text(json.dumps(state_in_mid_epoch()) + "\n")
    (HERE / "sampler.json").write_text(json.dumps(sampler_in_mid_epoch()) + "\n")
    pack(Readings(), address)
    with pymongo.MongoClient(address) as client:
        database, _, collection = address.partition("?")[0].rpartition("/")[2].partition(".")
        documents = client[database][collection].find()
        (HERE / "readings.bson").write_bytes(b"".join(map(bson.encode, documents)))
    with tempfile.TemporaryDirectory() as scratch:
        pack(Readings(), f"lmdb:{scratch}/readings.lmdb")
        packed = Path(scratch, "readings.lmdb").read_bytes()
        (HERE / "readings.lmdb.gz").write_bytes(gzip.compress(packed, mtime=0))
    loader = Loader(np.arange(12.0), batch_size=4, shuffle=True, seed=7)
    list(loader)
    loader.trace(HERE / "trace.json")


if __name__ == "__main__":
    main(sys.argv[1])
