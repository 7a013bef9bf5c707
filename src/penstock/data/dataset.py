# SPDX-License-Identifier: Apache-2.0
"""Datasets, what reads a whole batch of one at once, and each worker's shard of a stream."""
# A map-style dataset gives samples by index (`__getitem__`), an iterable one gives them in turn
# (`__iter__`). A map-style dataset may also offer
#
# - `__getitems__(indices)`: a list of samples for a list of indices;
# - `get_batch(indices, alloc)`: the batch itself, already collated; and, where that is not always
#   possible, a property `can_get_batch`, asked before the first batch of an epoch.
#
# `get_batch` must equal collating the samples. A subclass that changes the samples and has
# no `get_batch` of its own would break that, so `batch_reader` looks at which class defines what.

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar

import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.samples import end_prologue, one_sample
from penstock.summary import Summarized
from penstock.worker_info import current_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike, NDArray

T_co = TypeVar("T_co", covariant=True)


class Allocator(Protocol):
    """Gives memory for the arrays of a batch; `numpy.empty` is one."""

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return a writable, C-contiguous array of any content; it may lie in shared memory."""


BatchReader = Callable[["NDArray[np.int64]", Allocator], object]
"""`(indices, alloc)` -> batch tree; `indices` is int64, shape (batch,), negative from the end."""


class Dataset(Summarized, Generic[T_co]):
    """A map from indices, or other keys, to samples.

    Subclasses define `__getitem__`, and `__len__` where samplers are to number the samples. A
    sample is any tree of arrays, numbers, strings, bytes. `a + b` is one dataset after the other.

    Concurrency:
        A copy goes to each worker, so it must pickle, unless workers are forked.

    Example:
        >>> class Squares(Dataset[int]):
        ...     def __getitem__(self, index: int) -> int:
        ...         return index * index
        ...
        ...     def __len__(self) -> int:
        ...         return 10
        >>> Squares()[3], len(Squares() + Squares())
        (9, 20)
    """

    # Neither `__len__` nor `__getitems__` has a default here: both are looked for to see what a
    # dataset can.

    def __getitem__(self, index: Any) -> T_co:  # noqa: ANN401 - keys may be of any type
        """Return one sample; subclasses define it."""
        raise NotImplementedError(f"{type(self).__name__} must define __getitem__(index).")

    def __add__(self, other: Dataset[Any]) -> Dataset[Any]:
        """Return a `ConcatDataset` of the two."""
        from penstock.data.combinators import ConcatDataset  # it builds on this module

        return ConcatDataset([self, other])


class IterableDataset(Dataset[T_co], Iterable[T_co]):
    """A stream of samples, in an order of its own.

    Subclasses define `__iter__`; without it they cannot be made. With workers, each has a copy
    and iterates all of it: use `penstock.worker_info.get_worker_info` in `__iter__` to yield only
    this worker's shard.

    Example:
        >>> class Countdown(IterableDataset[int]):
        ...     def __iter__(self) -> Iterator[int]:
        ...         return iter([3, 2, 1])
        >>> list(Countdown() + Countdown())
        [3, 2, 1, 3, 2, 1]
    """

    def __add__(self, other: Dataset[Any]) -> Dataset[Any]:
        """Return a `ChainDataset` of the two."""
        from penstock.data.combinators import ChainDataset  # it builds on this module

        return ChainDataset([self, other])


_registered: dict[type, Callable[[Any], BatchReader | None]] = {}
_registered_by: Final = {"datasets.arrow_dataset.Dataset": "penstock.integrations.huggingface"}
"""Class of another library -> module that registers it, imported when one is met."""


def register_batch_reader(cls: type, make_reader: Callable[[Any], BatchReader | None]) -> None:
    """Say how datasets of type `cls` are read by the batch, for classes that are not ours.

    Subclasses that define `__getitem__`, `__getitems__` or `get_batch` are not affected: their
    samples differ, or they say themselves how a batch is read.

    Args:
        cls: The class.
        make_reader: Returns the reader of one dataset, or None where it must be read by the sample.
    """
    _registered[cls] = make_reader


def batch_reader(dataset: object) -> BatchReader | None:
    """Return what reads whole batches of `dataset`, or None if its samples must be read one by one.

    The reader is the dataset's `get_batch`, provided that no more derived class, nor the object
    itself, redefines `__getitem__` or `__getitems__`, and that `can_get_batch` is not false.
    """
    cls = type(dataset)
    module = _registered_by.get(f"{cls.__module__}.{cls.__qualname__}")
    if module is not None:
        importlib.import_module(module)
    slow = {"__getitem__", "__getitems__"}
    ways = {"get_batch", *slow}
    owner = next((base for base in cls.__mro__ if not ways.isdisjoint(vars(base))), cls)
    make_reader = _registered.get(cls) or _registered.get(owner)
    if make_reader is not None:
        return make_reader(dataset)
    if not is_current(cls, "get_batch", tuple(slow)):
        return None
    if not ways.isdisjoint(getattr(dataset, "__dict__", ())):
        return None
    if not getattr(dataset, "can_get_batch", True):
        return None
    return dataset.get_batch  # type: ignore[attr-defined, no-any-return]  # is_current found it


_parts_of: dict[type, Callable[[Any], Iterable[Any]]] = {}
_drawless: set[type] = set()


def register_combinator(cls: type, parts: Callable[[Any], Iterable[Any]]) -> None:
    """Say that datasets of class `cls` hand on what other datasets give, which `parts` returns."""
    _parts_of[cls] = parts


def _parts(dataset: Any) -> Iterable[Any] | None:  # noqa: ANN401
    """Return what a combinator combines; None for anything else.

    torch's are known too where nothing of ours has imported torch.
    """
    cls = type(dataset)
    if cls in _parts_of:
        return _parts_of[cls](dataset)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name == "torch.utils.data.dataset.Subset":
        return [dataset.dataset]
    return list(dataset.datasets) if name == "torch.utils.data.dataset.ConcatDataset" else None


def register_drawless(cls: type) -> None:
    """Say that reading a dataset of exactly type `cls` never draws a random number."""
    _drawless.add(cls)


def is_drawless(dataset: object) -> bool:
    """Return whether reading `dataset` is known to draw no random number.

    Its class is known for it, or it says so itself, by an attribute `is_drawless`. A subclass that
    reads in another way has to say so anew.
    """
    parts = _parts(dataset)
    if parts is not None:
        return all(map(is_drawless, parts))
    cls = type(dataset)
    if cls in _drawless:
        return True
    says_so = "is_drawless" in getattr(dataset, "__dict__", ()) or is_current(
        cls, "is_drawless", ("__getitem__", "__getitems__", "get_batch")
    )
    return says_so and dataset.is_drawless is True  # type: ignore[attr-defined]


def reads_together(dataset: object) -> bool:
    """Return whether `__getitems__` of `dataset` does more than read one sample after the other.

    A combinator's does if it does so for all of its parts. Where it does not, a dataset may say so,
    by an attribute `reads_each`.
    """
    if (
        getattr(dataset, "__getitems__", None) is None
        or getattr(dataset, "reads_each", False) is True
    ):
        return False
    for cls in type(dataset).__mro__:
        if "__getitems__" in vars(cls):
            parts = _parts_of.get(cls)
            return parts is None or all(map(reads_together, parts(dataset)))
    return True


def adapted(
    dataset: Any,  # noqa: ANN401
    collate_fn: Callable[[list[Any]], Any] | None,
    **orders: object,
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """Return the dataset and the collate function that a loader is to work with."""
    # They are those that it was given, but for a `ray.data.Dataset` and what
    # `penstock.ray.from_ray_data` made of one; these have an order of their own, so that the
    # arguments that choose one are refused. Nothing is imported to find out.
    data: Any = sys.modules.get("ray.data")
    rows: Any = sys.modules.get("penstock.ray.rows")
    kinds = [getattr(data, name, None) for name in ("Dataset", "DataIterator")]
    is_rays = isinstance(dataset, tuple(kind for kind in kinds if isinstance(kind, type)))
    if is_rays or (rows is not None and isinstance(dataset, rows.RayStream)):
        adapter: Any = importlib.import_module("penstock.ray.data")  # it lies above the loaders
        found: tuple[Any, Any] = adapter.for_loader(dataset, collate_fn, orders)
        return found
    return dataset, collate_fn


def announce_epoch(dataset: object, epoch: int) -> None:
    """Give a dataset the number of the epoch, if it has a method `set_epoch`.

    A combinator without one passes it to its parts.
    """
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
        return
    for part in _parts(dataset) or ():
        announce_epoch(part, epoch)


def follows_epochs(dataset: object) -> bool:
    """Return whether an epoch's samples are decided by its number.

    Such a dataset has `follows_epochs = True`, `set_epoch(epoch)`, which every loader calls, and
    `settings()`: what else decides its samples, for a loader's fingerprint.
    """
    return getattr(type(dataset), "follows_epochs", False) is True


def reads_in_turn(dataset: object) -> bool:
    """Return whether steps go round the workers in turn, as a dataset's `reads_in_turn` says.

    Its workers keep places in files, each for steps of its own.
    """
    return getattr(type(dataset), "reads_in_turn", False) is True


def can_resume(dataset: object) -> bool:
    """Return whether an iterable dataset returns its place, and can begin there."""
    return all(
        callable(getattr(dataset, method, None)) for method in ("state_dict", "load_state_dict")
    )


def read_each(dataset: Any, indices: Iterable[Any]) -> list[Any]:  # noqa: ANN401
    """Return samples read one by one, each under its own random streams.

    For use in a `get_batch` whose dataset cannot be read at once after all.
    """
    samples = []
    for k, index in enumerate(indices):
        with one_sample(k):
            samples.append(dataset[index])
    return samples


def counted_from_start(
    indices: NDArray[np.int64], length: int, described: str
) -> NDArray[np.int64]:
    """Return indices with the negative ones made positive; IndexError if one is out of range.

    `described` is the length in the error's words, as "5 rows".
    """
    wrong = indices[(indices < -length) | (indices >= length)]
    if wrong.size:
        raise IndexError(f"index {wrong[0]} is out of range for {described}.")
    return np.where(indices < 0, indices + length, indices)


def length_of(value: Any) -> int | None:  # noqa: ANN401
    """Return the length of a dataset, sampler or batch of indices, or None if it has none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def is_current(cls: type, method: str, older: tuple[str, ...]) -> bool:
    """Return whether the `method` of `cls` is as new as its versions of the methods `older`."""
    # That is: the class that defines `method` comes before, or is, those that define the others in
    # the MRO. A fast path written for one version of the slow path may not be taken for a later
    # one.
    for base in cls.__mro__:
        if vars(base).get(method) is not None:
            return True
        if not vars(base).keys().isdisjoint((method, *older)):
            return False  # a later version of the slow path, or `method = None`
    return False


