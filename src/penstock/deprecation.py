# SPDX-License-Identifier: Apache-2.0
"""Names and arguments that a release removed: for one more release an error says what to use."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
R = TypeVar("R")


def removed_names(
    package: str, instead: Mapping[str, str], get_other: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Return `__getattr__` of a package some of whose names are gone.

    The error is an `ImportError`, since `from package import name` drops the text of an
    `AttributeError`.

    Args:
        package: Its `__name__`.
        instead: Name that is gone -> what to use instead.
        get_other: Its `__getattr__` for all other names, if it has one.
    """

    def get(name: str) -> Any:  # noqa: ANN401 - whatever there is
        if name in instead:
            raise ImportError(f"{package}.{name} is gone: use {instead[name]}")
        if get_other is not None:
            return get_other(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def removed_arguments(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function some of whose arguments are gone.

    Args:
        **instead: Argument that is gone -> what to use instead.

    Example:
        >>> @removed_arguments(area="scale=")
        ... def crop(scale: float) -> float:
        ...     return scale
        >>> crop(area=0.5)
        Traceback (most recent call last):
        TypeError: crop() has no argument area= any more: use scale=
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in instead.keys() & kwargs.keys():
                raise TypeError(
                    f"{function.__qualname__.removesuffix('.__init__')}() has no argument {name}= "
                    f"any more: use {instead[name]}"
                )
            return function(*args, **kwargs)

        return checked

    return decorated
