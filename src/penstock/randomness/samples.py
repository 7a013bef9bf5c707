# SPDX-License-Identifier: Apache-2.0
"""Every sample's own random numbers, decided by (seed, epoch, position)."""
#     key      = SeedSequence(seed, purpose "samples", epoch)          128 bits, once per epoch
#     counter  = (0, stream, position, attempt)                        4 x 64 bits, once per sample
#     numbers  = Philox4x64(key, counter), counting up in the lowest word
#
# Position is the sample's place in the epoch's global order, over all ranks. So the numbers do not
# depend on the process that makes the sample, nor on how often it is made. A stream has 2^64 blocks
# of numbers to itself. (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011:
# streams of a counter-based generator differ by key and counter, at no cost.)

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.optional import when_imported
from penstock.randomness.generators import GlobalGenerators, GlobalStates
from penstock.randomness.keys import Purpose, seed_sequence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

# Numbers of streams; a number, once given, never changes its meaning.
_RNG: Final = 0  # sample_rng() in a sample
_GLOBALS: Final = 1  # the global generators in a sample
_BATCH: Final = 2  # … where a whole batch is read at once
_COLLATE_RNG: Final = 3
_COLLATE: Final = 4
_ITERATOR_RNG: Final = 5
_ITERATOR: Final = 6


class _ThreadStreams(threading.local):
    streams: SampleStreams | None = None  # of the batch that this thread is making
    own: np.random.Generator | None = None  # of a worker thread, outside of seeded loading


_here = _ThreadStreams()
# Batches being made in this process: with the global generators, and by worker threads.
_active: set[_Active] = set()
_active_in_threads: set[_Active] = set()


def sample_rng(k: int | None = None) -> np.random.Generator:
    """Return the random generator of the sample being made.

    In a loader with `seed=`, it is decided by (seed, epoch, position of the sample in the epoch's
    global order): equal for any number of workers, ranks, or attempts. Every call in one sample
    returns the same object, which goes on drawing; it is used again for another sample later, so
    ask for it in each sample and keep it no longer. Nothing global is touched.

    Elsewhere (a loader without `seed=`, or `dataset[0]` typed by hand) it is a generator of this
    worker, seeded from the worker's seed; outside of workers one of the process, seeded by
    `seed_everything`, or else from the system.

    Args:
        k: Where a whole batch is made at once (`get_batch`, `__getitems__`): which of its samples,
            0 <= k < batch size. Draws for sample k by `sample_rng(k)` are those of `sample_rng()`
            in `__getitem__`. None, or 0, where samples are made one by one.

    Raises:
        RuntimeError: no `k` where a whole batch is made; or `k` in a thread other than the one that
            makes it.
        IndexError: `k` is not one of the batch's samples.

    Concurrency:
        Each thread sees the sample that it makes itself. A thread that helps to make one gets the
        generator handed over.

    Example:
        >>> from penstock import Loader
        >>> class Noise:
        ...     def __len__(self) -> int:
        ...         return 4
        ...
        ...     def __getitem__(self, index: int) -> float:
        ...         return index + sample_rng().random()
        >>> one, other = (list(Loader(Noise(), batch_size=size, seed=7)) for size in (2, 4))
        >>> bool((np.concatenate(one) == np.concatenate(other)).all())
        True
    """
    streams = _here.streams
    if streams is not None:
        return streams.rng(k)
    if _here.own is not None:
        return _here.own
    if k is not None and _may_be_helping():
        raise RuntimeError(
            f"sample_rng({k}) was called in another thread than the one that makes the batch, and "
            "cannot know which batch is meant: ask for the generators before handing work to "
            "threads, and give each thread its own"
        )
    return _fallback_rng()


def _may_be_helping() -> bool:
    """Whether this thread may have been started by one that is making a batch."""
    if _active:
        return True
    # Beside worker threads the main process's own thread does what it likes.
    return bool(_active_in_threads) and threading.current_thread() is not threading.main_thread()


@contextlib.contextmanager
def renumbered_samples(which: NDArray[np.integer[Any]]) -> Iterator[None]:
    """Let `sample_rng(k)` mean sample `which[k]` of the batch, in the block.

    For a `get_batch` that hands a part of its indices, or all in another order, to another
    dataset's `get_batch`.

    Args:
        which: Positions in the batch, shape (part,).

    Example:
        >>> with renumbered_samples(np.array([2, 0])):  # sample_rng(0) is that of sample 2
        ...     pass
    """
    streams = _here.streams
    if streams is None:
        yield
        return
    outer = streams._which
    streams._which = np.asarray(which) if outer is None else outer[which]
    try:
        yield
    finally:
        streams._which = outer


