# SPDX-License-Identifier: Apache-2.0
"""A class name is defined once in the package, so that a name in a traceback says which it is."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "penstock"


def test_a_class_name_is_defined_once():
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(SOURCE).as_posix())
    assert len(places) >= 350
    repeated = {name: set(files) for name, files in places.items() if len(files) > 1}
    assert not repeated
