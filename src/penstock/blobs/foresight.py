# SPDX-License-Identifier: Apache-2.0
"""`Foresight`: reads records ahead, in a rank's order, into the cache of its machine.

    this epoch's records                       | the next epoch's, as far as they are known
    … used up │ asked for by workers │ read ahead ──▶ at
            clock                  asked

The order of an epoch is a function of its number, so both are known before anything is read. Each
record's next use is noted for eviction (`Order`): the record needed last is evicted first. No other
rule evicts better. L. A. Belady, A study of replacement algorithms for a virtual-storage computer,
IBM Systems Journal 5(2), 1966; for training: R. Böhringer et al., Clairvoyant Prefetching (NoPFS),
SC 2021.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.blobs.client import Sessions
from penstock.blobs.node_cache import MOST_AHEAD_BYTES
from penstock.blobs.order import FETCHER_ROW, NEVER, Counts, Order
from penstock.blobs.ranges import RecordRanges
from penstock.blobs.requests import GAP_BYTES, parts_of, plan_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.blobs.blobs import ByteRange
    from penstock.blobs.node_cache import CacheArguments, NodeCache
    from penstock.blobs.place import Place

_REQUESTS_AHEAD: Final = 96  # of the 128 of a process: a worker that waits finds one
_MOST_FAILED: Final = 100  # requests of an epoch
_LOOK_AHEAD: Final = 4096  # samples
_PAUSE_S: Final = 0.005  # until the next check whether more is to be read ahead
_LONGEST_PAUSE_S: Final = 0.2  # while nothing happens


class _Walk:
    """How far a loader is in its order, and how much room its used records leave.

    Attributes:
        ends: Bytes of all records up to each sample; a record counts once per epoch.
        used_up: How many samples are used up.
        share: This loader's share of the cache, by the bytes of its epoch.
    """

    def __init__(
        self,
        order: Order,
        num_now: int,
        records: NDArray[np.int64],
        uses: Uses,
        cache: NodeCache,
        sizes: NDArray[np.int64],
    ) -> None:
        self.order, self.records, self._following = order, records, uses.following
        self.is_first, self._cache, self._sizes = uses.is_first, cache, sizes
        self.ends = np.cumsum(sizes[records] * uses.is_first)
        order.epoch_bytes[0] = self.ends[num_now - 1]
        self._num_now, self._mean_bytes = num_now, float(self.ends[num_now - 1]) / num_now
        self.used_up = 0
        self.share = 1.0
        self._num_spared = cache.num_spared_bytes

    def catch_up(self) -> int:
        """Note the next use of samples that are used up; return how many these are in all."""
        clock = int(self.order.clock[0])
        if clock > self.used_up:
            done = slice(self.used_up, clock)
            records = self.records[done]
            self.order.due[records] = self._following[done]
            self.used_up = clock
            # A record that no rank needs before others have filled the cache is evicted by then.
            most = self._cache.max_bytes + self._cache.ahead_bytes
            in_next_epoch = self._cache.distances(records) - (self._num_now - clock)
            is_lost = in_next_epoch * self._mean_bytes > most * self.share
            lost = np.unique(records[is_lost])  # the samples of a row group are one record
            self._cache.spare(int(self._sizes[lost].sum()))
        return clock

    @property
    def num_spared_bytes(self) -> int:
        """This loader's part of the bytes that reading ahead may evict without a loss."""
        return int(max(0, self._cache.num_spared_bytes - self._num_spared) * self.share)


