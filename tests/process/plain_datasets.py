# SPDX-License-Identifier: Apache-2.0
"""Datasets whose module imports numpy alone, for workers that are to do without torch."""

from __future__ import annotations

import random
import sys

import numpy as np


class Plain:
    """Samples of every kind the default collate knows, and whether torch is loaded."""

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {
            "torch": "torch" in sys.modules,
            "image": np.random.rand(3, 20, 30).astype(np.float32),
            "label": index,
            "mixed": index if index % 2 else float(index),
            "score": random.random(),
            "flag": index % 3 == 0,
            "name": f"sample {index}",
            "raw": b"x" * index,
            "scalar": np.float32(index),
            "small": np.int16(index),
            "nested": [np.arange(4) + index, (index, "a")],
            "complex": np.full(700, index + 1j),
            "bools": np.arange(index, index + 5) % 2 == 0,
        }


class ImportsLate(Plain):
    """Imports torch with its first sample, and draws from its generator."""

    def __getitem__(self, index):
        import torch

        return {
            "drawn": torch.rand(5),
            "worker": torch.utils.data.get_worker_info().id,
            "threads": torch.get_num_threads(),
            **super().__getitem__(index),
        }


class Unstackable(Plain):
    """Arrays that no tensor can hold."""

    def __getitem__(self, index):
        return np.array(["a", "b"])
