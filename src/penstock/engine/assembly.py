# SPDX-License-Identifier: Apache-2.0
"""Samples to a finished batch: collating, and handing it to where it goes."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock.collate import BatchMemory, Collator, MixedTypes
from penstock.data.dataset import is_current
from penstock.engine.reader import name_samples
from penstock.engine.status_page import Phase
from penstock.errors import CollateError
from penstock.faults import annotate
from penstock.transport.packing import AsTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.collate import CollateInto
    from penstock.data.dataset import Allocator
    from penstock.engine.output import Output
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusWriter
    from penstock.randomness.samples import SampleStreams

__all__ = ["Assembler", "count_samples"]

_MOST_NAMED: Final = 8  # samples


class DefaultCollate(BatchMemory, Protocol):
    """What a default collate offers (`penstock.collate.Collator`, and the frameworks' own)."""

    def batch(self, samples: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return samples as one tree."""

    def sample(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample that is a batch by itself."""


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


def _collates_into(kind: type) -> bool:
    # Of the type, as Python looks up its own methods: an object that answers to any name has none.
    # A subclass that overrides the call alone means its own version to be used.
    return is_current(kind, "collate_into", ("__call__",))


def count_samples(samples: Any) -> int:  # noqa: ANN401
    """Return how many samples there are; `__getitems__` may give what has no length."""
    return len(samples) if hasattr(samples, "__len__") else 0


class Assembler:
    """Makes batches of samples, for one epoch.

    Attributes:
        output: Where the batches go.
        streams: The samples' random streams; None without a seed.

    Concurrency:
        One thread. `collate` runs the user's code, so its random streams must be active.
    """

    def __init__(
        self, spec: WorkerSpec, output: Output, streams: SampleStreams | None, status: StatusWriter
    ) -> None:
        """Collate as `spec` says, into `output`."""
        self.output = output
        self.streams = streams
        self._spec = spec
        self._status = status
        self._collators: dict[tuple[bool, bool], DefaultCollate] = {}

    def collate(
        self,
        samples: Any,  # noqa: ANN401
        position: int,
        indices: Any = None,  # noqa: ANN401
        *,
        dry_run: bool = False,
    ) -> Any:  # noqa: ANN401
        """Return a batch of samples, or a sample by itself where the spec is not batched.

        Args:
            samples: A list; or the sample.
            position: Place of the batch's first sample in the epoch's global order.
            indices: Of the samples, for a note; None for those of an iterable.
            dry_run: Whether the batch is thrown away: it gets private memory, and the caller
                notes why.
        """
        if not dry_run:
            self._status.phase(Phase.COLLATING)
            self._status.batch_of(count_samples(samples) if self._spec.is_batched else 1)
        if self.streams is not None and self._spec.collate_fn is not None:
            self.streams.begin_collate(position)
        try:
            return self._collate(samples, dry_run=dry_run)
        except Exception as error:
            self.explain(error, samples, indices)
            raise

    def explain(self, error: Exception, samples: Any, indices: Any) -> None:  # noqa: ANN401
        """Add notes to what collating raised: which samples, and which of them are None."""
        if self._spec.is_batched and self._spec.collate_fn is None:
            self._note_none(error, samples, indices)
        if indices is not None and self._spec.is_batched:
            if isinstance(error, CollateError):
                error.name_samples(indices)
            named = name_samples(self._spec.dataset, indices)
            annotate(error, f"while collating {named} of the dataset")

    def _note_none(self, error: Exception, samples: Any, indices: Any) -> None:  # noqa: ANN401
        """Add a note to `error` that names the samples that are None, if there are any."""
        none = [k for k, sample in enumerate(samples) if sample is None]
        if not none:
            return
        if indices is None:
            named = f"of the {len(samples)} samples of this batch, those at {none} are None"
        else:
            first = [name_samples(self._spec.dataset, [indices[k]]) for k in none[:_MOST_NAMED]]
            more = f" and {len(none) - len(first)} more" if len(none) > len(first) else ""
            named = f"the dataset returned None for {', '.join(first)}{more}"
        annotate(
            error,
            f"{named}: return a sample, or raise an exception for one that cannot be made and set "
            "on_error='skip' or 'replace' in the loader",
        )

    def finish(self, batch: Any, indices: Any = None) -> Any:  # noqa: ANN401
        """Return the batch as it leaves; `indices` are its samples', for a note."""
        self._status.phase(Phase.SENDING)
        if hasattr(indices, "__len__"):  # a batch that the dataset made was not counted yet
            self._status.batch_of(len(indices))
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

    def plain_collate(self) -> Callable[[Any], Any]:
        """Return the function that makes a batch of samples, or converts one, for a whole epoch.

        Where batches are made, all frameworks that they need are loaded.
        """
        collate_fn: Any = self._spec.collate_fn
        if collate_fn is None:
            collator = self._collator()
            return collator.batch if self._spec.is_batched else collator.sample
        if self._spec.is_batched and _collates_into(type(collate_fn)):
            into: CollateInto = collate_fn
            return lambda samples: into.collate_into(samples, self._collator())
        return collate_fn  # type: ignore[no-any-return]

    def _collate(self, samples: Any, *, dry_run: bool) -> Any:  # noqa: ANN401
        collate_fn: Any = self._spec.collate_fn
        if collate_fn is not None:
            if self._spec.is_batched and _collates_into(type(collate_fn)):
                into: CollateInto = collate_fn
                return into.collate_into(samples, self._collator(dry_run=dry_run))
            return collate_fn(samples)
        collator = self._collator(dry_run=dry_run)
        if not self._spec.is_batched:
            return collator.sample(samples)
        try:
            return collator.batch(samples)
        except MixedTypes:
            assert self._spec.framework is not None  # else nobody minds a mixture
            importlib.import_module(self._spec.framework.root)
            return self._collator(dry_run=dry_run).batch(samples)

    def _collator(self, *, dry_run: bool = False) -> DefaultCollate:
        # Asked anew for each batch: the first sample may be what imports the framework.
        framework = self._spec.framework
        loaded = framework is not None and framework.root in sys.modules
        kind = loaded, dry_run
        if kind not in self._collators:
            empty: Allocator = np.empty if dry_run else self.output.empty
            self._collators[kind] = self._make_collator(empty, loaded=loaded)
        return self._collators[kind]

    def _make_collator(self, empty: Allocator, *, loaded: bool) -> DefaultCollate:
        framework = self._spec.framework
        if framework is None:
            return Collator(empty)
        if not loaded:
            return Collator(empty, wrap=functools.partial(AsTensor, adapter=framework.adapter))
        adapter = importlib.import_module(framework.adapter)
        make: Callable[[Allocator], DefaultCollate] = adapter.collator
        return make(empty)
