# SPDX-License-Identifier: Apache-2.0
"""Texts without what must not be read by others: passwords, tokens, signed addresses."""

from __future__ import annotations

import re
from typing import Final

# To the last @ of the line, or of the word: one of the password's own may not have
# been escaped, or a space typed. Slashes may be folded, as paths fold them, or missing.
_PASSWORDS: Final = (
    # MongoDB's; a port is none.
    re.compile(r"(mongo[a-z+.-]*[:/]+[^:@/\s]*):(?!\d{1,5}(?:[/,\s]|$))[^\n]*@", re.IGNORECASE),
    re.compile(r"([a-z][a-z0-9+.-]*:?/+[^:@/\s]*):\S*@", re.IGNORECASE),
    re.compile(r"([^:@/\s]*):[^/\s]*@"),
)
_USER: Final = re.compile(r"(?<=://)[^:@/\s]+@")  # a token is often the user
_NAMES: Final = (
    r"passw(?:or)?d|passphrase|pwd|secret|token|credentials?|(?:api|access|private|account)[_-]?key"
    r"(?:[_-]?id)?|signature|authorization|cookie"
)
_SECRET_NAME: Final = re.compile(rf"(?:{_NAMES})$|secret", re.IGNORECASE)
_SECRET_OPTION: Final = re.compile(
    rf"([?&](?:[\w%.-]*(?:{_NAMES})[\w%.-]*|sig|key|auth|code|authMechanismProperties)=)[^&\s]*",
    re.IGNORECASE,
)
_BEARER: Final = re.compile(r"\b(Bearer|Authorization: *Basic) +[^\s,;'\"]+")
_ASSIGNED: Final = re.compile(
    rf"""(['"]?[\w-]*(?:{_NAMES})['"]?(?:=|(?<=['"]): ?)['"]?)(?!\*)[^\s,;&'"]+""", re.IGNORECASE
)
_QUERY: Final = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]+")


def is_secret_name(name: str) -> bool:
    """Return whether a setting of this name should not be shown.

    Example:
        >>> is_secret_name("aws_secret_access_key"), is_secret_name("max_tokens")
        (True, False)
    """
    return _SECRET_NAME.search(name) is not None


def without_password(text: str) -> str:
    """Return a text with the secrets of all addresses in it left out.

    Example:
        >>> without_password("cannot reach mongodb://me:pa@ss@host/db.photos?proxyPassword=x&w=1")
        'cannot reach mongodb://me:***@host/db.photos?proxyPassword=***&w=1'
        >>> without_password("mongodb:/me:pass@host does not exist")
        'mongodb:/me:***@host does not exist'
        >>> without_password("https://host/a?X-Amz-Signature=abc, Authorization: Bearer abc")
        'https://host/a?X-Amz-Signature=*** Authorization: Bearer ***'
    """
    for password in _PASSWORDS:
        text = password.sub(r"\1:***@", text)
    text = _USER.sub("***@", text)
    text = _SECRET_OPTION.sub(r"\1***", text)
    text = _BEARER.sub(r"\1 ***", text)
    return _ASSIGNED.sub(r"\1***", text)


def without_queries(text: str) -> str:
    """Return a text with the query strings of its addresses left out: any part may be a secret.

    Example:
        >>> without_queries("no https://host/a.jpg?se=2030&sig=abc")
        'no https://host/a.jpg?***'
    """
    return _QUERY.sub(r"\1?***", text)
