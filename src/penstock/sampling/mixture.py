# SPDX-License-Identifier: Apache-2.0
"""One order over several datasets, each with a share of its own."""
# Nothing is stored. Of N = num_samples indices in epoch e, source s with n items has the quota q:
#
#     v          = Permutation(N, (seed, e))[k]      k: position in the epoch
#     s, j         such that v is number j of the q numbers of source s
#     rounds     = max(n // q, 1)                    as many whole epochs as fit into the source
#     p          = (e mod rounds) * q + j
#     index      = start of s + Permutation(n, (seed, s, e // rounds))[p mod n]
#
# So a source is gone through in rounds of whole epochs, each in an order of its own. No sample
# comes twice in a round, and the n mod q that are left over of it wait: others in each round, as
# the order is another. A source with q > n has a round of one epoch; p goes on at its start again.
#
# Rejected: going on over the ends of rounds, with a new order only where one ends with an epoch. Of
# n and q without a common factor that is after n epochs, and until then those that are n // q apart
# are of nearly the same samples. With a new order within the epoch, samples of the last part of a
# round would come again in it, though the epoch is shorter than a round.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.class_balanced import check_alpha, class_shares
from penstock.sampling.class_items import grouped
from penstock.sampling.permutation import LARGEST, Permutation, replace_in_turn
from penstock.sampling.samplers import (
    ComputedOrder,
    CountedSampler,
    as_weights,
    checked_positive,
    stated,
)
from penstock.sampling.shards import lengths_in

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import ArrayLike, NDArray

    from penstock.sampling.class_balanced import Alpha
    from penstock.sampling.samplers import Indices

_PRECISION: Final = 10**12  # as exact as ratios of decimal fractions in float64 are


