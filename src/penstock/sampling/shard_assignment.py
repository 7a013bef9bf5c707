# SPDX-License-Identifier: Apache-2.0
"""Which node has which shards: balanced, and with few moves when the number of nodes changes.

Shards are first spread by a consistent hash of their numbers, and then the nodes with most samples
hand shards to those with fewest until they differ by no more than one shard.

Rejected: *rendezvous hashing*, which takes a hash for each pair of shard and node. Nodes are
numbers here, so that jump hashing moves as few shards, in some ln(nodes) steps for all of them at
once. *Dealing them out by turns* (shard i to node i mod n): with another n nearly all move.

Reference:
    Lamping, Veach: A fast, minimal memory, consistent hash algorithm. arXiv 1406.2294, 2014.
"""

from __future__ import annotations

import heapq
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError
from penstock.sampling.permutation import LARGEST
from penstock.sampling.samplers import check_positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["assign_shards", "checked_assignment", "checked_sizes", "loads_of", "nodes_of"]


def assign_shards(
    sizes: Sequence[int] | NDArray[np.integer[Any]], num_nodes: int
) -> list[list[int]]:
    """Deal shards out to nodes, about as many samples to each.

    A pure function of the arguments. No node has more samples than another by more than the largest
    shard has. With another number of nodes most shards stay where they are: of S shards of one
    size, a node more or less moves some S / nodes of them, which have to move, and a few per cent
    for the balance. A new node takes the next number; one that is lost gives its number to another.

    Args:
        sizes: Samples of each shard, 0 or more; or bytes, if these are to be balanced.
        num_nodes: At least 1.

    Returns:
        For each node the numbers of its shards, ascending. With fewer shards than nodes, some have
        none.

    Raises:
        ConfigError: one of the above does not hold.

    Example:
        >>> assign_shards([100, 100, 100, 100, 100, 40], num_nodes=2)
        [[1, 4, 5], [0, 2, 3]]
    """
    node_of = nodes_of(checked_sizes(sizes), _checked_num_nodes(num_nodes))
    return [np.flatnonzero(node_of == node).tolist() for node in range(num_nodes)]


def checked_sizes(sizes: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the sizes of one shard or more as an array of its own.

    Raises:
        ConfigError: they are no such sizes, or nothing is in any of them.
    """
    array = np.asarray(sizes)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0:
        raise ConfigError(
            "shards should have sizes, integers of 0 or more and one at least, but got "
            f"{sizes!r:.80}."
        )
    if not 0 < sum(array.tolist()) <= LARGEST:
        raise ConfigError(
            f"{len(array)} shards have {sum(array.tolist())} samples in all: there should be one "
            "or more, and at most 2**62."
        )
    return array.astype(np.int64)


def _checked_num_nodes(num_nodes: int) -> int:
    check_positive("num_nodes", num_nodes)
    return operator.index(num_nodes)


def checked_assignment(given: object, num_shards: int, num_nodes: int) -> NDArray[np.int32]:
    """Return the node of each shard, given the shards of each node.

    Raises:
        ConfigError: there are other nodes or shards, or one shard is not named once.
    """
    node_of = np.full(num_shards, -1, np.int32)
    try:
        nodes = [np.asarray(own).reshape(-1) for own in given]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        nodes = [np.empty(1)]
    if any(own.size and own.dtype.kind not in "iu" for own in nodes):
        raise ConfigError(
            "assignment should be 'fixed', 'epoch' or a list of each node's shards, but got "
            f"{given!r:.80}."
        )
    nodes = [own.astype(np.int64) for own in nodes]
    if len(nodes) != num_nodes:
        raise ConfigError(f"assignment names {len(nodes)} nodes, but there are {num_nodes}.")
    counts = np.zeros(num_shards, np.int64)
    for node, own in enumerate(nodes):
        if own.size and not 0 <= own.min() <= own.max() < num_shards:
            raise ConfigError(
                f"assignment gives node {node} shards {own.min()} to {own.max()}, but shards are "
                f"0 to {num_shards - 1}."
            )
        np.add.at(counts, own, 1)
        node_of[own] = node
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise ConfigError(
            f"assignment should name each shard once, but shard {wrong[0]} is named "
            f"{counts[wrong[0]]} times ({wrong.size} such of {num_shards})."
        )
    return node_of


def nodes_of(sizes: NDArray[np.int64], num_nodes: int) -> NDArray[np.int32]:
    """Return the node of each shard: consistent hashing, and then what moves balance takes."""
    hashes = _mixed_bits(np.arange(len(sizes), dtype=np.uint64))
    node_of = _jump_hash(hashes, num_nodes)
    loads = loads_of(node_of, sizes, num_nodes).tolist()
    largest = int(sizes.max())
    # The smallest load on top, and the largest: entries that are out of date are passed over.
    least = [(load, node) for node, load in enumerate(loads)]
    most = [(-load, node) for node, load in enumerate(loads)]
    heapq.heapify(least)
    heapq.heapify(most)
    order = np.lexsort((hashes, sizes, node_of))
    bounds = np.searchsorted(node_of[order], np.arange(num_nodes + 1))
    received: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    stops = bounds[1:].tolist()
    while True:
        while least[0][0] != loads[least[0][1]]:
            heapq.heappop(least)
        while -most[0][0] != loads[most[0][1]]:
            heapq.heappop(most)
        low, high = least[0][1], most[0][1]
        if loads[high] - loads[low] <= largest:
            return node_of
        # Its largest shard: all that it has are smaller than the difference, so that the sum of
        # the squares falls with each move, and the fewest moves are made.
        own = int(order[stops[high] - 1]) if stops[high] > bounds[high] else -1
        got = received[high]
        if own < 0 or (got and -got[0][0] > sizes[own]):
            shard = heapq.heappop(got)[1]
        else:
            shard = own
            stops[high] -= 1
        size = int(sizes[shard])
        node_of[shard] = low
        heapq.heappush(received[low], (-size, shard))
        for node, change in ((high, -size), (low, size)):
            loads[node] += change
            heapq.heappush(least, (loads[node], node))
            heapq.heappush(most, (-loads[node], node))


def loads_of(
    node_of: NDArray[np.int32], sizes: NDArray[np.int64], num_nodes: int
) -> NDArray[np.int64]:
    """Return the samples of each node."""
    loads = np.zeros(num_nodes, np.int64)
    np.add.at(loads, node_of, sizes)
    return loads


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
