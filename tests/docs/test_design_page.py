# SPDX-License-Identifier: Apache-2.0
"""Where pages say which function makes a step, that function is there: Penstock's and torch's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch.utils.data
from tests.docs.pages import ROOT

PACKAGE = ROOT / "src/penstock"


def names_in(path):
    """Return the names that a module defines at its top level, and the members of its classes."""
    names, kinds = set(), (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, kinds):
            names.add(node.name)
            names.update(f"{node.name}.{of.name}" for of in node.body if isinstance(of, kinds))
    return names


def missing_of(text, package):
    """Return the pairs `file:function` of a text that the package lacks, and how many it names."""
    named = re.findall(r"([\w/]+\.py):([\w.]+)", text)
    return [pair for pair in named if pair[1] not in names_in(package / pair[0])], len(named)


def test_the_way_of_one_batch_is_along_functions_that_are_there():
    page = (ROOT / "docs/design/index.md").read_text("utf-8")
    drawing = page.split("## One batch, from end to end")[1].split("```")[1]
    missing, count = missing_of(drawing, PACKAGE)
    assert not missing
    assert count > 20


def test_the_call_flow_names_functions_of_torch_and_of_penstock():
    page = (ROOT / "docs/guide/call-flow.md").read_text("utf-8")
    rows = [line.split("|") for line in page.split("## Where each step is")[1].splitlines()]
    rows = [row for row in rows if len(row) == 6][2:]
    for column, package in ((3, Path(torch.utils.data.__file__).parent), (4, PACKAGE)):
        missing, count = missing_of("\n".join(row[column] for row in rows), package)
        assert not missing
        assert count >= len(rows) > 15
