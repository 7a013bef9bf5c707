# SPDX-License-Identifier: Apache-2.0
"""Addresses of MongoDB collections: what may be shown of them, and what may not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote, unquote_plus

from pymongo.errors import PyMongoError
from pymongo.uri_parser import split_options

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORM: Final = "mongodb://USER:PASSWORD@HOST:PORT/DATABASE.COLLECTION?OPTIONS"
_URI: Final = re.compile(r"(mongodb(?:\+srv)?://)([^/]*)/([^?]*)(?:\?(.*))?", re.DOTALL)
_ESCAPED: Final = r"(?:[^:@/?#\[\]%\s]|%[0-9A-Fa-f]{2})"
_USER: Final = re.compile(rf"{_ESCAPED}*(?::{_ESCAPED}*)?")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._%-]+)(?::\d{1,5})?")
_USER_OF_A_URI: Final = re.compile(r"(//)[^/@\s]*@")
_SECRET_OPTION: Final = re.compile("passw|propert|token|secret", re.IGNORECASE)
_LEAST_SECRET: Final = 3  # characters; shorter ones are parts of any text


@dataclass(frozen=True)
class MongoAddress:
    """A collection's address, taken apart. Neither its repr nor its text has a secret in it."""

    shown: str
    hosts: str
    database: str
    collection: str
    uri: str = field(repr=False)
    secrets: frozenset[str] = field(repr=False)
    option_names: frozenset[str] = field(repr=False)

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Take an address apart."""
        # Whatever is wrong, the part that is may be one of the password: nothing is quoted.
        found = _URI.fullmatch(uri)
        scheme, server, path, query = found.groups(default="") if found else ("", "", "", "")
        user, at, hosts = server.rpartition("@")
        if not _USER.fullmatch(user) or "@" in path + query:
            raise ConfigError(
                "a MongoDB address has a user or a password with characters that have to be "
                "percent-escaped, as urllib.parse.quote(password, safe='') does it, or its "
                f"options have a '@', to be written %40. The form is {_FORM}."
            )
        database, dot, collection = unquote_plus(path).partition(".")
        if not all(map(_HOST.fullmatch, hosts.split(","))) or not (database and collection):
            raise ConfigError(
                f"a MongoDB address names a host, a database and a collection: {_FORM}."
            )
        options = _options(query)
        plain_path = path.split(".")[0] + ("?" + query if query else "")
        return cls(
            f"{scheme}{hosts}/{database}{dot}{collection}",
            hosts,
            database,
            collection,
            f"{scheme}{user}{at}{hosts}/{plain_path}",
            frozenset(_secrets(user.partition(":")[2], options)),
            frozenset(map(str.lower, options)),
        )

    def sibling(self, collection: str) -> str:
        """Return what errors call another collection of the same database."""
        return f"{self.shown.removesuffix(self.collection)}{collection}"

    def scrubbed(self, text: str, options: Mapping[str, object] | None = None) -> str:
        """Return what the driver says, without the secrets of the address or of client options."""
        text = _USER_OF_A_URI.sub(r"\1***@", text)
        secrets = self.secrets | set(_secrets("", options or {}))
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, "***")
        return text

    def __str__(self) -> str:
        """Return the address without secrets."""
        return self.shown


def _options(query: str) -> dict[str, str]:
    """Return the options of a URI; pymongo would only warn of wrong ones, values included."""
    options = {}
    for part in filter(None, re.split("[&;]", query)):
        name, equals, options[name] = part.partition("=")
        with contextlib.suppress(PyMongoError, ValueError, TypeError, OSError):
            split_options(part, validate=True, warn=False)
            continue
        # Raised outside of the handler, as the driver's error has the value.
        shown = repr(name) if equals and re.fullmatch("[A-Za-z_]{1,40}", name) else "one"
        raise ConfigError(
            f"the options of a MongoDB address: {shown} is unknown to pymongo, or has a value "
            "that does not fit. They are the driver's, as name=value pairs joined by '&'; "
            "those of Penstock are arguments, as in MongoDataset(address, image_field=...)."
        )
    return options


def _secrets(password: str, options: Mapping[str, object]) -> Iterator[str]:
    """Yield secrets, also those of properties such as NAME:VALUE,NAME:VALUE, and unescaped."""
    texts = [password]
    for name, value in options.items():
        if _SECRET_OPTION.search(name):
            texts += map(str, value.values()) if isinstance(value, Mapping) else [str(value)]
            texts += [part.partition(":")[2] for part in str(value).split(",")]
    for text in filter(None, texts):
        yield from {text, unquote(text), unquote_plus(text)}
