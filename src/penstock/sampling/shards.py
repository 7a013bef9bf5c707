# SPDX-License-Identifier: Apache-2.0
"""Orders for a dataset in shards: files of many samples, each read by one node in an epoch."""
#     shards          0 1 2 3 4 5 6 7            files, each of many samples
#     assign          node 0: 0 3 4 6            node 1: 1 2 5 7
#     shuffle them    6 0 4 3                    7 2 1 5          another order in each epoch
#     open_shards=2   mix(6 0)  mix(4 3)         mix(7 2)  mix(1 5)
#     ranks of a node take turns in the node's order
#
# Nothing is exchanged, and nothing is stored but a few numbers per shard: what is at a place of the
# order is computed, by a `Permutation` of each mix.
#
# Rejected: *one shuffle of everything*, as `RandomSampler` has it, where the data are larger than a
# node's memory: each node would read almost every page of every file in every epoch. *Shards as
# streams with a buffer* (WebDataset): each worker has a buffer of its own, the order depends on how
# many there are, and an epoch cannot begin in its middle.

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from penstock.data.dataset import Dataset
from penstock.deprecation import removed_arguments
from penstock.distributed import Rank, current_rank, rank_in_environment
from penstock.errors import ConfigError
from penstock.randomness.keys import checked_count
from penstock.sampling.distributed import check_pad, share_length
from penstock.sampling.permutation import LARGEST, Permutation
from penstock.sampling.samplers import (
    ComputedOrder,
    CountedSampler,
    EveryNth,
    checked_positive,
    digest,
    stated,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.data.dataset import Allocator
    from penstock.sampling.samplers import Indices


class AbsentShard(Dataset[Any]):
    """Stands for a shard that another node has: so many samples, none of which can be read.

    With these in the place of other nodes' files, the indices of all nodes mean the same samples,
    and a state that one rank saved is good for all of them.

    Example:
        >>> from penstock.data import ConcatDataset
        >>> data = ConcatDataset([["a", "b"], AbsentShard(3), ["c"]])
        >>> len(data), data[5]
        (6, 'c')
    """

    #: What is not read draws nothing: beside it, the shards that are there are read as they can be.
    is_drawless: bool = True

    def __init__(self, length: int) -> None:
        """Set the number of samples, 0 or more."""
        self._length = checked_count("length", length)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, index: int) -> NoReturn:
        """Raise `LookupError`."""
        raise LookupError(
            f"sample {index} of a shard that this node does not have was asked for: it is an "
            f"AbsentShard of {self._length} samples. Give the loader a ShardSampler that was made "
            "with this node's number, and the dataset the shards in `sampler.shards()`."
        )

    # Without it, the shards that are there would not be read by the batch either.
    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> None:
        """Raise `LookupError`."""
        self[int(indices[0])]


