# SPDX-License-Identifier: Apache-2.0
"""How often a sampler shows each sample. Counted on a copy of it: the sampler stays as it was."""

from __future__ import annotations

import array
import copy
import itertools
import random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.data.dataset import is_current
from penstock.data.labels.known import is_iterable
from penstock.errors import ConfigError
from penstock.randomness.guarded import guarded_draws
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling.batches import BatchSampler
from penstock.sampling.distributed import DistributedSampler
from penstock.sampling.sampler_state import Resumable
from penstock.sampling.samplers import IndexSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["ShownTimes", "is_loader", "name_of", "parts_of", "sampler_in", "times_shown"]

_BLOCK: Final = 1 << 20  # indices counted at a time: no array of a whole order is made for it
_INNER: Final = ("sampler", "batch_sampler")
_LISTS: Final = (list, tuple, range, array.array)
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)


class ShownTimes(NamedTuple):
    """What some epochs showed.

    Attributes:
        times: How often each sample came in all of them together; int64 of shape (samples,).
        epochs: In how many of them it came; int64 of shape (samples,).
        most_repeats: How often the sample that came most in one epoch came in that one.
    """

    times: NDArray[np.int64]
    epochs: NDArray[np.int64]
    most_repeats: int


def times_shown(given: Any, num_samples: int, num_epochs: int) -> ShownTimes:  # noqa: ANN401
    """Count some epochs of a sampler, of indices or of a loader, from the one that it is in.

    Of what shares an epoch among ranks, the whole of it is counted. Samplers of others draw with
    the global generators seeded by the epoch, and those are put back.
    """
    sampler = sampler_in(given)
    if num_epochs > 1 and _is_indices(sampler):
        raise ConfigError(f"indices are one epoch, but got epochs={num_epochs}. Give the sampler.")
    twin = sampler if _is_indices(sampler) else _copied(sampler, {})
    seed = getattr(given, "seed", None) if is_loader(given) else None
    for part in parts_of(twin) if seed is not None else ():
        if isinstance(part, IndexSampler):
            part.take_seed(seed)
    # The innermost sampler that has an epoch is the one that draws.
    told = [part.epoch for part in parts_of(twin) if isinstance(getattr(part, "epoch", 0.5), int)]
    first = told[-1] if told else 0
    times, epochs = np.zeros((2, num_samples), np.int64)
    most = 0
    for epoch in range(first, first + num_epochs):
        for part in parts_of(twin) if epoch > first else ():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        shown = np.zeros(num_samples, np.int64)
        with guarded_draws(twin, seed_sequence(0, Purpose.ORDER, epoch)):
            for indices in _blocks_of(twin):
                _count(indices, shown)
        times += shown
        epochs += shown > 0
        most = max(most, int(shown.max(initial=0)))
    return ShownTimes(times, epochs, most)


def sampler_in(given: Any) -> Any:  # noqa: ANN401
    """Return what gives the indices: of a loader its batch sampler or its sampler.

    Raises:
        ConfigError: it is a loader of a stream, or a dataset. Nothing is read of it.
    """
    if is_loader(given):
        if is_iterable(given.dataset):
            raise ConfigError(
                f"{type(given).__name__} has a stream, {type(given.dataset).__name__}, and no "
                "sampler to count."
            )
        return given.sampler if given.batch_sampler is None else given.batch_sampler
    if hasattr(given, "__getitem__") and not _is_indices(given):
        raise ConfigError(
            f"balance_report counts what a sampler gives, but {type(given).__name__} has "
            "__getitem__, as datasets have. Give the sampler first: balance_report(sampler, "
            "dataset)."
        )
    return given


def is_loader(given: Any) -> bool:  # noqa: ANN401
    """Whether it has a dataset, a sampler and a way to make batches, as loaders have."""
    return all(hasattr(given, name) for name in ("dataset", *_INNER, "collate_fn"))


def parts_of(sampler: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield a sampler, the one inside it, the one inside that."""
    while sampler is not None:
        yield sampler
        sampler = next(
            (found for name in _INNER if (found := getattr(sampler, name, None)) is not None), None
        )


def name_of(sampler: Any) -> str:  # noqa: ANN401
    """Return its kind, and which ranks are counted where there are several."""
    if _is_indices(sampler):
        return "indices"
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        name += f" of {type(sampler.sampler).__name__}"
    for part in parts_of(sampler):
        if (ranks := getattr(part, "num_replicas", 1)) > 1:
            is_ours = isinstance(part, IndexSampler)
            return name + (f", all {ranks} ranks" if is_ours else f", rank {part.rank} of {ranks}")
    return name


def _is_indices(sampler: Any) -> bool:  # noqa: ANN401
    return isinstance(sampler, _LISTS) or hasattr(sampler, "__array__")


def _copied(sampler: Any, copies: dict[int, Any]) -> Any:  # noqa: ANN401
    """Return a copy, also of the samplers and generators in it, but of none of the data."""
    if id(sampler) in copies:
        return copies[id(sampler)]
    try:
        twin = copy.copy(sampler)
    except TypeError:  # as of an iterator: there is no way but to use it up
        return sampler
    copies[id(sampler)] = twin
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, Resumable) or (name in _INNER and value is not None):
            twin.__dict__[name] = _copied(value, copies)
        elif isinstance(value, _GENERATORS):
            twin.__dict__[name] = copy.deepcopy(value)
    if isinstance(twin, Resumable):
        twin.forget_state()
    if isinstance(twin, IndexSampler) and getattr(twin, "num_replicas", 1) > 1:
        twin.rank, twin.num_replicas = 0, 1
        if isinstance(twin, DistributedSampler):
            twin.pad = "none"
    return twin


def _blocks_of(sampler: Any) -> Iterator[NDArray[Any]]:  # noqa: ANN401
    """Yield the indices of an epoch, many at a time."""
    if isinstance(sampler, IndexSampler) and is_current(type(sampler), "indices", ("__iter__",)):
        order: Any = sampler.indices()
    elif hasattr(sampler, "__array__"):
        order = np.asarray(sampler)
    else:
        drawn = sampler.index_batches() if isinstance(sampler, BatchSampler) else iter(sampler)
        for first in drawn:  # looked at before the others
            indices = _as_indices(first)
            if indices.ndim == 0:
                yield _as_indices([first, *itertools.islice(drawn, _BLOCK - 1)])
            else:
                yield indices
        return
    for start in range(0, len(order), _BLOCK):
        yield _as_indices(order[start : start + _BLOCK])


def _as_indices(items: Any) -> NDArray[Any]:  # noqa: ANN401
    error = None
    try:
        found = np.asarray(items)
    except (TypeError, ValueError, RuntimeError) as raised:
        found, error = np.empty(1), raised
    if found.size and (found.ndim > 1 or found.dtype.kind not in "iu"):
        raise ConfigError(
            "balance_report counts integers, indices of samples, but the sampler gave a "
            f"{type(items).__name__} of {found.dtype}, shape {found.shape}."
        ) from error
    return found


def _count(indices: NDArray[Any], shown: NDArray[np.int64]) -> None:
    if not indices.size:
        return
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= len(shown):
        raise ConfigError(
            f"the sampler gave index {least if least < 0 else most}, but there are labels of "
            f"{len(shown)} samples: it was made for another data set."
        )
    np.add.at(shown, indices, 1)
