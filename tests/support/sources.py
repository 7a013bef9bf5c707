# SPDX-License-Identifier: Apache-2.0
"""What is read from a Python file without running it."""

from __future__ import annotations

import ast


def imported_at_top(path):
    """Return the names of the packages that a file imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found
