# SPDX-License-Identifier: Apache-2.0
"""The actor: trainers open sessions in it, and their tasks are done in fair turns.

Every method is a coroutine, so that the actor answers while it works; the work itself is done in
one thread. A trainer has `prefetch_factor` tasks at a time in an actor. Where several trainers
share it, each turn goes to another one, however many tasks the others have waiting.

A session that the actor does not know (it was never opened here, or was dropped as nobody had used
it for long) is answered as "unknown", and the trainer opens it again.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import gc
import os
import platform
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.engine.backends.ray.session import Answer, Session
from penstock.engine.backends.ray.sharing import SharedParcel, join_parcel
from penstock.engine.messages import decode
from penstock.engine.user_frames import frames_of_user

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.engine.backends.ray.parcels import Parcel
    from penstock.engine.status_page import StatusSnapshot
    from penstock.engine.worker_setup import WorkerIdentity

__all__ = ["Doing", "Hello", "Load", "News", "RayWorker", "SessionLoad", "Versions", "trainer_of"]

_FORGOTTEN_AFTER_S: Final = 600.0  # without a task; a pool's trainers may leave without a word
_NUM_LEFT_KNOWN: Final = 1000  # sessions; a late copy of the call that opened one opens nothing
_NUM_CAREFUL: Final = 32  # first tasks of a session, after another actor has died in this place


class Versions(NamedTuple):
    """What both ends have to agree upon."""

    penstock: str
    python: str
    numpy: str

    @classmethod
    def here(cls) -> Versions:
        """Return this process's."""
        return cls(sys.modules["penstock"].__version__, platform.python_version(), np.__version__)


class Hello(NamedTuple):
    """Where a worker is.

    Attributes:
        pid: Of its process.
        node_id: Of its machine, as Ray knows it.
        address: Of its machine.
        versions: Of what it runs on.
        answer: What came of setting up.
    """

    pid: int
    node_id: str
    address: str
    versions: Versions
    answer: Answer


class SessionLoad(NamedTuple):
    """What an actor has to do for a session.

    Attributes:
        trainer: Whose session it is.
        worker_id: Which of its workers this is.
        num_waiting: Tasks that were sent and are not answered, but for the one being done.
        waited_s: For how long the first of them has waited for its turn.
        num_done: Turns that it has had.
        idle_s: For how long it has asked for nothing; 0.0 while anything of it waits.
    """

    trainer: str
    worker_id: int
    num_waiting: int
    waited_s: float
    num_done: int
    idle_s: float


class Load(NamedTuple):
    """What an actor has to do.

    Attributes:
        pid: Of its process.
        node_id: Of its machine, as Ray knows it.
        sessions: Of trainers.
    """

    pid: int
    node_id: str
    sessions: tuple[SessionLoad, ...]


class Doing(NamedTuple):
    """What an actor does at this moment.

    Attributes:
        entry: What is being done for the session that asks; None if it is not known.
        stack: Of the thread that works, for whomever.
        turn_of: Session whose turn it is; "" if it is nobody's.
        alone_s: For how long no other session than the one that asks has had a turn.
    """

    entry: StatusSnapshot | None
    stack: str
    turn_of: str
    alone_s: float


