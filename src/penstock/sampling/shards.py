# SPDX-License-Identifier: Apache-2.0
"""Orders for a dataset in shards: files of many samples, each read by one node in an epoch.

    shards          0 1 2 3 4 5 6 7            files, each of many samples
    assign          node 0: 0 3 4 6            node 1: 1 2 5 7
    shuffle them    6 0 4 3                    7 2 1 5          another order in each epoch
    open_shards=2   mix(6 0)  mix(4 3)         mix(7 2)  mix(1 5)
    ranks of a node take turns in the node's order

Nothing is exchanged, and nothing is stored but a few numbers per shard: what is at a place of the
order is computed, by a `Permutation` of each mix.

Rejected: *one shuffle of everything*, as `RandomSampler` has it, where the data are larger than a
node's memory: each node would read almost every page of every file in every epoch. *Shards as
streams with a buffer* (WebDataset): each worker has a buffer of its own, the order depends on how
many there are, and an epoch cannot begin in its middle.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn

import numpy as np

from penstock.data.dataset import Dataset
from penstock.distributed import current_rank
from penstock.errors import ConfigError
from penstock.randomness.keys import Purpose, seed_sequence
from penstock.sampling.permutation import Permutation
from penstock.sampling.permutations import Permutations
from penstock.sampling.samplers import (
    LONGEST_STORED,
    EveryNth,
    IndexSampler,
    check_positive,
    digest,
)
from penstock.sampling.shard_assignment import (
    checked_assignment,
    checked_sizes,
    loads_of,
    nodes_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator
    from penstock.sampling.samplers import Indices

__all__ = ["AbsentShard", "ShardSampler"]

_MOST_STATED: Final = 16  # shards whose lengths a state lists: it stays below 1 KB
_LOCAL_VARIABLES: Final = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


class AbsentShard(Dataset[Any]):
    """Stands for a shard that another node has: so many samples, none of which can be read.

    Every node needs the lengths of all shards, and files of its own alone. With these in the place
    of the others, the indices of all nodes mean the same samples, and a state that one rank saved
    is good for all of them.

    Example:
        >>> from penstock.data import ConcatDataset
        >>> data = ConcatDataset([["a", "b"], AbsentShard(3), ["c"]])
        >>> len(data), data[5]
        (6, 'c')
        >>> data[2]
        Traceback (most recent call last):
        LookupError: sample 0 of a shard that this node does not have was asked for: ...
    """

    #: What is not read draws nothing: beside it, the shards that are there are read as they can be.
    is_drawless: bool = True
    can_get_batch: bool = True

    def __init__(self, length: int) -> None:
        """Set the number of samples.

        Args:
            length: 0 or more.

        Raises:
            ConfigError: no such length.
        """
        self._length = _length(0, length)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, index: int) -> NoReturn:
        """Raise.

        Raises:
            LookupError: always.
        """
        raise self._absent(index)

    def _absent(self, index: int) -> LookupError:
        return LookupError(
            f"sample {index} of a shard that this node does not have was asked for: it is an "
            f"AbsentShard of {self._length} samples. Give the loader a ShardSampler that was made "
            "with this node's number, and the dataset the shards in `sampler.shards()`."
        )

    def __getitems__(self, indices: Sequence[int]) -> NoReturn:
        """Raise, as `__getitem__`."""
        raise self._absent(int(indices[0]))

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> NoReturn:
        """Raise, as `__getitem__`."""
        raise self._absent(int(indices[0]))


class ShardSampler(IndexSampler):
    """This rank's share of a dataset in shards, of which each is read by one node in an epoch.

    For LMDB or tar files that lie on the nodes' own disks (`assignment="fixed"`), or where every
    node reaches all of them and each byte is to cross the network once in an epoch ("epoch"). The
    dataset is a `ConcatDataset` of the shards; indices count through all of them.

    Each node takes its shards in random order, `open_shards` at a time, whose samples are shuffled
    together: so at any time these files alone are read, and if they fit into the node's page cache
    every page of them comes from the disk once. Its ranks take turns in the node's order, and the
    nodes take turns in the global one: place q of node n is place q * num_nodes + n. So the k-th
    batches of all ranks together are of as many samples of each node; they are the same, and have
    the same random numbers, for any number of ranks per node. Another number of nodes is another
    order: a state is refused then; begin an epoch.

    All ranks give as many indices, which training in step needs, although nodes differ by up to one
    shard (`pad`). Have some dozens of shards per node, of similar size, and it is no more than a
    few per cent:

        "repeat"  as many as the largest node has for each rank; others give their first ones twice
        "drop"    as many as the smallest node has; others leave out the end, another one each epoch
        "none"    every sample once, ranks are uneven: for validation

    These numbers are the same in every epoch. With "epoch", shards of the same size change places
    by chance, and the nodes change their sets; which sizes lie together stays.

    Memory is some 50 bytes per shard, whatever the number of samples.

    Attributes:
        lengths: Samples of each shard, int64 (shards,). Do not write.
        num_nodes: As chosen, like the three that follow.
        node: This one.
        ranks_per_node: On every node.
        local_rank: This one.
        open_shards: As given.
        pad: As given.

    Example:
        >>> nodes = [ShardSampler([2, 2, 2, 2], num_nodes=2, node=node, open_shards=1)
        ...          for node in range(2)]
        >>> [sorted(sampler.shards().tolist()) for sampler in nodes]
        [[1, 2], [0, 3]]
        >>> [list(sampler) for sampler in nodes]
        [[4, 5, 2, 3], [1, 0, 6, 7]]
    """

    def __init__(
        self,
        source: Any,  # noqa: ANN401 - lengths, shards, or a dataset of them
        *,
        seed: int = 0,
        num_nodes: int | None = None,
        node: int | None = None,
        ranks_per_node: int | None = None,
        local_rank: int | None = None,
        assignment: Literal["fixed", "epoch"] | Sequence[Sequence[int]] = "fixed",
        shuffle: bool = True,
        open_shards: int = 8,
        pad: Literal["repeat", "drop", "none"] = "repeat",
    ) -> None:
        """Set the shards, and who reads them.

        Args:
            source: The shards' lengths, or the shards, in the order of the dataset; or the
                `ConcatDataset` of them. The same on all ranks.
            seed: Decides the orders. The same on all ranks.
            num_nodes: Number of nodes, at least 1. None asks torchrun's variables, for `node` too:
                give both or neither.
            node: This one, 0 <= node < num_nodes.
            ranks_per_node: Ranks on each node, at least 1. None asks LOCAL_WORLD_SIZE, else 1;
                for `local_rank` likewise: give both or neither.
            local_rank: This one among those of its node.
            assignment: "fixed" is what `assign_shards` says of the lengths, in every epoch.
                "epoch" deals the shards out anew in each. Or the shards of each node, as they lie
                on the disks: each shard once.
            shuffle: Whether orders are random. Otherwise a node's shards come one after the other.
            open_shards: Shards whose samples are shuffled together, at least 1. More mix better,
                and need more of the node's memory to be read once.
            pad: What happens where nodes have different numbers of samples.

        Raises:
            ConfigError: one of the above does not hold; or a node would have no sample, and `pad`
                is not "none".
        """
        super().__init__(seed)
        self.lengths = checked_sizes(_lengths_of(source))
        self.num_nodes, self.node, self.ranks_per_node, self.local_rank = _chosen_place(
            num_nodes, node, ranks_per_node, local_rank
        )
        check_positive("open_shards", open_shards)
        if pad not in ("repeat", "drop", "none"):
            raise ConfigError(f"pad should be 'repeat', 'drop' or 'none', but got pad={pad!r}.")
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle should be a boolean value, but got shuffle={shuffle!r}.")
        self.shuffle = shuffle
        self.open_shards = operator.index(open_shards)
        self.pad = pad
        self.is_fixed: bool = assignment != "epoch"
        self._node_of = self._assigned(assignment)
        #: Samples of each node; with "epoch", of each set, which the nodes take by turns.
        self._totals = loads_of(self._node_of, self.lengths, self.num_nodes)
        # Of the places of a global order in which nodes take turns, this rank's are those of rank
        # `local_rank * num_nodes + node`: they do not depend on the number of ranks.
        self.rank = self.local_rank * self.num_nodes + self.node
        self.num_replicas = self.num_nodes * self.ranks_per_node
        self._check_nodes()

    def _assigned(self, assignment: object) -> NDArray[np.int32]:
        if isinstance(assignment, str):
            if assignment not in ("fixed", "epoch"):
                raise ConfigError(
                    "assignment should be 'fixed', 'epoch' or a list of each node's shards, but "
                    f"got assignment={assignment!r}."
                )
            return nodes_of(self.lengths, self.num_nodes)
        return checked_assignment(assignment, len(self.lengths), self.num_nodes)

    def _check_nodes(self) -> None:
        empty = np.flatnonzero(self._totals == 0)
        if empty.size and self.pad != "none":
            raise ConfigError(
                f"{empty.size} of {self.num_nodes} nodes would have no sample ({len(self.lengths)} "
                f"shards, {np.count_nonzero(self.lengths)} of them with samples), and all ranks "
                "are to give as many. Pack the data into more shards, some dozens per node, or "
                'assign others; for validation there is pad="none".'
            )

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.num_replicas

    @property
    def source_length(self) -> int:
        """Samples of the dataset that it was made for."""
        return int(self.lengths.sum())

    @property
    def num_samples(self) -> int:
        """Indices of this rank in an epoch; the same in all epochs, but with "none" and "epoch"."""
        ranks = self.ranks_per_node
        if self.pad == "none":
            return max(-((self.local_rank - self._of_node()) // ranks), 0)
        return int(self._totals.min() // ranks if self.pad == "drop" else self._most())

    def _of_node(self) -> int:
        """Samples of this node in the current epoch."""
        if self.is_fixed:
            return int(self._totals[self.node])
        return int(self.lengths[self._current() == self.node].sum())

    def _most(self) -> int:
        """Indices of the rank that has most samples."""
        return -(-int(self._totals.max()) // self.ranks_per_node)

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch."""
        return self.source_length if self.pad == "none" else self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Return `num_samples`."""
        return self.num_samples

    def shards(self, node: int | None = None) -> NDArray[np.int64]:
        """Return the shards that a node reads in the current epoch, in the order it reads them.

        For fetching them ahead, and to know which files a node needs.

        Args:
            node: None is this one.

        Returns:
            Their numbers, int64 (shards,); a fresh array.
        """
        node = self.node if node is None else node
        if not 0 <= node < self.num_nodes:
            raise ConfigError(f"node should be 0 to {self.num_nodes - 1}, but got node={node}.")
        return self._turns(np.flatnonzero(self._current() == node), node)

    def _current(self) -> NDArray[np.int32]:
        """The node of each shard in the current epoch."""
        if self.is_fixed:
            return self._node_of
        rng = self.rng()
        # Shards of one length change places by chance; then the nodes do. No node gets more or less
        # by that than one had before, so that an epoch is as long as any other.
        places = np.argsort(self.lengths, kind="stable")
        shards = np.lexsort((rng.random(len(places)), self.lengths))
        node_of = np.empty_like(self._node_of)
        node_of[shards] = rng.permutation(self.num_nodes)[self._node_of[places]]
        return node_of

    def _turns(self, shards: NDArray[np.int64], node: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return shards
        sequence = seed_sequence(self.seed, Purpose.ORDER, self.epoch, node)
        return np.random.Generator(np.random.Philox(sequence)).permutation(shards)

    def indices(self) -> Indices:
        """Return this rank's share of the current epoch, of length `num_samples`.

        A fresh int64 array, or, if it were a long one, an object that computes what is asked of it.
        """
        if self.num_replicas != self.num_nodes * self.ranks_per_node:
            return self._of_nodes(range(self.num_nodes))  # told to give all of it, to be counted
        order = self._of_nodes([self.node])
        share = EveryNth(order, self.local_rank, self.ranks_per_node, self.num_samples)
        return share if len(share) > LONGEST_STORED else share[:]

    def _of_nodes(self, nodes: Sequence[int]) -> _ShardOrder:
        node_of = self._current()
        shards = [self._turns(np.flatnonzero(node_of == node), node) for node in nodes]
        counts = [_group_sizes(len(own), self.open_shards) for own in shards]
        keys: list[tuple[int, ...]] = [
            (self.seed, self.epoch, node, group)
            for node, sizes in zip(nodes, counts, strict=True)
            for group in range(len(sizes))
        ]
        return _ShardOrder(
            self.lengths,
            np.concatenate(shards),
            np.concatenate(counts),
            keys if self.shuffle else None,
        )

    def _num_items(self) -> int:
        # As places of the global order: of uneven ranks, those of the longest one.
        return (self._most() if self.pad == "none" else self.num_samples) * self.num_replicas

    def _varies(self) -> bool:
        return self.shuffle or not self.is_fixed

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "shards", len(self.lengths)
        yield "node", f"{self.node} of {self.num_nodes}"
        yield "local_rank", f"{self.local_rank} of {self.ranks_per_node}"
        yield from super()._summary()

    def settings(self) -> dict[str, Any]:
        """Return what the global order depends on: not the number of ranks on a node."""
        few = len(self.lengths) <= _MOST_STATED
        return {
            "kind": "ShardSampler",
            "seed": self.seed,
            "lengths": self.lengths.tolist() if few else digest(self.lengths),
            "num_nodes": self.num_nodes,
            "assignment": digest(self._node_of),
            "fixed": self.is_fixed,
            "shuffle": self.shuffle,
            "open_shards": self.open_shards,
            "pad": self.pad,
        }


def _group_sizes(num_shards: int, most: int) -> NDArray[np.int64]:
    """Deal shards out to groups of at most so many, none much smaller than the others."""
    num_groups = -(-num_shards // most)
    bounds = np.arange(num_groups + 1, dtype=np.int64) * num_shards // max(num_groups, 1)
    return np.diff(bounds)


class _ShardOrder:
    """The samples of shards, group after group, mixed within each; not stored."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        shards: NDArray[np.int64],
        group_sizes: NDArray[np.int64],
        keys: list[tuple[int, ...]] | None,
    ) -> None:
        """Put shards in a row.

        Args:
            lengths: Of all shards of the dataset.
            shards: Those of this order, in turn.
            group_sizes: How many of them make each group.
            keys: Decide the order within each group; None leaves the samples as they lie.
        """
        own = lengths[shards]
        stops = np.zeros(len(shards) + 1, np.int64)
        np.cumsum(own, out=stops[1:])
        self._shard_stops = stops[1:]
        #: What a place of the order is moved by to be an index of the dataset.
        self._moves = (np.cumsum(lengths) - lengths)[shards] - stops[:-1]
        bounds = np.zeros(len(group_sizes) + 1, np.int64)
        np.cumsum(group_sizes, out=bounds[1:])
        self._group_bounds = stops[bounds]
        self._keys = keys

    def __len__(self) -> int:
        return int(self._group_bounds[-1])

    def __getitem__(self, which: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        if isinstance(which, slice):
            which = np.arange(*which.indices(len(self)), dtype=np.int64)
        places = which if self._keys is None else self._mixed(which, self._keys)
        shards = np.searchsorted(self._shard_stops, places, side="right")
        return np.asarray(places + self._moves[shards], np.int64)

    def _mixed(self, places: NDArray[np.int64], keys: list[tuple[int, ...]]) -> NDArray[np.int64]:
        groups, which = np.unique(
            np.searchsorted(self._group_bounds[1:], places, side="right"), return_inverse=True
        )
        firsts = self._group_bounds[groups]
        sizes = (self._group_bounds[groups + 1] - firsts).tolist()
        first = firsts[which]
        if len(sizes) == 1:  # nearly always: a block of indices is short beside a group
            return np.asarray(first + Permutation(sizes[0], keys[int(groups[0])])[places - first])
        orders = Permutations(sizes, [keys[group] for group in groups.tolist()])
        return np.asarray(first + orders.at(which, places - first))


class _Place(NamedTuple):
    """Which of the processes that train together this one is.

    Attributes:
        num_nodes: At least 1.
        node: This one.
        ranks_per_node: At least 1.
        local_rank: This one.
    """

    num_nodes: int
    node: int
    ranks_per_node: int
    local_rank: int


def _chosen_place(
    num_nodes: int | None, node: int | None, ranks_per_node: int | None, local_rank: int | None
) -> _Place:
    for one, other, value, beside in (
        ("num_nodes", "node", num_nodes, node),
        ("ranks_per_node", "local_rank", ranks_per_node, local_rank),
    ):
        if (value is None) != (beside is None):
            raise ConfigError(
                f"give both {one} and {other}, or neither, but got {one}={value}, {other}={beside}."
            )
    if ranks_per_node is None or local_rank is None:
        local_rank, ranks_per_node = _local_rank(is_needed=num_nodes is None)
    check_positive("ranks_per_node", ranks_per_node)
    if num_nodes is None or node is None:
        rank, world_size = current_rank()
        if world_size % ranks_per_node:
            raise ConfigError(
                f"{world_size} ranks are no whole number of nodes with {ranks_per_node} each: "
                "nodes that differ in their ranks cannot share shards evenly. Start as many ranks "
                "on each."
            )
        num_nodes, node = world_size // ranks_per_node, rank // ranks_per_node
    check_positive("num_nodes", num_nodes)
    for name, value, stop in (
        ("node", node, num_nodes),
        ("local_rank", local_rank, ranks_per_node),
    ):
        if not 0 <= value < stop:
            raise ConfigError(f"{name} should be 0 to {stop - 1}, but got {name}={value}.")
    numbers = (num_nodes, node, ranks_per_node, local_rank)
    return _Place(*map(operator.index, numbers))  # of numpy's integers there would be no JSON


def _local_rank(*, is_needed: bool) -> tuple[int, int]:
    """Return rank and number of ranks on this node, as torchrun says."""
    texts = [os.environ.get(name) for name in _LOCAL_VARIABLES]
    if None in texts:
        if is_needed and current_rank().world_size > 1:
            raise ConfigError(
                f"this is one of {current_rank().world_size} ranks, but which of them share a node "
                "is not known: LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets, are not set. "
                "Give num_nodes, node, ranks_per_node and local_rank."
            )
        return 0, 1
    try:
        local_rank, ranks = (int(text) for text in texts if text is not None)
    except ValueError:
        local_rank, ranks = -1, 0
    if not 0 <= local_rank < ranks:
        told = ", ".join(f"{k}={v!r}" for k, v in zip(_LOCAL_VARIABLES, texts, strict=True))
        raise ConfigError(
            f"the environment has {told}, but LOCAL_RANK should be an integer from 0 to "
            "LOCAL_WORLD_SIZE - 1. torchrun sets both; or give ranks_per_node and local_rank."
        )
    return local_rank, ranks


def _lengths_of(source: Any) -> list[int] | NDArray[Any]:  # noqa: ANN401
    # Torch's ConcatDataset and ours have both.
    parts = source.datasets if hasattr(source, "cumulative_sizes") else source
    if isinstance(parts, np.ndarray):
        return parts
    if not isinstance(parts, (list, tuple)):
        # Anything else that can be iterated may be one dataset, and would be read through here.
        raise ConfigError(
            "ShardSampler takes a list of shards, or of their lengths, or a ConcatDataset of them; "
            f"got {type(source).__name__}."
        )
    return [_length(number, part) for number, part in enumerate(parts)]


def _length(number: int, shard: object) -> int:
    if not isinstance(shard, (bool, str)):
        try:
            length = len(shard) if isinstance(shard, Sized) else operator.index(shard)  # type: ignore[arg-type]
        except TypeError:
            length = -1
        if length >= 0:
            return length
    raise ConfigError(
        f"shard {number} should be a dataset with a length, or the length, 0 or more; got "
        f"{shard!r:.80}."
    )
