# SPDX-License-Identifier: Apache-2.0
"""`Foresight`: reads ahead what a rank's order says, into the cache of its machine.

    order   this epoch's records | the next epoch's, as far as they are known
            … used up │ under way │ read ahead ──▶│ …
                    clock                       limit

An epoch is a function of its number, so both are known before anything is read. Each record's next
use is written down for eviction (`Order`): what is needed last goes first, which no other rule can
better. L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems
Journal 5(2), 1966; for training: R. Böhringer et al., Clairvoyant Prefetching (NoPFS), SC 2021.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.blobs.client import Sessions
from penstock.blobs.node_cache import NEVER, NodeCache, Order
from penstock.blobs.ranges import RecordRanges
from penstock.blobs.requests import parts_of, plan_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.blobs.blobs import ByteRange
    from penstock.blobs.node_cache import CacheArguments
    from penstock.blobs.place import Place

_REQUESTS_AHEAD: Final = 48  # of the 64 of a process: a worker that waits finds one
_RECORDS_AT_A_TIME: Final = 64
_MOST_FAILED: Final = 100  # requests of an epoch
_PAUSE_S: Final = 0.005  # until it is looked again whether more is to be read ahead


class Foresight:
    """Fetches records of one store for one rank, each once, whoever asks.

    Concurrency:
        One event loop.
    """

    def __init__(
        self, sessions: Sessions, place: Place, ranges: RecordRanges, cache: NodeCache
    ) -> None:
        """Begin without an order."""
        self._sessions, self._place = sessions, place
        self._ranges, self._cache = ranges, cache
        self._under_way: dict[int, asyncio.Task[dict[int, memoryview]]] = {}
        self._requests: set[asyncio.Task[dict[int, memoryview]]] = set()
        self._walk: asyncio.Task[None] | None = None
        self._num_failed = 0
        self._order: Order | None = None

    async def follow(self, order: Order, first: int, records: NDArray[np.int64]) -> None:
        """Read ahead in an order, of which `records[k]` is sample `first + k`, until another."""
        due, following = await asyncio.to_thread(next_uses, first, records, len(self._ranges))
        if self._walk is not None:
            self._walk.cancel()
        self._order, order.due[:] = order, due
        self._num_failed = 0
        self._walk = asyncio.create_task(self._read_ahead(order, first, records, following))

    async def _read_ahead(
        self, order: Order, first: int, records: NDArray[np.int64], following: NDArray[np.int64]
    ) -> None:
        ends = np.cumsum(self._ranges.sizes[records])
        at = used_up = 0
        while used_up < len(records):
            clock = max(0, int(order.clock[0]) - first)
            order.due[records[used_up:clock]] = following[used_up:clock]
            at, used_up = max(at, clock), clock
            limit = (ends[clock - 1] if clock else 0) + self._cache.ahead_bytes
            stop = min(int(np.searchsorted(ends, limit, "right")), at + _RECORDS_AT_A_TIME)
            if stop > at and len(self._requests) < _REQUESTS_AHEAD:
                self._begin(records[at:stop])
                at = stop
            elif stop > at:
                await asyncio.wait(self._requests, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(_PAUSE_S)

    async def fetch(self, numbers: Sequence[int]) -> list[memoryview]:
        """Return records, read now if they are not there or under way."""
        found = {number: view for number in numbers if (view := self._cache.get(number))}
        absent = [number for number in numbers if number not in found]
        self._begin(np.array(absent, np.int64), are_absent=True)
        tasks = {number: self._under_way[number] for number in absent}
        for number, task in tasks.items():
            found[number] = (await asyncio.shield(task))[number]
        return [found[number] for number in numbers]

    def _begin(self, numbers: NDArray[np.int64], *, are_absent: bool = False) -> None:
        """Begin to read records that are neither there nor under way."""
        if not are_absent:
            numbers = numbers[~self._cache.has(numbers)]
        numbers = np.array([n for n in numbers.tolist() if n not in self._under_way], np.int64)
        requests, places = plan_requests(self._ranges.at(numbers))
        parts: list[dict[int, int]] = [{} for _ in requests]
        for number, (k, start) in zip(numbers.tolist(), places, strict=True):
            parts[k][number] = start
        for request, starts in zip(requests, parts, strict=True):
            task = asyncio.create_task(self._read(request, starts))
            self._requests.add(task)
            self._under_way |= dict.fromkeys(starts, task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[dict[int, memoryview]]) -> None:
        self._requests.discard(task)
        if not task.cancelled() and task.exception() is not None:  # who asked for it is told
            self._num_failed += 1
            if self._num_failed > _MOST_FAILED and self._walk is not None:
                self._walk.cancel()  # nothing is asked for ahead of a server that is down

    async def _read(self, request: ByteRange, starts: dict[int, int]) -> dict[int, memoryview]:
        """Return the records of one request, which are kept if there is room."""
        try:
            data = await self._sessions.read_one(self._place, request)
            if self._order is not None:
                self._order.counts[63, :2] += len(parts_of(request)), len(data)
            views = {
                n: data[at : at + int(self._ranges.stops[n] - self._ranges.starts[n])]
                for n, at in starts.items()
            }
            for number, view in views.items():
                self._cache.put(number, view)
            return views
        finally:
            for number in starts:
                del self._under_way[number]


def next_uses(
    first: int, records: NDArray[np.int64], num_records: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which sample each record is first, and each sample's record next; else `NEVER`.

    Example:
        >>> due, following = next_uses(10, np.array([2, 0, 2]), 3)
        >>> np.where(due == NEVER, -1, due).tolist(), (following == NEVER).tolist()
        ([11, -1, 10], [False, True, True])
    """
    due = np.full(num_records, NEVER, np.int64)
    following = np.full(len(records), NEVER, np.int64)
    by_record = np.argsort(records, kind="stable")
    again = np.flatnonzero(records[by_record[1:]] == records[by_record[:-1]])
    following[by_record[again]] = first + by_record[again + 1]
    is_first = np.ones(len(records), bool)
    is_first[by_record[again + 1]] = False
    due[records[is_first]] = first + np.flatnonzero(is_first)
    return due, following


class CachingSessions(Sessions):
    """Sessions that also fetch records into caches of this machine."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self._foresights: dict[str, Foresight] = {}
        self._orders: dict[str, Order] = {}

    async def follow(
        self,
        place: Place,
        cache: CacheArguments,
        ranges: tuple[list[str], list[str], memoryview, memoryview, memoryview],
        order: tuple[str, int, memoryview],
    ) -> None:
        """Read ahead in an order: its file, the number of its first sample, and the records."""
        digest = cache.digest
        if digest not in self._foresights:
            names, versions, *numbers = ranges
            kinds = np.int32, np.int64, np.int64
            arrays = (np.frombuffer(n, kind) for n, kind in zip(numbers, kinds, strict=True))
            where = RecordRanges(tuple(names), tuple(versions), *arrays)
            self._foresights[digest] = Foresight(self, place, where, cache.open(where.sizes))
        path, first, records = order
        known = self._orders.get(path)
        if known is None:
            known = self._orders[path] = Order.of_rank(path, len(ranges[2]) // 4)
        await self._foresights[digest].follow(known, first, np.frombuffer(records, np.int64))

    async def fetch(self, place: Place, digest: str, numbers: list[int]) -> list[memoryview]:
        """Return records of a store in whose order it reads ahead."""
        foresight = self._foresights.get(digest)
        if foresight is None:
            raise ConnectionError("it was started anew, and was not told the order")
        return await foresight.fetch(numbers)
