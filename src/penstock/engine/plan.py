# SPDX-License-Identifier: Apache-2.0
"""The plan of a stream, decided once, and its epochs, each with its progress.

The modules that use it never see a loader's twenty arguments.

Counted: the batches that the loop has for certain. Handed out: these, and the one that is on its
way to the loop, or was last. Given: whichever of the two holds at the moment of the question.
`Epoch.tasks()` yields pairs (step, indices); a `Task` is the message that brings one to a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.backends import BackendTraits, traits_of
from penstock.engine.states import packed_pair, pair_of
from penstock.faults import RAISES, FaultPolicy
from penstock.randomness.keys import checked_count, checked_flag

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from multiprocessing.context import BaseContext
    from types import GeneratorType

    from penstock.faults import Failure
    from penstock.transport.page_lock import PageLock


class UserArray(NamedTuple):
    """An array that the user's own sampler yielded: the dataset gets it as it is.

    Arrays of our samplers are int64, cross to workers as bare bytes, and become Python integers.
    """

    indices: Any


def mark_user_array(indices: object) -> object:
    """Return what a sampler that is not ours yielded, marked if it is an array."""
    return UserArray(indices) if isinstance(indices, np.ndarray) else indices


class BatchIndices(NamedTuple):
    """Indices of a seeded epoch, and where they stand in its global order.

    Attributes:
        indices: As they are drawn otherwise.
        position: Place of the first, counted over all ranks.
        stride: From each to the next.
    """

    indices: object
    position: int
    stride: int


class RetryHints(NamedTuple):
    """How a task is to be done after workers have died over it, or over one of its samples.

    Attributes:
        alone: Whether each sample is first to be read, collated and packed by itself.
        quarantined: Keys of samples that end workers, each with how it did, and what else is known.
    """

    alone: bool = False
    quarantined: tuple[tuple[Hashable, str, str], ...] = ()


def unwrap_indices(indices: Any) -> Any:  # noqa: ANN401 - the sampler decides
    """Return what the sampler drew, without our marks."""
    if isinstance(indices, BatchIndices):
        indices = indices.indices
    return indices.indices if isinstance(indices, UserArray) else indices


def dataset_keys(indices: Any) -> Any:  # noqa: ANN401 - the sampler decides
    """Return indices as datasets get them: arrays of our samplers as Python integers."""
    if isinstance(indices, BatchIndices):
        indices = indices.indices
    return indices.tolist() if isinstance(indices, np.ndarray) else unwrap_indices(indices)


def sample_key(index: Any) -> Hashable:  # noqa: ANN401 - the sampler decides
    """Return what a sample is known by: its index, or a text for one that cannot be hashed."""
    if isinstance(index, np.integer):
        return int(index)
    try:
        hash(index)
    except TypeError:
        return repr(index)
    key: Hashable = index
    return key


@dataclass(frozen=True, slots=True)
class Framework:
    """A tensor library, by name, so that a worker whose data does not use it never imports it.

    Attributes:
        root: Its top-level module. Once a worker has imported that, `adapter` is imported too.
        adapter: Our module for it, with `prepare_worker(info)`, called once in each worker, and
            with None as it ends, `collator(empty)`, which returns the default collate (see
            `penstock.collate.Collator`), and `tensor_of(array)`.
    """

    root: str
    adapter: str


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a task becomes a batch: all that a worker has to know.

    Attributes:
        dataset: Map-style or iterable.
        is_iterable: Which of the two.
        is_batched: Whether a task makes a batch of samples, or one sample by itself.
        collate_fn: Samples -> batch (or sample -> sample where not `is_batched`); None is the
            default one.
        drop_last: Whether an iterable's last, shorter batch is left out.
        worker_init_fn: Called with the worker's id before its first task.
        framework: Whose tensors the default collate makes; None makes numpy arrays.
        seed: Every sample's random numbers are decided by it, the epoch, and the sample's place;
            None leaves the generators as the worker was seeded.
        global_rng: Whether the seed also decides what the global generators give.
        batch_size: Samples per batch of an iterable; None where not `is_batched`.
        rank: Which of the ranks that share an iterable this one is.
        world_size: Number of those ranks.
        faults: What becomes of samples that cannot be made, and of workers that die.
        covers_dataset: Whether the sampler goes over the whole dataset, so that any sample of it
            may take the place of a bad one.
    """

    dataset: Any
    is_iterable: bool
    is_batched: bool
    collate_fn: Callable[[Any], Any] | None = None
    drop_last: bool = False
    worker_init_fn: Callable[[int], object] | None = None
    framework: Framework | None = None
    seed: int | None = None
    global_rng: bool = True
    batch_size: int | None = None
    rank: int = 0
    world_size: int = 1
    faults: FaultPolicy = RAISES
    covers_dataset: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One iterator's work, epoch after epoch.

    Attributes:
        spec: How a task becomes a batch.
        base_seed: Worker w seeds its global generators with `base_seed + w`.
        num_workers: 0 works in the caller's process.
        backend: Who the workers are: a name in `BACKENDS`.
        max_workers: How many there may come to be while the epoch runs; 0: as many as there are.
        prefetch_factor: Batches under way per worker.
        in_order: Whether batches leave in the order of their steps.
        timeout_s: Longest wait for a batch, in seconds; 0 waits for ever.
        keep_workers: Whether workers live on after an epoch.
        context: Start method of the workers; None is Python's default.
        page_lock: How the memory of batches is locked for a device, in the main process, but
            not that of worker threads; None locks nothing. Like all of the plan but the spec, it
            is sent to no worker.
        backend_options: Of the backend alone, in a class of its own; None if it has none.
        steps_per_state: After how many steps to keep the states of the workers' datasets, map-style
            ones too, and of their iterators; 0: at the beginning alone; None keeps none.
    """

    spec: WorkerSpec
    base_seed: int
    num_workers: int = 0
    backend: str = "process"
    max_workers: int = 0
    prefetch_factor: int = 2
    in_order: bool = True
    timeout_s: float = 0.0
    keep_workers: bool = False
    context: BaseContext | None = None
    page_lock: PageLock | None = None
    backend_options: Any = None
    steps_per_state: int | None = None

    @property
    def traits(self) -> BackendTraits:
        """Of the backend."""
        return traits_of(self.backend)


class ShardPosition(NamedTuple):
    """How far one worker is in its shard of an iterable dataset; of a map-style one, its state.

    Attributes:
        num_batches: Batches it has made of it, or failed to.
        has_ended: Whether there is no more.
        state_at: After how many batches `state` was taken.
        state: States of the dataset and of its iterator then (`penstock.engine.states`); of the
            dataset alone, unless the plan keeps states. None if it has none; in a message also if
            nothing was taken since the last one.
    """

    num_batches: int = 0
    has_ended: bool = False
    state_at: int = 0
    state: bytes | None = None

    def after(self, earlier: ShardPosition | None) -> ShardPosition:
        """Return this with the state that came with an earlier batch, if it still holds."""
        if self.state is None and earlier is not None and earlier.state_at == self.state_at:
            return self._replace(state=earlier.state)
        return self

    def to_json(self) -> list[Any]:
        """Return the fields, with the state as the dataset gave it."""
        return [*self[:3], pair_of(self.state)[0]]

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
            packed_pair(state),
        )


class Given(NamedTuple):
    """The batches of an epoch that a loop has been given.

    Immutable: what an interrupt may cut short makes a new one, and one assignment puts it in place.

    Attributes:
        num_steps: Every step before this one was given.
        ahead: Steps after that which were given out of order, as ascending ranges (start, stop).
        shards: Positions of workers, as of the last batch given.
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

    def with_shards(self, shards: Iterable[tuple[int, ShardPosition]]) -> Given:
        """Return this with newer positions of workers."""
        now = dict(self.shards)
        for worker_id, shard in shards:
            now[worker_id] = shard.after(now.get(worker_id))
        return self._replace(shards=now)


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
        num_deaths: Number of workers that ended and were replaced.
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
    num_deaths: int = 0

    @property
    def given(self) -> Given:
        """What the loop has. Any thread may ask: only the thread that iterates writes."""
        handed_out = self.handed_out  # read before: the generator may go on at any moment
        batches = None if self.batches is None else self.batches()
        return handed_out if batches is not None and batches.gi_suspended else self.counted


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
            setting it on the sampler; None if its order is not known yet.
    """

    number: int
    indices: Iterator[object]
    progress: Progress = field(default_factory=Progress)
    is_announced: bool = False
    following: Callable[[], Epoch | None] | None = None

    def tasks(self) -> Iterator[tuple[int, object]]:
        """Return the steps that were not given yet, each with its indices.

        An error of the sampler does not end the iterator: the sampler may go on.
        """
        given = self.progress.given
        skipped = {step for start, stop in given.ahead for step in range(start, stop)}
        tasks = enumerate(self.indices, given.num_steps)
        return filter(lambda task: task[0] not in skipped, tasks) if skipped else tasks