class SampleStreams:
    """The random streams of one epoch's samples, one sample (or batch) at a time.

    Use: `with streams.active():` around the making of a batch, and in it `begin_sample`,
    `begin_batch`, `begin_collate`, `begin_iterator`, each of which seeds the global generators and
    decides what `sample_rng` returns.

    Concurrency:
        One thread.
    """

    def __init__(self, seed: int, epoch: int, *, seeds_globals: bool = True) -> None:
        """Derive the key of an epoch."""
        # `seeds_globals` is whether to seed the global generators as well: not in a worker that is
        # a thread, as they belong to the whole process. `sample_rng` is the same either way.
        self.seeds_globals = seeds_globals
        key = seed_sequence(seed, Purpose.SAMPLES, epoch).generate_state(2, np.uint64)
        self._source = np.random.Philox(key=key)
        self._state: Any = self._source.state
        self._counter = self._state["state"]["counter"]
        self._globals = GlobalGenerators() if seeds_globals else None
        self._seeding_ns = 0
        if seeds_globals and "torch" not in sys.modules:
            when_imported("torch", _seed_torch)
        self._generators: list[np.random.Generator] = []
        self._stream = _RNG
        self._global_stream = _GLOBALS
        self._position = 0
        self._global_position = 0
        self._attempt = 0
        self._attempts: dict[int, int] = {}  # of samples of a batch, where it is not `_attempt`
        self._in_prologue = False
        self._stride = 0
        self._count = 0  # samples of a batch made at once; 0: one sample
        self._which: NDArray[np.integer[Any]] | None = None
        self._begun: set[int] = set()  # samples whose generator is in place

    def active(self, *, isolated: bool = False) -> contextlib.AbstractContextManager[None]:
        """Let `sample_rng` answer from here, in the block.

        `isolated` puts the global generators back afterwards: in the main process they are the
        user's.
        """
        return _Active(self, isolated=isolated)

    def begin_sample(self, position: int, attempt: int = 0) -> None:
        """Seed everything for the sample at a place of the epoch's global order.

        `attempt` is 0, unless it is made once more in order to draw anew.
        """
        self._begin(_RNG, _GLOBALS, position, attempt)

    def begin_batch(self, position: int, stride: int, count: int, attempt: int = 0) -> None:
        """Seed everything for samples that are read at once, `stride` places apart."""
        self._begin(_RNG, _BATCH, position, attempt)
        self._stride = stride
        self._count = count

    def begin_part(self, position: int, stride: int, places: Mapping[int, int]) -> None:
        """Seed everything for some of a batch's samples, or replacements of them, read at once.

        `places` are their numbers in the whole batch, each with its attempt: `sample_rng(k)` is
        that of the k-th of them. `position` is that of the whole batch's first sample.
        """
        self.begin_batch(position, stride, len(places))
        self._which = np.fromiter(places, np.int64, len(places))
        self._attempts = {number: attempt for number, attempt in places.items() if attempt}

    def begin_collate(self, position: int, attempt: int = 0) -> None:
        """Seed everything for the collate function of the batch whose first sample is there."""
        self._begin(_COLLATE_RNG, _COLLATE, position, attempt)

    def begin_iterator(self) -> None:
        """Seed everything for `__iter__` of an iterable: the same in all workers and ranks."""
        self._begin(_ITERATOR_RNG, _ITERATOR, 0, 0)

    def begin_first_sample(self, position: int) -> None:
        """Seed everything for the first sample of a worker's shard of an iterable."""
        # A generator function runs from its beginning to its first sample here, and may shuffle a
        # list of files on the way, which has to come out the same everywhere. So the global
        # generators are seeded alike in all workers and ranks, up to `end_prologue`; `sample_rng`
        # is the sample's own.
        self._place(_RNG, _ITERATOR, position, 0)
        self._global_position = 1
        self._seed_globals()
        self._in_prologue = True

    def end_prologue(self) -> None:
        """Seed everything for the first sample, if what comes before it is being done."""
        if self._in_prologue:
            self.begin_sample(self._position, self._attempt)

    def seed_torch(self) -> None:
        """Seed torch, imported while a sample is being made, as if it had been there before."""
        if self._globals is None:
            return
        self._seek(self._source, self._global_stream, self._global_position, self._attempt)
        self._globals.seed_torch(self._source)

    def _begin(self, stream: int, global_stream: int, position: int, attempt: int) -> None:
        self._place(stream, global_stream, position, attempt)
        self._seed_globals()

    def _place(self, stream: int, global_stream: int, position: int, attempt: int) -> None:
        self._stream = stream
        self._global_stream = global_stream
        self._position = self._global_position = position
        self._attempt = attempt
        self._in_prologue = False
        self._count = 0
        self._which = None
        self._attempts = {}
        self._begun.clear()

    def _seed_globals(self) -> None:
        if self._globals is None:
            return
        begun_ns = time.monotonic_ns()
        self._seek(self._source, self._global_stream, self._global_position, self._attempt)
        self._globals.seed(self._source)
        self._seeding_ns += time.monotonic_ns() - begun_ns

    def take_seeding_ns(self) -> int:
        """Return what seeding the global generators has taken since the last call."""
        took_ns, self._seeding_ns = self._seeding_ns, 0
        return took_ns

    def _seek(self, source: Any, stream: int, position: int, attempt: int) -> None:  # noqa: ANN401
        # Setting a state costs a tenth of making a generator.
        counter = self._counter
        counter[1] = stream
        counter[2] = position
        counter[3] = attempt
        source.state = self._state

    def rng(self, k: int | None) -> np.random.Generator:
        """Return the generator that `sample_rng(k)` gives."""
        if k is None and self._count == 0 and self._begun:  # the common case: asked again
            return self._generators[0]
        number = self._number(k)
        while number >= len(self._generators):
            self._generators.append(np.random.Generator(np.random.Philox(key=0)))
        generator = self._generators[number]
        if number not in self._begun:
            self._begun.add(number)
            position = self._position + number * self._stride if self._count else self._position
            attempt = self._attempts.get(number, self._attempt)
            self._seek(generator.bit_generator, self._stream, position, attempt)
        return generator

    def _number(self, k: int | None) -> int:
        if k is None and self._count:
            raise RuntimeError(
                f"sample_rng() does not know which of the {self._count} samples of this batch is "
                "meant, as they are read at once (get_batch or __getitems__): call sample_rng(k) "
                "with the sample's position in the batch"
            )
        k = 0 if k is None else int(k)
        count = max(self._count, 1) if self._which is None else len(self._which)
        if not 0 <= k < count:
            raise IndexError(f"sample_rng({k}): there are {count} samples, from 0 to {count - 1}")
        return k if self._which is None else int(self._which[k])


