# SPDX-License-Identifier: Apache-2.0
"""A device as delivery sees it: a queue for copies beside the one in which the consumer's work is.

    copies      │ batch 1 │ batch 2 │            │ batch 3 │
    consumer's  │         │ step 1  │  step 2    │  step 3 ...

"The consumer's queue" is the stream that is current in the consumer's thread when a method is
called.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from penstock.errors import ConfigError
from penstock.torch.device.direct import DirectAccelerator
from penstock.torch.device.streams import StreamAccelerator

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Accelerator", "Mark", "open_accelerator", "with_index"]

_HAS_STREAMS: Final = ("Stream", "Event", "stream", "current_stream")
_INSTEAD: Final = "device='auto' takes the accelerator there is, or else the CPU."


class Mark(Protocol):
    """A place in a queue of a device."""

    def is_over(self) -> bool:
        """Return whether all before it is done. Does not wait.

        Raises:
            RuntimeError: something before it failed. It is not known what is done then.
        """

    def wait(self) -> None:
        """Block this thread until all before it is done; raises as `is_over` does."""


class Accelerator(Protocol):
    """One device.

    Concurrency:
        One thread.
    """

    @property
    def device(self) -> torch.device:
        """Which one it is, with its index."""

    @property
    def has_queues(self) -> bool:
        """Whether anything goes on beside the calling thread; False for the CPU."""

    def copying(self) -> AbstractContextManager[object]:
        """Let what is begun inside go into the queue of copies."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a host tensor into the current queue; returns what is going to hold it.

        The host memory is the copy's until a mark behind it is over.
        """

    def mark_copies(self) -> Mark:
        """Return a mark behind all that is in the queue of copies."""

    def mark_consumer(self) -> Mark:
        """Return a mark behind all that is in the consumer's queue."""

    def let_consumer_wait(self, mark: Mark) -> None:
        """Let the consumer's queue go on from here when `mark` is over; no thread waits.

        Args:
            mark: Of `mark_copies`.
        """

    def give_to_consumer(self, tensor: torch.Tensor) -> None:
        """Let the memory of a copy be used again only when the consumer's queue is done with it."""


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
        return DirectAccelerator(torch.device("cpu"))
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
        return DirectAccelerator(chosen)
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
    if not module.is_available():
        raise ConfigError(f"device={device!r} cannot be used: {_reason(wanted.type)} {_INSTEAD}")
    count = int(module.device_count()) if hasattr(module, "device_count") else 1
    index = _index_of(wanted)
    if index is not None and not 0 <= index < count:
        raise ConfigError(
            f"device={device!r} does not exist: this process sees {count} device"
            f"{'' if count == 1 else 's'} of type {wanted.type!r}, numbered from 0"
            f"{_visible(wanted.type)}."
        )


def _reason(kind: str) -> str:
    if kind == "cuda":
        if not any(getattr(torch.version, name, None) for name in ("cuda", "hip")):
            return f"torch {torch.__version__} was built without CUDA; install a build that has it."
        return (
            f"torch {torch.__version__} finds no GPU{_visible(kind)}. Known causes: no driver, or "
            "one too old for this build of torch (see nvidia-smi); a container without access to "
            "the GPU; CUDA_VISIBLE_DEVICES hides it."
        )
    return (
        f"torch {torch.__version__} finds none. Known causes: a build of torch without it, no "
        "driver."
    )


def _visible(kind: str) -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if kind != "cuda" or value is None else f" (CUDA_VISIBLE_DEVICES={value!r})"


def _index_of(device: torch.device) -> int | None:
    return device.index  # torch's stub knows no None


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: without one it is the calling thread's current one.

    It is not put to use: that would be before the loader forks its workers, who would inherit the
    driver's state.
    """
    index = _index_of(device)
    return torch.device(device.type, _current_index(device.type) if index is None else index)


def _current_index(kind: str) -> int:
    current = _current_accelerator()
    if current is not None and current.type == kind:
        return torch.accelerator.current_device_index()
    module = torch.get_device_module(kind)
    return int(module.current_device()) if hasattr(module, "current_device") else 0
