# SPDX-License-Identifier: Apache-2.0
"""Seeds of the global generators in workers, as torch's loader sets them."""

from __future__ import annotations

import random

import numpy as np

__all__ = ["seed_worker"]


def seed_worker(base_seed: int, worker_id: int) -> None:
    """Seed `random` and `numpy.random` for a worker.

    `random` gets `base_seed + worker_id`. numpy's Mersenne twister gets four words that mix the
    same two numbers, so that the two generators, which are the same algorithm, do not run in step.

    Reference:
        torch.utils.data since torch 1.9 (pytorch#56488): the words are those of numpy's
        `SeedSequence` over (worker id, low and high half of the base seed, 0).
    """
    random.seed(base_seed + worker_id)
    entropy = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(entropy).generate_state(4))
