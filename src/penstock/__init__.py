# SPDX-License-Identifier: Apache-2.0
"""Penstock: any dataset, as a steady stream of ready batches.

`penstock.torch.DataLoader` takes the place of torch's; `penstock.Loader` gives numpy batches to any
framework, and needs numpy alone. Importing this package imports the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from penstock.deprecation import lazy_names

if TYPE_CHECKING:
    from penstock.data.labels.known import labels_of
    from penstock.faults import FaultPolicy
    from penstock.loader import Loader
    from penstock.options import Auto, Ray
    from penstock.randomness.everything import seed_everything, seeded
    from penstock.randomness.samples import renumbered_samples, sample_rng
    from penstock.worker_info import get_worker_info

__all__ = [
    "Auto",
    "FaultPolicy",
    "Loader",
    "Ray",
    "get_worker_info",
    "labels_of",
    "renumbered_samples",
    "sample_rng",
    "seed_everything",
    "seeded",
]
__version__ = "0.2.0"

# Imported when they are asked for: `penstock run` needs none of them, and starts a program.
_named, __dir__ = lazy_names(
    __name__,
    {
        ".faults": ("FaultPolicy",),
        ".data.labels.known": ("labels_of",),
        ".loader": ("Loader",),
        ".options": ("Auto", "Ray"),
        ".randomness.everything": ("seed_everything", "seeded"),
        ".randomness.samples": ("renumbered_samples", "sample_rng"),
        ".worker_info": ("get_worker_info",),
    },
    {"Failure": "penstock.faults.Failure", "WorkerInfo": "penstock.worker_info.WorkerInfo"},
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above, or a module
    module = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(module) is None:
        return _named(name)
    return importlib.import_module(module)
