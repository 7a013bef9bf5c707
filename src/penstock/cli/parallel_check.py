# SPDX-License-Identifier: Apache-2.0
"""Parallel check: reads many files or records in worker processes and lists the broken ones.

They go through Penstock's own loader. What a decoder raises is a result, and travels as one. A
file that ends the process that decodes it is a bad sample, which the loader skips: the worker is
replaced, the other files of its task are decoded again, and the rest goes on.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from penstock.cli.decoding import BrokenFile, count_pixels
from penstock.cli.reasons import reason_of
from penstock.cli.silence import silence_libraries
from penstock.faults import FaultPolicy
from penstock.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.errors import StoreUnreachable
    from penstock.faults import Failure

__all__ = ["CheckResult", "Findings", "Inspected", "check_files", "check_in_parallel"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of checking one file or record.

    Attributes:
        index: Which.
        reason: What is wrong with it; None where it is sound.
        num_images: Images in it that were decoded, and are whole.
        unreachable: Why nothing can be known, of this one or of any: it ends the check.
    """

    index: int
    reason: str | None = None
    num_images: int = 0
    unreachable: StoreUnreachable | None = None


# Files in a task: it costs the loader some 0.1 ms, decoding a photo some 5 ms.
_MAX_TASK_FILES: Final = 16
_TASKS_PER_WORKER: Final = 8  # at least, so that no worker is left with the last files alone
# A file that ends its worker does so 2 or 3 times. Where hundreds do, the decoder is broken. (The
# loader keeps the last 10,000 failures: more than there can be.)
_MAX_RESPAWNS: Final = 1000
# A decoder that takes longer than this over one task's files hangs, and is ended.
_LONGEST_TASK_S: Final = 300
_END_OF_WORKER: Final = re.compile(
    r"worker \d+ (was killed by \S+|was killed, as no batch came within|exited with code \d+"
    "|ended with an exit status that is unknown)"
)


@dataclass
class Findings(Generic[T]):
    """How far a check has come.

    Attributes:
        num_files: Files or records to check.
        num_checked: Of which are done, broken ones included.
        num_images: Images in them that were decoded, and are whole.
        broken: Those that are broken.
    """

    num_files: int
    num_checked: int = 0
    num_images: int = 0
    broken: list[T] = field(default_factory=list)


class Inspected(Protocol[T_co]):
    """What is looked at, as a dataset; a sample is a result, so that no pixels travel."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, index: int) -> CheckResult:
        """Return what is wrong with one; called in a worker, which it may end."""

    def broken(self, index: int, reason: str) -> T_co:
        """Return one that is broken, as findings list it."""


def check_files(
    paths: Sequence[str],
    num_workers: int,
    findings: Findings[BrokenFile],
    tell: Callable[[Findings[BrokenFile]], object] = lambda _: None,
    decode: Callable[[str], int] = count_pixels,
) -> None:
    """Decode all files in worker processes and write down what is found.

    Args:
        paths: The files.
        num_workers: As for `check_in_parallel`, like the two that follow.
        findings: Grows in place.
        tell: Called again and again.
        decode: Takes a path and returns the number of pixels; raises if it cannot. Called in a
            worker, which it may end.

    Raises:
        WorkerDied: more workers were lost than bad files can account for.
    """
    check_in_parallel(_FilesToCheck(paths, decode), num_workers, findings, tell)


def check_in_parallel(
    inspected: Inspected[T],
    num_workers: int,
    findings: Findings[T],
    tell: Callable[[Findings[T]], object],
) -> None:
    """Read everything in worker processes and write down what is found.

    Args:
        inspected: What is looked at.
        num_workers: Worker processes, at least 1.
        findings: Grows in place, so that the caller has it whatever ends the check.
        tell: Called with `findings` each time that more is known.

    Raises:
        StoreUnreachable: a server went away.
        WorkerDied: more workers were lost than bad files can account for.
    """
    loader = _loader(inspected, num_workers)
    with warnings.catch_warnings():
        # At the end the loader warns of the files left out; here they are in the findings.
        warnings.filterwarnings("ignore", "epoch 0: .* bad samples? left out", UserWarning)
        try:
            for results in loader:
                for result in results:
                    _note(result, inspected, findings)
                tell(findings)
        finally:
            findings.num_checked += len(loader.failures)
            findings.broken += [inspected.broken(f.index, _end(f)) for f in loader.failures]


def _note(result: CheckResult, inspected: Inspected[T], findings: Findings[T]) -> None:
    if result.unreachable is not None:
        raise result.unreachable
    findings.num_checked += 1
    findings.num_images += result.num_images
    if result.reason is not None:
        findings.broken.append(inspected.broken(result.index, result.reason))


def _end(failure: Failure) -> str:
    """Return how a file ended the process that decoded it: only then it is left to the loader."""
    end = _END_OF_WORKER.search(str(failure.error))
    if end is None:
        return reason_of(failure.error)
    if end[1].startswith("was killed, as"):
        return f"its decoding did not end within {_LONGEST_TASK_S} seconds"
    return f"the process that decodes it {end[1]}"


def _loader(inspected: Inspected[T], num_workers: int) -> Loader[CheckResult]:
    num_workers = min(num_workers, len(inspected))
    num_tasks = num_workers * _TASKS_PER_WORKER
    return Loader(
        inspected,
        batch_size=min(_MAX_TASK_FILES, max(1, len(inspected) // num_tasks)),
        num_workers=num_workers,
        timeout=_LONGEST_TASK_S,
        collate_fn=_as_they_are,
        worker_init_fn=_silence_worker,
        on_error=FaultPolicy("skip", max_failures=None, max_respawns=_MAX_RESPAWNS),
    )


def _as_they_are(results: list[CheckResult]) -> list[CheckResult]:
    return results


class _FilesToCheck:
    """Files, to be decoded."""

    def __init__(self, paths: Sequence[str], decode: Callable[[str], int]) -> None:
        self._paths = paths
        self._decode = decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> CheckResult:
        try:
            self._decode(self._paths[index])
        except Exception as error:  # over damaged data Pillow raises nearly anything
            return CheckResult(index, reason_of(error))
        return CheckResult(index, num_images=1)

    def broken(self, index: int, reason: str) -> BrokenFile:
        return BrokenFile(Path(self._paths[index]), reason)

    def describe(self, index: int) -> str:
        """Return the file's path."""
        return self._paths[index]


def _silence_worker(worker_id: int) -> None:
    silence_libraries()  # what is wrong with a file is said once, by the report
