# SPDX-License-Identifier: Apache-2.0
"""What a worker was doing when it died or got stuck, by its last note."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.logbook import PHRASES, Phase
from penstock.engine.map_reader import note_samples
from penstock.engine.plan import keys_of, sample_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from penstock.engine.logbook import Entry
    from penstock.engine.plan import Recipe

__all__ = ["Deed", "deed_of"]


class Deed(NamedTuple):
    """What a worker was doing.

    Attributes:
        step: For which step; None if for none of this epoch.
        sample: Key of the sample that it had in its hands; None if not a single one.
        words: Both in words.
    """

    step: int | None
    sample: Hashable | None
    words: str


def deed_of(entry: Entry, tasks: Mapping[int, object], recipe: Recipe, round_: int) -> Deed:
    """Return what a worker was doing when it made `entry`.

    Args:
        entry: Its last note.
        tasks: Step -> indices of what it had to do.
        recipe: How it makes batches.
        round_: The round that goes on.
    """
    doing = PHRASES[entry.phase]
    if entry.phase not in (Phase.READING, Phase.COLLATING, Phase.SENDING):
        return Deed(None, None, doing)
    if entry.round != round_ or entry.step not in tasks:
        return Deed(None, None, f"{doing} samples of an earlier epoch")
    if recipe.is_iterable:
        return Deed(entry.step, None, f"{doing} a batch of its share of the dataset")
    keys = keys_of(tasks[entry.step])
    if entry.number is None:
        named = note_samples(recipe.dataset, keys if recipe.is_batched else [keys])
        return Deed(entry.step, None, f"{doing} {named} of step {entry.step}")
    if entry.has_substitute:
        index = entry.substitute
    else:
        index = keys[entry.number] if recipe.is_batched else keys
    named = note_samples(recipe.dataset, [index])
    return Deed(entry.step, sample_key(index), f"{doing} {named} of step {entry.step}")
