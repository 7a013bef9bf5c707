# SPDX-License-Identifier: Apache-2.0
"""Which epoch a loader is in, how much of it the user has been given, and how to go on from there.

The state of a seeded loader is three numbers (seed, epoch, batches given) and a fingerprint of what
they were counted with. Nothing of it grows with the dataset, and nothing needs a worker.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, cast

import numpy as np

from penstock.data.dataset import can_resume, follows_epochs, length_of
from penstock.data.names import fingerprint_of
from penstock.engine.plan import Epoch, Given, Progress, ShardPosition, unwrap_indices
from penstock.errors import StateError
from penstock.indices import SeededIndices
from penstock.randomness.keys import Purpose, checked_count, checked_epoch, seed_sequence
from penstock.sampling.samplers import differences, unchanged
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import GeneratorType

    from penstock.engine.backends import Backend
    from penstock.engine.stream import BatchStream
    from penstock.indices import Description, IndexSource

_FORMAT: Final = 1


def worker_base_seed(seed: int) -> int:
    """Return the seed that workers of a seeded loader begin with, worker w with this plus w."""
    words = seed_sequence(seed, Purpose.WORKERS).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def _foreseen(source: SeededIndices, number: int) -> Epoch | None:
    indices = source.foresee(number)
    return None if indices is None else Epoch(number, indices, is_announced=True)


def told_to_dataset(epoch: Epoch, source: IndexSource, loader: Any) -> Epoch:  # noqa: ANN401
    """Return an epoch whose order is told to a dataset that reads ahead of it.

    Such a dataset has `order_follower`: None, or a function that is called with the indices that
    are to come in this epoch and in the next. It returns None, or another, which is called with how
    many of them are used up, and asked for, and is kept until the loader begins another epoch.
    """
    dataset = loader.dataset
    if not hasattr(type(dataset), "order_follower") or not isinstance(source, SeededIndices):
        return epoch  # not what a wrapper's __getattr__ finds: indices are others there
    follow = dataset.order_follower
    if follow is None:
        return epoch
    now, later = (
        [unwrap_indices(batch) for batch in source.foresee(number) or ()]
        for number in (epoch.number, epoch.number + 1)
    )
    now = now[epoch.progress.given.num_steps :]
    # The last epoch's order holds until this one's is known: else what comes now is not kept.
    loader._followed = follow(np.hstack(now), np.hstack(later)) if now else None
    if loader._followed is None:
        return epoch
    num_under_way = loader.num_workers * (loader.prefetch_factor or 2)
    return replace(epoch, indices=_counted(epoch.indices, loader._followed, num_under_way))


def _counted(
    indices: Iterator[object], advance: Callable[[int, int], None], num_under_way: int
) -> Iterator[object]:
    """Yield batches of indices; tell how many samples are surely read, and how many asked for."""
    sizes: deque[int] = deque()
    num_used_up = num_asked = 0
    for batch in indices:
        sizes.append(np.size(unwrap_indices(batch)))
        num_asked += sizes[-1]
        yield batch
        if len(sizes) > num_under_way:
            num_used_up += sizes.popleft()
        advance(num_used_up, num_asked)


def _check_stream(dataset: object, progress: Progress) -> None:
    """Raise `StateError`, or warn, where a stream cannot begin at the place of a state."""
    shards = progress.given.shards.values()
    kind = type(dataset).__name__
    if any(shard.state is not None for shard in shards) and not can_resume(dataset):
        raise StateError(
            f"the state holds the place of a dataset that has load_state_dict(state), but {kind} "
            "has not: the classes differ"
        )
    warn_of_replay(dataset, progress.given)


def warn_of_replay(dataset: object, given: Given) -> None:
    """Warn where a stream has no state, so that its batches are to be read once more."""
    num_batches = sum(shard.num_batches for shard in given.shards.values() if shard.state is None)
    if num_batches:
        kind = type(dataset).__name__
        advice = (
            "It holds samples, which no state can."
            if follows_epochs(dataset)
            else "With these two methods, which return and take a position as JSON has it, iter() "
            "can begin there."
        )
        warn_user(
            f"{kind} has no state_dict() and load_state_dict(state), so the {num_batches} batches "
            f"that were given before are read once more and dropped. {advice}"
        )


class EpochIterator:
    """A loop's iterator over the batches of one epoch of a stream.

    It ends when the epoch does, also by the beginning of another. What interrupts it closes the
    stream; the state counts the batches that the loop has, wherever the interrupt came.
    """

    def __init__(self, stream: BatchStream) -> None:
        """Iterate the epoch that `stream` has begun last."""
        self._stream = stream
        self._batches: GeneratorType[Any, None, None] | None = None
        self.epoch: Epoch = stream.epoch

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    @property
    def __next__(self) -> Callable[[], Any]:
        """The generator's own `__next__`, which returns the next batch."""
        # A property, since no bytecode may run between the generator's `yield` and the loop: an
        # interrupt there would take a batch away that is counted. This runs before.
        batches = self._batches
        if batches is not None and batches.gi_suspended:  # who asks for another has the last one
            progress = self.epoch.progress
            progress.counted = progress.handed_out
        elif batches is None or batches.gi_frame is None:  # an error has ended it
            batches = cast("GeneratorType[Any, None, None]", self._stream.batches(self.epoch))
            self._batches = batches
            self.epoch.progress.batches = weakref.ref(batches)
        return batches.__next__

    @property
    def backend(self) -> Backend | None:
        """Who runs the tasks; None without workers."""
        return self._stream.backend

    def close(self) -> None:
        """Stop the workers now; the next epoch starts new ones."""
        self._stream.close()
        if self._batches is not None and self._batches.gi_suspended:
            self._batches.close()  # it holds the iterator of a dataset without workers

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled, or copied."""
        raise NotImplementedError(
            "an iterator over a loader cannot be pickled or copied: its workers are this "
            "process's. Pickle the loader; its state_dict() says where this iterator is"
        )


class Schedule:
    """Epochs of one loader: which comes next, and what was given of the last one begun."""

    def __init__(self, seed: int | None) -> None:
        """Begin before epoch 0, with the seed of the loader, if it has one."""
        self._seed = None if seed is None else checked_count("seed", seed)
        self._next_epoch = 0
        self._is_chosen = False  # whether the user has said so
        # The sampler's when an epoch began: another, or one more notification, is the user's.
        self._notified: tuple[int, int | None] | None = None
        self._resumed: Progress | None = None  # how much of `_next_epoch` was given already
        self._current: tuple[int, Progress] | None = None  # the epoch begun last
        self._description: Description | None = None  # of it; made when it is asked for
        self._running: list[tuple[weakref.ref[Any], Progress]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what runs: a loader is pickled as its arguments, not as a stream."""
        return {**self.__dict__, "_current": None, "_description": None, "_running": []}

    def next(self, source: IndexSource, *, is_followed: bool = False) -> Epoch:
        """Return the next epoch, or the rest of the one whose state was loaded.

        `is_followed` is whether the dataset is notified of the number in any case.
        """
        notified = source.notified_epoch()
        if notified is not None and not self._is_chosen:
            is_first = self._notified is None  # then epoch 0 without a notification is no choice
            if any(notified) if is_first else notified != self._notified:
                self.set_epoch(notified[0])  # as loops written for torch do: sampler.set_epoch(e)
        progress = self._resumed or Progress()
        number = self._next_epoch
        indices = source.begin(number, progress)
        is_announced = self._seed is not None or self._is_chosen or is_followed
        # Of other sources nothing can be foreseen; and those of torch's orders hold their loader.
        following = None
        if isinstance(source, SeededIndices):
            following = partial(_foreseen, source, number + 1)
        return Epoch(number, indices, progress, is_announced, following)

    def begin(self, epoch: Epoch, iterator: object, source: IndexSource | None = None) -> None:
        """Note that workers have begun an epoch, and by which iterator the user gets it."""
        self.forget(None)  # the dead ones
        self.forget(iterator)  # what it has left of another epoch
        self._running.append((weakref.ref(iterator), epoch.progress))
        if source is not None:
            self._current = epoch.number, epoch.progress
            self._next_epoch = epoch.number + 1
            self._notified = source.notified_epoch()
            self._is_chosen = False
            self._resumed = self._description = None

    def forget(self, iterator: object) -> None:
        """Take `iterator` for ended: it yields no more."""
        self._running = [(ref, given) for ref, given in self._running if ref() is not iterator]

    @property
    def _is_running(self) -> bool:
        return any(
            ref() is not None and not progress.is_over and not progress.is_closed
            for ref, progress in self._running
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch. The rest of an epoch to be resumed is kept if it is that one."""
        epoch = checked_epoch(epoch)
        if self._resumed is not None and epoch != self._next_epoch:
            warnings.warn(
                f"epoch {epoch} was chosen, which drops the state that was loaded: it was in epoch "
                f"{self._next_epoch}, with {self._resumed.given.num_steps} batches given. Begin "
                "the loop over epochs there: `for epoch in range(loader.epoch, num_epochs)`.",
                stacklevel=3,
            )
            self._resumed = None
        self._next_epoch = epoch
        self._is_chosen = True
        if not self._is_running:
            self._current = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way; between two, the next one."""
        return self._resume_point()[0]

    def _resume_point(self) -> tuple[int, Progress]:
        if self._current is not None and not self._current[1].is_over:
            return self._current
        return self._next_epoch, self._resumed or Progress()

    def state_dict(self, source: Callable[[], IndexSource], dataset: object) -> dict[str, Any]:
        """Return where the user is, as JSON has it; what `source` describes is kept meanwhile."""
        epoch, progress = self._resume_point()
        given = progress.given
        if self._description is None:
            self._description = source().describe()
        settings, samples_in = self._description
        state: dict[str, Any] = {
            "format": _FORMAT,
            "seed": self._seed,
            "epoch": epoch,
            "batches": given.num_steps,
            "samples": samples_in(epoch, given.num_steps),
        }
        draws = progress.draws
        if draws is None and self._seed is None:
            draws = source().draws()
        if draws is not None:
            state["draws"] = draws if isinstance(draws, dict) else draws.to_json()
        if given.num_asked:
            state["failed"] = [given.num_failed, given.num_asked]
        if given.ahead:
            state["ahead"] = [list(steps) for steps in given.ahead]
        if given.shards:
            state["turn"] = given.turn
            state["shares"] = {str(id_): shard.to_json() for id_, shard in given.shards.items()}
        state["fingerprint"] = {"length": length_of(dataset), **copy.deepcopy(settings)}
        if (contents := fingerprint_of(dataset)) is not None:
            state["contents"] = contents
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], source: IndexSource, dataset: object
    ) -> None:
        """Let the next iterator go on where `state` was saved, or raise `StateError`."""
        if self._is_running:
            raise StateError(
                "a state was loaded while an iterator of this loader is running (epoch "
                f"{self.epoch}): it would go on as before. Load the state before iter(loader), or "
                "once the epoch is over, or the iterator is deleted or closed"
            )
        number, progress, samples, seed, saved = _parsed(state)
        found = [] if seed == self._seed else differences(seed, self._seed, "seed")
        if not found:
            settings, samples_in = source.describe()
            now = {"length": length_of(dataset), **settings}
            found = differences(unchanged(saved), unchanged(now))
        if not found:
            source.adopt(saved, number, samples)
            found = differences(saved, now)  # which has the changes that were made just now
        if found:
            raise StateError(
                "this state was saved by a loader that orders its samples otherwise: "
                + "; ".join(found)
                + ". Make the loader as it was, or begin a new epoch without the state"
            )
        _check_counts(samples, number, progress.given, samples_in)
        _check_stream(dataset, progress)
        contents, here = state.get("contents"), fingerprint_of(dataset)
        if None not in (contents, here) and contents != here:
            warn_user(
                f"this state was saved with other data: the dataset's fingerprint was {contents}, "
                f"now it is {here}. The order of the indices goes on exactly; what they give may "
                "be other samples. (The same images in another kind of store, such as a folder "
                "that has been packed since, have another fingerprint as well.)",
            )
        self._next_epoch = number
        self._is_chosen = False
        # what was said before the state was loaded is no news
        self._notified = source.notified_epoch()
        self._resumed = progress
        self._current = self._description = None


