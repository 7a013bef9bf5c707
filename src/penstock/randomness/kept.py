# SPDX-License-Identifier: Apache-2.0
"""Generators of random numbers that a dataset keeps, and that no seed of a loader reaches.

Every worker begins with a copy of such a one, so all of them draw the same numbers, and others than
a loader without workers does.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEEPEST: Final = 3  # a dataset, its transform, a part of that
_MOST_OBJECTS: Final = 200  # that are looked at
_MOST_PARTS: Final = 32  # of one list
_OPAQUE: Final = (type, types.ModuleType, types.FunctionType, types.MethodType, np.ndarray)
# Data and models, with thousands of objects in them and none that draws.
_LIBRARIES: Final = frozenset(("numpy", "torch", "pandas", "pyarrow", "PIL", "cv2", "threading"))
# Nor these of Hugging Face: its shuffle keeps one for its order, and deals it out by epoch.
_DATASETS: Final = frozenset(
    ("datasets.arrow_dataset", "datasets.iterable_dataset", "datasets.dataset_dict")
)
_SEEDED: Final = "penstock.vision.transforms.adapters"  # gives its transform the sample's generator


def kept_generators(dataset: object) -> list[tuple[str, str, str]]:
    """Return path, kind and package of each generator that a dataset, or a part of it, keeps."""
    # Lists, tuples and dicts are looked into, a short way each; attributes in `__slots__` are not.
    # No property is read and no code of the dataset runs. Samplers, the process's own generators
    # and what Penstock's classes keep for themselves are left out.
    found: list[tuple[str, str, str]] = []
    waiting: list[tuple[object, str, int]] = [(dataset, type(dataset).__name__, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        owner, path, depth = waiting.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        package = _module_of(owner).partition(".")[0]
        for part, where in _parts_of(owner, path):
            if (kind := _kind_of(part)) is not None:
                if package != "penstock":
                    found.append((where, kind, package))
            elif depth < _DEEPEST and _may_keep(part):
                waiting.append((part, where, depth + 1))
    return found


def warn_of_kept_generators(dataset: object, seed: int) -> None:
    """Say so if a dataset keeps generators that `seed` does not reach."""
    found = kept_generators(dataset)
    if not found:
        return
    listed = ", ".join(f"{path} ({kind})" for path, kind, _ in found[:3])
    listed += f" and {len(found) - 3} more" if found[3:] else ""
    remedy = "Draw from penstock.sample_rng(), or make the generator in __getitem__"
    if any(package == "albumentations" for *_, package in found):
        remedy = "Wrap the chain: penstock.vision.Albumentations(A.Compose([...]))"
    warn_user(
        f"seed={seed} does not reach what the dataset keeps: {listed}. Every worker process draws "
        "from a copy of it, and so the same numbers as the others; threads share it, and without "
        f"workers the numbers are different ones. {remedy}. (If no sample draws from it, this "
        "means nothing.)"
    )


def _parts_of(owner: object, path: str) -> Iterator[tuple[object, str]]:
    """Yield the plain attributes of an object, or what a list or dict in one begins with.

    No code of its class runs.
    """
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return
    for name, value in attributes.items():
        where = f"{path}.{name}"
        if type(value) in (list, tuple):
            yield from ((part, f"{where}[{k}]") for k, part in enumerate(value[:_MOST_PARTS]))
        elif type(value) is dict:
            for key, part in itertools.islice(value.items(), _MOST_PARTS):
                yield part, f"{where}[{key!r}]" if type(key) in (str, int) else f"{where}[...]"
        else:
            yield value, where


def _module_of(value: object) -> str:
    return str(type(value).__module__)  # some have None


# Of both, `isinstance` would ask the object itself: a proxy that is lazy would load what it stands
# for, and one that is dead raise.
def _may_keep(value: object) -> bool:
    cls, module = type(value), _module_of(value)
    if issubclass(cls, _OPAQUE) or not cls.__dictoffset__:  # without a dict: a number, a string
        return False
    if module in _DATASETS or module == _SEEDED or module.partition(".")[0] in _LIBRARIES:
        # torch's own datasets of datasets are not the data.
        return module == "torch.utils.data.dataset"
    return not any("Sampler" in base.__name__ for base in cls.__mro__)


def _kind_of(value: object) -> str | None:
    """Return the name of a generator's class; None for what is none, or the process's own."""
    torch = sys.modules.get("torch")
    kinds = {
        "numpy.random.Generator": np.random.Generator,
        "numpy.random.RandomState": np.random.RandomState,
        "random.Random": random.Random,
        "torch.Generator": getattr(torch, "Generator", ()),
    }
    own = (random, "_inst"), (np.random.mtrand, "_rand"), (torch, "default_generator")
    if any(value is getattr(module, name, None) for module, name in own):
        return None
    kind = next((name for name, kind in kinds.items() if issubclass(type(value), kind)), None)
    return None if type(value) is random.SystemRandom else kind
