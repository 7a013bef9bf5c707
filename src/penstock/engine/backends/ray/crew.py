# SPDX-License-Identifier: Apache-2.0
"""Where a loader's actors come from."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.engine.backends.ray.worker import RayWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.backends.ray.options import RayOptions
    from penstock.engine.backends.ray.parcels import Parcel
    from penstock.engine.backends.ray.remote_worker import RemoteWorker

__all__ = ["ACTOR_OPTIONS", "Actor", "Blame", "Crew", "OwnCrew"]

Actor = Any  # a handle of a RayWorker; Ray's own type says nothing of its methods

ACTOR_OPTIONS: Final = {
    "max_restarts": 0,  # the order of steps has to know of every death
    "max_task_retries": -1,  # a call is sent again when only the link broke: tasks are numbered
    "max_concurrency": 10_000,  # calls that wait for their turn, of all trainers together
}


class Blame(NamedTuple):
    """Whose work an actor has died over.

    Attributes:
        is_shared: Whether several trainers had work there.
        session: Whose sample was being tried by itself then; None if none was.
        has_started: Whether it ever came to anybody's work.
    """

    is_shared: bool
    session: str | None = None
    has_started: bool = True


class Crew(Protocol):
    """Gives a loader its actors.

    Attributes:
        options: What each of them asks Ray for.

    Concurrency:
        One thread.
    """

    options: RayOptions

    def share(self, parcel: Parcel) -> object:
        """Put what all workers need into the object store, once; return the reference."""

    def employ(self, worker_id: int) -> Actor:
        """Return an actor for this number; does not wait until it has started."""

    def replace(self, worker_id: int, dead: Actor) -> Actor:
        """Return another actor in the place of one that has died."""

    def blame(self, dead: Actor) -> Blame:
        """Return whose work an actor has died over."""

    def dismiss(self, worker: RemoteWorker) -> None:
        """Let an actor go that has nothing to do; does not wait."""

    def kill(self, actor: Actor, session: str | None = None) -> None:
        """End an actor that is stuck, or of which Ray has lost sight; it may be gone already.

        Args:
            actor: Which.
            session: For whose sake, where it is known to live.
        """

    def close(self, workers: Sequence[RemoteWorker], grace_s: float) -> None:
        """Let all actors go, and wait until they are gone if they are this loader's own.

        Args:
            workers: All that are not gone.
            grace_s: How long they have for the sample that they are at.
        """


def _outside_of_trainers_group(ray: Any) -> dict[str, Any]:  # noqa: ANN401 - the module
    """Return the option by which actors of a trainer in a placement group are not to be in it.

    A group that captures what is started in it, as those of Ray Tune and Ray Train do, has room for
    the trainers alone: workers would wait for ever.
    """
    if not ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
        return {}
    strategies = ray.util.scheduling_strategies
    return {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(None)}


class OwnCrew:
    """Actors of this loader's own, which end with it."""

    def __init__(self, ray: Any, options: RayOptions) -> None:  # noqa: ANN401 - the module
        """Make actors with `options`."""
        self.options = options
        self._ray = ray
        given = {**_outside_of_trainers_group(ray), **options.actor}
        self._class = ray.remote(RayWorker).options(**{**given, **ACTOR_OPTIONS})

    def share(self, parcel: Parcel) -> object:
        """Put it into the object store; it is there for as long as the reference is."""
        return self._ray.put(parcel)

    def employ(self, worker_id: int) -> Actor:
        """Return a new actor."""
        return self._class.remote()

    def replace(self, worker_id: int, dead: Actor) -> Actor:
        """Return a new actor, on whatever machine there is room."""
        return self._class.remote()

    def blame(self, dead: Actor) -> Blame:
        """Return that nobody else had work there."""
        return Blame(is_shared=False)

    def dismiss(self, worker: RemoteWorker) -> None:
        """Let it finish the sample that it is at, and end."""
        self._let_end(worker)

    def _let_end(self, worker: RemoteWorker) -> object:
        """Return the reference of a call that fails when the actor has ended."""
        # Not to be sent again: Ray would say in the log that it will be.
        return worker.actor.end.options(max_task_retries=0).remote(worker.session)

    def kill(self, actor: Actor, session: str | None = None) -> None:
        """End its process at once."""
        with contextlib.suppress(Exception):  # it is gone, or the cluster is
            self._ray.kill(actor, no_restart=True)

    def close(self, workers: Sequence[RemoteWorker], grace_s: float) -> None:
        """Let them end, and end those that do not, or have not even started."""
        ends = [self._let_end(worker) for worker in workers]
        try:
            for worker in workers:
                if worker.hello is None:
                    self.kill(worker.actor)
            self._wait_for(ends, grace_s)
        finally:  # also if a second Ctrl-C comes
            for worker in workers:
                self.kill(worker.actor)
        self._wait_for(ends, grace_s)

    def _wait_for(self, ends: list[object], timeout_s: float) -> None:
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=timeout_s)
