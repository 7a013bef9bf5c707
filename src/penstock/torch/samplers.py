# SPDX-License-Identifier: Apache-2.0
"""The orders of torch's samplers, drawn at the same moments, without a Python list of it all.

torch turns a permutation into a list before the first index is used: 36 bytes an index. Here it
stays an int64 array, cut into batches.

Guarantee: every generator, the global one too, is in the same state after the same number of steps
as with torch's own loader. Drawing earlier or later would change the random numbers that a user
draws between two batches.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from penstock import sampling
from penstock.engine.plan import mark_user_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

# Python integers made at a time: 4096 of them are 150 KB, and the cost per call is gone.
_CHUNK: Final = 4096
# Indices that torch's RandomSampler draws in one go, with replacement. Another number, other
# indices.
_DRAWS: Final = 32


class OrderSeed:
    """The number that torch's `RandomSampler` draws for an epoch's order; None until it is."""

    def __init__(self, value: int | None = None) -> None:
        """Keep a number that was drawn before, or the one that will be."""
        self.value = value

    def draw(self) -> int:
        """Return the number, drawn from torch's global generator if it is not known yet."""
        if self.value is None:
            self.value = int(torch.empty((), dtype=torch.int64).random_().item())
        return self.value


def _indices(chunks: Iterator[Any]) -> Iterator[object]:
    for chunk in chunks:
        for start in range(0, len(chunk), _CHUNK):
            part = chunk[start : start + _CHUNK]
            yield from part if isinstance(part, list) else part.tolist()


# Each of the functions below yields one sampler's indices in arrays, some of them empty. The draws
# stand where torch has them: between the last index of one list and the first of the next.


def _sequential_chunks(sampler: Any) -> Iterator[NDArray[np.int64]]:  # noqa: ANN401
    length = len(sampler.data_source)
    # Whole arrays would be 8 bytes an index for numbers that need none.
    starts = range(0, length, _CHUNK)
    return (np.arange(start, min(start + _CHUNK, length), dtype=np.int64) for start in starts)


