# SPDX-License-Identifier: Apache-2.0
"""Optional libraries: a call as soon as one is imported, and how to install one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

DISTRIBUTION: Final = "penstock-loader"  # `penstock` on a package index is another project's
_EXTRA_OF: Final = {
    "typer": "cli",
    "rich": "cli",
    "torch": "torch",
    "cv2": "vision",
    "PIL": "vision",
    "pycocotools": "coco",
    "lmdb": "lmdb",
    "msgspec": "lmdb",
    "xxhash": "lmdb",
    "pymongo": "mongo",
    "bson": "mongo",
    "pyarrow": "arrow",
    "obstore": "objects",
    "tokenizers": "text",
    "zstandard": "text",
    "prometheus_client": "prometheus",
    "opentelemetry": "opentelemetry",
}


def missing_extra(error: ModuleNotFoundError, who: str, *also: str) -> Exception:
    """Return an error that names the extra to install; the one given if it is of no extra.

    The message begins with `who` needs the module; `also` are other extras that it needs.
    """
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRA_OF:
        return error
    command = install_command(*dict.fromkeys([*also, _EXTRA_OF[module]]))
    return MissingExtraError(
        f"{who} needs {module}, which is not installed. Install it with: {command}"
    )


def call_registered(
    make: Callable[..., Any] | str, place: str, options: dict[str, Any], who: str, whose: str
) -> Any:  # noqa: ANN401
    """Return `make(place, **options)`; it may be named as "module:name", to be imported now.

    Raises:
        MissingExtraError: `who` needs what is not installed.
        ConfigError: `whose` options have not one of these.
    """
    try:
        if isinstance(make, str):
            module, _, name = make.partition(":")
            make = getattr(importlib.import_module(module), name)
        return make(place, **options)  # type: ignore[operator]
    except ModuleNotFoundError as error:
        raise missing_extra(error, who) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        name = str(error).rpartition("argument ")[2]
        raise ConfigError(f"{whose} no option {name}.") from error


def install_command(*extras: str) -> str:
    """Return the command that installs extras of Penstock.

    pip keeps the Penstock that is there, from an index, a repository or a folder alike.
    """
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Call `call` now if the top-level module `name` is loaded, else once its first import is over.

    A worker uses it to seed a framework that the dataset may import late or never.
    """
    if name in sys.modules:
        call()
    elif not any(isinstance(found, _Watcher) and found._call is call for found in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, call))


class _Watcher:
    """Finds `name` as the other finders would, with a loader that calls back.

    It stays until the module has been imported: many libraries only look whether there is one, with
    `importlib.util.find_spec`, long before it is imported.
    """

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self._call = call
        self._is_asking = False  # the other finders

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        loader: Any = spec and spec.loader
        if loader is not None:
            exec_module = loader.exec_module

            def exec_and_call(module: ModuleType) -> None:
                loader.exec_module = exec_module  # from here on it shows nowhere that we were here
                exec_module(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._call()

            loader.exec_module = exec_and_call
        return spec
