# SPDX-License-Identifier: Apache-2.0
"""Mistakes that show when workers are compared: the same samples, or the same random numbers.

Each worker iterates its own copy of an iterable dataset. If two begin with the same sample, every
sample comes as often as there are workers.

A `worker_init_fn` may seed workers alike: `np.random.seed(42)`, say. Every epoch that starts
workers has another base seed, from which each worker's generators are seeded. If a generator is in
the same state after `worker_init_fn` under two base seeds, or in two workers, its draws repeat.
Each worker sends digests of the states that the function changed, once, with its first result.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final

from penstock.randomness.generators import GlobalStates
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("penstock")
_notified: weakref.WeakSet[type] = weakref.WeakSet()  # datasets that were logged


class FirstSamples:
    """Compares the samples with which the workers of one epoch began.

    Concurrency:
        One thread.
    """

    def __init__(self, kind: type, num_workers: int, *, warns: bool) -> None:
        """Compare the workers' shards of a dataset of class `kind`.

        Without `warns` it is logged, once per class: torch gives no warning, and programs count
        them.
        """
        self._kind = kind
        self._warns = warns
        self._num_workers = num_workers
        self._worker_of: dict[bytes, int] = {}

    def clear(self) -> None:
        """Begin another epoch."""
        self._worker_of.clear()

    def compare(self, worker_id: int, digest: bytes) -> None:
        """Warn of it, or log it, if another worker began with the sample of this digest."""
        other_id = self._worker_of.setdefault(digest, worker_id)
        if other_id == worker_id:
            return
        message = (
            f"Workers {other_id} and {worker_id} both began {self._kind.__name__} with the same "
            "sample: each worker iterates a copy of its own, so every sample would come "
            f"{self._num_workers} times. In __iter__, go over `penstock.data.shard(samples)` "
            "instead of `samples`; each worker and rank then gets its share. (If different samples "
            "may be equal, this means nothing.)"
        )
        if self._warns:
            warnings.warn(message, stacklevel=users_level())
        elif self._kind not in _notified:
            _notified.add(self._kind)
            _log.warning(message)


_NAMES: Final = ("random", "numpy.random", "torch")  # of the fields of `GlobalStates`

# worker_init_fn -> by generator and digest, the base seed and worker that it was seen in first
_seen: weakref.WeakKeyDictionary[
    Callable[[int], object], dict[tuple[str, bytes], tuple[int, int]]
] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Callable[[int], object]] = weakref.WeakSet()


def changed_states(before: GlobalStates) -> dict[str, bytes]:
    """Return a digest of each global generator whose state has changed since `before`."""
    old, new = (
        [hashlib.blake2b(_plain(state), digest_size=16).digest() for state in states]
        for states in (before, GlobalStates.now())
    )
    named = zip(_NAMES, old, new, strict=True)
    return {name: digest for name, former, digest in named if digest != former}


def _plain(state: Any) -> bytes:  # noqa: ANN401 - a tensor, or equal if its text is
    plain: bytes = state.numpy().tobytes() if hasattr(state, "numpy") else repr(state).encode()
    return plain


def note_states(
    worker_init_fn: Callable[[int], object],
    base_seed: int,
    worker_id: int,
    states: dict[str, bytes],
) -> None:
    """Warn, once for each function, if a state was seen in another worker or the first epoch."""
    try:
        seen = _seen.setdefault(worker_init_fn, {})
    except TypeError:  # cannot be referred to weakly
        return
    for state in states.items():
        seed, other = seen.setdefault(state, (base_seed, worker_id))
        if (seed, other) == (base_seed, worker_id) or worker_init_fn in _warned:
            continue
        _warned.add(worker_init_fn)
        name = getattr(worker_init_fn, "__qualname__", type(worker_init_fn).__name__)
        same = f"worker {other}" if seed == base_seed else "another epoch"
        warnings.warn(
            f"worker_init_fn {name} leaves {state[0]} in worker {worker_id} in the same state "
            f"as in {same}: random augmentation that draws from it repeats. Give the loader "
            "seed=, which decides what is drawn for each sample of each epoch, or seed in the "
            "function with torch.initial_seed() % 2**32, which differs for each worker and "
            "epoch.",
            stacklevel=users_level(),
        )
