# SPDX-License-Identifier: Apache-2.0
"""Finding the functions that draw from the generators of the whole process."""
# A profile function follows the calls of one thread. It names the user's function
#
#     random    that calls a method of the one hidden `random.Random`
#     torch     that calls what draws, by its name, while the generator's state changes
#     numpy     that runs between two calls or returns while the state changes, and refers to
#               numpy's generator. The state alone would accuse a function that runs while another
#               thread draws.
#
# Not `sys.monitoring`, which Python has from 3.12 on: there an event costs 450 ns, here 160 to 250;
# and it follows all threads, each of which would pay 300. cProfile uses it then, and both go on.

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.user_code import frames_of_user, innermost_transform
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

UNSEEDED: Final = (
    "With global_rng=False the loader does not seed them, so seed= does not decide what is drawn. "
    "Draw from penstock.sample_rng(), or leave global_rng True."
)

_MOST_EVENTS: Final = 10_000  # some 20 ms; code that calls a lot is many times slower meanwhile
_GLOBAL_RANDOM: Final = getattr(random, "_inst", None)  # whose methods random.random etc. are
# Numpy's generator, module and functions: the objects by which code may refer to the generator.
_OF_NUMPY: Final = {id(np.random), id(getattr(np.random.mtrand, "_rand", np.random))}
_OF_NUMPY.update(id(v) for k, v in vars(np.random).items() if hasattr(np.random.RandomState, k))
_TORCH_NAMES: Final = re.compile(
    r"(bernoulli|cauchy|exponential|geometric|log_normal|normal|uniform)_?|random_|poisson|"
    r"binomial|multinomial|manual_seed|(rand|randn|randint)(_like)?|randperm"
)
_LIBRARIES: Final = (random.__file__, f"{os.path.dirname(np.__file__)}/", "/site-packages/torch/")
_watched: Final = weakref.WeakValueDictionary[int, object]()  # by id: not all can be hashed
_warned_of: set[str] = set()  # what was found, of all loaders


def warn_of_drawings(drawings: Iterable[str], why: str) -> None:
    """Warn of each drawing that watches found, once; `why` says why it matters, and what to do."""
    new = [drawing for drawing in drawings if drawing not in _warned_of]
    if new:
        _warned_of.update(new)
        warn_user(
            "random numbers are drawn from generators of the whole process, or these are seeded: "
            f"{'; '.join(new)}. {why}",
        )


def note_watched(dataset: object) -> None:
    """Remember that a batch of `dataset` was watched, if it can be referred to weakly."""
    with contextlib.suppress(TypeError):
        _watched[id(dataset)] = dataset


def was_watched(dataset: object) -> bool:
    """Return whether a batch of `dataset` was watched, in any loader."""
    return _watched.get(id(dataset), _watched) is dataset


class GeneratorWatch:
    """Finds the functions that draw in the thread that calls `begin`, until it calls `end`.

    `found` lists each once, as "Flip.__call__ (flips.py:12) in the transform Flip uses random".
    """

    def __init__(self, dataset: object) -> None:
        """Create a watch; `dataset` is searched for the transforms that functions belong to."""
        self._dataset = dataset
        self._known: set[tuple[CodeType, str]] = set()
        self._numpy_state = _state_of_numpy()
        self._before: tuple[object, object] = None, None  # numpy's state, and torch's if needed
        self._events_left = 0
        self.found: list[str] = []

    def begin(self) -> None:
        """Begin, or go on, for so many events; leaves a profile function of another's alone."""
        self._events_left = _MOST_EVENTS
        if sys.getprofile() is None:
            self._before = self._numpy_state(), None
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
        (numpy_before, torch_before), numpy_now = self._before, self._numpy_state()
        self._before = numpy_now, None
        if event in ("c_return", "c_exception"):
            if torch_before is not None and torch_before != _state_of_torch():
                self._note(frame, "torch")
            return  # no function of numpy's is such a call: meanwhile another thread drew
        ran = (frame.f_back or frame) if event == "call" else frame  # since the last event
        if numpy_before != numpy_now and _refers_to_numpy(ran):
            self._note(ran, "numpy.random")
        if event == "c_call":
            if getattr(arg, "__self__", None) is _GLOBAL_RANDOM and arg.__name__ != "getstate":
                self._note(frame, "random")
            elif _TORCH_NAMES.fullmatch(arg.__name__) and not any(
                isinstance(const, tuple) and "generator" in const
                for const in frame.f_code.co_consts
            ):  # where calls are given their own, another thread may change the state
                self._before = numpy_now, _state_of_torch()

    def _note(self, frame: FrameType, generator: str) -> None:
        if (frame.f_code, generator) in self._known:
            return
        frames = frames_of_user(frame)
        of_user = (f for f in frames if not any(p in f.f_code.co_filename for p in _LIBRARIES))
        code = (function := next(of_user, frame)).f_code
        if (code, generator) not in self._known:
            self._known.add((code, generator))
            place = f"{os.path.basename(code.co_filename)}:{function.f_lineno}"
            owner = innermost_transform(self._dataset, reversed(frames))
            where = "" if owner is None else f" in the transform {owner}"
            self.found.append(f"{code.co_qualname} ({place}){where} uses {generator}")


def _refers_to_numpy(frame: FrameType) -> bool:
    """Whether a name in the code, or an attribute of its `self`, is numpy's generator."""
    names, here = frame.f_code.co_names, frame.f_locals
    values = [*here.values(), *map(frame.f_globals.get, names)]
    values += getattr(here.get("self"), "__dict__", {}).values()
    if not {"default_rng", "RandomState", "sample_rng"}.isdisjoint(names):
        return False  # presumably it draws from that
    return any(id(v) in _OF_NUMPY or (v is np and "random" in names) for v in values)


def _state_of_torch() -> bytes | None:
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    return None if generator is None else generator.get_state().numpy().tobytes()


def _state_of_numpy() -> Callable[[], object]:
    """Return a function whose value changes with every draw, at the cost of two loads."""
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        return lambda: None  # the user has put another one there
    words = (ctypes.c_uint32 * 625).from_address(bits.ctypes.state_address)  # the last: a position
    return lambda: (words[624], words[0], id(bits))  # `bits` keeps the memory
