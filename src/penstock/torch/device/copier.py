# SPDX-License-Identifier: Apache-2.0
"""Delivery of batches on a device, the next one copied while the loop works with this one.

    begin k+1    copies' queue    │ copy k │ copy k+1 │ mark k+1
    finish k     consumer's queue          │ wait for mark k │ `to` of objects │ mark │ transform

Guarantees: host memory is held until a mark behind its copy is over; the consumer's queue reads no
batch before it is there; memory of a copy is used again only behind the consumer's use; the thread
runs at most `MAX_BEHIND` steps ahead of the device; a batch is freed by reference counting alone.

Assumption: the consumer uses a batch in the stream that was current when it was handed over.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import _utils as torch_data

from penstock.collate import mapping_like, sequence_like
from penstock.engine.stream import DeliveryHook
from penstock.faults import annotate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.torch.device.accelerator import Accelerator

# Steps that the consumer's queue may be behind. Copies do not wait for steps, so without a bound a
# batch would lie on the device for every step that the thread is ahead.
MAX_BEHIND: Final = 2
_IF_OUT_OF_MEMORY: Final = (
    "Up to four batches need room on the device beside model and step. Lower batch_size, send "
    "bytes and make floats of them there (device_transform), or call `.to()` in the loop, without "
    "`device`."
)


def map_leaves(tree: Any, fn: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return a batch with `fn(leaf)` for each of its leaves, in containers of the same types.

    Leaves are tensors, and objects whose class has a method `to`: a named tuple with a field of
    that name is none. What is neither container nor leaf stays as it is.

    Example:
        >>> map_leaves({"x": torch.ones(2), "name": "a"}, lambda leaf: leaf + 1)
        {'x': tensor([2., 2.]), 'name': 'a'}
    """
    if isinstance(tree, torch.Tensor) or callable(getattr(type(tree), "to", None)):
        return fn(tree)
    # The parts are made first: a TypeError of theirs is none of the container's constructor.
    if isinstance(tree, Mapping):
        return mapping_like(tree, {key: map_leaves(part, fn) for key, part in tree.items()})
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        parts = [map_leaves(part, fn) for part in tree]
        if isinstance(tree, tuple):
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        return sequence_like(tree, parts)
    return tree


