# SPDX-License-Identifier: Apache-2.0
"""Silence for libraries that write to stderr; warnings and logs are escaped."""

from __future__ import annotations

import contextlib
import io
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        _ignore_pillow()
        try:
            real = os.dup(2)
        except OSError:  # there is no stderr
            yield
            return
        stack.callback(os.close, real)
        stack.callback(os.dup2, real, 2)
        _go_on_by(real, stack)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield


def _go_on_by(descriptor: int, stack: contextlib.ExitStack) -> None:
    """Let `sys.stderr` write to a descriptor for as long as `stack`, if it writes to 2."""
    before = sys.stderr
    try:
        if before.fileno() != 2:
            return
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return  # somebody has put another in its place, or closed it
    before.flush()
    own = open(  # noqa: SIM115 - the stack closes it
        descriptor, "w", encoding=before.encoding, errors=before.errors, buffering=1, closefd=False
    )
    stack.callback(own.close)
    stack.callback(setattr, sys, "stderr", before)
    sys.stderr = own


def _ignore_pillow() -> None:
    warnings.filterwarnings("ignore", module=r"PIL\.")
