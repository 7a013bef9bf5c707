# SPDX-License-Identifier: Apache-2.0
"""A program that prints checksums of the batches of loaders, or their error, as JSON.

It is run here and where another system is imitated, with a folder and the names of some workers.
"""

from __future__ import annotations

import functools
import json
import sys
import zlib

import numpy as np
import torch
from tests.process.seeded_datasets import NumpyNoise, Resumable

import penstock.torch
from penstock import Loader, sample_rng
from penstock.errors import ConfigError
from penstock.stores import StoreDataset
from penstock.vision import ImageFolder, ImagePipeline

WORKERS = {
    "none": {},
    "threads": {"num_workers": 2, "backend": "thread"},
    "processes": {"num_workers": 2},
}
STORES = "tar:photos.tar", "arrow:photos.parquet", "lmdb:photos.lmdb"


class Large(NumpyNoise):
    """Batches of 16 have 2 MB: they lie in memory that is used again."""

    def __getitem__(self, index):
        return index, sample_rng().random(16_384)


def loaders(folder, options):
    """Yield names of loaders, and functions that make one."""
    seeded = {"seed": 3, **options}
    yield "stream", lambda: Loader(Resumable(), 4, **seeded)
    seeded["shuffle"] = True
    yield "large", lambda: Loader(Large(), 16, **seeded)
    yield "torch's, seeded", lambda: penstock.torch.DataLoader(Large(), 16, **seeded)
    rows = torch.utils.data.TensorDataset(torch.arange(40.0))
    yield "torch's", lambda: penstock.torch.DataLoader(rows, 4, shuffle=True, **options)
    pipeline = ImagePipeline.train(64)
    photos = {"photos": ImageFolder(f"{folder}/photos", pipeline)}
    for address in STORES:
        place = address.replace(":", f":{folder}/")
        photos[address] = StoreDataset(place, transform=pipeline)
    for name, dataset in photos.items():
        yield name, functools.partial(Loader, dataset, 2, on_error="skip", **seeded)


def checksums(batches):
    """Return a checksum of each part of each batch."""
    parts = ([batch] if hasattr(batch, "dtype") else batch for batch in batches)
    return [[zlib.crc32(np.ascontiguousarray(part)) for part in batch] for batch in parts]


def epoch_and_rest(make):
    """Return an epoch, and the rest of one after two batches and a restart."""
    torch.manual_seed(5)
    whole = checksums(make())
    torch.manual_seed(5)
    loader = make()
    batches = iter(loader)
    begun = checksums([next(batches), next(batches)])
    again = make()
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return whole, begun + checksums(again)


if __name__ == "__main__":
    _, folder, *kinds = sys.argv
    found = {}
    for kind in kinds:
        for name, make in loaders(folder, WORKERS[kind]):
            try:
                found[f"{name}, {kind}"] = epoch_and_rest(make)
            except ConfigError as error:
                found[f"{name}, {kind}"] = str(error)
    sys.stdout.write(json.dumps(found))
