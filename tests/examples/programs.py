# SPDX-License-Identifier: Apache-2.0
"""Examples run as the programs that they are, and their modules imported."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from tests.support.processes import python

__all__ = ["ENVIRONMENT", "imported", "run"]

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",  # more would fight for the cores of a busy machine
    "NO_ALBUMENTATIONS_UPDATE": "1",  # it asks PyPI for its newest release
}


def run(*command):
    """Run Python on `command`; return what it printed."""
    done = python(*command, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def imported(folder, names):
    """Give modules of an example, by names that other examples have as well."""
    sys.path.insert(0, str(folder))
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(folder))
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
