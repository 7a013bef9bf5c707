# SPDX-License-Identifier: Apache-2.0
"""Destinations of batches: memory of their own process, unless a backend packs them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.transport.arena import BufferPool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.transport.page_lock import PageLock

__all__ = ["Output", "PlainOutput"]

_DEEPEST: Final = 3
_MOST_COUNTED: Final = 64  # items of a container; the others are assumed as large


class Output(Protocol):
    """Destination of batches."""

    def begin(self, *, counts_bytes: bool) -> None:
        """Begin a batch; `counts_bytes` says whether `take_cost` has to know its bytes."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return memory for an array of the current batch."""

    def finish(self, batch: Any) -> Any:  # noqa: ANN401
        """Return the batch as it leaves: packed, or as it is."""

    def dry_run(self, batch: Any) -> None:  # noqa: ANN401
        """Raise what `finish` would raise; nothing is kept."""

    def abandon(self) -> None:
        """Take back the memory that `empty` returned: there is no batch after all."""

    def take_cost(self) -> tuple[int, int, int]:
        """Return bytes of the batch, bytes of all memory here, and nanoseconds of allocating."""


class PlainOutput:
    """Passes batches on as they are, in recycled memory of this process.

    Concurrency:
        One thread makes batches; they may be dropped in any.
    """

    def __init__(self, page_lock: PageLock | None = None) -> None:
        """Begin without memory; `page_lock` locks what is allocated, None locks nothing."""
        self._page_lock = page_lock
        self._pool = BufferPool(page_lock=page_lock)
        self._num_bytes = 0
        self._counts_bytes = True

    def begin(self, *, counts_bytes: bool) -> None:
        """Begin a batch; see `Output`."""
        self._num_bytes = 0
        self._counts_bytes = counts_bytes

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return memory for an array; it comes back when the last view of it is garbage."""
        array = self._pool.empty(shape, dtype)
        self._num_bytes += array.nbytes
        return array

    # The consumer gets this very array: neither copied nor rebuilt.
    empty.stays_here = True  # type: ignore[attr-defined]

    def take_cost(self) -> tuple[int, int, int]:
        """Return the cost of the batch, by the memory that it asked for, if any; see `Output`."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes, self._pool.size_bytes, 0

    def finish(self, batch: object) -> object:
        """Return the batch itself."""
        if self._counts_bytes and not self._num_bytes:  # a collate function of the user's made it
            with contextlib.suppress(Exception):  # whatever classes of the user's do
                self._num_bytes = _num_bytes(batch)
        return batch

    def dry_run(self, batch: object) -> None:
        """Do nothing: `finish` cannot fail."""

    def abandon(self) -> None:
        """Do nothing: garbage collection takes the memory back."""

    def close(self) -> None:
        """Give the free memory back, even while this is referred to; batches stay valid."""
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
