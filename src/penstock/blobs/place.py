# SPDX-License-Identifier: Apache-2.0
"""Where objects lie, as it is told to the process that reads them."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """An address, and how to get there; without a secret."""

    address: str
    endpoint: str | None
    region: str | None
    anonymous: bool
    timeout_s: float
