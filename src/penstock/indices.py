# SPDX-License-Identifier: Apache-2.0
"""The sources of a loader's indices, epoch by epoch, and what their order depends on."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from penstock.data.dataset import follows_epochs, is_current, length_of
from penstock.distributed import Rank, current_rank
from penstock.engine.plan import BatchIndices, mark_user_array
from penstock.errors import ConfigError
from penstock.randomness.generators import GuardedIterator, guarded_draws
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling import BatchSampler, DistributedSampler, IndexSampler, Sampler
from penstock.sampling.samplers import BatchLayout, batches_of, digest
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.engine.plan import Progress

_SKIPPED_AT_A_TIME: Final = 1024
_MOST_PARTS: Final = 16  # of one sampler: those that people write have 2 to 4
_COVERING: Final = ("SequentialSampler", "RandomSampler", "DistributedSampler")
_KNOWN_PACKAGES: Final = ("penstock.", "torch.utils.data")
# Those of torch and Penstock, of mmengine, and of Accelerate.
_NAMES_OF_RANKS: Final = (
    ("rank", "num_replicas"), ("rank", "world_size"), ("process_index", "num_processes"),
)  # fmt: skip


Description: TypeAlias = tuple[dict[str, Any], Callable[[int | None, int], int | None]]
"""What an order depends on: its settings, as plain data for JSON; and a function that returns how
many samples the first batches of an epoch hold, over all ranks (None if not known), given the
number of the epoch (None: the sampler's own) and that of the batches."""


class IndexSource:
    """Gives the indices of a loader's next epoch.

    Attributes:
        base_seed: Of the workers, once `begin` was called; 0 where a seed decides it.
    """

    base_seed = 0

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return the indices of an epoch's batches, from batch `progress.given.num_steps` on."""
        raise NotImplementedError

    def describe(self) -> Description:
        """Return what the order depends on, besides the loader's seed."""
        raise NotImplementedError

    def adopt(self, settings: dict[str, Any], epoch: int, num_samples: int | None) -> None:
        """Let the sampler change as it had before a state was saved, whose settings these are.

        `num_samples` samples of the epoch had been given by then, over all ranks; None: not known.
        """

    def notified_epoch(self) -> tuple[int, int | None] | None:
        """Return the epoch that the sampler was notified of last, and the number of notifications.

        The number is None if the sampler does not count them; all is None if it does not matter.
        """
        return None

    def draws(self) -> Any:  # noqa: ANN401 - the loader's own
        """Return what the draws of the next epoch depend on; None if the seed decides them."""
        return None


class SeededIndices(IndexSource):
    """The indices of a seeded loader; each epoch's depend on no other epoch.

    An `IndexSampler` gives its order by position, so beginning at batch k costs the same for every
    k. Any other sampler is iterated from the start, with the global generators seeded from
    (seed, epoch) while it draws, and put back after.
    """

    def __init__(
        self,
        sampler: Any,  # noqa: ANN401
        batch_sampler: Any,  # noqa: ANN401
        seed: int,
        given: tuple[Any, ...] = (),
    ) -> None:
        """Find out how the samplers can be read; without a batch sampler samples come one by one.

        `given` are the user's samplers, where those stand for them.
        """
        self._given = with_inner(*given) or with_inner(sampler, batch_sampler)
        self._outer = sampler if batch_sampler is None else batch_sampler
        self._is_batched = batch_sampler is not None
        self._parts = with_inner(sampler, batch_sampler)
        self._seed = seed
        self._order: IndexSampler | None = None
        self._batch_size: int | None = None
        self._drop_last = False
        self._described = self._outer
        self._batches: BatchSampler | None = None
        inner = sampler
        if isinstance(batch_sampler, BatchSampler) and is_current(
            type(batch_sampler), "index_batches", ("__iter__",)
        ):
            inner = batch_sampler.sampler
            self._batches = batch_sampler
            self._batch_size = batch_sampler.batch_size
            self._drop_last = batch_sampler.drop_last
            self._described = inner
        elif batch_sampler is not None:
            return
        if isinstance(inner, IndexSampler) and is_current(type(inner), "indices", ("__iter__",)):
            self._order = inner

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Return an epoch's indices as `BatchIndices`, from batch `progress.given.num_steps` on."""
        # The order is decided now, not when the first index is asked for: by then the sampler may
        # have been notified of another epoch.
        sequence = seed_sequence(self._seed, Purpose.ORDER, epoch)
        tell_seed(self._seed, *self._parts)
        with guarded_draws(self._outer, sequence):
            tell_epoch(epoch, *self._parts)
        if self._order is not None:
            return self._by_position(progress.given.num_steps)
        drawn = GuardedIterator(self._outer, sequence)
        first = drawn.take(1)
        return self._one_by_one(first, drawn, progress.given.num_steps)

    def foresee(self, epoch: int) -> Iterator[object] | None:
        """Return an epoch's indices without notifying a sampler; None if that is impossible."""
        # Batches of different sizes are left out: planning them twice costs more than it saves.
        is_even = self._batches is None or self._batches.is_even
        return self.known(epoch, 0) if is_even else None

    def known(self, epoch: int, first: int) -> Iterator[object] | None:
        """Return an epoch's indices from batch `first` on, as `foresee` does."""
        # It is possible with Penstock's own samplers, whose order is a function of the epoch's
        # number.
        parts = with_inner(self._outer)
        if self._order is None or not all(
            type(part).__module__.startswith("penstock.") for part in parts
        ):
            return None
        with _in_epoch(parts, epoch, self._seed):
            return self._by_position(first)

    def _layout(self) -> BatchLayout:
        """Where the batches of the sampler's epoch lie; a sample by itself is a batch of one."""
        assert self._order is not None
        if self._batches is not None:
            return self._batches.layout()
        ranks = self._order.world_size
        return BatchLayout(self._order.rank, ranks, ranks)

    def _by_position(self, first: int) -> Iterator[object]:
        """Return the batches from number `first` on, in the sampler's epoch at this moment."""
        assert self._order is not None
        layout = self._layout()
        if self._batches is None:
            batches = batches_of(self._order.indices(), 1, False, first)
        else:
            batches = self._batches._ordered(layout, first)
        return (
            BatchIndices(
                int(batch[0]) if self._batch_size is None else batch,
                layout.first + step * layout.per_batch,
                layout.stride,
            )
            for step, batch in enumerate(batches, first)
        )

    def _one_by_one(
        self, first: list[Any], drawn: GuardedIterator, num_skipped: int
    ) -> Iterator[object]:
        rank, world_size = self._rank()
        position = rank
        step = 0
        while first:
            for indices in first:
                if step >= num_skipped:
                    yield BatchIndices(mark_user_array(indices), position, world_size)
                count = length_of(indices) if self._is_batched else 1
                position += (1 if count is None else count) * world_size
                step += 1
            # What is skipped is drawn many at a time: exchanging the generators takes 0.2 ms.
            first = drawn.take(min(max(num_skipped - step, 1), _SKIPPED_AT_A_TIME))

    def _rank(self) -> tuple[int, int]:
        """Return which share of a global order an unknown sampler yields: rank and world size."""
        for part in with_inner(self._outer):  # and not the sampler that a batch sampler displaces
            if isinstance(part, IndexSampler) and not _is_share(part):
                continue
            for names in _NAMES_OF_RANKS:
                rank, world_size = (getattr(part, name, None) for name in names)
                if isinstance(rank, int) and isinstance(world_size, int):
                    return rank, world_size
        if current_rank().world_size > 1:
            warnings.warn(
                f"{type(self._outer).__name__} does not say which rank's share it yields, so all "
                "ranks draw the same random numbers. Give it attributes `rank` and `num_replicas`, "
                "or wrap one that yields all in penstock.sampling.DistributedSampler.",
                stacklevel=2,
            )
        return 0, 1

    def describe(self) -> Description:
        """Return what the order depends on besides the loader's seed."""
        tell_seed(self._seed, *self._parts)
        size = self._batch_size
        world_size = 1 if self._order is None else self._order.world_size
        settings: dict[str, Any] = {"sampler": _kinds(self._described)}
        if not self._is_batched or size is not None:
            settings["global_batch_size"] = (size or 1) * world_size
            settings["drop_last"] = self._drop_last
        return settings, self._samples_in

    def adopt(self, settings: dict[str, Any], epoch: int, num_samples: int | None) -> None:
        """Let an `IndexSampler`, inside others perhaps, change as it had before."""
        sampler, saved = self._described, settings.get("sampler")
        while isinstance(saved, dict) and not isinstance(sampler, IndexSampler):
            inner = inner_of(sampler)  # as `_kinds` goes down, to where the state ends
            sampler, saved = (inner or [None])[-1], saved.get("of")
        has_length = length_of(sampler) is not None
        if isinstance(sampler, IndexSampler) and isinstance(saved, dict) and has_length:
            size = sampler.total_size
            sampler.adopt(saved, epoch * size + (size if num_samples is None else num_samples))

    def _samples_in(self, epoch: int | None, num_batches: int) -> int | None:
        if self._order is None or length_of(self._order) is None:
            return None
        ranks = self._order.world_size
        if (offsets := self._offsets_of(epoch)) is not None:
            return int(offsets[min(num_batches, len(offsets) - 1)]) * ranks
        all_batches = num_batches * (self._batch_size or 1) * ranks
        return min(all_batches, self._order.total_size)

    def _offsets_of(self, epoch: int | None) -> NDArray[np.int64] | None:
        """Where the batches of an epoch begin, whatever epoch the sampler is in."""
        if self._order is None or self._batches is None or self._batches.is_even:
            return None
        epoch = self._order.epoch if epoch is None else epoch
        with _in_epoch([self._order], epoch, self._seed):
            return self._layout().offsets

    def notified_epoch(self) -> tuple[int, int | None] | None:
        """Return the epoch that the innermost sampler was notified of, if it says so."""
        for part in reversed(self._given):
            epoch = getattr(part, "epoch", None)
            if isinstance(epoch, int) and callable(getattr(part, "set_epoch", None)):
                return epoch, getattr(part, "times_notified", None)
        return None


@contextlib.contextmanager
def _in_epoch(samplers: Sequence[Any], epoch: int, seed: int) -> Iterator[None]:
    """Put Penstock's samplers into another epoch for the block; no notification counts."""
    orders = [sampler for sampler in samplers if isinstance(sampler, IndexSampler)]
    before = [(order.epoch, order.times_notified) for order in orders]
    try:
        for order in orders:
            order.take_seed(seed)  # another loader may have used it in between
            order.set_epoch(epoch)
        yield
    finally:
        for order, (now, times) in zip(orders, before, strict=True):
            order.set_epoch(now)
            order.times_notified = times


def with_inner(*samplers: Any) -> list[Any]:  # noqa: ANN401
    """Return samplers, and what they are made of, each once, from the outside in.

    What cannot be iterated is no sampler, and is left out.
    """
    found: list[Any] = []
    waiting = [sampler for sampler in samplers if _is_iterable(sampler)]
    while waiting and len(found) < _MOST_PARTS:
        part = waiting.pop(0)
        if any(part is known for known in found):
            continue
        found.append(part)
        waiting += inner_of(part)
    return found


def inner_of(sampler: Any) -> list[Any]:  # noqa: ANN401
    """Return the samplers that a sampler is made of: its `batch_sampler` and its `sampler`."""
    # Its own attributes may be of any kind. Where `__getattr__` answers for them, only torch's and
    # Penstock's samplers are accepted: a mock has an attribute of any name.
    found, owners = [], (sampler, *type(sampler).__mro__)
    for name in ("batch_sampler", "sampler"):
        is_own = any(name in getattr(owner, "__dict__", ()) for owner in owners)
        inner = getattr(sampler, name, None) if is_own or _is_iterable(sampler) else None
        is_sampler = any(base.__name__ == "Sampler" for base in type(inner).__mro__)
        if inner is not None and (is_own or is_sampler):
            found.append(inner)
    return found


def _is_iterable(value: object) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")


def covers(dataset: object, *samplers: Any) -> bool:  # noqa: ANN401
    """Return whether samplers are known to draw from all of `dataset`, each sample as likely."""
    # Only the common ones are known: an unknown one may keep to a part of the data set, of which no
    # other sample must get into the batches.
    inner = [part for part in with_inner(*samplers) if not inner_of(part)]
    return bool(inner) and all(
        type(part).__name__ in _COVERING
        and type(part).__module__.startswith(_KNOWN_PACKAGES)
        and any(getattr(part, name, None) is dataset for name in ("data_source", "dataset"))
        for part in inner
    )


def check_samplers(
    dataset: object,
    sampler: Any,  # noqa: ANN401
    batch_sampler: Any,  # noqa: ANN401
    batch_size: int | None,
) -> None:
    """Compare the samplers that a user gave to a loader with its dataset, and with the ranks."""
    if batch_size is not None and isinstance(sampler, BatchSampler):
        kind = type(sampler).__name__
        raise ConfigError(
            f"{kind} gives batches: give it as batch_sampler={kind}(...), alone; or with "
            "batch_size=None to a dataset that takes a list of indices for one."
        )
    parts = with_inner(sampler, batch_sampler)
    _check_dealt_once(parts, dataset)
    orders = [part for part in parts if isinstance(part, IndexSampler)]
    if not orders:
        return
    _check_length(orders[0], length_of(dataset))
    _check_ranks(orders, next(part for part in (batch_sampler, sampler) if part is not None))


def _check_dealt_once(parts: list[Any], dataset: object) -> None:
    for part in parts:
        ranks = getattr(part, "num_replicas", None)
        if isinstance(part, (IndexSampler, BatchSampler)) or not isinstance(ranks, int):
            continue
        kind = type(part).__name__
        if kind == "DistributedSampler" and isinstance(getattr(part, "dataset", None), Sampler):
            raise ConfigError(
                f"torch's {kind} takes a dataset, but got a {type(part.dataset).__name__}: it "
                "deals out its positions, not its indices. penstock.sampling.DistributedSampler "
                "deals out the order of any sampler."
            )
        for inner in _held_by(part, dataset) if ranks > 1 else ():
            if isinstance(inner, IndexSampler) and inner.world_size > 1:
                raise ConfigError(
                    f"{type(inner).__name__} gives this rank its share of {inner.world_size} "
                    f"already, and {kind} would deal that share out once more. Leave one of the "
                    "two out. A client that adds one of its own has an option for it: Lightning's "
                    "`Trainer` use_distributed_sampler=False, and so Fabric's setup_dataloaders"
                )


def _held_by(sampler: object, dataset: object) -> list[Any]:
    """Return the attributes of a foreign sampler, and theirs: some hold samplers in datasets."""
    own = [held for held in getattr(sampler, "__dict__", {}).values() if held is not dataset]
    return own + [part for held in own for part in getattr(held, "__dict__", {}).values()]


def _check_length(order: IndexSampler, length: int | None) -> None:
    made_for = order.source_length
    if made_for is None or length is None or made_for == length:
        return
    # Not the class: the order inside a sampler of batches is a class that no user knows.
    kind = order.settings().get("kind", type(order).__name__)
    found = f"{kind} was made for a dataset of {made_for} samples, but this one has {length}"
    advice = "Make it from the very dataset that the loader gets, a Subset of it perhaps"
    if made_for > length:
        raise ConfigError(f"{found}: some indices are not there. {advice}.")
    warn_user(f"{found}: the rest never comes. {advice}.")


def _is_share(order: IndexSampler) -> bool:
    return order.world_size > 1 or isinstance(order, DistributedSampler)


def _check_ranks(orders: list[IndexSampler], given: object) -> None:
    ranks = current_rank()
    if ranks.world_size == 1 or any(map(_is_share, orders)):
        return
    warn_user(
        f"this is rank {ranks.rank} of {ranks.world_size}, and {type(given).__name__} gives the "
        "same indices to all of them. Wrap the sampler in penstock.sampling.DistributedSampler, or "
        "give a batch sampler num_replicas= and rank=. Where ranks are to have the same data, "
        "DistributedSampler(sampler, 1, 0) says so. What prepare() of penstock.integrations."
        "accelerate, or PenstockTrainer, is given needs neither: they deal the batches out.",
    )


def tell_epoch(epoch: int, *samplers: Any) -> None:  # noqa: ANN401
    """Notify samplers, and those that they are made of, of the epoch, if they have `set_epoch`."""
    for part in with_inner(*samplers):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def tell_seed(seed: int, *samplers: Any) -> None:  # noqa: ANN401
    """Give a loader's seed to samplers, and those that they are made of, without their own."""
    for part in with_inner(*samplers):
        if isinstance(part, IndexSampler):
            part.take_seed(seed)


def _kinds(sampler: Any, depth: int = 1) -> dict[str, Any]:  # noqa: ANN401
    """Return a sampler's `settings`; else its kind, its length and those that it is made of."""
    if isinstance(sampler, IndexSampler):
        return sampler.settings()
    settings: dict[str, Any] = {"kind": type(sampler).__name__, "length": length_of(sampler)}
    if isinstance(sampler, (list, tuple, range, np.ndarray)):
        settings["indices"] = _digest_of(sampler)
    for name in ("batch_size", "drop_last"):
        if isinstance(value := getattr(sampler, name, None), int):
            settings[name] = value
    inner = inner_of(sampler) if depth < _MOST_PARTS else []
    return {**settings, "of": _kinds(inner[-1], depth + 1)} if inner else settings


def _digest_of(indices: Any) -> str:  # noqa: ANN401 - a sequence
    try:
        return digest(np.asarray(indices, np.int64))
    except (TypeError, ValueError, OverflowError):  # keys, or batches of different lengths
        return digest(np.frombuffer(repr(indices).encode(), np.uint8))


class StreamSource(IndexSource):
    """Stands for the indices of an iterable dataset, of which only the numbers count."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        batch_size: int | None,
        *,
        drop_last: bool,
        num_workers: int,
        rank: Rank,
    ) -> None:
        """Note what the shards of the workers depend on."""
        self._batch_size = batch_size
        own = {"dataset": dataset.settings()} if follows_epochs(dataset) else {}
        self._settings = {
            **own,
            "batch_size": batch_size,
            "drop_last": drop_last,
            "num_workers": max(num_workers, 1),
            "rank": rank.rank,
            "world_size": rank.world_size,
        }

    def begin(self, epoch: int, progress: Progress) -> Iterator[object]:
        """Yield empty batches of `batch_size` indefinitely."""
        return itertools.repeat(None if self._batch_size is None else [None] * self._batch_size)

    def describe(self) -> Description:
        """Return what the shards of the workers depend on."""
        # The last batch of each worker may be shorter, so the number of samples is not known.
        return self._settings, lambda epoch, num_batches: None
