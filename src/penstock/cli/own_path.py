# SPDX-License-Identifier: Apache-2.0
"""Import path: modules come from where Penstock's own do, not from the current folder.

A data set may have a file `multiprocessing.py`. `python -m penstock` puts the current folder on the
path, and so does `python -c`, by which multiprocessing starts its processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["without_current_folder"]


@contextlib.contextmanager
def without_current_folder() -> Iterator[None]:
    """Take the current folder off the path, here and in the processes that are started meanwhile.

    These get this process's path, once they have begun: where the user's own module was named, the
    current folder is on it.
    """
    flags: Any = vars(util)["_args_from_interpreter_flags"]  # asked for by each way to start one
    vars(util)["_args_from_interpreter_flags"] = lambda: [*flags(), "-P"]
    path = sys.path.copy()
    if _is_put_first():
        del sys.path[0]
    try:
        yield
    finally:
        sys.path[:] = path
        vars(util)["_args_from_interpreter_flags"] = flags


def _is_put_first() -> bool:
    """Whether the first folder of the path is the current one, put there by `python -m`."""
    first = (sys.path[0] if sys.path else "") or os.curdir
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    is_current = Path(first).is_dir() and os.path.samefile(first, os.curdir)
    is_needed = Path(penstock.__file__).parents[1] == Path(first)
    return not sys.flags.safe_path and is_module and is_current and not is_needed