class News:
    """Wakes what waits for a change.

    Concurrency:
        Of one event loop.
    """

    def __init__(self) -> None:
        """Have nothing to tell yet."""
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Wake all that waits now."""
        self._next.set()
        self._next = asyncio.Event()

    def wait(self) -> Awaitable[object]:
        """Return what is done the next time that anything is told from this call on.

        No `async def`: up to Python 3.11 `asyncio.wait_for` begins the body of one later than this
        call, and what is told in between would be missed.
        """
        return self._next.wait()


class _Waiting(NamedTuple):
    """A call that waits for its turn."""

    since: float
    done: asyncio.Future[Any]
    call: Callable[[], Any]


class _Turns:
    """One thread, and who has it next: sessions in turn, each one's calls in the order they came.

    Concurrency:
        Of one event loop.
    """

    def __init__(self) -> None:
        self.thread_id = 0
        self.loop: asyncio.AbstractEventLoop
        self._executor = concurrent.futures.ThreadPoolExecutor(
            1, "penstock-worker", initializer=self._note_thread
        )
        self._waiting: dict[str, collections.deque[_Waiting]] = {}
        self._is_busy = False
        self._who = ""  # has it now, or had it last
        self._ended_at = float("-inf")  # the last turn
        self._alone_since = float("-inf")  # the end of the last turn of another than `_who`
        self.num_done: collections.Counter[str] = collections.Counter()

    def _note_thread(self) -> None:
        self.thread_id = threading.get_ident()

    async def run(self, who: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return what `call` returns, once it was its turn."""
        self.loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = self.loop.create_future()
        waiting = _Waiting(time.monotonic(), done, call)
        self._waiting.setdefault(who, collections.deque()).append(waiting)
        if not self._is_busy:
            self._next()
        return await done

    def is_served(self, who: str) -> bool:
        """Return whether anything of this one waits, or is being done."""
        return who in self._waiting or self.is_doing(who)

    def is_doing(self, who: str) -> bool:
        """Return whether it is the turn of this one."""
        return self._is_busy and self._who == who

    @property
    def turn_of(self) -> str:
        """Whose turn it is; "" if it is nobody's."""
        return self._who if self._is_busy else ""

    def alone_s(self, who: str) -> float:
        """Return for how long nobody but this one has had a turn."""
        if self._who == who:
            return time.monotonic() - self._alone_since
        return 0.0 if self._is_busy else time.monotonic() - self._ended_at

    def waited_s(self, who: str) -> float:
        """Return for how long the first call of this one has waited; 0.0 if none does."""
        calls = self._waiting.get(who)
        return time.monotonic() - calls[0].since if calls else 0.0

    def _next(self) -> None:
        while self._waiting:
            who = next(iter(self._waiting))
            calls = self._waiting.pop(who)
            _, done, call = calls.popleft()
            if calls:
                self._waiting[who] = calls  # at the end
            if done.cancelled():
                continue
            self._is_busy = True
            if self._who != who:
                self._who, self._alone_since = who, self._ended_at
            self.num_done[who] += 1
            work = asyncio.get_running_loop().run_in_executor(self._executor, call)
            work.add_done_callback(functools.partial(self._finish, done))
            return
        self._is_busy = False

    def _finish(self, done: asyncio.Future[Any], work: asyncio.Future[Any]) -> None:
        self._ended_at = time.monotonic()
        if not done.cancelled():
            if (error := work.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(work.result())
        self._next()


async def _taken_by_keeper(reference: Any) -> None:  # noqa: ANN401 - Ray's reference
    import ray

    with contextlib.suppress(ray.exceptions.RayActorError):  # it is gone: this process ends next
        await reference


def trainer_of(session: str) -> str:
    """Return whose session it is; see `RemoteWorker.open`."""
    return session.rpartition("/")[0]


class RayWorker:
    """Runs in a process of its own on some machine of the cluster; see the module.

    Concurrency:
        Ray calls its coroutines in one event loop.
    """

    def __init__(
        self,
        keeper: Any = None,  # noqa: ANN401
        name: str = "",
        is_careful: bool = False,
        forgotten_after_s: float = _FORGOTTEN_AFTER_S,
    ) -> None:
        """Have no session yet.

        Args:
            keeper: Handle of the pool's keeper, which is told whose sample is tried by itself, and
                whose dataset is opened.
            name: By which the keeper knows this actor.
            is_careful: Whether the keeper is told of the first tasks of each session as well: the
                actor before this one has died, and it may not have been known of what.
            forgotten_after_s: When a session is dropped that nobody uses.
        """
        self._keeper = keeper
        self._name = name
        self._is_careful = is_careful
        self._forgotten_after_s = forgotten_after_s
        self._num_noted = 0  # works that the keeper was told of
        self._sessions: dict[str, Session] = {}
        self._used_at: dict[str, float] = {}
        self._opening: dict[str, asyncio.Future[Answer]] = {}
        self._num_calls: collections.Counter[str] = collections.Counter()  # of tasks, by session
        self._left: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._closing: set[asyncio.Future[Any]] = set()
        self._news: dict[str, News] = {}  # by session: for its tasks that wait for others of it
        self._ended: dict[str, asyncio.Event] = {}  # by session, also if it is yet to be opened
        self._turns = _Turns()

    async def open(
        self, session: str, parcel: Parcel | SharedParcel, identity: WorkerIdentity
    ) -> Hello:
        """Begin a session; one that is there already is as it was."""
        await self._forget_unused()
        if isinstance(parcel, SharedParcel):
            import ray

            try:
                parcel = await join_parcel(parcel)
            except ray.exceptions.ObjectLostError:
                return self._hello(Answer("lost"))
        if session in self._left:  # a late copy of this call
            return self._hello(Answer("dropped"))
        if session not in self._sessions:
            opened = Session(parcel, identity)
            self._sessions[session] = opened
            self._news[session] = News()
            self._opening[session] = asyncio.ensure_future(self._set_up(session, opened))
        self._used_at[session] = time.monotonic()
        answer = await asyncio.shield(self._opening[session])
        return self._hello(answer)

    async def _set_up(self, name: str, session: Session) -> Answer:
        set_up = functools.partial(self._noted, name, session.set_up)
        return await self._run(name, session, set_up)

    async def _run(self, name: str, session: Session, work: Callable[[], Answer]) -> Answer:
        """Return what a session's work comes to; it may take longer than unused ones stay."""
        answer: Answer = await self._turns.run(name, work)
        if self._sessions.get(name) is session:
            self._used_at[name] = time.monotonic()
        return answer

    async def hello(self) -> Hello:
        """Return where this is; at once, however long setting up takes."""
        return self._hello(Answer("answer"))

    def _hello(self, answer: Answer) -> Hello:
        import ray

        context = ray.get_runtime_context()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Hello(os.getpid(), context.get_node_id(), address, Versions.here(), answer)

    async def _forget_unused(self) -> None:
        oldest = time.monotonic() - self._forgotten_after_s
        unused = [name for name, at in self._used_at.items() if at < oldest]
        for session in unused:
            opening = self._opening.get(session)
            is_open = opening is None or opening.done()
            if is_open and not self._turns.is_served(session):
                self._drop(session)

    def _drop(self, session: str) -> asyncio.Future[Any] | None:
        self._used_at.pop(session, None)
        self._opening.pop(session, None)
        if (ended := self._ended.pop(session, None)) is not None:
            ended.set()
        dropped = self._sessions.pop(session, None)
        if dropped is None:
            return None
        self._news.pop(session).tell()
        dropped.notes.want_nothing()
        close = functools.partial(self._close, dropped)
        closing = asyncio.ensure_future(self._turns.run(session, close))
        self._closing.add(closing)  # the loop itself keeps no reference
        closing.add_done_callback(self._closing.discard)
        closing.add_done_callback(lambda _: self._turns.num_done.pop(session, None))
        return closing

    def _close(self, session: Session) -> None:
        session.close()
        if self._keeper is not None:  # this process lives on: what was frozen is to be freed
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    async def make(
        self, session: str, begun: bytes, task: bytes, number: int, num_come: int
    ) -> Answer:
        """Return the batch of a task; see `Session.serve`."""
        self._num_calls[session] += 1
        try:
            return await self._make(session, begun, task, number, num_come)
        finally:
            self._num_calls[session] -= 1
            if not self._num_calls[session]:
                del self._num_calls[session]

    async def _make(
        self, session: str, begun: bytes, task: bytes, number: int, num_come: int
    ) -> Answer:
        begin_epoch, order = decode(begun), decode(task)
        known = await self._known(session, begin_epoch.generation)
        if known is None:
            return Answer("unknown")
        news = self._news[session]
        while self._sessions.get(session) is known and not known.is_in_turn(begin_epoch, number):
            await news.wait()
        work = functools.partial(known.serve, begin_epoch, order, number, num_come)
        if self._is_careful and self._turns.num_done[session] < _NUM_CAREFUL:
            work = functools.partial(self._noted, session, work)
        answer = Answer("dropped")
        if self._sessions.get(session) is known:
            answer = await self._run(session, known, work)
        if self._sessions.get(session) is not known and session not in self._left:
            answer = Answer("unknown")  # it was dropped as nobody seemed to use it
        news.tell()
        return answer

    async def try_sample(self, session: str, begun: bytes, task: bytes, number: int) -> Answer:
        """Make one sample of a task by itself; see `Session.try_sample`."""
        begin_epoch, order = decode(begun), decode(task)
        known = await self._known(session, begin_epoch.generation)
        if known is None:
            return Answer("unknown")
        trial = functools.partial(known.try_sample, begin_epoch, order, number)
        return await self._run(session, known, functools.partial(self._noted, session, trial))

    def _noted(self, name: str, work: Callable[[], Answer]) -> Answer:
        """Do what may end this process, so that the keeper of a pool knows whose it was."""
        if self._keeper is None:
            return work()
        self._num_noted += 1
        self._wait_for(self._keeper.begin_trial.remote(self._name, self._num_noted, name))
        answer = work()
        self._wait_for(self._keeper.end_trial.remote(self._name, self._num_noted))
        return answer

    def _wait_for(self, reference: Any) -> None:  # noqa: ANN401 - Ray's reference
        """Wait in the thread that works; by way of the loop, or Ray warns that it is blocked."""
        asyncio.run_coroutine_threadsafe(_taken_by_keeper(reference), self._turns.loop).result()

    async def _known(self, name: str, round_: int) -> Session | None:
        """Return the session, set up, and with all of earlier rounds wanted no more."""
        session = self._sessions.get(name)
        if session is None:
            return None
        self._used_at[name] = time.monotonic()
        session.want(round_)
        await asyncio.shield(self._opening[name])
        return session if self._sessions.get(name) is session else None

    async def leave(self, session: str) -> None:
        """End a session: what waits is dropped, and what is being made broken off at its sample."""
        self._left[session] = None
        if len(self._left) > _NUM_LEFT_KNOWN:
            self._left.popitem(last=False)
        closing = self._drop(session)
        if closing is not None:
            await closing

    async def until_end(self, session: str | None) -> None:
        """Return when the session is left or dropped; if it is None, never.

        That this call fails tells who waits of this process's death.
        """
        if session is None:
            await asyncio.get_running_loop().create_future()
        elif session not in self._left:
            # Of one that is never opened as well, so that this call does not wait for ever.
            self._used_at.setdefault(session, time.monotonic())
            await self._ended.setdefault(session, asyncio.Event()).wait()

    async def end(self, session: str) -> None:
        """Leave the session, and end this process once its iterator and memory are closed."""
        import ray

        await self.leave(session)
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    async def load(self) -> Load:
        """Return what there is to do, for whom; sessions that nobody uses are dropped first."""
        await self._forget_unused()
        import ray

        now = time.monotonic()
        sessions = tuple(
            SessionLoad(
                trainer_of(name),
                session.worker_id,
                max(self._num_calls[name] - self._turns.is_doing(name), 0),
                self._turns.waited_s(name),
                self._turns.num_done[name],
                0.0 if self._turns.is_served(name) else now - self._used_at[name],
            )
            for name, session in self._sessions.items()
        )
        return Load(os.getpid(), ray.get_runtime_context().get_node_id(), sessions)

    async def doing(self, session: str) -> Doing:
        """Return what is being done, and whose turn it is."""
        known = self._sessions.get(session)
        entry = None if known is None else known.entry()
        turns = self._turns
        return Doing(entry, self._stack(), turns.turn_of, turns.alone_s(session))

    def _stack(self) -> str:
        users = frames_of_user(sys._current_frames().get(self._turns.thread_id))
        lines = [(frame, frame.f_lineno) for frame in reversed(users)]
        return "".join(traceback.StackSummary.extract(iter(lines)).format()).rstrip()
