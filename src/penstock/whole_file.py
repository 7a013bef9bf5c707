# SPDX-License-Identifier: Apache-2.0
"""Files that are there as a whole, or not at all; and what no file may take the place of."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from pathlib import Path
from typing import Final

from penstock.opening import KINDS

# What a shell opens for a program, or throws away: it is written to, whatever it is.
_STREAM: Final = re.compile(
    r"/dev/(?:null|tty|pts/\d+|stdout|stderr|fd/\d+)|/proc/(?:self|\d+)/fd/\d+"
)


def refuse_special(path: str | os.PathLike[str], *, follow_links: bool = True) -> None:
    """Raise unless there is nothing at a path, a regular file, or a folder."""
    try:
        mode = os.stat(path, follow_symlinks=follow_links).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = KINDS.get(stat.S_IFMT(mode), "a link")
        text = f"{os.fspath(path)} is {kind}, and nothing is put in its place: name another"
        raise OSError(errno.EINVAL, text, os.fspath(path))


def write_whole(
    path: str | os.PathLike[str], content: str | bytes, *, to_disk: bool = False
) -> Path:
    """Write a file; at every moment the path is the old file, or the new one.

    With `to_disk` that holds where the machine goes down, too.
    """
    path = Path(path).expanduser()
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    if is_stream(path):
        path.write_bytes(data)
    else:
        refuse_special(path)
        _replace(path.resolve(), data, to_disk=to_disk)
    return path


def fsync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_stream(path: Path) -> bool:
    """Return whether a path names a stream of the shell's, as `/dev/stdout`."""
    return _STREAM.fullmatch(os.fspath(path.absolute())) is not None


def _replace(path: Path, data: bytes, *, to_disk: bool) -> None:
    # Short, as the path's own name may be as long as names can be.
    partial = path.with_name(f".{os.getpid():x}-{threading.get_ident():x}.partial")
    try:
        with open(partial, "xb") as file:
            with contextlib.suppress(FileNotFoundError, AttributeError):  # Windows has no fchmod
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
            if to_disk:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
        if to_disk:
            fsync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
