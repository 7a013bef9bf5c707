# SPDX-License-Identifier: Apache-2.0
"""What an error says, in one line."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from typing import TYPE_CHECKING, Final

import penstock
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDEST: Final = 400  # characters
_OF_SAMPLE: Final = "while reading sample"


def reason_of(error: BaseException) -> str:
    """Return what an error says, without the file's name of an OSError.

    Example:
        >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.jpg"))
        'No such file or directory'
        >>> reason_of(KeyError("tag"))
        "KeyError: 'tag'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())[:_WIDEST]
    is_of_opencv = type(error).__module__ == "cv2"
    speaks = text and (isinstance(error, (ValueError, OSError, PenstockError)) or is_of_opencv)
    return text if speaks else f"{type(error).__name__}: {text or 'no details'}"


def reason_in_code(error: BaseException) -> str:
    """Return what the user's code raised and where: the innermost line outside of libraries.

    Example:
        >>> try:
        ...     int("three")
        ... except ValueError as error:
        ...     reason_in_code(error).partition("line ")[2]
        "2: ValueError: invalid literal for int() with base 10: 'three'"
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    said = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:_WIDEST]
    notes = map(str, getattr(error, "__notes__", ()))
    if sample := next((note for note in notes if note.startswith(_OF_SAMPLE)), ""):
        said += f" ({' '.join(sample.split())})"
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = [folder + os.sep for folder in (*libraries, os.path.dirname(penstock.__file__))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # Of a compiled module (.pyx) the path is one of another machine.
        is_python = frame.filename.endswith((".py", ">"))
        if is_python and not frame.filename.startswith(("<frozen", *libraries)):
            return f"{frame.filename}, line {frame.lineno}: {said}"
    return said


@contextlib.contextmanager
def errors_in_code(named: str, *, is_code: bool = True) -> Iterator[None]:
    """Raise ConfigError in place of what the user's code raises, with its file and line.

    Args:
        named: The code, as on the command line.
        is_code: Whether it is code of the user's; else nothing is changed.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if not is_code:
            raise
        raise ConfigError(f"{named}: {reason_in_code(error)}") from error
