# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are asked for (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    package: str, names_of: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        names_of: Module, relative to the package if it begins with a dot -> names that it has.
    """
    homes = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> Any:  # noqa: ANN401 - whatever there is
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name], package), name)
        vars(sys.modules[package])[name] = value  # from now on it is found without us
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})
