# SPDX-License-Identifier: Apache-2.0
"""What clients that deal batches to ranks share: dealing, worker seeding, states in checkpoints.

Whole batches of one order are dealt over processes in turns, as Accelerate does:

    order              0 1 2 3 4 5 6 7 8
    batches of 2       process 0: [0 1] [4 5] [8 0]     process 1: [2 3] [6 7] [1 2]

What the processes have in a round, one after the other, is a piece of the order: a gathered result
can be cut off where the order ends. `penstock.sampling.DistributedSampler` deals single indices.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.data.dataset import is_current, length_of
from penstock.engine.backends import traits_of
from penstock.errors import ConfigError
from penstock.opening import MAX_TREE_BYTES, read_file
from penstock.options import backend_name
from penstock.sampling import BatchSampler, DistributedSampler, IndexSampler
from penstock.sampling.samplers import BatchLayout, BatchOrder
from penstock.torch.samplers import seeded_sampler
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.options import Ray
    from penstock.sampling.samplers import Indices
    from penstock.torch.loader import DataLoader

T_co = TypeVar("T_co", covariant=True)


class BatchShare(BatchSampler):
    """The batches of one process: every `num_processes`-th of an order that all of them know.

    It has the attributes of Accelerate's `BatchSamplerShard`. `even_batches` may be changed between
    two epochs, as `Accelerator.join_uneven_inputs` does.

    Attributes:
        sampler: This process's indices in a row; `sampler.sampler` gives those of all.
        batch_sampler: The batches of all processes.
        total_batch_size: Of all processes together, in one round.

    Example:
        >>> from penstock.sampling import SequentialSampler
        >>> nine = BatchSampler(SequentialSampler(range(9)), 2, drop_last=False)
        >>> share = BatchShare(nine, nine.sampler, 2, num_processes=2, process_index=1)
        >>> list(share), len(share)
        ([[2, 3], [6, 7], [1, 2]], 3)
    """

    def __init__(
        self,
        batch_sampler: Any,  # noqa: ANN401 - ours or torch's
        order: IndexSampler,
        batch_size: int,
        *,
        num_processes: int,
        process_index: int,
        even_batches: bool = True,
    ) -> None:
        """Set which batches are this process's, of an order of all processes.

        With `even_batches` the last round is filled up with the first indices of the order;
        otherwise some processes get fewer there, or none.
        """
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches
        super().__init__(_Share(order, self), batch_size, bool(batch_sampler.drop_last))

    @property
    def total_batch_size(self) -> int:
        """Indices of all processes in one round."""
        return self.batch_size * self.num_processes

    def count(self, length: int) -> int:
        """Return how many indices of an order of `length` this process has."""
        rounds, rest = divmod(length, self.total_batch_size)
        if rest == 0 or self.drop_last:
            last = 0
        elif self.even_batches and self.num_processes > 1:
            last = self.batch_size
        else:
            last = min(max(rest - self.process_index * self.batch_size, 0), self.batch_size)
        return rounds * self.batch_size + last

    def positions(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where some of this process's indices stand in the order of all."""
        rounds, places = np.divmod(turns, self.batch_size)
        first = self.process_index * self.batch_size
        return rounds * self.total_batch_size + first + places

    def layout(self) -> BatchLayout:
        """Return where the batches lie: sample by sample where one process would have them."""
        return BatchLayout(self.process_index * self.batch_size, self.total_batch_size, 1)


class _Share(BatchOrder):
    """One process's indices, batch after batch."""

    def __init__(self, order: IndexSampler, share: BatchShare) -> None:
        super().__init__(order.seed)
        self.sampler = order
        self._share = share
        self.epoch = order.epoch
        self.rank, self.num_replicas = share.process_index, share.num_processes
        self.source_length = order.source_length

    @property
    def total_size(self) -> int:
        # Of a state: how many samples of the order are given, of which none comes twice.
        return len(self.sampler)

    def __len__(self) -> int:
        return self._share.count(len(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def indices(self) -> Indices:
        order = self.sampler.indices()
        return order[self._share.positions(np.arange(len(self))) % max(len(order), 1)]

    def settings(self) -> dict[str, Any]:
        # Of the order alone: a state is the same on all processes, whatever their number.
        return self.sampler.settings()


def loader_with(loader: DataLoader[T_co], **changes: Any) -> DataLoader[T_co]:  # noqa: ANN401
    """Return the same kind of loader with other samplers; nothing of it has begun."""
    made = copy.copy(loader)
    # torch forbids to assign these to a loader that is made.
    vars(made).update(changes, _schedule=copy.copy(loader._schedule), _iterator=None)
    return made


def order_of_all(sampler: Any, seed: int) -> IndexSampler | None:  # noqa: ANN401
    """Return the order of all processes, which can be cut anywhere; None if it is not known.

    Args:
        sampler: Of a loader on all processes. A `DistributedSampler` of ours is taken off.
        seed: Of the loader.
    """
    if isinstance(sampler, DistributedSampler):
        return order_of_all(sampler.sampler, seed)
    sampler = seeded_sampler(sampler, seed)
    if isinstance(sampler, IndexSampler) and is_current(type(sampler), "indices", ("__iter__",)):
        return sampler
    # Iterated on every process with the same seed, so all of them get the same.
    return None if length_of(sampler) is None else DistributedSampler(sampler, 1, 0, seed=seed)


def deals_itself(batch_sampler: Any, num_processes: int) -> bool:  # noqa: ANN401
    """Return whether a batch sampler deals its batches out over the processes by itself.

    Raises:
        ConfigError: over another number of them.
    """
    order = getattr(batch_sampler, "sampler", None)
    if not isinstance(order, BatchOrder) or order.world_size == 1:
        return False
    if order.world_size != num_processes:
        raise ConfigError(
            f"{type(batch_sampler).__name__} deals its batches out over {order.world_size} ranks: "
            f"give it num_replicas={num_processes} and rank=accelerator.process_index"
        )
    return True


def init_for(
    backend: str | Ray, given: Callable[..., Any] | None, seeder: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Return a loader's `worker_init_fn`, or None where it would seed the main process.

    `seeder` is a client's own, which `given` may be a `partial` of: it seeds the global generators
    of a worker. Threads share them with the main process, whose dropout would draw the same numbers
    in every epoch. A user's function stays.
    """
    shares = traits_of(backend_name(backend)).shares_interpreter
    return None if shares and getattr(given, "func", given) is seeder else given


def file_of(folder: str | Path, name: str, rank: int) -> Path:
    """Return where the state of a process's loader is."""
    return Path(folder, f"{name}_rank{rank}.json")


def write_state(folder: str | Path, name: str, rank: int, state: Mapping[str, Any]) -> None:
    """Write a state, as a whole or not at all."""
    write_whole(file_of(folder, name, rank), json.dumps(state))


def read_state(folder: str | Path, name: str, rank: int) -> dict[str, Any] | None:
    """Return the state of `rank`, or else that of rank 0; None if there is none.

    Those of seeded loaders are the same on all ranks, so a run may go on with more of them; a state
    that is another rank's own is refused by the loader.
    """
    for path in (file_of(folder, name, rank), file_of(folder, name, 0)):
        if path.exists():
            state: dict[str, Any] = json.loads(
                read_file(path, MAX_TREE_BYTES, remedy="it is no state of a loader")
            )
            return state
    return None
