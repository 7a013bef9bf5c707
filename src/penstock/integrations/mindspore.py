# SPDX-License-Identifier: Apache-2.0
"""Batches of `penstock.Loader` as rows of a MindSpore pipeline (`GeneratorDataset`).

MindSpore asks its source for rows in a thread of its own, some 20 ahead of the loop, and takes
NumPy's memory as it is: no copy is made on the way to a tensor. It keeps each array for as long as
the tensor lives, and with it the slot of shared memory that the array lies in, so a batch that is
held is never written over. Where no process lies between, without workers or with threads, an array
may be one of the dataset itself, and what a `transform` returns may be its own; both are copied
first.
"""

from __future__ import annotations

import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

import mindspore.dataset
import numpy as np

from penstock.errors import ConfigError
from penstock.integrations.ahead_of_loop import AheadOfLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["to_mindspore"]


def to_mindspore(
    loader: Any,  # noqa: ANN401 - a penstock.Loader
    column_names: Sequence[str],
    **options: Any,  # noqa: ANN401
) -> MindSporeBatches:
    """Return a loader's batches as columns: tensors in a loop, or a `GeneratorDataset`.

    A batch that is a dict gives its values by the columns' names; a tuple or list its members in
    their order; a single array the only column. A column is one array, so values that are lists of
    arrays, one per image, have to be padded.

    Let the loader's workers be started by "forkserver" or "spawn", and stay (`persistent_workers`):
    MindSpore has threads, which a fork does not survive.

    Args:
        loader: A `penstock.Loader`.
        column_names: Of the columns, in the order in which the loop gets them.
        **options: `pad`: name of a column of lists of arrays -> value that fills the rows missing
            in each, up to the longest of the batch: `{"boxes": 0, "labels": -1}`. `pad_to`: how
            many rows those columns have, always; graphs are then compiled once, and not for each
            new shape. `transform`: called with each batch first, to make a dict or tuple of columns
            of it; what it returns is copied, so it may fill the same buffer every time.
    """
    return MindSporeBatches(loader, column_names, **options)


