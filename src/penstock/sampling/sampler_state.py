# SPDX-License-Identifier: Apache-2.0
"""Where a sampler by itself stands in its epoch, and how to go on from there.

For hand-written loops and other libraries' loaders. Penstock's own loaders do not use it: they
count the batches that the user was given, which with workers are fewer than the sampler gave.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.data.dataset import length_of
from penstock.errors import StateError
from penstock.randomness.keys import checked_count, checked_epoch

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMAT: Final = 1


@dataclass(slots=True)
class SamplerPosition:
    """Position of one iterator of a sampler."""

    epoch: int | None  # of its order; None if the sampler has none
    given: int = 0  # items of it
    # Of the sampler when it was first asked for them: a digest of many samples takes a while, and
    # some loaders ask for a state with every batch.
    settings: dict[str, Any] | None = None
    is_begun: bool = False  # whether an item was asked for

    def begin(self, epoch: int | None) -> None:
        """Note that the first item is asked for, in an epoch that may be another by now."""
        if epoch != self.epoch:
            self.epoch, self.given = epoch, 0
        self.is_begun = True


class Resumable:
    """What gives the items of an epoch by number, and can begin with any of them.

    Subclasses iterate from `_next_place()` and count there what they give.
    """

    _place: SamplerPosition | None = None  # of the iterator made last, or loaded

    def _num_shares(self) -> int:
        """Items given by all ranks together for one of this rank, as positions count them."""
        return 1

    def settings(self) -> dict[str, Any]:
        """Return what the items depend on, as JSON has it."""
        raise NotImplementedError(f"{type(self).__name__} must define settings().")

    def state_dict(self) -> dict[str, Any]:
        """Return how far the iterator made last has come, as JSON has it; below 1 KB.

        "position" in it counts what was given: indices of all ranks together, or batches. A
        Penstock loader has a state of its own, of what the loop was given.

        Example:
            >>> from penstock.sampling import RandomSampler
            >>> sampler = RandomSampler(range(5), seed=7)
            >>> indices = iter(sampler)
            >>> first = next(indices), next(indices)
            >>> again = RandomSampler(range(5), seed=7)
            >>> again.load_state_dict(sampler.state_dict())
            >>> list(again) == list(indices), len(list(again))
            (True, 5)
        """
        if (counter := self._counter()) is not self:
            return counter.state_dict()
        epoch, place = getattr(self, "epoch", None), self._place
        if place is None or place.epoch != epoch:
            place = SamplerPosition(epoch)
        if place.settings is None:
            place.settings = self.settings()
        return {
            "format": _FORMAT,
            "epoch": epoch,
            "position": place.given * self._num_shares(),
            "fingerprint": copy.deepcopy(place.settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter()` begin where `state` was saved, in its epoch; later ones do not.

        The state of any rank will do, and of another number of ranks; but with `pad="none"`, where
        a rank may be at its end before others are, that of each rank by itself. Choosing another
        epoch drops it.

        Raises:
            StateError: the state is of another sampler, or one with other settings; the message
                says what differs.
        """
        if (counter := self._counter()) is not self:
            counter.load_state_dict(state)
            return
        epoch, position, saved = _parsed(state)
        if found := differences(saved, self.settings()):
            raise StateError(
                f"this state was saved by a sampler with another order than this "
                f"{type(self).__name__}: " + "; ".join(found) + ". Make the sampler as it was, or "
                "begin a new epoch without the state"
            )
        given = self._given_of(position)
        if epoch is not None:
            self.set_epoch(epoch)
        self._place = SamplerPosition(epoch, given)

    def forget_state(self) -> None:
        """Let the next `iter()` begin with the first item, whatever state was loaded."""
        self._counter()._place = None

    def _counter(self) -> Resumable:
        """Return what counts the items that are given: this, or the sampler inside."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        raise NotImplementedError(f"{type(self).__name__} must define set_epoch().")

    def _num_items(self) -> int:
        """Items of all ranks in an epoch, without those that are given twice to make it even."""
        return len(self)  # type: ignore[arg-type]

    def _given_of(self, position: int) -> int:
        """Return this rank's part of what all have given."""
        if (shares := self._num_shares()) == 1:
            return position
        if position >= self._num_items():
            return len(self)  # type: ignore[arg-type]
        given, rest = divmod(position, shares)
        if rest:
            raise StateError(
                f"this state was saved after {position} indices of all ranks together, which "
                f"{shares} ranks cannot have given alike: {position} is no multiple of {shares}. "
                f"Resume with a number of ranks that divides {position}"
            )
        return given

    def _next_place(self) -> SamplerPosition:
        """Return where a new iterator begins: where one was loaded that is not used yet."""
        last, place = self._place, SamplerPosition(getattr(self, "epoch", None))
        if last is not None and not last.is_begun and last.epoch == place.epoch:
            place.given = last.given
            # Some loaders make an iterator and drop it for another before the first item: the place
            # is handed on until one is used. But of an epoch that is over, a first iterator without
            # items is all there is to come: the next one is of a new epoch.
            length = length_of(self)
            place.is_begun = length is not None and 0 < place.given >= length
        self._place = place
        return place


def differences(saved: Any, here: Any, name: str = "") -> list[str]:  # noqa: ANN401
    """Return a sentence for each value that differs in two trees; of another "kind" that alone."""
    if isinstance(saved, dict) and isinstance(here, dict):
        found: list[str] = []
        of_kind = saved.get("kind") != here.get("kind") and {"kind"} <= saved.keys() & here.keys()
        for key in ["kind"] if of_kind else sorted({*saved, *here}, key=str):
            inner = f"{name}.{key}" if name else key
            found += differences(saved.get(key), here.get(key), inner)
        return found
    return [] if saved == here else [f"{name} is {saved!r} in the state and {here!r} here"]


def _parsed(state: Any) -> tuple[int | None, int, dict[str, Any]]:  # noqa: ANN401
    """Return the epoch, the position and the fingerprint."""
    try:
        if state["format"] != _FORMAT:
            raise ValueError(f"format {state['format']!r} where {_FORMAT} is read")
        epoch = None if state["epoch"] is None else checked_epoch(state["epoch"])
        return epoch, checked_count("position", state["position"]), dict(state["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"this is not a state of a sampler ({type(error).__name__}: {error}): "
            f"{repr(state)[:200]}. Give the dict that the sampler's state_dict() returned; the "
            "state of a loader goes to the loader's load_state_dict()"
        ) from error
