# SPDX-License-Identifier: Apache-2.0
"""A map-style dataset as a source of Ray Data: read tasks over ranges of its indices."""

from __future__ import annotations

import datetime
import decimal
import functools
import itertools
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import ray
from ray.data import Datasource, ReadTask
from ray.data.block import BlockAccessor, BlockMetadata

from penstock.data.names import describe_sample
from penstock.errors import ConfigError
from penstock.faults import annotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["IndexedSource"]

_BLOCK_BYTES: Final = 16 << 20  # of rows that are made to a table together; Ray Data joins them
_MOST_ROWS: Final = 4096  # together
_SMALL_BYTES: Final = 1 << 20  # of a dataset's arrays that each worker may have for itself
_PLAIN: Final = (
    *(bool, int, float, str, bytes, type(None)),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal),
)


class IndexedSource(Datasource):
    """Reads a map-style dataset, a range of indices in each task.

    The dataset is put into Ray's object store once, and a process that reads opens it once.
    """

    def __init__(self, dataset: Any, names: Sequence[str] | None) -> None:  # noqa: ANN401
        """Look at the first sample, and put the dataset into the object store.

        Args:
            dataset: Has `__getitem__` and `__len__`.
            names: Of the columns; None takes them from the samples.

        Raises:
            ConfigError: names that do not fit, or a dataset that cannot be pickled.
            TypeError: a value that no column can hold.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_rows = len(dataset)
        self._names = None if names is None else tuple(names)
        self._name = type(dataset).__name__
        self._row_bytes = 0
        if self._num_rows:
            row = _row(dataset, 0, self._names)
            self._row_bytes = sum(map(_size_of, row.values()))
        self._dataset = _StoredDataset.of(dataset)

    def get_name(self) -> str:
        """Return what Ray Data calls the read."""
        return self._name

    def estimate_inmemory_data_size(self) -> int | None:
        """Return the size that all rows would have if they were like the first one."""
        return self._row_bytes * self._num_rows

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: object = None,
    ) -> list[ReadTask]:
        """Return a task for each of `parallelism` ranges of nearly equal length."""
        count = max(1, min(parallelism, self._num_rows))
        ends = [self._num_rows * k // count for k in range(count + 1)]
        limit = {} if per_task_row_limit is None else {"per_task_row_limit": per_task_row_limit}
        tasks = []
        for start, stop in itertools.pairwise(ends):
            metadata = BlockMetadata(
                num_rows=stop - start,
                size_bytes=self._row_bytes * (stop - start),
                input_files=None,
                exec_stats=None,
            )
            at_once = min(max(1, _BLOCK_BYTES // max(1, self._row_bytes)), _MOST_ROWS)
            read = functools.partial(_tables, self._dataset, start, stop, at_once, self._names)
            tasks.append(ReadTask(read, metadata, **limit))
        return tasks


class _StoredDataset(NamedTuple):
    """A dataset in the object store.

    Attributes:
        ref: Of it, or of its pickle.
        is_pickle: Which of the two. A pickle leaves the store once it has been read. An object with
            arrays is read in place, and stays in the store as long as anybody has it.
    """

    ref: Any
    is_pickle: bool

    @classmethod
    def of(cls, dataset: Any) -> _StoredDataset:  # noqa: ANN401
        """Put a dataset into the store.

        Raises:
            ConfigError: it cannot be pickled.
        """
        buffers: list[pickle.PickleBuffer] = []
        dumps: Callable[..., bytes] = ray.cloudpickle.dumps
        try:
            dumps(dataset, protocol=5, buffer_callback=buffers.append)
            if sum(buffer.raw().nbytes for buffer in buffers) > _SMALL_BYTES:
                return cls(ray.put(dataset), is_pickle=False)
            return cls(ray.put(dumps(dataset)), is_pickle=True)
        except (TypeError, pickle.PicklingError, AttributeError) as error:
            raise ConfigError(
                f"{type(dataset).__name__} cannot be pickled, so Ray's workers cannot read it: "
                f"{error}"
            ) from error

    def opened(self) -> Any:  # noqa: ANN401
        """Return the dataset, in a worker; the one of the task before, if it is the same.

        So a store is opened once by each process. Arrays that lie in Ray's store are not kept from
        being freed, and cost nothing to read again.
        """
        if not self.is_pickle:
            return ray.get(self.ref)
        key = self.ref.hex()
        if key not in _open:
            _open.clear()
            _open[key] = ray.cloudpickle.loads(ray.get(self.ref))
        return _open[key]


_open: dict[str, Any] = {}  # in a worker: the dataset read last, which has its files open


def _tables(
    sent: _StoredDataset,
    start: int,
    stop: int,
    at_once: int,
    names: tuple[str, ...] | None,
) -> Iterator[Any]:
    """Read samples as tables of at most `at_once` rows."""
    dataset = sent.opened()
    for begin in range(start, stop, at_once):
        rows = [_row(dataset, k, names) for k in range(begin, min(begin + at_once, stop))]
        first = rows[0]
        for number, row in enumerate(rows):
            if row.keys() != first.keys():
                raise TypeError(
                    f"{_named(dataset, begin + number)} has the columns {list(row)}, "
                    f"{_named(dataset, begin)} has {list(first)}: a table has the same in each row"
                )
        try:
            columns = {name: [row[name] for row in rows] for name in first}
            yield BlockAccessor.batch_to_arrow_block(columns)
        except Exception as error:
            annotate(error, f"while making a table of samples {begin} to {begin + len(rows) - 1}")
            raise


def _row(dataset: Any, index: int, names: tuple[str, ...] | None) -> dict[str, Any]:  # noqa: ANN401
    try:
        sample = dataset[index]
    except Exception as error:
        annotate(error, f"while reading {_named(dataset, index)} of the dataset")
        raise
    row = _columns(sample, names, lambda: _named(dataset, index))
    for name, value in row.items():
        try:
            row[name] = _as_value(value)
        except TypeError as error:
            raise TypeError(
                f"{_named(dataset, index)} has a {error} in the column {name!r}, which no column "
                "of Ray Data holds. Give arrays, tensors, numbers, text, bytes, or lists and dicts "
                "of these: convert it in the dataset, in a transform say."
            ) from None
    return row


def _named(dataset: Any, index: int) -> str:  # noqa: ANN401
    name = describe_sample(dataset, index)
    return f"sample {index}" + ("" if name is None else f" ({name})")


def _columns(sample: Any, names: tuple[str, ...] | None, named: Any) -> dict[str, Any]:  # noqa: ANN401
    if isinstance(sample, Mapping):
        if names is None:
            return {str(key): value for key, value in sample.items()}
        missing = [name for name in names if name not in sample]
        if missing:
            raise ConfigError(f"{named()} has no {missing}, but {list(sample)}: see columns=")
        return {name: sample[name] for name in names}
    is_row = isinstance(sample, (tuple, list))
    values = tuple(sample) if is_row else (sample,)
    if names is None:
        own = getattr(sample, "_fields", None)
        names = own or (tuple(map(str, range(len(values)))) if is_row else ("item",))
    if len(names) != len(values):
        raise ConfigError(
            f"{named()} has {len(values)} values, and columns= names {len(names)}: {list(names)}"
        )
    return dict(zip(names, values, strict=True))


def _as_value(value: Any) -> Any:  # noqa: ANN401
    """Return a value as Ray Data takes it.

    Raises:
        TypeError: no column holds it; the text is the name of its type.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufSUMm":
            raise TypeError(f"numpy array of {value.dtype}")
        return value if value.ndim else value[()]
    if isinstance(value, (np.generic, *_PLAIN)):
        if isinstance(value, np.complexfloating):
            raise TypeError(type(value).__name__)
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


def _size_of(value: Any) -> int:  # noqa: ANN401
    if isinstance(value, (np.ndarray, np.generic)):
        return int(value.nbytes)
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    return sum(map(_size_of, value)) if isinstance(value, list) else 8
