# SPDX-License-Identifier: Apache-2.0
"""Checks of what transforms are told."""

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "checked_full_scale",
    "checked_number",
    "checked_size",
    "checked_transform",
    "checked_whole",
    "is_of",
    "named_here",
    "shown",
]

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")

_NUMBERS: Final = (int, float)
_MOST_SHOWN: Final = 100  # characters of a value in a message


def checked_number(
    name: str,
    value: Any,  # noqa: ANN401 - it is being checked
    lowest: float,
    highest: float = float("inf"),
) -> float:
    """Return a number, finite, that lies from `lowest` to `highest`, both included.

    Raises:
        ConfigError: it does not, or is none.
    """
    is_number = isinstance(value, _NUMBERS) or (hasattr(value, "__float__") and not np.ndim(value))
    number = float(value) if is_number and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and lowest <= number <= highest):
        kind = "a finite number" if math.isinf(number) else "a number"
        upper = "" if highest == float("inf") else f" and at most {highest:g}"
        raise ConfigError(f"{name} is {kind} of at least {lowest:g}{upper}; got {shown(value)}")
    return number


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
        raise ConfigError(f"{name} is an int of at least {lowest}{upper}; got {shown(value)}")
    return number


def checked_size(size: Any) -> tuple[int, int]:  # noqa: ANN401
    """Return (height, width) in pixels of a size given as one int, or as (height, width).

    Raises:
        ConfigError: it is neither, or not positive.
    """
    if isinstance(size, (tuple, list)) and len(size) == 2:
        return checked_whole("height", size[0], 1), checked_whole("width", size[1], 1)
    if isinstance(size, (tuple, list)):
        raise ConfigError(f"size is an int, or (height, width), in pixels; got {shown(size)}")
    side = checked_whole("size", size, 1)
    return side, side


def checked_full_scale(name: str, values: tuple[float, ...]) -> None:
    """Raise if a mean or standard deviation is not in units of the full scale.

    Raises:
        ConfigError: a value is above 1, as those are that were measured in 0..255.
    """
    if max(values, default=0.0) > 1:
        divided = ", ".join(f"{value / 255:.4g}" for value in values)
        raise ConfigError(
            f"{name} is in units of the full scale, of values in 0..1, but a value of {values} is "
            f"above 1. If it is in 0..255, divide it by 255: {name}=({divided})"
        )


def checked_transform(what: str, transform: Any) -> Any:  # noqa: ANN401
    """Return a function of a sample.

    Args:
        what: What the message calls it, with its verb: "transform is".
        transform: The function.

    Raises:
        ConfigError: it cannot be called; or not as our transforms are.
    """
    if not callable(transform):
        raise ConfigError(f"{what} a function of a sample; got {shown(transform)}")
    if isinstance(transform, type) and transform.__module__.startswith("penstock.vision."):
        name = transform.__name__
        raise ConfigError(
            f"{what} a function of a sample; got the class {name}: make an instance of it first, "
            f"{name}(…)"
        )
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
    """Return a value as a message can show it; what is a sample, or an image, by its kind.

    Those come as an argument where a class was given in place of an instance: it is the constructor
    then that is called with the sample.

    Example:
        >>> shown((1, 2)), shown(range(2))
        ('(1, 2)', 'range(0, 2)')
    """
    if isinstance(value, (dict, np.ndarray)) or np.ndim(getattr(value, "shape", 0)):
        shape = getattr(value, "shape", None)
        kind = f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
        return (
            f"{kind}. If it is a sample, a class was given in place of an instance: a transform is "
            "made first, Letterbox(640), and then called with samples"
        )
    text = repr(value)
    if len(text) <= _MOST_SHOWN:
        return text
    length = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{length}"


def named_here(
    **names: str,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a function whose arguments other libraries call differently.

    Args:
        **names: The other libraries' name of an argument, and ours. The error says ours.

    Example:
        >>> class Flip:
        ...     @named_here(p="probability")
        ...     def __init__(self, probability: float) -> None:
        ...         self.probability = probability
        >>> Flip(p=0.5)
        Traceback (most recent call last):
        TypeError: Flip has no argument 'p'; here it is called 'probability'
    """

    def decorated(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(function)
        def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for name in names.keys() & kwargs.keys():
                is_init = function.__name__ == "__init__"
                called = type(self).__name__ if is_init else function.__qualname__
                raise TypeError(
                    f"{called} has no argument {name!r}; here it is called {names[name]!r}"
                )
            return function(self, *args, **kwargs)

        return checked

    return decorated
