# SPDX-License-Identifier: Apache-2.0
"""One epoch: what is to be made, from where on, and how much of it the user has been given."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from penstock.faults import Failure

__all__ = ["Epoch", "Progress", "Share"]


class Share(NamedTuple):
    """How far one worker is in its share of an iterable dataset.

    Attributes:
        num_batches: Batches it has made of it, or failed to.
        has_ended: Whether there is no more.
        state_at: After how many batches `state` was taken.
        state: What the dataset's `state_dict()` returned then, pickled. None if the dataset has no
            such method; in a message also if nothing was taken since the last one.
    """

    num_batches: int = 0
    has_ended: bool = False
    state_at: int = 0
    state: bytes | None = None

    def after(self, earlier: Share | None) -> Share:
        """Return this with the state that was told with an earlier batch, if it still holds."""
        if self.state is None and earlier is not None and earlier.state_at == self.state_at:
            return self._replace(state=earlier.state)
        return self

    def to_json(self) -> list[Any]:
        """Return the fields, with the state as the dataset gave it."""
        return [*self[:3], None if self.state is None else pickle.loads(self.state)]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Share:
        """Return the share whose `to_json` is given."""
        num_batches, has_ended, state_at, state = fields
        return cls(num_batches, has_ended, state_at, None if state is None else pickle.dumps(state))


@dataclass(slots=True)
class Progress:
    """What the user has been given of an epoch; counted when it is handed over, not before.

    A batch that could not be made does not count until a later one was given.

    Attributes:
        num_steps: Every step before this one was given.
        ahead: Steps after that which were given out of order.
        shares: Per worker of an iterable dataset, as of the last batch given.
        turn: The worker whose batch comes next, for an iterable dataset.
        is_over: Whether the user has been told that there is no more.
        is_closed: Whether nobody can be given any more, as the workers are gone.
        draws: What the order was drawn with, where no seed decides it: the loader's own.
        failed: Step, worker and share of batches that could not be made, since the last one given.
        num_asked: Samples that were asked for, in the batches given.
        num_failed: Those of them, and of their substitutes, that could not be made.
        known_bad: Keys of them, since the epoch was begun or resumed.
        first_failures: The first of them.
        deaths: How workers ended that were replaced.
    """

    num_steps: int = 0
    ahead: set[int] = field(default_factory=set)
    shares: dict[int, Share] = field(default_factory=dict)
    turn: int = 0
    is_over: bool = False
    is_closed: bool = False
    draws: Any = None
    failed: list[tuple[int, int, Share | None]] = field(default_factory=list)
    num_asked: int = 0
    num_failed: int = 0
    known_bad: set[Hashable] = field(default_factory=set)
    first_failures: list[Failure] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    def give(self, step: int, *, in_order: bool) -> None:
        """Count a batch of a map-style dataset, and those before it that could not be made."""
        if in_order:
            self.num_steps = step + 1
            return
        self.ahead.add(step)
        self.ahead.update(failed for failed, _, _ in self.failed)
        self.failed.clear()
        while self.num_steps in self.ahead:
            self.ahead.remove(self.num_steps)
            self.num_steps += 1

    def give_share(self, worker_id: int, share: Share, num_workers: int) -> None:
        """Count a batch of an iterable dataset, and those before it that could not be made."""
        self.num_steps += 1
        for _, failed_id, failed in self.failed:
            if failed is not None:
                self.shares[failed_id] = failed.after(self.shares.get(failed_id))
        self.failed.clear()
        self.shares[worker_id] = share.after(self.shares.get(worker_id))
        self.turn = (worker_id + 1) % num_workers

    def fail(self, step: int, worker_id: int, share: Share | None) -> None:
        """Note a batch that could not be made: it counts once a later one is given."""
        self.failed.append((step, worker_id, share))


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's work.

    Attributes:
        number: Which epoch it is to the user.
        indices: Indices of one step after the other from `progress.num_steps` on, each a 1-D int64
            array, or whatever the user's sampler yields (arrays as `AsGiven`); all as `Placed` if
            the recipe has a seed. For an iterable dataset only their numbers count.
        progress: What was given before this iterator, then what this iterator gives.
        is_announced: Whether the dataset is told the number, if it has a method `set_epoch`.
    """

    number: int
    indices: Iterator[object]
    progress: Progress = field(default_factory=Progress)
    is_announced: bool = False
