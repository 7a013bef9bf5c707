# SPDX-License-Identifier: Apache-2.0
"""Hands batches over on a device, the next one copied while the consumer works with this one.

    begin k+1    copies' queue    │ copy k │ copy k+1 │ mark k+1
    finish k     consumer's queue          │ wait for mark k │ `to` of objects │ mark │ transform

Guarantees: host memory is held until a mark behind its copy is over; the consumer's queue reads no
batch before it is there; memory of a copy is used again only behind the consumer's use; the thread
runs at most `MAX_BEHIND` steps ahead of the device; a batch is freed by reference counting
alone.

Assumptions: the consumer uses a batch in the stream that was current when it was handed over.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import _utils as torch_data

from penstock.faults import annotate
from penstock.torch.device.containers import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.torch.device.accelerator import Accelerator

__all__ = ["MAX_BEHIND", "MAX_OUTSTANDING", "DeviceCopier", "Pinning"]

MAX_OUTSTANDING: Final = 8  # batches in main memory that are being copied
# Steps that the consumer's queue may be behind. Copies do not wait for steps, so without a bound a
# batch would lie on the device for every step that the thread is ahead.
MAX_BEHIND: Final = 2

_IF_OUT_OF_MEMORY: Final = (
    "Copies are ahead of the consumer's work, so up to four batches need room on the device beside "
    "model and step. Lower batch_size, leave out of the batch what the step does "
    "not use, send bytes and make floats of them there (device_transform), or go without the copy "
    "ahead: no `device`, and `.to()` in the loop."
)


class DeviceCopier:
    """Copies batches to a device; a `penstock.engine.stream.DeliveryHook`.

    Tensors in main memory are copied in a queue of their own, from `begin` on. What is no plain
    tensor but has a method `to` (a `PackedSequence`, a graph, a sparse tensor) is moved by that
    method in `finish`, in the consumer's queue: its inner tensors cannot be seen from here, so
    their memory could not be kept until the consumer's queue is done with it.

    Whatever a copy, a `to` or the transform raises keeps its type, and a note names batch and
    device. That batch is lost; the next one goes on.

    Concurrency:
        The consumer's thread. A forked copy does nothing when closed.
    """

    def __init__(
        self, accelerator: Accelerator, transform: Callable[[Any], Any] | None = None
    ) -> None:
        """Begin with nothing under way.

        Args:
            accelerator: Where batches go.
            transform: Called with each batch on the device, in the consumer's queue; what it
                returns is the consumer's. None changes nothing.
        """
        self._pid = os.getpid()
        self._copies = _Outstanding(accelerator.mark_copies, accelerator.device)
        self._consumers = _Outstanding(accelerator.mark_consumer, accelerator.device)
        self._accelerator = accelerator
        self._device = accelerator.device
        self._transform = transform

    @property
    def begins_ahead(self) -> bool:
        """Whether copies go on beside the calling thread."""
        return self._accelerator.has_queues

    def without_autograd(self) -> contextlib.AbstractContextManager[object]:
        """Return a context without inference mode: its tensors could not be trained with."""
        return torch.inference_mode(False)

    def begin(self, batch: Any, where: Callable[[], str]) -> _Begun:  # noqa: ANN401 - any batch tree
        """Begin to copy a batch.

        It waits for nothing but, where more than `MAX_OUTSTANDING` batches were begun and never
        finished, the oldest copy.

        Args:
            batch: Any batch tree. Its plain tensors are held until they are copied; they must not
                be written to before.
            where: Names the batch in messages; called at once.

        Returns:
            For `finish`; may be dropped.

        Raises:
            Exception: what a copy raised, or, named after it, the copy of an earlier batch.
        """
        self._copies.let_go()
        self._consumers.let_go()
        self._copies.wait_down_to(MAX_OUTSTANDING - 1)
        begun = _Begun(batch, where())
        held = self._copies.hold(begun.name)
        try:
            with self._accelerator.copying():
                mapped = map_leaves(batch, functools.partial(self._copied, begun, held))
        except Exception as error:
            # Some copies may have been begun: their host memory is held until a later mark.
            begun.drop()  # the error's frames would keep it on the device
            annotate(error, f"{begun.name}, while copying the batch to {self._device}")
            _advise(error)
            raise
        begun.mark = self._copies.mark(held)
        if begun.copies:
            begun.batch = mapped
        return begun

    def _copied(self, begun: _Begun, held: _Held, leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, torch.Tensor) and leaf.device == self._device:
            return leaf
        if not _goes_ahead(leaf):
            begun.has_objects = True
            return leaf
        held.memory.append(leaf)
        copy = self._accelerator.copy(leaf)
        begun.copies.append(copy)
        return copy

    def finish(self, begun: _Begun) -> Any:  # noqa: ANN401 - any batch tree
        """Return a batch on the device; it may still be under way, as the consumer's queue knows.

        Blocks while the device is more than `MAX_BEHIND` steps behind.

        Raises:
            Exception: what a method `to` or the transform raised, or, named after it, the device's
                work for an earlier batch.
        """
        self._copies.let_go()
        self._consumers.let_go()
        self._consumers.wait_down_to(MAX_BEHIND - 1)
        if begun.mark is not None:
            self._accelerator.let_consumer_wait(begun.mark)
        for copy in begun.copies:
            self._accelerator.give_to_consumer(copy)
        batch = self._with_objects(begun)
        name = begun.name
        begun.drop()
        if self._transform is None:
            return batch
        try:
            return self._transform(batch)
        except StopIteration as error:  # it would end the epoch, as if there were no more batches
            raise RuntimeError(
                f"the transform raised StopIteration at the batch of {name} on {self._device}: an "
                "iterator that it asks has no more. itertools.cycle(...) would begin anew"
            ) from error
        except Exception as error:
            annotate(error, f"{name}, while the transform worked on the batch on {self._device}")
            _advise(error)
            raise

    def _with_objects(self, begun: _Begun) -> Any:  # noqa: ANN401
        """Return the batch with its objects on the device; mark the consumer's queue behind it."""
        held = self._consumers.hold(begun.name)
        batch = begun.batch
        if begun.has_objects:
            with _Listening(held.memory):
                batch = map_leaves(batch, functools.partial(self._moved, begun.name, held))
        self._consumers.mark(held)
        return batch

    def _moved(self, name: str, held: _Held, leaf: Any) -> Any:  # noqa: ANN401
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor and (leaf.device == self._device or _goes_ahead(leaf)):
            return leaf  # it is there, or `begin` has copied it
        held.memory.append(leaf)
        kind: Any = type(leaf)
        try:
            # Into main memory too only what waits is safe: nobody else would wait for it.
            if self._accelerator.has_queues and (is_tensor or _takes_non_blocking(kind)):
                moved = leaf.to(self._device, non_blocking=True)
            else:
                moved = leaf.to(self._device)
            if moved is None:
                raise TypeError(
                    "its method `to` returned None; it is to return the moved object, which takes "
                    "the place of this one in the batch"
                )
            return moved
        except Exception as error:
            annotate(
                error,
                f"{name}, while moving a {kind.__module__}.{kind.__qualname__} of the batch to "
                f"{self._device} by its method `to`",
            )
            _advise(error)
            raise

    def close(self) -> None:
        """Wait until no host memory is read any more, and let go of it; twice does nothing.

        What was handed over stays valid. A failure of the device is not told here: whoever waits
        for the device next is told. A forked process does nothing: it must not touch the device.
        """
        if os.getpid() == self._pid:
            self._copies.close()
            self._consumers.close()

    def __del__(self) -> None:
        if hasattr(self, "_consumers"):
            self.close()