class MixtureSampler(CountedSampler):
    """Indices into several datasets in a row, of each as many as its share says.

    For a `ConcatDataset` of the sources. In each epoch the counts are exact: `quotas`, the shares
    of `num_samples` by largest remainder. Each source is gone through in random order, over as many
    whole epochs as it lasts, and then in another one. A source with a quota above its length is
    shuffled in each epoch, where its samples come equally often, or once more. The order of an
    epoch is shuffled as a whole.

    An order takes no memory to speak of, however long the sources are, and some 0.1 us per index;
    each source costs 0.1 ms at the start of an epoch.

    Attributes:
        names: Of the sources: the keys of the mapping, or "0", "1" …
        lengths: Samples of each, int64 (sources,). This and the two below: do not write.
        shares: As given, summing to 1, float64 (sources,).
        quotas: Indices of each in an epoch, summing to `num_samples`, int64 (sources,).
        num_samples: Indices in an epoch.

    Example:
        >>> sampler = MixtureSampler({"web": 1_000_000, "books": 50}, [3, 1], num_samples=200)
        >>> dict(zip(sampler.names, sampler.quotas.tolist()))
        {'web': 150, 'books': 50}
        >>> books = [index - 1_000_000 for index in sampler if index >= 1_000_000]
        >>> sorted(books) == list(range(50))
        True
    """

    def __init__(
        self,
        sources: Any,  # noqa: ANN401 - lengths, datasets, or a dataset of them
        weights: ArrayLike | Mapping[Any, float] | None = None,
        num_samples: int | Literal["oversample", "undersample"] | None = None,
        seed: int | None = None,
        *,
        alpha: Alpha | None = None,
    ) -> None:
        """Set the sources and their shares.

        Args:
            sources: The datasets in the order of the `ConcatDataset`; or their lengths; or a dict
                of either, by name; or the `ConcatDataset`. No sample is read.
            weights: One per source, finite, not negative, not all 0; only their ratios count. By
                name if the sources are. 0 leaves a source out. None: the lengths.
            num_samples: Indices in an epoch. None: as many as there are samples. "oversample": no
                more than it takes for every source with a weight to come whole.
                "undersample": as many as can be had in these shares without a sample coming twice.
            seed: Decides the orders; None: that of the loader.
            alpha: Instead of weights, 0 to 2: shares are proportional to length ** (1 - alpha).

        Raises:
            ConfigError: one of the above does not hold; or a source with a weight is empty, or its
                share of `num_samples` is less than one.
        """
        super().__init__(seed)
        found = lengths_in(sources, "MixtureSampler", "source")
        lengths = list(found.values())
        self.names: tuple[Hashable, ...] = tuple(
            found if isinstance(sources, Mapping) else map(str, found)
        )
        if alpha is not None:
            if weights is not None:
                raise ConfigError(f"give weights or alpha, not both, but got {alpha=}.")
            check_alpha(alpha)
            weights = np.zeros(len(lengths))
            some = np.flatnonzero(lengths)
            weights[some] = class_shares(np.array(lengths)[some], alpha)
        parts = lengths if weights is None else _parts(weights, self.names)
        self.num_samples = _epoch_length(num_samples, lengths, parts)
        quotas, total = _largest_remainder(self.num_samples, parts), sum(parts)
        for name, length, quota, part in zip(self.names, lengths, quotas, parts, strict=True):
            if part and not (length and quota):
                raise ConfigError(
                    f"source {name!r} would never be drawn: it has {length} samples, and its share "
                    f"of num_samples={self.num_samples} is {self.num_samples * part / total:.3g}. "
                    f"num_samples={-(-total // min(filter(None, parts)))} is enough for every "
                    "source with samples; weight 0 leaves one out."
                )
        self.source_length = sum(lengths)
        self.lengths: NDArray[np.int64] = np.array(lengths, np.int64)
        self.shares: NDArray[np.float64] = np.array([part / total for part in parts])
        self.quotas: NDArray[np.int64] = np.array(quotas, np.int64)

    def indices(self) -> Indices:
        """Return the order of the current epoch; an array, unless it were a long one."""
        return _MixtureOrder(self).stored()

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on: lengths and quotas; of many their digests."""
        lengths, quotas = stated(self.lengths, 64), stated(self.quotas, 64)
        return {**super().settings(), "lengths": lengths, "quotas": quotas}


class _MixtureOrder(ComputedOrder):
    """The order of one epoch, not stored."""

    def __init__(self, sampler: MixtureSampler) -> None:
        super().__init__(sampler.num_samples)
        epoch, seed = sampler.epoch, sampler.seed
        drawn = np.flatnonzero(sampler.quotas)
        lengths, quotas = sampler.lengths[drawn].tolist(), sampler.quotas[drawn].tolist()
        self._items, offsets = [], []
        for source, length, quota in zip(drawn.tolist(), lengths, quotas, strict=True):
            generation, epoch_of_round = divmod(epoch, max(length // quota, 1))
            self._items.append(Permutation(length, (seed, source, generation)))
            offsets.append(epoch_of_round * quota)
        self._places = Permutation(sampler.num_samples, (seed, epoch))
        self._stops = np.cumsum(quotas, dtype=np.int64)
        # What a place of a source is moved by to be the place in its round.
        self._moves = np.array(offsets, np.int64) - (self._stops - quotas)
        self._lengths = np.array(lengths, np.int64)
        self._starts = (np.cumsum(sampler.lengths) - sampler.lengths)[drawn]

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        places = self._places[positions]
        sources = np.searchsorted(self._stops, places, side="right")
        places += self._moves[sources]  # below 2^63: an offset and a quota are below 2^62 each
        places %= self._lengths[sources]
        counts = np.bincount(sources, minlength=len(self._items))
        by_source = grouped(sources, len(counts))
        items = places[by_source]
        replace_in_turn(self._items, counts, items)
        places[by_source] = items
        places += self._starts[sources]
        return places


def _parts(weights: ArrayLike | Mapping[Any, float], names: tuple[Hashable, ...]) -> list[int]:
    """Return integers of the same ratios as the weights, without any rounding."""
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ConfigError(f"weights are for {list(weights)}, the sources are {list(names)}.")
        weights = [weights[name] for name in names]
    values = as_weights(weights)
    is_right = values.shape == (len(names),) and (np.isfinite(values) & (values >= 0)).all()
    if not (is_right and values.any()):
        raise ConfigError(
            f"weights should be a finite number, 0 or more, for each of the "
            f"{len(names)} sources {list(names)!r:.80}, and not all 0, but got {values}."
        )
    exact = [Fraction(value) for value in values.tolist()]
    common = max(part.denominator for part in exact)  # they are all powers of two
    return [int(part * common) for part in exact]


def _epoch_length(num_samples: object, lengths: Sequence[int], parts: Sequence[int]) -> int:
    total, drawn = sum(parts), [pair for pair in zip(lengths, parts, strict=True) if pair[1]]
    if num_samples is None:
        num_samples = sum(lengths)
    elif num_samples == "oversample":  # the least N with N * part / total >= length, for all
        num_samples = max(-_floor(-length * total, part) for length, part in drawn)
    elif num_samples == "undersample":
        num_samples = max(min(_floor(length * total, part) for length, part in drawn), 1)
    wanted = checked_positive("num_samples", num_samples)
    if wanted > LARGEST:
        raise ConfigError(f"num_samples should be at most 2**62, but got {wanted}.")
    return wanted


def _floor(numerator: int, denominator: int) -> int:
    # To a whole number that it only just misses: 0.3 and 0.1 are no binary fractions, so that
    # 30 / (0.3 / 0.4) is a little more than 40.
    nearest = (2 * numerator + denominator) // (2 * denominator)
    if abs(numerator - nearest * denominator) * _PRECISION <= abs(numerator):
        return nearest
    return numerator // denominator


def _largest_remainder(num_samples: int, parts: Sequence[int]) -> list[int]:
    """Return shares of `num_samples` in integers; of equal remainders, the first goes up first."""
    total = sum(parts)
    quotas = [num_samples * part // total for part in parts]
    remainders = [num_samples * part % total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda number: -remainders[number])
    for number in by_remainder[: num_samples - sum(quotas)]:
        quotas[number] += 1
    return quotas
