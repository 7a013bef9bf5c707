# SPDX-License-Identifier: Apache-2.0
"""Walks a batch as torch's `pin_memory` does: what a leaf is, and what becomes of containers."""

from __future__ import annotations

import collections.abc
import copy
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["map_leaves"]

_STAY: Final = (str, bytes, bytearray, int, float, complex, type(None))

# By id; the leaf is in it too, as an id is another object's once its own is gone.
_Memo = dict[int, tuple[Any, Any]]


def map_leaves(tree: Any, fn: Callable[[Any], Any], method: str = "to") -> Any:  # noqa: ANN401
    """Return a batch with `fn(leaf)` for each of its leaves, in containers of the same types.

    A mapping or sequence is copied, and keeps its type as far as it lets itself be made: a
    `defaultdict` its default, a named tuple its names, a list of the user's own its attributes. One
    that does not becomes a dict, list or tuple. The containers of `tree` are not written to. What
    is neither container nor leaf stays as it is: numbers, texts, arrays, dataclasses.

    Args:
        tree: Any nesting of mappings and sequences, without loops.
        fn: Called once per leaf; one that is in the tree twice is one object in the result too.
        method: Leaves are tensors, and objects whose class has a method of this name. A named tuple
            with a field of that name, or a mapping that gives its items as attributes, is none.

    Raises:
        Exception: what `fn` or a container raised.

    Example:
        >>> map_leaves({"x": torch.ones(2), "name": "a"}, lambda leaf: leaf + 1)
        {'x': tensor([2., 2.]), 'name': 'a'}
    """
    memo: _Memo = {}
    try:
        return _mapped(tree, fn, method, memo)
    finally:
        memo.clear()  # the frames of an error would keep what was made until then


def _mapped(tree: Any, fn: Callable[[Any], Any], method: str, memo: _Memo) -> Any:  # noqa: ANN401
    if isinstance(tree, _STAY):
        return tree
    if isinstance(tree, torch.Tensor) or callable(getattr(type(tree), method, None)):
        known = memo.get(id(tree))
        if known is None:
            known = memo[id(tree)] = tree, fn(tree)
        return known[1]
    # The parts are made first: a TypeError of theirs is none of the container's constructor.
    if isinstance(tree, collections.abc.Mapping):
        return _mapping_of(
            tree, {key: _mapped(part, fn, method, memo) for key, part in tree.items()}
        )
    if isinstance(tree, tuple):
        return _tuple_of(tree, [_mapped(part, fn, method, memo) for part in tree])
    if isinstance(tree, collections.abc.Sequence):
        return _sequence_of(tree, [_mapped(part, fn, method, memo) for part in tree])
    return tree


def _mapping_of(like: collections.abc.Mapping[Any, Any], parts: dict[Any, Any]) -> Any:  # noqa: ANN401
    if type(like) is dict:
        return parts
    try:
        if isinstance(like, collections.abc.MutableMapping):
            clone = copy.copy(like)
            clone.update(parts)
            return clone
        return _made(type(like), parts)
    except TypeError:
        return parts


def _tuple_of(like: tuple[Any, ...], parts: list[Any]) -> Any:  # noqa: ANN401
    if type(like) is tuple:
        return tuple(parts)
    try:
        if hasattr(like, "_fields"):
            return type(like)(*parts)
        return _made(type(like), parts)
    except TypeError:
        return tuple(parts)


def _sequence_of(like: collections.abc.Sequence[Any], parts: list[Any]) -> Any:  # noqa: ANN401
    if type(like) is list:
        return parts
    try:
        if isinstance(like, collections.abc.MutableSequence):
            clone = copy.copy(like)
            for position, part in enumerate(parts):
                clone[position] = part
            return clone
        return _made(type(like), parts)
    except TypeError:
        return parts  # a range, say


def _made(kind: Callable[[Any], Any], parts: Iterable[Any]) -> Any:  # noqa: ANN401
    return kind(parts)
