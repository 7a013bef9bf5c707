# SPDX-License-Identifier: Apache-2.0
"""Streams from workers that behave as torch's iterators do; imported once there are workers."""

from __future__ import annotations

from penstock.engine.worker_stream import WorkerStream
from penstock.torch.streams import AsTorch


class TorchWorkerStream(AsTorch, WorkerStream):
    """Batches made by workers."""
