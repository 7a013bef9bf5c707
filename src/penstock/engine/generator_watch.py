# SPDX-License-Identifier: Apache-2.0
"""Which functions draw from the generators that belong to the whole process.

Seeing that a generator's state has changed would not do: the trainer draws from the same ones
meanwhile. So the calls of one thread are followed, by a profile function, and a generator is looked
at around the calls that may draw from it:

    random    a method of the one hidden `random.Random`                around the call
    numpy     calls of its compiled functions are not told of; so       from event to event, where
              its state is looked at whenever something is              the code names a method of
                                                                        `RandomState`
    torch     a function or method that draws, by its name              around the call

A draw from within compiled code that none of these calls is not found.

Concurrency:
    A watch belongs to one thread. It costs Python code about half its speed while it lasts.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.engine.transforms import innermost_transform

if TYPE_CHECKING:
    from types import CodeType, FrameType

__all__ = ["Drawing", "GeneratorWatch"]

_TWISTER_WORDS: Final = 624
_GLOBAL_RANDOM: Final = getattr(random, "_inst", None)  # whose methods random.random etc. are
# Behind numpy.random.rand etc.; `numpy.random.mtrand` has it for `check_random_state`.
_NUMPY_NAMES: Final = frozenset(
    name for name in dir(np.random.RandomState) if not name.startswith(("_", "get_", "set_"))
) | {"ranf", "sample"}
_TORCH_NAMES: Final = frozenset(
    (
        "alpha_dropout", "alpha_dropout_", "bernoulli", "bernoulli_", "binomial", "cauchy_",
        "dropout", "dropout_", "exponential_", "feature_alpha_dropout", "feature_dropout",
        "geometric_", "log_normal_", "manual_seed", "multinomial", "native_dropout", "normal",
        "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
        "randn_like", "random_", "randperm", "rrelu", "rrelu_", "uniform_",
    )
)  # fmt: skip
_LIBRARIES: Final = (
    random.__file__,
    os.path.dirname(np.__file__) + os.sep,
    f"{os.sep}site-packages{os.sep}torch{os.sep}",
)
_OUR_ENGINE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


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
        self._pending: tuple[str, object] | None = None  # a call that may draw, and the state then
        self.found: list[Drawing] = []

    def begin(self) -> None:
        """Begin, or go on; does nothing where this thread has a profile function already."""
        if sys.getprofile() is None:
            self._numpy_at = self._numpy.now()
            self._pending = None
            sys.setprofile(self._on_event)

    def end(self) -> None:
        """Stop; a profile function that the user's code has set meanwhile stays."""
        if sys.getprofile() == self._on_event:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401
        try:
            self._look(frame, event, arg)
        except Exception:  # it would be raised in the user's code; a warning is not worth that
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ANN401
        if event in ("c_return", "c_exception"):
            self._end_call(frame)
            self._numpy_at = self._numpy.now()
            return
        # What ran since the last event was the caller's code, if this is a call of Python's.
        ran = frame.f_back if event == "call" else frame
        self._pending = None
        mark = self._numpy.now()
        if mark != self._numpy_at:
            self._numpy_at = mark
            if ran is not None and not _NUMPY_NAMES.isdisjoint(ran.f_code.co_names):
                self._note(ran, "numpy.random")
        if event == "c_call":
            self._begin_call(frame, arg)

    def _begin_call(self, frame: FrameType, function: Any) -> None:  # noqa: ANN401
        generator = _generator_of(function)
        if generator is not None and (frame.f_code, generator) not in self._known:
            self._pending = generator, _state_of(generator)

    def _end_call(self, frame: FrameType) -> None:
        if self._pending is None:
            return
        (generator, before), self._pending = self._pending, None
        if _state_of(generator) != before:
            self._note(frame, generator)

    def _note(self, frame: FrameType, generator: str) -> None:
        if (frame.f_code, generator) in self._known:
            return
        self._known.add((frame.f_code, generator))
        frames = _frames_of_user(frame)
        function = next((f for f in frames if not _is_of_library(f)), frame)
        code = function.f_code
        if any(d.code is code and d.generator == generator for d in self.found):
            return
        name = getattr(code, "co_qualname", code.co_name)
        name = f"{name} ({os.path.basename(code.co_filename)}:{function.f_lineno})"
        transform = innermost_transform(self._dataset, reversed(frames))
        self.found.append(Drawing(generator, name, transform, code))


def _frames_of_user(frame: FrameType) -> list[FrameType]:
    """Return `frame` and those that called it, up to the engine; the innermost first."""
    frames: list[FrameType] = []
    outer: FrameType | None = frame
    while outer is not None and not outer.f_code.co_filename.startswith(_OUR_ENGINE):
        frames.append(outer)
        outer = outer.f_back
    return frames


def _is_of_library(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    return filename.startswith(_LIBRARIES[:2]) or _LIBRARIES[2] in filename


def _generator_of(function: Any) -> str | None:  # noqa: ANN401
    """Return the generator that a compiled function may draw from."""
    owner = getattr(function, "__self__", None)
    if owner is not None and owner is _GLOBAL_RANDOM:
        return "random"
    if getattr(function, "__name__", None) not in _TORCH_NAMES:
        return None
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "default_generator"):
        return None
    of_torch = str(getattr(function, "__module__", None) or "").startswith("torch")
    is_method = isinstance(owner, (torch.Tensor, torch.Generator))
    return "torch" if of_torch or is_method else None


def _state_of(generator: str) -> object:
    if generator == "random":
        return random.getstate()
    return sys.modules["torch"].default_generator.get_state().numpy().tobytes()


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
