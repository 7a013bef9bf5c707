# SPDX-License-Identifier: Apache-2.0
"""Arrays of small numbers as compressed text, for a store's metadata, which are JSON."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["packed_numbers", "unpacked_numbers"]


def packed_numbers(numbers: NDArray[np.int64]) -> str:
    """Return numbers from 0 to 2**32 - 1, compressed.

    Example:
        >>> unpacked_numbers(packed_numbers(np.array([3, 0, 3])), 3)
        array([3, 0, 3])
    """
    data = zlib.compress(np.ascontiguousarray(numbers, "<u4").tobytes())
    return base64.b64encode(data).decode()


def unpacked_numbers(text: str, count: int) -> NDArray[np.int64]:
    """Return the numbers, in new memory.

    Raises:
        ValueError: the text is damaged, or of more or fewer numbers than `count`.
    """
    try:
        data = base64.b64decode(text, validate=True)
        raw = zlib.decompressobj().decompress(data, 4 * count + 1)
    except (TypeError, binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if len(raw) != 4 * count:
        raise ValueError(f"they are not of {count} numbers")
    return np.frombuffer(raw, "<u4").astype(np.int64)
