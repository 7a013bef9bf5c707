# SPDX-License-Identifier: Apache-2.0
"""Texts for people: lines that commands write, and numbers, sizes, durations and shares.

Names of files and texts of errors stay in their line: all goes through `say`. `insight.progress`
draws the bar with cursor codes of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError


class OutputError(Exception):
    """stdout takes no more: it is closed, or its disk is full, or its reader has gone."""


def printable(text: str, encoding: str | None = None) -> str:
    r"""Return what stays in its line, whatever bytes a file's name has: others are escaped.

    Args:
        text: Also with line breaks.
        encoding: Of what it is written to; None is that of stdout.

    Example:
        >>> printable("日本\x1b[2J\n.jpg", "utf-8")
        '日本\\x1b[2J\\n.jpg'
    """
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def say(*fields: str, err: bool = False) -> None:
    """Write one line: fields as `printable` has them, with tabs between them.

    OutputError if stdout cannot be written to; for stderr (`err`) that is no error.
    """
    _write("\t".join(map(printable, fields)) + "\n", err=err)


def say_json(record: Any) -> None:  # noqa: ANN401 - what JSON can have
    """Write a record to stdout, for programs; JSON escapes what is no plain text."""
    _write(json.dumps(record, indent=2) + "\n", err=False)


def check_stdout() -> None:
    """Raise OutputError unless all has arrived that was written to stdout, by others as well."""
    _write("", err=False)


def _write(text: str, *, err: bool) -> None:
    if err:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, perhaps to us
            sys.stderr.write(text)
            sys.stderr.flush()
        return
    if sys.stdout is None:
        if text:
            raise OutputError("it is closed")
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python would try once more at its end, fail, and have an exit status of its own for that.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OutputError(error.strerror) from error


_SIZED: Final = re.compile(r"([^:].*):(\d[\d.]* ?[kMGT]?B)", re.IGNORECASE)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return a size in bytes, of decimal units.

    Raises:
        ConfigError: it is no size.

    Example:
        >>> parse_bytes("64MB"), parse_bytes("1.5 GB"), parse_bytes("4096")
        (64000000, 1500000000, 4096)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no size: give bytes, or as 64MB or 1.5GB.")
    return int(float(found[1]) * 1000 ** ("kmgt".find(found[2].lower()) + 1 if found[2] else 0))


def parse_sized_path(text: str) -> tuple[Path, int | None]:
    """Return a folder, and how much may lie there if that is said.

    Raises:
        ConfigError: it is another text; it would make a folder of that name, without a limit.

    Example:
        >>> parse_sized_path("/fast/disk:20GB")
        (PosixPath('/fast/disk'), 20000000000)
    """
    found = _SIZED.fullmatch(text)
    if found is None and (":" in text or _SIZED.fullmatch(f"/:{text}")):
        raise ConfigError(
            f"{text!r} is no folder with a size, as /fast/disk:60GB. Behind a folder whose name "
            "has a colon there has to be a size."
        )
    path = Path(found[1] if found else text).expanduser()
    return path, parse_bytes(found[2]) if found else None


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, in decimal units, with two to three digits.

    Example:
        >>> format_bytes(1_234_567_890), format_bytes(260_400_000), format_bytes(999)
        ('1.2 GB', '260 MB', '999 bytes')
    """
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.5 or unit == "TB":
            break
    return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    Example:
        >>> counted(1, "sample"), counted(2000, "class"), counted(0, "batch")
        ('1 sample', '2,000 classes', '0 batches')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def amount(number: float) -> str:
    """Return a number with two or three digits that mean something.

    Example:
        >>> amount(3.14159), amount(47.9), amount(1234.5), amount(float("inf"))
        ('3.1', '48', '1,234', 'any number')
    """
    if math.isinf(number):
        return "any number"
    return f"{number:,.1f}" if number < 9.95 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    Example:
        >>> duration(0.0412), duration(2.5), duration(0.00031), duration(6000)
        ('41 ms', '2.5 s', '0.31 ms', '100 min')
    """
    for unit, factor, least in (("h", 3600, 3), ("min", 60, 10), ("s", 1, 1)):
        if seconds >= least * factor:
            return f"{amount(seconds / factor)} {unit}"
    ms = seconds * 1e3
    return f"{ms:.2f} ms" if ms < 0.995 else f"{amount(ms)} ms"


def percent(share: float) -> str:
    """Return a share of 1 in percent.

    Example:
        >>> percent(0.618), percent(0.004)
        ('62 %', '0.4 %')
    """
    return f"{share * 100:.1f} %" if 0 < share < 0.01 else f"{share * 100:.0f} %"