class DeviceCopier(DeliveryHook):
    """Copies batches to a device.

    Tensors in main memory are copied in a queue of their own, from `begin` on. What is no plain
    tensor but has a method `to` (a `PackedSequence`, a graph, a sparse tensor) is moved by that
    method in `finish`, in the consumer's queue, and waited for: nothing else would hold the memory
    of its inner tensors.

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
        self._held: collections.deque[_Held] = collections.deque()  # the oldest first
        self._steps: collections.deque[Any] = collections.deque()  # marks of the consumer's queue
        self._queues: Any = accelerator if accelerator.has_queues else None
        self.begins_ahead = accelerator.has_queues
        self._device = accelerator.device
        self._transform = transform

    def without_autograd(self) -> contextlib.AbstractContextManager[object]:
        """Return a context without inference mode: its tensors could not be trained with."""
        return torch.inference_mode(False)

    def begin(self, batch: Any, where: Callable[[], str]) -> _Begun:  # noqa: ANN401 - any batch tree
        """Begin to copy a batch, whose plain tensors must not be written to before `finish`."""
        begun = _Begun(batch, where())
        held = _Held()
        if self._queues is not None:
            self._let_go()
            self._held.append(held)  # before the device is given any of it: an interrupt may come

        def copied(leaf: Any) -> Any:  # noqa: ANN401
            if isinstance(leaf, torch.Tensor) and leaf.device == self._device:
                return leaf
            if self._queues is None or not _goes_ahead(leaf):
                begun.has_objects = True
                return leaf
            held.memory.append(leaf)
            begun.copies.append(self._queues.copy(leaf))
            return begun.copies[-1]

        queue = contextlib.nullcontext() if self._queues is None else self._queues.copying()
        with self._naming(begun, "copying it"):
            with queue:
                mapped = map_leaves(batch, copied)
            if self._queues is not None:
                begun.mark = held.mark = self._queues.mark_copies()
        if begun.copies:
            begun.batch = mapped
        return begun

    def finish(self, begun: _Begun) -> Any:  # noqa: ANN401 - any batch tree
        """Return a batch on the device, for whose copies the consumer's queue waits.

        Blocks while the device is more than `MAX_BEHIND` steps behind.
        """
        if begun.mark is not None:
            self._let_go()
            while len(self._steps) >= MAX_BEHIND:
                self._steps.popleft().synchronize()
            self._queues.hand_over(begun.mark, begun.copies)
        batch = map_leaves(begun.batch, self._mover(begun)) if begun.has_objects else begun.batch
        if begun.mark is not None:
            self._steps.append(self._queues.mark_consumer())
        begun.drop()
        if self._transform is None:
            return batch
        with self._naming(begun, "transforming it"):
            try:
                return self._transform(batch)
            except StopIteration as error:  # it would end the epoch, as if there were no more
                raise RuntimeError("the transform raised StopIteration") from error

    def _mover(self, begun: _Begun) -> Callable[[Any], Any]:
        def moved(leaf: Any) -> Any:  # noqa: ANN401
            if isinstance(leaf, torch.Tensor) and (
                leaf.device == self._device or (self._queues is not None and _goes_ahead(leaf))
            ):
                return leaf  # it is there, or `begin` has copied it
            with self._naming(begun, f"moving a {type(leaf).__qualname__} by its method `to`"):
                found = leaf.to(self._device)
                if found is None:
                    raise TypeError("its method `to` returned None, not the moved object")
                return found

        return moved

    @contextlib.contextmanager
    def _naming(self, begun: _Begun, doing: str) -> Iterator[None]:
        """Name the batch in what is raised inside, and drop it: the error's frames would not."""
        try:
            yield
        except Exception as error:
            begun.drop()
            annotate(error, f"{begun.name}, on the way to {self._device}, while {doing}")
            if isinstance(error, torch.OutOfMemoryError):
                annotate(error, _IF_OUT_OF_MEMORY)
            raise

    def _let_go(self) -> None:
        """Let go of the host memory that is copied."""
        while self._held:
            held = self._held[0]
            if held.mark is None:  # its copies have failed, or an interrupt came
                held.mark = self._queues.mark_copies()
            if not held.mark.query():
                return
            self._held.popleft()

    def close(self) -> None:
        """Wait until no host memory is read any more, and let go of it; twice does nothing.

        What was handed over stays valid. A failure of the device is raised by torch's next call. A
        forked process does nothing: it must not touch the device.
        """
        if os.getpid() != self._pid:
            return
        self._steps.clear()
        while self._held:
            held = self._held[0]
            with contextlib.suppress(Exception):
                (held.mark or self._queues.mark_copies()).synchronize()
            self._held.popleft()

    def __del__(self) -> None:
        if hasattr(self, "_held"):
            self.close()


class Pinning(DeliveryHook):
    """Delivery in page-locked memory, by torch's own function."""

    def __init__(self, device_type: str) -> None:
        """Take the type of device that memory is page-locked for, as "cuda"."""
        self._device_type = device_type

    def begin(self, batch: Any, where: Callable[[], str]) -> Any:  # noqa: ANN401 - any batch tree
        """Return the batch in page-locked memory; here, as it is here that it has a name."""
        try:
            return torch_data.pin_memory.pin_memory(batch, self._device_type)
        except Exception as error:
            annotate(error, f"{where()}, while page-locking the batch (pin_memory=True)")
            raise


@dataclass(slots=True)
class _Begun:
    """A batch between `begin` and `finish`.

    Attributes:
        batch: The batch, its plain tensors as copies that are under way.
        name: Which one it is.
        copies: Those copies.
        mark: Behind them; None where nothing is copied ahead.
        has_objects: Whether something in it is moved in `finish`, by its method `to`.
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
    """Host memory of a batch that is being copied, and the mark behind the copies."""

    memory: list[torch.Tensor] = field(default_factory=list)
    mark: Any = None


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
