# SPDX-License-Identifier: Apache-2.0
"""Patterns with braces: which files `train-{000..015}.tar` stands for."""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import ConfigError

_BRACES: Final = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


def expand_braces(pattern: str) -> list[str]:
    """Return the paths that a pattern stands for."""
    found = _BRACES.search(pattern)
    if found is None:
        if "{" in pattern:
            raise ConfigError(f"braces in {pattern!r} hold a range, as {{000..015}}, or a list.")
        return [pattern]
    if found[3] is not None:
        texts = found[3].split(",")
    else:
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + 1_000_000:
            raise ConfigError(f"the range {found[0]} in {pattern!r} is empty or far too long.")
        texts = [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    tails = expand_braces(pattern[found.end() :])
    return [pattern[: found.start()] + text + tail for text in texts for tail in tails]
