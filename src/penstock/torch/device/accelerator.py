# SPDX-License-Identifier: Apache-2.0
"""A device as delivery sees it: a queue for copies beside the one in which the consumer's work is.

    copies' stream    ──▶ copy 1 ─ event ──▶ copy 2 ─ event ──▶
    current stream    ──────────── wait ──▶ step 1 ── wait ──▶ step 2

"The consumer's queue" is the stream that is current in the consumer's thread when a method is
called. The copies' memory belongs to the copies' stream; `record_stream` tells torch's allocator
that the consumer's reads it, so that it is used again only when what was queued there by the time
it is dropped is done.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Final

import torch

from penstock.errors import ConfigError

__all__ = ["Accelerator", "StreamAccelerator", "open_accelerator", "with_index"]

_HAS_STREAMS: Final = ("Stream", "Event", "stream", "current_stream")
_INSTEAD: Final = "device='auto' takes the accelerator there is, or else the CPU."


class _Over:
    """An event that is over, as torch's are asked."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Accelerator:
    """A device without queues that we could use: the CPU, and MPS.

    A batch in main memory is on the CPU already, and handed over as it is. MPS has one queue, which
    torch orders itself, and a copy into it returns when the host memory has been read.

    Attributes:
        device: Which one it is, with its index.
        has_queues: Whether anything goes on beside the calling thread.
    """

    has_queues = False

    def __init__(self, device: torch.device) -> None:
        """Take the device; it is put to use with the first copy."""
        self.device = device

    def copying(self) -> contextlib.AbstractContextManager[object]:
        """Let what is begun inside go into the queue of copies."""
        return contextlib.nullcontext()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a host tensor into the current queue; returns what is going to hold it.

        The host memory is the copy's until a mark behind it is over.
        """
        return tensor.to(self.device)

    def mark_copies(self) -> Any:  # noqa: ANN401 - torch's event of that device
        """Return an event behind all that is in the queue of copies."""
        return _Over()

    def mark_consumer(self) -> Any:  # noqa: ANN401
        """Return an event behind all that is in the consumer's queue."""
        return _Over()

    def let_consumer_wait(self, mark: Any) -> None:  # noqa: ANN401
        """Let the consumer's queue go on when an event of `mark_copies` is over."""

    def give_to_consumer(self, tensor: torch.Tensor) -> None:
        """Let the memory of a copy be used again only when the consumer's queue is done with it."""


class StreamAccelerator(Accelerator):
    """A device with streams and events, as CUDA and XPU: copies have a stream of their own.

    Concurrency:
        Any thread; the consumer's queue is the calling thread's current stream of this device, also
        where another device is the thread's current one.
    """

    has_queues = True

    def __init__(self, device: torch.device) -> None:
        """Take the device; it is put to use with the first copy."""
        super().__init__(device)
        self._module: Any = torch.get_device_module(device)

    def copying(self) -> contextlib.AbstractContextManager[object]:
        """Make the copies' stream the current one, and this device with it."""
        context: contextlib.AbstractContextManager[object] = self._module.stream(self._copies)
        return context

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor."""
        if not tensor.is_pinned():
            # CUDA would stage it by itself, and keep the caller until the copies before it are
            # done. torch's pinned memory is used again once the copy from it is over. Of an
            # expanded tensor each element is copied, as `to` does; pinning would refuse it.
            tensor = (tensor.contiguous() if 0 in tensor.stride() else tensor).pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def mark_copies(self) -> Any:  # noqa: ANN401
        """Return an event behind the copies."""
        return self._mark(self._copies)

    def mark_consumer(self) -> Any:  # noqa: ANN401
        """Return an event behind what is in the current stream."""
        return self._mark(self._consumer)

    def _mark(self, stream: Any) -> Any:  # noqa: ANN401
        # Who waits sleeps: CUDA would otherwise spin, on a core that workers may need.
        is_cuda = self.device.type == "cuda"
        event = self._module.Event(blocking=True) if is_cuda else self._module.Event()
        event.record(stream)
        return event

    def let_consumer_wait(self, mark: Any) -> None:  # noqa: ANN401
        """Let the current stream wait."""
        self._consumer.wait_event(mark)

    def give_to_consumer(self, tensor: torch.Tensor) -> None:
        """Tell torch's allocator that the current stream uses a tensor."""
        tensor.record_stream(self._consumer)

    @property
    def _copies(self) -> Any:  # noqa: ANN401
        return _copies_stream(self.device)

    @property
    def _consumer(self) -> Any:  # noqa: ANN401 - each device module has its own class
        return self._module.current_stream(self.device)


