# SPDX-License-Identifier: Apache-2.0
"""Addresses of MongoDB collections: what may be shown of them, and what may not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote, unquote_plus

from pymongo.errors import PyMongoError
from pymongo.uri_parser import split_options

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MongoAddress"]

_FORM: Final = "mongodb://USER:PASSWORD@HOST:PORT/DATABASE.COLLECTION?OPTIONS"
_URI: Final = re.compile(r"(mongodb(?:\+srv)?://)([^/]*)/([^?]*)(?:\?(.*))?", re.DOTALL)
_ESCAPED: Final = r"(?:[^:@/?#\[\]%\s]|%[0-9A-Fa-f]{2})"
_USER: Final = re.compile(rf"{_ESCAPED}*(?::{_ESCAPED}*)?")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._%-]+)(?::\d{1,5})?")
_USER_OF_A_URI: Final = re.compile(r"(//)[^/@\s]*@")
_SECRET_OPTION: Final = re.compile("passw|propert|token|secret", re.IGNORECASE)
_LEAST_SECRET: Final = 3  # characters; shorter ones are parts of any text
_ARGUMENTS: Final = frozenset(
    [
        "image_field",
        "label_field",
        "key_field",
        "query",
        "manifest",
        "verify",
        "retry_s",
        "client_options",
    ]
)


@dataclass(frozen=True)
class MongoAddress:
    """A collection's address, taken apart. Neither its repr nor its text has a secret in it.

    Attributes:
        shown: The address without user, password and options.
        hosts: Server or servers, as given.
        database: Name of the database.
        collection: Name of the collection.
        uri: What a client connects with. Never to be shown.
        secrets: Password and secret options, as given and unescaped. Never to be shown.
        option_names: Of the URI, in lower case.

    Example:
        >>> MongoAddress.parse("mongodb://ada:p%40ss@db.lan/photos.cats?tls=true")
        MongoAddress(shown='mongodb://db.lan/photos.cats', hosts='db.lan', ...)
    """

    shown: str
    hosts: str
    database: str
    collection: str
    uri: str = field(repr=False)
    secrets: frozenset[str] = field(repr=False)
    option_names: frozenset[str] = field(repr=False)

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Take an address apart.

        Raises:
            ConfigError: it is not of the form, or has an option that MongoDB's driver does not
                know. The message has no part of the address but the names of options.
        """
        # Whatever is wrong, the part that is may be one of the password: nothing is quoted.
        found = _URI.fullmatch(uri)
        if found is None:
            raise ConfigError(f"the address of a MongoDB collection has the form {_FORM}.")
        scheme, server, path, query = found.groups(default="")
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
            # A user's name may be any word, as short as it likes: it is shown where the driver
            # or the server names it.
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, "***")
        return text

    def __str__(self) -> str:
        """Return the address without secrets."""
        return self.shown


def _options(query: str) -> dict[str, str]:
    """Return the options of a URI; pymongo would only warn of wrong ones, values included."""
    parts = [part for part in re.split("[&;]", query) if part]
    for part in parts:
        name = part.partition("=")[0]
        if name.lower() in _ARGUMENTS:
            raise ConfigError(
                f"the options of a MongoDB address are the driver's. {name} is an argument: "
                f"MongoDataset(address, {name.lower()}=...), or open_store likewise."
            )
        if not _is_known(part):
            shown = repr(name) if re.fullmatch("[A-Za-z]{1,40}", name) and "=" in part else "one"
            raise ConfigError(
                f"the options of a MongoDB address: {shown} is unknown to pymongo, or has a value "
                "that does not fit. They are name=value pairs, joined by '&'."
            )
    return {part.partition("=")[0]: part.partition("=")[2] for part in parts}


def _is_known(part: str) -> bool:
    try:
        split_options(part, validate=True, warn=False)
    except (PyMongoError, ValueError, TypeError, OSError):
        return False
    return True


def _secrets(password: str, options: Mapping[str, object]) -> Iterator[str]:
    hidden = [value for name, value in options.items() if _SECRET_OPTION.search(name)]
    for text in filter(None, (password, *_texts(hidden))):
        yield from {text, unquote(text), unquote_plus(text)}


def _texts(values: Iterable[object]) -> Iterator[str]:
    """Yield values and, of properties such as NAME:VALUE,NAME:VALUE, those of each."""
    for value in values:
        if isinstance(value, Mapping):
            yield from map(str, value.values())
        else:
            yield from {str(value), *(part.partition(":")[2] for part in str(value).split(","))}
