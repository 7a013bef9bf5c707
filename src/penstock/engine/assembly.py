# SPDX-License-Identifier: Apache-2.0
"""Making a finished batch of samples: collating, and passing it to an output.

The output is memory of this process (`PlainOutput`), unless a backend packs batches.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock.collate import BatchMemory, Collator, MixedTypes
from penstock.data.dataset import is_current, length_of
from penstock.data.names import name_samples
from penstock.engine.status_page import Phase, StatusWriter
from penstock.errors import CollateError
from penstock.faults import annotate
from penstock.transport.arena import BufferPool
from penstock.transport.packing import AsTensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.data.dataset import Allocator
    from penstock.engine.plan import WorkerSpec
    from penstock.randomness.samples import SampleStreams
    from penstock.transport.page_lock import PageLock

PlainMaker = Callable[[Any, list[Any]], int]
"""Takes the indices of a task, appends its batch to a list, returns the number of samples.

The shortest way: no seed, no fault policy, nothing measured. For cheap samples, most of the time
is the loader's own work. So what is the same for every batch is decided once; the function does the
rest.
"""

_MOST_NAMED: Final = 8  # samples that are None


class Output(Protocol):
    """Destination of batches."""

    def begin(self) -> None:
        """Begin a batch."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return memory for an array of the current batch."""

    def finish(self, batch: Any) -> Any:  # noqa: ANN401
        """Return the batch as it leaves: packed, or as it is."""

    def dry_run(self, batch: Any) -> None:  # noqa: ANN401
        """Raise what `finish` would raise; nothing is kept."""

    def abandon(self) -> None:
        """Take back the memory that `empty` returned: there is no batch after all."""

    def take_cost(self) -> tuple[int, int, int]:
        """Return bytes of the batch, bytes of all memory here, and nanoseconds of allocating."""


class PlainOutput:
    """Passes batches on as they are, in recycled memory of this process.

    Concurrency:
        One thread makes batches; they may be dropped in any.
    """

    def __init__(self, page_lock: PageLock | None = None) -> None:
        """Begin without memory; `page_lock` locks what is allocated, None locks nothing."""
        self._page_lock = page_lock
        self._pool = BufferPool(page_lock=page_lock)
        self._num_bytes = 0

    def begin(self) -> None:
        """Begin a batch; see `Output`."""
        self._num_bytes = 0

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return memory for an array; it comes back when the last view of it is garbage."""
        array = self._pool.empty(shape, dtype)
        self._num_bytes += array.nbytes
        return array

    # The consumer gets this very array: neither copied nor rebuilt.
    empty.stays_here = True  # type: ignore[attr-defined]

    def take_cost(self) -> tuple[int, int, int]:
        """Return the cost of the batch, by the memory that it asked for; see `Output`."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes, self._pool.size_bytes, 0

    def finish(self, batch: object) -> object:
        """Return the batch itself."""
        return batch

    def dry_run(self, batch: object) -> None:
        """Do nothing: `finish` cannot fail."""

    def abandon(self) -> None:
        """Do nothing: garbage collection takes the memory back."""

    def close(self) -> None:
        """Give the free memory back, even while this is referred to; batches stay valid."""
        self._pool = BufferPool(page_lock=self._page_lock)


