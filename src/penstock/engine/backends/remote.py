# SPDX-License-Identifier: Apache-2.0
"""Outcomes that come from another process: where they were made, and exceptions revived here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.fault_log import Losses
from penstock.engine.messages import revive_exception
from penstock.engine.recover import BadSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.messages import BadReport, TaskFailed

__all__ = ["FailedTask", "Where", "revived"]


class Where(NamedTuple):
    """Who made a batch; put into words only if something went wrong."""

    worker_id: int
    pid: int
    epoch: int
    step: int

    def __str__(self) -> str:
        """Return "in worker 0 (pid 7), epoch 0, step 3"."""
        worker, epoch = f"worker {self.worker_id} (pid {self.pid})", f"epoch {self.epoch}"
        return f"in {worker}, {epoch}, step {self.step}"


class FailedTask:
    """An exception of the user's code."""

    __slots__ = ("_message", "_where", "pid", "shard")

    times = None

    def __init__(self, message: TaskFailed, where: Where) -> None:
        """Hold what a worker sent."""
        self._message = message
        self._where = where
        self.shard = message.shard
        self.pid = where.pid

    @property
    def losses(self) -> Losses:
        """The samples that were found bad before it."""
        return Losses(0, revived(self._message.bad, self._where))

    def result(self) -> object:
        """Raise it."""
        raise revive_exception(self._message.report, str(self._where))


def revived(reports: Sequence[BadReport], where: Where) -> list[BadSample]:
    """Return bad samples as the fault log takes them."""
    return [
        BadSample(
            bad.index,
            revive_exception(bad.report._replace(traceback=""), str(where)),
            bad.report.traceback,
            bad.replaced_by,
            bad.name,
            bad.partner_of,
        )
        for bad in reports
    ]
