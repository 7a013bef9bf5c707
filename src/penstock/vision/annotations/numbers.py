# SPDX-License-Identifier: Apache-2.0
"""Numbers of annotation files: to floats and back, without a digit that nobody wrote.

A file that counts pixels from 1 is read by taking 1 away, and 1.1 - 1 is 0.10000000000000009 in
binary. So fractions are shifted as decimals: 1.1 becomes 0.1, and is written as 1.1 again.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Final

__all__ = ["coordinate", "coordinate_text", "whole_number", "whole_value"]

# In px. What is larger is damage; and float32, which training uses, would make infinity of some.
_FARTHEST: Final = 1e9
_NUM_SHOWN: Final = 40  # characters of a text that is no number


def coordinate(text: str, minus: int = 0) -> float:
    """Return a coordinate in pixels.

    Args:
        text: As a file has it.
        minus: What is taken away from it.

    Raises:
        ValueError: it is no number, or none that a picture can have.

    Example:
        >>> coordinate(" 7 ", minus=1), coordinate("1.1", minus=1)
        (6.0, 0.1)
    """
    try:
        number = math.nan if "_" in text else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"is {text.strip()[:_NUM_SHOWN]!r}, not a number")
    if abs(number) > _FARTHEST:
        raise ValueError(f"is {text.strip()[:_NUM_SHOWN]!r}: no image is that large")
    if not minus or number.is_integer():
        return number - minus
    return float(Decimal(text.strip()) - minus)


def coordinate_text(number: float, plus: int = 0) -> str:
    """Return the text that `coordinate` reads as `number`; "nan" for NaN.

    Example:
        >>> coordinate_text(6.0, plus=1), coordinate_text(0.1, plus=1), coordinate_text(1e-7)
        ('7', '1.1', '0.0000001')
    """
    if math.isnan(number):
        return "nan"
    if float(number).is_integer():
        return str(int(number) + plus)
    return f"{Decimal(repr(float(number))) + plus:f}"


def whole_number(text: str) -> int | None:
    """Return a whole number; None if the text is none, or has more digits than any that counts.

    Example:
        >>> whole_number(" 12 "), whole_number("1.0"), whole_number("-3"), whole_number("9" * 5000)
        (12, None, -3, None)
    """
    text = text.strip()
    digits = text[1:] if text[:1] in ("-", "+") else text
    is_whole = digits.isascii() and digits.isdigit() and len(digits) <= 18
    return int(text) if is_whole else None


def whole_value(text: str) -> int | None:
    """Return a whole number also where a tool wrote it with a point; None if there is a fraction.

    Example:
        >>> whole_value("1.0"), whole_value("2"), whole_value("1.5"), whole_value("1e3")
        (1, 2, None, None)
    """
    text = text.strip()
    return whole_number(text.rstrip("0").removesuffix(".") if "." in text else text)
