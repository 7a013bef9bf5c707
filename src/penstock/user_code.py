# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code something was raised or runs: its lines, and which of its transforms."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator
    from types import FrameType


_ENGINE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "engine", "")


def frames_of_user(frame: FrameType | None) -> list[FrameType]:
    """Return `frame` and those that called it, up to the engine; the innermost first."""
    frames = []
    while frame is not None and not frame.f_code.co_filename.startswith(_ENGINE):
        frames.append(frame)
        frame = frame.f_back
    return frames


def stack_of_thread(thread: threading.Thread) -> str:
    """Return where another thread is in the user's code; empty if it is in the engine."""
    # The objects of its frames are made here. A collection meanwhile could run a finalizer that
    # lets the thread go on: CPython 3.11 then reads a frame that is gone, and crashes.
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = frames_of_user(sys._current_frames().get(thread.ident or 0))
    finally:
        if collects:
            gc.enable()
    lines = [(frame, frame.f_lineno) for frame in reversed(frames)]
    return "".join(traceback.StackSummary.extract(iter(lines)).format()).rstrip()


def stack_of_error(error: BaseException) -> str:
    """Return where it was raised: the user's lines, if it was there."""
    entries = traceback.extract_tb(error.__traceback__)
    ours = [k for k, entry in enumerate(entries) if entry.filename.startswith(_ENGINE)]
    users = entries[ours[-1] + 1 :] if ours else entries
    return "".join(traceback.format_list(users or entries))


_NAMES: Final = ("dataset", "transform", "target_transform", "transforms", "whole_transform")
_DEEPEST: Final = 5  # of transforms made of transforms, and datasets made of datasets


def transform_that_raised(dataset: object, error: BaseException) -> str | None:
    """Return the name of the innermost transform whose code `error` passed, or None.

    Looked for are the dataset's attributes `transform`, `target_transform`, `transforms`, as
    torchvision and Albumentations have it, `whole_transform`, and what they are made of.
    """
    # Not the first frame, our own, in which `error` is a variable: looking at a frame's variables
    # makes a copy of them that lives as long as the frame, and the two would keep each other.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    return innermost_transform(dataset, frames)


def innermost_transform(dataset: object, frames: Iterable[FrameType]) -> str | None:
    """Return the name of the transform that the innermost of `frames` belongs to, or None.

    Args:
        dataset: As for `transform_that_raised`.
        frames: The outermost first.
    """
    known = list(_transforms_of(dataset, 0))
    found = None
    for frame in frames:
        of_frame = frame.f_locals.get("self"), frame.f_code
        for transform in known:
            code = getattr(transform, "__code__", None)
            if transform is of_frame[0] or (code is not None and code is of_frame[1]):
                found = transform
    return None if found is None else getattr(found, "__qualname__", type(found).__name__)


def _transforms_of(owner: object, depth: int) -> Iterator[Any]:
    if depth > _DEEPEST:
        return
    for name in _NAMES:
        value = None
        with contextlib.suppress(Exception):  # a property that fails
            value = getattr(owner, name, None)
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if name != "dataset" and callable(part):
                yield part
            if part is not None:
                yield from _transforms_of(part, depth + 1)
