# SPDX-License-Identifier: Apache-2.0
"""The drawing of one batch's way on the design page names functions that are there."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT


def names_in(path):
    """Return the names that a module defines at its top level, and the members of its classes."""
    names, kinds = set(), (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, kinds):
            names.add(node.name)
            names.update(f"{node.name}.{of.name}" for of in node.body if isinstance(of, kinds))
    return names


def test_the_way_of_one_batch_is_along_functions_that_are_there():
    page = (ROOT / "docs/design/index.md").read_text("utf-8")
    drawing = page.split("## One batch, from end to end")[1].split("```")[1]
    named = re.findall(r"([\w/]+\.py):([\w.]+)", drawing)
    assert len(named) > 20
    package = ROOT / "src/penstock"
    missing = [(file, name) for file, name in named if name not in names_in(package / file)]
    assert not missing
