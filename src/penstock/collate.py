# SPDX-License-Identifier: Apache-2.0
"""Samples to one batch: the default collate, by the rules of torch's, on numpy alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import numpy as np

from penstock.errors import CollateError
from penstock.faults import annotate

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from penstock.data.dataset import Allocator

CollateMap = dict[type | tuple[type, ...], Callable[..., Any]]
"""Type of the first sample -> function `(samples, *, collate_fn_map)` that makes them one leaf."""


class BatchMemory(Protocol):
    """What a collate function writes a batch into, until `collate_into` returns."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array, in the slot that goes to the main process."""

    def leaf(self, array: NDArray[Any]) -> Any:  # noqa: ANN401
        """Return an array as the loader gives it: as it is, or as a tensor over the same memory.

        One without a tensor type (text, objects) stays an array. In a worker that has not imported
        torch it is an object that becomes the tensor where the batch arrives.
        """

    def batch(self, samples: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return samples as the default collate makes a batch of them."""


class CollateInto(Protocol):
    """A collate function that writes into the slot, instead of being copied there.

    A loader calls `collate_into` of an object that has it, and the object itself everywhere else:
    in torch's loader, say. Both make the same batch.

    Example:
        >>> class Rows:
        ...     def collate_into(self, samples, out):
        ...         rows = out.empty((len(samples), 3), "float32")
        ...         for row, sample in zip(rows, samples):
        ...             row[:] = sample
        ...         return out.leaf(rows)
        ...
        ...     def __call__(self, samples):
        ...         return self.collate_into(samples, Collator(np.empty))
        >>> from penstock import Loader
        >>> [batch.tolist() for batch in Loader([(1, 2, 3), (4, 5, 6)], 2, collate_fn=Rows())]
        [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]
    """

    def collate_into(self, samples: Sequence[Any], out: BatchMemory) -> Any:  # noqa: ANN401
        """Return samples as one batch, its arrays from `out`."""

    def __call__(self, samples: Sequence[Any], /) -> Any:  # noqa: ANN401
        """Return the same batch in memory of its own."""


def collate(samples: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
    """Return `samples` as one batch tree, leaves made by the functions of `collate_fn_map`.

    The first sample decides: its exact type is looked up, then the first entry it is an instance
    of; what is found nowhere must be a mapping or a sequence.
    """
    first = samples[0]
    function = collate_fn_map.get(type(first)) or next(
        (f for kind, f in collate_fn_map.items() if isinstance(first, kind)), None
    )
    if function is not None:
        return function(samples, collate_fn_map=collate_fn_map)
    if isinstance(first, Mapping):
        return _collate_mappings(samples, collate_fn_map=collate_fn_map)
    if isinstance(first, Sequence):
        return _collate_sequences(samples, collate_fn_map=collate_fn_map)
    raise TypeError(
        "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found "
        f"{type(first)}. Convert it in the dataset, or give a collate_fn that knows it."
    )


def _collate_mappings(samples: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
    """Return mappings collated key by key, as the type of the first."""
    first = samples[0]
    try:
        columns = {
            key: collate([sample[key] for sample in samples], collate_fn_map=collate_fn_map)
            for key in first
        }
    except CollateError as error:
        if "boxes" in first:
            annotate(error, "(for images with boxes: collate_fn=penstock.vision.detection_collate)")
        raise
    return columns if type(first) is dict else mapping_like(first, columns)


def _collate_sequences(samples: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
    """Return sequences collated member by member, as the type of the first; a tuple as a list."""
    first = samples[0]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*_columns(samples, collate_fn_map, strict=False))
    if len(set(map(len, samples))) > 1:
        rule = "each element in list of batch should be of equal size"
        _refuse(rule, [f"{len(sample)} elements" for sample in samples])
    columns = _columns(samples, collate_fn_map, strict=True)
    return columns if type(first) in (list, tuple) else sequence_like(first, columns)


CONTAINERS: Final[CollateMap] = {
    dict: _collate_mappings,
    list: _collate_sequences,
    tuple: _collate_sequences,
}
"""To be the last entries of maps that hold no base class of these: it saves looking for one."""


def _columns(samples: Sequence[Any], collate_fn_map: CollateMap, *, strict: bool) -> list[Any]:
    columns = zip(*samples, strict=strict)
    return [collate(column, collate_fn_map=collate_fn_map) for column in columns]


def _refuse(rule: str, sizes: Sequence[str]) -> NoReturn:
    """Raise CollateError, naming the first sample and the first with another size."""
    other = next(position for position, size in enumerate(sizes) if size != sizes[0])
    raise CollateError(
        f"{rule}, but {{first}} has {sizes[0]} and {{other}} has {sizes[other]}. Crop, resize or "
        "pad them in the dataset, or give a collate_fn that keeps them apart.",
        (0, other),
    )


def convert(tree: Any, leaf: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return `tree` with `leaf` applied to its members, except to strings; tuples become lists."""
    if isinstance(tree, (str, bytes)):
        return tree
    if isinstance(tree, Mapping):
        return mapping_like(tree, {key: convert(tree[key], leaf) for key in tree})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(convert(member, leaf) for member in tree))
    if isinstance(tree, Sequence):
        return sequence_like(tree, [convert(member, leaf) for member in tree])
    return leaf(tree)


def mapping_like(like: Mapping[Any, Any], columns: dict[Any, Any]) -> Any:  # noqa: ANN401
    """`columns` as the type of `like`, its other attributes kept; as a dict if that fails."""
    try:
        if isinstance(like, MutableMapping):
            clone = copy.copy(like)
            clone.update(columns)
            return clone
        return type(like)(columns)  # type: ignore[call-arg]
    except TypeError:  # a type that cannot be copied, updated or made from a dict
        return columns


