# SPDX-License-Identifier: Apache-2.0
"""Which functions draw from the generators that belong to the whole process.

Seeing that a generator's state has changed would not do: the main process draws from the same ones
meanwhile. So the calls of one thread are followed, by a profile function:

    random    a call of a method of the one hidden `random.Random`
    numpy     calls of its compiled functions are not told of. So its state is looked at whenever
              something is; where it has changed, the code that ran has to name what draws from it
    torch     a call of a function or method that draws, by its name, around which the state
              changes; not where a generator may have been passed

Who is not certain to draw is not named: a draw from within compiled code that none of these calls,
say.

Concurrency:
    A watch belongs to one thread. Python code that calls a lot is many times slower while it
    lasts, so it ends after `_MOST_EVENTS` calls and returns: some 20 ms.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import os
import random
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.engine.transforms import innermost_transform
from penstock.engine.user_frames import frames_of_user
from penstock.warn import users_level

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType

__all__ = [
    "UNSEEDED",
    "Drawing",
    "GeneratorWatch",
    "note_watched",
    "warn_of_drawings",
    "was_watched",
]

UNSEEDED: Final = (
    "With global_rng=False the loader does not seed them, so seed= does not decide what is drawn. "
    "Draw from penstock.sample_rng(), or leave global_rng True."
)

_MOST_EVENTS: Final = 10_000
_TWISTER_WORDS: Final = 624
_GLOBAL_RANDOM: Final = getattr(random, "_inst", None)  # whose methods random.random etc. are
# Behind numpy.random.rand etc.
_GLOBAL_NUMPY: Final = getattr(np.random.mtrand, "_rand", None)
_NUMPY_NAMES: Final = frozenset(
    name for name in dir(np.random.RandomState) if not name.startswith(("_", "get_", "set_"))
) | {"ranf", "sample"}
_TORCH_NAMES: Final = frozenset(
    (
        "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_",
        "log_normal_", "manual_seed", "multinomial", "normal", "normal_", "poisson", "rand",
        "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
        "uniform_",
    )
)  # fmt: skip
_LIBRARIES: Final = (
    random.__file__,
    os.path.dirname(np.__file__) + os.sep,
    f"{os.sep}site-packages{os.sep}torch{os.sep}",
)
_CALL_WITH_DICT: Final = dis.opmap["CALL_FUNCTION_EX"]

_watched: dict[int, weakref.ref[object]] = {}  # datasets of which a batch was watched, by id


_warned_of: set[str] = set()  # drawings, of all loaders


def warn_of_drawings(drawings: Iterable[str], why: str) -> None:
    """Warn of functions that draw from the process's generators, once of each.

    Args:
        drawings: Texts of `Drawing`.
        why: Why that matters, and what to do.
    """
    new = [drawing for drawing in drawings if drawing not in _warned_of]
    if new:
        _warned_of.update(new)
        warnings.warn(
            "random numbers are drawn from generators of the whole process, or these are seeded: "
            f"{'; '.join(new)}. {why}",
            stacklevel=users_level(),
        )


def note_watched(dataset: object) -> None:
    """Remember that a batch of it was watched. Of what cannot be referred to weakly nothing is."""
    key = id(dataset)
    try:
        _watched[key] = weakref.ref(dataset, lambda _: _watched.pop(key, None))
    except TypeError:
        return


def was_watched(dataset: object) -> bool:
    """Return whether a batch of it was watched, in any loader."""
    reference = _watched.get(id(dataset))
    return reference is not None and reference() is dataset


class Drawing(NamedTuple):
    """A function that draws from, or seeds, one of the process's generators.

    Attributes:
        generator: "random", "numpy.random" or "torch".
        function: Its name, file and line.
        transform: The dataset's transform that it belongs to, or is; None if it is of none.
        code: What tells it from others.
    """

    generator: str
    function: str
    transform: str | None
    code: CodeType

    def __str__(self) -> str:
        """Return "Flip.__call__ (flips.py:12) in the transform Flip uses random"."""
        where = "" if self.transform is None else f" in the transform {self.transform}"
        return f"{self.function}{where} uses {self.generator}"


class GeneratorWatch:
    """Finds out who draws, in the thread that calls `begin`, until it calls `end`.

    Attributes:
        found: What was found, one for each function and generator.

    Example:
        >>> watch = GeneratorWatch(dataset=None)
        >>> watch.begin()
        >>> _ = random.random()
        >>> watch.end()
        >>> [drawing.generator for drawing in watch.found]
        ['random']
    """

    def __init__(self, dataset: object) -> None:
        """Find the functions of `dataset`."""
        self._dataset = dataset
        self._known: set[tuple[CodeType, str]] = set()
        self._numpy = _NumpyMark()
        self._numpy_at: object = None
        self._torch_at: object = None  # before a call that may draw
        self._events_left = _MOST_EVENTS
        self.found: list[Drawing] = []

    def begin(self) -> None:
        """Begin, or go on; does nothing where this thread has a profile function already."""
        if sys.getprofile() is None and self._events_left > 0:
            self._numpy_at = self._numpy.now()
            self._torch_at = None
            sys.setprofile(self._on_event)

    def end(self) -> None:
        """Stop; a profile function that the user's code has set meanwhile stays."""
        if sys.getprofile() == self._on_event:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401
        self._events_left -= 1
        try:
            self._look(frame, event, arg)
        except Exception:  # it would be raised in the user's code; a warning is not worth that
            self._events_left = 0
        if self._events_left <= 0:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401
        if event in ("c_return", "c_exception"):
            torch_at, self._torch_at = self._torch_at, None
            if torch_at is not None and torch_at != _torch_state():
                self._note(frame, "torch")
            self._numpy_at = self._numpy.now()
            return
        # What ran since the last event was the caller's code, if this is a call of Python's.
        ran = frame.f_back if event == "call" else frame
        self._torch_at = None
        mark = self._numpy.now()
        if mark != self._numpy_at:
            self._numpy_at = mark
            if ran is not None and _names_global_numpy(ran):
                self._note(ran, "numpy.random")
        if event == "c_call":
            self._begin_call(frame, arg)

    def _begin_call(self, frame: FrameType, function: Any) -> None:  # noqa: ANN401
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", None)
        if owner is not None and owner is _GLOBAL_RANDOM:
            if name != "getstate":
                self._note(frame, "random")
        elif name in _TORCH_NAMES and (frame.f_code, "torch") not in self._known:
            is_suspect = _may_be_of_torch(function, owner) and not _passes_generator(frame)
            self._torch_at = _torch_state() if is_suspect else None

    def _note(self, frame: FrameType, generator: str) -> None:
        if (frame.f_code, generator) in self._known:
            return
        self._known.add((frame.f_code, generator))
        frames = frames_of_user(frame)
        function = next((f for f in frames if not _is_of_library(f)), frame)
        code = function.f_code
        if any(d.code is code and d.generator == generator for d in self.found):
            return
        name = getattr(code, "co_qualname", code.co_name)
        name = f"{name} ({os.path.basename(code.co_filename)}:{function.f_lineno})"
        transform = innermost_transform(self._dataset, reversed(frames))
        self.found.append(Drawing(generator, name, transform, code))


