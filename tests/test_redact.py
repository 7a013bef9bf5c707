# SPDX-License-Identifier: Apache-2.0
"""What looks like a secret is left out of texts, and what does not stays."""

from __future__ import annotations

import re

import pytest

from penstock.redact import is_secret_name, without_password, without_queries


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no s3://u:p@SECRET@h/b", "no s3://u:***@h/b"),
        ("https://u:pa/SECRET@h", "https://u:***@h"),
        ("https://SECRET@github.com/me", "https://***@github.com/me"),
        ("https://h/a?se=1&sig=SECRET&x=2", "https://h/a?se=1&sig=***&x=2"),
        ("https://h/a?X-Amz-Signature=SECRET", "https://h/a?X-Amz-Signature=***"),
        ("Authorization: Bearer SECRET", "Authorization: Bearer ***"),
        ("{'secret': 'SECRET'}", "{'secret': '***'}"),
        ("api_key=SECRET, x=1", "api_key=***, x=1"),
    ],
)
def test_secrets_are_masked(text, shown):
    assert without_password(text) == shown


@pytest.mark.parametrize(
    "text", ["unexpected token 'x' at 3", "max_tokens=3", "Basic training", "a/b?c.jpg", "keys: a"]
)
def test_plain_words_stay(text):
    assert without_password(text) == text == without_queries(text)


@pytest.mark.parametrize(
    "address",
    [
        "mongodb://ada:secret@127.0.0.1/lab.photos",
        "mongodb:/ada:secret@127.0.0.1/lab.photos",
        "mongodb:ada:secret@127.0.0.1/lab.photos",
        "mongodb//ada:secret@127.0.0.1/lab.photos",
        "MongoDB+SRV://ada:sec/secret@127.0.0.1/lab.photos",
        "mongodb://ada:sec secret@127.0.0.1/lab.photos",
        "mongodb://ada:1234secret@127.0.0.1/lab.photos",
        "mongodb://:secret@127.0.0.1/lab.photos",
        "mongdb:ada:secret@127.0.0.1/lab.photos",
        "ada:secret@127.0.0.1/lab.photos",
    ],
)
def test_what_looks_like_a_password_is_masked(address):
    masked = without_password(f"'{address}' does not exist. Name a folder.")
    assert "secret" not in masked
    assert re.search(r":\*\*\*@127\.0\.0\.1/lab.*' does not exist\. Name a folder\.", masked)


@pytest.mark.parametrize(
    "text",
    [
        "cannot read mongodb://127.0.0.1:27017/lab.photos: record 'icon@2x.png' is not there.",
        "/data/photos@home/1.jpg: text, not an image",
        "the time is 12:30, ask ada@host",
    ],
)
def test_what_is_no_password_is_shown(text):
    assert without_password(text) == text


@pytest.mark.parametrize("name", ["secret", "client_secret", "API-Key", "accessKey", "password"])
def test_names_of_secrets_are_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "keys", "dataset", "signatures"])
def test_other_names_are_not(name):
    assert not is_secret_name(name)