def _random_chunks(
    sampler: Any,  # noqa: ANN401
    seed: OrderSeed | None = None,
) -> Iterator[NDArray[np.int64]]:
    length = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed((seed or OrderSeed()).draw())
    if sampler.replacement:
        for _ in range(sampler.num_samples // _DRAWS):
            yield torch.randint(length, (_DRAWS,), generator=generator).numpy()
        yield torch.randint(length, (sampler.num_samples % _DRAWS,), generator=generator).numpy()
    else:
        for _ in range(sampler.num_samples // length):
            yield torch.randperm(length, generator=generator).numpy()
        # Drawn even if nothing of it is needed, at the call for an index beyond the last.
        rest = torch.randperm(length, generator=generator)
        yield rest[: sampler.num_samples % length].numpy()


def _weighted_chunks(sampler: Any) -> Iterator[NDArray[np.int64]]:  # noqa: ANN401
    yield torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
    ).numpy()


def _subset_chunks(sampler: Any) -> Iterator[Any]:  # noqa: ANN401
    """One chunk: an array, or a list of what the sampler has instead of integers."""
    order = torch.randperm(len(sampler.indices), generator=sampler.generator)
    numbers = _as_int64(sampler.indices)
    if numbers is None:
        yield [sampler.indices[position] for position in order.tolist()]
    else:
        yield numbers[order.numpy()]


def _distributed_chunks(sampler: Any) -> Iterator[NDArray[np.int64]]:  # noqa: ANN401
    length, total = len(sampler.dataset), sampler.total_size
    # The sizes were fixed at construction: a dataset that has since changed may not fit them.
    if length < total if sampler.drop_last else (length > total or (length == 0 < total)):
        raise AssertionError(
            f"Number of indices ({length}) does not match total_size ({total}): the dataset has "
            "changed its length since the sampler was made. Make a new sampler."
        )
    if sampler.shuffle:
        generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(length, generator=generator).numpy()
    else:
        order = np.arange(length, dtype=np.int64)
    # Position p of the padded order is order[p % length]; with drop_last none is that far.
    turns = np.arange(sampler.rank, total, sampler.num_replicas, dtype=np.int64)
    return iter([order[turns % max(length, 1)]])


_CHUNKS: Final[dict[type, Callable[[Any], Iterator[NDArray[np.int64]]]]] = {
    SequentialSampler: _sequential_chunks,
    RandomSampler: _random_chunks,
    WeightedRandomSampler: _weighted_chunks,
    SubsetRandomSampler: _subset_chunks,
    DistributedSampler: _distributed_chunks,
}
STOCK_SAMPLERS: Final = frozenset(_CHUNKS)


def _chunks_of(sampler: Any, seed: OrderSeed | None) -> Iterator[NDArray[np.int64]]:  # noqa: ANN401
    chunks = _CHUNKS[type(sampler)]
    return chunks(sampler) if chunks is not _random_chunks else _random_chunks(sampler, seed)


def stock_indices(sampler: Any, seed: OrderSeed | None = None) -> Iterator[object]:  # noqa: ANN401
    """Return an iterator over the indices of one of `STOCK_SAMPLERS`, as `iter(sampler)` does."""
    return _indices(_chunks_of(sampler, seed))


def index_batches(
    batch_sampler: Any,  # noqa: ANN401 - any iterable
    seed: OrderSeed | None = None,
) -> Iterator[object]:
    """Return an iterator over a batch sampler's batches, as int64 arrays where its order is known.

    That is: a plain `BatchSampler` over one of `STOCK_SAMPLERS`. All other iterables are iterated,
    arrays of theirs as `UserArray`. Either way every generator is used at the same moments as by
    torch. `seed` is where that of a `RandomSampler`'s order is kept, or to be taken from.

    Example:
        >>> batch_sampler = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=False)
        >>> list(index_batches(batch_sampler))
        [array([0, 1]), array([2, 3]), array([4])]
    """
    is_stock = type(batch_sampler) is BatchSampler
    if not is_stock or type(batch_sampler.sampler) not in STOCK_SAMPLERS:
        return map(mark_user_array, batch_sampler)  # asked for an iterator once, as by torch
    chunks = _chunks_of(batch_sampler.sampler, seed)
    return _split(chunks, batch_sampler.batch_size, drop_last=batch_sampler.drop_last)


def _as_int64(indices: Any) -> NDArray[np.int64] | None:  # noqa: ANN401
    """A list of Python's own integers as an array."""
    is_range = isinstance(indices, range)
    if is_range or (isinstance(indices, (list, tuple)) and {int}.issuperset(map(type, indices))):
        with contextlib.suppress(OverflowError):
            return np.array(indices, np.int64)
    return None


def _split(
    chunks: Iterator[NDArray[np.int64]], batch_size: int, *, drop_last: bool
) -> Iterator[NDArray[np.int64]]:
    """Batches of `batch_size`; a chunk is drawn only when the last does not suffice."""
    parts: list[NDArray[np.int64]] = []
    missing = batch_size
    for chunk in chunks:
        start = 0
        while start < len(chunk):
            part = chunk[start : start + missing]
            parts.append(part)
            start += len(part)
            missing -= len(part)
            if missing == 0:
                yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                parts, missing = [], batch_size
    if parts and not drop_last:
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def seeded_sampler(sampler: Any, seed: int) -> Any:  # noqa: ANN401 - any sampler, or its like
    """Return the sampler of the core that orders as one of torch's own classes, by (seed, epoch).

    Anything else is returned as it is: subclasses may order as they like.
    """
    kind = type(sampler)
    if kind is BatchSampler:
        inner = seeded_sampler(sampler.sampler, seed)
        return sampling.BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    if kind is SequentialSampler:
        return sampling.SequentialSampler(sampler.data_source)
    if kind is RandomSampler:
        source, number = sampler.data_source, sampler._num_samples
        return sampling.RandomSampler(source, sampler.replacement, number, seed)
    if kind is WeightedRandomSampler:
        weights = sampler.weights.detach().cpu().numpy()
        return sampling.WeightedRandomSampler(
            weights, sampler.num_samples, sampler.replacement, seed
        )
    if kind is SubsetRandomSampler and (subset := _as_int64(sampler.indices)) is not None:
        return sampling.SubsetRandomSampler(subset, seed)
    if kind is DistributedSampler:
        return _TorchShare(sampler)
    return sampler


class _TorchShare(sampling.IndexSampler):
    """The orders of torch's `DistributedSampler`, which are decided by its own seed and epoch."""

    def __init__(self, sampler: Any) -> None:  # noqa: ANN401
        super().__init__(sampler.seed)
        self._sampler = sampler
        self.rank = sampler.rank
        self.num_replicas = sampler.num_replicas
        self.epoch = sampler.epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._sampler.set_epoch(epoch)

    @property
    def total_size(self) -> int:
        size: int = self._sampler.total_size
        return size

    def indices(self) -> NDArray[np.int64]:
        return next(_distributed_chunks(self._sampler))

    def settings(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            "kind": "DistributedSampler",
            "length": len(sampler.dataset),
            "seed": self.seed,
            "shuffle": sampler.shuffle,
            "drop_last": sampler.drop_last,
        }
