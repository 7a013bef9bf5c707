# SPDX-License-Identifier: Apache-2.0
"""The actor that keeps a pool: its workers, what its trainers share, and who died of what.

Guarantees
    The workers are the keeper's own: Ray ends them when it ends. If it is lost, Ray starts it anew,
    and it starts new workers; trainers take that for the end of the old ones, and ask again.
    Of many trainers that tell of the same death, one causes the start of a new worker, and all get
    that one. Every call may come twice.
    What trainers share is the keeper's own too, so it outlives the trainer that came first. It is
    kept while a trainer needs it, and some time longer: a loader whose workers are not persistent
    leaves at the end of each epoch, and is soon back.
    A trainer that is gone without a word is forgotten when none of the workers has heard of it for
    as long as the lease says. If it only was busy with something else, it is known again, with the
    places that it had, once a worker has heard of it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.engine.backends.ray.crew import ACTOR_OPTIONS, Blame
from penstock.engine.backends.ray.worker import News, RayWorker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.engine.backends.ray.crew import Actor
    from penstock.engine.backends.ray.worker import Load

__all__ = ["LEASE_S", "Keeper", "KeeperReport", "Seat", "WorkerReport"]

LEASE_S: Final = 600.0
_NUM_DEATHS_KNOWN: Final = 1000  # trainers ask soon after a death
_NUM_LEFT_KNOWN: Final = 1000  # trainers, of whom a worker may still have something to say
_LINGER_SHARE: Final = 0.1  # of the lease: how long what nobody needs is kept
_BRING_SHARE: Final = 0.1  # of the lease: how long others wait for a word of who was to bring it
_LOOKS_PER_LEASE: Final = 10
_LOAD_S: Final = 5.0  # for a worker to say what it has to do


class Seat(NamedTuple):
    """A place of the pool, and the actor that has it now.

    Attributes:
        number: Which place, from 0.
        name: Of this actor; every one that takes the place gets another.
        actor: Its handle.
    """

    number: int
    name: str
    actor: Actor


class WorkerReport(NamedTuple):
    """What the keeper knows of a place of the pool.

    Attributes:
        is_alive: Whether its actor has started and not died.
        num_deaths: How many have had the place before.
        load: What it has to do; None if it does not say so.
    """

    is_alive: bool
    num_deaths: int
    load: Load | None


class KeeperReport(NamedTuple):
    """What the keeper knows of its pool.

    Attributes:
        workers: By place.
        trainers: Trainer -> the places of its workers.
        num_pieces: How many objects hold what trainers share.
        shared_bytes: Bytes of those.
        num_puts: How many objects were ever put for that.
    """

    workers: tuple[WorkerReport, ...]
    trainers: Mapping[str, tuple[int, ...]]
    num_pieces: int
    shared_bytes: int
    num_puts: int


class _Worker:
    """The keeper's note of an actor."""

    def __init__(self, seat: Seat, num_deaths: int) -> None:
        self.seat = seat
        self.num_deaths = num_deaths
        self.has_started = False
        self.is_dead = False
        self.session: str | None = None  # whose work is being watched: it may end the actor
        self.num_ended = 0  # works that were watched, and did not end it


class _Shared:
    """A piece that is in the object store, or on its way there."""

    def __init__(self) -> None:
        self.reference: Any = None
        self.num_bytes = 0
        self.bringer = ""  # trainer that was told to bring it
        self.news = News()  # it is there, or its bringer has left
        self.users: set[str] = set()
        self.unused_since = time.monotonic()


