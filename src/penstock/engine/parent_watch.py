# SPDX-License-Identifier: Apache-2.0
"""The parent-death watch: a worker ends with its main process, whatever either is doing then.

A pipe whose writing end the main process alone holds: no child keeps it, forked ones close it
at once. When the main process is gone the kernel sends SIGIO to every worker, which ends it also
while native code holds the interpreter. Where the kernel cannot (no /proc, no O_ASYNC), a thread of
the worker that reads the pipe has to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import threading
import weakref
from typing import Final

__all__ = ["ParentWatch", "end_with_parent"]

_WATCH_SECONDS: Final = 2.0  # how often to look for a main process whose end no pipe tells


class ParentWatch:
    """The main process's end, for the workers of one loader.

    Attributes:
        fd: The reading end, to be sent to each worker.
    """

    def __init__(self) -> None:
        """Make the pipe."""
        self.fd, self._writing_end = os.pipe()
        self._is_open = True
        _watches.add(self)

    def close(self) -> None:
        """Let go: workers that are still there end. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self._writing_end)
            os.close(self.fd)


_watches: weakref.WeakSet[ParentWatch] = weakref.WeakSet()


def _close_in_child() -> None:
    for watch in list(_watches):
        watch.close()


os.register_at_fork(after_in_child=_close_in_child)


def end_with_parent(fd: int) -> None:
    """Let this process, a worker, end when the other end of `fd` is gone.

    Args:
        fd: A `ParentWatch`'s, as it arrived here; this module's from now on.
    """
    os.set_inheritable(fd, False)
    with contextlib.suppress(OSError, AttributeError):
        fd = _own_description(fd)
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_watch, args=(fd,), name="penstock-watch", daemon=True).start()


def _own_description(fd: int) -> int:
    """Return `fd` opened anew: what was sent shares its owner and flags with all other workers."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(fd)
    return own


def _watch(fd: int) -> None:
    first_parent = os.getppid()  # under forkserver the server, which may outlive the main process
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while os.getppid() == first_parent:
        if poll.poll(_WATCH_SECONDS * 1000):
            break
    os._exit(1)
