# SPDX-License-Identifier: Apache-2.0
"""Making batches from indices: reading and collating, for one epoch of one worker."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from penstock.data.dataset import announce_epoch, can_resume
from penstock.engine.assembly import Assembler
from penstock.engine.generator_watch import GeneratorWatch, note_watched, was_watched
from penstock.engine.map_reader import MapReader
from penstock.engine.plain import map_maker, shard_maker
from penstock.engine.plan import BatchIndices, ShardPosition, dataset_keys, sample_key
from penstock.engine.recover import BadSample, Recovery
from penstock.engine.stream_reader import StreamReader
from penstock.engine.task import Notices
from penstock.randomness.samples import SampleStreams
from penstock.worker_info import ShardInfo, set_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.engine.output import Output
    from penstock.engine.plain import PlainMaker
    from penstock.engine.plan import RetryHints, WorkerSpec
    from penstock.engine.reader import BatchItem
    from penstock.engine.status_page import StatusWriter
    from penstock.engine.task import BeginEpoch, WorkerIdentity

__all__ = ["BatchMaker"]


class BatchMaker:
    """Makes the batches of one epoch.

    Attributes:
        num_asked: Number of samples asked of the last batch; counted where a policy needs it.

    Concurrency:
        One thread.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        output: Output,
        status: StatusWriter,
        identity: WorkerIdentity,
        begun: BeginEpoch,
        *,
        restores_generators: bool = False,
        in_thread: bool = False,
        compared: Callable[[Iterable[Any]], Iterator[Any]] | None = None,
    ) -> None:
        """Begin an epoch; this makes the iterator of an iterable dataset.

        Args:
            spec: Spec of the worker: how a task becomes a batch.
            output: Destination of the batches.
            status: Writer of the worker's status.
            identity: Identity of this worker.
            begun: The epoch, and the position to go on from.
            restores_generators: Whether to restore the global generators, which are the user's,
                after each batch.
            in_thread: Whether this is one of several threads that share the global generators,
                which it leaves alone.
            compared: See `ShardInfo`.

        Raises:
            Exception: what the dataset raises when it is notified of the epoch, or iterated.
        """
        epoch = begun.epoch
        self.num_asked = 0
        self._spec = spec
        self._status = status
        status.is_watched = spec.faults.max_respawns > 0
        self._restores_generators = restores_generators
        seed = identity.base_seed if spec.seed is None else spec.seed
        self._map = None if spec.is_iterable else MapReader(spec, status, seed, epoch)
        self._stream: StreamReader | None = None
        self._random = None
        if spec.seed is not None and not (self._map and self._map.draws_nothing):
            seeds_globals = spec.global_rng and not in_thread
            self._random = SampleStreams(spec.seed, epoch, seeds_globals=seeds_globals)
            self._restores_generators = restores_generators and seeds_globals
        # Threads have a watch of their own, with and without a seed.
        self._finds_drawings = spec.seed is not None and not (spec.global_rng or in_thread)
        self._drawings: tuple[str, ...] = ()
        self._shard = ShardInfo(
            identity.worker_id,
            identity.num_workers,
            spec.batch_size,
            spec.rank,
            spec.world_size,
            compared,
        )
        with self._scope():
            if begun.is_announced:
                if self._random is not None:
                    self._random.begin_iterator()
                announce_epoch(spec.dataset, epoch)
            if self._map is None:
                self._stream = StreamReader(
                    spec,
                    self._random,
                    identity.worker_id,
                    identity.num_workers,
                    begun.position or ShardPosition(),
                )
        if self._map is not None:
            self._map.streams = self._random
        self._assembler = Assembler(spec, output, self._random, status)
        reader = self._stream if self._map is None else self._map
        assert reader is not None
        self._recovery = Recovery(reader, self._assembler, spec, status)
        if self._stream is not None:
            with self._scope():
                self._stream.replay(self._replay)
            self._recovery.take_bad()  # they were reported when the batches were given

    def _scope(self) -> _Scope:
        return _Scope(self._shard, self._random, restores=self._restores_generators)

    def make(self, indices: Any, step: int = 0, hints: RetryHints | None = None) -> Any:  # noqa: ANN401
        """Return the batch of `indices` as `Output.finish` gives it.

        Args:
            indices: A list, an int64 array, or what the sampler gave; with their place, if seeded.
            step: Number of the batch in its epoch.
            hints: Hints on samples that end workers; None if there are none.

        Returns:
            The batch, or `penstock.engine.recover.NO_BATCH` if none of its samples could be made
            and the fault policy goes on without them.

        Raises:
            StopIteration: this worker's shard of the iterable has ended.
            Exception: whatever the dataset or the collate function raises, with a note naming the
                sample.
        """
        if self._random is None and self._stream is None:
            return self._make(indices, step, hints)
        watch = self._first_watch()
        with self._scope():
            if watch is not None:
                watch.begin()
            try:
                batch = self._make(indices, step, hints)
            finally:
                if watch is not None:
                    watch.end()
                    self._drawings = tuple(watch.found)
        if self._random is not None:
            self._status.seeding(self._random.take_seeding_ns())
        return batch

    def _first_watch(self) -> GeneratorWatch | None:
        """Return a watch for a dataset's first batch, where draws from generators go unseeded."""
        if not self._finds_drawings or was_watched(self._spec.dataset):
            return None
        note_watched(self._spec.dataset)
        return GeneratorWatch(self._spec.dataset)

    def position(self) -> ShardPosition | None:
        """Return the position in the shard of an iterable dataset; None for a map-style one."""
        return None if self._stream is None else self._stream.position()

    @property
    def shard_position(self) -> Callable[[], ShardPosition] | None:
        """Function that returns a stream's position, without its state; None if map-style."""
        return None if self._stream is None else self._stream.shard_position

    def take_bad(self) -> list[BadSample]:
        """Return the bad samples of the batch that was made last."""
        return self._recovery.take_bad()

    def take_notices(self) -> Notices | None:
        """Return the findings of the first batch, once; None if there are none."""
        stream, drawings = self._stream, self._drawings
        digest = None if stream is None else stream.first_digest
        if digest is None and not drawings:
            return None
        self._drawings = ()
        if stream is not None:
            stream.first_digest = None
        return Notices(first_digest=digest, drawings=drawings)

    def plain_maker(self) -> PlainMaker | None:
        """Return a function that makes the batch of some indices by the shortest way.

        It does what `make` does, without what only some loaders need.

        Returns:
            The function; None where there are random streams or a policy, or a stream has a state.
        """
        faults = self._spec.faults
        if self._random is not None or faults.tolerates or faults.retries:
            return None
        if self._map is not None:
            return map_maker(self._spec, self._map, self._assembler)
        assert self._stream is not None
        if can_resume(self._spec.dataset):
            return None
        return shard_maker(self._spec, self._stream, self._shard, self._assembler)

    def try_sample(self, indices: Any, number: int, hints: RetryHints | None) -> None:  # noqa: ANN401
        """Read, collate and pack one sample of a batch of a map-style dataset, and drop it.

        This finds a sample that ends the process. Exceptions are ignored: `make` will raise them.

        Args:
            indices: Indices of the batch, as for `make`.
            number: Number of the sample in it.
            hints: Hints on samples that end workers.
        """
        assert self._map is not None
        indices, position, stride = _parts_of(indices)
        _, keys = self._listed(indices)
        if keys is None or number >= len(keys):
            return
        with self._scope(), contextlib.suppress(Exception):
            items = self._map.items_of(keys, position, stride, hints)
            self._recovery.fill(items[number], alone=True)
        self._assembler.output.abandon()
        self._recovery.take_bad()

    def _make(self, indices: Any, step: int, hints: RetryHints | None) -> Any:  # noqa: ANN401
        if self._stream is not None:
            count = len(indices) if self._spec.is_batched else 1
            return self._make_of_stream(self._stream, count)
        assert self._map is not None
        indices, position, stride = _parts_of(indices)
        faults = self._spec.faults
        if hints is None and not (faults.tolerates or faults.retries):
            return self._make_of_map(self._map, indices, position, stride)
        indices, keys = self._listed(indices)
        if keys is None:  # nothing that could be tried one by one
            return self._make_of_map(self._map, indices, position, stride)
        self.num_asked = len(keys)
        if self._random is None:
            position = step * len(keys)  # as good as any other place, to draw replacements by
        at_once = self._map.reads_together or self._map.whole_batch(indices) is not None
        if at_once and not _concerns(hints, keys):
            # If this fails, each sample is read by itself to find the bad one.
            with contextlib.suppress(Exception):
                return self._make_of_map(self._map, indices, position, stride)
            self._assembler.output.abandon()
        items = self._map.items_of(keys, position, stride, hints)
        for item in items:
            self._recovery.fill(item, alone=hints is not None and hints.alone)
        return self._recovery.join(items, position)

    def _listed(self, indices: Any) -> tuple[Any, list[Any] | None]:  # noqa: ANN401
        """Return the indices, and a list of them; None if they have no list (a slice, say)."""
        keys = dataset_keys(indices)
        if not self._spec.is_batched:
            return indices, [keys]
        try:
            listed = list(keys)
        except TypeError:
            return indices, None
        return (indices if hasattr(keys, "__len__") else listed), listed

    def _make_of_map(self, reader: MapReader, indices: Any, position: int, stride: int) -> Any:  # noqa: ANN401
        assembler, random = self._assembler, self._random
        whole = reader.whole_batch(indices)
        if whole is not None:
            if random is not None:
                random.begin_batch(position, stride, len(whole))
            batch = reader.read_whole(whole, assembler.output.empty)
            return assembler.finish(assembler.as_batch(batch), whole)
        indices = dataset_keys(indices)
        if not self._spec.is_batched:
            (sample,) = reader.read_each([indices], position, stride)
            return assembler.finish(assembler.collate(sample, position, indices), [indices])
        if reader.reads_together:
            if random is not None:
                random.begin_batch(position, stride, len(indices))
            samples = reader.read_together(indices)
        else:
            samples = reader.read_each(indices, position, stride)
        return assembler.finish(assembler.collate(samples, position, indices), indices)

    def _make_of_stream(self, reader: StreamReader, count: int | None) -> Any:  # noqa: ANN401
        place = reader.place()
        if self._spec.faults.tolerates:
            items = reader.take(self._recovery.fill, count)
            self.num_asked = len(items)
            return self._recovery.join(items, place)
        samples: Any
        # No sample of a stream is known by its number, so that of a quick one need not be noted.
        is_quick = self._random is None and self._status.number_cell() is not None
        if is_quick and reader.has_begun:
            samples = reader.take_samples(count or self._spec.batch_size or 1)
        else:
            samples = [item.sample for item in reader.take(self._fill, count)]
        if not self._spec.is_batched:
            (samples,) = samples
        return self._assembler.finish(self._assembler.collate(samples, place))

    def _fill(self, item: BatchItem) -> None:
        assert self._stream is not None
        self._status.sample(item.number)
        item.sample = self._stream.read(item)

    def _replay(self) -> None:
        """Take the samples of a batch that was given before."""
        assert self._stream is not None
        if not self._spec.faults.tolerates:
            self._stream.take(self._fill)
            return
        # Collated as well: the next sample took the place of one that did not fit.
        self._make_of_stream(self._stream, None)
        self._assembler.output.abandon()


class _Scope:
    """Context in which the user's code runs: its shard, and its random streams."""

    def __init__(self, shard: ShardInfo, random: SampleStreams | None, *, restores: bool) -> None:
        self._shard = shard
        self._outer = shard
        self._active = None if random is None else random.active(isolated=restores)

    def __enter__(self) -> None:
        self._outer = set_shard(self._shard)
        if self._active is not None:
            self._active.__enter__()

    def __exit__(self, *raised: Any) -> None:  # noqa: ANN401
        if self._active is not None:
            self._active.__exit__(*raised)
        set_shard(self._outer)


def _parts_of(indices: Any) -> tuple[Any, int, int]:  # noqa: ANN401
    """Return indices, and the place of the first and the stride in the epoch's global order."""
    return indices if isinstance(indices, BatchIndices) else (indices, 0, 1)


def _concerns(hints: RetryHints | None, keys: list[Any]) -> bool:
    if hints is None or hints.alone:
        return hints is not None
    quarantined = {key for key, _, _ in hints.quarantined}
    return any(sample_key(index) in quarantined for index in keys)
