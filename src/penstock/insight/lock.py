# SPDX-License-Identifier: Apache-2.0
"""Sampling of the interpreter's lock: how often other threads hold it."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from penstock.engine.timing import RunQueue

__all__ = ["LockProbe"]

_NAPS_S: Final = (1e-4, 7e-4, 1.9e-3)  # of several lengths: looks follow a batch, as do its reads
_HELD_NS: Final = 300_000
_SHARE: Final = 400  # a look may cost 1 of so many parts of the time
_FIRST_SHARE: Final = 20  # and so many until there are enough of them
_MOST: Final = 1024
_FEWEST: Final = 3  # looks that tell something


class LockProbe:
    """Looks now and then whether the main process gets the lock back when it has let go of it.

    The system does not tell a thread that waits for the lock from one that waits for a disk. But
    after a nap a thread that needs the lock has it at once, or when the holder's turn is over,
    which is 5 ms unless `sys.setswitchinterval` said otherwise. Shorter holds are often missed.

    Concurrency:
        `look` in the main process's thread, `share` in any.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._looks: deque[tuple[int, bool]] = deque(maxlen=_MOST)
        self._next_ns = 0

    def look(self, now_ns: int) -> None:
        """Look, unless the last was a moment ago; takes 2 ms, or a turn of the holder."""
        if now_ns < self._next_ns:
            return
        queue = RunQueue()
        starved_ns, begun_ns = queue.waited_ns() or 0, time.monotonic_ns()
        nap_s = _NAPS_S[len(self._looks) % len(_NAPS_S)]
        time.sleep(nap_s)
        took_ns = time.monotonic_ns() - begun_ns
        starved_ns = (queue.waited_ns() or 0) - starved_ns
        queue.close()
        is_held = took_ns - starved_ns - nap_s * 1e9 > _HELD_NS
        self._looks.append((now_ns, is_held))
        share = _SHARE if len(self._looks) >= _FEWEST else _FIRST_SHARE
        self._next_ns = now_ns + share * took_ns

    def share(self, since_ns: int) -> float | None:
        """Return the share of looks since then that found it held; None below 3 of them."""
        found = [is_held for at_ns, is_held in self._looks.copy() if at_ns >= since_ns]
        return sum(found) / len(found) if len(found) >= _FEWEST else None
