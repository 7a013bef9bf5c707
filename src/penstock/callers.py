# SPDX-License-Identifier: Apache-2.0
"""Whose line a warning is about."""

from __future__ import annotations

import contextlib
import functools
import os
import sys

__all__ = ["users_level"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Between our frames: what calls our loader, our cached properties and our context managers.
_OTHERS = (
    os.path.join("torch", "utils", "data", "dataloader.py"),
    os.path.join("torch", "utils", "data", "sampler.py"),
    functools.__file__,
    contextlib.__file__,
)


def users_level() -> int:
    """Return the `stacklevel` for a warning of the caller that names the user's line.

    That is the innermost frame whose code is not Penstock's (nor torch's loader, which calls ours).
    Python 3.12 has `skip_file_prefixes` for it.

    Example:
        >>> users_level()
        1
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    return level


def _is_inside(filename: str) -> bool:
    return filename.startswith(_OURS) or filename.endswith(_OTHERS)
