# SPDX-License-Identifier: Apache-2.0
"""Outcomes of tasks that are done in the main process itself: nothing is copied nor pickled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.transport.arena import BufferPool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.engine.accounts import TaskTimes
    from penstock.engine.epoch import ShardPosition
    from penstock.engine.fault_log import Losses
    from penstock.transport.page_lock import PageLock

__all__ = ["Made", "PlainOutput", "Raised"]

_DEEPEST: Final = 3
_MOST_COUNTED: Final = 64  # items of a container; the others are taken for as large


class Made:
    """A batch, as it was made."""

    __slots__ = ("_batch", "losses", "pid", "shard", "times")

    def __init__(
        self, batch: object, shard: ShardPosition | None, losses: Losses, times: TaskTimes
    ) -> None:
        """Hold a batch, and what is known of it."""
        self._batch = batch
        self.shard = shard
        self.losses = losses
        self.times: TaskTimes | None = times
        self.pid = os.getpid()

    def result(self) -> object:
        """Return the batch."""
        return self._batch


class Raised:
    """What the user's code raised, raised again as it is."""

    __slots__ = ("_error", "losses", "pid", "shard", "times")

    def __init__(self, error: BaseException, shard: ShardPosition | None, losses: Losses) -> None:
        """Hold what was raised, and what is known of it."""
        self._error: BaseException | None = error
        self.shard = shard
        self.losses = losses
        self.times: TaskTimes | None = None
        self.pid = os.getpid()

    def result(self) -> object:
        """Raise it; once, as it is not kept."""
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # a traceback that holds its own exception would be a cycle


class PlainOutput:
    """Batches leave as they are, in recycled memory of this process.

    Concurrency:
        One thread makes batches; they may be dropped in any.
    """

    def __init__(self, page_lock: PageLock | None = None) -> None:
        """Begin with no memory; `page_lock` locks what comes to be, None leaves it as it is."""
        self._page_lock = page_lock
        self._pool = BufferPool(page_lock=page_lock)
        self._num_bytes = 0
        self._counts_bytes = True

    def begin(self, *, counts_bytes: bool) -> None:
        """Begin a batch; `counts_bytes` says whether `take_num_bytes` will be called."""
        self._num_bytes = 0
        self._counts_bytes = counts_bytes

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return memory for an array; it comes back when the last view of it is garbage."""
        array = self._pool.empty(shape, dtype)
        self._num_bytes += array.nbytes
        return array

    # What it gives is what the consumer gets: neither copied nor rebuilt.
    empty.stays_here = True  # type: ignore[attr-defined]

    def take_num_bytes(self) -> int:
        """Return the bytes of the batch, or of what was asked for, since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the recycled memory, in use and free."""
        return self._pool.size_bytes

    def finish(self, batch: object) -> object:
        """Return the batch itself."""
        # a collate function of the user's own made it
        if self._counts_bytes and not self._num_bytes:
            with contextlib.suppress(Exception):  # whatever classes of the user's do
                self._num_bytes = _num_bytes(batch)
        return batch

    def dry_run(self, batch: object) -> None:
        """Nothing that could fail."""

    def abandon(self) -> None:
        """Garbage collection takes it back."""

    def close(self) -> None:
        """Give the free memory back, whoever still refers to this; batches stay valid."""
        self._pool = BufferPool(page_lock=self._page_lock)


def _num_bytes(tree: Any, depth: int = 0) -> int:  # noqa: ANN401
    """Return about how many bytes the arrays and tensors of a batch have."""
    if isinstance(tree, (bytes, bytearray)):
        return len(tree)
    if isinstance(tree, (Mapping, Sequence)) and not isinstance(tree, str):
        items = list(tree.values()) if isinstance(tree, Mapping) else tree
        some = items[:_MOST_COUNTED] if depth < _DEEPEST else ()
        return sum(_num_bytes(item, depth + 1) for item in some) * len(items) // max(len(some), 1)
    num_bytes = getattr(tree, "nbytes", 0)
    return num_bytes if isinstance(num_bytes, int) else 0
