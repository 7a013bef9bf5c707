# SPDX-License-Identifier: Apache-2.0
"""Devices without queues that we could use: the CPU, and MPS.

A batch in main memory is on the CPU already, and handed over as it is. MPS has one queue, which
torch orders itself, and a copy into it returns when the host memory has been read.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from penstock.torch.device.accelerator import Mark

__all__ = ["DirectAccelerator"]


class _Over:
    """A mark that is over."""

    __slots__ = ()

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_OVER: Final = _Over()


class DirectAccelerator:
    """Copies while the caller waits; see `penstock.torch.device.accelerator.Accelerator`."""

    def __init__(self, device: torch.device) -> None:
        """Take the device, with its index if it has several."""
        self._device = device

    @property
    def device(self) -> torch.device:
        """Which one it is."""
        return self._device

    @property
    def has_queues(self) -> bool:
        """False."""
        return False

    def copying(self) -> contextlib.AbstractContextManager[object]:
        """Do nothing: there is no other queue."""
        return contextlib.nullcontext()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy; the host memory has been read."""
        return tensor.to(self._device)

    def mark_copies(self) -> Mark:
        """Return a mark that is over."""
        return _OVER

    def mark_consumer(self) -> Mark:
        """Return a mark that is over."""
        return _OVER

    def let_consumer_wait(self, mark: Mark) -> None:
        """Do nothing: the copies are done."""

    def give_to_consumer(self, tensor: torch.Tensor) -> None:
        """Do nothing: memory that is used again is used in order."""
