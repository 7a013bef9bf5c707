# SPDX-License-Identifier: Apache-2.0
"""Reads info files, pickles that others made, without running what others wrote.

It is not enough to allow nothing but what numpy's own pickles name: pickle gives `numpy.dtype` and
`numpy.ndarray` whatever state the file has, and they believe it. A dtype that is told to be of
Python objects makes addresses of the bytes of an array. So nothing of numpy's is called by the
file: what stands in for it here looks at the state first, and copies plain numbers and texts.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_info"]


def load_info(path: str | Path) -> Any:  # noqa: ANN401
    """Return what an info file holds.

    Raises:
        pickle.UnpicklingError: it holds more than data, or is damaged.
    """
    with open(path, "rb") as file:
        return _finished(_PlainUnpickler(file).load(), {})


def _check(is_so: bool, what: str) -> None:
    if not is_so:
        raise pickle.UnpicklingError(f"this file is damaged, or made to do harm: {what}")


class _Dtype:
    """Stands in for `numpy.dtype`: booleans, numbers, bytes and texts."""

    def __init__(self, code: Any) -> None:  # noqa: ANN401
        is_plain = isinstance(code, str) and re.fullmatch(r"[biufcSU][1-9]\d{0,5}", code)
        _check(bool(is_plain), f"its arrays are of {code!r}, which is no number and no text")
        try:
            self.dtype = np.dtype(code)
        except TypeError:
            _check(False, f"there are no numbers of {code!r}")

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        is_plain = isinstance(state, tuple) and len(state) >= 5 and state[2:5] == (None,) * 3
        _check(is_plain and state[1] in ("<", ">", "|", "="), f"a dtype has the state {state!r}")
        self.dtype = self.dtype.newbyteorder(state[1])

    def values(self, count: int, data: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
        size = count * self.dtype.itemsize
        _check(
            isinstance(data, bytes) and len(data) == size, f"{count} values are not {size} bytes"
        )
        return np.frombuffer(data, self.dtype).copy()


class _Array:
    """Stands in for an array until the file is read."""

    __hash__ = None  # type: ignore[assignment]  # arrays are no keys
    array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        _check(isinstance(state, tuple) and len(state) == 5, "the state of an array")
        _, shape, dtype, is_fortran, data = state
        _check(isinstance(dtype, _Dtype), "an array without a dtype")
        sides = shape if isinstance(shape, tuple) else (-1,)
        is_shape = all(isinstance(side, int) and side >= 0 for side in sides)
        _check(is_shape and len(sides) <= 32, f"an array of the shape {shape!r}")
        values = dtype.values(math.prod(sides), data)
        self.array = values.reshape(sides, order="F" if is_fortran else "C")


def _dtype(code: Any, align: object = False, copy: object = True) -> _Dtype:  # noqa: ANN401
    return _Dtype(code)


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    return _Array()  # numpy makes an empty array, and gives it a state


def _scalar(dtype: Any, data: Any) -> Any:  # noqa: ANN401
    _check(isinstance(dtype, _Dtype), "a number without a dtype")
    return dtype.values(1, data)[0]


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`, by which old protocols write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written as latin1, not as {encoding!r}")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy", "ndarray"): object(),  # named only, as an argument of `_reconstruct`
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin1,
    # numpy 1 and 2 call the module of these two by different names.
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain containers, numbers, texts and what stands in for numpy's, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"this file wants {module}.{name}, which is no number, text, container or array. "
                "It may have been made to run a program: find out where it comes from."
            ) from None


def _finished(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:  # noqa: ANN401
    """Return `value` with arrays for what stood in for them.

    Args:
        value: Lists and dicts are changed in place, tuples made anew. Keys and members of sets can
            be no arrays.
        known: Of what has been seen: its id, itself (so that the id stays its own), the result.
    """
    if isinstance(value, _Array | _Dtype):
        _check(isinstance(value, _Array) and value.array is not None, "an array without values")
        return value.array
    if type(value) not in (dict, list, tuple):
        return value
    if id(value) in known:
        return known[id(value)][1]
    if isinstance(value, tuple):
        made = tuple(_finished(item, known) for item in value)
        known[id(value)] = (value, made)
        return made
    known[id(value)] = (value, value)
    for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
        value[key] = _finished(item, known)
    return value
