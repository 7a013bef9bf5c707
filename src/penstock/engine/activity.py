# SPDX-License-Identifier: Apache-2.0
"""What a worker was doing when it died or got stuck, and how far it was."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.engine.map_reader import note_samples
from penstock.engine.plan import dataset_keys, sample_key
from penstock.engine.status_page import PHRASES, Phase

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from penstock.engine.plan import WorkerSpec
    from penstock.engine.status_page import StatusSnapshot

__all__ = ["Activity", "WorkerProgress", "activity_of", "progress_of"]

_OF_A_TASK: Final = (Phase.READING, Phase.COLLATING, Phase.SENDING)


class Activity(NamedTuple):
    """What a worker was doing.

    Attributes:
        step: For which step; None if for none of this epoch.
        sample: Key of the sample that it had in its hands; None if not a single one.
        words: Both in words.
    """

    step: int | None
    sample: Hashable | None
    words: str


class WorkerProgress(NamedTuple):
    """How far the worker is that the loop waits for.

    Attributes:
        words: What it is doing, for how long, and the stacks of its threads if they were asked for.
        still_s: Seconds since it moved on last, to another sample or phase; None if not known. A
            batch that is read in one call is one piece.
        pace: How far it is, as "39 of 80 samples in 2.0 s"; empty if not known.
    """

    words: str
    still_s: float | None = None
    pace: str = ""


def activity_of(
    snapshot: StatusSnapshot, tasks: Mapping[int, object], spec: WorkerSpec, generation: int
) -> Activity:
    """Return what a worker was doing at the time of `snapshot`.

    Args:
        snapshot: Of its status page.
        tasks: Step -> indices of what it had to do.
        spec: How it makes batches.
        generation: The generation that goes on.
    """
    doing = PHRASES[snapshot.phase]
    if snapshot.phase not in _OF_A_TASK:
        return Activity(None, None, doing)
    if snapshot.generation != generation or snapshot.step not in tasks:
        return Activity(None, None, f"{doing} samples of an earlier epoch")
    if spec.is_iterable:
        return Activity(snapshot.step, None, f"{doing} a batch of its shard of the dataset")
    keys = dataset_keys(tasks[snapshot.step])
    # Another thread's status may be read while it changes: then the number is of another step.
    is_torn = spec.is_batched and snapshot.number is not None and snapshot.number >= len(keys)
    if snapshot.number is None or is_torn:
        named = note_samples(spec.dataset, keys if spec.is_batched else [keys])
        return Activity(snapshot.step, None, f"{doing} {named} of step {snapshot.step}")
    if snapshot.has_replacement:
        index = snapshot.replacement
    else:
        index = keys[snapshot.number] if spec.is_batched else keys
    named = note_samples(spec.dataset, [index])
    return Activity(snapshot.step, sample_key(index), f"{doing} {named} of step {snapshot.step}")


def progress_of(
    snapshot: StatusSnapshot, activity: Activity, tasks: Mapping[int, object], stacks: str
) -> WorkerProgress:
    """Return how far a worker is.

    Args:
        snapshot: Of its status page.
        activity: What `activity_of` made of it.
        tasks: Step -> indices of what it has to do.
        stacks: Of its threads; empty if there are none.
    """
    words = f"{activity.words}{_times(snapshot, activity)}" + (f":\n{stacks}" if stacks else "")
    still_s = snapshot.still_s
    if still_s is None and snapshot.number is None and activity.step is not None:
        still_s = snapshot.task_s  # no sample of it was begun: all are read in one call
    if activity.step is None or snapshot.still_s is None:
        return WorkerProgress(words, still_s)
    # A single one where the sampler gives no list: then there is nothing to count.
    count = len(keys) if isinstance(keys := dataset_keys(tasks[activity.step]), Sized) else 1
    done = count if snapshot.number is None else snapshot.number
    return WorkerProgress(
        words, snapshot.still_s, f"{done} of {count} samples in {_seconds(snapshot.task_s)}"
    )


def _times(snapshot: StatusSnapshot, activity: Activity) -> str:
    if activity.step is None:
        return "" if snapshot.still_s is None else f" (for {_seconds(snapshot.still_s)})"
    of_step = f"the step for {_seconds(snapshot.task_s)}"
    if snapshot.still_s is None:
        return f" ({of_step})"
    what = "" if snapshot.number is None else "the sample "
    return f" ({what}for {_seconds(snapshot.still_s)}, {of_step})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.095 else f"{seconds * 1e3:.0f} ms"