class _Active:
    """Not `contextlib.contextmanager`, which changes the exceptions that pass; some are frozen."""

    def __init__(self, streams: SampleStreams, *, isolated: bool) -> None:
        self._streams = streams
        self._isolated = isolated
        self._outer: SampleStreams | None = None
        self._states: GlobalStates | None = None

    def __enter__(self) -> None:
        self._states = GlobalStates.now() if self._isolated else None
        self._outer, _here.streams = _here.streams, self._streams
        # A set, as threads may come and go at the same moment: a count could lose one of them.
        (_active if self._streams.seeds_globals else _active_in_threads).add(self)

    def __exit__(self, *_: object) -> None:
        _here.streams = self._outer
        (_active if self._streams.seeds_globals else _active_in_threads).discard(self)
        if self._states is not None:
            self._states.restore()


@contextlib.contextmanager
def one_sample(k: int) -> Iterator[None]:
    """Seed everything for sample k of a batch that is read at once, in the block."""
    # For a reader of batches that has to read a sample by itself after all. Within one sample,
    # where a dataset reads others to make its own of, nothing happens: they all draw from the one
    # stream.
    streams = _here.streams
    if streams is None or not streams._count:
        yield
        return
    outer = dict(vars(streams))
    number = streams._number(k)
    attempt = streams._attempts.get(number, streams._attempt)
    streams.begin_sample(streams._position + number * streams._stride, attempt)
    try:
        yield
    finally:
        vars(streams).update(outer, _seeding_ns=streams._seeding_ns)
        streams._begun.clear()  # generators of the batch's other samples begin anew


def _seed_torch() -> None:
    if _here.streams is not None:
        _here.streams.seed_torch()


def end_prologue() -> None:
    """Say that an iterable dataset has done what is the same for all workers.

    What it draws from here on belongs to its first sample. `penstock.data.shard` calls it.
    """
    if _here.streams is not None:
        _here.streams.end_prologue()


def forget_streams() -> None:
    """Forget the batches that were being made when this process was forked off."""
    _here.streams = _here.own = None
    _active.clear()
    _active_in_threads.clear()


def seed_thread(sequence: np.random.SeedSequence | None) -> None:
    """Seed what `sample_rng` returns in this thread outside of seeded loading.

    None gives the thread up: it gets what the rest of the process gets.
    """
    _here.own = None if sequence is None else np.random.Generator(np.random.Philox(sequence))


_fallback: np.random.Generator | None = None


def _fallback_rng() -> np.random.Generator:
    global _fallback
    if _fallback is None:
        _fallback = np.random.Generator(np.random.Philox())
    return _fallback


def seed_fallback(sequence: np.random.SeedSequence) -> None:
    """Seed what `sample_rng` returns in this process outside of seeded loading."""
    global _fallback
    _fallback = np.random.Generator(np.random.Philox(sequence))


def fallback_state() -> Any:  # noqa: ANN401 - opaque
    """Return what `restore_fallback` takes."""
    return copy.deepcopy(_fallback)


def restore_fallback(state: Any) -> None:  # noqa: ANN401 - what fallback_state returned
    """Let the fallback go on as it would have when `fallback_state` was called."""
    global _fallback
    _fallback = state
