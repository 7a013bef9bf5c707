# SPDX-License-Identifier: Apache-2.0
"""Penstock: any dataset, as a steady stream of ready batches.

`penstock.torch.DataLoader` takes the place of torch's; `penstock.Loader` gives numpy batches to any
framework. Importing this package imports numpy and the standard library, nothing else.
"""

from __future__ import annotations

from penstock.faults import Failure, FaultPolicy
from penstock.labels import labels_of
from penstock.loader import Loader
from penstock.randomness.everything import seed_everything, seeded
from penstock.randomness.samples import renumbered_samples, sample_rng
from penstock.worker_info import WorkerInfo, get_worker_info

__all__ = [
    "Failure",
    "FaultPolicy",
    "Loader",
    "WorkerInfo",
    "get_worker_info",
    "labels_of",
    "renumbered_samples",
    "sample_rng",
    "seed_everything",
    "seeded",
]
__version__ = "0.1.0"
