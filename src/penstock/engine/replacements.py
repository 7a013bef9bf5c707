# SPDX-License-Identifier: Apache-2.0
"""Which sample takes the place of a bad one: a pure function of seed, epoch, place and attempt."""

from __future__ import annotations

import bisect
import collections.abc
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.plan import sample_key
from penstock.errors import TooManyFailures
from penstock.randomness.keys import Purpose, seed_sequence

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

__all__ = ["Replacements"]

_MOST_DRAWS: Final = 100  # to find one that was not tried yet; few are tried, so one is enough


class Replacements:
    """Draws replacements for the bad samples of one epoch.

    What is drawn must be a sample that the epoch could have had. A sampler that goes over all of
    the dataset could have drawn any; of another one (a split's, a weighted one) nothing is known
    but the batch at hand, so one of that is taken. Both keep to the bad sample's class where the
    dataset says its labels and another sample has the same.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int, *, from_all: bool) -> None:  # noqa: ANN401
        """Draw for one epoch.

        Args:
            dataset: Map-style.
            seed: Decides the draws.
            epoch: Of the seed's.
            from_all: Whether any sample of the dataset will do.
        """
        self._key = seed_sequence(seed, Purpose.REPLACEMENTS, epoch).generate_state(2, np.uint64)
        from penstock.data.labels.known import known_labels

        labels = known_labels(dataset)
        # Of samples with several classes each, none is "of the same class" as another.
        self._labels = labels if isinstance(labels, np.ndarray) else None
        self._members_of: dict[Any, np.ndarray[Any, Any]] = {}
        self._length = len(dataset) if from_all and hasattr(dataset, "__len__") else None

    def draw(
        self,
        place: int,
        attempt: int,
        index: Any,  # noqa: ANN401
        batch: Sequence[Any],
        rejected: Collection[Hashable],
    ) -> Any:  # noqa: ANN401
        """Return the index of a replacement.

        Args:
            place: Place in the epoch's order.
            attempt: 1 for the first replacement of that place.
            index: Of the bad sample.
            batch: Indices of the whole batch.
            rejected: Keys of what was tried for that place already.

        Raises:
            TooManyFailures: there is no other sample that was not tried.
        """
        counter = np.array([0, attempt, place, 0], np.uint64)
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=counter))
        for others in self._pools(index, batch):
            for _ in range(_MOST_DRAWS if len(others) else 0):
                drawn = others[int(rng.integers(len(others)))]
                if sample_key(drawn) not in rejected:
                    return drawn
        whose = "its batch has" if self._length is None else "the dataset has"
        raise TooManyFailures(
            f"there is no other sample to put in the place of sample {index!r}: {whose} none that "
            "was not tried. Use larger batches, or on_error='skip'."
        )

    def _pools(self, index: Any, batch: Sequence[Any]) -> Iterator[Sequence[Any]]:  # noqa: ANN401
        """Yield what to draw from, the best first: the same class, then any."""
        label = self._label_of(index)
        if self._length is not None and isinstance(index, (int, np.integer)):
            index = int(index) % self._length
            if label is not None:
                members = self._members(label)
                yield _Without(members, bisect.bisect_left(members, index))
            yield _Without(range(self._length), index)
            return
        others = [other for other in batch if not _is_same(other, index)]
        yield [other for other in others if label is not None and self._label_of(other) == label]
        yield others

    def _members(self, label: Any) -> Sequence[Any]:  # noqa: ANN401
        """Return the indices of a class, in order; found once per class, and only where needed."""
        assert self._labels is not None
        key = label.item()
        if key not in self._members_of:
            self._members_of[key] = np.flatnonzero(self._labels == label)
        return self._members_of[key]  # type: ignore[return-value]  # what is needed of it

    def _label_of(self, index: Any) -> Any:  # noqa: ANN401
        if self._labels is None or not isinstance(index, (int, np.integer)):
            return None
        is_inside = -len(self._labels) <= index < len(self._labels)
        return self._labels[index] if is_inside else None


class _Without(collections.abc.Sequence[int]):
    """Indices without one of them, without a copy of the others."""

    def __init__(self, members: Sequence[Any], position: int) -> None:
        self._members = members
        self._position = position

    def __len__(self) -> int:
        return len(self._members) - 1

    def __getitem__(self, which: Any) -> Any:  # noqa: ANN401 - an int
        return int(self._members[which + (which >= self._position)])


def _is_same(one: Any, other: Any) -> bool:  # noqa: ANN401
    try:
        return bool(one == other)
    except ValueError:  # arrays
        return one is other
