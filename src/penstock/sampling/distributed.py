# SPDX-License-Identifier: Apache-2.0
"""One order for all ranks, of which each takes its turns."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.distributed import Rank, current_rank
from penstock.errors import ConfigError
from penstock.randomness.generators import guarded_draws
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling.samplers import (
    BatchSampler,
    CountedSampler,
    EveryNth,
    IndexSampler,
    RandomSampler,
    SequentialSampler,
    checked_positive,
)
from penstock.summary import Summarized
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.sampling.samplers import Indices


def chosen_rank(rank: int | None, num_replicas: int | None) -> Rank:
    """Return the rank that was given; what is None as `current_rank` says."""
    found = current_rank()
    num_replicas = found.world_size if num_replicas is None else num_replicas
    rank = found.rank if rank is None else rank
    checked_positive("num_replicas", num_replicas)
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]."
        )
    return Rank(rank, num_replicas)


def check_pad(pad: object) -> None:
    """Raise `ConfigError` unless `pad` is one of three."""
    if pad not in ("repeat", "drop", "none"):
        raise ConfigError(f"pad should be 'repeat', 'drop' or 'none', but got pad={pad!r}.")


def share_length(length: int, rank: int, num_replicas: int, pad: str) -> int:
    """Return how many indices of an order of `length` are a rank's."""
    if pad == "none":
        return max(-((rank - length) // num_replicas), 0)
    return length // num_replicas if pad == "drop" else -(-length // num_replicas)


class DistributedSampler(CountedSampler):
    """One rank's share of an order that all ranks agree on: of any sampler's, or a dataset's.

    Ranks take turns, so that batch k of all ranks together is one piece of the global order, for
    any number of ranks. For 5 samples on 2 ranks, not shuffled:

        order            0 1 2 3 4
        pad="repeat"     0 1 2 3 4 0     rank 0: 0 2 4   rank 1: 1 3 0
        pad="drop"       0 1 2 3         rank 0: 0 2     rank 1: 1 3
        pad="none"       0 1 2 3 4       rank 0: 0 2 4   rank 1: 1 3

    With 4 ranks and batches of 8, with 2 and 16, or with 1 and 32, the k-th batches hold the same
    32 samples. So a run may go on with another number of ranks. Only the end of an epoch whose
    order does not divide evenly is another: "repeat" and "drop" change up to world size - 1 samples
    there, so that a loader with `drop_last` may have one global batch more or less.

    "none" is for validation: every sample comes once, and ranks may have one batch more or less, so
    nothing that waits for all ranks may happen in the loop.

    Example:
        >>> [list(DistributedSampler(range(5), 2, rank, shuffle=False)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
        >>> from penstock.sampling import WeightedRandomSampler
        >>> drawn = WeightedRandomSampler([1.0, 2.0, 1.0], num_samples=6, seed=7)
        >>> shares = [list(DistributedSampler(drawn, 2, rank)) for rank in (0, 1)]
        >>> shares[0] == list(drawn)[0::2], shares[1] == list(drawn)[1::2]
        (True, True)
    """

    _shows = ("length", "rank", "num_replicas", "sampler")

    def __init__(
        self,
        source: Any,  # noqa: ANN401 - any dataset or sampler
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        pad: Literal["repeat", "drop", "none"] = "repeat",
    ) -> None:
        """Set the ranks and the order that they share.

        Args:
            source: A dataset (something with `__getitem__` and a length), or a sampler with a
                length. A sampler that is not an `IndexSampler` is iterated on every rank, with the
                global generators seeded from (seed, epoch), so that all ranks get the same.
            num_replicas: Number of ranks, at least 1; None asks `torch.distributed` if it is
                initialised, else torchrun's variable WORLD_SIZE, else takes 1. They are asked now:
                where processes are not started by torchrun, make the sampler when they are a group.
            rank: This one, 0 <= rank < num_replicas; None asks likewise.
            shuffle: Whether a dataset's order is random (default). A sampler has its own.
            seed: Decides a dataset's order. The same on all ranks. None: that of the loader.
            pad: What happens to the samples left over when the ranks have had equally many: the
                first ones are taken twice, or those left over are left out, or neither.

        Raises:
            ConfigError: an argument is out of range.
            TypeError: the source is neither, or has no length.
        """
        super().__init__(seed)
        chosen = chosen_rank(rank, num_replicas)
        check_pad(pad)
        self.rank, self.num_replicas = chosen
        self._found_alone = rank is None and num_replicas is None and chosen.world_size == 1
        self.pad = pad
        self.sampler: Any = source
        is_dataset = hasattr(source, "__getitem__")
        is_sampler = hasattr(source, "__iter__") and not isinstance(source, BatchSampler)
        if not hasattr(source, "__len__") or not (is_dataset or is_sampler):
            raise TypeError(
                "DistributedSampler takes a dataset or a sampler of indices that has a length, but "
                f"got {type(source).__name__}. What gives batches may take num_replicas= and rank= "
                "itself; else wrap the sampler inside it."
            )
        if is_dataset:
            is_random = len(source) and shuffle in (None, True)
            self.sampler = (
                RandomSampler(source, seed=seed) if is_random else SequentialSampler(source)
            )
        elif shuffle is not None:
            raise ConfigError(
                f"{type(source).__name__} is a sampler and has an order of its own, but got "
                f"shuffle={shuffle}. Leave shuffle out, or give the dataset."
            )
        if isinstance(self.sampler, IndexSampler):
            self.source_length = self.sampler.source_length

    @property
    def num_samples(self) -> int:
        """Indices of this rank in an epoch."""
        return share_length(len(self.sampler), self.rank, self.num_replicas, self.pad)

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch."""
        return len(self.sampler) if self.pad == "none" else self.num_samples * self.num_replicas

    def take_seed(self, seed: int) -> None:
        """Take the seed of a loader, here and in the sampler that was given."""
        super().take_seed(seed)
        if isinstance(self.sampler, IndexSampler):
            self.sampler.take_seed(seed)

    def adopt(self, settings: Mapping[str, Any], num_drawn: int) -> None:
        """Pass what was saved on to the sampler that was given."""
        if isinstance(self.sampler, IndexSampler) and isinstance(settings.get("of"), dict):
            # "drop" leaves out the end of an epoch, and "repeat" goes on after it.
            epoch, position = divmod(num_drawn, max(self.total_size, 1))
            length = len(self.sampler)
            self.sampler.adopt(settings["of"], epoch * length + min(position, length))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, here and in the sampler that was given."""
        super().set_epoch(epoch)
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def indices(self) -> Indices:
        """Return this rank's share of the current epoch, of length `num_samples`.

        Warns:
            UserWarning: no other ranks were known when the sampler was made, and now there are.
        """
        if self._found_alone and (ranks := current_rank()).world_size > 1:
            warn_user(
                f"this is rank {ranks.rank} of {ranks.world_size}, which was not known when this "
                "DistributedSampler was made, so it gives all samples to this rank too. Make it "
                "after torch.distributed.init_process_group(). Where ranks are to have the same "
                "data, DistributedSampler(..., num_replicas=1, rank=0) says so.",
            )
        order = self._global_order()
        if len(order) != len(self.sampler):
            raise RuntimeError(
                f"{type(self.sampler).__name__} yielded {len(order)} indices but has length "
                f"{len(self.sampler)}: the ranks' shares go by that. Correct its __len__."
            )
        share = EveryNth(order, self.rank, self.num_replicas, self.num_samples)
        return share[:] if isinstance(order, np.ndarray) else share

    def _global_order(self) -> Indices:
        if isinstance(self.sampler, IndexSampler):
            return self.sampler.indices()
        with guarded_draws(self.sampler, seed_sequence(self.seed, Purpose.ORDER, self.epoch)):
            return np.fromiter(map(operator.index, self.sampler), np.int64)

    def _num_items(self) -> int:
        return min(self.total_size, len(self.sampler))

    def _summary(self) -> Iterable[tuple[str, object]]:
        # The seed is that of the sampler inside: its own decides nothing.
        inner = self.sampler._summary() if isinstance(self.sampler, Summarized) else ()
        return [*super()._summary(), *(item for item in inner if item[0] != "length")]

    def settings(self) -> dict[str, Any]:
        """Return what the global order depends on: not the number of ranks."""
        if isinstance(self.sampler, IndexSampler):
            # The loader's seed, if it decides anything, is among the settings inside.
            inner, seed = self.sampler.settings(), self._own_seed or 0
        else:
            inner = {"kind": type(self.sampler).__name__, "length": len(self.sampler)}
            seed = self.seed
        return {"kind": "DistributedSampler", "seed": seed, "pad": self.pad, "of": inner}
