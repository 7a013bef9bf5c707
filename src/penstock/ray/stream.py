# SPDX-License-Identifier: Apache-2.0
"""A Ray Data plan as an iterable dataset: each epoch executes it anew, and nothing is kept.

Ray Data cuts the batches (`iter_batches`), so a batch that arrives is one table. The loader counts
samples, so it is given one stand-in per row (`_Row`), and `WholeBatches`, its collate function,
takes the table's arrays for them: no row is looked at.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.collate import Collator, convert
from penstock.data.dataset import IterableDataset
from penstock.errors import ConfigError, StateError
from penstock.ray.table import batch_of, joined, samples_of
from penstock.worker_info import current_shard, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.collate import BatchMemory

__all__ = ["RayStream", "WholeBatches"]

_SHUFFLED_ROWS: Final = 256  # rows that Ray Data shuffles out at once for a loader without batches


class _Row(NamedTuple):
    """A row of a table, by its number; nothing has looked at it yet."""

    table: Any
    number: int


class RayStream(IterableDataset[dict[str, Any]]):
    """Rows of a `ray.data.Dataset`, or of one consumer's part; `from_ray_data` makes one.

    Concurrency:
        One thread iterates at a time, in the main process.
    """

    def __init__(
        self,
        source: Any,  # noqa: ANN401 - a ray.data.Dataset or DataIterator
        *,
        is_share: bool,
        is_ordered: bool,
        schema: Any,  # noqa: ANN401 - a pyarrow.Schema
        seed: int | None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Stream a source; nothing is executed before iteration.

        Args:
            source: Has `iter_batches`.
            is_share: Whether it gives one consumer's rows, and not all of them.
            is_ordered: Whether two executions give the same rows in the same order, as far as this
                depends on Ray Data.
            schema: What the columns are in all blocks; None takes each table as it is.
            seed: Decides, with the epoch, what Ray Data's local shuffle draws.
            **options: Of `iter_batches`.
        """
        self._source = source
        self._is_share = is_share
        self._is_ordered = is_ordered
        self._schema = schema
        self._seed = seed
        self._options = options
        self._gives_batches = False
        self._epoch = 0
        self._pid = os.getpid()
        self._num_given = 0
        self._last: _Row | None = None  # the row given last
        self._begin_at: tuple[int, str] | None = None  # rows to skip, and what the last of them is

    def in_batches(self) -> tuple[RayStream, WholeBatches]:
        """Return this stream for a loader that collates with the second."""
        made = copy.copy(self)
        made._gives_batches = True
        return made, WholeBatches(self._schema)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration shuffle for this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Execute the plan, and give its rows.

        Raises:
            ConfigError: in a worker process, one of several workers, or a rank that all rows would
                go to.
            StateError: the rows that were given before are others now.
        """
        info = current_shard()
        is_elsewhere = get_worker_info() is not None and os.getpid() != self._pid
        if info.num_workers > 1 or is_elsewhere:
            raise ConfigError(
                "a ray.data.Dataset is read by Ray's own workers, all of it for each that iterates "
                f"it: expected num_workers=0, got {info.num_workers}. It is Ray Data's arguments "
                "that say how many read (concurrency= of read_…, map_batches), and "
                "prefetch_batches of from_ray_data how far ahead."
            )
        if info.world_size > 1 and not self._is_share:
            raise ConfigError(
                f"each of {info.world_size} ranks would get all rows of this ray.data.Dataset. "
                "Give a rank its share: ray.train.get_dataset_shard(name) inside Ray Train, or "
                f"shards = dataset.streaming_split({info.world_size}, equal=True) and shards[rank]."
            )
        begin_at, self._begin_at = self._begin_at, None
        self._num_given, self._last = 0, None
        return self._rows(info.batch_size, *(begin_at or (0, "")))

    def _rows(self, batch_size: int | None, skip: int, expected: str) -> Iterator[Any]:
        seed = None
        if self._seed is not None:
            seed = int(np.random.SeedSequence((self._seed, self._epoch)).generate_state(1)[0])
        batches = iter(
            self._source.iter_batches(
                batch_size=batch_size
                or (_SHUFFLED_ROWS if self._options["local_shuffle_buffer_size"] else None),
                batch_format="pyarrow",
                local_shuffle_seed=seed,
                **self._options,
            )
        )
        # Closed at once when the loop ends early: Ray Data goes on reading until then.
        with contextlib.closing(batches):
            for table in batches:
                # Arrow counts rows of a table without columns; Ray Data says that it has none.
                num_rows = table.num_rows if table.num_columns else 0
                first = min(max(skip - self._num_given, 0), num_rows)
                self._num_given += first
                if first and self._num_given == skip:
                    self._last = _Row(table, first - 1)
                    self._check_place(expected)
                given = [_Row(table, number) for number in range(num_rows)]
                rows = given if self._gives_batches else samples_of(table, self._schema)
                for number in range(first, num_rows):
                    self._last = given[number]
                    self._num_given += 1
                    yield rows[number]
        if self._num_given < skip:
            raise StateError(
                f"this stream was saved after {skip} rows, and has {self._num_given} now: the data "
                "changed. Begin the epoch without the state."
            )

    def _digest(self) -> str:
        """Return what tells the row given last from others."""
        if self._last is None:
            return ""
        table, number = self._last
        with np.printoptions(threshold=64, precision=17):
            text = repr(samples_of(table.slice(number, 1), self._schema))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _check_place(self, expected: str) -> None:
        if self._digest() != expected:
            raise StateError(
                f"row {self._num_given - 1} of this stream, the last one that was given when the "
                "state was saved, is another one now: the data changed, or the plan draws at "
                "random (random_shuffle() without a seed, a function that draws). Begin the epoch "
                "without the state, or let the plan give the same rows each time."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows were given, and what the last one was."""
        return {"rows": self._num_given, "last": self._digest() if self._is_ordered else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin after the rows that were given when `state` was saved.

        The plan is executed from its beginning; rows are dropped as tables, not looked at.

        Raises:
            StateError: nothing says that the rows would come in the same order.
        """
        if state["last"] is None or not self._is_ordered:
            raise StateError(
                "the rows of this stream come in no order that could be found again (parts of "
                "streaming_split, preserve_order=False, a shuffle without local_shuffle_seed), so "
                "there is nothing to go on from. Begin the epoch anew, or use "
                "dataset.materialize(), which is read by index."
            )
        self._begin_at = (state["rows"], state["last"]) if state["rows"] else None

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the row that was given last."""
        return {**self.__dict__, "_last": None}


class WholeBatches:
    """The collate function of a stream whose batches are there already.

    Concurrency:
        Any thread.
    """

    def __init__(self, schema: Any) -> None:  # noqa: ANN401 - a pyarrow.Schema, or None
        """Take the stream's schema."""
        self._schema = schema

    def collate_into(self, samples: Sequence[_Row], out: BatchMemory) -> dict[str, Any]:
        """Return rows as a batch: arrays of their table as they are, where it is all of them.

        Such arrays lie in Ray's object store and cannot be written to; tensors are copied.
        """
        parts = []
        for _, group in itertools.groupby(samples, lambda row: id(row.table)):
            rows = list(group)  # neighbours
            parts.append(rows[0].table.slice(rows[0].number, len(rows)))
        batch = batch_of(joined(parts), self._schema)
        found: dict[str, Any] = convert(
            batch, lambda leaf: out.leaf(leaf) if isinstance(leaf, np.ndarray) else leaf
        )
        return found

    def __call__(self, samples: Sequence[_Row]) -> dict[str, Any]:
        """Return the same batch of arrays."""
        return self.collate_into(samples, Collator(np.empty))
