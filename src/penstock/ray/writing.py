# SPDX-License-Identifier: Apache-2.0
"""A map-style dataset as Ray Data's: its samples, read in Ray's workers, as tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import ray

from penstock.data.names import name_samples
from penstock.faults import annotate

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS_AT_ONCE: Final = 256  # that are made to a table together; Ray Data joins them
_ROWS_OF_TASK: Final = 10_000


def read_in_tasks(
    dataset: Any,  # noqa: ANN401
    names: Sequence[str] | None,
    num_tasks: int | None,
    options: Mapping[str, Any],
) -> Any:  # noqa: ANN401 - a ray.data.Dataset
    """Look at the first sample, and return a plan that reads a range of indices in each task."""
    count = len(dataset)
    if count:
        _row_of(dataset, 0, names)
    ref = ray.put(dataset)  # once, for all tasks
    cpus = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    num_tasks = num_tasks or max(2 * cpus, count // _ROWS_OF_TASK)
    indices = ray.data.range(count, override_num_blocks=max(1, min(num_tasks, count)))
    read = functools.partial(_tables, ref, names)
    return indices.map_batches(read, batch_size=None, batch_format="numpy", **options)


def _tables(
    ref: Any,  # noqa: ANN401 - of the dataset in the object store
    names: Sequence[str] | None,
    batch: dict[str, Any],
) -> Iterator[dict[str, list[Any]]]:
    indices = batch["id"].tolist()
    dataset = ray.get(ref)
    for begin in range(0, len(indices), _ROWS_AT_ONCE):
        rows: list[dict[str, Any]] = []
        for index in indices[begin : begin + _ROWS_AT_ONCE]:
            rows.append(_row_of(dataset, index, names, rows[:1]))
        yield {name: [row[name] for row in rows] for name in rows[0]}


def _row_of(
    dataset: Any,  # noqa: ANN401
    index: int,
    names: Sequence[str] | None,
    others: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    try:
        sample = dataset[index]
        if isinstance(sample, Mapping):
            row = {str(name): _as_value(sample[name]) for name in names or sample}
        else:
            values = sample if isinstance(sample, (tuple, list)) else [sample]
            own = ["item"] if values is not sample else [str(k) for k in range(len(values))]
            names = names or getattr(sample, "_fields", own)
            row = dict(zip(names, map(_as_value, values), strict=True))
        if others and row.keys() != others[0].keys():
            raise TypeError(f"a sample has the columns {list(row)}, others {list(others[0])}")
        return row
    except Exception as error:
        named = name_samples(dataset, [index])
        annotate(error, f"while making a row, with columns={names}, of {named} of the dataset")
        raise


def _as_value(value: Any) -> Any:  # noqa: ANN401
    """Return a value as Ray Data takes it: tensors, also within dicts and lists, as arrays."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value if value.ndim else value[()]
    if isinstance(value, Mapping):
        return {str(key): _as_value(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_value(member) for member in value]
    return value