def _check_counts(
    samples: int | None,
    epoch: int,
    given: Given,
    samples_in: Callable[[int | None, int], int | None],
) -> None:
    """Compare the counts of a state with each other, and with the batches that the epoch has."""
    # Another number of ranks may have had another last batch, or one more; the others are the same.

    def size_of_first(count: int) -> int:
        return samples_in(epoch, max(count, 0)) or 0

    def is_there(step: int) -> bool:
        return step < 0 or size_of_first(step) < size_of_first(step + 1)

    batches, found = given.num_steps, ""
    steps = [batches, *(step for steps in given.ahead for step in steps)]
    size = samples_in(epoch, batches)
    if size is not None:
        samples = size if samples is None else samples
        is_right = samples == size
        if batches and not is_there(batches):
            is_right = samples > size_of_first(batches - 1)
        if not is_right or not is_there(steps[-1] - 2):
            found = f"{steps[-1]} batches of epoch {epoch}, with {samples} samples in {batches}"
    if steps != sorted(set(steps)):
        found = f"batches {list(given.ahead)} beyond the first {batches}"
    num_made = sum(shard.num_batches for shard in given.shards.values())
    if given.shards and num_made < batches:
        found = f"{batches} batches, of which the workers made {num_made}"
    if found:
        raise StateError(
            f"this state contradicts itself: it counts {found}. It was changed since it was saved. "
            "Load another, or begin the epoch anew by set_epoch()"
        )


