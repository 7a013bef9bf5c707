# SPDX-License-Identifier: Apache-2.0
"""Values that go through JSON, and dataclasses read back from it with every part checked."""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.redact import is_secret_name, without_password, without_queries

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]

_LONGEST: Final = 2000  # characters of a text


def plain(value: object) -> JSON:
    """Return a value as JSON has it: exact for numbers, texts, lists and dicts of such.

    Of anything else only the name of its class is kept: its text may hold an address with a
    password. Passwords and queries of addresses are taken out of texts as well, and texts that have
    the name of a secret.

    Example:
        >>> plain({"batch_size": np.int64(8), "sampler": object(), 3: float("nan")})
        {'batch_size': 8, 'sampler': 'object', '3': None}
        >>> plain({"path": "mongodb://me:secret@host/db", "access_token": "abc"})
        {'path': 'mongodb://me:***@host/db', 'access_token': '***'}
    """
    if value is None or isinstance(value, (bool, np.bool_)):
        return None if value is None else bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, Mapping):
        named = [(plain_text(str(key)), item) for key, item in value.items()]
        return {key: "***" if _is_secret(key, item) else plain(item) for key, item in named}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
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
    if index is None or isinstance(index, numbers.Integral):
        return None if index is None else int(index)
    return plain_text(str(index))


def read_versioned(kind: Any, data: Mapping[str, Any], version: int, where: str) -> Any:  # noqa: ANN401
    """Return `data`, which `json.loads` returned, as the dataclass `kind`.

    "format" and "version" stand in it besides. A field with a default may be missing, as files of
    older versions lack it.

    Raises:
        ConfigError: it is of another version, or a part is missing, unknown or of another type.
    """
    if data.get("version") != version:
        raise ConfigError(
            f"The {where} has version {data.get('version')!r}, and this Penstock reads {version}. "
            "Use the version of Penstock that wrote it, or a later one."
        )
    content = {key: data[key] for key in data if key not in ("format", "version")}
    try:
        return _read_as(kind, content)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"The {where} is damaged: {error}.") from error


def _read_as(kind: Any, value: Any) -> Any:  # noqa: ANN401 - a type, and what is to be one
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is object or bool in args:  # the only union with it is JSON
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{k: _read_as(hints.get(k, object), v) for k, v in value.items()})
    if origin in (tuple, list):
        return origin(_read_as(args[0], item) for item in value)
    if origin is dict:
        return {args[0](key): _read_as(args[1], item) for key, item in value.items()}
    kinds = args or (kind,)
    is_one = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if not is_one:
        raise TypeError(f"{value!r:.80} stands where {kind} should")
    return float(value) if float in kinds and value is not None else value
