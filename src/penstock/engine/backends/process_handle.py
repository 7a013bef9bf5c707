# SPDX-License-Identifier: Apache-2.0
"""The main process's view of one worker process: whether it lives, and how it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.interrupts import LONGEST_WAIT_S
from penstock.engine.status_page import Phase
from penstock.engine.worker_table import KnownWorker
from penstock.system_limits import signal_name
from penstock.transport.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.status_page import StatusPage
    from penstock.transport.channel import Channel
    from penstock.transport.page_lock import PageLock

__all__ = ["WorkerProcess", "wait_for_ends"]

_ADVICE_ON_EXIT: Final = (
    "It said no last words, so it was no exception, nor sys.exit: look for os._exit in the "
    "dataset, or a library that ends the process. What it printed before may say why."
)
_ADVICE_ON_START: Final = (
    "What it printed before may say why. Under spawn and forkserver: is the main script guarded by "
    '`if __name__ == "__main__":`?'
)
_ADVICE_ON_UNKNOWN: Final = (
    "SIGCHLD is ignored in this process, perhaps since its start, or a handler of the program "
    "waits for all children, and took the status. With signal.signal(signal.SIGCHLD, "
    "signal.SIG_DFL) the next such message says how the worker ended."
)
_UNKNOWN_CODE: Final = 255  # multiprocessing's code for a child whose server has died
_ADVICE_ON_HANG: Final = "Raise `timeout` if samples, or the start of a worker, may take that long."
_ADVICE_NATIVE: Final = "That is native code under the dataset: num_workers=0 shows where."
_ADVICE_ON_SIGNALS: Final = {
    "SIGSEGV": _ADVICE_NATIVE,
    "SIGABRT": _ADVICE_NATIVE,
    "SIGBUS": _ADVICE_NATIVE,
    "SIGFPE": _ADVICE_NATIVE,
    "SIGILL": _ADVICE_NATIVE,
}
_SIGNALS_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
)
_LAST_WORDS_S: Final = 3.0  # from the end of a channel to that of its process, torch unloaded


class WorkerProcess(KnownWorker):
    """One worker process.

    Attributes:
        process: Process object of `multiprocessing`.
        channel: Channel to it, at the main process's end.
        status_page: Status page into which it writes what it is doing.
        arena: Arena with the slots of its batches.
        watch_fd: Descriptor that is readable once the process has ended.
    """

    def __init__(
        self,
        worker_id: int,
        process: Any,  # noqa: ANN401 - any context's
        channel: Channel,
        status_page: StatusPage,
        page_lock: PageLock | None = None,
    ) -> None:
        """Take over the resources of a process that has just been started.

        `page_lock` locks the slots of its batches; None locks nothing.
        """
        super().__init__(worker_id, process.pid)
        self.process = process
        self.channel = channel
        self.status_page = status_page
        self.arena = Arena(page_lock)
        self._killed_because: str | None = None
        self._end: tuple[str, str] | None = None
        self._has_ended = False
        self._exit_code: int | None = None  # negative for a signal; None once it has ended: unknown
        self._pidfd = self._open_pidfd()
        # The sentinel is a pipe, which a process that the worker forked holds open after its end.
        self.watch_fd: int = process.sentinel if self._pidfd is None else self._pidfd

    def __str__(self) -> str:
        """Return "worker 0 (pid 7)"."""
        return f"worker {self.worker_id} (pid {self.pid})"

    def _open_pidfd(self) -> int | None:
        try:
            return os.pidfd_open(self.process.pid)
        except ProcessLookupError:  # it has ended already, and its exit status was taken elsewhere
            self._note_end()
        except (OSError, AttributeError):  # another system
            pass
        return None

    def has_ended(self) -> bool:
        """Return whether it has ended, and take its exit status once it has.

        `multiprocessing` finds an end by its exit status, and misses it if that was taken before:
        by the system, if SIGCHLD is ignored, or by a handler that waits for all children.
        """
        if not self._has_ended and self._is_over():
            self._note_end()
        return self._has_ended

    def _is_over(self) -> bool:
        if self._pidfd is None:
            return not self.process.is_alive()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _note_end(self) -> None:
        popen = self.process._popen
        if popen.method == "forkserver":
            self.process.join(_LAST_WORDS_S)  # the server is about to pass the exit status on
        self._exit_code = self.process.exitcode
        if self._exit_code is None:
            # Else multiprocessing would take it for alive, and signal the next process of its
            # number.
            popen.returncode = _UNKNOWN_CODE
        self.process.join()  # at once: it takes it off the list of children
        self._has_ended = True

    def is_alive(self) -> bool:
        """Return whether it lives, by asking the system."""
        return not self.is_gone and not self.has_ended()

    def signal(self, number: int) -> None:
        """Send a signal, if the process is still there; never to another of the same number."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif not self.has_ended():
                os.kill(self.process.pid, number)

    def kill(self, why: str) -> None:
        """Kill a worker that is stuck; its stacks are in the status page then."""
        self._killed_because = why
        if self.can_show_stacks:
            self.status_page.ask_for_stacks(self.signal)
        self.signal(signal.SIGKILL)

    @property
    def can_show_stacks(self) -> bool:
        """Whether it can be asked for stacks; before its set-up the signal would end it."""
        return self.is_alive() and self.status_page.read().phase is not Phase.ABSENT

    def wait_for_end(self) -> None:
        """Wait for a process whose channel has ended; kill it if it does not end."""
        left = wait_for_ends([self], _LAST_WORDS_S)
        if left:
            self._end = (
                "closed its channel and was killed, as it did not end,",
                "Another thread or an exit handler of the dataset kept it, or something closes "
                "descriptors of others.",
            )
            self.signal(signal.SIGKILL)
            wait_for_ends([self], _LAST_WORDS_S)

    def release(self) -> None:
        """Close the main process's descriptors of a process that has ended."""
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    @property
    def deaths_that_prove(self) -> int:
        """Number of such ends of workers that proves a sample guilty."""
        if self._killed_because is not None or self._end is not None:
            return 2
        return 3 if self._exit_code is None or -self._exit_code in _SIGNALS_FROM_OUTSIDE else 2

    @property
    def was_killed_by_memory_perhaps(self) -> bool:
        """Whether it ended as the OOM killer ends processes."""
        is_ours = self._killed_because is not None or self._end is not None
        return not is_ours and self._exit_code == -signal.SIGKILL

    def describe_end(self) -> tuple[str, str]:
        """Return how the process ended, and what to do about it; call it after the end."""
        if self._killed_because is not None:
            return f"was killed, as {self._killed_because},", _ADVICE_ON_HANG
        last_words = self.status_page.last_words()
        if self._end is not None:
            end, advice = self._end
            return end, last_words or advice
        code = self._exit_code
        if code is None:
            return "ended with an exit status that is unknown", last_words or _ADVICE_ON_UNKNOWN
        if code >= 0:
            has_begun = self.status_page.read().phase is not Phase.ABSENT
            advice = last_words or (_ADVICE_ON_EXIT if has_begun else _ADVICE_ON_START)
            return f"exited with code {code}", advice
        name = signal_name(-code)
        advice = _ADVICE_ON_SIGNALS.get(name, "Somebody sent it that signal.")
        return f"was killed by {name}", advice


def wait_for_ends(workers: Sequence[WorkerProcess], timeout_s: float) -> list[WorkerProcess]:
    """Wait for all processes together, and return those that are still there."""
    deadline = time.monotonic() + timeout_s
    left = [worker for worker in workers if not worker.has_ended()]
    while left and (left_s := deadline - time.monotonic()) > 0:
        poll = select.poll()
        for worker in left:
            poll.register(worker.watch_fd, select.POLLIN)
        poll.poll(min(left_s, LONGEST_WAIT_S) * 1000)
        left = [worker for worker in left if not worker.has_ended()]
    return left
