# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a loader's epochs, and whether it is too much."""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, Any, Final

from penstock.data.names import describe_sample
from penstock.engine.plan import sample_key
from penstock.errors import TooManyFailures
from penstock.lines import counted
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from penstock.engine.plan import Epoch, Given
    from penstock.faults import Failure, FaultPolicy

_MOST_KEPT: Final = 10_000  # records; a night's run over a rotten disk is not to fill the memory
_FIRST: Final = 10
_FEW: Final = 3

_log = logging.getLogger("penstock")


class FaultLog:
    """The faults of one loader, over all its epochs.

    Concurrency:
        One thread.
    """

    def __init__(self, policy: FaultPolicy, dataset: Any) -> None:  # noqa: ANN401
        """Begin with none."""
        self.policy = policy
        self.quarantined: dict[Hashable, tuple[str, str]] = {}  # samples that end workers, and how
        self._dataset = dataset
        self._has_warned_of_stop = False
        self._failures: collections.deque[Failure] = collections.deque(maxlen=_MOST_KEPT)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the records: a loader is pickled as its arguments."""
        return {**self.__dict__, "_failures": collections.deque(maxlen=_MOST_KEPT)}

    @property
    def failures(self) -> list[Failure]:
        """The last 10,000 bad samples, in the order in which their batches were given."""
        return list(self._failures)

    def record(
        self, found: Sequence[Failure], epoch: Epoch, step: int, worker_id: int | None
    ) -> int:
        """Record the bad samples of a step; return how many were not known yet in this epoch."""
        num_new = 0
        progress = epoch.progress
        for bad in found:
            key = sample_key(bad.index)
            if bad.index is not None and key in progress.known_bad:
                continue
            progress.known_bad.add(key)
            num_new += 1
            failure = dataclasses.replace(
                bad,
                name=bad.name or describe_sample(self._dataset, bad.index),
                traceback=sys.intern(bad.traceback),  # most bad samples fail in the same place
                worker_id=worker_id,
                epoch=epoch.number,
                step=step,
            )
            self._failures.append(failure)
            if len(progress.first_failures) < _FIRST:
                progress.first_failures.append(failure)
        return num_new

    def spend(self, given: Given, num_asked: int, num_failed: int, epoch: Epoch) -> Given:
        """Return `given` with what a step cost, which counts against the budget.

        Raises:
            TooManyFailures: it is more than the policy allows.
        """
        all_asked = given.num_asked + num_asked
        all_failed = given.num_failed + num_failed
        if num_failed and all_failed > (allowed := self.policy.allowed_failures(all_asked)):
            raise TooManyFailures(
                f"{all_failed} of the {all_asked} samples asked for so far in epoch {epoch.number} "
                f"could not be made; max_failures={self.policy.max_failures!r} allows "
                f"{int(allowed)}. Repair or leave out the files (`penstock check DIR` finds all "
                "that cannot be decoded), or raise max_failures. The first of them:\n"
                f"{_listed(epoch.progress.first_failures)}"
            )
        return given._replace(num_asked=all_asked, num_failed=all_failed)

    def note_respawn(self, reason: str, epoch: Epoch) -> None:
        """Say that a worker died and another takes its place: nothing else would tell."""
        epoch.progress.num_deaths += 1
        _log.warning("%s. Another takes its place.", reason)

    def warn_of_stop(self, error: StopIteration, epoch: Epoch) -> None:
        """Say once which sample ended an epoch, where it may."""
        if not self._has_warned_of_stop:
            self._has_warned_of_stop = True
            warn_user(
                f"epoch {epoch.number} ended before its last batch, as in torch: "
                f"{said_of_stop(error)}",
            )

    def warn_of_losses(self, epoch: Epoch) -> None:
        """Say how many samples the epoch went without, if any."""
        num_failed = epoch.progress.given.num_failed
        if not (num_failed and epoch.progress.known_bad):  # none since a resume, if any
            return
        what = "left out" if self.policy.on_error == "skip" else "replaced by others"
        first = epoch.progress.first_failures[:_FEW]
        warn_user(
            f"epoch {epoch.number}: {counted(num_failed, 'bad sample')} {what}. "
            f"loader.failures lists them with their errors. First:\n{_listed(first)}",
        )


def said_of_stop(error: StopIteration) -> str:
    """Return what to say of a map-style dataset whose sample raised StopIteration."""
    where = next(iter(getattr(error, "__notes__", ())), "while making a batch")
    return (
        f"StopIteration was raised {where}. It says that an iterator has no more, and no loop can "
        "tell it from the end of the epoch. Mostly a `next(...)` without a default raises it."
    )


def _listed(failures: Sequence[Failure]) -> str:
    return "\n".join(f"  {failure}" for failure in failures) or "  (before the resume)"
