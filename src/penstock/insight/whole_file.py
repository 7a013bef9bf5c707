# SPDX-License-Identifier: Apache-2.0
"""A file that is there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text as UTF-8; whoever opens the path meanwhile gets the old file, or the new one.

    Args:
        path: Where to; an existing file is replaced.
        text: Halves of surrogate pairs, which UTF-8 has not, become question marks.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written; what was there before is still there.

    Concurrency:
        Any thread.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return path
