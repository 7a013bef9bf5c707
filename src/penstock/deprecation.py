# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported late, or gone, and arguments that are gone.

For one release after the one that removed it, an error says what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

P = ParamSpec("P")
R = TypeVar("R")


def lazy_names(
    package: str, names_of: Mapping[str, Sequence[str]], removed: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are imported late (PEP 562).

    The error for a name that is gone is an `ImportError`, since `from package import name` drops
    the text of an `AttributeError`.

    Args:
        package: Its `__name__`.
        names_of: Module, relative to the package if it begins with a dot -> names that it has.
        removed: Name that is gone -> what to use instead.
    """
    homes = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> Any:  # noqa: ANN401 - whatever there is
        if name in removed:
            raise ImportError(f"{package}.{name} is gone: use {removed[name]}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name], package), name)
        vars(sys.modules[package])[name] = value  # from now on it is found without us
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})


def removed_names(package: str, instead: Mapping[str, str]) -> Callable[[str], Any]:
    """Return `__getattr__` of a package some of whose names are gone, and none is imported late."""
    return lazy_names(package, {}, instead)[0]


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
