# SPDX-License-Identifier: Apache-2.0
"""A trainer's way to a pool: its keeper, found by name, and the pool's workers as a crew.

The keeper is a named actor in a namespace of Penstock's own, so every job of the cluster finds it.
It outlives the program that started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.backends.ray.keeper import LEASE_S, Keeper
from penstock.engine.backends.ray.sharing import SharedParcel, split_parcel
from penstock.errors import ConfigError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.engine.backends.ray.crew import Actor, Blame
    from penstock.engine.backends.ray.keeper import KeeperReport, Seat
    from penstock.engine.backends.ray.options import RayOptions
    from penstock.engine.backends.ray.parcels import Parcel
    from penstock.engine.backends.ray.remote_worker import RemoteWorker

__all__ = ["KeeperLink", "PoolCrew", "find_keeper", "start_keeper"]

_NAMESPACE: Final = "penstock"
_PREFIX: Final = "penstock-pool:"
_PATIENCE_S: Final = 300.0  # a node that is lost with the keeper is given up after a minute or two
_ASK_AGAIN_S: Final = 60.0  # others may have more to bring than a single call may wait for
_HEAD: Final = "node:__internal_head__"  # a resource by which Ray marks the head's node
_ENDED_S: Final = 30.0


def start_keeper(
    ray: Any,  # noqa: ANN401 - the module, connected
    name: str,
    num_workers: int,
    options: Mapping[str, Any],
    *,
    lease_s: float = LEASE_S,
) -> KeeperLink:
    """Start the keeper of a pool, or find the one that there is.

    On the head's node if that has room: without it there is no cluster either.

    Returns:
        The link to it; its terms may be others, if it was there.
    """
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]]
    keeper = (
        ray.remote(Keeper)
        .options(
            name=f"{_PREFIX}{name}",
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=10_000,
            scheduling_strategy=affinity(heads[0], soft=True) if heads else None,
        )
        .remote(num_workers, dict(options), lease_s)
    )
    return KeeperLink(ray, name, keeper)


def find_keeper(ray: Any, name: str) -> KeeperLink:  # noqa: ANN401 - the module, connected
    """Return the link to the keeper of a pool.

    Raises:
        ConfigError: the cluster has no pool of that name.
    """
    try:
        return KeeperLink(ray, name, ray.get_actor(f"{_PREFIX}{name}", namespace=_NAMESPACE))
    except ValueError:
        raise ConfigError(
            f"the Ray cluster at {ray.get_runtime_context().gcs_address} has no pool {name!r}"
            f"{_others(ray)}. Start it with penstock.ray.WorkerPool({name!r}, num_workers=...)"
        ) from None


def _others(ray: Any) -> str:  # noqa: ANN401
    named = ray.util.list_named_actors(all_namespaces=True)
    pools = sorted(
        actor["name"].removeprefix(_PREFIX)
        for actor in named
        if actor["namespace"] == _NAMESPACE and actor["name"].startswith(_PREFIX)
    )
    return f" (it has {', '.join(map(repr, pools))})" if pools else ""


class KeeperLink:
    """Calls of a keeper, which wait for their answers.

    Concurrency:
        Any thread.
    """

    def __init__(self, ray: Any, name: str, keeper: Any) -> None:  # noqa: ANN401
        """Use the handle `keeper` of the pool `name`."""
        self._ray = ray
        self.name = name
        self.keeper = keeper

    def ask(self, method: str, *args: Any) -> Any:  # noqa: ANN401
        """Return what a method of the keeper returns; waits while Ray starts a lost one anew.

        Raises:
            WorkerDied: the pool was closed.
        """
        errors = self._ray.exceptions
        try:
            reference = getattr(self.keeper, method).remote(*args)
            return self._ray.get(reference, timeout=_PATIENCE_S)
        except errors.GetTimeoutError:
            raise WorkerDied(
                f"the keeper of the pool {self.name!r} has not answered for {_PATIENCE_S:.0f} s: "
                "the cluster has lost it, or has no room to start it anew"
            ) from None
        except errors.RayActorError as error:
            raise WorkerDied(
                f"the pool {self.name!r} was closed, or cannot be started anew: "
                f"{str(error).strip().splitlines()[-1]}"
            ) from error

    def close(self) -> None:
        """End the keeper and with it its workers, and wait for that; it may be gone already."""
        with contextlib.suppress(WorkerDied):
            seats: list[Seat] = self.ask("seats")
            calls = [seat.actor.until_end.options(max_task_retries=0) for seat in seats]
            ends = [call.remote(None) for call in calls]
            self._ray.kill(self.keeper, no_restart=True)
            self._ray.wait(ends, num_returns=len(ends), timeout=_ENDED_S)

    def report(self) -> KeeperReport:
        """Return what the keeper knows."""
        found: KeeperReport = self.ask("report")
        return found


class PoolCrew:
    """Workers of a pool, which several trainers use."""

    def __init__(self, ray: Any, options: RayOptions, num_workers: int, trainer: str) -> None:  # noqa: ANN401
        """Find the pool.

        Args:
            ray: The module, connected.
            options: With the pool's name.
            num_workers: How many workers the loader wants.
            trainer: By which the keeper knows this one.

        Raises:
            ConfigError: there is no such pool, or it has fewer workers.
        """
        assert options.pool is not None
        self._ray = ray
        self._trainer = trainer
        self._link = find_keeper(ray, options.pool)
        self._seats: dict[int, Seat] = {}  # by worker id
        num_there, actor = self._link.ask("terms")
        self.options = dataclasses.replace(options, actor=actor)
        if num_workers > num_there:
            raise ConfigError(
                f"the pool {options.pool!r} has {num_there} workers, got num_workers={num_workers}:"
                f" give {num_there} or fewer (penstock.ray.WorkerPool.find(...).num_workers tells)"
            )

    def share(self, parcel: Parcel) -> object:
        """Bring the keeper what it does not have yet; return what is to be sent to the workers."""
        places, pieces = split_parcel(parcel)
        different = {piece.digest: piece for piece in pieces}  # arrays may be equal
        references: dict[str, Any] = {}
        while missing := [digest for digest in different if digest not in references]:
            held = self._link.ask("hold", self._trainer, missing, _ASK_AGAIN_S)
            for digest, found in zip(missing, held, strict=True):
                if found == []:
                    told = digest, different[digest].num_bytes, different[digest].content
                    found = self._link.ask("keep", self._trainer, *told)
                if found is not None:
                    (references[digest],) = found
        return SharedParcel(places, [references[piece.digest] for piece in pieces])

    def employ(self, worker_id: int) -> Actor:
        """Return one of the pool's actors."""
        return self._take_seat(worker_id, "")

    def replace(self, worker_id: int, dead: Actor) -> Actor:
        """Return the actor that has the place of one that has died, whoever asked for it first."""
        return self._take_seat(worker_id, self._seats[worker_id].name)

    def _take_seat(self, worker_id: int, dead: str) -> Actor:
        seat: Seat | None = self._link.ask("employ", self._trainer, worker_id, dead)
        if seat is None:
            raise ConfigError(f"the pool {self._link.name!r} has no worker for number {worker_id}")
        self._seats[worker_id] = seat
        return seat.actor

    def _name_of(self, actor: Actor) -> str:
        return next(seat.name for seat in self._seats.values() if seat.actor == actor)

    def blame(self, dead: Actor) -> Blame:
        """Ask the keeper, whom the actor has told whose work it takes up."""
        blame: Blame = self._link.ask("blame", self._name_of(dead))
        return blame

    def dismiss(self, worker: RemoteWorker) -> None:
        """Leave it to the others."""
        self._quietly(worker.actor.leave, worker.session)
        self._quietly(self._link.keeper.leave, self._trainer, worker.worker_id)
        del self._seats[worker.worker_id]

    def kill(self, actor: Actor, session: str | None = None) -> None:
        """Let the keeper end it, and know for whose sake."""
        self._quietly(self._link.keeper.end, self._name_of(actor), session)

    def close(self, workers: Sequence[RemoteWorker], grace_s: float) -> None:
        """Leave all of them, which drop what they have of this trainer; the pool stays."""
        told = [self._quietly(worker.actor.leave, worker.session) for worker in workers]
        told.append(self._quietly(self._link.keeper.leave, self._trainer))
        left = [reference for reference in told if reference is not None]
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=grace_s)

    def _quietly(self, method: Any, *args: Any) -> Any:  # noqa: ANN401
        """Call without waiting; whom it was meant for may be gone."""
        with contextlib.suppress(Exception):
            return method.options(max_task_retries=0).remote(*args)
        return None