def _is_of_library(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    return filename.startswith(_LIBRARIES[:2]) or _LIBRARIES[2] in filename


def _may_be_of_torch(function: Any, owner: Any) -> bool:  # noqa: ANN401
    """Return whether a function with the name of one of torch's may use the default generator."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "default_generator"):
        return False
    if isinstance(owner, torch.Generator):
        return owner is torch.default_generator
    of_torch = str(getattr(function, "__module__", None) or "").startswith("torch")
    return of_torch or isinstance(owner, torch.Tensor)


def _passes_generator(frame: FrameType) -> bool:
    """Return whether the call that `frame` makes may be given a generator of its own."""
    code = frame.f_code
    if code.co_code[frame.f_lasti] == _CALL_WITH_DICT:
        return True
    return any(isinstance(names, tuple) and "generator" in names for names in code.co_consts)


def _torch_state() -> bytes:
    state: bytes = sys.modules["torch"].default_generator.get_state().numpy().tobytes()
    return state


def _names_global_numpy(frame: FrameType) -> bool:
    """Return whether what draws from numpy's global generator is named in the code of `frame`."""
    return any(_is_global_numpy(_resolve(frame, chain)) for chain in _numpy_chains(frame.f_code))


@functools.lru_cache(maxsize=256)
def _numpy_chains(code: CodeType) -> list[list[str]]:
    return [chain for chain in _chains(code) if chain[-1] in _NUMPY_NAMES]


def _chains(code: CodeType) -> Iterator[list[str]]:
    """Yield the names in `code` with their attributes, as ["np", "random", "rand"]."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        kind = instruction.opname
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(str(instruction.argval))
        elif kind not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG"):
            if chain:
                yield chain
            is_name = kind.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"))
            chain = [str(instruction.argval)] if is_name else []


def _resolve(frame: FrameType, chain: list[str]) -> Any:  # noqa: ANN401
    """Return what a chain of names stands for; None where only the user's code could tell."""
    first, *attributes = chain
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in attributes:
        if value is _GLOBAL_NUMPY:
            return getattr(value, name, None)
        try:
            value = vars(value).get(name)
        except TypeError:
            return None
    return value


def _is_global_numpy(function: Any) -> bool:  # noqa: ANN401
    """Return whether it is a method of numpy's global generator, or one of what is beside them."""
    if function is None or _GLOBAL_NUMPY is None:
        return False
    beside = (np.random.seed, np.random.sample, np.random.ranf)
    return getattr(function, "__self__", None) is _GLOBAL_NUMPY or function in beside


class _NumpyMark:
    """What changes in numpy's global generator with every draw, at the cost of two loads."""

    def __init__(self) -> None:
        bit_generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._owner = bit_generator  # keeps the memory
        self._words: Any = None
        if not isinstance(bit_generator, np.random.MT19937):
            return  # the user has put another one there, whose state lies elsewhere
        address = bit_generator.ctypes.state_address
        words = (ctypes.c_uint32 * (_TWISTER_WORDS + 1)).from_address(address)
        state = bit_generator.state["state"]
        # The position lies behind the twister's words; checked, as nothing promises it.
        if words[_TWISTER_WORDS] == state["pos"] and words[0] == int(state["key"][0]):
            self._words = words

    def now(self) -> object:
        words = self._words
        return None if words is None else (words[_TWISTER_WORDS], words[0])
