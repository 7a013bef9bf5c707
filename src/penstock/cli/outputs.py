# SPDX-License-Identifier: Apache-2.0
"""Files that options name: refused before the work where they cannot be written, whole after it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.whole_file import is_stream, refuse_special, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["check_output", "write_output", "writing"]


def check_output(option: str, path: Path | None) -> None:
    """Rather now than after minutes of work; nothing is checked of None.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"cannot write {option} {path}: name a file in a folder that exists.")
    if not is_stream(path):
        with writing(option, path):
            refuse_special(path)


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Write a file as a whole, or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing(option, path):
        write_whole(path, content)


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Make the system's error of a file that cannot be written one of ours.

    Raises:
        ConfigError: so it is.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {option} {path}: {error.strerror}.") from error
