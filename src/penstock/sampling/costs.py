# SPDX-License-Identifier: Apache-2.0
"""Dealing of the items of a step to ranks, so that the ranks' costs are about equal."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def checked_costs(costs: ArrayLike, length: int) -> NDArray[np.float64]:
    """Return a copy of one cost per sample, shape (length,): finite numbers, 0 or more."""
    array = np.asarray(costs)
    if array.shape != (length,) or array.dtype.kind not in "iuf":
        raise ConfigError(
            f"cost should be one number for each of {length} samples, such as lengths**2, but got "
            f"a {type(costs).__name__} (shape {array.shape}, dtype {array.dtype})."
        )
    if (wrong := np.flatnonzero(~(np.isfinite(array) & (array >= 0)))).size:
        raise ConfigError(
            f"costs should be finite and 0 or more, but cost[{wrong[0]}] is {array[wrong[0]]} "
            f"({wrong.size} such of {length})."
        )
    return array.astype(np.float64)


def dealt(
    costs: NDArray[np.float64], num_ranks: int, begins: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Deal the items of each step to ranks: the same number to each, with about equal sums.

    The item of the highest cost comes first. Each goes to the rank with the lowest sum so far, of
    those that still lack an item: Graham's LPT rule, with equal numbers. This takes some 0.4 us per
    item.

    Args:
        costs: Shape (steps, items); a step's items divide evenly.
        num_ranks: At least 1.
        begins: The rank that gets the first item of each step, shape (steps,); None: 0.

    Returns:
        Which items of its step each rank has, int64 (steps, ranks, items / ranks).
    """
    # Rejected: rounds in each of which every rank gets one item. numpy does that for all steps at
    # once, but a rank with one very large item cannot get only the smallest ones besides: with
    # lognormal costs, 8 ranks with 16 items differed 6 times as much.
    num_steps, num_items = costs.shape
    falling = np.argsort(-costs, axis=1, kind="stable")
    shares = falling.copy().reshape(num_steps, num_ranks, num_items // num_ranks)
    if num_items > num_ranks:
        ordered = np.take_along_axis(costs, falling, axis=1).tolist()
        for step, values in enumerate(ordered):
            shares[step] = falling[step][_dealt_falling(values, num_ranks)]
    if begins is None:
        return shares
    turns = (np.arange(num_ranks) - begins[:, None]) % num_ranks
    return np.take_along_axis(shares, turns[:, :, None], axis=1)


def _dealt_falling(costs: list[float], num_ranks: int) -> list[list[int]]:
    """Return which items each rank gets, given their costs in descending order."""
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    most = len(costs) // num_ranks
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for item, cost in enumerate(costs):
        load, rank = loads[0]
        own[rank].append(item)
        if len(own[rank]) < most:
            heapq.heapreplace(loads, (load + cost, rank))
        else:
            heapq.heappop(loads)
    return own
