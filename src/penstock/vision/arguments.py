# SPDX-License-Identifier: Apache-2.0
"""Checks of what transforms are told."""

from __future__ import annotations

import operator
from typing import Any, Final

from penstock.errors import ConfigError

__all__ = ["checked_number", "checked_size", "checked_whole"]

_NUMBERS: Final = (int, float)


def checked_number(
    name: str,
    value: Any,  # noqa: ANN401 - it is being checked
    lowest: float,
    highest: float = float("inf"),
) -> float:
    """Return a number that lies from `lowest` to `highest`, both included.

    Raises:
        ConfigError: it does not, or is none.
    """
    is_number = isinstance(value, _NUMBERS) or hasattr(value, "__float__")
    if not is_number or isinstance(value, bool) or not lowest <= float(value) <= highest:
        upper = "" if highest == float("inf") else f" and at most {highest:g}"
        raise ConfigError(f"{name} is a number of at least {lowest:g}{upper}; got {value!r}")
    return float(value)


def checked_whole(name: str, value: Any, lowest: int, highest: int | None = None) -> int:  # noqa: ANN401
    """Return a whole number that lies from `lowest` to `highest`, both included.

    Raises:
        ConfigError: it does not, or is none.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or number < lowest or (highest is not None and number > highest):
        upper = "" if highest is None else f" and at most {highest}"
        raise ConfigError(f"{name} is an int of at least {lowest}{upper}; got {value!r}")
    return number


def checked_size(size: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return (height, width) in pixels of a size given as one int, or as (height, width).

    Raises:
        ConfigError: it is neither, or not positive.
    """
    if isinstance(size, (tuple, list)) and len(size) == 2:
        return checked_whole("height", size[0], 1), checked_whole("width", size[1], 1)
    if isinstance(size, (tuple, list)):
        raise ConfigError(f"size is an int, or (height, width), in pixels; got {size!r}")
    side = checked_whole("size", size, 1)
    return side, side