class Foresight:
    """Fetches records of one store for a process; several requests for a record fetch it once.

    Concurrency:
        One event loop.
    """

    def __init__(
        self, sessions: Sessions, place: Place, ranges: RecordRanges, cache: NodeCache
    ) -> None:
        """Begin without an order."""
        self._sessions, self._place = sessions, place
        self._ranges, self._cache = ranges, cache
        self._sizes = ranges.sizes
        self._under_way: dict[int, asyncio.Task[dict[int, memoryview]]] = {}
        self._requests: set[asyncio.Task[dict[int, memoryview]]] = set()
        self._walks: dict[asyncio.Task[None], _Walk] = {}
        self._num_failed = self._num_bytes_under_way = 0
        self._counts: Counts | None = None

    async def follow(
        self, path: str, counts: str, num_now: int, records: NDArray[np.int64]
    ) -> None:
        """Read ahead in an order, until the order's file is removed."""
        if self._counts is None or self._counts.path != counts:
            self._counts = Counts.shared(counts)
        order = Order.shared(path, len(self._ranges))
        uses = await asyncio.to_thread(next_uses, num_now, records, len(self._ranges))
        order.due[:] = uses.due
        self._num_failed = 0
        walk = _Walk(order, num_now, records, uses, self._cache, self._sizes)
        task = asyncio.create_task(self._read_ahead(walk))
        self._walks[task] = walk
        task.add_done_callback(self._walks.pop)

    async def _read_ahead(self, walk: _Walk) -> None:
        order = walk.order
        at = 0
        pause_s = _PAUSE_S
        while order.is_there:
            walk.share = order.epoch_bytes[0] / max(order.epoch_bytes[0], self._cache.find_orders())
            before, clock = walk.used_up, walk.catch_up()
            pause_s = _PAUSE_S if clock > before else min(2 * pause_s, _LONGEST_PAUSE_S)
            at = max(at, clock)
            records, num_ahead = self._ahead(walk, at, max(clock, int(order.asked[0])))
            # Nothing is read ahead while nothing can be kept, or after too many failures.
            if num_ahead and self._cache.is_keeping and self._num_failed <= _MOST_FAILED:
                self._begin(records)
                at += num_ahead
                await asyncio.sleep(0)
            elif self._requests:
                await asyncio.wait(
                    self._requests, timeout=_PAUSE_S, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(pause_s)

    def _ahead(self, walk: _Walk, at: int, num_asked: int) -> tuple[NDArray[np.int64], int]:
        """Return the records to read now, and how many samples, from `at` on, these serve.

        Records that take spared room may be any distance ahead. Records that take free room are
        near, as others need that room, too. What workers have asked for is read in any case.
        """
        cache, look = self._cache, slice(at, at + _LOOK_AHEAD)
        records = walk.records[look]
        # A record that comes again in an epoch is there by then, or is read when it is needed.
        is_absent = walk.is_first[look] & ~cache.has(records)
        distances = walk.ends[look] - (walk.ends[num_asked - 1] if num_asked else 0)
        if cache.evicts_by_time:
            fits = distances <= cache.ahead_bytes
        else:
            taken = np.cumsum(self._sizes[records] * is_absent)
            free = (cache.num_free_bytes - self._num_bytes_under_way) * walk.share
            fits = taken <= walk.num_spared_bytes + np.where(
                distances <= MOST_AHEAD_BYTES, free, min(0, free)
            )
            # What is under way is in the memory of this process.
            fits &= taken <= MOST_AHEAD_BYTES - self._num_bytes_under_way
        fits[: max(0, num_asked - at)] = True
        fits &= np.cumsum(is_absent) <= _REQUESTS_AHEAD - len(self._requests)
        num_ahead = len(fits) if fits.all() else int(np.argmin(fits))
        if num_ahead == 0 and at == num_asked and not self._requests:  # one that is too large
            num_ahead = min(1, len(fits))
        return records[:num_ahead][is_absent[:num_ahead]], num_ahead

    async def fetch(self, numbers: Sequence[int]) -> list[memoryview]:
        """Return records; those that are neither there nor under way are read now."""
        found = {number: view for number in numbers if (view := self._cache.get(number))}
        absent = [number for number in numbers if number not in found]
        self._begin(np.array(absent, np.int64))
        tasks = {number: self._under_way[number] for number in absent}
        for number, task in tasks.items():
            found[number] = (await asyncio.shield(task))[number]
        return [found[number] for number in numbers]

    def _begin(self, numbers: NDArray[np.int64], gap_bytes: int = GAP_BYTES) -> None:
        """Begin to read those of some records that are not under way."""
        wanted = dict.fromkeys(numbers.tolist())  # a batch may have one several times
        numbers = np.array([n for n in wanted if n not in self._under_way], np.int64)
        requests, places = plan_requests(self._ranges.at(numbers), gap_bytes)
        parts: list[list[int]] = [[] for _ in requests]
        for number, (k, _) in zip(numbers.tolist(), places, strict=True):
            parts[k].append(number)
        for request, members in zip(requests, parts, strict=True):
            all_in = self._all_in(request, members)
            assert request.stop is not None  # a record's is known
            num_new = int(self._sizes[all_in].sum())
            if gap_bytes and 2 * num_new < request.stop - request.start:  # most bytes are there
                self._begin(np.array(members, np.int64), 0)
                continue
            task = asyncio.create_task(self._read(request, all_in))
            self._requests.add(task)
            self._under_way |= dict.fromkeys(all_in, task)
            self._num_bytes_under_way += num_new
            task.add_done_callback(self._ended)

    def _all_in(self, request: ByteRange, members: list[int]) -> list[int]:
        """Return the records that a request brings, also those in gaps: they are worth keeping."""
        ranges, first, last = self._ranges, min(members), max(members)
        if last - first + 1 == len(members):
            return members
        assert request.stop is not None  # a record's is known
        between = np.arange(first, last + 1)
        is_inside = (
            (ranges.objects[between] == ranges.objects[first])
            & (ranges.starts[between] >= request.start)
            & (ranges.stops[between] <= request.stop)
            & ~self._cache.has(between)
        )
        extra = set(between[is_inside].tolist()) - self._under_way.keys()
        return [*members, *sorted(extra.difference(members))]

    def _ended(self, task: asyncio.Task[dict[int, memoryview]]) -> None:
        self._requests.discard(task)
        if not task.cancelled() and task.exception() is not None:  # its caller gets the error
            self._num_failed += 1

    async def _read(self, request: ByteRange, numbers: list[int]) -> dict[int, memoryview]:
        """Return the records of one request, which are kept if there is room."""
        try:
            data = await self._sessions.read_one(self._place, request)
            if self._counts is not None:
                self._counts.rows[FETCHER_ROW, :2] += len(parts_of(request)), len(data)
            starts = self._ranges.starts
            views = {}
            for walk in self._walks.values():  # else records just used up would have no next use
                walk.catch_up()
            for number in numbers:
                at = int(starts[number]) - request.start
                views[number] = data[at : at + int(self._sizes[number])]
                self._cache.put(number, views[number])
            return views
        finally:
            self._num_bytes_under_way -= int(self._sizes[numbers].sum())
            for number in numbers:
                self._under_way.pop(number, None)  # one without bytes may be in two requests


class Uses(NamedTuple):
    """When records are used.

    Attributes:
        due: The first sample that uses each record; `NEVER` if none does.
        following: The next sample that uses each sample's record; `NEVER` if none does.
        is_first: Whether a sample is the first of its epoch that uses its record.
    """

    due: NDArray[np.int64]
    following: NDArray[np.int64]
    is_first: NDArray[np.bool_]


def next_uses(num_now: int, records: NDArray[np.int64], num_records: int) -> Uses:
    """Return when records are used.

    The first `num_now` samples are this epoch's, the rest the next epoch's.

    Example:
        >>> due, following, is_first = next_uses(2, np.array([2, 0, 2]), 3)
        >>> np.where(due == NEVER, -1, due).tolist(), (following == NEVER).tolist()
        ([1, -1, 0], [False, True, True])
        >>> is_first.tolist()
        [True, True, True]
    """
    following = np.full(len(records), NEVER, np.int64)
    due = np.full(num_records, NEVER, np.int64)
    is_first = np.ones(len(records), bool)
    for start, stop in ((num_now, len(records)), (0, num_now)):  # the later epoch first
        part, samples = records[start:stop], np.arange(start, stop)
        following[start:stop] = due[part]
        due[part[::-1]] = samples[::-1]  # of several, the first remains
        is_first[start:stop] = due[part] == samples
        if not is_first[start:stop].all():  # a record comes more than once
            by_record = np.argsort(part, kind="stable")
            again = np.flatnonzero(part[by_record[1:]] == part[by_record[:-1]])
            following[start + by_record[again]] = start + by_record[again + 1]
    return Uses(due, following, is_first)


class CachingSessions(Sessions):
    """Sessions that also fetch records into caches of this machine."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self._foresights: dict[CacheArguments, Foresight] = {}

    async def keep(
        self,
        place: Place,
        cache: CacheArguments,
        names: tuple[list[str], list[str]],
        numbers: tuple[bytes, bytes, bytes],
    ) -> None:
        """Register a store: where its records lie, and the cache that keeps them."""
        kinds = np.int32, np.int64, np.int64
        arrays = (np.frombuffer(part, kind) for part, kind in zip(numbers, kinds, strict=True))
        where = RecordRanges(*names, *arrays)
        self._foresights[cache] = Foresight(self, place, where, cache.open(where.sizes))

    async def follow(
        self, place: Place, cache: CacheArguments, order: tuple[str, str, int, bytes]
    ) -> bool:
        """Read ahead in an order; return whether its store is known.

        `order` is: its file, the file of the counts, the samples of this epoch, and the records.
        """
        foresight = self._foresights.get(cache)
        if foresight is not None:
            path, counts, num_now, records = order
            await foresight.follow(path, counts, num_now, np.frombuffer(records, np.int64))
        return foresight is not None

    async def fetch(
        self, place: Place, cache: CacheArguments, numbers: list[int]
    ) -> list[memoryview]:
        """Return records of a store that is known."""
        foresight = self._foresights.get(cache)
        if foresight is None:
            raise ConnectionError("it was started anew, and does not know the store")
        return await foresight.fetch(numbers)
