# SPDX-License-Identifier: Apache-2.0
"""Ray Data's blocks as a map-style dataset: rows by index, out of Ray's object store."""

from __future__ import annotations

import hashlib
import operator
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import ray
from ray.data.block import BlockAccessor

from penstock.data.dataset import Dataset
from penstock.errors import CollateError, ConfigError
from penstock.randomness.keys import checked_count
from penstock.ray.columns import Part, Rows, batch_of, with_types_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator

__all__ = ["Block", "RayTable"]

_ROWS_LOOKED_AT: Final = 32  # for the fingerprint


class Block(NamedTuple):
    """Where some rows are.

    Attributes:
        ref: Of the object that holds them.
        start: Of the rows in it, the first one.
        num_rows: How many of them.
        size_bytes: Of the object.
    """

    ref: Any
    start: int
    num_rows: int
    size_bytes: int


class RayTable(Dataset[dict[str, Any]]):
    """Rows of a `ray.data.Dataset` whose blocks are in Ray's object store, by index.

    Make one with `penstock.ray.from_ray_data`. Samples are dicts of the columns; see
    docs/guide/ray-data.md for what values become. Blocks are read in place where the node has them,
    and fetched by Ray where it has not; those read last are kept open. Copies and pickles hold
    references, no rows, and are good for as long as the process that made the blocks lives.

    Concurrency:
        Any thread, and Ray's workers. Not worker processes: they have no connection to Ray.
    """

    is_drawless = True  # reading draws no random number

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        schema: Any = None,  # noqa: ANN401 - a pyarrow.Schema
        cache_bytes: int = 1 << 30,
    ) -> None:
        """Read blocks in their order.

        Args:
            blocks: With the rows, in order.
            schema: What the columns are in all blocks; None takes each block as it is.
            cache_bytes: Size of the blocks that are kept open at most, and pinned in the object
                store by that; the one being read is in any case.
        """
        self._blocks = [block for block in blocks if block.num_rows]
        self._stops = np.cumsum([block.num_rows for block in self._blocks], dtype=np.int64)
        self._schema = schema
        self._cache_bytes = checked_count("cache_bytes", cache_bytes)
        self._fingerprint: str | None = None
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, Rows] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the open blocks."""
        own = ("_pid", "_lock", "_open")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with no open block."""
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._stops[-1]) if len(self._blocks) else 0

    def __getitem__(self, index: Any) -> dict[str, Any]:  # noqa: ANN401 - any integer
        """Return a row.

        Raises:
            IndexError: there is none with that number.
            ConfigError: this process has no connection to Ray.
        """
        (row,) = self.__getitems__([operator.index(index)])
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows; each block is fetched once.

        Raises:
            IndexError: there is none with one of the numbers.
            ConfigError: this process has no connection to Ray.
        """
        samples: list[Any] = [None] * len(indices)
        for part in self._parts(np.asarray(indices, np.int64)):
            for row, place in zip(part.taken.tolist(), part.places.tolist(), strict=True):
                samples[place] = part.rows[row]
        return samples

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> dict[str, Any]:
        """Return rows as one batch: arrays in memory from `alloc`, and lists of text.

        Raises:
            IndexError: there is no row with one of the numbers.
            CollateError: rows of different shapes, or without a value where a number is to be.
            ConfigError: this process has no connection to Ray.
        """
        if len(indices) == 0:
            raise IndexError("a batch of no rows has no columns")
        try:
            return batch_of(self._parts(indices), len(indices), alloc)
        except CollateError as error:
            error.name_samples(indices.tolist())
            raise

    def column(self, name: str) -> list[Any]:
        """Return the values of one column, as they are in rows: labels for a sampler, say.

        Only that column is sent here.

        Raises:
            KeyError: there is no such column.
        """
        self._check_connected()
        read: Any = ray.remote(num_cpus=0)(_values_of_column)
        schema = self._schema
        asked = [read.remote(ref, schema, name, start, n) for ref, start, n, _ in self._blocks]
        return [value for values in ray.get(asked) for value in values]

    @property
    def fingerprint(self) -> str:
        """A text that is another one where rows are others, or in another order, most likely.

        It is made of the number of rows and of 32 rows, and lets a loader's state say that the data
        changed.
        """
        if self._fingerprint is None:
            self._check_connected()
            count = len(self)
            chosen = np.unique(np.linspace(0, count - 1, min(count, _ROWS_LOOKED_AT), dtype=int))
            numbers, rows = self._places(chosen.astype(np.int64))
            look = ray.remote(num_cpus=0)(_digests)
            asked = [
                look.remote(
                    self._blocks[number].ref, self._schema, rows[numbers == number].tolist()
                )
                for number in np.unique(numbers).tolist()
            ]
            found = [digest for digests in ray.get(asked) for digest in digests]
            self._fingerprint = hashlib.blake2b(
                f"{count}{found}".encode(), digest_size=16
            ).hexdigest()
        return self._fingerprint

    def _check_connected(self) -> None:
        # A forked worker has its parent's module, which believes itself connected.
        if os.getpid() != self._pid or not ray.is_initialized():
            raise ConfigError(
                "these rows are in Ray's object store, and this process has no connection to Ray. "
                "Load with num_workers=0, backend='thread' or backend='ray'; worker processes "
                "cannot read them."
            )

    def _places(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the block that each row is in, and its number in the block's object."""
        count = len(self)
        wrong = indices[(indices < -count) | (indices >= count)]
        if len(wrong):
            raise IndexError(f"index {wrong[0]} is out of range: there are {count} rows")
        indices = np.where(indices < 0, indices + count, indices)
        numbers = np.searchsorted(self._stops, indices, side="right")
        offsets = np.array([block.start for block in self._blocks], np.int64)
        offsets[1:] -= self._stops[:-1]
        return numbers, indices + offsets[numbers]

    def _parts(self, indices: NDArray[np.int64]) -> Iterator[Part]:
        self._check_connected()
        numbers, rows = self._places(indices)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            yield Part(self._rows_of(number), rows[places], places)

    def _rows_of(self, number: int) -> Rows:
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                return found
        opened = Rows(_table(ray.get(self._blocks[number].ref), self._schema))
        with self._lock:
            self._open[number] = opened
            kept = sum(self._blocks[k].size_bytes for k in self._open)
            while len(self._open) > 1 and kept > self._cache_bytes:
                oldest, _ = self._open.popitem(last=False)
                kept -= self._blocks[oldest].size_bytes
        return opened


def _table(block: Any, schema: Any) -> Any:  # noqa: ANN401
    """Return a block as an Arrow table; Ray Data has some as pandas' frames."""
    return with_types_of(schema, BlockAccessor.for_block(block).to_arrow())


# Both run in Ray's workers, where a reference that was handed over has become the block.


def _values_of_column(block: Any, schema: Any, name: str, start: int, count: int) -> list[Any]:  # noqa: ANN401
    column = Rows(_table(block, schema).select([name])).columns[name]
    return [column[row] for row in range(start, start + count)]


def _digests(block: Any, schema: Any, chosen: list[int]) -> list[str]:  # noqa: ANN401
    rows = Rows(_table(block, schema))
    return [rows.digest(row) for row in chosen]
