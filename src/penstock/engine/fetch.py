# SPDX-License-Identifier: Apache-2.0
"""Indices to a batch tree: reading the dataset and collating, the same code in every backend."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import pickle
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from penstock.collate import Collator, MixedTypes
from penstock.data.dataset import batch_reader, can_resume, is_drawless, reads_together
from penstock.engine.epoch import Share
from penstock.engine.plan import AsGiven, Placed
from penstock.errors import CollateError
from penstock.randomness.samples import SampleStreams
from penstock.transport.packing import AsTensor
from penstock.worker_info import ShareInfo, set_share, was_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.data.dataset import BatchReader, Empty
    from penstock.engine.plan import Recipe

__all__ = ["Fetcher"]

# A dataset's state is taken again after this many times what taking it took: 2 % of the time.
_STATE_INTERVAL: Final = 50.0


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

    def __init__(
        self,
        recipe: Recipe,
        empty: Empty,
        *,
        epoch: int = 0,
        is_announced: bool = False,
        worker_id: int = 0,
        num_workers: int = 1,
        share: Share | None = None,
        isolated: bool = False,
    ) -> None:
        """Begin an epoch: an iterable dataset's iterator is made here.

        Args:
            recipe: How a task becomes a batch.
            empty: Gives memory for the arrays of the batch under way.
            epoch: Its number, which decides the random numbers if the recipe has a seed.
            is_announced: Whether the dataset is told the number.
            worker_id: Whose share of an iterable dataset this is.
            num_workers: Of how many.
            share: Where to go on in that share; None begins it.
            isolated: Whether the global generators are the user's, and are to be put back.
        """
        self._recipe = recipe
        self._empty = empty
        self._collators: dict[bool, DefaultCollate] = {}
        self._worker_id = worker_id
        self._num_workers = num_workers
        self._isolated = isolated
        self._read_batch = None
        if recipe.is_batched and not recipe.is_iterable and recipe.collate_fn is None:
            self._read_batch = batch_reader(recipe.dataset)
        self._streams = None
        if recipe.seed is not None and not (self._read_batch and is_drawless(recipe.dataset)):
            self._streams = SampleStreams(recipe.seed, epoch)
        self._iterator: Iterator[Any] | None = None
        self._num_batches = 0  # of this share of an iterable
        self._ended = False
        self._is_untouched = True  # nothing was taken of the iterator
        self._state_at = 0  # batches after which its state was taken last
        self._next_state_s = 0.0
        self.first_sample_digest: bytes | None = None
        self._share_info = ShareInfo(
            worker_id, num_workers, recipe.batch_size, recipe.rank, recipe.world_size
        )
        set_epoch = getattr(recipe.dataset, "set_epoch", None)
        if is_announced and callable(set_epoch):
            with self._scope():
                if self._streams is not None:
                    self._streams.begin_iterator()
                set_epoch(epoch)
        if recipe.is_iterable:
            with self._scope():
                self._start_share(share or Share())

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        """What the user's code sees of us while it runs: its share, and its random streams."""
        outer = set_share(self._share_info)
        try:
            if self._streams is None:
                yield
            else:
                with self._streams.active(isolated=self._isolated):
                    yield
        finally:
            set_share(outer)

    def _start_share(self, share: Share) -> None:
        """Begin the iterable, or bring it to where it was."""
        dataset = self._recipe.dataset
        if share.has_ended:  # its state is that of an end, which nobody would take it from
            self._num_batches, self._ended, self._iterator = share.num_batches, True, iter(())
            return
        if share.state is not None:
            dataset.load_state_dict(pickle.loads(share.state))
            self._num_batches = self._state_at = share.state_at
        if self._streams is not None:
            self._streams.begin_iterator()
        self._iterator = iter(dataset)
        self._replay(share.num_batches - self._num_batches)

    def _replay(self, num_batches: int) -> None:
        """Take the samples of batches that were given before, under the same random numbers."""
        for _ in range(num_batches):
            try:
                self._take([None] * (self._recipe.batch_size or 1))
            except StopIteration:
                self._ended = True
                return
            except Exception:  # the user was given it, and has gone on
                continue

    def _take(self, indices: Any) -> Any:  # noqa: ANN401
        """Return the samples of the share's next batch; one that fails is a batch as well."""
        try:
            samples = self._next_samples(indices)
        except StopIteration:
            raise
        except Exception:
            self._num_batches += 1
            raise
        self._num_batches += 1
        return samples

    def share(self) -> Share | None:
        """Return how far this share of an iterable dataset is; None for a map-style one."""
        if self._iterator is None:
            return None
        state = self._new_state()
        return Share(self._num_batches, self._ended, self._state_at, state)

    def _new_state(self) -> bytes | None:
        """Return the dataset's state, pickled; None if it cannot tell, or was asked just now.

        After a state that took long the next one has to wait, and batches in between would be
        replayed. So a dataset with a large state is not slowed down by it.
        """
        dataset = self._recipe.dataset
        begun = time.perf_counter()
        if not can_resume(dataset) or begun < self._next_state_s:
            return None
        try:
            state = pickle.dumps(dataset.state_dict(), protocol=5)
        except Exception as error:  # the batch is not to be lost for it
            self._next_state_s = math.inf
            warnings.warn(
                f"{type(dataset).__name__}.state_dict() failed with {type(error).__name__}: "
                f"{error}. The loader's state can only replay this stream.",
                stacklevel=2,
            )
            return None
        ended = time.perf_counter()
        self._next_state_s = ended + _STATE_INTERVAL * (ended - begun)
        self._state_at = self._num_batches
        return state

    def fetch(self, indices: Any) -> Any:  # noqa: ANN401
        """Return the batch of `indices`: a list, an int64 array, or what the sampler gave.

        Raises:
            StopIteration: this worker's share of the iterable has ended.
            Exception: whatever the dataset or the collate function raises, with a note naming the
                sample.
        """
        position, stride = 0, 1
        if isinstance(indices, Placed):
            indices, position, stride = indices
        if self._streams is None and self._iterator is None:
            return self._fetch(indices, position, stride)
        with self._scope():
            return self._fetch(indices, position, stride)

    def _fetch(self, indices: Any, position: int, stride: int) -> Any:  # noqa: ANN401
        is_our_array = isinstance(indices, np.ndarray)
        if isinstance(indices, AsGiven):
            indices = indices.indices
        if self._read_batch is not None and _are_ints(array := np.asarray(indices)):
            if self._streams is not None:
                self._streams.begin_batch(position, stride, len(array))
            return self._read_at_once(self._read_batch, array.astype(np.int64, copy=False))
        if is_our_array:
            indices = indices.tolist()
        if self._iterator is not None:
            position = self._position_in_share(len(indices) if self._recipe.is_batched else 1, 0)
            samples = self._take(indices)
        else:
            samples = self._read(indices, position, stride)
        if self._streams is not None and self._recipe.collate_fn is not None:
            self._streams.begin_collate(position)
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

    def _read(self, indices: Any, position: int, stride: int) -> Any:  # noqa: ANN401
        dataset = self._recipe.dataset
        if self._recipe.is_batched and self._reads_together(dataset):
            if self._streams is not None:
                self._streams.begin_batch(position, stride, len(indices))
            try:
                return dataset.__getitems__(indices)
            except Exception as error:
                error.add_note(f"while reading samples {list(indices)} of the dataset")
                raise
        samples = []
        index = None
        begin = None if self._streams is None else self._streams.begin_sample
        try:
            for index in indices if self._recipe.is_batched else [indices]:
                if begin is not None:
                    begin(position)
                    position += stride
                samples.append(dataset[index])
        except Exception as error:
            error.add_note(f"while reading sample {index!r} of the dataset")
            raise
        return samples if self._recipe.is_batched else samples[0]

    def _reads_together(self, dataset: Any) -> bool:  # noqa: ANN401
        # With streams of its own, a sample is better read by itself where nothing is lost by it.
        if self._streams is not None:
            return reads_together(dataset)
        return bool(getattr(dataset, "__getitems__", None))

    def _next_samples(self, indices: Any) -> Any:  # noqa: ANN401
        if not self._recipe.is_batched:
            return self._next_sample(1, 0)
        if self._ended:
            raise StopIteration
        samples: list[Any] = []
        for k in range(len(indices)):
            try:
                samples.append(self._next_sample(len(indices), k))
            except StopIteration:
                self._ended = True
                break
        if not samples or (self._recipe.drop_last and len(samples) < len(indices)):
            raise StopIteration
        return samples

    def _next_sample(self, batch_size: int, k: int) -> Any:  # noqa: ANN401
        assert self._iterator is not None
        is_first, self._is_untouched = self._is_untouched, False
        if self._streams is not None:
            position = self._position_in_share(batch_size, k)
            if is_first:
                self._streams.begin_first_sample(position)
            else:
                self._streams.begin_sample(position)
        sample = next(self._iterator)
        is_start = self._num_batches == 0 and k == 0
        if is_start and self._num_workers > 1 and not was_asked():
            self.first_sample_digest = _digest(sample)
        return sample

    def _position_in_share(self, batch_size: int, k: int) -> int:
        """The place that sample k of the next batch would have if all shares were equally long."""
        step = self._num_batches * self._num_workers + self._worker_id
        return (step * batch_size + k) * self._recipe.world_size + self._recipe.rank

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


def _digest(sample: object) -> bytes | None:
    """Return what tells a sample from others; None for one that cannot be pickled."""
    try:
        return hashlib.blake2b(pickle.dumps(sample, protocol=5), digest_size=16).digest()
    except Exception:  # whatever a user's class does; without a digest there is just no warning
        return None
