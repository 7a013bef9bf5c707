# SPDX-License-Identifier: Apache-2.0
"""A shuffle buffer that balances classes, for streams whose labels are seen only as they come."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.data.dataset import IterableDataset, announce_epoch
from penstock.errors import ConfigError
from penstock.optional import when_imported
from penstock.randomness.keys import checked_count, checked_epoch
from penstock.sampling.samplers import check_positive
from penstock.sampling.shares import Alpha, check_alpha, check_beta
from penstock.sampling.shuffle_pass import ShuffleCounts, ShufflePass, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

__all__ = ["BalancedShuffle", "ShuffleCounts"]


class BalancedShuffle(IterableDataset[Any]):
    """The samples of a stream, shuffled, rare classes repeated and common ones thinned.

    As many samples go out as come in. Each time a class is drawn, with the share that
    `class_shares` gives it by the samples of each class seen so far, then a sample of it: one that
    was never given, at random, or else one that was, all of them in random order before any comes
    again. `alpha=0` (or a single class) is a plain shuffle buffer: each sample comes exactly once.

    The buffer holds `buffer_size` samples. A class keeps buffer_size / classes of them, or more
    where others need less. What is crowded out without having been given is dropped. When the
    stream has ended, the last `buffer_size` samples are drawn in the same way, and what of the
    buffer has not been given by then is dropped. A stream that is sorted by class cannot be
    balanced: while only one class has been seen, nothing else can be given. Of a rare class's first
    samples there are few to choose from, so they come more often than later ones.

    The order is decided by the stream, `seed`, the epoch, and which worker and rank this is; the
    seed of a loader, or torch's, does not reach it. Each worker has a buffer of its own, of its
    share of the stream: let the stream deal itself out (`penstock.data.shard`). penstock's loaders
    tell the epoch by themselves. With torch's own DataLoader call `set_epoch` before every epoch,
    or the same order comes again; it does not reach persistent workers. There, under DDP, give each
    rank a seed of its own.

    A saved loader's state goes on exactly, by reading the stream again from its start: what the
    buffer holds is data, and does not go into a state.

    What may come again is given as a copy (`copy.deepcopy`), so it may be written to; of a balanced
    stream that is most of what the rare classes give, and little of the common ones. With
    `alpha=0`, or while there is one class, nothing is copied. A sample of bytes and numbers is
    copied in some microseconds, arrays and tensors at the speed of memory.

    Memory: `buffer_size` samples, and one more while it comes in, in every worker: in all,
    `buffer_size` x max(1, num_workers) x the size of a sample. `memory_bytes` measures it. Let the
    stream give encoded samples, and decode and augment in `transform`: the buffer is then a small
    part of what decoded ones take, and a repeated sample is augmented anew. (What a transform of
    the stream itself has drawn is repeated with its sample.)

    Concurrency:
        One iterator at a time in a process is the usual; several are independent, but `counts` and
        `memory_bytes` tell of the newest. Pickles if the stream, `get_label` and `transform` do.

    Example:
        >>> stream = [("cat", 0)] * 90 + [("dog", 1)] * 10
        >>> import random
        >>> random.Random(0).shuffle(stream)
        >>> balanced = BalancedShuffle(stream, buffer_size=50)
        >>> names = [name for name, _ in balanced]
        >>> len(names), 40 <= names.count("dog") <= 60
        (100, True)
        >>> balanced.counts.read, balanced.counts.repeated[0]
        ({0: 90, 1: 10}, 0)
    """

    _shows = ("dataset", "length", "buffer_size", "alpha", "seed", "epoch")

    # All of penstock's loaders tell it the epoch, those without a seed too: its order is decided by
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
            alpha: As for `class_shares`: 0 natural, 0.5 square root, 1 all the same; or
                "effective", which goes by how many have come so far: nearly all the same at first.
            beta: As for `class_shares`.
            transform: Applied to each sample that goes out, each time.
            seed: Decides the order, with the epoch.

        Raises:
            ConfigError: an argument is out of its range, or `dataset` is no stream.
            TypeError: `get_label` or `transform` cannot be called.
        """
        if not hasattr(type(dataset), "__iter__"):
            raise ConfigError(
                f"BalancedShuffle takes a stream, something with __iter__, but "
                f"{type(dataset).__name__} has none. For a data set with an index there is "
                "ClassBalancedSampler, which knows all labels beforehand."
            )
        check_positive("buffer_size", buffer_size)
        check_alpha(alpha)
        check_beta(beta)
        for name, function in (("get_label", get_label), ("transform", transform)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} should be a function, but got {name}={function!r}.")
        self.dataset = dataset
        self.get_label = get_label
        self.buffer_size = buffer_size
        self.alpha = alpha
        self.beta = beta
        self.transform = transform
        self.seed = checked_count("seed", seed)
        self.epoch = 0
        self._tally = Tally()
        self._newest: Callable[[], ShufflePass | None] = _nobody
        _watch_torch()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; the stream is told as well.

        Raises:
            ConfigError: a negative epoch, or one of 2^32 and more.
            TypeError: an epoch that is no integer.
        """
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
        """Return the length of the stream, if it has one.

        Raises:
            TypeError: it has none.
        """
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Begin the stream; nothing is read before the first sample is asked for."""
        self._tally = Tally()
        newest = ShufflePass(self, iter(self.dataset), self._tally)
        self._newest = weakref.ref(newest)
        return newest

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what is being iterated."""
        return {**self.__dict__, "_newest": _nobody, "_tally": Tally()}

    @property
    def counts(self) -> ShuffleCounts:
        """What became of the samples of this process's newest epoch; workers have their own."""
        return self._tally.counts()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the samples that the newest iterator of this process holds; 0 once it is gone.

        Counted are arrays, tensors, bytes and texts, in any tree of dicts, lists and tuples. What a
        sample refers to beyond that, such as the pixels of Pillow's images, is not seen. Takes
        time: every sample is looked at.
        """
        newest = self._newest()
        return 0 if newest is None else sum(map(_nbytes, newest.held()))


def _nobody() -> None:
    return None


@functools.cache  # once per process
def _watch_torch() -> None:
    when_imported("torch", _register_with_torch)


def _register_with_torch() -> None:
    """Let torch's own loader see that this is a stream; `penstock.torch` does so as well."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None:
        torch_data.IterableDataset.register(IterableDataset)


def _nbytes(tree: Any) -> int:  # noqa: ANN401
    if isinstance(tree, dict):
        return sum(map(_nbytes, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(_nbytes, tree))
    nbytes = getattr(tree, "nbytes", None)
    if isinstance(nbytes, int):  # arrays, tensors, views of memory
        return nbytes
    return len(tree) if isinstance(tree, (bytes, bytearray)) else sys.getsizeof(tree)
