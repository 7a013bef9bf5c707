# SPDX-License-Identifier: Apache-2.0
"""A device as delivery sees it: a queue for copies beside the one in which the loop's work is.

copies' stream    ──▶ copy 1 ─ event ──▶ copy 2 ─ event ──▶
current stream    ──────────── wait ──▶ step 1 ── wait ──▶ step 2
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import contextlib

_HAS_STREAMS: Final = ("Stream", "Event", "stream", "current_stream")
_INSTEAD: Final = "device='auto' takes the accelerator there is, or else the CPU."


class Accelerator:
    """A device, with a queue for copies where it has streams and events, as CUDA and XPU have.

    The CPU and MPS have none that we could use. "The consumer's queue" is the stream that is
    current in the calling thread.

    Attributes:
        device: Which one it is, with its index.
        has_queues: Whether copies go on beside the calling thread; without, only `device` is used.

    Concurrency:
        Any thread.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:  # noqa: ANN401
        """Take the device and torch's module of its type; it is put to use with the first copy."""
        self.device = device
        self.has_queues = all(hasattr(module, name) for name in _HAS_STREAMS)
        self._module = module

    def copying(self) -> contextlib.AbstractContextManager[object]:
        """Make the copies' stream the current one, and this device with it."""
        context: contextlib.AbstractContextManager[object] = self._module.stream(
            _copies_stream(self.device)
        )
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a host tensor, which is read until a mark behind the copy is over."""
        if not tensor.is_pinned():
            # CUDA would stage it by itself, and keep the caller until the copies before it are
            # done. Of an expanded tensor each element is copied, as `to` does; pinning refuses it.
            tensor = (tensor.contiguous() if 0 in tensor.stride() else tensor).pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def hand_over(self, mark: Any, copies: list[torch.Tensor]) -> None:  # noqa: ANN401
        """Let the consumer's queue wait for a mark of the copies, and have their memory.

        Without `record_stream` torch would use the memory again while that queue still reads it.
        """
        consumer = self._module.current_stream(self.device)
        consumer.wait_event(mark)
        for copy in copies:
            copy.record_stream(consumer)

    def mark_copies(self) -> Any:  # noqa: ANN401 - each device module has its own class
        """Return an event behind all that is in the queue of copies."""
        return self._mark(_copies_stream(self.device))

    def mark_consumer(self) -> Any:  # noqa: ANN401
        """Return an event behind all that is in the consumer's queue."""
        return self._mark(self._module.current_stream(self.device))

    def _mark(self, stream: Any) -> Any:  # noqa: ANN401
        # A thread that waits for it sleeps: CUDA would otherwise spin, on a core that workers need.
        is_cuda = self.device.type == "cuda"
        event = self._module.Event(blocking=True) if is_cuda else self._module.Event()
        event.record(stream)
        return event


@functools.cache
def _copies_stream(device: torch.device) -> Any:  # noqa: ANN401
    """Return the stream for all copies to a device: torch keeps freed memory apart per stream."""
    module: Any = torch.get_device_module(device)
    return module.Stream(device=device)


def open_accelerator(device: str | int | torch.device) -> Accelerator:
    """Return a device to copy batches to.

    Args:
        device: As torch takes it. Without an index it is the calling thread's current device of
            that type. "auto" is torch's current accelerator, or the CPU where there is none.

    Raises:
        ConfigError: no device has that name, or torch cannot use it.
    """
    try:
        wanted = current_type() or torch.device("cpu") if device == "auto" else torch.device(device)
        if wanted.type == "cpu":
            return Accelerator(torch.device("cpu"))
        module: Any = torch.get_device_module(wanted)
        chosen = with_index(wanted)
        num_devices = module.device_count() if module.is_available() else 0
        if chosen.index >= num_devices:
            raise RuntimeError(
                f"torch {torch.__version__} finds {num_devices} devices of type {chosen.type!r} "
                "here: look at the build of torch, the driver, the container and "
                f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
            )
    except (RuntimeError, TypeError, AttributeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"device={device!r} cannot be used: {why}. {_INSTEAD}") from error
    return Accelerator(chosen, module)


def current_type() -> torch.device | None:
    """Return the kind of accelerator that torch can use here, without an index."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: without one it is the calling thread's current one.

    It is not put to use: that would be before the loader forks its workers, who would inherit the
    driver's state.
    """
    index: int | None = device.index
    if index is None:
        current = current_type()
        is_current = current is not None and current.type == device.type
        index = torch.accelerator.current_device_index() if is_current else 0
    return torch.device(device.type, index)
