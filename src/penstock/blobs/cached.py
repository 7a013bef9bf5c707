# SPDX-License-Identifier: Apache-2.0
"""`CachedRecords`: records of far objects, by way of a cache of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blobs.fetcher import FetcherClient
from penstock.blobs.node_cache import CacheArguments, NodeCache, Order
from penstock.forks import Owner
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.blobs.objects import ObjectBlobs
    from penstock.blobs.ranges import RecordRanges


class CachedRecords:
    """Records by number: from the cache; from the fetcher that reads ahead; from far away.

    Concurrency:
        Any thread. It pickles, and is shared by forks: another process opens the cache for itself.
    """

    def __init__(self, blobs: ObjectBlobs, ranges: RecordRanges, place: str, eviction: str) -> None:
        """Name the cache, which is opened at the first read."""
        self._blobs, self._ranges = blobs, ranges
        self._arguments = CacheArguments(place, ranges.digest(blobs.address), eviction)
        self._fetcher_path: str | None = None  # of the process that reads ahead for this rank
        self._order: Order | None = None
        self._next_sample = 0
        self._begin()

    def _begin(self) -> None:
        self._owner = Owner()
        self._cache: NodeCache | None = None
        self._fetcher: FetcherClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave what is open behind."""
        return self.__dict__ | dict.fromkeys(("_cache", "_fetcher", "_order", "_owner"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with nothing open."""
        self.__dict__.update(state)
        self._begin()

    @property
    def cache(self) -> NodeCache:
        """Of this process."""
        if not self._owner.is_here:  # a fork
            self._begin()
        if self._cache is None:
            self._cache = self._arguments.open(self._ranges.sizes)
        return self._cache

    def read(self, numbers: NDArray[np.int64]) -> list[memoryview]:
        """Return records."""
        cache, wanted = self.cache, numbers.tolist()
        views = [cache.get(number) for number in wanted]
        absent = [k for k, view in enumerate(views) if view is None]
        if absent:
            fetched = self._fetch([wanted[k] for k in absent])
            for k, view in zip(absent, fetched, strict=True):
                views[k] = view
        return views  # type: ignore[return-value]  # none is left

    def _fetch(self, numbers: list[int]) -> Sequence[memoryview]:
        if self._fetcher_path is not None:
            if self._fetcher is None:
                self._fetcher = FetcherClient(self._fetcher_path)
            try:
                views: list[memoryview] = self._fetcher.call(
                    self._blobs.place, "fetch", self._arguments.digest, numbers
                )
                return views
            except ConnectionError:  # it was killed, or is that of another machine
                pass
        return self.read_anew(np.array(numbers, np.int64))

    def read_anew(self, numbers: NDArray[np.int64]) -> Sequence[memoryview]:
        """Return records as they are far away, and keep them."""
        views = self._blobs.read(self._ranges.at(numbers))
        for number, view in zip(numbers.tolist(), views, strict=True):
            self.cache.put(number, view)
        return views

    def follow(self, records: NDArray[np.int64]) -> Callable[[int], None] | None:
        """Have records read ahead, in this order, for the loader of this process.

        Returns:
            To be called with the number of those that are used up; None without room for an order.
        """
        ranges = self._ranges
        try:
            if self._order is None:
                self._order = Order.made(self.cache, len(ranges))
        except OSError as error:
            warn_user(
                f"nothing is read ahead of the order: {self.cache.folder} cannot be written "
                f"({error.strerror})."
            )
            return None
        records = np.where(records < 0, records + len(ranges), records)
        first, clock = self._next_sample, self._order.clock
        self._next_sample += len(records)
        clock[0] = first
        self._fetcher_path = self._blobs.fetch_ahead(
            self._arguments,
            (list(ranges.names), list(ranges.versions), *map(_bytes_of, ranges.arrays)),
            (self._order.path, first, _bytes_of(records.astype(np.int64))),
        )

        def advance(num_used_up: int) -> None:
            clock[0] = first + num_used_up

        return advance

    def close(self) -> None:
        """Let go of what this process holds."""
        if self._owner.is_here:
            if self._fetcher is not None:
                self._fetcher.close()
            if self._order is not None:
                self._order.remove()
            if self._cache is not None:
                self._cache.close()
        self._order = None
        self._begin()


def _bytes_of(array: NDArray[Any]) -> bytes:
    return array.tobytes()