def sequence_like(like: Sequence[Any], members: list[Any]) -> Any:  # noqa: ANN401
    """`members` as the type of `like`, a plain tuple as a list."""
    if isinstance(like, tuple):
        return members
    try:
        if isinstance(like, MutableSequence):
            clone = copy.copy(like)
            for position, member in enumerate(members):
                clone[position] = member
            return clone
        return type(like)(members)  # type: ignore[call-arg]
    except TypeError:  # `range`, and whatever else cannot be made from a list
        return members


class MixedTypes(Exception):  # a word to the caller, who has the framework collate instead
    """Values that only the framework makes one tensor of, or refuses in its own words."""


class Collator:
    """The default collate of one worker, into its slot; other collates' `BatchMemory` as well."""

    def __init__(
        self, alloc: Allocator, wrap: Callable[[np.ndarray[Any, Any]], Any] | None = None
    ) -> None:
        """Collate into arrays given by `alloc`.

        Args:
            alloc: Gives the array for a stacked leaf.
            wrap: Applied to each array made here. With it, what needs the framework's own rules
                raises `MixedTypes`.
        """
        self.empty = alloc
        self._wrap = wrap
        self._map: CollateMap = {
            np.ndarray: self._stack,
            (np.bool_, np.number, np.object_): self._scalars,
            float: self._floats,
            int: self._ints,
            str: _keep,
            bytes: _keep,
            **CONTAINERS,
        }

    def batch(self, samples: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return the samples of a batch as one tree."""
        return collate(samples, collate_fn_map=self._map)

    def sample(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample that is a batch by itself, its arrays wrapped."""
        return sample if self._wrap is None else convert(sample, self._convert_leaf)

    def leaf(self, array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
        """Return an array as the loader gives it, wrapped unless it is one of text or objects."""
        return array if self._wrap is None else self._convert_leaf(array)

    def _convert_leaf(self, leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "SUO":
            return leaf
        if isinstance(leaf, (np.ndarray, np.bool_, np.number)):
            array = np.asarray(leaf)
            return self._finish(array if array.flags.writeable else array.copy())
        return leaf

    def _finish(self, array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
        if self._wrap is None:
            return array
        if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16 or not array.dtype.isnative:
            raise MixedTypes(f"an array of {array.dtype}")
        return self._wrap(array)

    def _stack(self, arrays: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        if not have_one_dtype(arrays):
            self._refuse_mixture(arrays)
            check_shapes(list(map(np.shape, arrays)))
            return np.stack(arrays)
        first = arrays[0]
        if first.dtype.kind in "SUO":
            self._refuse_mixture(arrays)
        check_shapes([array.shape for array in arrays])
        out = self.empty((len(arrays), *first.shape), first.dtype)
        stack_into(out, arrays)
        return self._finish(out)

    def _scalars(self, values: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        if len(set(map(type, values))) > 1:
            self._refuse_mixture(values)
        return self._finish(np.asarray(values))

    def _floats(self, values: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        return self._finish(np.asarray(values, np.float64))

    def _ints(self, values: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
        if set(map(type, values)) != {int}:
            return self._scalars(values, collate_fn_map=collate_fn_map)
        return self._finish(np.asarray(values, np.int64))

    def _refuse_mixture(self, values: Sequence[Any]) -> None:
        """Leave to the framework what it has rules of its own for."""
        if self._wrap is not None:
            raise MixedTypes(f"{len(values)} values")


def _keep(values: Sequence[Any], *, collate_fn_map: CollateMap) -> Any:  # noqa: ANN401
    return values


_dtype_of: Final = attrgetter("dtype")


def have_one_dtype(arrays: Sequence[Any]) -> bool:
    """Return whether arrays, or tensors, are all of one dtype; what is neither has none."""
    try:
        return len(set(map(_dtype_of, arrays))) == 1
    except AttributeError:
        return False


def stack_into(out: NDArray[Any], arrays: Sequence[Any]) -> None:
    """Write arrays of one shape and dtype into `out`, which is C-contiguous, one after the other.

    As `np.stack(arrays, out=out)`, which first makes a view of each: that takes longer than to copy
    a short one.
    """
    shape = arrays[0].shape
    if shape:
        np.concatenate(arrays, out=out.reshape(len(arrays) * shape[0], *shape[1:]))
    else:
        np.stack(arrays, out=out)


def check_shapes(shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise CollateError, naming two samples and their shapes, unless all are equal."""
    if len(set(shapes)) > 1:
        rule = "stack expects each tensor to be equal size"
        _refuse(rule, [f"shape {tuple(shape)}" for shape in shapes])


def default_collate(samples: Sequence[Any]) -> Any:  # noqa: ANN401
    """Return `samples` as one batch tree of numpy arrays, in fresh memory.

    Args:
        samples: At least one; all alike in structure, shapes and types.

    Returns:
        A tree like one sample: arrays get a leading batch dimension, ints become int64, floats
        float64, strings and bytes a list, a plain tuple a list.

    Raises:
        CollateError: shapes or lengths differ; names the samples and both shapes.
        TypeError: a leaf that cannot be collated.

    Example:
        >>> default_collate([(np.zeros(2), 1, "a"), (np.ones(2), 2, "b")])
        [array([[0., 0.],
               [1., 1.]]), array([1, 2]), ('a', 'b')]
    """
    return Collator(np.empty).batch(samples)
