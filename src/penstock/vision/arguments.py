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
    from collections.abc import Sequence

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


def checked_full_scale(name: str, values: Sequence[float]) -> None:
    """Raise ConfigError if a mean or standard deviation was measured in 0..255, not in 0..1."""
    if max(values, default=0.0) > 1:
        divided = ", ".join(f"{value / 255:.4g}" for value in values)
        raise ConfigError(
            f"{name} is in units of the full scale, of values in 0..1, but a value of {values} is "
            f"above 1. If it is in 0..255, divide it by 255: {name}=({divided})"
        )


def checked_transform(what: str, transform: Any) -> Any:  # noqa: ANN401
    """Return a function of a sample; ConfigError names it `what`, with its verb: "transform is"."""
    if not callable(transform):
        raise ConfigError(f"{what} a function of a sample; got {shown(transform)}")
    if not isinstance(transform, type) and is_of(transform, "albumentations"):
        raise ConfigError(
            f"{what} a function of a sample; got {type(transform).__name__} of albumentations, "
            "which takes named arguments: wrap it, penstock.vision.Albumentations(…)"
        )
    return transform


def is_of(value: Any, package: str) -> bool:  # noqa: ANN401
    """Return whether a class of the object is from the package; the user's own subclasses, too."""
    return any(cls.__module__.partition(".")[0] == package for cls in type(value).__mro__)


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
