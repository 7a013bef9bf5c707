# SPDX-License-Identifier: Apache-2.0
"""Workers freeze what they begin with; garbage of samples is collected as ever."""

from __future__ import annotations

import gc
import weakref

import pytest

from penstock import Loader


class Node:
    """Refers to itself: only the collector can free it."""

    def __init__(self):
        self.itself = self


class Frozen:
    """Samples are the number of frozen objects, and of earlier samples' garbage that is left."""

    def __init__(self):
        self.made = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        gc.collect()
        left = sum(node() is not None for node in self.made)
        self.made.append(weakref.ref(Node()))
        return gc.get_freeze_count(), left

    def __getstate__(self):
        return {"made": []}


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_worker_freezes_its_modules_and_no_garbage(start_method):
    before = gc.get_freeze_count()
    loader = Loader(Frozen(), batch_size=1, num_workers=1, multiprocessing_context=start_method)
    samples = [(int(frozen[0]), int(left[0])) for frozen, left in loader]
    assert samples[0][0] > 5000
    assert [left for _, left in samples] == [0] * 6
    assert gc.get_freeze_count() == before