class DefaultCollate(BatchMemory, Protocol):
    """What a default collate offers (`penstock.collate.Collator`, and the frameworks' own)."""

    def sample(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample that is a batch by itself."""


class Assembler:
    """Makes batches of samples, for one epoch.

    Attributes:
        output: Where the batches go.
        empty: Allocator of their memory.

    Concurrency:
        One thread. `collate` runs the user's code, so its random streams must be active.
    """

    def __init__(
        self, spec: WorkerSpec, output: Output, streams: SampleStreams | None, status: StatusWriter
    ) -> None:
        """Collate as `spec` says, into `output`; `streams` are None without a seed."""
        self.output = output
        self.empty: Allocator = output.empty
        self._streams = streams
        self._spec = spec
        self._status = status
        self._collators: dict[bool, DefaultCollate] = {}
        # Looked up on the type, as Python does: an instance may answer to any name. Not used for a
        # subclass that overrides `__call__` alone: its own version is meant.
        kind = type(spec.collate_fn)
        self._collates_into = spec.is_batched and is_current(kind, "collate_into", ("__call__",))

    @functools.cached_property
    def for_trials(self) -> Assembler:
        """An assembler for batches that are thrown away: memory of its own, no status."""
        trials = copy.copy(self)
        trials.empty = np.empty
        trials._status = StatusWriter()
        trials._collators = {}
        return trials

    def collate(self, samples: Any, position: int, indices: Any = None) -> Any:  # noqa: ANN401
        """Return a batch of samples, or the one sample by itself where the spec is not batched."""
        self._status.phase(Phase.COLLATING)
        self._status.num_samples = length_of(samples) or 0  # `__getitems__` may give an iterator
        if self._streams is not None and self._spec.collate_fn is not None:
            self._streams.begin_collate(position)
        given = samples if self._spec.is_batched else samples[0]
        try:
            try:
                return self.collate_function()(given)
            except MixedTypes:
                assert self._spec.framework is not None  # else a mixture is no error
                importlib.import_module(self._spec.framework.root)
                return self.collate_function()(given)
        except Exception as error:
            self.explain(error, samples, indices)
            raise

    def explain(self, error: Exception, samples: Any, indices: Any) -> None:  # noqa: ANN401
        """Add notes to what collating raised: which samples, and which of them are None."""
        if not self._spec.is_batched:
            return
        # A collate function of the user's may take samples that cannot be iterated.
        searched = samples if self._spec.collate_fn is None else ()
        if none := [k for k, sample in enumerate(searched) if sample is None]:
            which = f"those at {none} of the batch"
            if indices is not None:
                some = [name_samples(self._spec.dataset, [indices[k]]) for k in none[:_MOST_NAMED]]
                which = ", ".join(some)
            annotate(
                error,
                f"the dataset returned None for {which}: return a sample, or raise an exception "
                "for one that cannot be made and set on_error='skip' or 'replace' in the loader",
            )
        if indices is not None:
            if isinstance(error, CollateError):
                error.name_samples(indices)
            named = name_samples(self._spec.dataset, indices)
            annotate(error, f"while collating {named} of the dataset")

    def finish(self, batch: Any, indices: Any = None) -> Any:  # noqa: ANN401
        """Return the batch as it leaves; `indices` are its samples', for a note."""
        self._status.phase(Phase.SENDING)
        if hasattr(indices, "__len__"):  # a batch that the dataset made was not counted yet
            self._status.num_samples = len(indices)
        try:
            return self.output.finish(batch)
        except Exception as error:
            if indices is not None:
                named = name_samples(self._spec.dataset, indices)
                annotate(
                    error, f"while pickling the batch of {named} to send it to the main process"
                )
            raise

    def as_batch(self, batch: Any) -> Any:  # noqa: ANN401
        """Return what `get_batch` gave as the loader gives it.

        A dataset of the core gives arrays, also where the loader's batches are tensors.
        """
        if self._spec.framework is None:
            return batch
        return _with_arrays_converted(batch, self._collator().sample)

    def collate_function(self) -> Callable[[Any], Any]:
        """Return the function that makes a batch of samples, or converts one.

        `collate` calls it for each batch: reading the first sample may import the framework.
        """
        collate_fn: Any = self._spec.collate_fn
        if collate_fn is not None and not self._collates_into:
            return collate_fn  # type: ignore[no-any-return]
        collator = self._collator()
        if collate_fn is not None:
            return lambda samples: collate_fn.collate_into(samples, collator)
        return collator.batch if self._spec.is_batched else collator.sample

    def _collator(self) -> DefaultCollate:
        framework = self._spec.framework
        is_loaded = framework is not None and framework.root in sys.modules
        if is_loaded not in self._collators:
            collator: DefaultCollate
            if framework is None:
                collator = Collator(self.empty)
            elif is_loaded:
                collator = importlib.import_module(framework.adapter).collator(self.empty)
            else:
                wrap = functools.partial(AsTensor, adapter=framework.adapter)
                collator = Collator(self.empty, wrap=wrap)
            self._collators[is_loaded] = collator
        return self._collators[is_loaded]


def _with_arrays_converted(batch: Any, convert: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return a batch with `convert` applied, but for rows of strings or bytes.

    They are left as collating has them, and are not looked at one by one.
    """
    if type(batch) in (list, tuple):
        if batch and type(batch[0]) in (str, bytes):
            return batch
        return [_with_arrays_converted(item, convert) for item in batch]
    if type(batch) is dict:
        return {key: _with_arrays_converted(item, convert) for key, item in batch.items()}
    return convert(batch)
