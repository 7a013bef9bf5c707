# SPDX-License-Identifier: Apache-2.0
"""The states of a dataset and of its iterator, by the user's own methods.

`ShardPosition.state` holds the pair of both, pickled. Either is None where the object lacks
`state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import pickle
from typing import Any

from penstock.data.dataset import can_resume
from penstock.errors import StateError

Pair = tuple[Any, Any]


def take_states(dataset: object, iterator: object = None) -> bytes | None:
    """Return the states of a dataset and of its iterator; None if neither has one.

    A dataset that is its own iterator has the iterator's alone.
    """
    of_iterator = state_of(iterator)
    return packed_pair(None if iterator is dataset else state_of(dataset), of_iterator)


def packed_pair(of_dataset: Any, of_iterator: Any = None) -> bytes | None:  # noqa: ANN401
    """Return both states as `ShardPosition.state` holds them; None if neither is there."""
    pair: Pair = of_dataset, of_iterator
    return None if all(state is None for state in pair) else pickle.dumps(pair, protocol=5)


def pair_of(state: bytes | None) -> Pair:
    """Return the states of the dataset and of the iterator."""
    pair: Pair = (None, None) if state is None else pickle.loads(state)
    return pair


def state_of(owner: Any) -> Any:  # noqa: ANN401 - the user's
    """Return `owner.state_dict()`; None if it does not keep states."""
    return owner.state_dict() if can_resume(owner) else None


def load_state(owner: Any, state: Any) -> None:  # noqa: ANN401
    """Load what `state_of` returned."""
    if state is None:
        return
    if not can_resume(owner):
        raise StateError(
            f"the state is of an object with load_state_dict(state); {type(owner).__name__} has "
            "no such method. Use the class it was saved with, or begin an epoch without the state"
        )
    owner.load_state_dict(state)
