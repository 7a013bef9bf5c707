# SPDX-License-Identifier: Apache-2.0
"""Datasets whose module imports numpy alone, for workers that are to do without torch."""

from __future__ import annotations

import os
import random
import sys

import numpy as np

from penstock import get_worker_info


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


class Mixed(Plain):
    """Values whose types differ from sample to sample; torch decides what they become."""

    def __getitem__(self, index):
        odd = index % 2
        return {
            "ints": index if odd else float(index),
            "scalars": np.int64(index) if odd else index + 0.5,
            "arrays": np.full(3, index, np.float32 if odd else np.float64),
            "flags": index if odd else True,
        }


class Huge(Plain):
    """An integer that no int64 holds."""

    def __getitem__(self, index):
        return 2**63 + index


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


class Finalized(Plain):
    """Notes in a file when a process that it was sent to lets go of it, and as which worker."""

    def __init__(self, path):
        super().__init__(4)
        self.path, self.owner = path, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            with open(self.path, "a") as file:
                file.write(f"{get_worker_info()}\n")


class Unstackable(Plain):
    """Arrays that no tensor can hold."""

    def __getitem__(self, index):
        return np.array(["a", "b"])


class LateOpenCV(Plain):
    """Samples are the number of threads of OpenCV, which is imported for the first of them."""

    def __getitem__(self, index):
        was_there = "cv2" in sys.modules
        import cv2

        return was_there and index == 0, cv2.getNumThreads()
