# SPDX-License-Identifier: Apache-2.0
"""Samples with objects, in a module that does not import torch."""

from __future__ import annotations

import numpy as np


def sample_of(index, height=24, width=32, num_objects=None):
    """A sample whose every number is decided by its index; every fourth has no object."""
    rng = np.random.default_rng(index)
    count = index % 4 if num_objects is None else num_objects
    return {
        "image": rng.integers(0, 256, (height, width, 3), np.uint8),
        "boxes": rng.random((count, 4), dtype=np.float32) * 20,
        "labels": rng.integers(0, 9, count),
        "landmarks": rng.random((count, 5, 2), dtype=np.float32),
        "difficult": rng.random(count) < 0.5,
        "image_id": f"image {index}",
        "place": (index, "left"),
    }


class Photos:
    """Samples with 0 to 3 objects; a wide one now and then, if asked for."""

    def __init__(self, length=12, wide=(), num_objects=None):
        self.length, self.wide, self.num_objects = length, wide, num_objects

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        width = 48 if index in self.wide else 32
        return sample_of(index, width=width, num_objects=self.num_objects)
