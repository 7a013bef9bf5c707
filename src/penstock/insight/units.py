# SPDX-License-Identifier: Apache-2.0
"""Numbers, durations and shares as text with two or three digits and a unit."""

from __future__ import annotations

import math


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