@functools.cache
def _copies_stream(device: torch.device) -> Any:  # noqa: ANN401
    """Return the stream for all copies to a device.

    One for all loaders and epochs: the allocator keeps freed memory apart for each stream, so a new
    stream per epoch would leave the last one's batches lying about.
    """
    module: Any = torch.get_device_module(device)
    return module.Stream(device=device)


def open_accelerator(device: str | int | torch.device) -> Accelerator:
    """Return a device to copy batches to.

    Args:
        device: As torch takes it. Without an index it is the calling thread's current device of
            that type; an integer is the index of torch's current accelerator. "auto" is that
            accelerator's current device, or the CPU where there is none.

    Raises:
        ConfigError: no device has that name, or torch cannot use it; the message tells known
            causes.
    """
    wanted = _parsed(device)
    if wanted.type == "cpu":
        return Accelerator(torch.device("cpu"))
    try:
        module: Any = torch.get_device_module(wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"device={device!r}: torch {torch.__version__} has no support for devices of type "
            f"{wanted.type!r}; batches can be copied to 'cuda', 'xpu', 'mps' and 'cpu'. {_INSTEAD}"
        ) from error
    _check_available(device, wanted, module)
    try:
        chosen = with_index(wanted)
        if all(hasattr(module, name) for name in _HAS_STREAMS):
            return StreamAccelerator(chosen)
        return Accelerator(chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device={device!r} cannot be used in this process: {error}. A process that was forked "
            "after its parent used the device cannot use it; neither can one more process where "
            "the device is set to exclusive mode."
        ) from error


def _parsed(device: object) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return _current_accelerator() or torch.device("cpu")
    if isinstance(device, int) and not isinstance(device, bool):
        current = _current_accelerator()
        if current is None:
            raise ConfigError(
                f"device={device!r} is the index of an accelerator, and torch {torch.__version__} "
                f"finds none. {_INSTEAD}"
            )
        device = f"{current.type}:{device}"
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise ConfigError(
                f"device={device!r} names none: 'cuda', 'cuda:1', 'xpu', 'mps', 'cpu' and 'auto' do"
            ) from error
    raise ConfigError(
        "device is a name ('cuda', 'cuda:1', 'cpu', 'auto'), an index or a torch.device, not "
        f"{device!r}"
    )


def _current_accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _check_available(device: object, wanted: torch.device, module: Any) -> None:  # noqa: ANN401
    kind, visible = wanted.type, os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if kind != "cuda" or visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if not module.is_available():
        versions = any(getattr(torch.version, name, None) for name in ("cuda", "hip"))
        if kind == "cuda" and not versions:
            reason = "was built without CUDA; install a build that has it."
        elif kind == "cuda":
            reason = (
                f"finds no GPU{hidden}. Known causes: no driver, or one too old for this build of "
                "torch (see nvidia-smi); a container without access to the GPU; "
                "CUDA_VISIBLE_DEVICES hides it."
            )
        else:
            reason = "finds none. Known causes: a build of torch without it, no driver."
        raise ConfigError(
            f"device={device!r} cannot be used: torch {torch.__version__} {reason} {_INSTEAD}"
        )
    count = int(module.device_count()) if hasattr(module, "device_count") else 1
    index: int | None = wanted.index  # torch's stub knows no None
    if index is not None and not 0 <= index < count:
        raise ConfigError(
            f"device={device!r} does not exist: this process sees {count} device"
            f"{'' if count == 1 else 's'} of type {kind!r}, numbered from 0{hidden}."
        )


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: without one it is the calling thread's current one.

    It is not put to use: that would be before the loader forks its workers, who would inherit the
    driver's state.
    """
    index: int | None = device.index
    if index is None:
        current = _current_accelerator()
        if current is not None and current.type == device.type:
            index = torch.accelerator.current_device_index()
        else:
            module: Any = torch.get_device_module(device.type)
            index = int(module.current_device()) if hasattr(module, "current_device") else 0
    return torch.device(device.type, index)
