# SPDX-License-Identifier: Apache-2.0
"""Whose line a warning is about: the first frame outside of this package."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import traceback
import warnings

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Between our frames: what calls our loader, our cached properties and our context managers.
_OTHERS = (
    os.path.join("torch", "utils", "data", "dataloader.py"),
    os.path.join("torch", "utils", "data", "sampler.py"),
    functools.__file__,
    contextlib.__file__,
)
# "<string>" is `python -c`, by which multiprocessing starts a spawned process.
_INSTALLED = ("<string>", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "scripts")))


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the user's line."""
    warnings.warn(message, category, stacklevel=users_level())


def users_level() -> int:
    """Return the `stacklevel` for a warning of the caller that names the user's line.

    That is the innermost frame whose code is not Penstock's (nor torch's loader, which calls ours).
    """
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    return level


def users_place() -> str:
    """Return the line of the program that this call comes from, as "train.py:31".

    That is the innermost one outside of Penstock and of all installed packages, so that a loader
    which a framework makes is its user's; where there is none, the innermost outside of Penstock.
    """
    outside = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        filename = frame.f_code.co_filename
        if not (_is_inside(filename) or filename.startswith("<frozen")):
            outside.append((filename, line))
    places = [place for place in outside if not _is_installed(place[0])] or outside
    if not places:
        return ""
    filename, line = places[0]
    with contextlib.suppress(FileNotFoundError):  # the folder may be gone
        filename = filename.removeprefix(os.getcwd() + os.sep)
    return f"{filename}:{line}"


def _is_installed(filename: str) -> bool:
    # By name: not this environment's packages alone.
    return filename.startswith(_INSTALLED) or "-packages" + os.sep in filename


def _is_inside(filename: str) -> bool:
    return filename.startswith(_OURS) or filename.endswith(_OTHERS)
