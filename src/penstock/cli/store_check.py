# SPDX-License-Identifier: Apache-2.0
"""Store check: reads every record in worker processes and lists those not as packed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.decoding import Broken
from penstock.cli.parallel_check import CheckResult, check_in_parallel
from penstock.cli.reasons import reason_of, short_reason
from penstock.cli.silence import silence_libraries
from penstock.errors import StoreError, StoreUnreachable
from penstock.images.decode import check_image
from penstock.stores.pack_source import images_in
from penstock.stores.records import decode_record
from penstock.system_limits import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cli.parallel_check import Findings
    from penstock.stores.records import Record
    from penstock.stores.store import Store

__all__ = ["check_opening", "check_store"]

_TRUNCATED: Final = "Premature end of JPEG file"  # libjpeg's word for it


def check_opening(store: Store) -> None:
    """Raise StoreError if opening a store and reading its index kills the process.

    Another process does it. An LMDB file is mapped into memory: where a disk fails, or the
    file becomes shorter meanwhile, the system ends the process by SIGBUS.
    """
    process = multiprocessing.get_context("fork").Process(target=_open, args=(store,))
    process.start()
    process.join()
    if process.exitcode is not None and process.exitcode < 0:
        raise StoreError(
            f"{store.address} cannot be opened: the process that read its index was killed by "
            f"{signal_name(-process.exitcode)}. Is its disk failing, or was the file written to "
            "meanwhile? Restore it from a copy, or pack it anew."
        )


def _open(store: Store) -> None:
    silence_libraries()  # what can be said is said by the process that opens it next
    len(store)
    _wrong_counts(store)


def check_store(
    store: Store,
    num_workers: int,
    findings: Findings,
    tell: Callable[[Findings], object],
) -> None:
    """Compare every record with its checksum and the index, and decode its images.

    Args:
        store: The store, whose checksums are compared when records are read.
        num_workers: Worker processes, at least 1.
        findings: Grows in place, so that the caller has it whatever ends the check.
        tell: Called with `findings` each time that more is known.

    Raises:
        StoreError: the store cannot be opened, or its index is damaged.
        StoreUnreachable: its server went away.
        WorkerDied: more workers were lost than bad records can account for.
    """
    records = _Records(store)
    wrong = _wrong_counts(store)
    if wrong is not None:
        findings.broken.append(Broken(store.address, wrong))
    store.close()  # workers that are forked inherit no connection
    if len(records):
        check_in_parallel(records, num_workers, findings, tell)


class _Records:
    """Records, to be looked at."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = store.index

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> CheckResult:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[CheckResult]:
        """Read many at once; one by one if something is wrong with one of them."""
        try:
            with self._store.borrow(indices) as records:
                return [self._result(i, r) for i, r in zip(indices, records, strict=True)]
        except StoreUnreachable as error:
            return [CheckResult(index, unreachable=error) for index in indices]
        except Exception as error:
            if len(indices) == 1:
                key = self._index.keys[indices[0]]
                reason = short_reason(error, indices[0], key, self._store.address)
                return [CheckResult(indices[0], reason)]
        return [self.__getitem__(index) for index in indices]

    def _result(self, index: int, record: Record) -> CheckResult:
        key, label = self._index.keys[index], self._index.label_of(index)
        if record.key != key:
            return CheckResult(index, f"the record at its place is called {record.key!r}")
        said = record.label
        if isinstance(label, tuple) and not isinstance(said, tuple):
            said = () if said is None else (said,)  # in an index all have several if one has
        if said != label:
            return CheckResult(index, f"its label is {record.label}, by the index it is {label}")
        num_images = 0
        for image in images_in(record.sample):
            try:
                check_image(image.data)
            except Exception as error:  # over damaged data Pillow raises nearly anything
                reason = reason_of(error)
                is_cut = reason == _TRUNCATED
                return CheckResult(index, f"truncated: {reason}" if is_cut else reason, num_images)
            num_images += 1
        return CheckResult(index, None, num_images)

    def describe(self, index: int) -> str:
        """Return the record's key."""
        return self._index.keys[index]


def _wrong_counts(store: Store) -> str | None:
    """Return how the numbers of records contradict each other, where a store keeps several."""
    kind, _, place = store.address.partition(":")
    path = Path(place)
    if kind != "lmdb":
        return None  # each record of the index is looked for, which is all that can be done
    is_sharded = path.is_dir() and not (path / "data.mdb").exists()
    counts = [_counts(file) for file in (sorted(path.glob("*.lmdb")) if is_sharded else [path])]
    stored, stated = (sum(numbers) for numbers in zip(*counts, strict=True))
    if stored == stated == len(store):
        return None
    return (
        f"the index has {len(store):,} records, the summary says {stated:,}, and {stored:,} are "
        "there"
    )


def _counts(file: Path) -> tuple[int, int]:
    """Return the number of records in an LMDB file, and the number that its summary states."""
    from penstock.stores.lmdb.environments import Environment
    from penstock.stores.lmdb.store import INDEX_KEY, PACK_KEY, SUMMARY_KEY

    environment = Environment(file, verify_tree=False)  # it was when the store was opened
    try:
        with environment.reading() as transaction:
            of_ours = sum(
                transaction.get(k) is not None for k in (INDEX_KEY, SUMMARY_KEY, PACK_KEY)
            )
            summary = decode_record(transaction.get(SUMMARY_KEY), f"the summary of {file}").sample
            return transaction.stat()["entries"] - of_ours, int(summary["count"])
    finally:
        environment.close()