class ShardSampler(CountedSampler):
    """This rank's share of a dataset in shards, of which each is read by one node in an epoch.

    For LMDB or tar files that lie on the nodes' own disks (`assignment="fixed"`), or where every
    node reaches all of them and each byte is to cross the network once in an epoch ("epoch"). The
    dataset is a `ConcatDataset` of the shards; indices count through all of them.

    Each node takes its shards in random order, `open_shards` at a time, whose samples are shuffled
    together: at any time these files alone are read. Its ranks take turns in the node's order, and
    the nodes in the global one: place q of node n is place q * num_nodes + n. So the k-th batches
    of all ranks together are the same, with the same random numbers, for any number of ranks per
    node. Another number of nodes is another order: a state is refused then.

    All ranks give as many indices, in every epoch, although nodes differ by up to one shard:

        "repeat"  as many as the largest node has for each rank; others give their first ones twice
        "drop"    as many as the smallest node has; others leave out the end, another one each epoch
        "none"    every sample once, ranks are uneven: for validation

    Memory is some 50 bytes per shard.

    Attributes:
        lengths: Samples of each shard, int64 (shards,). Do not write.

    Example:
        >>> nodes = [ShardSampler([2, 2, 2, 2], num_nodes=2, node=node, open_shards=1)
        ...          for node in range(2)]
        >>> [sorted(sampler.shards().tolist()) for sampler in nodes]
        [[1, 2], [0, 3]]
        >>> [list(sampler) for sampler in nodes]
        [[4, 5, 2, 3], [1, 0, 6, 7]]
    """

    _shows = ("num_nodes", "node", "ranks_per_node", "local_rank", "length", "seed", "epoch")

    @removed_arguments(shuffle="an array of the indices of sampler.shards(), in their order")
    def __init__(
        self,
        source: Any,  # noqa: ANN401 - lengths, shards, or a dataset of them
        *,
        seed: int | None = None,
        num_nodes: int | None = None,
        node: int | None = None,
        ranks_per_node: int | None = None,
        local_rank: int | None = None,
        assignment: Literal["fixed", "epoch"] | Sequence[Sequence[int]] = "fixed",
        open_shards: int = 8,
        pad: Literal["repeat", "drop", "none"] = "repeat",
    ) -> None:
        """Set the shards, and who reads them.

        Args:
            source: The shards' lengths, or the shards, in the order of the dataset; or the
                `ConcatDataset` of them; or a store, or the `StoreDataset` of one, that is in shards
                itself: see `Store.shard_lengths`. The same on all ranks.
            seed: Decides the orders. The same on all ranks. None: that of the loader.
            num_nodes: Number of nodes, at least 1. None asks torchrun's variables, for `node` too:
                give both or neither.
            node: This one, 0 <= node < num_nodes.
            ranks_per_node: Ranks on each node, at least 1. None asks LOCAL_WORLD_SIZE, else 1;
                for `local_rank` likewise: give both or neither.
            local_rank: This one among those of its node.
            assignment: "fixed" is what `assign_shards` says of the lengths, in every epoch.
                "epoch" deals the shards out anew in each. Or the shards of each node, as they lie
                on the disks: each shard once.
            open_shards: Shards whose samples are shuffled together, at least 1. More mix better,
                and need more of the node's memory to be read once.
            pad: What happens where nodes have different numbers of samples.

        Raises:
            ConfigError: one of the above does not hold; or a node would have no sample, and `pad`
                is not "none".
        """
        super().__init__(seed)
        lengths = lengths_in(_of_store(source), "ShardSampler", "shard")
        self.lengths = np.array(list(lengths.values()), np.int64)
        self.source_length = sum(lengths.values())
        self.num_nodes, self.node, self.ranks_per_node, self.local_rank = _chosen_place(
            num_nodes, node, ranks_per_node, local_rank
        )
        self.open_shards = checked_positive("open_shards", open_shards)
        check_pad(pad)
        self.pad = pad
        self.is_fixed: bool = assignment != "epoch"
        self._node_of = (
            _nodes_of(self.lengths, self.num_nodes)
            if isinstance(assignment, str) and assignment in ("fixed", "epoch")
            else _given_nodes(assignment, len(self.lengths), self.num_nodes)
        )
        # Samples of each node; with "epoch", of each set, which the nodes take by turns.
        self._totals = np.zeros(self.num_nodes, np.int64)
        np.add.at(self._totals, self._node_of, self.lengths)
        # Of the places of a global order in which nodes take turns, this rank's are those of rank
        # `local_rank * num_nodes + node`: they do not depend on the number of ranks.
        self.rank = self.local_rank * self.num_nodes + self.node
        self.num_replicas = self.num_nodes * self.ranks_per_node
        empty = np.flatnonzero(self._totals == 0)
        if empty.size and pad != "none":
            raise ConfigError(
                f"{empty.size} of {self.num_nodes} nodes would have no sample ({len(self.lengths)} "
                f"shards, {np.count_nonzero(self.lengths)} of them with samples), and all ranks "
                "are to give as many. Pack the data into more shards, some dozens per node, or "
                'assign others; for validation there is pad="none".'
            )

    @property
    def num_samples(self) -> int:
        """Indices of this rank in an epoch; the same in all epochs, but with "none" and "epoch"."""
        length = int(self._totals.min() if self.pad == "drop" else self._totals.max())
        if self.pad == "none":
            length = int(self.lengths[self._current() == self.node].sum())
        return share_length(length, self.local_rank, self.ranks_per_node, self.pad)

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch."""
        return int(self.lengths.sum()) if self.pad == "none" else super().total_size

    def shards(self, node: int | None = None) -> NDArray[np.int64]:
        """Return the shards that a node reads in the current epoch, in the order it reads them.

        None is this node. A fresh array, int64 (shards,).
        """
        node = self.node if node is None else node
        if not 0 <= node < self.num_nodes:
            raise ConfigError(f"node should be 0 to {self.num_nodes - 1}, but got node={node}.")
        return self.rng(node).permutation(np.flatnonzero(self._current() == node))

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

    def indices(self) -> Indices:
        """Return this rank's share of the current epoch; an array, unless it were a long one."""
        if self.num_replicas != self.num_nodes * self.ranks_per_node:
            return self._of_nodes(range(self.num_nodes))  # a copy's, for `balance_report`
        order = self._of_nodes([self.node])
        return EveryNth(order, self.local_rank, self.ranks_per_node, self.num_samples).stored()

    def _of_nodes(self, nodes: Sequence[int]) -> _ShardOrder:
        node_of = self._current()
        groups: list[NDArray[np.int64]] = []
        keys = []
        for node in nodes:
            shards = self.rng(node).permutation(np.flatnonzero(node_of == node))
            # Of at most `open_shards`, none much smaller than the others.
            number = -(-len(shards) // self.open_shards)
            bounds = np.arange(1, number) * len(shards) // max(number, 1)
            groups += np.split(shards, bounds) if number else []
            keys += [(self.seed, self.epoch, node, group) for group in range(number)]
        return _ShardOrder(self.lengths, groups, keys)

    def _num_items(self) -> int:
        # As places of the global order: of uneven ranks, those of the longest one.
        most = share_length(int(self._totals.max()), 0, self.ranks_per_node, "repeat")
        return (most if self.pad == "none" else self.num_samples) * self.num_replicas

    def settings(self) -> dict[str, Any]:
        """Return what the global order depends on: not the number of ranks on a node."""
        return {
            "kind": "ShardSampler",
            "seed": self.seed,
            "lengths": stated(self.lengths, 16),
            "num_nodes": self.num_nodes,
            "assignment": digest(self._node_of),
            "fixed": self.is_fixed,
            "shuffle": True,
            "open_shards": self.open_shards,
            "pad": self.pad,
        }


class _ShardOrder(ComputedOrder):
    """The samples of groups of shards, mixed within each as its key decides; not stored."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        groups: list[NDArray[np.int64]],
        keys: list[tuple[int, int, int, int]],
    ) -> None:
        shards = np.concatenate(groups) if groups else np.empty(0, np.int64)
        stops = np.append(0, np.cumsum(lengths[shards]))
        self._shard_stops = stops[1:]
        #: What a place of the order is moved by to be an index of the dataset.
        self._moves = (np.cumsum(lengths) - lengths)[shards] - stops[:-1]
        self._group_bounds = stops[
            np.append(0, np.cumsum([len(group) for group in groups], dtype=np.int64))
        ]
        super().__init__(int(stops[-1]))
        self._keys = keys

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        which = np.searchsorted(self._group_bounds[1:], positions, side="right")
        places = np.empty_like(positions)
        for group in np.unique(which).tolist():
            here = which == group
            first, stop = self._group_bounds[group : group + 2].tolist()
            order = Permutation(stop - first, self._keys[group])
            places[here] = first + order[positions[here] - first]
        shards = np.searchsorted(self._shard_stops, places, side="right")
        return np.asarray(places + self._moves[shards], np.int64)


def _chosen_place(
    num_nodes: int | None, node: int | None, ranks_per_node: int | None, local_rank: int | None
) -> tuple[int, int, int, int]:
    """Return the four, those that were not given as torchrun's variables say."""
    is_placed, is_local = num_nodes is not None, ranks_per_node is not None
    if is_placed != (node is not None) or is_local != (local_rank is not None):
        raise ConfigError(
            "give both num_nodes and node, or neither, and so ranks_per_node and local_rank; "
            f"but got {num_nodes=}, {node=}, {ranks_per_node=}, {local_rank=}."
        )
    rank, world_size = Rank(0, 1) if is_placed else current_rank()
    if ranks_per_node is None or local_rank is None:
        local = rank_in_environment("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if local is None and not is_placed and world_size > 1:
            raise ConfigError(
                f"this is one of {world_size} ranks, but which of them share a node is not known: "
                "LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets, are not set. Give "
                "num_nodes, node, ranks_per_node and local_rank."
            )
        local_rank, ranks_per_node = local or Rank(0, 1)
    checked_positive("ranks_per_node", ranks_per_node)
    if num_nodes is None or node is None:
        if world_size % ranks_per_node:
            raise ConfigError(
                f"{world_size} ranks are no whole number of nodes with {ranks_per_node} each: "
                "start as many ranks on each node."
            )
        num_nodes, node = world_size // ranks_per_node, rank // ranks_per_node
    checked_positive("num_nodes", num_nodes)
    if not (0 <= node < num_nodes and 0 <= local_rank < ranks_per_node):
        raise ConfigError(
            f"node should be 0 to {num_nodes - 1} and local_rank 0 to {ranks_per_node - 1}, but "
            f"got {node=}, {local_rank=}."
        )
    # Of numpy's integers there would be no JSON.
    return int(num_nodes), int(node), int(ranks_per_node), int(local_rank)


def _of_store(source: Any) -> Any:  # noqa: ANN401
    """Return the lengths of the shards of a store, or of a dataset's; any other source as it is."""
    store = getattr(source, "store", source)
    lengths = getattr(store, "shard_lengths", source)  # no class is asked for: it lies above
    if lengths is None:
        raise ConfigError(
            f"{store!r} is in no shards: each of its samples is read by itself, so shuffle=True "
            "costs nothing. Or give ShardSampler the lengths of parts of it."
        )
    return lengths


def lengths_in(source: Any, who: str, what: str) -> dict[Any, int]:  # noqa: ANN401
    """Return the lengths of datasets, or the lengths that were given, by name or number.

    The source is a list or dict of datasets or of lengths, or a `ConcatDataset`, ours or torch's.
    """
    # A StackDataset has `datasets` too, side by side.
    parts = source.datasets if hasattr(source, "cumulative_sizes") else source
    # Anything else that can be iterated may be one dataset, and would be read through here.
    if not isinstance(parts, (Mapping, list, tuple, np.ndarray)) or getattr(parts, "ndim", 1) != 1:
        raise ConfigError(
            f"{who} takes a list or dict of {what}s, or of their lengths, or a ConcatDataset of "
            f"them; got {type(source).__name__}."
        )
    if isinstance(parts, np.ndarray):
        parts = parts.tolist()
    lengths = dict(parts) if isinstance(parts, Mapping) else dict(enumerate(parts))
    if set(map(type, lengths.values())) != {int} or min(lengths.values()) < 0:
        lengths = {name: _length_in(f"{what} {name!r}", part) for name, part in lengths.items()}
    if not 0 < (total := sum(lengths.values())) <= LARGEST:
        raise ConfigError(f"{len(lengths)} {what}s have {total} samples, not from 1 to 2**62.")
    return lengths


def _length_in(what: str, value: Any) -> int:  # noqa: ANN401
    try:
        length = len(value) if isinstance(value, Sized) else operator.index(value)
    except TypeError:
        length = -1
    if length < 0:
        raise ConfigError(f"{what} should be a dataset or a length, 0 or more; got {value!r:.80}.")
    return length


# Which node has which shards: balanced, and with few moves when the number of nodes changes. Shards
# are first spread by a consistent hash of their numbers, and then the nodes with most samples hand
# shards to those with fewest until they differ by no more than one shard.
#
# Rejected: *rendezvous hashing*, which takes a hash for each pair of shard and node. Nodes are
# numbers here, so that jump hashing moves as few shards, in some ln(nodes) steps for all of them at
# once. *Dealing them out by turns* (shard i to node i mod n): with another n nearly all move.


def assign_shards(
    sizes: Sequence[int] | NDArray[np.integer[Any]], num_nodes: int
) -> list[list[int]]:
    """Deal shards out to nodes, about as many samples to each.

    A pure function of the arguments. No node has more samples than another by more than the largest
    shard has. With another number of nodes most shards stay where they are: of S shards of one
    size, a node more or less moves some S / nodes of them, and a few per cent for the balance.

    Args:
        sizes: Samples of each shard, 0 or more; or bytes, if these are to be balanced.
        num_nodes: At least 1.

    Returns:
        For each node the numbers of its shards, ascending. With fewer shards than nodes, some have
        none.

    Example:
        >>> assign_shards([100, 100, 100, 100, 100, 40], num_nodes=2)
        [[1, 4, 5], [0, 2, 3]]

    Reference:
        Lamping, Veach: A fast, minimal memory, consistent hash algorithm. arXiv 1406.2294, 2014.
    """
    checked_positive("num_nodes", num_nodes)
    lengths = lengths_in(sizes, "assign_shards", "shard")
    node_of = _nodes_of(np.array(list(lengths.values()), np.int64), int(num_nodes))
    return [np.flatnonzero(node_of == node).tolist() for node in range(num_nodes)]


def _given_nodes(given: Any, num_shards: int, num_nodes: int) -> NDArray[np.int32]:  # noqa: ANN401
    """Return the node of each shard, given the shards of each node."""
    nodes = [list(own) for own in given]
    if len(nodes) != num_nodes or sorted(itertools.chain(*nodes)) != list(range(num_shards)):
        raise ConfigError(
            f"assignment should be 'fixed', 'epoch' or a list of the shards of each of {num_nodes} "
            f"nodes, with each of the shards 0 to {num_shards - 1} once, but got {given!r:.80}."
        )
    node_of = np.empty(num_shards, np.int32)
    for node, own in enumerate(nodes):
        node_of[own] = node
    return node_of


def _nodes_of(sizes: NDArray[np.int64], num_nodes: int) -> NDArray[np.int32]:
    """Return the node of each shard: consistent hashing, and then what moves balance takes."""
    hashes = _mixed_bits(np.arange(len(sizes), dtype=np.uint64))
    node_of = _jump_hash(hashes, num_nodes)
    loads = np.zeros(num_nodes, np.int64)
    np.add.at(loads, node_of, sizes)
    order = np.lexsort((hashes, sizes)).tolist()
    own: list[list[int]] = [[] for _ in range(num_nodes)]
    for shard in order:
        own[node_of[shard]].append(shard)
    received: list[list[int]] = [[] for _ in range(num_nodes)]
    most_apart = int(sizes.max())
    while True:
        low, high = int(loads.argmin()), int(loads.argmax())
        if loads[high] - loads[low] <= most_apart:
            return node_of
        # Its largest shard: all that it has are smaller than the difference, so that the sum of
        # the squares falls with each move, and the fewest moves are made.
        got = received[high]
        largest = max(got, key=lambda shard: (sizes[shard], -shard), default=-1)
        if own[high] and (largest < 0 or sizes[own[high][-1]] >= sizes[largest]):
            shard = own[high].pop()
        else:
            got.remove(largest)
            shard = largest
        node_of[shard] = low
        received[low].append(shard)
        loads[high] -= sizes[shard]
        loads[low] += sizes[shard]


def _mixed_bits(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits for each number that look like chance (the finaliser of SplitMix64)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _jump_hash(keys: NDArray[np.uint64], num_nodes: int) -> NDArray[np.int32]:
    """Return a node for each key; with one node more, 1 / nodes of them move, all to that one."""
    keys = keys.copy()
    node_of = np.zeros(len(keys), np.int32)
    moving = np.arange(len(keys))
    nodes = np.zeros(len(keys), np.int64)
    while len(moving):
        node_of[moving] = nodes
        keys = keys * np.uint64(2862933555777941757) + np.uint64(1)
        chance = ((keys >> np.uint64(33)) + np.uint64(1)).astype(np.float64)
        nodes = ((nodes + 1) * (float(1 << 31) / chance)).astype(np.int64)
        still = nodes < num_nodes
        moving, nodes, keys = moving[still], nodes[still], keys[still]
    return node_of
