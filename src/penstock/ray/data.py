# SPDX-License-Identifier: Apache-2.0
"""Between Ray Data and Penstock, both ways. Ray is imported when something of here is called."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError, MissingExtraError
from penstock.optional import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.ray.rows import RayStream, RayTable

__all__ = ["for_loader", "from_ray_data", "to_ray_data"]

_ROWS_OF_TASK: Final = 10_000


def _ray_data() -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("ray.data")
    except ImportError as error:
        raise MissingExtraError(
            f'Ray Data is not installed ({error}): {install_command("ray")} "ray[data]"'
        ) from error


def from_ray_data(
    dataset: Any,  # noqa: ANN401 - ray ships no annotations that could be named without it
    *,
    streaming: bool | None = None,
    preserve_order: bool = True,
    prefetch_batches: int = 1,
    local_shuffle_buffer_size: int | None = None,
    local_shuffle_seed: int | None = None,
) -> RayStream | RayTable:
    """Return a `ray.data.Dataset` as a dataset for Penstock's loaders.

    As a stream, each epoch executes the plan anew, in Ray's workers, and nothing is kept. Otherwise
    rows are read by index out of Ray's object store, which has to hold them (or spill them to
    disk): then shuffling, samplers and going on from a state work as with any map-style dataset.

    Args:
        dataset: A `ray.data.Dataset`, or one consumer's part of it: what `streaming_split` and
            `ray.train.get_dataset_shard` return.
        streaming: Whether to stream. None streams, unless it is a `MaterializedDataset`
            (`dataset.materialize()`). False materialises what is not.
        preserve_order: Of a stream: whether Ray Data is to give the rows in the order of the data.
            Without it no epoch is like the one before, and there is no state to go on from.
        prefetch_batches: Of a stream: batches that Ray Data fetches ahead of the loop.
        local_shuffle_buffer_size: Of a stream: rows to draw the next one from, at least; None does
            not shuffle.
        local_shuffle_seed: Decides, with the epoch, what is drawn from them.

    Returns:
        A stream, to be iterated, or a table, with `len` and indices. Samples are dicts of the
        columns.

    Raises:
        ConfigError: arguments that contradict each other.
        TypeError: something else than a dataset of Ray's.
        MissingExtraError: Ray Data is not installed.
    """
    data = _ray_data()
    is_share = isinstance(dataset, data.DataIterator)
    if not is_share and not isinstance(dataset, data.Dataset):
        raise TypeError(
            "from_ray_data takes a ray.data.Dataset, or what its streaming_split returns; got "
            + type(dataset).__name__
        )
    is_there = isinstance(dataset, data.dataset.MaterializedDataset)
    is_shuffled = local_shuffle_buffer_size is not None
    is_ordered = preserve_order and not is_share
    from penstock.ray.rows import RayStream, RayTable

    if not (is_there if streaming is None else not streaming):
        return RayStream(
            _ordered(dataset) if is_ordered else dataset,
            is_share=is_share,
            is_ordered=is_ordered and not (is_shuffled and local_shuffle_seed is None),
            seed=local_shuffle_seed,
            prefetch_batches=prefetch_batches,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
        )
    if is_shuffled:
        raise ConfigError(
            "rows read by index are shuffled by shuffle=True, got "
            f"local_shuffle_buffer_size={local_shuffle_buffer_size}"
        )
    if not is_there:
        dataset = (dataset if is_share else _ordered(dataset)).materialize()
    return RayTable(dataset)


def _ordered(dataset: Any) -> Any:  # noqa: ANN401
    """Return the dataset, executed in its order; the user's own stays as it is."""
    own = type(dataset).copy(dataset, _deep_copy=True)
    own.context.execution_options.preserve_order = True
    return own


def to_ray_data(
    dataset: Any,  # noqa: ANN401 - anything with __getitem__ and __len__
    *,
    columns: Sequence[str] | None = None,
    override_num_blocks: int | None = None,
    **read_options: Any,  # noqa: ANN401 - Ray's own
) -> Any:  # noqa: ANN401
    """Return a map-style dataset, of Penstock or torch, as a `ray.data.Dataset`.

    Row i is sample i. Nothing is read but the first sample, which says what the columns are; the
    rows are read in Ray's workers when the plan is executed, each task a range of the indices. The
    dataset is pickled into Ray's object store once: stores are opened anew by each worker, so their
    files have to be there on each node.

    Transforms that draw at random draw anew whenever the plan is executed.

    Args:
        dataset: Has `__getitem__` and `__len__`. For another order, or a part, give a `Subset`.
        columns: Names of the columns, for samples that are tuples or single values; of dicts, those
            to take. None: the keys of dicts, the fields of named tuples, "0", "1", … for tuples,
            "item" for anything else.
        override_num_blocks: Read tasks; None: two for each CPU, or one for 10,000 samples.
        **read_options: For Ray Data's `map_batches`: num_cpus, memory, concurrency, resources, …

    Raises:
        KeyError: a sample without one of the columns; a tuple of another length is a ValueError.
        TypeError: a dataset without indices, or one that cannot be pickled.
        MissingExtraError: Ray Data is not installed.
    """
    data = _ray_data()
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            "to_ray_data takes a dataset with __getitem__ and __len__ (of a loader give the "
            f".dataset); {type(dataset).__name__} has not both"
        )
    import ray

    from penstock.ray.rows import row_of_sample, tables_of

    if count := len(dataset):
        row_of_sample(dataset, 0, columns)
    cpus = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    num_tasks = override_num_blocks or max(2 * cpus, count // _ROWS_OF_TASK)
    indices = data.range(count, override_num_blocks=max(1, min(num_tasks, count)))
    read = functools.partial(tables_of, ray.put(dataset), columns)  # once, for all tasks
    return indices.map_batches(read, batch_size=None, batch_format="numpy", **read_options)


def for_loader(
    dataset: Any,  # noqa: ANN401
    collate_fn: Callable[[list[Any]], Any] | None,
    orders: Mapping[str, object],
) -> tuple[Any, Any]:
    """Return what `penstock.data.dataset.adapted` returns for a dataset of Ray Data's.

    Raises:
        ConfigError: an order is chosen for what has one of its own.
    """
    from penstock.ray.rows import RayStream

    kind = type(dataset).__name__
    if not isinstance(dataset, RayStream):
        dataset = from_ray_data(dataset)
    if not isinstance(dataset, RayStream):
        return dataset, collate_fn
    # Not `value not in (None, False)`: a sampler may be an array, which compares by its elements.
    chosen = [name for name, value in orders.items() if value is not None and value is not False]
    if chosen:
        raise ConfigError(
            f"a {kind} of Ray Data is streamed in Ray's order, got {', '.join(chosen)}. Shuffle by "
            "from_ray_data(dataset, local_shuffle_buffer_size=…), or give dataset.materialize(), "
            "whose rows are read by index."
        )
    return dataset, collate_fn
