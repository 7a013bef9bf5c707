# SPDX-License-Identifier: Apache-2.0
"""Forks of this process: may a child have inherited something, and is this process a copy?

Whether a child has inherited what existed from one moment to another, in any thread:

    before = num_over()           before it begins to exist
    ...                           it exists
    num_begun() != before         after it has ended: a child may have it

A fork that is under way at the first moment has begun and is not over, so it counts as well. Hooks
before and after the fork alone would leave a gap: other threads run between a hook and fork(2).

A program that is merely started (`subprocess`) calls no hook, and sees no memory of ours.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final

at_fork: Final[Any] = getattr(os, "register_at_fork", lambda **_: None)
"""`os.register_at_fork`; on Windows, which has no forks, a function that does nothing."""

# A byte for each. What the hooks call is C code: Python ignores what is raised in a hook, so that a
# Ctrl-C in a Python function would lose the count.
_begun: Final = bytearray()
_over: Final = bytearray()
_generation: Final = bytearray()  # one more in each child than in its parent


def num_begun() -> int:
    """Return how many forks of this process have begun."""
    return len(_begun)


def num_over() -> int:
    """Return how many forks of this process are over, in the process that was forked."""
    return len(_over)


def _end_all_in_child() -> None:
    # Those of other threads end in the parent. Broken off by a Ctrl-C, it only wastes memory.
    _over.extend(bytes(len(_begun) - len(_over)))


at_fork(
    before=functools.partial(_begun.append, 0),
    after_in_parent=functools.partial(_over.append, 0),
    after_in_child=functools.partial(_generation.append, 0),
)
at_fork(after_in_child=_end_all_in_child)


class Owner:
    """The process that made something, as opposed to copies of it that were forked since.

    Attributes:
        pid: Its process id.
    """

    __slots__ = ("_generation", "pid")

    def __init__(self) -> None:
        """Note the process that makes it."""
        self.pid = os.getpid()
        self._generation = len(_generation)

    @property
    def is_here(self) -> bool:
        """Whether this process is the one. Costs no system call."""
        return len(_generation) == self._generation
