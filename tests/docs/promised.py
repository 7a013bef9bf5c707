# SPDX-License-Identifier: Apache-2.0
"""The modules and names that docs/versioning.md promises to keep."""

from __future__ import annotations

import ast
import functools
import re

from tests.docs.pages import ROOT

SOURCE = ROOT / "src"


def promised_modules():
    """Return the modules whose `__all__` is promised, in the page's order."""
    text = (ROOT / "docs/versioning.md").read_text(encoding="utf-8")
    packages = text.split("\nThe packages:\n")[1].split("\nNot promised")[0]
    modules = re.findall(r"`(penstock[.\w]*)`", packages)
    modules.remove("penstock.integrations")
    clients = (ROOT / "docs/reference/integrations.md").read_text(encoding="utf-8")
    return modules + re.findall(r"^::: (penstock\.integrations\.\w+)$", clients, re.MULTILINE)


@functools.cache
def promised_names():
    """Return module -> its promised names. Nothing is imported: a client may not be installed."""
    return {module: _names_in(module) for module in promised_modules()}


def _names_in(module):
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return tuple(names)
