# SPDX-License-Identifier: Apache-2.0
"""Reads info files, pickles that others made, without running what others wrote."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_info"]


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`, by which old protocols write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as latin1, not as {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
    # numpy 1 and 2 call the module of these two by different names.
    ("numpy.core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numpy._core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
}


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain containers, numbers, texts and numpy's arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"this file wants {module}.{name}, which is no number, text, container or array. "
                "It may have been made to run a program: find out where it comes from."
            ) from None


def load_info(path: str | Path) -> Any:  # noqa: ANN401
    """Return what an info file holds.

    Raises:
        pickle.UnpicklingError: it holds more than data, or is damaged.
    """
    with open(path, "rb") as file:
        return _PlainUnpickler(file).load()
