# SPDX-License-Identifier: Apache-2.0
"""Which of the batches that are kept a failure, or a change of workers, belongs to.

Both name an epoch and a step, and a loader may go through an epoch of one number twice. So the last
of them are matched with the last of the batches, backwards.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.insight.recording import FailedSample
    from penstock.insight.segments import Columns
    from penstock.insight.stats import Change

__all__ = ["batches_of_changes", "batches_of_failures"]


def batches_of_failures(columns: Columns, failures: Sequence[FailedSample]) -> list[int | None]:
    """Return the position of each failure's batch; None where it is not kept."""
    failed, batches = columns["failed"].tolist(), _batches_by_step(columns)
    found: list[int | None] = []
    for failure in reversed(failures):
        known = batches.get((failure.epoch, failure.step), [])
        while len(known) > 1 and failed[known[-1]] <= 0:
            known.pop()
        found.append(known[-1] if known else None)
        if known:
            failed[known[-1]] -= 1
    return found[::-1]


def batches_of_changes(columns: Columns, changes: Sequence[Change]) -> list[int | None]:
    """Return the position of the batch after which each change was made; None if not kept."""
    workers, batches = columns["num_workers"].tolist(), _batches_by_step(columns)
    found: list[int | None] = []
    end = len(columns)
    for change in reversed(changes):
        known = [n for n in batches.get((change.epoch, change.step), []) if n < end]
        count = change.num_workers
        followed = [n for n in known if workers[n] != count and workers[n + 1 : n + 2] == [count]]
        position = next(reversed(followed or known), None)
        end = end if position is None else position
        found.append(position)
    return found[::-1]


def _batches_by_step(columns: Columns) -> dict[tuple[int, int], list[int]]:
    batches = defaultdict(list)
    steps = zip(columns["epoch"].tolist(), columns["step"].tolist(), strict=True)
    for position, step in enumerate(steps):
        batches[step].append(position)
    return batches
