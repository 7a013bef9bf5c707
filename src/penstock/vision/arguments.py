# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of transforms."""

from __future__ import annotations

import inspect
import math
import operator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import ArrayLike

_MOST_SHOWN: Final = 100  # characters of a value in a message


def checked_number(name: str, value: Any, lowest: float, highest: float = math.inf) -> float:  # noqa: ANN401
    """Return a finite number from `lowest` to `highest`, both included; else ConfigError."""
    is_number = hasattr(value, "__float__") and not np.ndim(value) and not isinstance(value, bool)
    number = float(value) if is_number else math.nan
    if not (math.isfinite(number) and lowest <= number <= highest):
        kind = "a finite number" if math.isinf(number) else "a number"
        upper = "" if highest == math.inf else f" and at most {highest:g}"
        raise ConfigError(f"{name} is {kind} of at least {lowest:g}{upper}; got {shown(value)}")
    return number


def checked_whole(name: str, value: Any, lowest: int, highest: float = math.inf) -> int:  # noqa: ANN401
    """Return a whole number from `lowest` to `highest`, both included; else ConfigError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or not lowest <= number <= highest:
        upper = "" if highest == math.inf else f" and at most {highest}"
        raise ConfigError(f"{name} is an int of at least {lowest}{upper}; got {shown(value)}")
    return number


def checked_optional(name: str, value: Any, lowest: int) -> int | None:  # noqa: ANN401
    """Return None, or a whole number of at least `lowest`; else ConfigError."""
    return None if value is None else checked_whole(name, value, lowest)


def checked_transforms(owner: str, transforms: Iterable[Any]) -> tuple[Callable[[Any], Any], ...]:
    """Return functions of a sample; ConfigError if one cannot be called."""
    found = tuple(transforms)
    for number, one in enumerate(found):
        if not callable(one):
            raise ConfigError(f"transform {number} of {owner} is no function; got {shown(one)}")
    return found


def checked_size(size: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return (height, width) in pixels of a size given as one int, or as (height, width)."""
    if not isinstance(size, (tuple, list)):
        side = checked_whole("size", size, 1)
        return side, side
    if len(size) != 2:
        raise ConfigError(f"size is an int, or (height, width), in pixels; got {shown(size)}")
    return checked_whole("height", size[0], 1), checked_whole("width", size[1], 1)


def checked_choice(name: str, value: Any, choices: Sequence[Any]) -> None:  # noqa: ANN401
    """Raise ConfigError if a value is none of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} is {' or '.join(map(repr, choices))}, not {shown(value)}.")


def checked_channels(
    name: str, values: ArrayLike | None, num_channels: int | None = None
) -> tuple[float, ...] | None:
    """Return a "mean" or "std" in units of 0..1, a number for each channel; else ConfigError."""
    if values is None:
        return None
    numbers = tuple(map(float, np.ravel(values)))
    is_good = np.isfinite(numbers).all() and len(numbers) == (num_channels or len(numbers) or 1)
    if not is_good or (name == "std" and min(numbers) <= 0):
        above = ", above 0" if name == "std" else ""
        raise ConfigError(
            f"{name} is a finite number for each of {num_channels or 'the'} channels{above}; got "
            f"{shown(values)}"
        )
    if max(numbers) > 1:
        divided = ", ".join(f"{value / 255:.4g}" for value in numbers)
        raise ConfigError(
            f"{name} is in units of the full scale, of values in 0..1, but a value of {numbers} is "
            f"above 1. If it is in 0..255, divide it by 255: {name}=({divided})"
        )
    return numbers


def shown(value: Any) -> str:  # noqa: ANN401
    """Return a value as a message can show it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


class ShownByArguments:
    """Shows an object by those of its constructor's arguments that are not the usual ones."""

    def __repr__(self) -> str:
        known = [
            (name, repr(getattr(self, name)), repr(parameter.default))
            for name, parameter in inspect.signature(type(self)).parameters.items()
            if hasattr(self, name)  # arguments of a subclass may be kept under other names
        ]
        given = (f"{name}={value}" for name, value, usual in known if value != usual)
        return f"{type(self).__name__}({', '.join(given)})"
