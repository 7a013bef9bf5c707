# SPDX-License-Identifier: Apache-2.0
"""Batches that a framework takes ahead of the loop, and where the loop is meanwhile.

A framework that keeps NumPy's memory must be given memory that is not written to. An array that
comes from another process is such memory. One that comes from this process, of a loader
without workers or with threads, may be the dataset's own, and what a transform returns may be a
buffer that it fills again: those are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.engine.backends import traits_of
from penstock.options import backend_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class AheadOfLoop:
    """A loader whose batches are taken before the loop gets them."""

    def __init__(self, loader: Any, transform: Callable[[Any], Any] | None) -> None:  # noqa: ANN401
        """Keep the loader, and what is called with each batch here."""
        self.loader = loader
        self.transform = transform
        self._given: Mapping[str, Any] | None = None  # None: the loader's own state is ours

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self.loader)

    @property
    def _is_shared(self) -> bool:
        """Whether the arrays of a batch may be written to later."""
        return (
            self.transform is not None
            or getattr(self.loader, "num_workers", 0) == 0
            or traits_of(backend_name(getattr(self.loader, "backend", "thread"))).shares_interpreter
        )

    @property
    def epoch(self) -> int:
        """Number of the epoch that the loop is in; between two, of the next one."""
        return int(self.state_dict()["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state behind the batch that the loop was given last.

        What was taken ahead does not count.
        """
        return dict(self.loader.state_dict() if self._given is None else self._given)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on where `state` was saved; see `penstock.Loader`.

        Raises:
            StateError: as the loader's.
        """
        self.loader.load_state_dict(state)
        self._given = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` begins; see `penstock.Loader`."""
        self.loader.set_epoch(epoch)
        self._given = None
