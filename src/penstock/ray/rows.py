# SPDX-License-Identifier: Apache-2.0
"""Rows of a `ray.data.Dataset`, by index or as a stream; and samples as rows of one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations
import ray
from ray.data.block import BlockAccessor

from penstock.data.dataset import Dataset, IterableDataset
from penstock.data.names import name_samples
from penstock.engine.backends.ray.cluster import survived_forks
from penstock.errors import ConfigError, StateError
from penstock.faults import annotate
from penstock.worker_info import current_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_ROWS_AT_ONCE: Final = 256  # of a table made of samples, or of a shuffle for no batches


def _columns_of(block: Any) -> dict[str, NDArray[Any]]:  # noqa: ANN401
    """Return the columns as Ray Data's NumPy batches have them, but for integers.

    There a missing one makes floats of the others, which rounds what is beyond 2^53; here it is
    None, as a missing value of any other type that is no float.
    """
    table = BlockAccessor.for_block(block).to_arrow()
    columns: dict[str, Any] = dict(BlockAccessor.for_block(table).to_numpy())
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count and pa.types.is_integer(column.type):
            kind = column.type.to_pandas_dtype()
            values = [None if value is None else kind(value) for value in column.to_pylist()]
            columns[name] = np.array(values, object)
    return columns


def _rows_of(block: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Yield rows, whose arrays are the caller's own: those of a block cannot be written to."""
    columns = _columns_of(block)
    for number in range(len(next(iter(columns.values()), ()))):
        row = {name: column[number] for name, column in columns.items()}
        yield {name: v.copy() if isinstance(v, np.ndarray) else v for name, v in row.items()}


