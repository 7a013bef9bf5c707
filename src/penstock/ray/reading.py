# SPDX-License-Identifier: Apache-2.0
"""A `ray.data.Dataset` as a dataset of Penstock's: rows by index, or as a stream."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations
import ray
from ray.data.block import BlockAccessor

from penstock.data.dataset import Dataset, IterableDataset
from penstock.engine.backends.ray.cluster import survived_forks
from penstock.errors import ConfigError, StateError
from penstock.worker_info import current_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

_SHUFFLED_ROWS: Final = 256  # rows that Ray Data shuffles out at once for a loader without batches


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


def _row_of(columns: Mapping[str, NDArray[Any]], number: int) -> dict[str, Any]:
    """Return a row, whose arrays are the caller's own: those of a block cannot be written to."""
    row = {name: column[number] for name, column in columns.items()}
    return {name: v.copy() if isinstance(v, np.ndarray) else v for name, v in row.items()}


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
            columns = _columns_of(taken)
            for number, place in enumerate(places.tolist()):
                rows[place] = _row_of(columns, number)
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
        self._begin_at: tuple[int, str] | None = None  # rows to skip, and what the last of them is

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
        begin_at, self._begin_at = self._begin_at, None
        self._num_given, self._last = 0, None
        return self._rows(info.batch_size, *(begin_at or (0, "")))

    def _rows(self, batch_size: int | None, skip: int, expected: str) -> Iterator[dict[str, Any]]:
        is_shuffled = self._options["local_shuffle_buffer_size"] is not None
        seed = None
        if self._seed is not None:
            seed = int(np.random.SeedSequence((self._seed, self._epoch)).generate_state(1)[0])
        batches = self._source.iter_batches(
            batch_size=batch_size or (_SHUFFLED_ROWS if is_shuffled else None),
            batch_format="pyarrow",
            local_shuffle_seed=seed,
            **self._options,
        )
        # Closed at once when the loop ends early: Ray Data goes on reading until then.
        with contextlib.closing(iter(batches)) as batches:
            for columns in map(_columns_of, batches):
                num_rows = len(next(iter(columns.values()), ()))
                first = min(max(skip - self._num_given, 0), num_rows)
                self._num_given += first
                if first and self._num_given == skip:
                    self._last = _row_of(columns, first - 1)
                    if self._digest() != expected:
                        raise StateError(
                            f"row {skip - 1} of this stream, the last one that was given when the "
                            "state was saved, is another one now: the data changed, or the plan "
                            "draws at random. Begin the epoch without the state."
                        )
                for number in range(first, num_rows):
                    self._last = row = _row_of(columns, number)
                    self._num_given += 1
                    yield row
        if self._num_given < skip:
            raise StateError(
                f"this stream was saved after {skip} rows, and has {self._num_given} now: the data "
                "changed. Begin the epoch without the state."
            )

    def _digest(self) -> str:
        """Return what tells the row given last from others."""
        with np.printoptions(threshold=64, precision=17):
            return hashlib.blake2b(repr(self._last).encode(), digest_size=16).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows were given, and what the last one was."""
        return {"rows": self._num_given, "last": self._digest() if self._is_ordered else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin after the rows that were given when `state` was saved.

        The plan is executed from its beginning; rows are dropped without being looked at.

        Raises:
            StateError: nothing says that the rows would come in the same order.
        """
        if state["last"] is None or not self._is_ordered:
            raise StateError(
                "the rows of this stream come in no order that could be found again (parts of "
                "streaming_split, preserve_order=False, a shuffle without local_shuffle_seed): "
                "use dataset.materialize(), which is read by index"
            )
        self._begin_at = (state["rows"], state["last"]) if state["rows"] else None
