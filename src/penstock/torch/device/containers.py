# SPDX-License-Identifier: Apache-2.0
"""Walks a batch as torch's `pin_memory` does: what a leaf is, and what becomes of containers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["map_leaves"]

_STAY: Final = (str, bytes, bytearray, int, float, complex, type(None))


def map_leaves(tree: Any, fn: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return a batch with `fn(leaf)` for each of its leaves, in containers of the same types.

    Leaves are tensors, and objects whose class has a method `to`: a named tuple with a field of
    that name, or a mapping that gives its items as attributes, is none. A leaf that is in the tree
    twice is one object in the result too. What is neither container nor leaf stays as it is:
    numbers, texts, arrays, dataclasses. The containers of `tree` are not written to.

    Example:
        >>> map_leaves({"x": torch.ones(2), "name": "a"}, lambda leaf: leaf + 1)
        {'x': tensor([2., 2.]), 'name': 'a'}
    """
    memo: dict[int, tuple[Any, Any]] = {}  # the leaf too: once it is gone, its id is another's

    try:
        return _mapped(tree, fn, memo)
    finally:
        memo.clear()  # the frames of an error would keep what was made until then


def _mapped(tree: Any, fn: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]) -> Any:  # noqa: ANN401
    if isinstance(tree, _STAY):
        return tree
    if isinstance(tree, torch.Tensor) or callable(getattr(type(tree), "to", None)):
        known = memo.get(id(tree))
        if known is None:
            known = memo[id(tree)] = tree, fn(tree)
        return known[1]
    # The parts are made first: a TypeError of theirs is none of the container's constructor.
    if isinstance(tree, Mapping):
        return _like(tree, {key: _mapped(part, fn, memo) for key, part in tree.items()})
    if isinstance(tree, Sequence):
        parts = [_mapped(part, fn, memo) for part in tree]
        return _like(tree, tuple(parts) if isinstance(tree, tuple) else parts)
    return tree


def _like(container: Any, parts: Any) -> Any:  # noqa: ANN401
    """Return parts in a container of the same type; as a dict, list or tuple if that fails.

    A `defaultdict` keeps its default, a named tuple its names, a user's list its attributes.
    """
    kind = type(container)
    if kind in (dict, list, tuple):
        return parts
    try:
        if isinstance(container, MutableMapping | MutableSequence):
            clone: Any = copy.copy(container)
            if isinstance(parts, dict):
                clone.update(parts)
            else:
                for position, part in enumerate(parts):
                    clone[position] = part
            return clone
        return kind(*parts) if hasattr(container, "_fields") else kind(parts)
    except TypeError:
        return parts  # a range, say
