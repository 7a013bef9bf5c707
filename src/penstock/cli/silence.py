# SPDX-License-Identifier: Apache-2.0
"""Silence for libraries that write to stderr; warnings and logs are escaped."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from penstock.lines import printable, say

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["escaped_messages", "silence_libraries", "silent_libraries"]


@contextlib.contextmanager
def escaped_messages() -> Iterator[None]:
    """Let what Python itself writes to stderr, warnings and logs, have no control characters.

    Both repeat names of files. A program's own way of showing them is left alone.
    """
    form, last = warnings.formatwarning, logging.lastResort

    def formatted(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        lines = form(*args, **kwargs).split("\n")
        return "\n".join(map(printable, lines))

    warnings.formatwarning = formatted
    logging.lastResort = _Said(logging.WARNING)
    try:
        yield
    finally:
        warnings.formatwarning, logging.lastResort = form, last


class _Said(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            say(line, err=True)


def silence_libraries() -> None:
    """Let this process, a worker, write nothing to stderr: its errors take another way."""
    _ignore_pillow()
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


@contextlib.contextmanager
def silent_libraries() -> Iterator[None]:
    """Keep what libraries write to descriptor 2 off stderr, here and in workers started meanwhile.

    libpng, libjpeg and OpenCV write there. Python's `sys.stderr` goes on, by a descriptor of its
    own, so that progress and errors are seen.
    """
    before = sys.stderr
    try:
        real = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with (
        warnings.catch_warnings(),
        open(os.devnull, "wb") as nowhere,
        open(real, "w", encoding="utf-8", errors="backslashreplace", buffering=1) as own,
    ):
        _ignore_pillow()
        # Otherwise somebody has put another in its place, or closed it.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if before.fileno() == 2:
                before.flush()
                own.reconfigure(encoding=before.encoding, errors=before.errors)
                sys.stderr = own
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            sys.stderr = before


def _ignore_pillow() -> None:
    warnings.filterwarnings("ignore", module=r"PIL\.")
