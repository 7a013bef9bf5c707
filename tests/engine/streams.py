# SPDX-License-Identifier: Apache-2.0
"""The stream of a plan, as both loaders choose it."""

from __future__ import annotations

from penstock.engine.stream import SerialStream
from penstock.engine.worker_stream import WorkerStream

__all__ = ["open_stream"]


def open_stream(plan, *args):
    """Return the stream that makes the batches of `plan`; the rest are arguments of both."""
    return (WorkerStream if plan.num_workers else SerialStream)(plan, *args)
