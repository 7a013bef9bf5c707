# SPDX-License-Identifier: Apache-2.0
"""A sampler over several datasets, each with a share of its own."""
# Nothing is stored. Of N = num_samples indices in epoch e, source s with n items has the quota q:
#
#     v          = Permutation(N, (seed, e))[k]      k: position in the epoch
#     s, j         such that v is number j of the q numbers of source s
#     rounds     = max(n // q, 1)                    as many whole epochs as fit into the source
#     p          = (e mod rounds) * q + j
#     index      = start of s + Permutation(n, (seed, s, e // rounds))[p mod n]
#
# So each source has rounds of whole epochs, each round with an order of its own. No sample comes
# twice in a round. n mod q samples do not come in it at all: others in each round, as its order is
# another. If q > n, a round is one epoch, and p begins again at 0 after n - 1.
#
# That is the order for constant shares. With a schedule, "once", or samplers as sources, draws are
# numbered through all epochs instead: draw d = e * N + k is number m of source s by the schedule
# (mixture_schedule.py), and sample m mod n of pass m // n of that source. ("once" numbers the draws
# of each epoch from 0.)
#
# Rejected: rounds that end within an epoch. If a new order begins only where a round and an epoch
# end together, it begins after n epochs when n and q have no common factor; until then, epochs that
# are n // q apart have nearly the same samples. If it begins within the epoch, samples from the end
# of the round before come again in the same epoch, though q < n.

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from penstock.data.dataset import length_of
from penstock.errors import ConfigError
from penstock.randomness.keys import Purpose, checked_count, seed_sequence
from penstock.sampling.class_balanced import check_alpha, class_shares
from penstock.sampling.class_items import grouped
from penstock.sampling.lanes import LaneBatchSampler
from penstock.sampling.mixture_schedule import (
    BLOCK,
    Knot,
    MixtureSchedule,
    bounds_of,
    largest_remainder,
    pieces_of,
    pieces_until_used_up,
)
from penstock.sampling.permutation import LARGEST, Permutation, replace_in_turn
from penstock.sampling.samplers import (
    ComputedOrder,
    CountedSampler,
    IndexSampler,
    as_weights,
    checked_positive,
    digest,
    stated,
)
from penstock.sampling.shards import lengths_in

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import TypeAlias, TypeGuard

    from numpy.typing import ArrayLike, NDArray

    from penstock.sampling.class_balanced import Alpha
    from penstock.sampling.samplers import Indices

    Weights: TypeAlias = ArrayLike | Mapping[Any, float]
    WeightSchedule: TypeAlias = Sequence[tuple[int, Weights] | tuple[int, int, Weights]]

_PRECISION: Final = 10**12  # as exact as ratios of decimal fractions in float64 are
_BLOCKS, _SAMPLES, _SOURCES = 1, 2, 3  # what a seed is of


