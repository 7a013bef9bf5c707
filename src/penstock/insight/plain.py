# SPDX-License-Identifier: Apache-2.0
"""Values that go through JSON, and dataclasses read back from it with every part checked."""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.redact import is_secret_name, without_password, without_queries

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]

_NAMES: Final[dict[type, str]] = {
    Mapping: "an object", dict: "an object", list: "a list", int: "an integer", float: "a number",
    str: "a text",
}  # fmt: skip
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
    try:
        return plain_text(str(index))
    except Exception:  # a key may be anything
        return type(index).__name__


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
        return _read_as(kind, content, where)
    except (ValueError, OverflowError) as error:  # a number of 400 digits; keys that are none
        raise ConfigError(f"The {where} is damaged: {error}.") from error


def _read_as(kind: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - a type, and what is to be one
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is object or bool in args:  # the only union with it is JSON
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        _check(value, (Mapping,), where)
        hints = typing.get_type_hints(kind)
        needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
        missing = [name for name in needed if name not in value]
        unknown = [name for name in value if name not in hints]
        if missing or unknown:
            raise ValueError(f"{where} lacks {missing} and has {unknown}, which is not known")
        parts = {k: _read_as(hints[k], v, f"{where}.{k}") for k, v in value.items()}
        return kind(**parts)
    if origin in (tuple, list):
        _check(value, (list,), where)
        return origin(_read_as(args[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is dict:
        _check(value, (dict,), where)
        return {args[0](key): _read_as(args[1], v, f"{where}.{key}") for key, v in value.items()}
    kinds = args or (kind,)
    _check(value, (*kinds, int) if float in kinds else kinds, where)
    return float(value) if float in kinds and value is not None else value


def _check(value: object, kinds: tuple[type, ...], where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        names = " or ".join(_NAMES[kind] for kind in kinds if kind in _NAMES)
        raise ValueError(f"{where} is to be {names}, got {value!r:.80}")
