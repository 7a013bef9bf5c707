# SPDX-License-Identifier: Apache-2.0
"""One epoch: what is to be made, from where on, and how much of it the loop has been given."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.randomness.keys import checked_count, checked_flag

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from types import GeneratorType

    from penstock.faults import Failure

__all__ = ["Epoch", "Given", "Progress", "ShardPosition"]


class ShardPosition(NamedTuple):
    """How far one worker is in its shard of an iterable dataset.

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

    def after(self, earlier: ShardPosition | None) -> ShardPosition:
        """Return this with the state that was told with an earlier batch, if it still holds."""
        if self.state is None and earlier is not None and earlier.state_at == self.state_at:
            return self._replace(state=earlier.state)
        return self

    def to_json(self) -> list[Any]:
        """Return the fields, with the state as the dataset gave it."""
        return [*self[:3], None if self.state is None else pickle.loads(self.state)]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> ShardPosition:
        """Return the shard whose `to_json` is given.

        Raises:
            TypeError: a field is of another type, or there are more or fewer of them.
            ValueError: a count is negative.
        """
        num_batches, has_ended, state_at, state = fields
        return cls(
            checked_count("num_batches", num_batches),
            checked_flag("has_ended", has_ended),
            checked_count("state_at", state_at),
            None if state is None else pickle.dumps(state),
        )


class Given(NamedTuple):
    """The batches of an epoch that a loop has been given.

    Immutable: what an interrupt may cut short makes a new one, and one assignment puts it in place.

    Attributes:
        num_steps: Every step before this one was given.
        ahead: Steps after that which were given out of order, as ascending ranges (start, stop).
        shards: Per worker of an iterable dataset, as of the last batch given.
        turn: The worker whose batch comes next, for an iterable dataset.
        num_asked: Samples that were asked for, in the batches given.
        num_failed: Those of them, and of their replacements, that could not be made.
    """

    num_steps: int = 0
    ahead: tuple[tuple[int, int], ...] = ()
    shards: Mapping[int, ShardPosition] = {}
    turn: int = 0
    num_asked: int = 0
    num_failed: int = 0

    def with_steps(self, steps: Iterable[int]) -> Given:
        """Return this with batches of a map-style dataset that came out of order."""
        ahead: list[tuple[int, int]] = []
        for start, stop in sorted([*self.ahead, *((step, step + 1) for step in steps)]):
            if ahead and ahead[-1][1] == start:
                start, _ = ahead.pop()
            ahead.append((start, stop))
        num_steps = ahead.pop(0)[1] if ahead[0][0] == self.num_steps else self.num_steps
        return self._replace(num_steps=num_steps, ahead=tuple(ahead))

    def with_shards(self, shards: Iterable[tuple[int, ShardPosition]], turn: int) -> Given:
        """Return this with one more batch of an iterable dataset.

        Args:
            shards: Workers and their shards: of batches that could not be made, then of this one.
            turn: The worker whose batch comes next.
        """
        now = dict(self.shards)
        for worker_id, shard in shards:
            now[worker_id] = shard.after(now.get(worker_id))
        return self._replace(num_steps=self.num_steps + 1, shards=now, turn=turn)


@dataclass(slots=True)
class Progress:
    """How far a loop is in an epoch.

    A batch counts when the loop has it, which is when the generator that yielded it is suspended.
    An interrupt before that moment ends the generator, and one after it finds the batch counted:
    no bytecode lies between. A batch that could not be made does not count until a later one was
    given.

    Attributes:
        counted: What the loop has for certain; `given` may know of one batch more.
        handed_out: The same with the batch that is being handed out, or was last.
        batches: Refers to the generator that yields the epoch's batches; None before there is one.
        is_over: Whether the loop was notified of the end.
        is_closed: Whether the loop can be given no more, as the workers are gone.
        draws: What the order was drawn with, where no seed decides it: the loader's own.
        failed: Step, worker and shard of batches that could not be made, since the last one given.
        known_bad: Keys of samples that could not be made, since the epoch was begun or resumed.
        first_failures: The first of them.
        deaths: How workers ended that were replaced.
    """

    counted: Given = field(default_factory=Given)
    handed_out: Given = field(default_factory=Given)
    batches: weakref.ref[GeneratorType[Any, None, None]] | None = None
    is_over: bool = False
    is_closed: bool = False
    draws: Any = None
    failed: list[tuple[int, int, ShardPosition | None]] = field(default_factory=list)
    known_bad: set[Hashable] = field(default_factory=set)
    first_failures: list[Failure] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    @property
    def given(self) -> Given:
        """What the loop has. Any thread may ask: only the thread that iterates writes."""
        handed_out = self.handed_out  # read before: the generator may go on at any moment
        batches = None if self.batches is None else self.batches()
        return handed_out if batches is not None and batches.gi_suspended else self.counted

    def fail(self, step: int, worker_id: int, shard: ShardPosition | None) -> None:
        """Note a batch that could not be made: it counts once a later one is given."""
        self.failed.append((step, worker_id, shard))


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's work.

    Attributes:
        number: Which epoch it is to the user.
        indices: Indices of one step after the other from `progress.given.num_steps` on, each a 1-D
            int64 array, or whatever the user's sampler yields (arrays as `UserArray`); all as
            `BatchIndices` if the spec has a seed. For an iterable dataset only their numbers count.
        progress: What was given before this iterator, then what this iterator gives.
        is_announced: Whether the dataset is notified of the number, if it has a method `set_epoch`.
        following: Returns the epoch that comes next unless the user chooses another, without
            notifying anybody of it; None if its order is not known yet.
    """

    number: int
    indices: Iterator[object]
    progress: Progress = field(default_factory=Progress)
    is_announced: bool = False
    following: Callable[[], Epoch | None] | None = None

    def tasks(self) -> Iterator[tuple[int, object]]:
        """Return the steps that were not given yet, each with its indices.

        Does not end with an error of the sampler, which may go on.
        """
        given = self.progress.given
        skipped = {step for start, stop in given.ahead for step in range(start, stop)}
        tasks = enumerate(self.indices, given.num_steps)
        return filter(lambda task: task[0] not in skipped, tasks) if skipped else tasks
