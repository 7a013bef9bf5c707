# SPDX-License-Identifier: Apache-2.0
"""`CachedRecords`: records of far objects, by way of a cache of this machine."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.blobs.fetcher import FetcherClient
from penstock.blobs.node_cache import CacheArguments, NodeCache
from penstock.blobs.order import FETCHER_ROW, Counts, Order, Traffic
from penstock.errors import StoreError
from penstock.forks import Owner
from penstock.warn import warn_user
from penstock.worker_info import info_unasked

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
        self._blobs, self._ranges, self._sizes = blobs, ranges, ranges.sizes
        address = f"{blobs.place.endpoint} {blobs.address}"
        self._arguments = CacheArguments(place, ranges.digest(address), eviction)
        self._fetcher_path: str | None = None  # of the process that reads ahead for this rank
        self._counts_path: str | None = None
        self._begin()

    def _begin(self) -> None:
        self._owner = Owner()
        self._lock = threading.Lock()
        self._cache: NodeCache | None = None
        self._fetcher: FetcherClient | None = None
        self._counts: Counts | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave what is open behind."""
        opened = "_cache", "_fetcher", "_counts", "_owner", "_lock"
        return self.__dict__ | dict.fromkeys(opened)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with nothing open."""
        self.__dict__.update(state)
        self._begin()

    @property
    def cache(self) -> NodeCache:
        """Of this process."""
        if not self._owner.is_here:  # a fork
            self._begin()
        with self._lock:
            if self._cache is None:
                self._cache = self._arguments.open(self._sizes)
            return self._cache

    def read(self, numbers: NDArray[np.int64]) -> list[memoryview]:
        """Return records."""
        cache, wanted = self.cache, numbers.tolist()
        views = [cache.get(number) for number in wanted]
        absent = [k for k, view in enumerate(views) if view is None]
        if (counts := self._counts_of_rank()) is not None:
            info = info_unasked()
            of_worker = counts.rows[0 if info is None else info.id % FETCHER_ROW]
            of_worker[:3] += len(wanted), len(wanted) - len(absent), self._sizes[numbers].sum()
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
                    self._blobs.place, "fetch", self._arguments, numbers
                )
                return views
            except OSError:  # it was killed, or is that of another machine
                pass
        read = self._blobs.read(self._ranges.at(np.array(numbers, np.int64)))
        for number, view in zip(numbers, read, strict=True):
            self.cache.put(number, view)
        return read

    def _counts_of_rank(self) -> Counts | None:
        """Return those of the main process, in a worker as well."""
        if self._counts is None and self._counts_path is not None:
            try:
                self._counts = Counts.shared(self._counts_path)
            except OSError:  # it is that of another machine, or has ended
                self._counts_path = None
        return self._counts

    @property
    def traffic(self) -> Traffic | None:
        """What this process has read; None before its first epoch."""
        return None if self._counts is None else self._counts.traffic

    def follow(
        self, now: NDArray[np.int64], later: NDArray[np.int64]
    ) -> Callable[[int, int], None] | None:
        """Have records read ahead for a loader, in the order of this epoch and of the next.

        Returns:
            To be called with how many are used up, and asked for, and to be kept as long as the
            order holds; None where it cannot be followed, which is a warning.
        """
        cache, place = self.cache, self._blobs.place
        try:
            if self._counts is None:
                self._counts = Counts.made(cache.folder)
                self._counts_path = self._counts.path
            following = _Following(Order.made(cache.folder, len(self._ranges)))
            wanted = np.concatenate((now, later)).astype(np.int64)
            wanted = np.where(wanted < 0, wanted + len(self._ranges), wanted)
            order = following.order.path, self._counts.path, len(now), wanted.tobytes()
            with self._blobs.caller() as fetcher:
                if not isinstance(fetcher, FetcherClient):
                    return None  # a loader in a worker, which has a client of its own
                if not fetcher.call(place, "follow", self._arguments, order):
                    ranges = self._ranges
                    arrays = [
                        part.tobytes() for part in (ranges.objects, ranges.starts, ranges.stops)
                    ]
                    names = list(ranges.names), list(ranges.versions)
                    fetcher.call(place, "keep", self._arguments, names, arrays)
                    fetcher.call(place, "follow", self._arguments, order)
                self._fetcher_path = fetcher.path
        except (OSError, RuntimeError, StoreError) as error:
            warn_user(f"nothing is read ahead of the order of {self._blobs.address}: {error}.")
            return None
        return following

    def close(self) -> None:
        """Let go of what this process holds."""
        if self._owner.is_here:
            if self._fetcher is not None:
                self._fetcher.close()
            if self._counts is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._counts.path)
            if self._cache is not None:
                self._cache.close()
        self._counts_path = None
        self._begin()


class _Following:
    """Says how far a loader is; its order ends with it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        weakref.finalize(self, _end, order, Owner())

    def __call__(self, num_used_up: int, num_asked: int) -> None:
        self.order.clock[0], self.order.asked[0] = num_used_up, num_asked

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: a copy of the loader has no order yet."""
        return type(None), ()


def _end(order: Order, owner: Owner) -> None:
    if owner.is_here:  # and not in a worker, which has a copy
        order.remove()