class Keeper:
    """Keeps one pool; see the module.

    Concurrency:
        Ray calls its coroutines in one event loop.
    """

    def __init__(self, num_workers: int, options: Mapping[str, Any], lease_s: float) -> None:
        """Ask Ray for the workers.

        Args:
            num_workers: How many.
            options: For Ray's `Actor.options`, of each.
            lease_s: For how long a trainer that says nothing is taken to be there.
        """
        import ray

        self._ray = ray
        self._me = ray.get_runtime_context().current_actor
        self._class = ray.remote(RayWorker).options(**{**options, **ACTOR_OPTIONS})
        self._options = dict(options)
        self._lease_s = lease_s
        self._known: dict[str, _Worker] = {}  # by name: those of now, and the last that died
        self._dead_names: collections.deque[str] = collections.deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_tending = False
        self._workers = [self._new_worker(k, 0) for k in range(num_workers)]
        self._places: dict[str, dict[int, int]] = {}  # trainer -> its worker id -> number of place
        self._heard_at: dict[str, float] = {}  # by trainer
        self._left: collections.deque[str] = collections.deque(maxlen=_NUM_LEFT_KNOWN)
        self._shared: dict[str, _Shared] = {}  # by digest
        self._num_puts = 0

    def _new_worker(self, number: int, num_deaths: int) -> _Worker:
        name = f"{number}-{uuid.uuid4().hex}"
        actor = self._class.remote(self._me, name, num_deaths > 0, self._lease_s)
        worker = _Worker(Seat(number, name, actor), num_deaths)
        self._known[name] = worker
        return worker

    def _replace(self, worker: _Worker) -> _Worker:
        number, name, _ = worker.seat
        worker.is_dead = True
        self._kill(worker)  # should only a trainer have lost sight of it
        self._dead_names.append(name)
        if len(self._dead_names) > _NUM_DEATHS_KNOWN:
            del self._known[self._dead_names.popleft()]
        another = self._workers[number] = self._new_worker(number, worker.num_deaths + 1)
        self._spawn(self._watch(another))
        return another

    def _tend(self) -> None:
        """Begin what goes on beside the calls; there was no loop for it at the start."""
        if not self._is_tending:
            self._is_tending = True
            self._spawn(self._look_after_trainers())
            for worker in self._workers:
                self._spawn(self._watch(worker))

    def _spawn(self, coroutine: Any) -> None:  # noqa: ANN401
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, worker: _Worker) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            await worker.seat.actor.load.remote()
            worker.has_started = True
            await worker.seat.actor.until_end.remote(None)
        worker.is_dead = True

    # What trainers ask for.

    async def terms(self) -> tuple[int, dict[str, Any]]:
        """Return how many workers there are, and with what options."""
        self._tend()
        return len(self._workers), self._options

    async def employ(self, trainer: str, worker_id: int, dead: str = "") -> Seat | None:
        """Return the actor that is a trainer's worker `worker_id`; None if there are not so many.

        It stays the same, until it dies; then its place does. A trainer's workers are different
        ones, those with the fewest trainers.

        Args:
            trainer: Who asks.
            worker_id: Which of its workers.
            dead: Name of the actor that it was and that has died.
        """
        self._tend()
        self._heard_at[trainer] = time.monotonic()
        number = self._place_of(trainer, worker_id, dead)
        if number is None:
            return None
        worker = self._workers[number]
        if worker.is_dead or worker.seat.name == dead:
            worker = self._replace(worker)
        return worker.seat

    def _place_of(self, trainer: str, worker_id: int, dead: str) -> int | None:
        places = self._places.setdefault(trainer, {})
        if worker_id not in places:
            free = set(range(len(self._workers))) - set(places.values())
            if not free:
                return None
            had = None if dead not in self._known else self._known[dead].seat.number
            if had in free:  # this trainer was forgotten meanwhile
                places[worker_id] = had
            else:
                taken = collections.Counter(k for of in self._places.values() for k in of.values())
                places[worker_id] = min(free, key=lambda k: (taken[k], k))
        return places[worker_id]

    async def leave(self, trainer: str, worker_id: int | None = None) -> None:
        """Forget a trainer, or one of its workers."""
        if worker_id is None:
            self._left.append(trainer)
            self._forget(trainer)
        else:
            self._places.get(trainer, {}).pop(worker_id, None)

    def _forget(self, trainer: str) -> None:
        self._places.pop(trainer, None)
        self._heard_at.pop(trainer, None)
        for shared in self._shared.values():
            if trainer in shared.users:
                shared.users.discard(trainer)
                shared.unused_since = time.monotonic()
                shared.news.tell()

    # Who died of what.

    async def begin_trial(self, name: str, number: int, session: str) -> None:
        """Note whose work an actor is at, that may be what ends it.

        Args:
            name: Of the actor.
            number: Of the work, from 1: this call may come once more when it is long over.
            session: Whose work.
        """
        worker = self._known.get(name)
        if worker is not None and number > worker.num_ended and not worker.is_dead:
            worker.has_started = True
            worker.session = session

    async def end_trial(self, name: str, number: int) -> None:
        """Note that it was not."""
        worker = self._known.get(name)
        if worker is not None and number > worker.num_ended and not worker.is_dead:
            worker.num_ended = number
            worker.session = None

    async def end(self, name: str, session: str | None) -> None:
        """End an actor; `session` tells for whose sake, if it is not dead by itself."""
        worker = self._known.get(name)
        if worker is None or worker.is_dead:
            return
        if session is not None:
            worker.session = session
            worker.is_dead = True
        self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        with contextlib.suppress(Exception):  # it is gone
            self._ray.kill(worker.seat.actor, no_restart=True)

    async def blame(self, name: str) -> Blame:
        """Return whose work a dead actor was at; nobody's here if it was an earlier keeper's."""
        worker = self._known.get(name)
        if worker is None:
            return Blame(is_shared=True, session="", has_started=True)
        return Blame(is_shared=True, session=worker.session, has_started=worker.has_started)

    # What trainers share.

    async def hold(
        self, trainer: str, digests: Sequence[str], limit_s: float
    ) -> list[list[Any] | None]:
        """Return for each piece its reference in a list, which is empty where it is to be brought.

        None is where another trainer is still to bring it: this is to be asked again.

        Where several trainers ask for a piece that is not there, the first has to bring it, and the
        others wait for that; until it has left, or nothing is heard of it.

        Args:
            trainer: Who asks.
            digests: Of the pieces.
            limit_s: For how long to wait for what others bring.
        """
        self._tend()
        self._heard_at[trainer] = time.monotonic()
        pieces = [self._shared.setdefault(digest, _Shared()) for digest in digests]
        for piece in pieces:
            piece.users.add(trainer)
            if piece.reference is None and not piece.bringer:
                piece.bringer = trainer
        until = time.monotonic() + limit_s
        return [await self._hold(trainer, piece, until) for piece in pieces]

    async def _hold(self, trainer: str, piece: _Shared, until: float) -> list[Any] | None:
        while piece.reference is None:
            left_s = self._patience_s(piece.bringer)
            if piece.bringer == trainer or left_s <= 0:
                piece.bringer = trainer
                self._heard_at[trainer] = time.monotonic()
                return []
            left_s = min(left_s, until - time.monotonic())
            if left_s <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(piece.news.wait(), left_s)
        return [piece.reference]

    def _patience_s(self, bringer: str) -> float:
        """Return for how long to wait for a word of a trainer, of whatever piece."""
        heard_at = self._heard_at.get(bringer)
        if heard_at is None:
            return 0.0
        return heard_at + self._lease_s * _BRING_SHARE - time.monotonic()

    async def keep(self, trainer: str, digest: str, num_bytes: int, content: Any) -> list[Any]:  # noqa: ANN401
        """Put a piece into the object store, and return its reference in a list."""
        self._heard_at[trainer] = time.monotonic()
        shared = self._shared.setdefault(digest, _Shared())
        shared.users.add(trainer)
        if shared.reference is None:
            reference = await asyncio.to_thread(self._ray.put, content)
            if shared.reference is None:
                shared.reference, shared.num_bytes = reference, num_bytes
                self._num_puts += 1
            shared.news.tell()
        return [shared.reference]

    async def _look_after_trainers(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _LOOKS_PER_LEASE)
            self._hear(await self._loads())
            self._drop_unused()

    def _hear(self, loads: Iterable[Load | None]) -> None:
        """Note what workers say of trainers; those that were forgotten are known again."""
        now = time.monotonic()
        for number, load in enumerate(loads):
            for session in () if load is None else load.sessions:
                trainer, heard_at = session.trainer, now - session.idle_s
                is_known = trainer in self._heard_at
                if not is_known and (session.idle_s > self._lease_s or trainer in self._left):
                    continue
                self._heard_at[trainer] = max(self._heard_at.get(trainer, heard_at), heard_at)
                places = self._places.setdefault(trainer, {})
                if number not in places.values():
                    places.setdefault(session.worker_id, number)

    def _drop_unused(self) -> None:
        now = time.monotonic()
        for trainer, heard_at in list(self._heard_at.items()):
            if now - heard_at > self._lease_s:
                self._forget(trainer)
        for digest, shared in list(self._shared.items()):
            oldest = now - self._lease_s * _LINGER_SHARE
            if not shared.users and shared.unused_since < oldest:
                del self._shared[digest]

    # What it says of itself.

    async def report(self) -> KeeperReport:
        """Return what there is, and what there is to do."""
        self._tend()
        loads = await self._loads()
        self._hear(loads)
        shared = [piece for piece in self._shared.values() if piece.reference is not None]
        return KeeperReport(
            workers=tuple(
                WorkerReport(worker.has_started and not worker.is_dead, worker.num_deaths, load)
                for worker, load in zip(self._workers, loads, strict=True)
            ),
            trainers={who: tuple(sorted(of.values())) for who, of in self._places.items()},
            num_pieces=len(shared),
            shared_bytes=sum(piece.num_bytes for piece in shared),
            num_puts=self._num_puts,
        )

    async def _loads(self) -> list[Load | None]:
        return list(await asyncio.gather(*map(self._load_of, self._workers)))

    async def _load_of(self, worker: _Worker) -> Load | None:
        if worker.is_dead or not worker.has_started:
            return None
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            load: Load = await asyncio.wait_for(_awaited(worker.seat.actor.load.remote()), _LOAD_S)
            return load
        return None

    async def seats(self) -> list[Seat]:
        """Return all places with their actors."""
        return [worker.seat for worker in self._workers]


async def _awaited(reference: Any) -> Any:  # noqa: ANN401 - Ray's reference, which is no coroutine
    return await reference
