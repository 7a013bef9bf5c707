# SPDX-License-Identifier: Apache-2.0
"""One pass of `BalancedShuffle` over its stream.

    stream -> [ one reservoir per class ] -> class drawn by its share, sample of it -> out

One sample goes out for each that comes in, after the first `buffer_size` have come in. What comes
in when the buffer is full crowds a sample out of the largest reservoir, so a rare class keeps all
it has until it has as many as the others. A sample of the largest is let go of when it is given, so
only those that may come again are copied.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.data.labels.values import NotLabelsError
from penstock.errors import ConfigError
from penstock.faults import annotate
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.randomness.samples import end_prologue
from penstock.sampling.class_of_sample import class_of_sample
from penstock.sampling.reservoir import Reservoir
from penstock.sampling.shares import class_shares
from penstock.worker_info import shard_unasked

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from penstock.sampling.balanced_shuffle import BalancedShuffle

    Entry = tuple[int, int, Any]  # number of the class, place in the stream, sample

__all__ = ["ShuffleCounts", "ShufflePass", "Tally"]

# Shares are computed anew when this many more samples have come in: 1 %.
_REFRESH: Final = 1.01


@dataclass(frozen=True, slots=True)
class ShuffleCounts:
    """What became of the samples, by class, so far or in all.

    A class's samples came in, and each was given, dropped, or is still held: `read` is `given`
    without `repeated`, and `dropped`, and those held that were never given.

    Attributes:
        read: Samples that came in.
        given: Samples that went out, repeats among them.
        repeated: Of those, the ones that had gone out before.
        dropped: Samples that never went out: crowded out of the buffer, or left over in it.
    """

    read: dict[Any, int]
    given: dict[Any, int]
    repeated: dict[Any, int]
    dropped: dict[Any, int]


class Tally:
    """Counts by number of the class; names are the labels."""

    def __init__(self) -> None:
        """Begin with no class."""
        self.names: list[Any] = []
        self.read: list[int] = []
        self.given: list[int] = []
        self.repeated: list[int] = []
        self.dropped: list[int] = []

    def add_class(self, name: Hashable) -> None:
        """Begin to count a class."""
        self.names.append(name)
        for numbers in (self.read, self.given, self.repeated, self.dropped):
            numbers.append(0)

    def counts(self) -> ShuffleCounts:
        """Return the counts as they are, by name of the class."""
        each = (self.read, self.given, self.repeated, self.dropped)
        return ShuffleCounts(*(dict(zip(self.names, numbers, strict=True)) for numbers in each))


class ShufflePass:
    """One pass over a stream.

    An object and no generator: a stream that goes on after an exception does so through this.
    """

    def __init__(self, owner: BalancedShuffle, stream: Iterator[Any], tally: Tally) -> None:
        """Read `stream` as `owner` says, and count in `tally`."""
        self._stream = stream
        self._kind = type(owner.dataset).__name__
        self._get_label = owner.get_label
        self._transform = owner.transform
        self._size = owner.buffer_size
        self._shares = owner.alpha, owner.beta
        self._is_plain = owner.alpha == 0  # all classes in one reservoir: nothing is repeated
        self._tally = tally
        self._class_of: dict[Hashable, int] = {}
        self._pools: list[Reservoir[Entry]] = []
        self._lengths = np.zeros(0, np.int64)  # of the pools
        self._num_held = 0
        self._bounds = np.zeros(0)  # sums of the shares, up to and with each pool
        self._refresh_at = 0
        self._num_asked = self._num_read = self._num_given = 0
        self._has_ended = False
        self._broken_by: Exception | None = None
        # The first sample is drawn alike in all workers, so that a loader can still notice two that
        # read the same stream, by their first samples.
        self._first_rng = _generator(owner.seed, owner.epoch, 0)
        self._rng = _generator(owner.seed, owner.epoch, 1, *_own_share())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401
        while not self._has_ended and self._num_read - self._num_given < self._size:
            self._take_in()
        if self._num_given == self._num_read:
            self._finish()
            raise StopIteration
        return self._give()

    def held(self) -> Iterator[Any]:
        """Yield the samples of the buffer."""
        for pool in self._pools:
            for _, _, sample in pool:
                yield sample

    def _take_in(self) -> None:
        if self._broken_by is not None:
            raise RuntimeError(
                f"The stream of BalancedShuffle ({self._kind}) ended with an exception after "
                f"{self._num_asked} samples, and as a generator it cannot go on: see the cause."
            ) from self._broken_by
        try:
            sample = next(self._stream)
        except StopIteration:
            self._has_ended = True
            return
        except Exception as error:
            self._note(error)
            raise
        end_prologue()  # of a stream that is not dealt out by `shard`, which has done it
        self._num_asked += 1
        number = self._numbered(self._class_name(sample))
        self._num_read += 1
        self._tally.read[number] += 1
        self._put(0 if self._is_plain else number, (number, self._num_asked - 1, sample))

    def _note(self, error: Exception) -> None:
        annotate(
            error,
            f"BalancedShuffle was reading sample {self._num_asked} (counted from 0) of its stream, "
            f"{self._kind}, and had given {self._num_given}.",
        )
        if inspect.isgenerator(self._stream):
            self._broken_by = error

    def _class_name(self, sample: Any) -> Hashable:  # noqa: ANN401
        try:
            name: Hashable = _called(class_of_sample, sample, self._get_label)
        except NotLabelsError as error:
            raise ConfigError(
                f"Sample {self._num_asked - 1} (counted from 0) of the stream ({self._kind}) "
                f"{error}. BalancedShuffle needs one class for each sample: pass get_label=, a "
                "function that returns it, one number or name; where a sample has several, that of "
                "the rarest."
            ) from None
        return name

    def _numbered(self, name: Hashable) -> int:
        known = self._class_of.get(name)
        if known is not None:
            return known
        number = len(self._class_of)
        if number >= self._size and not self._is_plain:
            raise ConfigError(
                f"Sample {self._num_asked - 1} (counted from 0) of the stream ({self._kind}) is of "
                f"a new class, {name!r}, after {number} others, but buffer_size={self._size}: each "
                "class needs room for one sample, and for good shuffling for many. Raise "
                "buffer_size, or let get_label return coarser classes."
            )
        self._class_of[name] = number
        self._tally.add_class(name)
        self._refresh_at = 0
        if not self._is_plain or number == 0:
            self._pools.append(Reservoir())
            self._lengths = np.append(self._lengths, 0)
        return number

    def _put(self, pool: int, entry: Entry) -> None:
        self._pools[pool].add(entry)
        self._lengths[pool] += 1
        self._num_held += 1
        if self._num_held > self._size:
            self._make_room()

    def _make_room(self) -> None:
        largest = int(self._lengths.argmax())
        self._lengths[largest] -= 1
        self._num_held -= 1
        dropped = self._pools[largest].crowd_out(self._rng)
        if dropped is not None:
            self._tally.dropped[dropped[0]] += 1

    def _give(self) -> Any:  # noqa: ANN401
        rng = self._rng if self._num_given else self._first_rng
        pool = self._drawn_pool(rng)
        is_kept, is_repeat = self._is_kept(pool), False
        if is_kept:
            (number, place, sample), is_repeat = self._pools[pool].give(rng)
        else:
            number, place, sample = self._pools[pool].take(rng)
            self._lengths[pool] -= 1
            self._num_held -= 1
        self._num_given += 1
        self._tally.given[number] += 1
        self._tally.repeated[number] += is_repeat
        if is_kept:
            sample = self._copied(sample, number, place)
        return sample if self._transform is None else _called(self._transform, sample)

    def _is_kept(self, pool: int) -> bool:
        """Whether what a pool gives now may come again.

        Of one pool each sample comes once. Of the largest, the next sample to come in would crowd
        it out.
        """
        if len(self._pools) == 1:
            return False
        is_largest = self._lengths[pool] == self._lengths.max()
        return self._has_ended or not is_largest or self._pools[pool].num_fresh < 2

    def _copied(self, sample: Any, number: int, place: int) -> Any:  # noqa: ANN401
        try:
            return copy.deepcopy(sample)
        except Exception as error:
            annotate(
                error,
                f"BalancedShuffle gives sample {place} (counted from 0) of its stream, "
                f"{self._kind}, of class {self._tally.names[number]!r}, as a copy "
                "(copy.deepcopy), since it may come again, and it cannot be copied. Let the "
                "stream give plain data, and open, decode or move it in transform.",
            )
            raise

    def _drawn_pool(self, rng: np.random.Generator) -> int:
        if len(self._pools) == 1:
            return 0
        if self._num_read >= self._refresh_at:
            self._refresh_at = int(self._num_read * _REFRESH) + 1
            self._bounds = np.cumsum(class_shares(self._tally.read, *self._shares))
        point = rng.random() * self._bounds[-1]
        # Rounding may put the point on the very end.
        return min(int(self._bounds.searchsorted(point, side="right")), len(self._pools) - 1)

    def _finish(self) -> None:
        for pool in self._pools:
            for number, _, _ in pool.fresh:
                self._tally.dropped[number] += 1
        self._pools, self._lengths = [], self._lengths[:0]


def _generator(seed: int, epoch: int, *which: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed_sequence(seed, Purpose.ORDER, epoch, *which)))


def _own_share() -> tuple[int, int]:
    """Return rank and number of the worker."""
    share = shard_unasked()
    if share.num_workers == 1:
        torch_data = sys.modules.get("torch.utils.data")  # torch's own loader knows its workers
        info = None if torch_data is None else torch_data.get_worker_info()
        return share.rank, 0 if info is None else info.id
    return share.rank, share.worker_id


def _called(function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """Return `function(*arguments)`; a StopIteration of it would end the stream unnoticed."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError(
            "get_label or transform of BalancedShuffle raised StopIteration, which would have "
            "ended the stream."
        ) from error
