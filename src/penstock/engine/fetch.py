# SPDX-License-Identifier: Apache-2.0
"""Indices to a batch: reading the dataset and collating, the same code in every backend."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from penstock.data.dataset import announce_epoch, can_resume
from penstock.engine.assembly import Assembler
from penstock.engine.epoch import ShardPosition
from penstock.engine.generator_watch import GeneratorWatch, note_watched, was_watched
from penstock.engine.map_reader import MapReader
from penstock.engine.plain import map_maker, shard_maker
from penstock.engine.plan import BatchIndices, dataset_keys, sample_key
from penstock.engine.recover import BadSample, Recovery
from penstock.engine.sources import MapItemSource, StreamItemSource
from penstock.engine.status_page import StatusWriter
from penstock.engine.stream_reader import StreamReader
from penstock.randomness.samples import SampleStreams
from penstock.worker_info import ShardInfo, set_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.engine.assembly import Output
    from penstock.engine.batch_item import BatchItem
    from penstock.engine.plain import PlainMaker
    from penstock.engine.plan import RetryHints, WorkerSpec

__all__ = ["Fetcher"]


class Fetcher:
    """Makes the batches of one epoch.

    Concurrency:
        One thread.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        output: Output,
        *,
        base_seed: int = 0,
        epoch: int = 0,
        is_announced: bool = False,
        worker_id: int = 0,
        num_workers: int = 1,
        shard: ShardPosition | None = None,
        isolated: bool = False,
        in_thread: bool = False,
        compared: Callable[[Iterable[Any]], Iterator[Any]] | None = None,
        status: StatusWriter | None = None,
    ) -> None:
        """Begin an epoch: an iterable dataset's iterator is made here.

        Args:
            spec: How a task becomes a batch.
            output: Where the batches go.
            base_seed: Decides what takes the place of bad samples, where the spec has no seed.
            epoch: Its number, which decides the random numbers if the spec has a seed.
            is_announced: Whether the dataset is notified of the number.
            worker_id: Whose shard of an iterable dataset this is.
            num_workers: Of how many.
            shard: Where to go on in that shard; None begins it.
            isolated: Whether the global generators are the user's, and are to be put back.
            in_thread: Whether this is one of several threads that share the global generators,
                which are then left alone.
            compared: See `ShardInfo`.
            status: Where to write what is being done.
        """
        self._spec = spec
        self._isolated = isolated
        self._status = status = status or StatusWriter()
        status.is_watched = spec.faults.max_respawns > 0
        self._map = None if spec.is_iterable else MapReader(spec, status)
        self._streams = None
        if spec.seed is not None and not (self._map and self._map.draws_nothing):
            seeds_globals = spec.global_rng and not in_thread
            self._streams = SampleStreams(spec.seed, epoch, seeds_globals=seeds_globals)
            self._isolated = isolated and seeds_globals
        # Threads have a watch of their own, with and without a seed.
        self._finds_drawings = spec.seed is not None and not (spec.global_rng or in_thread)
        self._drawings: tuple[str, ...] = ()
        self._shard_info = ShardInfo(
            worker_id, num_workers, spec.batch_size, spec.rank, spec.world_size, compared
        )
        with self._scope():
            if is_announced:
                self._announce(epoch)
            self._stream_reader: StreamReader | None = None
            if self._map is None:
                self._stream_reader = StreamReader(
                    spec, self._streams, worker_id, num_workers, shard or ShardPosition()
                )
        if self._map is not None:
            self._map.streams = self._streams
        self._assembler = Assembler(spec, output, self._streams, status)
        seed = base_seed if spec.seed is None else spec.seed
        self._source: MapItemSource | StreamItemSource
        if self._map is not None:
            self._source = MapItemSource(self._map, spec, self._streams, seed, epoch)
        else:
            assert self._stream_reader is not None
            self._source = StreamItemSource(self._stream_reader)
        self._recovery = Recovery(self._source, self._assembler, spec, status)
        self.num_asked = 0  # samples of the batch made last; counted where a policy needs it
        if self._stream_reader is not None:
            with self._scope():
                self._stream_reader.replay(self._replay)
            self._recovery.take_bad()  # notified of when the batches were given

    def _announce(self, epoch: int) -> None:
        if self._streams is not None:
            self._streams.begin_iterator()
        announce_epoch(self._spec.dataset, epoch)

    def _scope(self) -> _Scope:
        return _Scope(self._shard_info, self._streams, isolated=self._isolated)

    def saved_position(self) -> ShardPosition | None:
        """Return how far this shard of an iterable dataset is; None for a map-style one."""
        return None if self._stream_reader is None else self._stream_reader.saved_position()

    def take_first_digest(self) -> bytes | None:
        """Return the digest of an iterable's first sample once, where it is to be compared."""
        if self._stream_reader is None:
            return None
        digest, self._stream_reader.first_sample_digest = (
            self._stream_reader.first_sample_digest,
            None,
        )
        return digest

    def take_bad(self) -> list[BadSample]:
        """Return the bad samples of the batch that was made last."""
        return self._recovery.take_bad()

    def fetch(self, indices: Any, step: int = 0, hints: RetryHints | None = None) -> Any:  # noqa: ANN401
        """Return the batch of `indices` as `Output.finish` gives it.

        Args:
            indices: A list, an int64 array, or what the sampler gave; with their place, if seeded.
            step: Number of the batch in its epoch.
            hints: How to run it after workers have died over it; None: as usual.

        Returns:
            The batch, or `penstock.engine.recover.NO_BATCH` if none of its samples could be made
            and the fault policy goes on without them.

        Raises:
            StopIteration: this worker's shard of the iterable has ended.
            Exception: whatever the dataset or the collate function raises, with a note naming the
                sample.
        """
        if self._streams is None and self._stream_reader is None:
            return self._fetch(indices, step, hints)
        watch = self._first_watch()
        with self._scope():
            if watch is not None:
                watch.begin()
            try:
                batch = self._fetch(indices, step, hints)
            finally:
                if watch is not None:
                    watch.end()
                    self._drawings = tuple(map(str, watch.found))
        if self._streams is not None:
            self._status.seeding(self._streams.take_seeding_ns())
        return batch

    @property
    def shard_position(self) -> Callable[[], ShardPosition] | None:
        """Returns how far a stream without a state is; None for a map-style dataset."""
        return None if self._stream_reader is None else self._stream_reader.shard_position

    def _first_watch(self) -> GeneratorWatch | None:
        """Return a watch for a dataset's first batch, where draws from generators go unseeded."""
        if not self._finds_drawings or was_watched(self._spec.dataset):
            return None
        note_watched(self._spec.dataset)
        return GeneratorWatch(self._spec.dataset)

    def take_drawings(self) -> tuple[str, ...]:
        """Return, once, which functions drew from the global generators in the first batch."""
        drawings, self._drawings = self._drawings, ()
        return drawings

    def plain_maker(self) -> PlainMaker | None:
        """Return a function that makes the batch of some indices by the shortest way.

        It does what `fetch` does, without what only some loaders need.

        Returns:
            None where random streams or a fault policy are to be heeded, or a stream has a state.
        """
        faults = self._spec.faults
        if self._streams is not None or faults.tolerates or faults.retries:
            return None
        if self._stream_reader is None:
            assert self._map is not None
            return map_maker(self._spec, self._map, self._assembler)
        if can_resume(self._spec.dataset):
            return None
        return shard_maker(self._spec, self._stream_reader, self._shard_info, self._assembler)

    def try_sample(self, indices: Any, number: int, hints: RetryHints | None) -> None:  # noqa: ANN401
        """Read, collate and pack one sample of a batch of a map-style dataset, and drop it.

        For a sample that may end the process: what it raises otherwise, `fetch` will raise again.

        Args:
            indices: Of the batch, as for `fetch`.
            number: Which sample of it.
            hints: What is known of samples that end workers.
        """
        assert isinstance(self._source, MapItemSource)
        position, stride = 0, 1
        if isinstance(indices, BatchIndices):
            indices, position, stride = indices
        _, keys = self._listed(indices)
        if keys is None or number >= len(keys):
            return
        with self._scope(), contextlib.suppress(Exception):
            items = self._source.begin(keys, position, stride, hints)
            self._recovery.fill(items[number], alone=True)
        self._assembler.output.abandon()
        self._recovery.take_bad()

    def _fetch(self, indices: Any, step: int, hints: RetryHints | None) -> Any:  # noqa: ANN401
        position, stride = 0, 1
        if isinstance(indices, BatchIndices):
            indices, position, stride = indices
        if self._stream_reader is not None:
            return self._fetch_stream(indices)
        faults = self._spec.faults
        if hints is None and not (faults.tolerates or faults.retries):
            return self._fetch_map(indices, position, stride)
        indices, keys = self._listed(indices)
        if keys is None:  # nothing that could be tried one by one
            return self._fetch_map(indices, position, stride)
        self.num_asked = len(keys)
        if self._streams is None:
            position = step * len(keys)  # as good as any other place, to draw replacements by
        return self._fetch_carefully(indices, keys, position, stride, hints)

    def _listed(self, indices: Any) -> tuple[Any, list[Any] | None]:  # noqa: ANN401
        """Return the indices, and a list of them; None for what is none (a slice, say)."""
        keys = dataset_keys(indices)
        if not self._spec.is_batched:
            return indices, [keys]
        try:
            listed = list(keys)
        except TypeError:
            return indices, None
        return (indices if hasattr(keys, "__len__") else listed), listed

    def _fetch_carefully(
        self,
        indices: Any,  # noqa: ANN401
        keys: list[Any],
        position: int,
        stride: int,
        hints: RetryHints | None,
    ) -> Any:  # noqa: ANN401
        assert isinstance(self._source, MapItemSource)
        if self._is_read_at_once(indices) and not _concerns(hints, keys):
            # Nobody knows which sample is bad before one is: then they are read by themselves.
            with contextlib.suppress(Exception):
                return self._fetch_map(indices, position, stride)
            self._assembler.output.abandon()
        items = self._source.begin(keys, position, stride, hints)
        for item in items:
            self._recovery.fill(item, alone=hints is not None and hints.alone)
        return self._recovery.join(items, position)

    def _is_read_at_once(self, indices: Any) -> bool:  # noqa: ANN401
        assert self._map is not None
        return self._map.whole_batch(indices) is not None or self._map.reads_together

    def _fetch_map(self, indices: Any, position: int, stride: int) -> Any:  # noqa: ANN401
        assert self._map is not None
        assembler = self._assembler
        whole = self._map.whole_batch(indices)
        if whole is not None:
            if self._streams is not None:
                self._streams.begin_batch(position, stride, len(whole))
            batch = self._map.read_whole(whole, assembler.output.empty)
            return assembler.finish(assembler.as_batch(batch), whole)
        indices = dataset_keys(indices)
        if not self._spec.is_batched:
            (samples,) = self._map.read_each([indices], position, stride)
        elif self._map.reads_together:
            if self._streams is not None:
                self._streams.begin_batch(position, stride, len(indices))
            samples = self._map.read_together(indices)
        else:
            samples = self._map.read_each(indices, position, stride)
        keys = indices if self._spec.is_batched else [indices]
        return assembler.finish(assembler.collate(samples, position, indices), keys)

    def _fetch_stream(self, indices: Any) -> Any:  # noqa: ANN401
        assert self._stream_reader is not None
        count = len(indices) if self._spec.is_batched else 1
        return self._next_of_stream(count)

    def _next_of_stream(self, count: int | None = None) -> Any:  # noqa: ANN401
        assert self._stream_reader is not None
        position = self._stream_reader.position()
        if self._spec.faults.tolerates:
            items = self._stream_reader.take(self._recovery.fill, count)
            self.num_asked = len(items)
            return self._recovery.join(items, position)
        samples: Any
        # No sample of a stream is known by its number, so that of a quick one need not be noted.
        is_quick = self._streams is None and self._status.number_cell() is not None
        if is_quick and self._stream_reader.has_begun:
            samples = self._stream_reader.take_samples(count or self._spec.batch_size or 1)
        else:
            samples = [item.sample for item in self._stream_reader.take(self._fill, count)]
        if not self._spec.is_batched:
            (samples,) = samples
        return self._assembler.finish(self._assembler.collate(samples, position))

    def _fill(self, item: BatchItem) -> None:
        assert self._stream_reader is not None
        self._status.sample(item.number)
        item.sample = self._stream_reader.read(item)

    def _replay(self) -> None:
        """Take the samples of a batch that was given before."""
        assert self._stream_reader is not None
        if not self._spec.faults.tolerates:
            self._stream_reader.take(self._fill)
            return
        # Collated as well: one that did not fit had the next sample take its place.
        self._next_of_stream()
        self._assembler.output.abandon()


class _Scope:
    """What the user's code sees of us while it runs: its shard, and its random streams."""

    def __init__(self, shard: ShardInfo, streams: SampleStreams | None, *, isolated: bool) -> None:
        self._shard = shard
        self._outer = shard
        self._active = None if streams is None else streams.active(isolated=isolated)

    def __enter__(self) -> None:
        self._outer = set_shard(self._shard)
        if self._active is not None:
            self._active.__enter__()

    def __exit__(self, *raised: Any) -> None:  # noqa: ANN401
        if self._active is not None:
            self._active.__exit__(*raised)
        set_shard(self._outer)


def _concerns(hints: RetryHints | None, keys: list[Any]) -> bool:
    if hints is None or hints.alone:
        return hints is not None
    quarantined = {key for key, _, _ in hints.quarantined}
    return any(sample_key(index) in quarantined for index in keys)
