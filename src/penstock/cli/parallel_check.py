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
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.decoding import Broken, count_pixels
from penstock.cli.reasons import reason_of
from penstock.cli.silence import silence_libraries
from penstock.faults import FaultPolicy
from penstock.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.errors import StoreUnreachable
    from penstock.faults import Failure

__all__ = ["CheckResult", "FilesToCheck", "Findings", "check_in_parallel"]

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


@dataclass
class Findings:
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
    broken: list[Broken] = field(default_factory=list)


def check_in_parallel(
    inspected: Any,  # noqa: ANN401
    num_workers: int,
    findings: Findings,
    tell: Callable[[Findings], object],
) -> None:
    """Read everything in worker processes and write down what is found.

    Args:
        inspected: What is looked at, as a dataset: its samples are `CheckResult`, so that no pixels
            travel, and its method `describe` names them. A sample may end the worker.
        num_workers: Worker processes, at least 1.
        findings: Grows in place, so that the caller has it whatever ends the check.
        tell: Called with `findings` each time that more is known.

    Raises:
        StoreUnreachable: a server went away.
        WorkerDied: more workers were lost than bad files can account for.
    """
    num_workers = min(num_workers, len(inspected))
    num_tasks = num_workers * _TASKS_PER_WORKER
    loader: Loader[Any] = Loader(
        inspected,
        batch_size=min(_MAX_TASK_FILES, max(1, len(inspected) // num_tasks)),
        num_workers=num_workers,
        timeout=_LONGEST_TASK_S,
        collate_fn=list,
        # What is wrong with a file is said once, by the report.
        worker_init_fn=_silence_worker,
        on_error=FaultPolicy("skip", max_failures=None, max_respawns=_MAX_RESPAWNS),
    )

    def note(index: int, reason: str) -> None:
        findings.broken.append(Broken(inspected.describe(index), reason, index))

    with warnings.catch_warnings():
        # At the end the loader warns of the files left out; here they are in the findings.
        warnings.filterwarnings("ignore", "epoch 0: .* bad samples? left out", UserWarning)
        try:
            for results in loader:
                for result in results:
                    if result.unreachable is not None:
                        raise result.unreachable
                    findings.num_checked += 1
                    findings.num_images += result.num_images
                    if result.reason is not None:
                        note(result.index, result.reason)
                tell(findings)
        finally:
            for failure in loader.failures:
                findings.num_checked += 1
                note(failure.index, _end(failure))


def _end(failure: Failure) -> str:
    """Return how a file ended the process that decoded it: only then it is left to the loader."""
    end = _END_OF_WORKER.search(str(failure.error))
    if end is None:
        return reason_of(failure.error)
    if end[1].startswith("was killed, as"):
        return f"its decoding did not end within {_LONGEST_TASK_S} seconds"
    return f"the process that decodes it {end[1]}"


class FilesToCheck:
    """Image files, to be decoded."""

    def __init__(
        self, paths: Sequence[str], decode: Callable[[str], object] = count_pixels
    ) -> None:
        """Take paths, and what raises if the file of one cannot be decoded."""
        self._paths = paths
        self._decode = decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> CheckResult:
        """Return what is wrong with a file."""
        try:
            self._decode(self._paths[index])
        except Exception as error:  # over damaged data Pillow raises nearly anything
            return CheckResult(index, reason_of(error))
        return CheckResult(index, num_images=1)

    def describe(self, index: int) -> str:
        """Return the file's path, without a "./" before it."""
        return str(Path(self._paths[index]))


def _silence_worker(worker_id: int) -> None:
    silence_libraries()
