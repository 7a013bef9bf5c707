# SPDX-License-Identifier: Apache-2.0
"""What is imported, and what cannot be: a call as soon as a module is there, and how to install it.

Nothing here imports a library.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["install_command", "missing_extra", "when_imported"]

_EXTRA_OF: Final = {
    "typer": "cli",
    "rich": "cli",
    "torch": "torch",
    "cv2": "vision",
    "simplejpeg": "vision",
    "PIL": "vision",
    "lmdb": "lmdb",
    "msgspec": "lmdb",
    "xxhash": "lmdb",
    "pymongo": "mongo",
    "bson": "mongo",
    "pyarrow": "arrow",
    "prometheus_client": "prometheus",
    "opentelemetry": "opentelemetry",
}


def missing_extra(error: ModuleNotFoundError, who: str, *also: str) -> Exception:
    """Return an error that names the extra to install; the one given if it is of no extra.

    Args:
        error: Has the name of the module.
        who: Needs it; the message begins with it.
        also: Other extras that it needs.
    """
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRA_OF:
        return error
    command = install_command(*dict.fromkeys([*also, _EXTRA_OF[module]]))
    return MissingExtraError(
        f"{who} needs {module}, which is not installed. Install it with: {command}"
    )


def install_command(*extras: str) -> str:
    """Return the command that installs extras of Penstock from where Penstock itself came.

    A package index may not have it, or another release of it: what was installed from a folder or
    a file says so in `direct_url.json` (PEP 610).
    """
    names = ",".join(extras)
    origin = _origin()
    if "dir_info" in origin:
        from urllib.parse import unquote, urlsplit

        option = "-e " if origin["dir_info"].get("editable") else ""
        return f'pip install {option}"{unquote(urlsplit(origin["url"]).path)}[{names}]"'
    if "archive_info" in origin:
        return f'pip install "penstock[{names}] @ {origin["url"].partition("?")[0]}"'
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        address = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
        return f'pip install "penstock[{names}] @ {address}"'
    return f'pip install "penstock[{names}]"'


def _origin() -> dict[str, Any]:
    import json
    from importlib import metadata  # takes 20 ms, and is needed for errors alone

    try:
        text = metadata.distribution("penstock").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # only on the path
        return {}
    origin: dict[str, Any] = json.loads(text) if text else {}
    return origin


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Call `call` now if the top-level module `name` is loaded, else right after its first import.

    A worker uses it to seed a framework that the dataset may import late or never.
    """
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Watcher(name, call))


class _Watcher:
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
    ) -> ModuleSpec | None:
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _CallingLoader(spec.loader, self._imported))
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _CallingLoader:
    """A loader without its base class, `importlib.abc`, which takes 5 ms to import."""

    def __init__(self, loader: Loader, call: Callable[[], object]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # from here on nobody sees that we were here
        self._loader.exec_module(module)
        self._call()
