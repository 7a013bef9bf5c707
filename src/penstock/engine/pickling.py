# SPDX-License-Identifier: Apache-2.0
"""Sending the recipe to workers that are not forked, once for all of them."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import UnpicklableError
from penstock.transport.packing import NeedsInheritance, dumps
from penstock.transport.shared import share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engine.plan import Recipe

__all__ = ["share_recipe", "unpicklable_error"]

_ADVICE: Final = (
    "Under the start methods spawn and forkserver everything a worker needs is pickled. Use a "
    "function or class defined at the top level of a module (functools.partial for arguments), "
    'open files and connections lazily in the worker, or use multiprocessing_context="fork".'
)
_PARTS = ("dataset", "collate_fn", "worker_init_fn")


def share_recipe(recipe: Recipe) -> int | None:
    """Return the descriptor of a segment that holds `recipe`, pickled once for all workers.

    Returns:
        The descriptor, the caller's to close, or None where the recipe holds something that can
        only be handed to a child while it is being started (a lock, a queue, a tensor in shared
        memory): then `multiprocessing` has to pickle it, once per worker.

    Raises:
        UnpicklableError: it cannot be pickled at all; names the attribute that cannot.
    """
    try:
        return share(recipe)
    except NeedsInheritance:
        return None
    except Exception as error:
        if "through inheritance" in str(
            error
        ):  # multiprocessing's own objects say it in these words
            return None
        raise unpicklable_error(recipe, error) from error


def unpicklable_error(
    recipe: Recipe, error: Exception, *, advice: str = _ADVICE
) -> UnpicklableError:
    """Return an error that names the attribute of `recipe` that made pickling fail with `error`."""
    found: tuple[str, object, Exception] = ("the dataset", recipe.dataset, error)
    for part in _PARTS:
        found = _find_unpicklable(part, getattr(recipe, part), set()) or found
    path, culprit, cause = found
    return UnpicklableError(
        f"{path} cannot be sent to a worker: {type(cause).__name__}: {cause}. "
        f"It is {_describe(culprit)}. {advice}"
    )


def _describe(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _find_unpicklable(
    path: str, value: object, seen: set[int]
) -> tuple[str, object, Exception] | None:
    """Return path, object and error of the innermost thing below `value` that does not pickle."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    try:
        dumps(value, lambda _buffer: False)
    except Exception as error:
        for child_path, child in _children(path, value):
            if (found := _find_unpicklable(child_path, child, seen)) is not None:
                return found
        return path, value, error
    return None


def _children(path: str, value: Any) -> Iterator[tuple[str, object]]:  # noqa: ANN401
    if isinstance(value, dict):
        for key, member in value.items():
            yield f"{path}[{key!r}]", member
    elif isinstance(value, (list, tuple, set, frozenset)):
        for position, member in enumerate(value):
            yield f"{path}[{position}]", member
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield f"{path}.args", value.args
        yield f"{path}.keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif not isinstance(value, (type, types.FunctionType)):
        yield from _attributes(path, value)


def _attributes(path: str, value: Any) -> Iterator[tuple[str, object]]:  # noqa: ANN401
    try:
        state = value.__getstate__()
    except Exception:
        return
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            for name, member in attributes.items():
                yield f"{path}.{name}", member
