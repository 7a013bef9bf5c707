# SPDX-License-Identifier: Apache-2.0
"""The core of every worker: carries out its tasks, alike in all backends.

    runner = TaskRunner(output, status, identity)
    runner.set_up(load)                        # returns the spec; calls worker_init_fn
    runner.begin_epoch(BeginEpoch(...))        # notifies the dataset, or iterates it
    runner.run(Task(...)) -> TaskResult        # reads, collates, recovers, times

`BatchMaker` makes the batches of one epoch from their indices.

Guarantees
    An `Exception` of the user's code leaves it only as a result. A worker that cannot be set up,
    or cannot begin an epoch, answers each of its tasks with the exception.
    The end of an iterable's shard is reported once; later tasks have no result.
    It has no socket, queue, thread, process or clock of its own, so all that a worker decides can
    be tested without one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.data.dataset import announce_epoch, can_resume, is_drawless
from penstock.engine.assembly import Assembler
from penstock.engine.plan import BatchIndices, RetryHints, ShardPosition, dataset_keys, sample_key
from penstock.engine.readers import MapReader, ShardReader, map_maker, shard_maker
from penstock.engine.recover import NO_BATCH, BatchItem, Recovery, Replacements
from penstock.engine.states import load_state, pair_of, take_states
from penstock.engine.task import Kind, TaskResult, WorkerIdentity, copy_of_error
from penstock.faults import annotate
from penstock.randomness.generator_watch import GeneratorWatch, note_watched, was_watched
from penstock.randomness.samples import SampleStreams
from penstock.worker_info import ShardInfo, set_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.engine.assembly import Output, PlainMaker
    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusWriter
    from penstock.engine.task import BeginEpoch, Task

T = TypeVar("T")


class TaskRunner:
    """Makes the batches of one worker.

    Attributes:
        maker: Maker of the batches of the epoch begun last; None before the first, and if the
            last could not be begun.
        failure: Exception of the set-up, or of the epoch's begin; the result of every task.
        notices: Findings for the next result; see `TaskResult`.
        spec: How a task becomes a batch; None before the set-up.
        output: Where the batches go.
        status: Where it writes what it is doing.
        identity: Which worker this is.
        restores_generators: Whether the global generators are put back after what is seeded.
        in_thread: Whether it shares the global generators with other workers.

    Concurrency:
        One thread.
    """

    def __init__(
        self,
        output: Output,
        status: StatusWriter,
        identity: WorkerIdentity = WorkerIdentity(),  # noqa: B008 - immutable
        *,
        restores_generators: bool = False,
        in_thread: bool = False,
    ) -> None:
        """Begin as a worker that is not set up."""
        self.maker: BatchMaker | None = None
        self.failure: Exception | None = None
        self.notices: dict[str, Any] = {}
        self.output = output
        self.status = status
        self.identity = identity
        self.restores_generators = restores_generators
        self.in_thread = in_thread
        self.spec: WorkerSpec | None = None
        self._is_expected = identity.joins_late
        self._has_ended = False  # its shard, in this epoch

    def set_up(self, load: Callable[[], WorkerSpec]) -> None:
        """Call `load` to prepare the worker and return its spec; if it fails, every task does."""
        try:
            self.spec = load()
        except Exception as error:
            annotate(error, "while the worker was starting")
            self.failure = error

    def begin_epoch(self, begun: BeginEpoch, *, reports: bool = True) -> TaskResult | None:
        """Begin an epoch; return how that went in a worker that was added, or that keeps states."""
        self._has_ended = False
        position = None
        if self.spec is not None:
            self.status.begin_generation(begun.generation)
            self.maker = self.failure = None  # an iterator of the last epoch ends first
            try:
                self.maker = BatchMaker(self, self.spec, begun)
                if begun.keeps_states and reports:
                    position = self.maker.position(takes_state=True)
            except Exception as error:
                annotate(error, f"while epoch {begun.epoch} began")
                self.failure = error
        if not (self._is_expected or begun.keeps_states):
            return None
        self._is_expected = False
        if begun.keeps_states and self.failure is not None:
            return TaskResult(begun.generation, -1, Kind.FAILED, copy_of_error(self.failure))
        return TaskResult(begun.generation, -1, Kind.READY, position=position)

    def run(self, task: Task) -> TaskResult | None:
        """Return the result of `task`; None if the end of its shard was reported before."""
        generation, step, indices, hints, is_measured, takes_state = task[:6]
        if self._has_ended:
            return None
        if self.failure is not None:
            return TaskResult(generation, step, Kind.FAILED, copy_of_error(self.failure))
        maker, output = self.maker, self.output
        assert maker is not None
        self.status.begin_task(generation, step, measures=is_measured)
        output.begin()
        # No exception is kept in a variable that outlives its handler: with the frames of its
        # traceback that would be a cycle, which keeps samples until a garbage collection.
        try:
            batch = maker.make(indices, step, hints)
            position = maker.position(takes_state=takes_state)
        except Exception as error:
            output.abandon()
            bad, notices = maker.recovery.take_bad(), self._take_notices()
            if isinstance(error, StopIteration) and maker.shard_position is not None:
                self._has_ended = True
                return TaskResult(
                    generation, step, Kind.EXHAUSTED, None, maker.end(), len(bad), bad,
                    notices=notices,
                )  # fmt: skip
            position = maker.position()
            return TaskResult(
                generation, step, Kind.FAILED, error, position, bad=bad, notices=notices
            )
        num_bytes, pool_bytes, slot_ns = output.take_cost() if is_measured else (0, 0, 0)
        return TaskResult(
            generation,
            step,
            Kind.EMPTY if batch is NO_BATCH else Kind.DONE,
            batch,
            position,
            maker.num_asked,
            maker.recovery.take_bad() if maker.num_asked else (),
            self.status.take_times(num_bytes=num_bytes, pool_bytes=pool_bytes, slot_ns=slot_ns),
            self._take_notices() if self.notices else None,
        )

    def _take_notices(self) -> dict[str, Any] | None:
        found = dict(self.notices) or None
        self.notices.clear()
        return found

    def close(self) -> None:
        """Release the dataset's iterator."""
        self.maker = self.failure = None


