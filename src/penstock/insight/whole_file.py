# SPDX-License-Identifier: Apache-2.0
"""A file that is there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path
from typing import Final

__all__ = ["write_whole"]

_DEVICES: Final = (("/", "dev"), ("/", "proc"))  # `/dev/stdout` may lead to a regular one


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text as UTF-8; whoever opens the path meanwhile gets the old file, or the new one.

    Args:
        path: Where to; a leading `~` is the user's home. An existing file is replaced, and keeps
            its permissions; what a link leads to is replaced, and not the link. What is no regular
            file, as a pipe, is written to.
        text: Halves of surrogate pairs, which UTF-8 has not, become question marks.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written; what was there before is still there.

    Concurrency:
        Any thread.
    """
    path = Path(path).expanduser()
    content = text.encode("utf-8", "replace")
    mode = _mode_of(path)
    if (mode is not None and not stat.S_ISREG(mode)) or path.absolute().parts[:2] in _DEVICES:
        path.write_bytes(content)
    else:
        _replace(path.resolve(), content, mode)
    return path


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(path: Path, content: bytes, mode: int | None) -> None:
    # Short, as the path's own name may be as long as names can be.
    partial = path.with_name(f".{os.getpid():x}-{threading.get_ident():x}.partial")
    try:
        with open(partial, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
