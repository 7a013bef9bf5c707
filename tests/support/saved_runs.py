# SPDX-License-Identifier: Apache-2.0
"""A run as `penstock run --save` writes it."""

from __future__ import annotations

from penstock.insight.stats import Span
from penstock.program.saved import SavedLoader, SavedRun

TRAIN = SavedLoader(
    made_at="train.py:31",
    dataset="Photos",
    num_workers=2,
    loaders=1,
    first_batch_s=0.5,
    run=Span(batches=1290, samples=10320, starts=3, seconds=12.0, wait_s=9.0),
)
STOCK = SavedRun(
    engine="torch",
    program="train.py",
    wall_s=20.0,
    cpu_s=30.0,
    peak_memory_bytes=2 * 10**9,
    loaders=[TRAIN],
)
