# SPDX-License-Identifier: Apache-2.0
"""Each worker's and rank's shard of a stream."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal, TypeVar

from penstock.errors import ConfigError
from penstock.randomness.samples import end_prologue
from penstock.worker_info import current_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def shard(items: Iterable[T], by: Literal["batch", "item"] = "batch") -> Iterator[T]:
    """Yield what is this worker's and this rank's of `items`; all of them outside of a loader.

    Call it in `__iter__` of an `IterableDataset`. Without it, every worker and rank yields all.
    With `seed=`, the global generators are the same in all workers up to its first item, so that
    the items may be shuffled; from there on they are each sample's own.

    Args:
        items: The same in every worker and rank. All of them are iterated everywhere, so let them
            be cheap: names of files, offsets, keys; read what is behind them afterwards.
        by: "batch" deals as many items as make a batch to each worker in turn, and within the
            batches one to each rank in turn. If one item becomes one sample, batch k then holds the
            same samples for any number of workers, or none. "item" deals them out one by one: for
            files that hold many samples each.

    Raises:
        ConfigError: `by` is neither.

    Example:
        >>> from penstock import Loader
        >>> from penstock.data import IterableDataset
        >>> class Countdown(IterableDataset[int]):
        ...     def __iter__(self) -> Iterator[int]:
        ...         return shard(range(5, 0, -1))
        >>> [batch.tolist() for batch in Loader(Countdown(), batch_size=2)]
        [[5, 4], [3, 2], [1]]
    """
    if by not in ("batch", "item"):
        raise ConfigError(f"by should be 'batch' or 'item', but got by={by!r}.")
    info = current_shard()
    size = info.batch_size or 1 if by == "batch" else 1
    num_items = size * info.world_size

    def dealt() -> Iterator[T]:
        stream = iter(items)
        for turn in itertools.count():
            group = list(itertools.islice(stream, num_items))
            if turn % info.num_workers == info.worker_id:
                end_prologue()
                yield from group[info.rank :: info.world_size]
            if len(group) < num_items:
                return

    return dealt()
