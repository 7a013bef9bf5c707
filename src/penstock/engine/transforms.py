# SPDX-License-Identifier: Apache-2.0
"""Which of a dataset's transforms an exception came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

__all__ = ["innermost_transform", "transform_that_raised"]

_NAMES: Final = ("transform", "target_transform", "transforms", "whole_transform")
_DEEPEST: Final = 5  # of transforms made of transforms, and datasets made of datasets


def transform_that_raised(dataset: object, error: BaseException) -> str | None:
    """Return the name of the innermost transform whose code `error` passed, or None.

    Looked for are the dataset's attributes `transform`, `target_transform`, `transforms`, as
    torchvision and Albumentations have it, `whole_transform`, and what they are made of.
    """
    # Not the first frame, our own, in which `error` is a variable: looking at a frame's variables
    # makes a copy of them that lives as long as the frame, and the two would keep each other.
    traceback = error.__traceback__ and error.__traceback__.tb_next
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
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
    inner = _attribute(owner, "dataset")  # of a Subset, say
    if inner is not None:
        yield from _transforms_of(inner, depth + 1)
    for name in _NAMES:
        value = _attribute(owner, name)
        parts = value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            if callable(part):
                yield part
                yield from _transforms_of(part, depth + 1)


def _attribute(owner: object, name: str) -> Any:  # noqa: ANN401
    try:
        return getattr(owner, name, None)
    except Exception:  # a property that fails: this is asked while another error is being told
        return None
