# SPDX-License-Identifier: Apache-2.0
"""Indices to a batch tree: reading the dataset and collating, the same code in every backend."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.collate import Collator, MixedTypes
from penstock.data.dataset import batch_reader
from penstock.engine.plan import AsGiven
from penstock.errors import CollateError
from penstock.transport.packing import AsTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.data.dataset import BatchReader, Empty
    from penstock.engine.plan import Recipe

__all__ = ["Fetcher"]


class DefaultCollate(Protocol):
    """What a default collate offers (`penstock.collate.Collator`, and the frameworks' own)."""

    def batch(self, samples: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return samples as one tree."""

    def sample(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample that is a batch by itself."""


class Fetcher:
    """Makes the batches of one epoch.

    Concurrency:
        One thread.
    """

    def __init__(self, recipe: Recipe, empty: Empty) -> None:
        """Begin an epoch: an iterable dataset's iterator is made here.

        Args:
            recipe: How a task becomes a batch.
            empty: Gives memory for the arrays of the batch under way.
        """
        self._recipe = recipe
        self._empty = empty
        self._collators: dict[bool, DefaultCollate] = {}
        self._iterator = iter(recipe.dataset) if recipe.is_iterable else None
        self._ended = False
        self._read_batch = None
        if recipe.is_batched and not recipe.is_iterable and recipe.collate_fn is None:
            self._read_batch = batch_reader(recipe.dataset)

    def fetch(self, indices: Any) -> Any:  # noqa: ANN401
        """Return the batch of `indices`: a list, an int64 array, or what the sampler gave.

        Raises:
            StopIteration: this worker's share of the iterable has ended.
            Exception: whatever the dataset or the collate function raises, with a note naming the
                sample.
        """
        is_our_array = isinstance(indices, np.ndarray)
        if isinstance(indices, AsGiven):
            indices = indices.indices
        if self._read_batch is not None and _are_ints(array := np.asarray(indices)):
            return self._read_at_once(self._read_batch, array.astype(np.int64, copy=False))
        if is_our_array:
            indices = indices.tolist()
        samples = self._next_samples(indices) if self._iterator is not None else self._read(indices)
        try:
            return self._collate(samples)
        except Exception as error:
            if self._iterator is None and self._recipe.is_batched:
                if isinstance(error, CollateError):
                    error.name_samples(indices)
                error.add_note(f"while collating samples {list(indices)} of the dataset")
            raise

    def _read_at_once(self, read_batch: BatchReader, indices: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401
        try:
            batch = read_batch(indices, self._empty)
        except Exception as error:
            error.add_note(f"while reading samples {indices.tolist()} of the dataset by get_batch")
            raise
        if batch is None:
            kind = type(self._recipe.dataset).__name__
            raise TypeError(
                f"get_batch of {kind} returned None for samples {indices.tolist()}; it has to "
                "return the batch, collated as the default collate would."
            )
        # A dataset of the core gives arrays, also where the loader's batches are tensors.
        return batch if self._recipe.framework is None else self._collator().sample(batch)

    def _read(self, indices: Any) -> Any:  # noqa: ANN401
        dataset = self._recipe.dataset
        if self._recipe.is_batched and getattr(dataset, "__getitems__", None):
            try:
                return dataset.__getitems__(indices)
            except Exception as error:
                error.add_note(f"while reading samples {list(indices)} of the dataset")
                raise
        samples = []
        index = None
        try:
            for index in indices if self._recipe.is_batched else [indices]:
                samples.append(dataset[index])
        except Exception as error:
            error.add_note(f"while reading sample {index!r} of the dataset")
            raise
        return samples if self._recipe.is_batched else samples[0]

    def _next_samples(self, indices: Any) -> Any:  # noqa: ANN401
        assert self._iterator is not None
        if not self._recipe.is_batched:
            return next(self._iterator)
        if self._ended:
            raise StopIteration
        samples = []
        for _ in indices:
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                self._ended = True
                break
        if not samples or (self._recipe.drop_last and len(samples) < len(indices)):
            raise StopIteration
        return samples

    def _collate(self, samples: Any) -> Any:  # noqa: ANN401
        if self._recipe.collate_fn is not None:
            return self._recipe.collate_fn(samples)
        collator = self._collator()
        if not self._recipe.is_batched:
            return collator.sample(samples)
        try:
            return collator.batch(samples)
        except MixedTypes:
            assert self._recipe.framework is not None  # else nobody minds a mixture
            importlib.import_module(self._recipe.framework.root)
            return self._collator().batch(samples)

    def _collator(self) -> DefaultCollate:
        # Asked anew for each batch: the first sample may be what imports the framework.
        framework = self._recipe.framework
        loaded = framework is not None and framework.root in sys.modules
        if loaded not in self._collators:
            self._collators[loaded] = self._make_collator(loaded=loaded)
        return self._collators[loaded]

    def _make_collator(self, *, loaded: bool) -> DefaultCollate:
        framework = self._recipe.framework
        if framework is None:
            return Collator(self._empty)
        if not loaded:
            return Collator(self._empty, wrap=AsTensor)
        adapter = importlib.import_module(framework.adapter)
        make: Callable[[Empty], DefaultCollate] = adapter.collator
        return make(self._empty)


def _are_ints(indices: np.ndarray[Any, Any]) -> bool:
    return indices.ndim == 1 and indices.dtype.kind in "iu"