def _parsed(state: Any) -> tuple[int, Progress, int | None, int | None, dict[str, Any]]:  # noqa: ANN401
    """Return the epoch, what was given of it, its number of samples, seed and fingerprint."""
    if isinstance(state, dict) and "_penstock" in state:
        raise StateError("this is a state of a StatefulDataLoader: load it into one")
    try:
        if state["format"] != _FORMAT:
            raise ValueError(f"format {state['format']!r}, where {_FORMAT} is read")
        num_failed, num_asked = (
            checked_count("failed", number) for number in state.get("failed", (0, 0))
        )
        given = Given(
            checked_count("batches", state["batches"]),
            tuple(
                (checked_count("ahead", start), checked_count("ahead", stop))
                for start, stop in state.get("ahead", ())
            ),
            {int(id_): ShardPosition.from_json(s) for id_, s in state.get("shares", {}).items()},
            checked_count("turn", state.get("turn", 0)),
            num_asked,
            num_failed,
        )
        progress = Progress(given, draws=dict(state["draws"]) if "draws" in state else None)
        samples = state.get("samples")  # None where it is not known
        if samples is not None:
            samples = checked_count("samples", samples)
        epoch = checked_epoch(state["epoch"])
        return epoch, progress, samples, state["seed"], dict(state["fingerprint"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"this is not a state of a Penstock loader ({type(error).__name__}: {error}): "
            f"{repr(state)[:200]}. Give the dict that state_dict() returned (json.loads makes it "
            "of JSON)"
        ) from error
