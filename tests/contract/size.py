# SPDX-License-Identifier: Apache-2.0
"""How large each package is; exit status 1 above a ceiling. `make contracts` runs it.

Lines of code are without blank lines, comments and docstrings, counted by `ast`. A commit that
raises a ceiling says which lines the new ones replace.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CEILINGS: Final = {
    "src/penstock": {"code": 40_300, "docstrings": 11_850},
    "tests": {"code": 59_500},
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(path: Path) -> Counter[str]:
    """Return how many lines of "code" and "docstrings" a file has."""
    text = path.read_text("utf-8")
    docstrings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    code = sum(
        number not in docstrings and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )
    return Counter(files=1, code=code, docstrings=len(docstrings))


def measure(folder: Path) -> dict[str, Counter[str]]:
    """Return the lines of each package in a folder; its own files are under the folder's name."""
    sizes: dict[str, Counter[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        sizes.setdefault(parts[0] if len(parts) > 1 else ".", Counter()).update(lines_of(path))
    return sizes


def main() -> int:
    """Print the table of both trees; return 1 if one is above its ceiling."""
    status = 0
    for name, ceilings in CEILINGS.items():
        sizes = measure(ROOT / name)
        total = sum(sizes.values(), Counter[str]())
        print(f"{name:24}{'files':>8}{'code':>8}{'docstrings':>12}")
        for package, size in [*sorted(sizes.items(), key=lambda p: -p[1]["code"]), ("all", total)]:
            print(f"  {package:22}{size['files']:8,}{size['code']:8,}{size['docstrings']:12,}")
        for kind, ceiling in ceilings.items():
            print(f"  ceiling of {kind}: {ceiling:,}")
            status |= total[kind] > ceiling
    if status:
        print("Above a ceiling: remove what the new lines replace (CONTRIBUTING.md).")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
