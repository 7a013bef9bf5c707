# SPDX-License-Identifier: Apache-2.0
"""What tells one dataset, and one function of the user's, from others, in every process alike."""

from __future__ import annotations

import hashlib
import os
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

import numpy as np

from penstock.data.labels.search import length_of

__all__ = ["UntoldError", "dataset_key", "is_plain_subset", "is_unchanged", "value_key"]

_DEEPEST: Final = 32  # datasets made of datasets; values made of values
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_SCALARS: Final = (*_PLAIN, os.PathLike, np.generic, Enum)
_LIBRARIES: Final = ("torch.utils.data", "penstock.data")


class UntoldError(Exception):
    """A value cannot be told from others of its kind."""


def value_key(value: Any) -> str:  # noqa: ANN401
    """Return a digest of a value: of a function with all that it has been given.

    A function is its code, its defaults, what it encloses, and the globals that it names. Anything
    else is what pickle would keep of it.

    Raises:
        UntoldError: it has something within of which that cannot be had, such as a lock.

    Example:
        >>> def times(factor):
        ...     return lambda label: label * factor
        >>> value_key(times(2)) == value_key(times(2)), value_key(times(2)) == value_key(times(3))
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    seen: dict[int, tuple[int, Any]] = {}  # kept, so that no other value gets its id meanwhile
    try:
        for part in _parts(value, seen, 0):
            digest.update(len(part).to_bytes(8, "little") + part)
    except Exception as error:  # whatever the user's own __reduce__ raises
        raise UntoldError(str(error)) from error
    return digest.hexdigest()


def _parts(value: Any, seen: dict[int, tuple[int, Any]], depth: int) -> Iterator[bytes]:  # noqa: ANN401
    """Yield what tells a value, piece by piece."""
    kind = type(value)
    yield _name_of(kind).encode()
    if kind in _PLAIN:
        yield repr(value).encode()
        return
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        yield _name_of(value).encode()
        within: tuple[Any, ...] = (getattr(value, "__self__", None),)
        if not isinstance(within[0], _PLAIN):
            within = ()
    elif id(value) in seen:
        yield b"again %d" % seen[id(value)][0]
        return
    elif _is_flat(value):
        yield repr(value).encode()
        return
    elif depth > _DEEPEST:
        raise UntoldError("too deep")
    else:
        seen[id(value)] = (len(seen), value)
        within = _within(value)
    for inner in within:
        yield from _parts(inner, seen, depth + 1)


def _within(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return what a value is made of."""
    if isinstance(value, types.FunctionType):
        code, given = value.__code__, value.__globals__
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        named = [_global(given[name], value) for name in _names(code) if name in given]
        return (value.__qualname__, code, value.__defaults__, value.__kwdefaults__, cells, named)
    if isinstance(value, types.CodeType):
        return (value.co_code, value.co_names, value.co_consts)
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return tuple(value)
    if type(value) is dict:
        return tuple(value.items())
    if type(value) in (set, frozenset):  # in no order, and pickled in any
        return tuple(sorted(value, key=repr))
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return (str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes())
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global of that name
        return (type(value).__module__, reduced)
    return tuple(list(part) if isinstance(part, Iterator) else part for part in reduced)


def _is_flat(value: Any) -> bool:  # noqa: ANN401
    """Whether it is a list or table of numbers and texts, which may be long."""
    if type(value) is dict:
        return set(map(type, value)) | set(map(type, value.values())) <= set(_PLAIN)
    return type(value) in (list, tuple) and set(map(type, value)) <= set(_PLAIN)


def _global(value: Any, function: types.FunctionType) -> Any:  # noqa: ANN401
    """Return what a function has from its module; of others' functions the names."""
    is_others = isinstance(value, types.FunctionType) and value.__module__ != function.__module__
    return _name_of(value) if is_others else value


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code, or code within it, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _name_of(value: Any) -> str:  # noqa: ANN401
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"


def dataset_key(dataset: Any, depth: int = 0) -> Any:  # noqa: ANN401
    """Return what a dataset is, as JSON: classes, lengths, which samples of which, and settings.

    Settings are the numbers and texts among its attributes, as a split or a task: two datasets of
    one class and length may differ in nothing else.
    """
    if dataset is None or depth > _DEEPEST:
        return None
    key: dict[str, Any] = {"class": _name_of(type(dataset)), "length": length_of(dataset)}
    kept = getattr(dataset, "__dict__", {})
    key["settings"] = value_key(
        {str(name): repr(value) for name, value in kept.items() if isinstance(value, _SCALARS)}
    )
    key["indices"] = _digest(getattr(dataset, "indices", None))
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (Mapping, list, tuple)):
        within = list(parts.values()) if isinstance(parts, Mapping) else parts
        key["parts"] = [dataset_key(part, depth + 1) for part in within]
    if (inner := getattr(dataset, "dataset", None)) is not None:
        key["of"] = dataset_key(inner, depth + 1)
    return key


def is_plain_subset(dataset: object) -> bool:
    """Whether a dataset is torch's `Subset` or ours, and nothing derived from one."""
    kind = type(dataset)
    return kind.__name__ == "Subset" and kind.__module__.startswith(_LIBRARIES)


def is_unchanged(dataset: Any) -> bool:  # noqa: ANN401
    """Whether a fingerprint speaks for the labels, as samples give them, of a dataset or a subset.

    Anything around what has the fingerprint may change samples, and so may its transforms.
    """
    for _ in range(_DEEPEST):
        if not is_plain_subset(dataset):
            break
        if _digest(dataset.indices) is None:
            return False
        dataset = dataset.dataset
    kept = getattr(dataset, "__dict__", {})
    changes = any("transform" in name and value is not None for name, value in kept.items())
    is_wrapper = getattr(dataset, "dataset", None) is not None
    return isinstance(getattr(dataset, "fingerprint", None), str) and not (changes or is_wrapper)


def _digest(values: Any) -> str | None:  # noqa: ANN401
    if values is None:
        return None
    try:
        array = np.ascontiguousarray(np.asarray(values))
        return hashlib.blake2b(array.astype(np.int64).data, digest_size=8).hexdigest()
    except Exception:  # not numbers: keys of another kind
        try:
            return value_key(list(values))
        except Exception:
            return None
