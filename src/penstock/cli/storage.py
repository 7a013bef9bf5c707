# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor --storage`: how fast object storage or a web server gives what is asked."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.blobs.blobs import ByteRange, is_remote, open_blobs
from penstock.blobs.errors import BlobNotFound
from penstock.blobs.requests import GAP_BYTES
from penstock.cli.doctor import Finding
from penstock.errors import ConfigError, StoreError
from penstock.lines import amount, counted, duration, format_bytes
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.blobs.blobs import Blob, Blobs

_KIND: Final = re.compile(r"^(shards|tar|folder|mds|arrow):(?=\w+://)")
_TIMEOUT_S: Final = 20.0
_NUM_SMALL: Final = 20
_AT_ONCE: Final = (1, 8, 32, 64)  # a process sends 128 requests at most
# Of the small requests, and of each number at once: 15 s and 200 MB together.
_STEP_S: Final = 3.0
_STEP_BYTES: Final = 45_000_000
_TYPICAL_BYTES: Final = 100_000  # of a sample, where records are not known: a photo
_LARGEST_BYTES: Final = 1_000_000  # of a request; of a larger record the first of them are read
_NUM_LISTED: Final = 1000  # a page of S3
_NUM_CHOSEN: Final = 4096  # ranges, among which far ones are looked for
_GROWS: Final = 1.2  # times the rate: more at once bring more


class StoragePlan(NamedTuple):
    """What is read to measure a place.

    Attributes:
        blobs: The place.
        what: What lies there, for people.
        unit: What one range stands for.
        size_bytes: Of a typical one.
        ranges: So far apart that each is a request of its own.
    """

    blobs: Blobs
    what: str
    unit: str
    size_bytes: int
    ranges: Sequence[ByteRange]


class StorageRate(NamedTuple):
    """What so many requests at once bring."""

    at_once: int
    bytes_per_s: float
    requests_per_s: float


def look_at_storage(address: str) -> Iterator[Finding]:
    """Return how fast a place gives ranges of its objects; nothing is written.

    Raises:
        StoreError: it cannot be read, or serves no ranges.
        ConfigError: it is no address of object storage.
    """
    address = _KIND.sub("", address).rstrip("/")
    if not is_remote(address):
        raise ConfigError(
            "--storage takes an address as s3://BUCKET/PREFIX or https://HOST/PATH, not "
            f"{without_password(address)!r}."
        )
    plan = _plan_for(address)
    with plan.blobs as blobs:
        yield Finding("storage", "place", f"{address}: {plan.what}")
        times_s = _times_of_small(blobs, plan.ranges)
        yield Finding("storage", "ranges", "served")
        yield Finding(
            "storage", "one request",
            f"{duration(statistics.median(times_s))} for one byte, at most "
            f"{duration(max(times_s))} ({counted(len(times_s), 'request')})",
        )  # fmt: skip
        rates: list[StorageRate] = []
        for at_once in _AT_ONCE:
            rate = _rate_of(blobs, plan.ranges, at_once, rates)
            name = f"{at_once} at once"
            if isinstance(rate, str):
                yield Finding("storage", name, rate)
                continue
            rates.append(rate)
            found = f"{_per_s(rate.bytes_per_s)}, {amount(rate.requests_per_s)} requests a second"
            yield Finding("storage", name, found)
        yield _advice(rates, plan)


def _plan_for(address: str) -> StoragePlan:
    """Look for a store of shards, then for objects, then for one object of this address."""
    from penstock.stores.shards.store import INDEX_NAME, read_index

    with open_blobs(address, timeout_s=_TIMEOUT_S) as blobs:
        try:
            size_bytes = blobs.stat(INDEX_NAME).size_bytes
        except BlobNotFound:
            return _plan_of_objects(blobs)
        begun_s = time.perf_counter()
        records = read_index(blobs, address).shards.ranges()
        spent_s = time.perf_counter() - begun_s
    if len(records) == 0:
        raise StoreError(f"{address} has no records.")
    chosen = np.random.default_rng().permutation(len(records))[:_NUM_CHOSEN]
    what = (
        f"{counted(len(records), 'record')} in shards, {format_bytes(int(records.sizes.sum()))}; "
        f"the index of {format_bytes(size_bytes)} came in {duration(spent_s)}"
    )
    size_bytes = int(np.median(records.sizes))
    return StoragePlan(blobs, what, "sample", size_bytes, _far_ones(records.at(chosen)))


