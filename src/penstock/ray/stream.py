# SPDX-License-Identifier: Apache-2.0
"""A Ray Data plan as an iterable dataset: each epoch executes it anew, and nothing is kept.

Ray Data cuts the batches (`iter_batches`), so a batch that arrives is one table. The loader counts
samples, so it is given one stand-in per row (`_Row`), and `WholeBatches`, its collate function,
takes the table's own arrays for them: no row is looked at.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.collate import Collator
from penstock.data.dataset import IterableDataset
from penstock.errors import ConfigError, StateError
from penstock.randomness.keys import checked_count
from penstock.ray.columns import Part, Rows, batch_of, with_types_of
from penstock.worker_info import current_shard, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.collate import BatchMemory

__all__ = ["RayStream", "WholeBatches"]

_SHUFFLED_ROWS: Final = 256  # rows that Ray Data shuffles out at once for a loader without batches


class _Row(NamedTuple):
    """A row that nobody has looked at yet."""

    rows: Rows
    number: int


class RayStream(IterableDataset[dict[str, Any]]):
    """Rows of a `ray.data.Dataset`, or of one consumer's share of it, as Ray Data executes it.

    Make one with `penstock.ray.from_ray_data`. Samples are dicts of the columns; see
    docs/guide/ray-data.md for what values become.

    Concurrency:
        One thread iterates at a time, in the trainer's process.
    """

    def __init__(
        self,
        source: Any,  # noqa: ANN401 - a ray.data.Dataset or DataIterator
        *,
        is_share: bool,
        is_ordered: bool,
        schema: Any = None,  # noqa: ANN401 - a pyarrow.Schema
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        gives_batches: bool = False,
    ) -> None:
        """Stream a source; nothing is executed before iteration.

        Args:
            source: Has `iter_batches`.
            is_share: Whether it gives one consumer's rows, and not all of them.
            is_ordered: Whether two executions give the same rows in the same order, as far as this
                depends on Ray Data.
            schema: What the columns are in all blocks; None takes each table as it is.
            prefetch_batches: Batches that Ray Data fetches ahead of the loop.
            local_shuffle_buffer_size: Rows to draw the next one from; None does not shuffle.
            local_shuffle_seed: Decides, with the epoch, what is drawn.
            gives_batches: Whether the loader collates with `WholeBatches`.
        """
        self._source = source
        self._is_share = is_share
        self._is_ordered = is_ordered
        self._schema = schema
        self._prefetch_batches = checked_count("prefetch_batches", prefetch_batches)
        self._buffer_size = local_shuffle_buffer_size
        self._seed = local_shuffle_seed
        self._gives_batches = gives_batches
        self._epoch = 0
        self._pid = os.getpid()
        self._num_given = 0
        self._last: _Row | None = None  # the row given last
        self._begin_at: tuple[int, str] | None = None  # rows to skip, and what the last of them is

    def in_batches(self) -> RayStream:
        """Return this stream for a loader that collates with `WholeBatches`."""
        return RayStream(
            self._source,
            is_share=self._is_share,
            is_ordered=self._is_ordered,
            schema=self._schema,
            prefetch_batches=self._prefetch_batches,
            local_shuffle_buffer_size=self._buffer_size,
            local_shuffle_seed=self._seed,
            gives_batches=True,
        )

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
        self._check_consumer(info.num_workers, info.world_size)
        begin_at, self._begin_at = self._begin_at, None
        self._num_given, self._last = 0, None
        return self._rows(info.batch_size, begin_at)

    def _check_consumer(self, num_workers: int, world_size: int) -> None:
        is_elsewhere = get_worker_info() is not None and os.getpid() != self._pid
        if num_workers > 1 or is_elsewhere:
            raise ConfigError(
                "a ray.data.Dataset is read by Ray's own workers, all of it for each that iterates "
                f"it: expected num_workers=0, got {num_workers}. It is Ray Data's arguments that "
                "say how many read (concurrency= of read_…, map_batches), and prefetch_batches of "
                "from_ray_data how far ahead."
            )
        if world_size > 1 and not self._is_share:
            raise ConfigError(
                f"each of {world_size} ranks would get all rows of this ray.data.Dataset. Give a "
                "rank its share: ray.train.get_dataset_shard(name) inside Ray Train, or "
                f"shards = dataset.streaming_split({world_size}, equal=True) and shards[rank]."
            )

    def _rows(self, batch_size: int | None, begin_at: tuple[int, str] | None) -> Iterator[Any]:
        skip, expected = begin_at or (0, "")
        batches = iter(
            self._source.iter_batches(
                prefetch_batches=self._prefetch_batches,
                batch_size=batch_size or (None if self._buffer_size is None else _SHUFFLED_ROWS),
                batch_format="pyarrow",
                local_shuffle_buffer_size=self._buffer_size,
                local_shuffle_seed=self._shuffle_seed(),
            )
        )
        # Closed at once when the loop ends early: Ray Data goes on reading until then.
        with contextlib.closing(batches):
            for table in batches:
                first = 0
                if self._num_given < skip:
                    first = min(skip - self._num_given, table.num_rows)
                    self._num_given += first
                    if self._num_given == skip:
                        self._check_place(_Row(self._rows_of(table), first - 1), expected)
                    if first == table.num_rows:
                        continue
                rows = self._rows_of(table)
                for number in range(first, rows.num_rows):
                    self._last = row = _Row(rows, number)
                    self._num_given += 1
                    yield row if self._gives_batches else rows[number]
        if self._num_given < skip:
            raise StateError(
                f"this stream was saved after {skip} rows, and has {self._num_given} now: the data "
                "changed. Begin the epoch without the state."
            )

    def _rows_of(self, table: Any) -> Rows:  # noqa: ANN401
        return Rows(with_types_of(self._schema, table))

    def _check_place(self, row: _Row, expected: str) -> None:
        if row.rows.digest(row.number) != expected:
            raise StateError(
                f"row {self._num_given - 1} of this stream, the last one that was given when the "
                "state was saved, is another one now: the data changed, or the plan draws at "
                "random (random_shuffle() without a seed, a function that draws). Begin the epoch "
                "without the state, or let the plan give the same rows each time."
            )
        self._last = row

    def _shuffle_seed(self) -> int | None:
        if self._seed is None:
            return None
        return int(np.random.SeedSequence((self._seed, self._epoch)).generate_state(1)[0])

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows were given, and what the last one was."""
        if not self._is_ordered:
            return {"rows": self._num_given, "last": None}
        return {
            "rows": self._num_given,
            "last": "" if self._last is None else self._last.rows.digest(self._last.number),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin after the rows that were given when `state` was saved.

        The plan is executed from its beginning; rows are dropped as tables, not looked at.

        Raises:
            StateError: nothing says that the rows would come in the same order.
        """
        if state["last"] is None or not self._is_ordered:
            raise StateError(
                "the rows of this stream come in no order that could be found again, so there is "
                "nothing to go on from: "
                + (
                    "Ray deals out the rows of streaming_split as its consumers ask for them"
                    if self._is_share
                    else "it was made with preserve_order=False, or shuffled without "
                    "local_shuffle_seed"
                )
                + ". Begin the epoch anew, or use dataset.materialize(), which is read by index."
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

    def collate_into(self, samples: Sequence[_Row], out: BatchMemory) -> dict[str, Any]:
        """Return rows as a batch: the arrays of their table as they are, where it is all of them.

        Such arrays lie in Ray's object store and cannot be written to; tensors are copied.
        """
        first = samples[0].rows
        if len(samples) == first.num_rows and all(
            row.rows is first and row.number == number for number, row in enumerate(samples)
        ):
            batch = first.batch()
        else:
            batch = batch_of(_parts(samples), len(samples), out.empty)
        return {name: _as_leaves(value, out) for name, value in batch.items()}

    def __call__(self, samples: Sequence[_Row]) -> dict[str, Any]:
        """Return the same batch of arrays."""
        return self.collate_into(samples, Collator(np.empty))


def _parts(samples: Sequence[_Row]) -> list[Part]:
    """Return rows as parts of a batch, neighbours of one table together."""
    parts: list[Part] = []
    begin = 0
    for place, row in enumerate(samples):
        if place + 1 == len(samples) or samples[place + 1].rows is not row.rows:
            taken = np.array([r.number for r in samples[begin : place + 1]], np.int64)
            parts.append(Part(row.rows, taken, np.arange(begin, place + 1)))
            begin = place + 1
    return parts


def _as_leaves(tree: Any, out: BatchMemory) -> Any:  # noqa: ANN401
    if isinstance(tree, np.ndarray):
        return out.leaf(tree)
    if type(tree) is dict:
        return {key: _as_leaves(value, out) for key, value in tree.items()}
    if type(tree) is list and tree and not isinstance(tree[0], (str, bytes, type(None))):
        return [_as_leaves(value, out) for value in tree]
    return tree
