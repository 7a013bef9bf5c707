# SPDX-License-Identifier: Apache-2.0
"""What does it cost to verify the tree of an LMDB file before LMDB opens it?

Question
    Milliseconds to compare the pages of the tree with their checksums, for a million small records
    and for photos, from the page cache and from the disk. The default of `verify=` follows.

Method
    torch recipe   `lmdb.open` and the first record, as a hand-made dataset does it: no
                   verification at all.
    penstock       `check_pages`, the file being in the page cache.

    The records are random bytes, labelled 0 to 9. Values are medians of five runs. "cold" is the
    median of three, each after the system was told to drop the file from its cache
    (POSIX_FADV_DONTNEED). "bounds" is the same as the value for a file without checksums, in which
    the numbers are compared with their bounds. "index" is `LMDBStore(path, verify="never")`
    and its length: what opening costs besides. "tree MB" is the size of the pages that are read.

Left out
    Appending the checksums, which `pack` does once. A spinning disk, where each leaf among photos
    is a seek; a shuffled epoch makes the same ones.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, numpy 2.4.6,
    lmdb 3.0.0, xxhash 3.6.0; shared with other work (load 5)

Command
    python benchmarks/lmdb_verify.py --rounds 1

Result
    2026-11-23, 1 round, milliseconds:

                               checksums    cold   bounds   index   tree     torch recipe
        1,000,000 of 100 B           160     629      423    36.0   206 MB         0.12
        100,000 of 1.9 kB             98     378       91     2.2   206 MB         0.10
        1,000 photos of 30 kB       0.29    1.65     0.41    1.06   0.03 MB        0.09
        20,000 photos of 30 kB      1.14    18.2     7.9     1.14   0.5 MB         0.07

    Small records lie in the leaves themselves, so that all of the file is read. A process that
    opens the file of a million records would take five times as long with "open". Hence "first" is
    the default: once for a dataset, however many workers it has.

What it does not show
    What a process pays that reads the pages later: they are in the page cache then.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, check

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Size:
    """By what the numbers of records are divided."""

    divisor: int


def recipe(size: Size, shape: tuple[int, int]) -> Reading:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "a.lmdb"
        write(path, shape[0] // size.divisor, shape[1])

        def first() -> None:
            with (
                lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env,
                env.begin(buffers=True) as transaction,
            ):
                check(transaction.get(bytes(8)) is not None, "the first record is missing")

        with Meter() as meter:
            opened_ms = milliseconds(first, 5)
    return Reading.of(meter, opened_ms, 5)


def verify(size: Size, shape: tuple[int, int]) -> Reading:
    from penstock.stores.lmdb.pages import check_pages
    from penstock.stores.lmdb.store import LMDBStore

    num_records = shape[0] // size.divisor
    with tempfile.TemporaryDirectory(dir=".") as folder:  # /tmp may lie in memory
        path = Path(folder) / "a.lmdb"
        write(path, num_records, shape[1])

        def index() -> None:
            with LMDBStore(path, verify="never") as store:
                check(len(store) == num_records, "records are missing")

        with Meter() as meter:
            warm_ms = milliseconds(partial(check_pages, path), 5)
        cold_ms = milliseconds(partial(check_pages, path), 3, before=partial(drop, path))
        more = {"cold ms": cold_ms, "index ms": milliseconds(index, 3)}
        with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env:
            pages = env.stat()
            env.copy(f"{folder}/b.lmdb")
        more["bounds ms"] = milliseconds(partial(check_pages, Path(folder, "b.lmdb")), 3)
        more["tree MB"] = (pages["branch_pages"] + pages["leaf_pages"]) * pages["psize"] / 1e6
    return Reading.of(meter, warm_ms, 5, more)


def write(path: Path, num_records: int, record_bytes: int) -> None:
    from penstock.stores.lmdb.writer import LMDBWriter
    from penstock.stores.records import EncodedImage, encode_record

    data = np.random.default_rng(0).bytes(1 << 20)
    writer = LMDBWriter(path)
    for number in range(num_records):
        start = number * 7 % (len(data) - record_bytes)
        image = EncodedImage(data[start : start + record_bytes])
        writer.put_many([encode_record(f"{number:07}", (image, number % 10), number % 10)])
    writer.finish()
    writer.close()


def milliseconds(
    act: Callable[[], object], num: int, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median time of some runs, after one that is not counted."""
    act()
    times_ms = []
    for _ in range(num):
        before()
        start_s = time.perf_counter()
        act()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return statistics.median(times_ms)


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


# Records, and bytes of each.
_SHAPES = {
    "1,000,000 of 100 B": (1_000_000, 100),
    "100,000 of 1.9 kB": (100_000, 1900),
    "1,000 photos of 30 kB": (1000, 30_000),
    "20,000 photos of 30 kB": (20_000, 30_000),
}

BENCHMARK = Benchmark(
    file=__file__,
    unit="ms",
    better="lower",
    contenders={
        **{f"torch recipe, {name}": partial(recipe, shape=_SHAPES[name]) for name in _SHAPES},
        **{f"penstock, {name}": partial(verify, shape=_SHAPES[name]) for name in _SHAPES},
    },
    full=Size(divisor=1),
    smoke=Size(divisor=100),
    targets=(Target("penstock, 1,000 photos of 30 kB", at_most=10),),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
