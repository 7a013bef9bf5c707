# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file or record, in one short line beside its name."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from typing import TYPE_CHECKING, Final

import penstock
from penstock.errors import ConfigError, PenstockError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["errors_in_code", "reason_in_code", "reason_of", "short_reason"]

_QUOTED: Final = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ABSENT: Final = re.compile(r"\d+ record\(s\) that the index of .* are not there: .*", re.DOTALL)
_CHANGED: Final = re.compile(rf".* (is damaged or was changed) \(record \d+, {_QUOTED}\)(?=: )")
_OF_SAMPLE: Final = "while reading sample"
_SAMPLE: Final = re.compile(rf"sample {_QUOTED} (?=cannot be stored|has the label)")


def reason_of(error: BaseException) -> str:
    """Return in one line what an error says, without the file's name.

    Example:
        >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.jpg"))
        'No such file or directory'
        >>> reason_of(KeyError("tag"))
        "KeyError: 'tag'"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    try:
        text = " ".join(str(error).split())
    except Exception:  # its own __str__ fails
        text = ""
    is_of_opencv = type(error).__module__ == "cv2"
    speaks = text and (isinstance(error, (ValueError, OSError, PenstockError)) or is_of_opencv)
    return text if speaks else f"{type(error).__name__}: {text or 'no details'}"


def reason_in_code(error: BaseException) -> str:
    """Return in one line what code of the user's raised, and where: its file, line and sample.

    That is the innermost line outside of the libraries. The sample is the one that a loader noted.

    Example:
        >>> try:
        ...     int("three")
        ... except ValueError as error:
        ...     reason_in_code(error).partition("line ")[2]
        "2: ValueError: invalid literal for int() with base 10: 'three'"
    """
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    notes = map(str, getattr(error, "__notes__", ()))
    if sample := next((note for note in notes if note.startswith(_OF_SAMPLE)), ""):
        said = f"{said} ({' '.join(sample.split())})"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_of_library(frame.filename)]
    if not own:
        return said
    return f"{own[-1].filename}, line {own[-1].lineno}: {said}"


def _is_of_library(file: str) -> bool:
    if file.startswith("<frozen") or not (file.endswith(".py") or file.startswith("<")):
        return True  # .pyx: compiled, and the path is one of another machine
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(os.path.dirname(penstock.__file__))
    return any(file.startswith(folder + os.sep) for folder in folders)


@contextlib.contextmanager
def errors_in_code(named: str) -> Iterator[None]:
    """Let what code of the user's raises be told in a line, with its file.

    Args:
        named: As it was named on the command line.

    Raises:
        ConfigError: instead of the exception, which is its cause. Penstock's own pass.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(f"{named}: {reason_in_code(error)}") from error


def short_reason(error: BaseException, position: int, key: str, address: str) -> str:
    """Return what is wrong with a record, without its name, which the line has, and without advice.

    Args:
        error: What reading or storing it raised.
        position: Its number in the store or dataset.
        key: Its name.
        address: Of its store.

    Example:
        >>> error = StoreError("record 3 ('a') of lmdb:x is damaged: no head. Pack it anew.")
        >>> short_reason(error, 3, "a", "lmdb:x")
        'is damaged: no head'
    """
    said = reason_of(error)
    if not isinstance(error, StoreError):
        return said
    name = f"record {position} ({key!r}) of {address}"
    said = said.replace(name, "", 1).lstrip(" :")
    said = _SAMPLE.sub("", _CHANGED.sub(r"\1", _ABSENT.sub("is not there", said)))
    return said.partition(". ")[0].removesuffix(".")
