# SPDX-License-Identifier: Apache-2.0
"""How an actor ended, over what, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.engine.activity import Activity, activity_of
from penstock.engine.status_page import Phase, StatusSnapshot

if TYPE_CHECKING:
    from penstock.engine.backends.ray.remote_worker import RemoteWorker
    from penstock.engine.plan import WorkerSpec

__all__ = ["deed_of_worker", "describe_end", "died_with_node", "other_steps"]

_LONGEST_TEXT: Final = 1500
_ADVICE_ON_EXIT: Final = (
    "Ray's logs on that machine (session_latest/logs) may say why, and so may num_workers=0: look "
    "for native code that crashes, os._exit, memory that ran out, or somebody or something that "
    "killed it (kill -9, a job scheduler)."
)
_ADVICE_ON_EXIT_ASKED: Final = "Look for sys.exit in the dataset."
_ADVICE_ON_HANG: Final = "Raise `timeout` if samples, or the start of a worker, may take that long."
_ADVICE_ON_NODE: Final = "Its work is done elsewhere as soon as the cluster has room for it."
_ADVICE_ON_START: Final = (
    "Every machine of the cluster needs penstock, and what the dataset imports, of the versions "
    'that the trainer has. Install them there, or let Ray: ray_options={"runtime_env": {"pip": '
    '[...], "working_dir": "."}}.'
)


def deed_of_worker(worker: RemoteWorker, recipe: WorkerSpec, round_: int) -> Activity:
    """Return what a worker is doing, by what it has said, or else by what it was sent."""
    entry = worker.last_entry
    if entry is None:
        phase, step, number = Phase.WAITING, -1, None
        if worker.trial is not None:
            phase, (step, number) = Phase.READING, worker.trial
        elif not worker.is_ready:
            phase = Phase.ABSENT if worker.hello is None else Phase.STARTING
        elif worker.steps_at_hand:
            phase, step = Phase.READING, worker.steps_at_hand[0]
        entry = StatusSnapshot(round_, step, phase, number, False, None, 0, 0.0)
    deed = activity_of(entry, worker.tasks, recipe, round_)
    if others := other_steps(worker, deed):
        listed = " or ".join(map(str, others))
        return deed._replace(words=f"{deed.words}, or already at step {listed}")
    return deed


def other_steps(worker: RemoteWorker, deed: Activity) -> tuple[int, ...]:
    """Return what a worker may have been making as well as the step of `deed`."""
    if worker.last_entry is not None or worker.trial is not None or deed.step is None:
        return ()
    return tuple(step for step in worker.steps_at_hand if step != deed.step)


def describe_end(worker: RemoteWorker, *, is_node_gone: bool) -> tuple[str, str]:
    """Return how a worker ended, and what to do about it; to be called when it has."""
    stack = f"\nIts Python stack then:\n{worker.last_stack}" if worker.last_stack else ""
    if worker.killed_because is not None:
        return f"was killed, as {worker.killed_because},", _ADVICE_ON_HANG + stack
    if worker.ended is not None:
        text = str(worker.ended.message)
        return f"ended with {text.splitlines()[0]}", f"{_ADVICE_ON_EXIT_ASKED}\n{text}"
    if is_node_gone and worker.hello is None:
        return "was lost with the machine that Ray was about to start it on", _ADVICE_ON_NODE
    if is_node_gone and worker.hello is not None:
        node = f"Ray's node {worker.hello.node_id[:12]}, {worker.hello.address}"
        return f"was lost with its machine ({node})", _ADVICE_ON_NODE
    text = _words_of_ray(worker.error)
    if worker.hello is None:
        return f"could not be started: {text}", _ADVICE_ON_START
    return "is gone", f"Ray says: {text}\n{_ADVICE_ON_EXIT}"


def died_with_node(worker: RemoteWorker) -> bool:
    """Return whether Ray says that the machine is the cause, which it may say before all else."""
    said = str(worker.error)
    return getattr(worker.error, "preempted", False) or "because its node has died" in said


def _words_of_ray(error: Exception | None) -> str:
    """Return what Ray says of an actor's end, without what it says of every actor."""
    text = str(error).strip()
    _, found, why = text.partition("The actor is dead because ")
    return " ".join((why if found else text).split())[:_LONGEST_TEXT]
