# SPDX-License-Identifier: Apache-2.0
"""Seeing that workers iterate the same samples, each in a copy of an iterable dataset."""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import TYPE_CHECKING, Final

from penstock.warn import users_level

if TYPE_CHECKING:
    from penstock.engine.plan import WorkerSpec

__all__ = ["FirstSamples"]

_ADVICE: Final = (
    "In __iter__, go over `penstock.data.shard(samples)` instead of `samples`; each worker and "
    "rank then gets its share."
)

_log = logging.getLogger("penstock")
_notified: weakref.WeakSet[type] = weakref.WeakSet()  # datasets that were logged


class FirstSamples:
    """Compares the samples with which the workers of one epoch began.

    Concurrency:
        One thread.
    """

    def __init__(self, spec: WorkerSpec, num_workers: int, *, warns: bool | None = None) -> None:
        """Compare the workers' shards of the spec's dataset.

        Args:
            spec: Whose dataset.
            num_workers: How often every sample would come.
            warns: Whether to warn; None: where there is a seed. Otherwise it is logged, once per
                class of dataset: torch gives no warning, and programs count them.
        """
        self._kind = type(spec.dataset)
        self._warns = spec.seed is not None if warns is None else warns
        self._num_workers = num_workers
        self._worker_of: dict[bytes, int] = {}

    def clear(self) -> None:
        """Begin another epoch."""
        self._worker_of.clear()

    def compare(self, worker_id: int, digest: bytes) -> None:
        """Say so if another worker began with the sample of this digest."""
        other_id = self._worker_of.setdefault(digest, worker_id)
        if other_id == worker_id:
            return
        message = (
            f"Workers {other_id} and {worker_id} both began {self._kind.__name__} with the same "
            "sample: each worker iterates a copy of its own, so every sample would come "
            f"{self._num_workers} times. {_ADVICE} (If different samples may be equal, this "
            "means nothing.)"
        )
        if self._warns:
            warnings.warn(message, stacklevel=users_level())
        elif self._kind not in _notified:
            _notified.add(self._kind)
            _log.warning(message)
