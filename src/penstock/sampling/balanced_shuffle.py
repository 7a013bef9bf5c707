# SPDX-License-Identifier: Apache-2.0
"""A shuffle buffer that balances classes, for streams whose labels are seen only as they come."""
# stream -> [ one reservoir per class ] -> class drawn by its share, sample of it -> out
#
# One sample goes out for each that comes in, after the first `buffer_size` have come in. What comes
# in when the buffer is full crowds a sample out of the largest reservoir, so a rare class keeps all
# it has until it has as many as the others. A sample of the largest is let go of when it is given,
# so only those that may come again are copied.

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import numpy as np

from penstock.data.dataset import IterableDataset, announce_epoch
from penstock.data.labels.values import NotLabelsError
from penstock.errors import ConfigError
from penstock.faults import annotate
from penstock.optional import when_imported
from penstock.randomness.keys import Purpose, checked_count, checked_epoch, seed_sequence
from penstock.randomness.samples import end_prologue
from penstock.sampling.class_balanced import check_alpha, class_shares
from penstock.sampling.samplers import checked_positive
from penstock.worker_info import shard_unasked

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from penstock.sampling.class_balanced import Alpha

    Entry = tuple[Hashable, int, Any]  # class, place in the stream, sample

T = TypeVar("T")

# Shares are computed anew when this many more samples have come in: 1 %.
_REFRESH: Final = 1.01
_KEYS: Final = ("labels", "label", "targets", "target")


