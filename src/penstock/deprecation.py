# SPDX-License-Identifier: Apache-2.0
"""Deprecated names and arguments: the old one works and warns, as docs/versioning.md promises."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["renamed_arguments", "renamed_names"]

P = ParamSpec("P")
R = TypeVar("R")


def renamed_names(
    package: str,
    new_names: Mapping[str, str],
    removed_in: str,
    get_other: Callable[[str], Any] | None = None,
) -> Callable[[str], Any]:
    """Return `__getattr__` of a package some of whose names were renamed.

    Args:
        package: Its `__name__`.
        new_names: Old name -> new name.
        removed_in: Release that removes the old ones.
        get_other: Its `__getattr__` for all other names, if it has one.
    """

    def get(name: str) -> Any:  # noqa: ANN401 - whatever there is
        if name in new_names:
            new = new_names[name]
            _warn(f"{package}.{name}", f"{package}.{new}", removed_in)
            return getattr(sys.modules[package], new)
        if get_other is not None:
            return get_other(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def renamed_arguments(
    removed_in: str, **new_names: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function some of whose arguments were renamed.

    Args:
        removed_in: Release that removes the old names.
        **new_names: Old name of an argument, and the new one.

    Example:
        >>> @renamed_arguments("0.3", area="scale")
        ... def crop(scale: float) -> float:
        ...     return scale
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     print(crop(area=0.5), caught[0].message)
        0.5 area= is deprecated, use scale=; it is removed in penstock 0.3
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def renamed(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in new_names.keys() & kwargs.keys():
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(f"{old}= is the old name of {new}=: give one of them")
                _warn(f"{old}=", f"{new}=", removed_in)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renamed

    return decorated


def _warn(old: str, new: str, removed_in: str) -> None:
    message = f"{old} is deprecated, use {new}; it is removed in penstock {removed_in}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)  # of the caller's caller
