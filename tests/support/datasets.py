# SPDX-License-Identifier: Apache-2.0
"""Small datasets. The module imports numpy alone, so that a spawned worker starts quickly."""

from __future__ import annotations

import numpy as np


class Rows:
    """`length` samples of `size` float32, each filled with its index."""

    def __init__(self, length=64, size=4096):
        self.length = length
        self.size = size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.full(self.size, index, np.float32)