T = TypeVar("T")


def shard(items: Iterable[T], by: Literal["batch", "item"] = "batch") -> Iterator[T]:
    """Yield what is this worker's and this rank's of `items`; all of them outside of a loader.

    Call it in `__iter__` of an `IterableDataset`. Without it, every worker and rank yields all.
    With `seed=`, the global generators are the same in all workers up to its first item, so that
    the items may be shuffled; from there on they are each sample's own.

    Args:
        items: The same in every worker and rank. All of them are iterated everywhere, so let them
            be cheap: names of files, offsets, keys; read what is behind them afterwards.
        by: "batch" deals as many items as make a batch to each worker in turn, and within the
            batches one to each rank in turn. If one item becomes one sample, batch k then holds the
            same samples for any number of workers, or none. "item" deals them out one by one: for
            files that hold many samples each.

    Raises:
        ConfigError: `by` is neither.

    Example:
        >>> from penstock import Loader
        >>> from penstock.data import IterableDataset
        >>> class Countdown(IterableDataset[int]):
        ...     def __iter__(self) -> Iterator[int]:
        ...         return shard(range(5, 0, -1))
        >>> [batch.tolist() for batch in Loader(Countdown(), batch_size=2)]
        [[5, 4], [3, 2], [1]]
    """
    if by not in ("batch", "item"):
        raise ConfigError(f"by should be 'batch' or 'item', but got by={by!r}.")
    info = current_shard()
    size = info.batch_size or 1 if by == "batch" else 1
    num_items = size * info.world_size

    def dealt() -> Iterator[T]:
        stream = iter(items)
        for turn in itertools.count():
            group = list(itertools.islice(stream, num_items))
            if turn % info.num_workers == info.worker_id:
                end_prologue()
                yield from group[info.rank :: info.world_size]
            if len(group) < num_items:
                return

    return dealt()
