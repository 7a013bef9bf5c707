# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file or record, in one short line beside its name."""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import PenstockError, StoreError

__all__ = ["reason_of", "short_reason"]

_QUOTED: Final = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ABSENT: Final = re.compile(r"\d+ record\(s\) that the index of .* are not there: .*", re.DOTALL)
_CHANGED: Final = re.compile(rf".* (is damaged or was changed) \(record \d+, {_QUOTED}\)(?=: )")
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