class BatchMaker:
    """Makes the batches of one epoch.

    Attributes:
        num_asked: Number of samples asked of the last batch; counted where a policy needs it.
        recovery: Makes batches in spite of bad samples, and holds these.

    Concurrency:
        One thread.
    """

    def __init__(self, runner: TaskRunner, spec: WorkerSpec, begun: BeginEpoch) -> None:
        """Begin an epoch; this makes the iterator of an iterable dataset.

        Raises:
            Exception: what the dataset raises when it is notified of the epoch, or iterated.
        """
        identity, status = runner.identity, runner.status
        self.num_asked = 0
        self._notices = runner.notices
        self._spec = spec
        self._status = status
        status.is_watched = spec.faults.max_respawns > 0
        self._shard = ShardInfo(
            identity.worker_id, identity.num_workers, spec.batch_size, spec.rank, spec.world_size
        )
        self._map = None if spec.is_iterable else MapReader(spec, status)
        self._random = None
        seeds_globals = spec.global_rng and not runner.in_thread
        draws_nothing = (
            self._map is not None and self._map.reads_whole and is_drawless(spec.dataset)
        )
        if spec.seed is not None and not draws_nothing:
            self._random = SampleStreams(spec.seed, begun.epoch, seeds_globals=seeds_globals)
        self._restores_generators = runner.restores_generators and seeds_globals
        # Where global generators are not seeded for each sample: who draws from them is found.
        finds_drawings = runner.in_thread or (spec.seed is not None and not spec.global_rng)
        self._watch: GeneratorWatch | None = None  # until the first batch is made
        if finds_drawings and not was_watched(spec.dataset):
            note_watched(spec.dataset)
            self._watch = GeneratorWatch(spec.dataset)
        self._keeps_states = begun.keeps_states
        position = begun.position or ShardPosition()
        self._reader = self._in_scope(self._begin, identity, begun, position)
        self._assembler = Assembler(spec, runner.output, self._random, status)
        seed = identity.base_seed if spec.seed is None else spec.seed
        replacements = Replacements(spec, seed, begun.epoch)
        reader = self._reader or self._map
        assert reader is not None
        self.recovery = Recovery(reader, self._assembler, spec, status, replacements)
        if self._reader is not None:
            self._in_scope(self._reader.replay, self._replay)
            self.recovery.take_bad()  # they were reported when the batches were given

    def _begin(
        self, identity: WorkerIdentity, begun: BeginEpoch, position: ShardPosition
    ) -> ShardReader | None:
        if begun.is_announced:
            if self._random is not None:
                self._random.begin_iterator()
            announce_epoch(self._spec.dataset, begun.epoch)
        if self._map is not None:
            # Seeding the global generators takes 20 us for each sample.
            self._map.streams = None if is_drawless(self._spec.dataset) else self._random
            load_state(self._spec.dataset, pair_of(position.state)[0])
            return None
        with self._watched():
            return ShardReader(self._spec, self._random, identity, begun, self._notices)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Find functions that draw from global generators which are not seeded."""
        if self._watch is None:
            yield
            return
        self._watch.begin()
        try:
            yield
        finally:
            self._watch.end()
            if self._watch.found:
                self._notices["drawings"] = tuple(self._watch.found)

    def _in_scope(self, work: Callable[..., T], *args: Any) -> T:  # noqa: ANN401
        """Return `work(*args)`, the user's code, run with shard and random streams active."""
        outer = set_shard(self._shard)
        try:
            if self._random is None:
                return work(*args)
            with self._random.active(isolated=self._restores_generators):
                return work(*args)
        finally:
            set_shard(outer)

    def make(self, indices: Any, step: int = 0, hints: RetryHints | None = None) -> Any:  # noqa: ANN401
        """Return the batch of `indices` as `Output.finish` gives it, or `NO_BATCH`.

        Raises:
            StopIteration: this worker's shard of the iterable has ended.
            Exception: whatever the dataset or the collate function raises, with a note naming the
                sample.
        """
        if self._watch is not None:
            with self._watched():
                batch = self._in_scope(self._make, indices, step, hints)
            self._watch = None
            return batch
        if self._random is None and self._reader is None:
            return self._make(indices, step, hints)
        batch = self._in_scope(self._make, indices, step, hints)
        if self._random is not None:
            self._status.seed_ns = self._random.take_seeding_ns()
        return batch

    def position(self, *, takes_state: bool = False) -> ShardPosition | None:
        """Return the position in the shard of an iterable dataset; None for a map-style one.

        With `takes_state` it is that of either kind, with the states of dataset and iterator.
        """
        if self._reader is not None:
            return self._reader.position(takes_state=takes_state)
        return ShardPosition(state=take_states(self._spec.dataset)) if takes_state else None

    def end(self) -> ShardPosition | None:
        """Return the position at the end of a shard; None where no states are kept."""
        return self.position(takes_state=True) if self._keeps_states else None

    @property
    def shard_position(self) -> Callable[[], ShardPosition] | None:
        """Function that returns a stream's position, without its state; None if map-style."""
        return None if self._reader is None else self._reader.shard_position

    def plain_maker(self) -> PlainMaker | None:
        """Return what makes batches by the shortest way; None if there are streams or a policy.

        It does what `make` does, without what only some loaders need.
        """
        faults = self._spec.faults
        if self._random is not None or faults.tolerates or faults.retries:
            return None
        if self._map is not None:
            return map_maker(self._spec, self._map, self._assembler)
        assert self._reader is not None
        if can_resume(self._spec.dataset) and not self._keeps_states:
            return None
        return shard_maker(self._spec, self._reader, self._shard, self._assembler)

    def try_sample(self, indices: Any, number: int, hints: RetryHints | None) -> None:  # noqa: ANN401
        """Read, collate and pack one sample of a batch of a map-style dataset, and drop it.

        This finds a sample that ends the process. Exceptions are ignored: `make` will raise them.
        """
        indices, position, stride = _parts_of(indices)
        hints = RetryHints(True, () if hints is None else hints.quarantined)
        with contextlib.suppress(Exception):
            items = self.recovery.begin(self._keys_of(indices), position, stride, hints)
            self._in_scope(self.recovery.fill, items[number])
        self._assembler.output.abandon()
        self.recovery.take_bad()

    def _make(self, indices: Any, step: int, hints: RetryHints | None) -> Any:  # noqa: ANN401
        if self._map is None:
            return self._make_of_stream(len(indices) if self._spec.is_batched else 1)
        indices, position, stride = _parts_of(indices)
        faults = self._spec.faults
        keys = None
        if hints is not None or faults.tolerates or faults.retries:
            with contextlib.suppress(TypeError):  # a slice, say, cannot be iterated
                keys = self._keys_of(indices)
        if keys is None:
            return self._make_of_map(self._map, indices, position, stride)
        self.num_asked = len(keys)
        if self._random is None:
            position = step * len(keys)  # as good as any other place, to draw replacements by
        if (self._map.reads_together or self._map.reads_whole) and not _concerns(hints, keys):
            # If this fails, each sample is read by itself to find the bad one.
            with contextlib.suppress(Exception):
                indices = indices if hasattr(indices, "__len__") else keys  # an iterator is spent
                return self._make_of_map(self._map, indices, position, stride)
            self._assembler.output.abandon()
        items = self.recovery.begin(keys, position, stride, hints)
        for item in items:
            self.recovery.fill(item)
        return self.recovery.join(items, position)

    def _keys_of(self, indices: Any) -> list[Any]:  # noqa: ANN401
        keys = dataset_keys(indices)
        return list(keys) if self._spec.is_batched else [keys]

    def _make_of_map(self, reader: MapReader, indices: Any, position: int, stride: int) -> Any:  # noqa: ANN401
        assembler, random = self._assembler, self._random
        whole = reader.whole_batch(indices)
        keys = dataset_keys(indices) if whole is None else whole
        if not self._spec.is_batched:
            keys = [keys]
        if random is not None and (whole is not None or reader.reads_together):
            random.begin_batch(position, stride, len(keys))
        if whole is not None:
            batch = assembler.as_batch(reader.read_whole(whole, assembler.empty))
        elif reader.reads_together:
            batch = assembler.collate(reader.read_together(keys), position, keys)
        else:
            batch = assembler.collate(reader.read_each(keys, position, stride), position, keys)
        return assembler.finish(batch, keys)

    def _make_of_stream(self, count: int) -> Any:  # noqa: ANN401
        reader = self._reader
        assert reader is not None
        place = reader.place()
        if self._spec.faults.tolerates:
            items = reader.take(self.recovery.fill, count)
            self.num_asked = len(items)
            return self.recovery.join(items, place)
        # No sample of a stream is known by its number, so that of a quick one need not be noted.
        is_quick = self._random is None and self._status.number_cell() is not None
        if is_quick and not reader.is_untouched:
            samples = reader.take_samples(count)
        else:
            samples = [item.sample for item in reader.take(self._fill, count)]
        return self._assembler.finish(self._assembler.collate(samples, place))

    def _fill(self, item: BatchItem) -> None:
        assert self._reader is not None
        self._status.sample(item.number)
        item.sample = self._reader.read(item)

    def _replay(self) -> None:
        """Take the samples of a batch that was given before."""
        assert self._reader is not None
        count = self._spec.batch_size or 1
        if not self._spec.faults.tolerates:
            self._reader.take(self._fill, count)
            return
        # Collated as well: the next sample took the place of one that did not fit.
        self._make_of_stream(count)
        self._assembler.output.abandon()


def _parts_of(indices: Any) -> tuple[Any, int, int]:  # noqa: ANN401
    """Return indices, and the place of the first and the stride in the epoch's global order."""
    return indices if isinstance(indices, BatchIndices) else (indices, 0, 1)


def _concerns(hints: RetryHints | None, keys: list[Any]) -> bool:
    if hints is None or hints.alone:
        return hints is not None
    quarantined = {key for key, _, _ in hints.quarantined}
    return any(sample_key(index) in quarantined for index in keys)
