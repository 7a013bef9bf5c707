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
        epochs: In how many of them it came; int32 of shape (samples,).
        most_repeats: How often the sample that came most in one epoch came in that one.
    """

    times: NDArray[np.int64]
    epochs: NDArray[np.int32]
    most_repeats: int


def times_shown(sampler: Any, num_samples: int, num_epochs: int) -> ShownTimes:  # noqa: ANN401
    """Count some epochs, from the one that the sampler is in.

    Of what shares an epoch among ranks, the whole of it is counted. Samplers of others draw with
    the global generators seeded by the epoch, and those are put back.

    Args:
        sampler: Of indices, or of batches of them; or the indices themselves.
        num_samples: Of the data set.
        num_epochs: At least 1.

    Raises:
        ConfigError: it yields no indices of such samples, or is indices and has one epoch.
    """
    if num_epochs > 1 and _is_indices(sampler):
        raise ConfigError(f"indices are one epoch, but got epochs={num_epochs}. Give the sampler.")
    twin = sampler if _is_indices(sampler) else _copied(sampler, {})
    first = _epoch_of(twin)
    times = _shown_in(twin, first, num_samples)
    epochs, most = (times > 0).astype(np.int32), int(times.max(initial=0))
    for epoch in range(first + 1, first + num_epochs):
        _tell(twin, epoch)
        shown = _shown_in(twin, epoch, num_samples)
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
        _give_all_ranks(twin)
    return twin


def _give_all_ranks(sampler: Any) -> None:  # noqa: ANN401
    sampler.rank, sampler.num_replicas = 0, 1
    if isinstance(sampler, DistributedSampler):
        sampler.pad = "none"


def _epoch_of(sampler: Any) -> int:  # noqa: ANN401
    """Return the epoch of the innermost sampler that has one: it is the one that draws."""
    epochs = [getattr(part, "epoch", None) for part in parts_of(sampler)]
    return next((epoch for epoch in reversed(epochs) if isinstance(epoch, int)), 0)


def _tell(sampler: Any, epoch: int) -> None:  # noqa: ANN401
    for part in parts_of(sampler):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _shown_in(sampler: Any, epoch: int, num_samples: int) -> NDArray[np.int64]:  # noqa: ANN401
    """Return how often each sample comes in the sampler's current epoch."""
    shown = np.zeros(num_samples, np.int64)
    if _is_ours(sampler):
        _count(_pieces(sampler.indices()), shown)
    elif hasattr(sampler, "__array__"):
        _count(_pieces(np.asarray(sampler)), shown)
    else:
        with guarded_draws(sampler, seed_sequence(0, Purpose.ORDER, epoch)):
            _count(_drawn(sampler), shown)
    return shown


def _is_ours(sampler: Any) -> bool:  # noqa: ANN401
    kind = type(sampler)
    return isinstance(sampler, IndexSampler) and is_current(kind, "indices", ("__iter__",))


def _pieces(order: Any) -> Iterator[NDArray[Any]]:  # noqa: ANN401
    for start in range(0, len(order), _BLOCK):
        yield order[start : start + _BLOCK]


def _drawn(sampler: Any) -> Iterator[NDArray[Any]]:  # noqa: ANN401
    """Yield what iterating yields, many at a time; the first is looked at before the others."""
    drawn = sampler.index_batches() if isinstance(sampler, BatchSampler) else iter(sampler)
    for first in drawn:
        _check_drawn(first)
        if np.ndim(first) == 0:
            yield np.asarray([first, *itertools.islice(drawn, _BLOCK - 1)])
            continue
        batches = [first, *itertools.islice(drawn, _BLOCK // max(len(first), 1))]
        filled = [batch for batch in batches if len(batch)]  # an empty list were one of floats
        yield np.concatenate(filled) if filled else np.empty(0, np.int64)


def _check_drawn(item: Any) -> None:  # noqa: ANN401
    try:
        found = np.asarray(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_indices(f"a {type(item).__name__}") from error
    is_empty_batch = found.shape == (0,)
    if found.ndim > 1 or (found.dtype.kind not in "iu" and not is_empty_batch):
        raise _no_indices(f"a {type(item).__name__}")


def _no_indices(what: str) -> ConfigError:
    return ConfigError(
        f"balance_report counts integers, indices of samples, but the sampler gave {what}."
    )


def _count(parts: Iterator[NDArray[Any]], shown: NDArray[np.int64]) -> None:
    for part in parts:
        if not part.size:
            continue
        if part.ndim != 1 or part.dtype.kind not in "iu":
            raise _no_indices(f"an array of {part.dtype}, shape {part.shape}")
        _check_range(int(part.min()), int(part.max()), len(shown))
        np.add.at(shown, part, 1)


def _check_range(least: int, most: int, num_samples: int) -> None:
    if least < 0 or most >= num_samples:
        raise ConfigError(
            f"the sampler gave index {least if least < 0 else most}, but there are labels of "
            f"{num_samples} samples: it was made for another data set."
        )
