# SPDX-License-Identifier: Apache-2.0
"""Datasets that need numpy alone, in a module that imports numpy alone.

A spawned worker imports the module of the dataset's class. If that were the benchmark's own file
and it imported torch at its top, no loader could save the worker that import.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["EightByteSamples", "PathNumbers", "PlainVectors"]


class PlainVectors:
    """Sample `i` is a float32 vector of 64 times `i`, and the id of the process that made it."""

    def __init__(self, num_samples: int) -> None:
        """Keep the number of samples, at least 1."""
        self._num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32], int]:
        """Return a fresh vector of shape (64,), float32, and the process id."""
        return np.full(64, index, np.float32), os.getpid()


class EightByteSamples:
    """Sample `i` is the number `i`, int64: the least that a dataset can do."""

    def __init__(self, num_samples: int) -> None:
        """Make the numbers once."""
        self._values = np.arange(num_samples, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._values)

    def __getitem__(self, index: int) -> np.int64:
        """Return a scalar of 8 bytes."""
        value: np.int64 = self._values[index]
        return value


class PathNumbers:
    """Reads a path; a sample is its index, the number in the path, and the process id."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Keep `paths`, made by `path`: a list, or anything that is read like one."""
        self._paths = paths

    @staticmethod
    def path(index: int) -> str:
        """Return the path of sample `index`: 58 characters, as an image folder has them."""
        return f"datasets/photos/train/class_{index % 1000:04d}/original/img_{index:08d}.jpg"

    def __len__(self) -> int:
        """Return the number of paths."""
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """Return the index, the number in its path, and the process id."""
        return index, int(self._paths[index][-12:-4]), os.getpid()
