# SPDX-License-Identifier: Apache-2.0
"""The user's part of a stack: from the innermost frame out, up to the engine that called it."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import threading
    from types import FrameType

__all__ = ["frames_of_user", "stack_of_error", "stack_of_thread"]

_ENGINE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


def frames_of_user(frame: FrameType | None) -> list[FrameType]:
    """Return `frame` and those that called it, up to the engine; the innermost first."""
    frames: list[FrameType] = []
    while frame is not None and not frame.f_code.co_filename.startswith(_ENGINE):
        frames.append(frame)
        frame = frame.f_back
    return frames


def stack_of_thread(thread: threading.Thread) -> str:
    """Return where a thread is in the user's code; empty if it is in the engine."""
    frames = frames_of_user(sys._current_frames().get(thread.ident or 0))
    lines = [(frame, frame.f_lineno) for frame in reversed(frames)]
    return "".join(traceback.StackSummary.extract(iter(lines)).format()).rstrip()


def stack_of_error(error: BaseException) -> str:
    """Return where it was raised: the user's lines, if it was there."""
    entries = traceback.extract_tb(error.__traceback__)
    ours = [k for k, entry in enumerate(entries) if entry.filename.startswith(_ENGINE)]
    users = entries[ours[-1] + 1 :] if ours else entries
    return "".join(traceback.format_list(users or entries))