class MixtureSampler(CountedSampler):
    """Indices into several datasets, the sources, in chosen shares.

    The indices are those of a `ConcatDataset` of the sources. In each epoch the counts are exact:
    `quotas`, the shares of `num_samples` by largest remainder. A source is shuffled once for as
    many whole epochs as fit into it, and no sample comes twice in these. A source with a quota
    above its length is shuffled in each epoch, in which the counts of its samples differ by at most
    one. The order of an epoch is shuffled as a whole.

    The shares may follow a schedule. Draws, which are indices, are then numbered over all ranks and
    epochs, and a sample is drawn again only after all others of its source. Draws come in blocks of
    1,024, counted from each jump, and from the beginning and the end of each ramp. A block has each
    source's share exactly, rounded down or up, and its order is random. `change` alters a schedule
    while it runs.

    Memory does not grow with the lengths of the sources. An index takes about 0.1 us, and each
    source up to 0.1 ms at the start of an epoch. With a schedule of 8 sources, an index takes about
    0.2 us. A rank computes whole blocks: on one of 64 ranks, each of its indices takes about 4 us.

    Attributes:
        names: Names of the sources: the keys of the mapping, or "0", "1" …
        lengths: Number of samples of each source, int64 (sources,). Do not write.
        num_samples: Indices in an epoch.

    Example:
        >>> sampler = MixtureSampler({"web": 1_000_000, "books": 50}, [3, 1], num_samples=200)
        >>> dict(zip(sampler.names, sampler.quotas.tolist()))
        {'web': 150, 'books': 50}
        >>> books = [index - 1_000_000 for index in sampler if index >= 1_000_000]
        >>> sorted(books) == list(range(50))
        True
        >>> weights = [(0, {"web": 3, "books": 1}), (2048, {"web": 1, "books": 1})]
        >>> scheduled = MixtureSampler({"web": 10**9, "books": 10**6}, weights, num_samples=1024)
        >>> for epoch in (0, 2):
        ...     scheduled.set_epoch(epoch)
        ...     print(scheduled.quotas)
        [768 256]
        [512 512]
    """

    def __init__(
        self,
        sources: Any,  # noqa: ANN401 - lengths, datasets, samplers, or a dataset of them
        weights: Weights | WeightSchedule | None = None,
        num_samples: int | Literal["oversample", "undersample", "once"] | None = None,
        seed: int | None = None,
        *,
        alpha: Alpha | None = None,
        tokens: Weights | None = None,
    ) -> None:
        """Set the sources and their shares.

        Args:
            sources: The datasets in the order of the `ConcatDataset`; or their lengths; or a dict
                of either, by name; or the `ConcatDataset`. No sample is read. A sampler of a
                dataset's indices, such as another `MixtureSampler`, or a `LaneBatchSampler`, may
                take the dataset's place: pass p has the order of the sampler's epoch p.
            weights: One per source, finite, not negative, not all 0; only their ratios count. By
                name if the sources are. 0 leaves a source out. None: the lengths. A schedule is a
                list of pairs `(draw, weights)`: the weights hold from that draw on. The first pair
                is at draw 0. A triple `(draw, until, weights)` is a ramp: the shares change in a
                straight line and reach those of `weights` at draw `until`.
            num_samples: Indices in an epoch. None: as many as there are samples. "oversample": the
                fewest that have all samples of each source whose weight is not 0. "undersample":
                the most in which no sample comes twice. (With a schedule or samplers, both are
                whole blocks of 1,024, and are right for the first epoch.) "once": every sample
                once. When a source is used up, the others share its draws. A schedule begins again
                in each epoch; a source that it leaves out from some draw on may come in part.
            seed: Decides the orders; None: that of the loader.
            alpha: Instead of weights, 0 to 2: shares are proportional to length ** (1 - alpha).
            tokens: Mean number of tokens in a sample, one per source, above 0, by name if the
                sources are. Weights are then shares of the tokens: the draws of a source are in
                proportion to weight / tokens.

        Raises:
            ConfigError: one of the above does not hold; or a source whose weight is not 0 is empty,
                or its share of `num_samples` is less than one, or below a millionth in a schedule.
        """
        super().__init__(seed)
        found = lengths_in(sources, "MixtureSampler", "source")
        self._samplers = _samplers_in(sources)
        lengths = [
            len(self._samplers[number]) if number in self._samplers else length
            for number, length in enumerate(found.values())
        ]
        self.names: tuple[Hashable, ...] = tuple(
            found if isinstance(sources, Mapping) else map(str, found)
        )
        self._seed_samplers()
        spans = [
            _span_of(self.names[number], self._samplers[number])
            if number in self._samplers
            else length
            for number, length in enumerate(lengths)
        ]
        self.source_length = sum(spans)
        self.lengths: NDArray[np.int64] = np.array(lengths, np.int64)
        self._spans = np.array(spans, np.int64)
        if alpha is not None:
            if weights is not None or tokens is not None:
                raise ConfigError(
                    f"give weights or alpha, not both, and tokens with weights, but got {alpha=}."
                )
            check_alpha(alpha)
            weights = np.zeros(len(lengths))
            some = np.flatnonzero(lengths)
            weights[some] = class_shares(np.array(lengths)[some], alpha)
        self._means = _means(tokens, self.names)
        self._schedule: MixtureSchedule | None = None
        self._changes: list[list[Any]] = []
        self._is_once = isinstance(num_samples, str) and num_samples == "once"
        is_plain = not (self._is_once or self._samplers)
        if is_plain and not _is_schedule(weights):
            parts = (
                lengths
                if weights is None
                else _parts(cast("Weights", weights), self.names, self._means)
            )
            self.num_samples = _epoch_length(num_samples, lengths, parts)
            self._quotas = self._checked_quotas(parts)
            self._shares = np.array([part / sum(parts) for part in parts])
            return
        self._knots = self._checked_knots(
            weights
            if _is_schedule(weights)
            else [(0, lengths if weights is None else cast("Weights", weights))]
        )
        pieces = pieces_of(self._knots)
        if self._is_once:
            pieces = pieces_until_used_up(pieces, self.lengths)
            num_samples = pieces[-1].start
        self._schedule = MixtureSchedule(pieces)
        self.num_samples = self._scheduled_length(num_samples)

    @property
    def quotas(self) -> NDArray[np.int64]:
        """Indices of each source in the current epoch, summing to `num_samples`, int64 (sources,).

        Do not write. Without a schedule, all epochs have the same.
        """
        if self._schedule is None:
            return self._quotas
        first = self._first_draw()
        key = self._key(_BLOCKS)
        after = self._schedule.counts(first + self.num_samples, key)
        return after - self._schedule.counts(first, key)

    @property
    def shares(self) -> NDArray[np.float64]:
        """The weights, or with a schedule the quotas, scaled to sum to 1, float64 (sources,)."""
        return self._shares if self._schedule is None else self.quotas / self.num_samples

    def change(self, at: int, weights: Weights, until: int | None = None) -> None:
        """Continue the schedule with other weights; its entries from draw `at` on are dropped.

        A state that is saved afterwards contains the change. A sampler that is made as this one was
        applies the change when it loads such a state. Call `change` on all ranks with the same
        arguments.

        Args:
            at: The draw from which the weights hold, numbered over all ranks and epochs. It is
                rounded up to the end of a block. If each epoch is a whole number of steps, step k
                begins at draw k * batch_size * ranks. A loader computes about 16,000 indices of its
                rank ahead; those draws can no longer change.
            weights: As those of a schedule.
            until: The end of a ramp that begins at draw `at`; None: the shares jump.

        Raises:
            ConfigError: the sampler has no schedule; or num_samples is "once"; or an argument is
                out of range; or draw `at` has been computed, in which case the message names the
                first that can still change.
        """
        if self._schedule is None or self._is_once:
            raise ConfigError(
                "only a schedule can change, and one whose epochs keep their length: give "
                "MixtureSampler weights=[(0, weights)], and num_samples other than 'once'."
            )
        at, least = checked_count("at", at), self._schedule.whole_blocks(self._schedule.num_drawn)
        if at < least:
            raise ConfigError(
                f"at should be {least} or more, but got {at=}: the order of the draws before that "
                "is decided, and some of them were made."
            )
        entry = (at, weights) if until is None else (at, until, weights)
        self._make_change(self._knot(entry, 0, "change"))

    def _make_change(self, knot: Knot) -> None:
        assert self._schedule is not None
        self._schedule.change(knot.start, knot.stop, np.array(knot.bounds))
        self._changes.append([knot.start, knot.stop, list(knot.bounds)])

    def adopt(self, settings: Mapping[str, Any], num_drawn: int) -> None:
        """Apply the changes that a saved state contains."""
        saved = settings.get("changes", [])
        if self._schedule is None or saved[: len(self._changes)] != self._changes:
            return  # the comparison of settings that follows names the difference
        for start, stop, bounds in saved[len(self._changes) :]:
            self._make_change(Knot(start, stop, tuple(bounds)))
        self._schedule.num_drawn = max(self._schedule.num_drawn, num_drawn)
        first = num_drawn // self.num_samples * self.num_samples if self._is_once else 0
        # To the end of the block: a change of theirs may begin later, but never too early.
        end = self._schedule.whole_blocks(num_drawn - first)
        counts = self._schedule.counts_before_block(end)
        for number, sampler in self._samplers.items():
            inner = settings.get("samplers", {}).get(str(number), {})
            sampler.adopt(inner, first // self.num_samples * len(sampler) + int(counts[number]))

    def take_seed(self, seed: int) -> None:
        """Take a loader's seed, unless the sampler has one; pass it on to inner samplers."""
        super().take_seed(seed)
        self._seed_samplers()

    def _seed_samplers(self) -> None:
        # Each with a seed of its own: two of one length would come in the same order.
        for number, sampler in self._samplers.items():
            words = seed_sequence(self.seed, Purpose.ORDER, _SOURCES, number).generate_state(2)
            sampler.take_seed(int(words[0]) << 32 | int(words[1]))

    def indices(self) -> Indices:
        """Return the order of the current epoch: an array, unless it is long or a schedule's."""
        if self._schedule is not None:
            return _ScheduledOrder(self)  # not stored: it may change
        return _MixtureOrder(self).stored()

    def settings(self) -> dict[str, Any]:
        """Return what the orders depend on; a digest in place of more than 64 numbers."""
        lengths = stated(self.lengths, 64)
        if self._schedule is None:
            return {**super().settings(), "lengths": lengths, "quotas": stated(self.quotas, 64)}
        knots = np.array([[*knot[:2], *knot.bounds] for knot in self._knots])
        samplers = {str(number): part.settings() for number, part in self._samplers.items()}
        return {
            **super().settings(),
            "lengths": lengths,
            "weights": digest(knots),
            "is_once": self._is_once,
            # Not a copy: a loader keeps these settings, and its states need later changes, too.
            "changes": self._changes,
            **({"samplers": samplers} if samplers else {}),
        }

    def _first_draw(self) -> int:
        return 0 if self._is_once else self.epoch * self.num_samples

    def _key(self, what: int) -> tuple[int, ...]:
        return (self.seed, self.epoch, what) if self._is_once else (self.seed, what)

    def _checked_quotas(self, parts: list[int]) -> NDArray[np.int64]:
        quotas, total = largest_remainder(self.num_samples, parts), sum(parts)
        for name, length, quota, part in zip(self.names, self.lengths, quotas, parts, strict=True):
            if part and not (length and quota):
                raise ConfigError(
                    f"source {name!r} would never be drawn: it has {length} samples, and its share "
                    f"of num_samples={self.num_samples} is {self.num_samples * part / total:.3g}. "
                    f"num_samples={-(-total // min(filter(None, parts)))} is enough for every "
                    "source with samples; weight 0 leaves one out."
                )
        return np.array(quotas, np.int64)

    def _checked_knots(self, entries: WeightSchedule) -> list[Knot]:
        knots: list[Knot] = []
        for number, entry in enumerate(entries):
            knots.append(self._knot(entry, knots[-1].stop if knots else 0, f"weights[{number}]"))
        if knots[0].stop:
            raise ConfigError(
                f"the schedule should begin with (0, weights), but begins with {entries[0]!r:.80}."
            )
        return knots

    def _knot(self, entry: Sequence[Any], least: int, which: str) -> Knot:
        *places, weights = entry
        start, stop = checked_count("start", places[0]), checked_count("until", places[-1])
        is_ramp = len(places) > 1
        if not least <= start <= stop - is_ramp < LARGEST:
            raise ConfigError(
                f"{which} should begin at draw {least} or later, and end after it begins, but is "
                f"{entry!r:.120}."
            )
        parts = _parts(weights, self.names, self._means)
        bounds = bounds_of(parts)
        for name, length, part, share in zip(
            self.names, self.lengths, parts, np.diff(bounds), strict=True
        ):
            if part and not (length and share):
                raise ConfigError(
                    f"source {name!r} would never be drawn: it has {length} samples, and a share "
                    f"of {part / sum(parts):.3g} in {which}; a share should be at least 1e-6. "
                    "Weight 0 leaves a source out."
                )
        return Knot(start, stop, tuple(bounds.tolist()))

    def _scheduled_length(self, num_samples: Any) -> int:  # noqa: ANN401
        if num_samples is None or not isinstance(num_samples, str):
            return _checked_length(
                sum(self.lengths.tolist()) if num_samples is None else num_samples
            )
        if num_samples not in ("oversample", "undersample"):
            return _checked_length(num_samples)
        schedule = self._schedule
        assert schedule is not None
        drawn = schedule.counts_before_block(LARGEST - 1) > 0

        def is_over(place: int) -> bool:
            left = (self.lengths - schedule.counts_before_block(place))[drawn]
            return bool((left < 0).any() if num_samples == "undersample" else (left <= 0).all())

        if not is_over(LARGEST - 1):
            raise ConfigError(
                "num_samples='oversample' would have no end: before all samples of a source have "
                "come, the schedule leaves it out for good. Give a number."
            )
        found = bisect.bisect(range(LARGEST - 1), False, key=is_over)  # the first draw of a block
        if num_samples == "undersample":
            found = schedule.block_of(found - 1)[0]
        if not found:
            raise ConfigError(
                f"num_samples='undersample' leaves nothing: the first {BLOCK} draws of the "
                f"schedule repeat a sample. Sources have {self.lengths.tolist()!r:.80} samples. "
                "Give a number, or 'once'."
            )
        return found


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


class _ScheduledOrder(ComputedOrder):
    """The order of one epoch of a schedule; not stored, because the schedule may change."""

    def __init__(self, sampler: MixtureSampler) -> None:
        super().__init__(sampler.num_samples)
        self._sampler = sampler
        self._first, self._epoch = sampler._first_draw(), sampler.epoch
        self._block_key, self._key = sampler._key(_BLOCKS), (sampler.seed, _SAMPLES)
        self._starts = np.cumsum(sampler._spans) - sampler._spans
        self._passes: dict[int, tuple[int, Indices]] = {}  # by source, its last pass

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        sampler = self._sampler
        schedule = sampler._schedule
        assert schedule is not None
        draws = positions + self._first
        if len(draws):
            schedule.num_drawn = max(schedule.num_drawn, int(draws.max()) + 1)
        sources, places = schedule.draws(draws, self._block_key)
        number_of_pass, places = np.divmod(places, sampler.lengths[sources])
        if sampler._is_once:
            number_of_pass += self._epoch
        by_source = grouped(sources, len(self._starts))
        stops = np.cumsum(np.bincount(sources, minlength=len(self._starts)))
        for source, here in enumerate(np.split(by_source, stops[:-1])):
            by_pass = here[np.argsort(number_of_pass[here], kind="stable")]
            numbers, firsts = np.unique(number_of_pass[by_pass], return_index=True)
            for number, which in zip(numbers.tolist(), np.split(by_pass, firsts[1:]), strict=False):
                places[which] = self._pass(source, number)[places[which]]
        return places + self._starts[sources]

    def _pass(self, source: int, number: int) -> Indices:
        if self._passes.get(source, (None,))[0] != number:
            self._passes[source] = number, self._order_of(source, number)
        return self._passes[source][1]

    def _order_of(self, source: int, number: int) -> Indices:
        sampler = self._sampler
        if source not in sampler._samplers:
            seed, what = self._key
            return Permutation(int(sampler.lengths[source]), (seed, source, number, what))
        inner = copy.copy(sampler._samplers[source])
        inner.set_epoch(number)
        return inner.indices()


def _samplers_in(sources: Any) -> dict[int, IndexSampler]:  # noqa: ANN401
    """Return the sources that are samplers, by number."""
    if hasattr(sources, "cumulative_sizes") or isinstance(sources, np.ndarray):
        return {}
    parts = sources.values() if isinstance(sources, Mapping) else sources
    found = {n: p.sampler if isinstance(p, LaneBatchSampler) else p for n, p in enumerate(parts)}
    for number, part in found.items():
        # Not a dataset, nor a length.
        is_sampler = hasattr(type(part), "__iter__") and not hasattr(type(part), "__getitem__")
        if is_sampler and not isinstance(part, IndexSampler):
            raise ConfigError(
                f"source {number} is a {type(part).__name__}. A source may be a dataset, a length, "
                "a LaneBatchSampler, or one of penstock.sampling's samplers of indices."
            )
    return {number: part for number, part in found.items() if isinstance(part, IndexSampler)}


def _span_of(name: Hashable, sampler: IndexSampler) -> int:
    """Return the length of the dataset that a sampler of a source is for."""
    length = sampler.source_length
    if length is None:
        length = length_of(getattr(sampler, "data_source", None))
    if length is None or sampler.world_size > 1:
        is_share = sampler.world_size > 1
        raise ConfigError(
            f"source {name!r} is a {type(sampler).__name__} "
            + ("that gives one rank's share" if is_share else "whose dataset is not known")
            + ". A sampler that is a source should give all indices of a dataset, as RandomSampler "
            "does, or LaneBatchSampler(..., num_replicas=1, rank=0). "
            "DistributedSampler(MixtureSampler(...)) deals them out to the ranks."
        )
    return length


def _is_schedule(weights: Any) -> TypeGuard[WeightSchedule]:  # noqa: ANN401
    return (
        isinstance(weights, (list, tuple))
        and len(weights) > 0
        and all(isinstance(entry, (list, tuple)) and len(entry) in (2, 3) for entry in weights)
    )


def _means(tokens: Weights | None, names: tuple[Hashable, ...]) -> list[Fraction] | None:
    if tokens is None:
        return None
    values = _of_sources("tokens", tokens, names)
    if not (values > 0).all():
        raise ConfigError(f"tokens should be above 0 for each source, but got {values}.")
    return [Fraction(value) for value in values.tolist()]


def _of_sources(what: str, given: Weights, names: tuple[Hashable, ...]) -> NDArray[np.float64]:
    """Return a finite number for each source, 0 or more."""
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ConfigError(f"{what} are for {list(given)}, the sources are {list(names)}.")
        given = [given[name] for name in names]
    values = as_weights(given)
    is_right = values.shape == (len(names),) and (np.isfinite(values) & (values >= 0)).all()
    if not (is_right and values.any()):
        raise ConfigError(
            f"{what} should be a finite number, 0 or more, for each of the "
            f"{len(names)} sources {list(names)!r:.80}, and not all 0, but got {values}."
        )
    return values


def _parts(
    weights: Weights, names: tuple[Hashable, ...], means: list[Fraction] | None
) -> list[int]:
    """Return integers of the same ratios as the weights over the means, without any rounding."""
    exact = [Fraction(value) for value in _of_sources("weights", weights, names).tolist()]
    if means is not None:
        exact = [weight / mean for weight, mean in zip(exact, means, strict=True)]
    common = math.lcm(*(part.denominator for part in exact))
    return [int(part * common) for part in exact]


def _epoch_length(num_samples: object, lengths: Sequence[int], parts: Sequence[int]) -> int:
    total, drawn = sum(parts), [pair for pair in zip(lengths, parts, strict=True) if pair[1]]
    if num_samples is None:
        num_samples = sum(lengths)
    elif num_samples == "oversample":  # the least N with N * part / total >= length, for all
        num_samples = max(-_floor(-length * total, part) for length, part in drawn)
    elif num_samples == "undersample":
        num_samples = max(min(_floor(length * total, part) for length, part in drawn), 1)
    return _checked_length(num_samples)


def _checked_length(num_samples: object) -> int:
    if isinstance(num_samples, str):
        raise ConfigError(
            "num_samples should be a number, 'oversample', 'undersample', 'once' or None, but got "
            f"num_samples={num_samples!r}."
        )
    wanted = checked_positive("num_samples", num_samples)
    if wanted > LARGEST:
        raise ConfigError(f"num_samples should be at most 2**62, but got {wanted}.")
    return wanted


def _floor(numerator: int, denominator: int) -> int:
    # A quotient within rounding error of a whole number is that number: 0.3 and 0.1 are not binary
    # fractions, so 30 / (0.3 / 0.4) is a little more than 40.
    nearest = (2 * numerator + denominator) // (2 * denominator)
    if abs(numerator - nearest * denominator) * _PRECISION <= abs(numerator):
        return nearest
    return numerator // denominator
