# SPDX-License-Identifier: Apache-2.0
"""The shortest way from indices to a batch: no seed, no fault policy, nothing measured.

For cheap samples, what a loader does beside reading them is most of the time. So all that is the
same for every batch is decided once, and a function is made of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import length_hint
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.assembly import count_samples
from penstock.engine.plan import dataset_keys
from penstock.worker_info import set_shard

if TYPE_CHECKING:
    from penstock.engine.assembly import Assembler
    from penstock.engine.map_reader import MapReader
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.stream_reader import StreamReader
    from penstock.worker_info import ShardInfo

__all__ = ["PlainMaker", "map_maker", "shard_maker"]

PlainMaker = Callable[[Any, list[Any]], int]
"""Takes the indices of a task, appends its batch to a list, returns the number of samples."""


def map_maker(spec: WorkerSpec, reader: MapReader, assembler: Assembler) -> PlainMaker:
    """Return the function for a map-style dataset."""
    dataset, collate = spec.dataset, assembler.plain_collate()

    def make_single(index: Any, out: list[Any]) -> int:  # noqa: ANN401
        key = dataset_keys(index)
        try:
            sample = dataset[key]
        except Exception as error:
            reader.explain(error, key)
            raise
        out.append(collate(sample))
        return 1

    def make(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
        keys = indices.tolist() if type(indices) is np.ndarray else dataset_keys(indices)
        key = None
        samples: list[Any]
        try:
            if type(keys) is list:
                left = iter(keys)
                samples = [dataset[key] for key in left]
            else:  # whatever a batch sampler of the user's own gives
                samples = []
                for key in keys:
                    samples.append(dataset[key])
        except Exception as error:
            reader.explain(error, keys[~length_hint(left)] if type(keys) is list else key)
            raise
        return join(samples, keys, out)

    def make_together(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
        keys = dataset_keys(indices)
        return join(reader.read_together(keys), keys, out)

    def make_whole(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
        whole = reader.whole_batch(indices)
        if whole is None:
            return make_of_samples(indices, out)
        out.append(assembler.as_batch(reader.read_whole(whole, assembler.output.empty)))
        return len(whole)

    def join(samples: Any, keys: Any, out: list[Any]) -> int:  # noqa: ANN401
        try:
            out.append(collate(samples))
        except Exception as error:
            assembler.explain(error, samples, keys)
            raise
        return count_samples(samples)

    make_of_samples = make_together if reader.reads_together else make
    if not spec.is_batched:
        return make_single
    return make_whole if reader.reads_whole else make_of_samples


def shard_maker(
    spec: WorkerSpec, reader: StreamReader, info: ShardInfo, assembler: Assembler
) -> PlainMaker:
    """Return the function for an iterable dataset: of the indices, only their number counts."""
    is_batched, collate = spec.is_batched, assembler.plain_collate()

    def make(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
        outer = set_shard(info)
        try:
            samples = reader.take_samples(len(indices) if is_batched else 1)
            try:
                out.append(collate(samples if is_batched else samples[0]))
            except Exception as error:
                assembler.explain(error, samples, None)
                raise
            return len(samples)
        finally:
            set_shard(outer)

    return make
