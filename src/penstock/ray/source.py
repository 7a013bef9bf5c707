# SPDX-License-Identifier: Apache-2.0
"""A map-style dataset as Ray Data's: its samples, read in Ray's workers, as tables."""

from __future__ import annotations

import datetime
import decimal
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import ray
from ray.data.block import BlockAccessor

from penstock.data.names import name_samples
from penstock.errors import ConfigError
from penstock.faults import annotate

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["read_in_tasks"]

_TABLE_BYTES: Final = 16 << 20  # of rows that are made to a table together; Ray Data joins them
_MOST_ROWS: Final = 4096  # together
_TASK_BYTES: Final = 64 << 20
_SMALL_BYTES: Final = 1 << 20  # of a dataset's arrays that a process may keep in the object store
_PLAIN: Final = (
    *(np.generic, bool, int, float, str, bytes, type(None)),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal),
)


def read_in_tasks(
    dataset: Any,  # noqa: ANN401
    names: Sequence[str] | None,
    num_tasks: int | None,
    options: Mapping[str, Any],
) -> Any:  # noqa: ANN401 - a ray.data.Dataset
    """Look at the first sample, and return a plan that reads a range of indices in each task.

    The dataset is put into Ray's object store once, and a process that reads opens it once.

    Raises:
        ConfigError: names that do not fit, or a dataset that cannot be pickled.
        TypeError: a value that no column can hold.
    """
    count, row_bytes = len(dataset), 1
    if count:
        table = BlockAccessor.batch_to_arrow_block(_columns(dataset, [0], names))
        row_bytes = max(1, BlockAccessor.for_block(table).size_bytes())
    buffers: list[Any] = []
    try:
        dumps: Any = ray.cloudpickle.dumps
        dumps(dataset, protocol=5, buffer_callback=buffers.append)
        ref = ray.put(dataset)
    except Exception as error:  # whatever its pickling raises
        raise ConfigError(
            f"{type(dataset).__name__} cannot be pickled, so Ray's workers cannot read it: {error}"
        ) from error
    cpus = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    num_tasks = num_tasks or max(2 * cpus, count * row_bytes // _TASK_BYTES)
    at_once = min(max(1, _TABLE_BYTES // row_bytes), _MOST_ROWS)
    indices = ray.data.range(count, override_num_blocks=max(1, min(num_tasks, count)))
    is_kept = sum(buffer.raw().nbytes for buffer in buffers) <= _SMALL_BYTES
    read = functools.partial(_tables, ref, is_kept, at_once, names)
    return indices.map_batches(read, batch_size=None, batch_format="numpy", **options)


_open: dict[str, Any] = {}  # in a worker: the dataset read last, which has its files open


def _opened(ref: Any, is_kept: bool) -> Any:  # noqa: ANN401
    """Return the dataset, in a worker; the one of the task before, if it is the same.

    So a store is opened once by each process. Large arrays lie in Ray's object store: they cost
    nothing to read again, and what is kept of them could not be freed there. Nor is the reference
    kept, for the same reason.
    """
    if not is_kept:
        return ray.get(ref)
    key = ref.hex()
    dataset = _open.get(key)
    if dataset is None:
        dataset = ray.get(ref)
        _open.clear()
        _open[key] = dataset
    return dataset


def _tables(
    ref: Any,  # noqa: ANN401 - of the dataset in the object store
    is_kept: bool,
    at_once: int,
    names: Sequence[str] | None,
    batch: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Read samples as tables of at most `at_once` rows."""
    indices = batch["id"].tolist()
    dataset = _opened(ref, is_kept)
    for begin in range(0, len(indices), at_once):
        yield _columns(dataset, indices[begin : begin + at_once], names)


def _columns(dataset: Any, indices: list[int], names: Sequence[str] | None) -> dict[str, list[Any]]:  # noqa: ANN401
    rows = [_row(dataset, index, names) for index in indices]
    for index, row in zip(indices, rows, strict=True):
        if row.keys() != rows[0].keys():
            raise TypeError(
                f"{name_samples(dataset, [index])} has the columns {list(row)}, "
                f"{name_samples(dataset, indices[:1])} has {list(rows[0])}: a table has the same "
                "in each row"
            )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _row(dataset: Any, index: int, names: Sequence[str] | None) -> dict[str, Any]:  # noqa: ANN401
    try:
        sample = dataset[index]
    except Exception as error:
        annotate(error, f"while reading {name_samples(dataset, [index])} of the dataset")
        raise
    if isinstance(sample, Mapping):
        row = {str(name): sample[name] for name in names or sample if name in sample}
    else:
        is_row = isinstance(sample, (tuple, list))
        values = tuple(sample) if is_row else (sample,)
        own = getattr(sample, "_fields", map(str, range(len(values)))) if is_row else ("item",)
        row = (
            dict(zip(names or own, values, strict=False))
            if len(names or values) == len(values)
            else {}
        )
    if names is not None and len(row) != len(names):
        raise ConfigError(
            f"{name_samples(dataset, [index])} has "
            f"{list(sample) if isinstance(sample, Mapping) else f'{len(values)} values'}, and "
            f"columns= names {list(names)}"
        )
    for name, value in row.items():
        try:
            row[name] = _as_value(value)
        except TypeError as error:
            raise TypeError(
                f"{name_samples(dataset, [index])} has a {error} in the column {name!r}, which no "
                "column of Ray Data holds. Give arrays, tensors, numbers, text, bytes, or lists "
                "and dicts of these: convert it in the dataset, in a transform say."
            ) from None
    return row


def _as_value(value: Any) -> Any:  # noqa: ANN401
    """Return a value as Ray Data takes it; the TypeError for another one names its type."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufSUMm":
        return value if value.ndim else value[()]
    if isinstance(value, _PLAIN) and not isinstance(value, np.complexfloating):
        return value
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy"):
        try:
            return _as_value(value.detach().cpu().numpy())
        except TypeError:  # numpy has no bfloat16
            raise TypeError(f"tensor of {value.dtype}") from None
    if isinstance(value, Mapping):
        return {str(key): _as_value(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_value(member) for member in value]
    raise TypeError(type(value).__name__)