class Pinning:
    """Hands batches over in page-locked memory, by torch's own function; a `DeliveryHook`.

    Concurrency:
        The consumer's thread.
    """

    def __init__(self, device_type: str) -> None:
        """Take the type of device that memory is page-locked for, as "cuda"."""
        self._device_type = device_type

    @property
    def begins_ahead(self) -> bool:
        """False: it is done when `begin` returns."""
        return False

    def without_autograd(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that changes nothing: nothing is begun ahead."""
        return contextlib.nullcontext()

    def begin(self, batch: Any, where: Callable[[], str]) -> Any:  # noqa: ANN401 - any batch tree
        """Return the batch in page-locked memory.

        Here and not in `finish`, as it is here that the batch has a name.

        Raises:
            Exception: what torch, or a method `pin_memory` of the user's, raised.
        """
        try:
            return torch_data.pin_memory.pin_memory(batch, self._device_type)
        except Exception as error:
            annotate(error, f"{where()}, while page-locking the batch (pin_memory=True)")
            raise

    def finish(self, begun: Any) -> Any:  # noqa: ANN401
        """Return what `begin` did."""
        return begun

    def close(self) -> None:
        """Do nothing: nothing is under way."""


@dataclass(slots=True)
class _Begun:
    """A batch between `begin` and `finish`.

    Attributes:
        batch: The batch, its plain tensors as copies that are under way.
        name: Which one it is.
        copies: Those copies.
        mark: Behind them; None before there is one.
        has_objects: Whether something in it is moved later, by its method `to`.
    """

    batch: Any
    name: str
    copies: list[torch.Tensor] = field(default_factory=list)
    mark: Any = None
    has_objects: bool = False

    def drop(self) -> None:
        self.batch = None
        self.copies.clear()


@dataclass(slots=True, eq=False)
class _Held:
    """Host memory of a batch that a queue of the device reads.

    Attributes:
        name: The batch.
        memory: What keeps it: tensors, and objects with tensors in them.
        mark: Behind all that reads it; None if there is none yet, or it has failed.
    """

    name: str
    memory: list[Any] = field(default_factory=list)
    mark: Any = None


class _Outstanding:
    """What a queue of the device was given and has not done yet, the oldest first."""

    def __init__(self, make_mark: Callable[[], Any], device: torch.device) -> None:
        self._make_mark = make_mark
        self._device = device
        self._held: collections.deque[_Held] = collections.deque()

    def hold(self, name: str) -> _Held:
        """Begin to hold a batch, before the device is given any of it: an interrupt may come."""
        held = _Held(name)
        self._held.append(held)
        return held

    def mark(self, held: _Held) -> Any:  # noqa: ANN401 - an event
        """Return a mark behind what the queue was given of a batch; raises as `let_go` does."""
        with self._naming(held):
            return self._mark_of(held)

    def _mark_of(self, held: _Held) -> Any:  # noqa: ANN401
        if held.mark is None:
            held.mark = self._make_mark()
        return held.mark

    def let_go(self) -> None:
        """Let go of what is done.

        Raises:
            RuntimeError: it failed. Its memory is held until a later mark is over.
        """
        while self._held:
            with self._naming(self._held[0]):
                if not self._mark_of(self._held[0]).query():
                    return
            self._held.popleft()

    def wait_down_to(self, number: int) -> None:
        """Wait for the oldest until at most `number` batches are left; raises as `let_go` does."""
        while len(self._held) > number:
            with self._naming(self._held[0]):
                self._mark_of(self._held[0]).synchronize()
            self._held.popleft()

    @contextlib.contextmanager
    def _naming(self, held: _Held) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            held.mark = None
            annotate(
                error,
                f"{held.name}: the device's work for this batch, or what was in the same queue "
                f"before it, has failed on {self._device}. It came to light only now",
            )
            raise

    def close(self) -> None:
        """Wait for all that holds memory, and let go; what fails is over."""
        while self._held:
            held = self._held[0]
            if held.memory:
                # An interrupt leaves the rest held, for another call.
                with contextlib.suppress(Exception):
                    self._mark_of(held).synchronize()
            self._held.popleft()


class _Listening(TorchFunctionMode):
    """Keeps every tensor of main memory that torch is called with, as long as `memory` lives.

    A method `to` may replace its object's tensors (graphs of torch_geometric do): the object no
    longer holds what is being copied then.
    """

    def __init__(self, memory: list[Any]) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._memory.append(value)
        return func(*args, **kwargs)


def _goes_ahead(leaf: object) -> bool:
    """Return whether a leaf is one piece of main memory, which the copies' queue may copy.

    Sparse, nested and wrapping tensors consist of others, and a `to` of their own may do anything.
    """
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and type(leaf).to is torch.Tensor.to
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


@functools.cache
def _takes_non_blocking(kind: Any) -> bool:  # noqa: ANN401
    """Return whether the method `to` of a class has an argument `non_blocking`."""
    try:
        parameters = inspect.signature(kind.to).parameters
    except (TypeError, ValueError):  # a built-in may have no signature
        return False
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or "non_blocking" in parameters


def _advise(error: Exception) -> None:
    if isinstance(error, torch.OutOfMemoryError):
        annotate(error, _IF_OUT_OF_MEMORY)
