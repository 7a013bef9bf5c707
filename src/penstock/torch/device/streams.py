# SPDX-License-Identifier: Apache-2.0
"""Devices with streams and events, as CUDA and XPU: copies have a stream of their own.

    copies' stream    ──▶ copy 1 ─ event ──▶ copy 2 ─ event ──▶
    current stream    ──────────── wait ──▶ step 1 ── wait ──▶ step 2

The copies' memory belongs to the copies' stream; `record_stream` tells torch's allocator that the
consumer's reads it, so that it is used again only when what was queued there by the time it is
dropped is done.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.torch.device.accelerator import Mark

__all__ = ["StreamAccelerator"]


class StreamAccelerator:
    """One device that `torch.get_device_module` serves with streams; see `Accelerator`.

    Concurrency:
        Any thread; the consumer's queue is the calling thread's current stream of this device, also
        where another device is the thread's current one.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the device, with its index; it is put to use with the first copy."""
        self._device = device
        self._module: Any = torch.get_device_module(device)

    @property
    def device(self) -> torch.device:
        """Which one it is, with its index."""
        return self._device

    @property
    def has_queues(self) -> bool:
        """True."""
        return True

    def copying(self) -> AbstractContextManager[object]:
        """Make the copies' stream the current one, and this device with it."""
        context: AbstractContextManager[object] = self._module.stream(self._copies)
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor."""
        if not tensor.is_pinned():
            # CUDA would stage it by itself, and keep the caller until the copies before it are
            # done. torch's pinned memory is used again once the copy from it is over. Of an
            # expanded tensor each element is copied, as `to` does; pinning would refuse it.
            tensor = (tensor.contiguous() if 0 in tensor.stride() else tensor).pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def mark_copies(self) -> Mark:
        """Return an event behind the copies."""
        return _StreamMark(self._new_event(), self._copies)

    def mark_consumer(self) -> Mark:
        """Return an event behind what is in the current stream."""
        return _StreamMark(self._new_event(), self._consumer)

    def let_consumer_wait(self, mark: Mark) -> None:
        """Let the current stream wait."""
        assert isinstance(mark, _StreamMark)
        self._consumer.wait_event(mark.event)

    def give_to_consumer(self, tensor: torch.Tensor) -> None:
        """Tell torch's allocator that the current stream uses a tensor."""
        tensor.record_stream(self._consumer)

    @property
    def _copies(self) -> Any:  # noqa: ANN401
        return _copies_stream(self._device)

    @property
    def _consumer(self) -> Any:  # noqa: ANN401 - each device module has its own class
        return self._module.current_stream(self._device)

    def _new_event(self) -> Any:  # noqa: ANN401
        if self._device.type == "cuda":
            # Whoever waits sleeps: CUDA would otherwise spin, on a core that workers may need.
            return self._module.Event(blocking=True)
        return self._module.Event()


class _StreamMark:
    """An event that was recorded; none of them measures time."""

    __slots__ = ("event",)

    def __init__(self, event: Any, stream: Any) -> None:  # noqa: ANN401
        self.event = event
        event.record(stream)

    def is_over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


@functools.cache
def _copies_stream(device: torch.device) -> Any:  # noqa: ANN401
    """Return the stream for all copies to a device.

    One for all loaders and epochs: the allocator keeps freed memory apart for each stream, so a new
    stream per epoch would leave the last one's batches lying about.
    """
    module: Any = torch.get_device_module(device)
    return module.Stream(device=device)
