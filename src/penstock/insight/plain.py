# SPDX-License-Identifier: Apache-2.0
"""Values that go through JSON, and dataclasses read back from it with every part checked."""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import os
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.redact import is_secret_name, without_password, without_queries

__all__ = ["JSON", "key_of_sample", "plain", "plain_text", "read_as", "read_versioned"]

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]

_LONGEST: Final = 2000  # characters of a text
_DEEPEST: Final = 8
_MOST_ITEMS: Final = 1000


def plain(value: object, depth: int = 0) -> JSON:
    """Return a value as JSON has it: exact for numbers, texts, lists and dicts of such.

    Of anything else only the name of its class is kept: its text may hold an address with a
    password. Passwords and queries of addresses are taken out of texts as well, and texts that have
    the name of a secret.

    Example:
        >>> plain({"batch_size": np.int64(8), "sampler": object(), 3: float("nan")})
        {'batch_size': 8, 'sampler': 'object', '3': None}
        >>> plain("mongodb://me:secret@host/db")
        'mongodb://me:***@host/db'
        >>> plain({"access_token": "abc"})
        {'access_token': '***'}
    """
    if value is None or isinstance(value, (bool, np.bool_)):
        return None if value is None else bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, (str, os.PathLike)):
        return plain_text(os.fspath(value))
    if isinstance(value, type):
        return value.__name__
    if depth < _DEEPEST and isinstance(value, Mapping):
        pairs = itertools.islice(value.items(), _MOST_ITEMS)
        named = [(key if isinstance(key, str) else str(plain(key)), item) for key, item in pairs]
        return {
            plain_text(key): "***" if _is_secret(key, item) else plain(item, depth + 1)
            for key, item in named
        }
    if depth < _DEEPEST and isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value[:_MOST_ITEMS]]
    return type(value).__name__


def _is_secret(name: str, value: object) -> bool:
    is_number = value is None or isinstance(value, (bool, numbers.Number))
    return is_secret_name(name) and not is_number


def plain_text(text: str | bytes) -> str:
    """Return a text that JSON takes, of 2,000 characters at most, without passwords."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    # A name of a file may hold bytes that are no UTF-8, and JSON no halves of surrogate pairs.
    text = text.encode(errors="replace").decode()
    return without_password(without_queries(text))[:_LONGEST]


def key_of_sample(index: object) -> int | str | None:
    """Return the key of a sample as a number or a text."""
    if index is None or isinstance(index, str):
        return None if index is None else plain_text(index)
    if isinstance(index, numbers.Integral):
        return int(index)
    try:
        return plain_text(str(index))
    except Exception:  # a key may be anything
        return type(index).__name__


def read_as(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - a type, and what is to be one
    """Return `value` as the type `kind` has it.

    Args:
        kind: A dataclass, a list, tuple or dict of something, a union, or a scalar.
        value: What `json.loads` returned.
        where: What it is called in messages, as "recording".

    Raises:
        ConfigError: a part is missing, unknown, or of another type. A field that was added to a
            dataclass after others had been written says so by `metadata={"older_lack_it": True}`.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if kind is object or bool in args:  # the only union with it is JSON
        return value
    if origin in (tuple, list):
        _expect(isinstance(value, list), "a list", value, where)
        return origin(read_as(args[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), "an object", value, where)
        are_numbers = all(re.fullmatch("-?[0-9]{1,18}", str(key)) for key in value)
        _expect(args[0] is str or are_numbers, "an object with numbers for keys", value, where)
        return {args[0](key): read_as(args[1], v, f"{where}.{key}") for key, v in value.items()}
    if args:  # a union: the first kind that fits
        *kinds, last = [kind for kind in args if kind is not type(None)]
        if value is None and type(None) in args:
            return None
        for kind in kinds:
            with contextlib.suppress(ConfigError):
                return read_as(kind, value, where)
        return read_as(last, value, where)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:  # an integer may have 400 digits
        is_too_large = isinstance(value, int) and abs(value) > sys.float_info.max
        _expect(is_number and not is_too_large, "a number", value, where)
        return float(value)
    if kind is int:
        _expect(is_number and isinstance(value, int), "an integer", value, where)
    _expect(isinstance(value, kind), f"of type {kind.__name__}", value, where)
    return value


def read_versioned(kind: Any, data: Mapping[str, Any], version: int, where: str) -> Any:  # noqa: ANN401
    """Return `data` as `read_as` does, without the "format" and "version" that stand in it.

    Raises:
        ConfigError: it is of another version, or as with `read_as`.
    """
    if data.get("version") != version:
        raise ConfigError(
            f"The {where} has version {data.get('version')!r}, and this Penstock reads {version}. "
            "Use the version of Penstock that wrote it, or a later one."
        )
    content = {key: data[key] for key in data if key not in ("format", "version")}
    return read_as(kind, content, where)


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401
    _expect(isinstance(value, Mapping), "an object", value, where)
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    needed = [f.name for f in fields(kind) if not f.metadata.get("older_lack_it")]
    missing = [name for name in needed if name not in value]
    unknown = [name for name in value if name not in names]
    if missing or unknown:
        raise ConfigError(
            f"{_is_damaged(where)}: {where} lacks {missing} and has {unknown}, which is not known."
        )
    return kind(**{name: read_as(hints[name], v, f"{where}.{name}") for name, v in value.items()})


def _expect(is_right: bool, what: str, value: object, where: str) -> None:
    if not is_right:
        raise ConfigError(f"{_is_damaged(where)}: {where} is to be {what}, got {value!r:.80}.")


def _is_damaged(where: str) -> str:
    return f"The {where.partition('.')[0]} is damaged"
