# SPDX-License-Identifier: Apache-2.0
"""Outcomes of tasks that are done in the trainer's own process: nothing is copied nor pickled."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.transport.arena import BufferPool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.engine.accounts import TaskTimes
    from penstock.engine.epoch import Share
    from penstock.engine.fault_log import Losses

__all__ = ["Made", "PlainOutput", "Raised"]


class Made:
    """A batch, as it was made."""

    __slots__ = ("_batch", "losses", "pid", "share", "times")

    def __init__(
        self, batch: object, share: Share | None, losses: Losses, times: TaskTimes
    ) -> None:
        """Hold a batch, and what is to be told of it."""
        self._batch = batch
        self.share = share
        self.losses = losses
        self.times: TaskTimes | None = times
        self.pid = os.getpid()

    def result(self) -> object:
        """Return the batch."""
        return self._batch


class Raised:
    """What the user's code raised, raised again as it is."""

    __slots__ = ("_error", "losses", "pid", "share", "times")

    def __init__(self, error: BaseException, share: Share | None, losses: Losses) -> None:
        """Hold what was raised, and what is to be told of it."""
        self._error: BaseException | None = error
        self.share = share
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

    def __init__(self) -> None:
        """Begin with no memory."""
        self._pool = BufferPool()
        self._num_bytes = 0

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return memory for an array; it comes back when the last view of it is garbage."""
        array = self._pool.empty(shape, dtype)
        self._num_bytes += array.nbytes
        return array

    def take_num_bytes(self) -> int:
        """Return the bytes of the arrays that were asked for since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def finish(self, batch: object) -> object:
        """Return the batch itself."""
        return batch

    def rehearse(self, batch: object) -> None:
        """Nothing that could fail."""

    def abandon(self) -> None:
        """Garbage collection takes it back."""
