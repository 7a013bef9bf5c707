# SPDX-License-Identifier: Apache-2.0
"""Copies of an iterable dataset for worker threads: where it stands is each worker's own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from penstock.errors import ConfigError

__all__ = ["own_copy"]


def own_copy(dataset: Any, num_workers: int) -> Any:  # noqa: ANN401
    """Return a copy of an iterable dataset for one of `num_workers` threads.

    As a process worker's is, but for arrays, whose memory stays shared where they can be pickled.
    What can be copied in no way goes to a single worker as it is.

    Raises:
        ConfigError: it cannot be copied, and there are several workers.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
        return pickle.loads(data, buffers=buffers)
    except Exception:  # a class inside a function, a lambda, an open file
        buffers.clear()
    try:
        return copy.deepcopy(dataset)
    except Exception as error:  # it holds a lock, say
        if num_workers == 1:
            return dataset
        kind = type(dataset).__name__
        raise ConfigError(
            f"{kind} cannot be copied ({type(error).__name__}: {error}), and each of "
            f"{num_workers} worker threads has to iterate a copy of its own: sharing one would "
            f"lose samples and double others. Let {kind}.__getstate__ leave out what cannot be "
            "copied and __setstate__ make it anew (or write a __deepcopy__), or use "
            "num_workers=1, or backend='process' with multiprocessing_context='fork'."
        ) from error
