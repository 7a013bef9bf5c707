# SPDX-License-Identifier: Apache-2.0
"""Call something as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Call `call` now if the top-level module `name` is loaded, else right after its first import.

    A worker uses it to seed a framework that the dataset may import late or never.
    """
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Watcher(name, call))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds `name` as everybody else would, with a loader that calls back.

    It stays until the module has been imported: many libraries only look whether there is one, with
    `importlib.util.find_spec`, long before anybody imports it.
    """

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self._call = call
        self._is_asking = False  # the other finders

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _CallingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, call: Callable[[], object]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # from here on nobody sees that we were here
        self._loader.exec_module(module)
        self._call()