class RayTable(Dataset[dict[str, Any]]):
    """Rows of a materialised `ray.data.Dataset`, by index; `from_ray_data` makes one.

    A pickle holds references, no rows, and is good for as long as the process that made the blocks
    lives.

    Concurrency:
        Any thread, and Ray's workers. Not worker processes: they have no connection to Ray.
    """

    is_drawless = True  # reading draws no random number

    def __init__(self, dataset: Any) -> None:  # noqa: ANN401
        """Take references to the blocks."""
        self._blocks = []  # reference, and first row in it
        lengths = []
        for bundle in dataset.iter_internal_ref_bundles():
            slices = getattr(bundle, "slices", None) or [None] * len(bundle.block_refs)
            for ref, of, part in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
                start, stop = (part.start_offset, part.end_offset) if part else (0, of.num_rows)
                self._blocks.append((ref, start))
                lengths.append(stop - start)
        self._ends = np.cumsum([0, *lengths], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> dict[str, Any]:  # noqa: ANN401 - any integer
        """Return a row; raises as `__getitems__` does."""
        (row,) = self.__getitems__([operator.index(index)])
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows.

        Raises:
            IndexError: there is none with one of the numbers.
            ConfigError: this process has no connection to Ray.
        """
        if not (survived_forks() and ray.is_initialized()):
            raise ConfigError(
                "these rows are in Ray's object store, and this process has no connection to Ray: "
                "load with num_workers=0, backend='thread' or backend='ray'."
            )
        count = len(self)
        numbers = np.asarray(indices, np.int64)
        wrong = numbers[(numbers < -count) | (numbers >= count)]
        if len(wrong):
            raise IndexError(f"index {wrong[0]} is out of range: there are {count} rows")
        numbers = np.where(numbers < 0, numbers + count, numbers)
        blocks = np.searchsorted(self._ends, numbers, side="right") - 1
        rows: list[Any] = [None] * len(numbers)
        for block in np.unique(blocks).tolist():
            ref, start = self._blocks[block]
            places = np.flatnonzero(blocks == block)
            wanted = (numbers[places] - self._ends[block] + start).tolist()
            taken: Any = BlockAccessor.for_block(ray.get(ref)).take(wanted)
            for place, row in zip(places.tolist(), _rows_of(taken), strict=True):
                rows[place] = row
        return rows


class RayStream(IterableDataset[dict[str, Any]]):
    """Rows of a `ray.data.Dataset`, or of one consumer's part; `from_ray_data` makes one.

    Each epoch executes the plan anew, and nothing is kept.

    Concurrency:
        One thread iterates at a time, in the main process.
    """

    def __init__(
        self,
        source: Any,  # noqa: ANN401 - a ray.data.Dataset or DataIterator
        *,
        is_share: bool,
        is_ordered: bool,
        seed: int | None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Stream a source; `options` are those of its `iter_batches`."""
        self._source = source
        self._is_share = is_share
        self._is_ordered = is_ordered
        self._seed = seed
        self._options = options
        self._epoch = 0
        self._num_given = 0
        self._last: dict[str, Any] | None = None  # the row given last
        self._begin_at = 0, ""  # rows to skip, and what the last of them is

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration shuffle for this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Execute the plan, and give its rows.

        Raises:
            ConfigError: in a worker process, one of several workers, or a rank that all rows would
                go to.
            StateError: the rows that were given before are others now.
        """
        info = current_shard()
        if info.num_workers > 1 or not (survived_forks() and ray.is_initialized()):
            raise ConfigError(
                "a ray.data.Dataset is read by Ray's own workers (concurrency= of read_…, "
                f"map_batches): expected num_workers=0, got {info.num_workers}"
            )
        if info.world_size > 1 and not self._is_share:
            raise ConfigError(
                f"each of {info.world_size} ranks would get all rows of this ray.data.Dataset: "
                "give it ray.train.get_dataset_shard(name), or streaming_split(...)[rank]"
            )
        (skip, expected), self._begin_at = self._begin_at, (0, "")
        self._num_given, self._last = 0, None
        return self._rows(info.batch_size, skip, expected)

    def _rows(self, batch_size: int | None, skip: int, expected: str) -> Iterator[dict[str, Any]]:
        is_shuffled = self._options["local_shuffle_buffer_size"] is not None
        seed = None
        if self._seed is not None:
            seed = int(np.random.SeedSequence((self._seed, self._epoch)).generate_state(1)[0])
        batches = self._source.iter_batches(
            batch_size=batch_size or (_ROWS_AT_ONCE if is_shuffled else None),
            batch_format="pyarrow",
            local_shuffle_seed=seed,
            **self._options,
        )
        # Closed at once when the loop ends early: Ray Data goes on reading until then.
        with contextlib.closing(iter(batches)) as batches:
            rows = itertools.chain.from_iterable(map(_rows_of, batches))
            for self._last in itertools.islice(rows, skip):
                self._num_given += 1
            if self._num_given < skip or (skip and self._digest() != expected):
                raise StateError(
                    f"row {skip - 1} of this stream, the last one that was given when the state "
                    "was saved, is another one now, or is gone: the data changed, or the plan "
                    "draws at random. Begin the epoch without the state."
                )
            for row in rows:
                self._last = row
                self._num_given += 1
                yield row

    def _digest(self) -> str:
        """Return a digest of the row given last."""
        with np.printoptions(threshold=64, precision=17):
            return hashlib.blake2b(repr(self._last).encode(), digest_size=16).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows were given, and what the last one was."""
        return {"rows": self._num_given, "last": self._digest() if self._is_ordered else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin after the rows that were given when `state` was saved.

        The plan is executed from its beginning, and rows are dropped.

        Raises:
            StateError: nothing says that the rows would come in the same order.
        """
        if state["last"] is None or not self._is_ordered:
            raise StateError(
                "the rows of this stream come in no order that could be found again (parts of "
                "streaming_split, preserve_order=False, a shuffle without local_shuffle_seed): "
                "use dataset.materialize(), which is read by index"
            )
        self._begin_at = state["rows"], state["last"]


def tables_of(
    ref: Any,  # noqa: ANN401 - of the dataset in the object store
    names: Sequence[str] | None,
    batch: dict[str, Any],
) -> Iterator[dict[str, list[Any]]]:
    """Yield the samples of a batch of indices as tables, in a task of Ray Data's."""
    indices = batch["id"].tolist()
    dataset = ray.get(ref)
    for begin in range(0, len(indices), _ROWS_AT_ONCE):
        rows: list[dict[str, Any]] = []
        for index in indices[begin : begin + _ROWS_AT_ONCE]:
            rows.append(row_of_sample(dataset, index, names, rows[:1]))
        yield {name: [row[name] for row in rows] for name in rows[0]}


def row_of_sample(
    dataset: Any,  # noqa: ANN401
    index: int,
    names: Sequence[str] | None,
    others: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a sample as a row, with the columns of `others`."""
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
