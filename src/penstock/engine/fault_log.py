# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a loader's epochs, and whether it is too much."""

from __future__ import annotations

import collections
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.callers import users_level
from penstock.errors import TooManyFailures
from penstock.faults import Failure, FaultPolicy, describe_sample

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from penstock.engine.epoch import Epoch
    from penstock.engine.salvage import BadSample

__all__ = ["NO_LOSSES", "FaultLog", "Losses"]

_MOST_KEPT: Final = 10_000  # records; a night's run over a rotten disk is not to fill the memory
_FIRST: Final = 10


class Losses(NamedTuple):
    """What one step cost.

    Attributes:
        num_asked: Samples that were asked for.
        bad: Those that could not be made, and their substitutes that could not.
    """

    num_asked: int = 0
    bad: Sequence[BadSample] = ()


NO_LOSSES: Final = Losses()


class FaultLog:
    """The faults of one loader, over all its epochs.

    Concurrency:
        One thread.
    """

    def __init__(self, policy: FaultPolicy, dataset: Any) -> None:  # noqa: ANN401
        """Begin with none.

        Args:
            policy: How much is allowed.
            dataset: May name its samples (`describe`).
        """
        self.policy = policy
        self.killers: dict[Hashable, tuple[str, str]] = {}  # samples that end workers, and how
        self._dataset = dataset
        self._failures: collections.deque[Failure] = collections.deque(maxlen=_MOST_KEPT)
        self._first: list[Failure] = []  # of the epoch under way

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the records: a loader is pickled as a recipe."""
        return {**self.__dict__, "_failures": collections.deque(maxlen=_MOST_KEPT), "_first": []}

    @property
    def failures(self) -> list[Failure]:
        """The last 10,000 bad samples, in the order in which their batches were given."""
        return list(self._failures)

    def begin_epoch(self) -> None:
        """Count anew."""
        self._first = []

    def record(
        self, losses: Sequence[BadSample], epoch: Epoch, step: int, worker_id: int | None
    ) -> None:
        """Record the bad samples of a step, when it is given or known to have failed."""
        for bad in losses:
            failure = Failure(
                index=bad.index,
                name=describe_sample(self._dataset, bad.index),
                error=bad.error,
                traceback=sys.intern(bad.traceback),  # most bad samples fail in the same place
                worker_id=worker_id,
                epoch=epoch.number,
                step=step,
                replaced_by=bad.replaced_by,
            )
            self._failures.append(failure)
            if len(self._first) < _FIRST:
                self._first.append(failure)

    def spend(self, losses: Losses, epoch: Epoch) -> None:
        """Count what a step cost against the budget; to be called when it is given.

        Raises:
            TooManyFailures: it is more than the policy allows. Nothing is counted then.
        """
        progress = epoch.progress
        num_asked = progress.num_asked + losses.num_asked
        num_failed = progress.num_failed + len(losses.bad)
        if losses.bad and num_failed > self.policy.allowed_failures(num_asked):
            raise TooManyFailures(self._complaint(epoch.number, num_asked, num_failed))
        progress.num_asked = num_asked
        progress.num_failed = num_failed

    def _complaint(self, epoch: int, num_asked: int, num_failed: int) -> str:
        bound = self.policy.max_failures
        which = "The first of them" if num_failed > len(self._first) else "They are"
        return (
            f"{num_failed} of the {num_asked} samples asked for so far in epoch {epoch} could not "
            f"be made; max_failures={bound!r} allows "
            f"{int(self.policy.allowed_failures(num_asked))}. Repair or leave out the "
            "files (`penstock check DIR` finds all that cannot be decoded), or raise max_failures. "
            f"{which}:\n{self._listed()}"
        )

    def warn_of_losses(self, epoch: Epoch) -> None:
        """Say how many samples the epoch went without, if any."""
        num_failed = epoch.progress.num_failed
        if not num_failed:
            return
        what = "left out" if self.policy.on_error == "skip" else "replaced by others"
        samples = "sample" if num_failed == 1 else "samples"
        warnings.warn(
            f"epoch {epoch.number}: {num_failed} bad {samples} {what}. "
            f"loader.failures lists them with their errors. First:\n{self._listed()}",
            stacklevel=users_level(),
        )

    def _listed(self) -> str:
        return "\n".join(f"  {failure}" for failure in self._first) or "  (before the resume)"
