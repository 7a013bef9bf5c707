# SPDX-License-Identifier: Apache-2.0
"""Under a seed, orders are those that earlier releases gave.

A run that is resumed with a newer release goes on in the order that it began with, and a seed in a
paper means the same next year. To change one of these is a breaking change: see
docs/versioning.md, and say so in CHANGELOG.md.
"""

import hashlib
import json

import numpy as np
import pytest
from tests.sampling.test_every_sampler import MAKERS

from penstock import Loader

# SHA-256, its first 16 digits, of the first two epochs under seed 7 as a JSON list of two lists.
DIGESTS = {
    "random": "faa4707c04399fe0",
    "random again": "022fcf459a1ac434",
    "subset": "bde657504c693a78",
    "weighted": "284799cf02a861e6",
    "weighted once": "8daa4bab3c6d714a",
    "balanced": "ce170049fd0724d0",
    "balanced exactly": "b6504260b3f34800",
    "balanced independently": "6740e0c4105adb20",
    "balanced by boxes' images": "a750b448e18ffcef",
    "undersampled": "88044246f937a95c",
    "oversampled": "8df13f0e127fd727",
    "dynamic": "cfd745addf80a3e4",
    "class-aware": "c599c2c43263304e",
    "repeat factor": "17fac59426640eb8",
    "repeat factor of a size": "399134ea32e98a80",
    "mixture": "2af8dab730b941ae",
    "scheduled mixture": "7895f38a997efc18",
    "mixture of mixtures": "cf9b1fbbbd24ddd2",
    "mixture, once": "2335d9bec48a5611",
    "buckets": "73611740a7c75786",
    "one of two ranks": "b19c68738ab36b7f",
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_sampler_gives_the_order_that_it_always_gave(name):
    sampler = MAKERS[name](7)
    epochs = [[int(index) for index in sampler] for _ in range(2)]
    assert hashlib.sha256(json.dumps(epochs).encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_order_that_it_always_gave(num_workers):
    loader = Loader(np.arange(12), batch_size=4, shuffle=True, seed=7, num_workers=num_workers)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [
        [[1, 8, 6, 11], [9, 5, 10, 2], [0, 4, 3, 7]],
        [[9, 2, 7, 0], [4, 5, 10, 6], [8, 11, 3, 1]],
    ]
