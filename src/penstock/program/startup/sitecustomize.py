# SPDX-License-Identifier: Apache-2.0
"""Import hook of `penstock run`, which Python imports when a process of the program starts.

It calls `penstock.program.book.begin` once torch has been imported. It imports nothing from
Penstock before: a process without torch pays nothing, and the Python of a child may lack Penstock.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # at run time, only modules that Python has imported already
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """A finder that leaves torch's spec to the other finders and calls `_begin` after its import.

    It stays in `sys.meta_path` until then: a program may look torch up, and import it later or
    never.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:  # noqa: ANN401 - a ModuleSpec
        if name != "torch":
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder != self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        exec_module, of_loader = spec.loader.exec_module, vars(spec.loader)

        def exec_and_begin(module: object) -> None:
            del of_loader["exec_module"]  # the loader may be used again
            exec_module(module)
            if self in sys.meta_path:  # unless another spec of torch was loaded before
                sys.meta_path.remove(self)
            _begin()

        of_loader["exec_module"] = exec_and_begin
        return spec


def _begin() -> None:
    try:
        from penstock.program.book import begin

        begin()
    except Exception as error:
        sys.stderr.write(
            f"penstock run: {sys.executable} keeps torch's own loader, because Penstock cannot be "
            f"used there: {type(error).__name__}: {error}\n"
        )


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
if "torch" in sys.modules:
    _begin()
else:
    sys.meta_path.insert(0, _AfterTorch())
# Import the sitecustomize that this one hides. If there is none, Python handles the ImportError.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