class MindSporeBatches(AheadOfLoop):
    """A loader's batches in columns; make them with `to_mindspore`.

    Concurrency:
        One thread iterates at a time. The loader is iterated in MindSpore's.
    """

    def __init__(
        self,
        loader: Any,  # noqa: ANN401
        column_names: Sequence[str],
        *,
        pad: Mapping[str, float] | None = None,
        pad_to: int | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """See `to_mindspore`."""
        super().__init__(loader, transform)
        self.column_names = [column_names] if isinstance(column_names, str) else list(column_names)
        self.pad = dict(pad or {})
        self.pad_to = pad_to
        if unknown := self.pad.keys() - set(self.column_names):
            raise ConfigError(f"pad names {sorted(unknown)}; the columns are {self.column_names}.")

    def dataset(self, **options: Any) -> Any:  # noqa: ANN401
        """Return a `mindspore.dataset.GeneratorDataset` whose rows are the loader's batches.

        Each of its epochs is the loader's next one. For `Model.train`, and where something comes
        between (`dataset.map`); the state is that of the loop only where this object itself is
        iterated. After `load_state_dict` it is good for the rest of that epoch alone, because
        MindSpore insists on one length.

        Args:
            **options: For `GeneratorDataset`.
        """
        length = len(self.loader)
        if self._given is None:
            length -= self.loader.state_dict()["batches"]
        if length == 0:
            raise ConfigError(
                "MindSpore takes no dataset without rows, and no batches are left of this epoch: "
                "iterate this object once, and take the next one."
            )
        return self._dataset(_CountedRows(self, length), options)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Give the loader's next epoch, each batch as a tuple of `mindspore.Tensor`.

        Columns of text are NumPy arrays, which MindSpore has no tensors for.

        Raises:
            Exception: what the dataset or the loader raises, as it was raised in MindSpore's
                thread.
        """
        batches = iter(self.loader)  # workers start here, not in MindSpore's thread
        self._given = self.loader.state_dict()
        return self._counted(_BatchSource(self, batches))

    def _counted(self, source: _BatchSource) -> Iterator[tuple[Any, ...]]:
        rows = self._dataset(source, {}).create_tuple_iterator(num_epochs=1)
        try:
            for row in rows:
                batch = tuple(row)
                # Right before the yield, with no call between at which Ctrl-C could hit.
                self._given = source.states.popleft()
                yield batch
            self._given = None
        except RuntimeError as copy:
            if source.error is None:
                raise
            error, source.error = source.error, None
            raise error from copy
        finally:
            rows.stop()

    def _dataset(self, source: _BatchSource, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
        return mindspore.dataset.GeneratorDataset(
            source, column_names=self.column_names, **{"shuffle": False, **options}
        )

    def columns(self, batch: Any) -> tuple[NDArray[Any], ...]:  # noqa: ANN401
        """Return a batch of the loader as one array per column.

        Raises:
            ConfigError: the batch does not fit the columns; the message says what it has.
        """
        if self.transform is not None:
            batch = self.transform(batch)
        values: list[Any] = []
        if isinstance(batch, dict):
            values = [batch[name] for name in self.column_names if name in batch]
        elif isinstance(batch, (tuple, list)):
            values = list(batch)
        elif isinstance(batch, np.ndarray):
            values = [batch]
        if len(values) != len(self.column_names):
            has = list(batch) if isinstance(batch, dict) else f"{len(values)} members"
            raise ConfigError(
                f"the batch, a {type(batch).__name__}, has {has}, and the columns are "
                f"{self.column_names}. Name those that it has, or let transform= make them."
            )
        return tuple(map(self._column, self.column_names, values))

    def _column(self, name: str, value: Any) -> NDArray[Any]:  # noqa: ANN401
        if name in self.pad:
            return self._padded(name, [np.asarray(rows) for rows in value])
        is_list = isinstance(value, (list, tuple)) and any(isinstance(v, np.ndarray) for v in value)
        array = None if is_list else np.asarray(value)
        if array is None or array.dtype == object:
            raise ConfigError(
                f"column {name!r} is a {type(value).__name__} and no array of numbers or text. Pad "
                f"lists of arrays, one per sample: pad={{{name!r}: 0}}; leave others out of "
                "column_names, or let transform= convert them."
            )
        return array.copy() if self._is_shared else np.ascontiguousarray(array)

    def _padded(self, name: str, arrays: list[NDArray[Any]]) -> NDArray[Any]:
        count = max(map(len, arrays)) if self.pad_to is None else self.pad_to
        shape = (len(arrays), count, *arrays[0].shape[1:])
        padded = np.full(shape, self.pad[name], arrays[0].dtype)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array  # numpy's error where pad_to is too few rows
        return padded


class _BatchSource:
    """What a `GeneratorDataset` iterates: an epoch that has begun, or each time the next one.

    `states` are the loader's, behind each batch that MindSpore took and the loop did not get yet.
    `error` is what ended an epoch.
    """

    def __init__(self, batches: MindSporeBatches, begun: Iterator[Any] | None = None) -> None:
        self._batches = batches
        self._begun = begun
        self.states: deque[Any] = deque(maxlen=1 if begun is None else None)
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[NDArray[Any], ...]]:
        loader = self._batches.loader
        begun, self._begun = self._begun, None
        batches = iter(loader) if begun is None else begun
        try:
            for batch in batches:
                self.states.append(loader.state_dict())
                yield self._batches.columns(batch)
                del batch  # the tensors alone are to keep its memory
        except Exception as error:
            self.error = error
        if self.error is not None:
            # MindSpore keeps what is raised here, and by that the frames that it came through.
            del begun, batches
            raise RuntimeError("".join(traceback.format_exception(self.error)))


class _CountedRows(_BatchSource):
    """Epochs of one length; MindSpore refuses one of another."""

    def __init__(self, batches: MindSporeBatches, length: int) -> None:
        super().__init__(batches)
        self._length = length

    def __len__(self) -> int:
        return self._length