def _plan_of_objects(blobs: Blobs) -> StoragePlan:
    address, found = blobs.address, []
    if not address.startswith("http"):  # a web server has no lists
        found = [blob for blob in blobs.list(at_most=_NUM_LISTED) if blob.size_bytes]
    if not found:
        above, _, name = address.rpartition("/")
        blobs = open_blobs(above, timeout_s=_TIMEOUT_S) if above.count("/") > 1 else blobs
        try:
            with blobs:
                found = [blobs.stat(name)]
        except BlobNotFound as error:
            raise StoreError(
                f"there is nothing at {address}: no index of a store, no object of this name, and "
                "none below it. A web server has no lists: name an object of it."
            ) from error
    found.sort(key=lambda blob: -blob.size_bytes)
    size_bytes = min(found[0].size_bytes, _TYPICAL_BYTES)
    ranges = _far_ones(itertools.chain.from_iterable(_spread(b, size_bytes) for b in found))
    if not ranges:
        raise StoreError(f"{address} is empty.")
    what = f"{counted(len(found), 'object')}, the largest of {format_bytes(found[0].size_bytes)}"
    return StoragePlan(blobs, what, "range", size_bytes, ranges)


def _spread(blob: Blob, size_bytes: int) -> Iterator[ByteRange]:
    """Yield ranges all over an object."""
    step = max(size_bytes + GAP_BYTES + 1, blob.size_bytes // max(_AT_ONCE))
    for start in range(0, blob.size_bytes, step):
        yield ByteRange(blob.name, start, min(start + size_bytes, blob.size_bytes))


def _far_ones(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Return ranges that no request can have two of, in an order of chance."""
    far: list[ByteRange] = []
    for one in sorted(itertools.islice(ranges, _NUM_CHOSEN)):
        if far and far[-1].name == one.name and one.start <= (far[-1].stop or 0) + GAP_BYTES:
            continue
        assert one.stop is not None
        far.append(one._replace(stop=min(one.stop, one.start + _LARGEST_BYTES)))
    return [far[k] for k in np.random.default_rng().permutation(len(far))]


def _firsts(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    return [one._replace(stop=one.start + 1) for one in ranges]


def _times_of_small(blobs: Blobs, ranges: Sequence[ByteRange]) -> list[float]:
    blobs.read(_firsts(ranges[:1]))  # connects
    times_s: list[float] = []
    for one in _firsts(itertools.islice(itertools.cycle(ranges), _NUM_SMALL)):
        begun_s = time.perf_counter()
        blobs.read([one])
        times_s.append(time.perf_counter() - begun_s)
        if sum(times_s) > _STEP_S:
            break
    return times_s


def _rate_of(
    blobs: Blobs, ranges: Sequence[ByteRange], at_once: int, before: Sequence[StorageRate]
) -> StorageRate | str:
    """Return a rate, or why there is none."""
    if at_once > len(ranges):
        return f"not measured: what lies there is enough for {counted(len(ranges), 'request')}"
    num_bytes = num_read = 0
    spent_s = 0.0
    following = itertools.cycle(ranges)
    while spent_s < _STEP_S:
        wanted = list(itertools.islice(following, at_once))
        size_bytes = sum(one.stop - one.start for one in wanted if one.stop is not None)
        if num_read and num_bytes + size_bytes > _STEP_BYTES:
            break
        if not num_read:
            if before and size_bytes > 3 * _STEP_S * max(rate.bytes_per_s for rate in before):
                return f"not measured: {format_bytes(size_bytes)} would take long"
            blobs.read(_firsts(wanted))  # connects
        begun_s = time.perf_counter()
        blobs.read(wanted)
        spent_s += time.perf_counter() - begun_s
        num_bytes, num_read = num_bytes + size_bytes, num_read + at_once
    return StorageRate(at_once, num_bytes / spent_s, num_read / spent_s)


def _per_s(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"


def _advice(rates: Sequence[StorageRate], plan: StoragePlan) -> Finding:
    best = max(rates, key=lambda rate: rate.bytes_per_s)
    is_at_limit = len(rates) > 1 and rates[-1].bytes_per_s < _GROWS * rates[-2].bytes_per_s
    each = f"{plan.unit}s of {format_bytes(plan.size_bytes)}"
    found = (
        f"{_per_s(best.bytes_per_s)} with {counted(best.at_once, 'request')} at once: "
        f"{amount(best.bytes_per_s / plan.size_bytes)} {each} a second"
    )
    more = (
        "More at once would bring little more."
        if is_at_limit
        else "A worker asks for the samples of a batch at once, 64 at most: larger batches and "
        "more workers bring more."
    )
    keep = 'With local_cache="/fast/disk:60GB" of a store later epochs ask for less.'
    return Finding("storage", "a loader", found, f"{more} {keep}")
