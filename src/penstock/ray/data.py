# SPDX-License-Identifier: Apache-2.0
"""Between Ray Data and Penstock, both ways. Ray is imported when something of here is called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, MissingExtraError
from penstock.optional import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.ray.stream import RayStream
    from penstock.ray.table import RayTable

__all__ = ["from_ray_data", "to_ray_data"]


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
    cache_bytes: int = 1 << 30,
) -> RayStream | RayTable:
    """Return a `ray.data.Dataset` as a dataset for Penstock's loaders.

    As a stream, each epoch executes the plan anew, in Ray's workers, and nothing is kept: any size
    of data, in Ray's order. Otherwise rows are read by index out of Ray's object store, which has
    to hold them (or spill them to disk): then shuffling, samplers and going on from a state work as
    with any map-style dataset.

    Args:
        dataset: A `ray.data.Dataset`, or one consumer's part of it: what `streaming_split` and
            `ray.train.get_dataset_shard` return.
        streaming: Whether to stream. None streams, unless it is a `MaterializedDataset`
            (`dataset.materialize()`). False materialises what is not.
        preserve_order: Whether Ray Data is to give the rows in the order of the data. It costs some
            speed where tasks take unequal times; without it no epoch is like the one before, and
            the stream cannot go on from a state.
        prefetch_batches: Of a stream: batches that Ray Data fetches ahead of the loop.
        local_shuffle_buffer_size: Of a stream: rows to draw the next one from, at least; None does
            not shuffle.
        local_shuffle_seed: Decides, with the epoch, what is drawn from them.
        cache_bytes: Otherwise: size of the blocks that are kept open at most.

    Returns:
        A `RayStream`, to be iterated, or a `RayTable`, with `len` and indices. Samples are dicts of
        the columns.

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
            f"{type(dataset).__name__}"
        )
    is_there = isinstance(dataset, data.dataset.MaterializedDataset)
    if streaming is None:
        streaming = not is_there
    shuffles: dict[str, Any] = {
        "local_shuffle_buffer_size": local_shuffle_buffer_size,
        "local_shuffle_seed": local_shuffle_seed,
    }
    if not streaming:
        given = {name: value for name, value in shuffles.items() if value is not None}
        if given:
            raise ConfigError(f"rows read by index are shuffled by shuffle=True, got {given}")
        if is_share:
            raise ConfigError(
                "a part of streaming_split can only be streamed, got streaming=False. "
                "Dataset.split(n) gives parts that are materialised."
            )
        return _table(dataset if is_there else _ordered(dataset).materialize(), cache_bytes)
    if local_shuffle_seed is not None and local_shuffle_buffer_size is None:
        raise ConfigError(
            f"local_shuffle_seed={local_shuffle_seed} needs a local_shuffle_buffer_size: rows to "
            "draw from"
        )
    from penstock.ray.stream import RayStream

    is_shuffled_anyhow = local_shuffle_buffer_size is not None and local_shuffle_seed is None
    return RayStream(
        _ordered(dataset) if preserve_order and not is_share else dataset,
        is_share=is_share,
        schema=None if is_share else _schema(dataset),
        is_ordered=preserve_order and not is_share and not is_shuffled_anyhow,
        prefetch_batches=prefetch_batches,
        **shuffles,
    )


def _ordered(dataset: Any) -> Any:  # noqa: ANN401
    """Return the dataset, executed in its order; the user's own stays as it is."""
    own = type(dataset).copy(dataset, _deep_copy=True)
    own.context.execution_options.preserve_order = True
    return own


def _table(dataset: Any, cache_bytes: int) -> RayTable:  # noqa: ANN401
    from penstock.ray.table import Block, RayTable

    blocks = []
    for bundle in dataset.iter_internal_ref_bundles():
        slices = getattr(bundle, "slices", None) or [None] * len(bundle.block_refs)
        for ref, metadata, part in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
            start, stop = (0, metadata.num_rows) if part is None else _ends(part)
            blocks.append(Block(ref, start, stop - start, metadata.size_bytes or 0))
    return RayTable(blocks, schema=_schema(dataset), cache_bytes=cache_bytes)


def _schema(dataset: Any) -> Any:  # noqa: ANN401
    """Return the Arrow schema of a dataset, if it is known without reading anything."""
    found = getattr(dataset.schema(fetch_if_missing=False), "base_schema", None)
    # That of pandas' frames is of another kind, and says nothing here.
    return found if hasattr(found, "get_field_index") else None


def _ends(part: Any) -> tuple[int, int]:  # noqa: ANN401
    return part.start_offset, part.end_offset


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
        override_num_blocks: Read tasks; None lets Ray Data decide by the size of the data.
        **read_options: For `ray.data.read_datasource`: num_cpus, memory, concurrency, resources, …

    Raises:
        ConfigError: names that do not fit the samples, or a dataset that cannot be pickled.
        TypeError: a dataset without indices, or a value that no column holds; names the sample.
        MissingExtraError: Ray Data is not installed.
    """
    data = _ray_data()
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        kind = type(dataset).__name__
        advice = (
            "Give the loader's .dataset; in the order of an epoch, as "
            "Subset(loader.dataset, list(loader.sampler))."
            if hasattr(dataset, "batch_sampler")
            else "Write a stream to files that ray.data reads: Parquet, say."
        )
        raise TypeError(
            "to_ray_data takes a dataset with __getitem__ and __len__, whose indices can be dealt "
            f"out to Ray's workers; {kind} has not both. {advice}"
        )
    from penstock.ray.source import IndexedSource

    return data.read_datasource(
        IndexedSource(dataset, columns), override_num_blocks=override_num_blocks, **read_options
    )


def for_loader(
    dataset: Any,  # noqa: ANN401
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_size: int | None,
    orders: Mapping[str, object],
) -> tuple[Any, Any]:
    """Return what `penstock.data.foreign.adapted` is to return.

    Args:
        dataset: Ray Data's, or a `RayStream`.
        collate_fn: Of the loader.
        batch_size: Of the loader.
        orders: Its arguments that choose an order, by name.

    Raises:
        ConfigError: an order is chosen for what has one of its own.
    """
    from penstock.ray.stream import RayStream, WholeBatches

    kind = type(dataset).__name__
    if not isinstance(dataset, RayStream):
        dataset = from_ray_data(dataset)
    if not isinstance(dataset, RayStream):
        return dataset, collate_fn
    # Not `value not in (None, False)`: a sampler may be an array, which compares by its elements.
    chosen = [name for name, value in orders.items() if value is not None and value is not False]
    if chosen:
        raise ConfigError(
            f"a {kind} of Ray Data is streamed in Ray's order, got {', '.join(chosen)}. Let Ray "
            "Data shuffle (dataset.random_shuffle(seed=…), or from_ray_data(dataset, "
            "local_shuffle_buffer_size=…)), or give dataset.materialize(), whose rows are read by "
            "index, if it fits into Ray's object store."
        )
    if collate_fn is None and batch_size is not None:
        return dataset.in_batches(), WholeBatches()
    return dataset, collate_fn
