# SPDX-License-Identifier: Apache-2.0
"""Batches that never were, as an observer hears of them."""

from __future__ import annotations

from typing import NamedTuple

from penstock.engine.timing import UNKNOWN, TimingRow


class Batch(NamedTuple):
    """What `History.add` takes."""

    row: TimingRow
    indices: object = None
    sample_us: bytes = b""


def batch(indices=None, sample_us=b"", **fields):
    """Return a batch with these fields of its row; what the system does not tell is None."""
    known = {name: UNKNOWN if value is None else value for name, value in fields.items()}
    return Batch(TimingRow(**known), indices, sample_us)
