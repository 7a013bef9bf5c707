# SPDX-License-Identifier: Apache-2.0
"""`DevicePrefetcher`: the batches of any iterable on a device, the next one copied meanwhile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from penstock.summary import Summarized, kind_of
from penstock.torch.device.accelerator import open_accelerator
from penstock.torch.device.copier import DeviceCopier
from penstock.torch.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch


class DevicePrefetcher(Summarized):
    """Gives the batches of a loader on a device; the next is copied while the loop computes.

    Memory that is not page-locked is copied into torch's first, in the loop's thread: let the
    loader pin (`pin_memory=True`). On the CPU batches are given as they are. A
    `penstock.torch.DataLoader` without `device=` is iterated as one with it: its state and stats
    stay exact.

    Where copies run beside the loop, the loader is iterated one batch ahead, and never beyond its
    `len()`. What it raises then is raised in its own turn. It must not write to a batch that it
    gave.

    Attributes:
        loader: The iterable.
        device: Where batches arrive, with its index.
        transform: What is done with each batch there, or None.

    Concurrency:
        Each iterator belongs to one thread, whose current stream on `device` uses the batches.

    Example:
        >>> import torch
        >>> batches = [{"x": torch.ones(2)}, {"x": torch.zeros(2)}]
        >>> for batch in DevicePrefetcher(batches, "cpu", transform=lambda b: b["x"] + 1):
        ...     print(batch.device, batch.tolist())
        cpu [2.0, 2.0]
        cpu [1.0, 1.0]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | int | torch.device = "auto",
        *,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """Look for the device; nothing is loaded before `iter()`.

        Args:
            loader: Gives batches: any nesting of mappings and sequences, of tensors and whatever
                else. What has a method `to` is moved by it.
            device: As torch takes it; "auto" is the accelerator there is, or the CPU.
            transform: Called with each batch on the device, in the loop's own stream; what it
                returns is given. `NormalizeImages(...).to(device)`, say.

        Raises:
            ConfigError: the device cannot be used.
        """
        self.loader = loader
        self.device = open_accelerator(device).device
        self.transform = transform

    def _summary(self) -> Iterator[tuple[str, object]]:
        # torch's own loader remembers that its length was asked for, and warns later.
        is_ours = isinstance(self.loader, Summarized)
        yield "loader", kind_of(self.loader) if is_ours else type(self.loader).__name__
        yield "device", str(self.device)
        if self.transform is not None:
            yield "transform", self.transform

    def __len__(self) -> int:
        """Return the loader's length; raises what the loader raises."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Begin to iterate over the loader anew; the iterator has a method `close`."""
        loader = self.loader
        # Not where a subclass makes other batches of them, or the loader has a device of its own:
        # those are to be moved.
        if (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and not loader._runs_on_torch
            and loader._target_device is None
        ):
            iterator: Iterator[Any] = loader._iter_on(self.device, self.transform)
            return iterator
        return _Batches(loader, DeviceCopier(open_accelerator(self.device), self.transform))


class _Batches:
    """One pass over an iterable."""

    def __init__(self, loader: Iterable[Any], copier: DeviceCopier) -> None:
        self._copier = copier
        self._kind = type(loader).__name__
        self._length: int | None = None
        with contextlib.suppress(TypeError, NotImplementedError):
            self._length = len(loader)  # type: ignore[arg-type]
        self._num_taken = 0
        # What was begun, or the error that came instead.
        self._ahead: tuple[Any, Exception | None] | None = None
        self._source: Iterator[Any] | None = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - any batch tree
        if self._source is None:
            raise StopIteration
        ahead, self._ahead = self._ahead, None
        try:
            begun, error = ahead or (self._begin(self._source), None)
            if error is not None:
                raise error
        except StopIteration:
            self.close()
            raise
        finally:
            ahead = error = None  # with its own traceback it would be a cycle
        batch = self._copier.finish(begun)
        # Not before: the loader may take its time, and the transform is at work meanwhile.
        if self._num_taken != self._length and self._copier.begins_ahead:
            self._look_ahead(self._source)
        return batch

    def _look_ahead(self, source: Iterator[Any]) -> None:
        try:
            with self._copier.without_autograd():
                self._ahead = self._begin(source), None
        except StopIteration as error:
            self._ahead = None, error.with_traceback(None)
        except Exception as error:
            # Its traceback leads to this frame: a cycle, until it is raised or this is closed. The
            # user's frames in it are worth that.
            self._ahead = None, error

    def _begin(self, source: Iterator[Any]) -> Any:  # noqa: ANN401
        name = f"batch {self._num_taken} of {self._kind}"
        self._num_taken += 1
        return self._copier.begin(next(source), lambda: name)

    def close(self) -> None:
        """Drop the loader's iterator, wait for copies that are under way; twice does nothing."""
        self._source = self._ahead = None
        self._copier.close()
