# SPDX-License-Identifier: Apache-2.0
"""Streams that behave as torch's iterators do, where a program can see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.engine.stream import BatchStream, SerialStream
from penstock.warn import warn_user

if TYPE_CHECKING:
    from penstock.engine.assembly import PlainMaker
    from penstock.engine.plan import Given

_NEXT: Final = "enumerate(DataLoader)#penstock.__next__"


class AsTorch(BatchStream):
    """A stream that is profiled, and warns, where torch's iterator does.

    Attributes:
        len_called: What an iterable dataset said of its length, if `len(loader)` asked it.
    """

    len_called: int | None = None

    def take(self) -> Any:  # noqa: ANN401 - any batch tree
        """See `BatchStream.take`."""
        if torch.autograd.profiler._is_profiler_enabled:  # it costs as much as a small batch
            with torch.autograd.profiler.record_function(_NEXT):
                batch = super().take()
        else:
            batch = super().take()
        if self.len_called is not None and self.num_yielded > self.len_called:
            self._warn_of_length(self.len_called)
        return batch

    def _refuse_stop(self, error: StopIteration) -> None:
        self._faults.warn_of_stop(error, self.epoch)  # and let it end the epoch

    def _warn_of_length(self, len_called: int) -> None:
        warn_user(
            f"Length of IterableDataset {self._plan.spec.dataset} was reported to be {len_called} "
            f"(when accessing len(dataloader)), but {self.num_yielded} samples have been fetched. "
            "For multiprocessing data-loading, this is as each worker iterates its own copy of the "
            "dataset: give each its share by get_worker_info().",
        )


class TorchSerialStream(AsTorch, SerialStream):
    """Batches made in the loop's own thread."""

    def _plain_maker(self) -> PlainMaker | None:
        make = super()._plain_maker()
        if make is None or self.len_called is not None:
            return None

        def profiled(indices: Any, out: list[Any]) -> int:  # noqa: ANN401
            if not torch.autograd.profiler._is_profiler_enabled:
                return make(indices, out)
            with torch.autograd.profiler.record_function(_NEXT):
                return make(indices, out)

        return profiled


class StatefulSerialStream(TorchSerialStream):
    """Batches made in the loop's own thread, with the states of the dataset and its iterator."""

    def snapshot(self) -> tuple[Given, int]:
        """Return what was given, with the states as they are now, and 0: no batch came after."""
        assert self._runner is not None
        assert self._runner.maker is not None
        position = self._runner.maker.position(takes_state=True)
        assert position is not None
        return self.epoch.progress.given.with_shards([(0, position)]), 0

    def _release(self, *, in_a_hurry: bool) -> None:
        """Keep the dataset's iterator: its state may be asked for."""
        self._status.close()
