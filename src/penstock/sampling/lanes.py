# SPDX-License-Identifier: Apache-2.0
"""`LaneBatchSampler`: an order for files that can only be read from front to back."""
# order of the files, drawn   | file 2 | file 0      | file 3  | file 1 |
# cut into equal lanes        |  lane 0     |  lane 1     |  lane 2     |
# windows, each shuffled      |····|···|····|····|·|·····|··|····|··|····|
# given                       a run of lane 0, of lane 1, of lane 2, of lane 0 again, …
#
# Any place of this order is computed by itself, so an epoch has no state but the step's number.
# Lanes differ by one sample at most, so all of them last until the epoch's end.
#
# Rejected: *whole files as lanes*. They end at different times: at the end few lanes are left to be
# mixed, and few workers have work. *Windows of the lane* instead of the file's: the same samples
# would be in two windows in two epochs, but a reader would hold two windows at a time.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.distributed import chosen_rank
from penstock.sampling.permutation import LARGEST, Permutation, replace_in_turn
from penstock.sampling.samplers import (
    BatchLayout,
    BatchOrder,
    BatchSampler,
    ComputedOrder,
    Resumable,
    check_bool,
    checked_positive,
    digest,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from penstock.distributed import Rank

_STEPS_PER_ROUND: Final = 4


class LaneBatchSampler(BatchSampler):
    """Batches of the records of files that can only be read from front to back.

    In each epoch, the files come in another order. Their records, one file after the other, are cut
    into `lanes` of equal length, in the middle of files too. A lane is read from its beginning to
    its end, `window` records at a time, and the records of a window are shuffled. An epoch takes
    `run` records of each lane in turn, until all lanes end. So a record is mixed with those of
    `lanes` windows, and every record comes once (see `drop_last`).

    Which records a step has depends on how many these are, not on the number of ranks or workers.
    So a run may resume with other numbers if ranks times `batch_size` stays the same. (In an
    incomplete last step, a dataset that draws random numbers then draws others.) An epoch begins at
    any step in milliseconds; a reader then reads each file up to its lane's place.

    A worker reads only lanes of its own if the number of workers divides the steps of a round,
    lanes * run / (batch_size * ranks): 4, if `run` is left out. Otherwise several workers read the
    same lanes: batches are the same, and each worker reads more.

    Attributes:
        lanes: How many there are.
        run: Consecutive records of a lane.
        num_samples: Records in all files.

    Example:
        >>> batches = LaneBatchSampler([4, 3, 5], 4, lanes=2, run=2, window=3, shuffle=False)
        >>> list(batches)
        [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    """

    _shows = ("length", "batch_size", "lanes", "run", "num_samples", "epoch")

    def __init__(
        self,
        source: Any,  # noqa: ANN401 - what has `counts` and `window`, or the counts
        batch_size: int,
        drop_last: bool = False,
        *,
        lanes: int | None = None,
        run: int | None = None,
        window: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Set the files and the order.

        Args:
            source: A `penstock.data.FileStream`, or the number of records of each file, shape
                (files,).
            batch_size: Records in a batch of this rank, at least 1.
            drop_last: Whether to leave out a last step that has fewer records than the others.
                Otherwise, ranks may differ by one record in it; if it has fewer records than there
                are ranks, some records come twice.
            lanes: At least 1. More lanes mix more of the files, and take more memory. At the
                beginning of an epoch, each reads some file up to its own beginning, so let there be
                more files than lanes. None: 16, with fewer than 32 files 8, with fewer than 8
                files 4.
            run: Consecutive records of a lane, at least 1. None: as many as make 4 steps a round of
                all lanes, 4 * batch_size * ranks / lanes.
            window: Records that are shuffled together, at least 1; None takes the stream's.
            shuffle: Whether files are reordered and windows shuffled. Lanes take turns all the
                same, unless `lanes=1`.
            seed: Decides the orders. The same on all ranks. None: that of the loader.
            num_replicas: Number of ranks that share an epoch; None asks as
                `DistributedSampler` does.
            rank: This one; None asks likewise.

        Raises:
            ConfigError: an argument is not as said above, or there is no record.
        """
        batch_size = checked_positive("batch_size", batch_size)
        check_bool("drop_last", drop_last)
        check_bool("shuffle", shuffle)
        counts = _checked_counts(getattr(source, "counts", source))
        if lanes is None:
            lanes = 4 if len(counts) < 8 else 8 if len(counts) < 32 else 16
        self.lanes = checked_positive("lanes", lanes)
        chosen = chosen_rank(rank, num_replicas)
        step_size = batch_size * chosen.world_size
        if run is None:
            run = max(_STEPS_PER_ROUND * step_size // self.lanes, 1)
        self.run = checked_positive("run", run)
        window = getattr(source, "window", None) if window is None else window
        if window is None:
            raise ConfigError(
                "window= is missing: how many records are shuffled together. Give it, or give the "
                "FileStream instead of counts."
            )
        self.num_samples = int(counts.sum())
        self._order = _LaneOrder(
            counts,
            _Turns(self.num_samples, self.lanes, self.run),
            checked_positive("window", window),
            shuffle,
            chosen,
            batch_size,
            seed,
        )
        self._order.source_length = self.num_samples
        self._order.is_cut = drop_last
        super().__init__(self._order, batch_size, drop_last)

    def layout(self) -> BatchLayout:
        """Return where the batches of the current epoch lie."""
        rank, num_replicas = self._order.rank, self._order.num_replicas
        return BatchLayout(rank * self.batch_size, self.batch_size * num_replicas, 1)

    def _counter(self) -> Resumable:
        return self  # batches, which all ranks have equally many of


class _Turns:
    """Lanes, which take turns.

    Attributes:
        num_samples: Of all lanes.
        lanes: How many there are; the first ones may have a sample more than the others.
        run: Samples of a lane in its turn.
    """

    def __init__(self, num_samples: int, lanes: int, run: int) -> None:
        self.num_samples, self.lanes, self.run = num_samples, lanes, run
        self._size, self._num_longer = divmod(num_samples, lanes)
        #: Samples of a lane, and of all, that are given in whole runs.
        self._in_runs = self._size - self._size % run
        self._num_in_runs = self._in_runs * lanes

    def bounds(self, lane: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first place of each lane, and that after its last one."""
        start = lane * self._size + np.minimum(lane, self._num_longer)
        return start, start + self._size + (lane < self._num_longer)

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lane whose turn it is at each position, and which of its samples comes."""
        turn, in_run = np.divmod(positions, self.run)
        round_, lane = np.divmod(turn, self.lanes)
        offset = round_ * self.run + in_run
        # In the last round, a lane gives what is left of it.
        last = positions >= self._num_in_runs
        rest = positions[last] - self._num_in_runs
        size = self._size - self._in_runs
        num_in_longer = self._num_longer * (size + 1)
        is_longer = rest < num_in_longer
        size_here = np.where(is_longer, size + 1, max(size, 1))
        in_last, rest_offset = np.divmod(np.where(is_longer, rest, rest - num_in_longer), size_here)
        lane[last] = np.where(is_longer, in_last, in_last + self._num_longer)
        offset[last] = self._in_runs + rest_offset
        return lane, offset


class _LaneOrder(BatchOrder):
    """The records of one rank, step after step."""

    is_cut = False

    def __init__(
        self,
        counts: NDArray[np.int64],
        turns: _Turns,
        window: int,
        shuffle: bool,
        chosen: Rank,
        batch_size: int,
        seed: int | None,
    ) -> None:
        super().__init__(seed)
        self.counts, self.turns, self.window, self.shuffle = counts, turns, window, shuffle
        self.batch_size = batch_size
        self.rank, self.num_replicas = chosen

    @property
    def _num_left(self) -> int:
        """Places of a last step that has fewer; each rank has one at least."""
        left = self.turns.num_samples % (self.batch_size * self.num_replicas)
        return max(left, self.num_replicas) if left and not self.is_cut else 0

    @property
    def num_steps(self) -> int:
        """Steps that are complete."""
        return self.turns.num_samples // (self.batch_size * self.num_replicas)

    @property
    def total_size(self) -> int:
        return self.num_steps * self.batch_size * self.num_replicas + self._num_left

    def __len__(self) -> int:
        first, stop = self.last_share()
        return self.num_steps * self.batch_size + stop - first

    def last_share(self) -> tuple[int, int]:
        """Return the bounds of this rank's part of an incomplete last step."""
        first, stop = (
            self._num_left * rank // self.num_replicas for rank in (self.rank, self.rank + 1)
        )
        return first, stop

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "LaneBatchSampler",
            "seed": self.seed,
            "counts": digest(self.counts),
            "lanes": self.turns.lanes,
            "run": self.turns.run,
            "window": self.window,
            "shuffle": self.shuffle,
        }

    def indices(self) -> _LaneShare:
        return _LaneShare(self)


class _LaneShare(ComputedOrder):
    """A rank's records in one epoch, not stored."""

    def __init__(self, order: _LaneOrder) -> None:
        super().__init__(len(order))
        self._turns, self._window, self._shuffle = order.turns, order.window, order.shuffle
        self._key = order.seed, order.epoch
        files = np.arange(len(order.counts))
        if order.shuffle:
            files = Permutation(len(files), self._key)[:]
        self._counts = order.counts[files]
        self._stops = np.cumsum(self._counts)
        #: What a place is moved by to be an index of the dataset, by file in this epoch's order.
        first = np.cumsum(order.counts) - order.counts
        self._moves = first[files] - (self._stops - self._counts)
        self._batch_size, self._rank = order.batch_size, order.rank
        self._step_size = order.batch_size * order.num_replicas
        self._num_in_steps = order.num_steps * order.batch_size
        self._last_begins = order.num_steps * self._step_size + order.last_share()[0]

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        step, number = np.divmod(positions, self._batch_size)
        places = step * self._step_size + self._rank * self._batch_size + number
        is_last = positions >= self._num_in_steps
        places[is_last] = positions[is_last] - self._num_in_steps + self._last_begins
        # With fewer records than ranks, the first ones come once more.
        places %= self._turns.num_samples
        lane, offset = self._turns.at(places)
        start, stop = self._turns.bounds(lane)
        return self._shuffled(start + offset, start, stop)

    def _shuffled(
        self, places: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the indices at places of lanes with these bounds."""
        file = np.searchsorted(self._stops, places, side="right")
        if self._shuffle:
            of_file = self._stops[file] - self._counts[file]
            window = of_file + (places - of_file) // self._window * self._window
            first = np.maximum(window, start)
            after = np.minimum(np.minimum(window + self._window, self._stops[file]), stop)
            places = self._in_windows(places, first, after)
        return np.asarray(places + self._moves[file], np.int64)

    def _in_windows(
        self, places: NDArray[np.int64], first: NDArray[np.int64], after: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return other places of the same windows, which go from `first` to `after`."""
        firsts, where, counts = np.unique(first, return_index=True, return_counts=True)
        orders = [
            Permutation(size, (*self._key, begin >> 32, begin & 0xFFFFFFFF))
            for begin, size in zip(firsts.tolist(), (after[where] - firsts).tolist(), strict=True)
        ]
        by_window = np.argsort(first, kind="stable")
        offsets = (places - first)[by_window]
        replace_in_turn(orders, counts, offsets)
        shuffled = np.empty_like(places)
        shuffled[by_window] = first[by_window] + offsets
        return shuffled


def _checked_counts(counts: ArrayLike) -> NDArray[np.int64]:
    # Of a dataset, numpy would read every sample.
    is_given = isinstance(counts, (list, tuple)) or hasattr(counts, "__array__")
    array = np.asarray(counts if is_given else None)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any():
        raise ConfigError(
            "LaneBatchSampler takes a FileStream, or the number of records of each file, integers, "
            f"0 or more, but got a {type(counts).__name__} (shape {array.shape}, dtype "
            f"{array.dtype})."
        )
    if not 0 < (total := sum(array.tolist())) <= LARGEST:
        raise ConfigError(f"{len(array)} files have {total} records, not from 1 to 2**62.")
    return array.astype(np.int64)