class BalancedShuffle(IterableDataset[Any]):
    """The samples of a stream, shuffled, rare classes repeated and common ones thinned.

    As many samples go out as come in. Each time a class is drawn, with the share that `alpha` gives
    it by the samples of each class seen so far, then a sample of it: one that was never given, at
    random, or else one that was, all of them in random order before any comes again. `alpha=0` (or
    a single class) is a plain shuffle buffer: each sample comes exactly once.

    The buffer holds `buffer_size` samples. A class keeps buffer_size / classes of them, or more
    where others need less. What is crowded out without having been given is dropped, and what is
    left in the buffer when as many samples went out as came in. A stream that is sorted by class
    cannot be balanced: while only one class has been seen, nothing else can be given.

    The order is decided by the stream, `seed`, the epoch, and which worker and rank this is; the
    seed of a loader does not reach it. Each worker has a buffer of its own, of its share of the
    stream: let the stream deal itself out (`penstock.data.shard`). With torch's own DataLoader call
    `set_epoch` before every epoch, which does not reach persistent workers; there, under DDP, give
    each rank a seed of its own. A saved loader's state goes on exactly, by reading the stream again
    from its start.

    What may come again is given as a copy (`copy.deepcopy`), so it may be written to.

    Memory: `buffer_size` samples, and one more, in every worker. Let the stream give encoded
    samples, and decode and augment in `transform`: the buffer is then small, and a repeated sample
    is augmented anew.

    Attributes:
        counts: What became of the samples of this process's newest epoch, by class: dicts `read`,
            `given`, `repeated` (of the given ones) and `dropped`. Workers have their own.

    Example:
        >>> stream = [("cat", 0)] * 90 + [("dog", 1)] * 10
        >>> import random
        >>> random.Random(0).shuffle(stream)
        >>> balanced = BalancedShuffle(stream, buffer_size=50)
        >>> names = [name for name, _ in balanced]
        >>> len(names), 40 <= names.count("dog") <= 60
        (100, True)
        >>> balanced.counts.read[1], balanced.counts.repeated[0]
        (10, 0)
    """

    _shows = ("dataset", "length", "buffer_size", "alpha", "seed", "epoch")

    # All of penstock's loaders set its epoch, those without a seed too: its order is decided by
    # nothing else that changes.
    follows_epochs: ClassVar[bool] = True

    def __init__(
        self,
        dataset: Iterable[Any],
        buffer_size: int = 1000,
        *,
        get_label: Callable[[Any], Hashable] | None = None,
        alpha: Alpha = 1.0,
        beta: float = 0.999,
        transform: Callable[[Any], Any] | None = None,
        seed: int = 0,
    ) -> None:
        """Wrap a stream.

        Args:
            dataset: An iterable dataset of penstock or torch, or anything that can be iterated, in
                every epoch anew.
            buffer_size: Samples to hold, at least as many as there are classes (with `alpha=0`, at
                least 1). The larger, the better the shuffle, and the more samples of a rare class
                to choose from.
            get_label: Returns the class of a sample: anything that can be hashed; arrays and
                tensors without dimensions count as their number. None takes the last of a tuple or
                list, and of a dict what is called "label", "labels", "target" or "targets".
                `operator.itemgetter("kind")` is one that pickles.
            alpha: As of `ClassBalancedSampler`: 0 natural, 0.5 square root, 1 all the same; or
                "effective", which goes by how many have come so far: nearly all the same at first.
            beta: As of `ClassBalancedSampler`.
            transform: Applied to each sample that goes out, each time.
            seed: Decides the order, with the epoch.

        Raises:
            ConfigError: an argument is out of its range, or `dataset` is no stream.
        """
        if not hasattr(type(dataset), "__iter__"):
            raise ConfigError(
                f"BalancedShuffle takes a stream, something with __iter__, but "
                f"{type(dataset).__name__} has none. For a data set with an index there is "
                "ClassBalancedSampler, which has all labels beforehand."
            )
        checked_positive("buffer_size", buffer_size)
        check_alpha(alpha, beta)
        self.dataset = dataset
        self.get_label = get_label
        self.buffer_size = buffer_size
        self.alpha = alpha
        self.beta = beta
        self.transform = transform
        self.seed = checked_count("seed", seed)
        self.epoch = 0
        self.counts = ShuffleCounts()
        when_imported("torch", _register_with_torch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next, also for the stream."""
        self.epoch = checked_epoch(epoch)
        announce_epoch(self.dataset, epoch)

    def settings(self) -> dict[str, Any]:
        """Return what the order depends on besides the stream, as JSON has it.

        Part of a loader's fingerprint. The functions are not in it.
        """
        return {
            "kind": type(self).__name__,
            "buffer_size": int(self.buffer_size),
            "alpha": self.alpha if isinstance(self.alpha, str) else float(self.alpha),
            "beta": float(self.beta),
            "seed": self.seed,
        }

    def __len__(self) -> int:
        """Return the length of the stream, if it has one."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Begin the stream; nothing is read before the first sample is asked for."""
        self.counts = ShuffleCounts()
        return _ShufflePass(self, iter(self.dataset), self.counts)


@dataclass(slots=True)
class ShuffleCounts:
    """What became of the samples, by class: `read` ones were given, dropped, or are still held.

    `repeated` are those of `given` that had gone out before.
    """

    read: Counter[Any] = field(default_factory=Counter)
    given: Counter[Any] = field(default_factory=Counter)
    repeated: Counter[Any] = field(default_factory=Counter)
    dropped: Counter[Any] = field(default_factory=Counter)


class _ShufflePass:
    """One pass over a stream."""

    # An object and no generator: a stream that goes on after an exception does so through this.

    def __init__(
        self, owner: BalancedShuffle, stream: Iterator[Any], counts: ShuffleCounts
    ) -> None:
        self._stream = stream
        self._owner = owner
        self._kind = type(owner.dataset).__name__
        self._is_plain = owner.alpha == 0  # all classes in one reservoir: nothing is repeated
        self._counts = counts
        self._class_of: dict[Hashable, int] = {}
        self._pools: list[_Reservoir] = []
        self._lengths = np.zeros(0, np.int64)  # of the pools
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
        try:
            while (
                not self._has_ended and self._num_read - self._num_given < self._owner.buffer_size
            ):
                self._take_in()
            if self._num_given < self._num_read:
                return self._give()
        except StopIteration as error:
            raise RuntimeError("get_label or transform raised StopIteration.") from error
        for pool in self._pools:
            self._counts.dropped.update(name for name, _, _ in pool.fresh)
        self._pools = []
        raise StopIteration

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
            annotate(
                error,
                f"BalancedShuffle was reading sample {self._num_asked} (counted from 0) of its "
                f"stream, {self._kind}, and had given {self._num_given}.",
            )
            self._broken_by = error if inspect.isgenerator(self._stream) else None
            raise
        end_prologue()  # of a stream that is not dealt out by `shard`, which has done it
        self._num_asked += 1
        try:
            name = class_of_sample(sample, self._owner.get_label)
        except NotLabelsError as error:
            raise ConfigError(
                f"Sample {self._num_asked - 1} (counted from 0) of the stream ({self._kind}) "
                f"{error}. BalancedShuffle needs one class for each sample: pass get_label=, a "
                'function that returns it (of several the rarest), as operator.itemgetter("kind").'
            ) from None
        pool = self._pool_of(name)
        self._num_read += 1
        self._counts.read[name] += 1
        self._pools[pool].fresh.append((name, self._num_asked - 1, sample))
        self._lengths[pool] += 1
        if self._lengths.sum() > self._owner.buffer_size:
            largest = int(self._lengths.argmax())
            self._lengths[largest] -= 1
            dropped = self._pools[largest].crowd_out(self._rng)
            if dropped is not None:
                self._counts.dropped[dropped[0]] += 1

    def _pool_of(self, name: Hashable) -> int:
        number = self._class_of.setdefault(name, len(self._class_of))
        if self._is_plain:
            number = 0
        if number < len(self._pools):
            return number
        if number >= self._owner.buffer_size:
            raise ConfigError(
                f"Sample {self._num_asked - 1} (counted from 0) of the stream ({self._kind}) is of "
                f"a new class, {name!r}, after {number} others, but buffer_size={number}. Raise "
                "buffer_size, or let get_label return coarser classes."
            )
        self._refresh_at = 0
        self._pools.append(_Reservoir())
        self._lengths = np.append(self._lengths, 0)
        return number

    def _give(self) -> Any:  # noqa: ANN401
        rng = self._rng if self._num_given else self._first_rng
        number = self._drawn_pool(rng)
        pool = self._pools[number]
        # What is given may come again, but of one pool each sample comes once; and of the largest,
        # the next sample to come in would crowd it out.
        is_largest = self._lengths[number] == self._lengths.max()
        is_kept = len(self._pools) > 1 and (
            self._has_ended or not is_largest or len(pool.fresh) < 2
        )
        is_repeat = is_kept and not pool.fresh
        if is_kept:
            name, place, sample = pool.give(rng)
        else:
            name, place, sample = _pop_any(pool.fresh, rng)
            self._lengths[number] -= 1
        self._num_given += 1
        self._counts.given[name] += 1
        self._counts.repeated[name] += is_repeat
        if is_kept:
            try:
                sample = copy.deepcopy(sample)
            except Exception as error:
                annotate(
                    error,
                    f"{self._kind} gave sample {place} to BalancedShuffle. It may come again, so "
                    "it is given as a copy (copy.deepcopy): let the stream give plain data, and "
                    "open, decode or move it in transform.",
                )
                raise
        transform = self._owner.transform
        return sample if transform is None else transform(sample)

    def _drawn_pool(self, rng: np.random.Generator) -> int:
        if len(self._pools) == 1:
            return 0
        if self._num_read >= self._refresh_at:
            self._refresh_at = int(self._num_read * _REFRESH) + 1
            counts = list(self._counts.read.values())
            shares = class_shares(counts, self._owner.alpha, self._owner.beta)
            self._bounds = np.cumsum(shares)
        point = rng.random() * self._bounds[-1]
        # Rounding may put the point on the very end.
        return min(int(self._bounds.searchsorted(point, side="right")), len(self._pools) - 1)


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


def _register_with_torch() -> None:
    """Let torch's own loader see that this is a stream; `penstock.torch` does so as well."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None:
        torch_data.IterableDataset.register(IterableDataset)


def class_of_sample(sample: Any, get_label: Callable[[Any], Any] | None = None) -> Hashable:  # noqa: ANN401
    """Return the class of a sample, equal for equal labels."""
    if get_label is not None:
        label = get_label(sample)
    else:
        label = sample[-1] if isinstance(sample, (tuple, list)) and len(sample) > 1 else sample
        key = next((key for key in _KEYS if isinstance(label, Mapping) and key in label), None)
        if key is None and label is sample:
            raise NotLabelsError(f"is a {type(sample).__qualname__}, no pair nor dict with a label")
        label = label if key is None else label[key]
    if getattr(label, "ndim", None) == 0 and hasattr(label, "item"):
        label = label.item()  # a tensor's hash is that of the object
    try:
        name: Hashable = label
        hash(label)
        # Every NaN would be a class of its own.
        is_class = label is not None and not getattr(label, "shape", ()) and label == label
    except TypeError:
        is_class = False
    if not is_class or (get_label is None and isinstance(label, tuple)):
        raise NotLabelsError(f"has as its label {label!r:.60}, which is not one class")
    return name


class _Reservoir:
    """Samples of one class: gives those never given first, at random, then round by round."""

    # In a round every sample that was given before comes once. A fresh one that comes in is given
    # before the round goes on, and takes part from the next.

    def __init__(self) -> None:
        self.fresh: list[Entry] = []  # never given
        self._given: OrderedDict[int, Entry] = OrderedDict()  # by the number of its first giving
        self._due: list[int] = []  # of `_given`, in this round; some may have left since
        self._num_first_given = 0

    def give(self, rng: np.random.Generator) -> Entry:
        """Return a sample, which stays held."""
        if self.fresh:
            sample = _pop_any(self.fresh, rng)
            self._given[self._num_first_given] = sample
            self._num_first_given += 1
            return sample
        while True:
            if not self._due:
                self._due = list(self._given)
            number = _pop_any(self._due, rng)
            if number in self._given:
                return self._given[number]

    def crowd_out(self, rng: np.random.Generator) -> Entry | None:
        """Let go of a sample; return it if it was never given, else None."""
        # Of those given before the one goes that was first given the longest ago, so that all stay
        # equally long. Where none was given, any goes, so that all fresh ones have the same chance.
        if self._given:
            self._given.popitem(last=False)
            return None
        return _pop_any(self.fresh, rng)


def _pop_any(items: list[T], rng: np.random.Generator) -> T:
    """Take one item out, at random; the last takes its place."""
    chosen = int(rng.random() * len(items))
    items[chosen], items[-1] = items[-1], items[chosen]
    return items.pop()
