# SPDX-License-Identifier: Apache-2.0
"""Whatever a sample raises, or however it leaves: it is named, and without it all others come.

Faults at other places of a worker's life are in tests/process/test_crash_matrix.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import warnings

import numpy as np
import pytest

from penstock import Loader
from penstock.errors import WorkerDied

LENGTH = 24
BAD = 13
BACKENDS = {"process": (1, "process"), "thread": (2, "thread"), "serial": (0, "process")}


class NeedsTwo(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.two = two


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


class NotReduced(Exception):
    def __reduce__(self):
        raise TypeError("not to be pickled")


class ReducesToAnother(Exception):
    def __reduce__(self):
        return int, ("7",)


class RaisesWhenMade(Exception):
    def __reduce__(self):
        return int, ("no number",)


class Slotted(Exception):
    __slots__ = ("part",)


class Own(BaseException):
    """No Exception."""


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError("frozen")


def raised(kind, *arguments, **more):
    """Return what raises an error, a new one each time: it holds its traceback."""

    def act():
        raise kind(*arguments, **more)

    return act


def chained(kind):
    def act():
        error, other = ValueError("one"), ValueError("other")
        setattr(error, kind, other)
        setattr(other, kind, error)
        raise error

    return act


def recursion():
    return recursion()


def with_notes(notes):
    def act():
        error = ValueError("noted")
        error.__notes__ = notes
        raise error

    return act


def deep():
    """A chain of a thousand causes."""
    error = None
    for number in range(1000):
        cause, error = error, ValueError(number)
        error.__cause__ = cause
    raise error


def local():
    class Local(Exception):
        """Cannot be found by its name."""

    raise Local("text")


def in_a_finally():
    try:
        raise ValueError("one")
    finally:
        raise KeyError("two")


def during_a_signal():
    signal.raise_signal(signal.SIGUSR2)
    raise ValueError("x")


# Of these a sample is bad with every backend.
ERRORS = {
    "plain": raised(ValueError, "x"),
    "without arguments": raised(ValueError),
    "of many arguments": raised(ValueError, *range(100)),
    "1 MB of text": raised(ValueError, "x" * 1_000_000),
    "half a surrogate pair": raised(ValueError, "\ud800 \x1b[2J \0"),
    "bytes": raised(ValueError, b"\xff"),
    "itself as argument": lambda: (_ for _ in ()).throw(itself()),
    "a lock as argument": raised(ValueError, threading.Lock()),
    "an array as argument": raised(ValueError, np.zeros(100_000)),
    "needs two arguments": raised(NeedsTwo, 1, 2),
    "without words": raised(Speechless),
    "not reduced": raised(NotReduced, "x"),
    "reduced to a number": raised(ReducesToAnother, "x"),
    "raises when made": raised(RaisesWhenMade, "x"),
    "with slots": raised(Slotted, "x"),
    "that is frozen": raised(Frozen, "x"),
    "a class of a function": local,
    "its own cause": chained("__cause__"),
    "its own context": chained("__context__"),
    "a thousand causes": deep,
    "notes that are no list": with_notes("text"),
    "notes that are no texts": with_notes([1, None]),
    "in a finally": in_a_finally,
    "a group": raised(ExceptionGroup, "some", [ValueError(1)]),
    "OSError": raised(OSError, 2, "No such file", "name\n.jpg"),
    "UnicodeDecodeError": raised(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "bad"),
    "recursion": recursion,
    "MemoryError": raised(MemoryError),
    "StopIteration": raised(StopIteration),
    "StopAsyncIteration": raised(StopAsyncIteration),
    "a warning": raised(UserWarning, "x"),
    "an assertion": raised(AssertionError),
    "IndexError": raised(IndexError, "x"),
    "AttributeError with a name": lambda: object().nothing,
    "ImportError": raised(ImportError, "x", name="y", path="z"),
    "SyntaxError": lambda: compile("a b", "f", "exec"),
    "BlockingIOError": raised(BlockingIOError, 11, "x", 5),
    "EOFError": raised(EOFError),
    "BrokenPipeError": raised(BrokenPipeError, 32, "x"),
    "TimeoutError": raised(TimeoutError, "x"),
}
# These end the worker, a process; it has to be told as a death, or as the error that it is.
ENDS = {
    "sys.exit()": sys.exit,
    "sys.exit(text)": lambda: sys.exit("text"),
    "sys.exit(True)": lambda: sys.exit(True),
    "exit of -1": lambda: os._exit(-1),
    "os._exit(0)": lambda: os._exit(0),
    "os.abort": os.abort,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGXCPU": lambda: os.kill(os.getpid(), signal.SIGXCPU),
    "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "execv": lambda: os.execv("/bin/true", ["true"]),
    "KeyboardInterrupt": raised(KeyboardInterrupt),
    "GeneratorExit": raised(GeneratorExit),
    "CancelledError": raised(asyncio.CancelledError),
    "a BaseException": raised(Own, "x"),
}


def itself():
    error = ValueError()
    error.args = (error,)
    return error


NAMELESS = {"that is frozen", "notes that are no list"}  # Python lets nobody note anything on them


class Samples:
    """Sample `BAD` acts."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == BAD:
            self.act()
        return index


def loader_of(act, backend, **options):
    num_workers, backend = BACKENDS[backend]
    if num_workers and backend == "process":  # what acts cannot be pickled
        options["multiprocessing_context"] = "fork"
    return Loader(Samples(act), batch_size=4, num_workers=num_workers, backend=backend, **options)


def told(error):
    """Return an error's text, whatever it is."""
    try:
        text = str(error)
    except RuntimeError:
        text = ""
    notes = vars(error).get("__notes__", "")
    return text + " ".join(map(str, notes if isinstance(notes, list) else [notes]))


def complaint(act, backend, kinds=Exception, name=f"sample {BAD}"):
    """Return what is wrong with an epoch, with a policy and without; None if nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = loader_of(act, backend, on_error="skip")
        got = [int(k) for batch in loader for k in batch]
    if got != [k for k in range(LENGTH) if k != BAD]:
        return f"skip: {got}"
    if [failure.index for failure in loader.failures] != [BAD]:
        return f"failures: {loader.failures}"
    loader, before = loader_of(act, backend), []
    try:
        before += [int(k) for batch in loader for k in batch]
    except kinds as error:
        if name not in told(error):
            return f"it is not named: {told(error)[:300]!r}"
    else:
        return "no error"
    return None if before in ([], list(range(12))) else f"before it: {before}"


def wrong_of(acts, backend, kinds=Exception):
    named = {name: "" if name in NAMELESS else f"sample {BAD}" for name in acts}
    found = {name: complaint(act, backend, kinds, named[name]) for name, act in acts.items()}
    return [f"{name}: {why}" for name, why in found.items() if why]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_any_make_is_a_bad_sample_and_is_named(backend):
    assert wrong_of(ERRORS, backend) == []


@pytest.mark.slow
def test_a_worker_that_leaves_in_any_way_is_replaced_and_its_sample_is_named():
    assert wrong_of(ENDS, "process", (WorkerDied, Exception)) == []
