# SPDX-License-Identifier: Apache-2.0
"""Random sets of arguments for a loader, and what a training loop sees of a loader made of one.

A set is a function of its number. Everything in it can be pickled, for workers that are spawned.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.utils.data as theirs
from tests.torch.datasets_for_tests import (
    EagerSampler,
    EvenlySharded,
    Example,
    LazySampler,
    Pair,
    RandomStream,
    Stream,
    TensorSampler,
    UnevenBatches,
    collate_as_they_are,
    collate_read_only,
    mark_worker,
    seed_worker,
)
from tests.torch.test_equality import states
from tests.torch.test_sampler_errors import Failing, FailingGenerator

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_FORKED: Final = 100  # the sets below it use no start method but fork
LENGTH: Final = 14
MOST_STEPS: Final = 40


def _filled(shape: tuple[int, ...], index: int) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + index) % 11


_SHAPE: Final = (6, 10, 20)  # 4 KiB and more: large enough for a slot
_DTYPES: Final = ("?", "u1", "i1", "i2", "i4", "i8", "u2", "f2", "f4", "f8", "c8", "c16")
_TENSOR_DTYPES: Final = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


def _array(dtype: str, index: int) -> np.ndarray[Any, Any]:
    return _filled(_SHAPE, index).astype(dtype)


def _tensor(dtype: torch.dtype, index: int) -> torch.Tensor:
    return torch.from_numpy(_filled(_SHAPE, index)).to(dtype)


def _read_only(index: int) -> np.ndarray[Any, Any]:
    array = _filled(_SHAPE, index)
    array.flags.writeable = False
    return array


def _text(index: int) -> str:
    return f"sample {index}"


# Name -> index -> leaf. Those of `LAZY` are views with a bit that torch's workers lose.
LAZY: Final[dict[str, Callable[[int], Any]]] = {
    "conj": lambda k: torch.complex(torch.full((700,), k + 1.0), torch.ones(700)).conj(),
    "neg": lambda k: torch.complex(torch.ones(700), torch.full((700,), k + 1.0)).conj().imag,
}
LEAVES: Final[dict[str, Callable[[int], Any]]] = {
    "int": int,
    "float": lambda k: k / 3,
    "bool": lambda k: k % 2 == 0,
    "str": _text,
    "bytes": lambda k: _text(k).encode(),
    **{f"scalar {d}": partial(lambda d, k: np.dtype(d).type(k % 5), d) for d in _DTYPES},
    **{f"array {d}": partial(_array, d) for d in _DTYPES},
    "Fortran": lambda k: np.asfortranarray(_filled((30, 40), k)),
    "stepped array": lambda k: _filled((60, 40), k)[::2, ::3],
    "0-d array": lambda k: np.array(float(k)),
    "empty array": lambda k: np.empty((0, 3), "f4"),
    "small array": lambda k: np.array([k, k + 1], "i2"),
    "read-only array": _read_only,
    **{f"tensor {d}": partial(_tensor, d) for d in _TENSOR_DTYPES},
    "transposed": lambda k: torch.arange(1600.0).view(40, 40).T + k,
    "channels last": lambda k: torch.full((1, 3, 20, 20), float(k)).contiguous(
        memory_format=torch.channels_last
    ),
    "expanded": lambda k: torch.tensor(k).expand(3, 500),
    "0-d tensor": lambda k: torch.tensor(k),
    "empty tensor": lambda k: torch.empty(0, 3),
    "stepped tensor": lambda k: (torch.arange(8000.0).view(80, 100) + k)[::2, 1::3],
    "drawn by torch": lambda k: torch.rand(1200),
    "drawn by numpy": lambda k: np.random.rand(3),
    "drawn by random": lambda k: random.random(),
    "mixed numbers": lambda k: k if k % 2 else float(k),
    "ragged": lambda k: torch.ones(k % 4 + 1),  # default collate refuses it
    "None": lambda k: None,  # this, too
    "text array": lambda k: np.array([_text(k)] * 3),  # and this
    **LAZY,
}


@dataclass(frozen=True)
class Tree:
    """A sample's structure: a container of names of leaves, or of trees; or one name."""

    kind: str
    members: tuple[Any, ...]

    def make(self, index: int) -> Any:
        """Return the sample."""
        made = [m.make(index) if isinstance(m, Tree) else LEAVES[m](index) for m in self.members]
        if self.kind == "dict":
            return {f"key {k}": member for k, member in enumerate(made)}
        if self.kind == "pair":
            return Pair(made[0], made[-1])
        if self.kind == "example":
            return Example(made[0], index)
        if self.kind == "leaf":
            return made[0]
        return list(made) if self.kind == "list" else tuple(made)

    @property
    def leaves(self) -> set[str]:
        """Names of all leaves."""
        parts = [m.leaves if isinstance(m, Tree) else {m} for m in self.members]
        return set().union(*parts)


class Samples(theirs.Dataset):
    """Trees; some samples raise."""

    def __init__(self, tree: Tree, errors: dict[int, type[Exception]], together: bool) -> None:
        self.tree, self.errors = tree, errors
        if together:
            self.__getitems__ = self.read_together

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> Any:
        index = int(index)
        if index in self.errors:
            raise self.errors[index](f"no sample {index}")
        return self.tree.make(index)

    def read_together(self, indices: list[int]) -> list[Any]:
        """What `__getitems__` is, where there is one."""
        return [self[index] for index in indices]


def collate_first(samples: list[Any]) -> Any:
    """The first sample, as it is."""
    return samples[0]


def collate_that_fails(samples: list[Any]) -> Any:
    """Raises now and then, by what the batch's first sample draws."""
    if random.random() < 0.3:
        raise ArithmeticError("no batch")
    return len(samples), torch.rand(2), samples[-1]


def collate_numbers(samples: list[Any]) -> Any:
    """Read-only arrays, whatever the samples are."""
    return collate_read_only([(None, len(samples))])


class ReversedOrder(theirs.SequentialSampler):
    """A subclass of a stock sampler, with an order of its own."""

    def __iter__(self) -> Any:
        return reversed(range(len(self.data_source)))


SAMPLERS: Final[dict[str, Callable[..., Any]]] = {
    "sequential": lambda lib, data, g: lib.SequentialSampler(data),
    "random": lambda lib, data, g: lib.RandomSampler(data, generator=g),
    "replaced": lambda lib, data, g: lib.RandomSampler(data, True, 9, generator=g),
    "weighted": lambda lib, data, g: lib.WeightedRandomSampler([0.1, 0.5, 0.4] * 4, 11),
    "subset": lambda lib, data, g: lib.SubsetRandomSampler([3, 1, 4, 1, 5, 9], generator=g),
    "eager": lambda lib, data, g: EagerSampler(LENGTH),
    "lazy": lambda lib, data, g: LazySampler(LENGTH),
    "tensors": lambda lib, data, g: TensorSampler(LENGTH),
    "list": lambda lib, data, g: [5, 2, 2, 0, 13],
    "negative": lambda lib, data, g: [-1, -3, 2],
    "reversed": lambda lib, data, g: ReversedOrder(data),
    "distributed": lambda lib, data, g: lib.DistributedSampler(data, 2, 1),
    "failing": lambda lib, data, g: Failing(list(range(LENGTH)), (4, 7)),
    "failing generator": lambda lib, data, g: FailingGenerator(list(range(LENGTH)), (9,)),
}
BATCH_SAMPLERS: Final[dict[str, Callable[..., Any]]] = {
    "uneven": lambda lib, inner: UnevenBatches(LENGTH),
    "lists": lambda lib, inner: [[0, 1], [5], [3, 2, 8], [9, 9]],
    "stock": lambda lib, inner: lib.BatchSampler(inner, 3, drop_last=True),
    "nested": lambda lib, inner: lib.BatchSampler(lib.BatchSampler(inner, 2, False), 2, False),
    "failing": lambda lib, inner: Failing([[2 * k, 2 * k + 1] for k in range(7)], (3, 4)),
}
COLLATES: Final = (None, None, None, collate_as_they_are, collate_first, collate_that_fails,
                   collate_numbers)  # fmt: skip
INITS: Final = (None, None, mark_worker, seed_worker)


@dataclass(frozen=True)
class ArgumentSet:
    """One set of arguments, and how the loader is used.

    Attributes:
        number: Decides all of it.
        tree: Of a sample.
        stream: A class of stream; None for a map-style dataset.
        errors: Sample -> what it raises.
        together: Whether the dataset has `__getitems__`.
        sampler: Name in `SAMPLERS`; None for none.
        batch_sampler: Name in `BATCH_SAMPLERS`; None for none.
        own_generator: Whether the loader is given a generator.
        options: Other arguments, the same for both loaders.
        stops: Per epoch, after how many batches the loop breaks; None is at the end.
    """

    number: int
    tree: Tree
    stream: type | None
    errors: dict[int, type[Exception]]
    together: bool
    sampler: str | None
    batch_sampler: str | None
    own_generator: bool
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[int | None, ...] = (None, None)


def _tree(rng: random.Random, depth: int = 0) -> Tree:
    kind = rng.choice(["leaf", "dict", "list", "tuple", "pair", "tuple", "dict", "example"])
    if kind == "example" and (depth or rng.random() < 0.5):
        kind = "tuple"
    plain = [name for name in LEAVES if name not in ("ragged", "None", "text array")]
    members: list[Any] = []
    for _ in range(1 if kind in ("leaf", "example") else rng.randint(1, 4)):
        if depth < 2 and kind not in ("leaf", "example") and rng.random() < 0.2:
            members.append(_tree(rng, depth + 1))
        else:
            members.append(rng.choice(plain if rng.random() < 0.97 else list(LEAVES)))
    return Tree(kind, tuple(members))


def set_of(number: int) -> ArgumentSet:
    """Return the set of arguments of this number."""
    rng = random.Random(number)
    tree = _tree(rng)
    stream = rng.choice([Stream, EvenlySharded, RandomStream]) if rng.random() < 0.12 else None
    errors = {}
    if rng.random() < 0.2:
        kinds = (ValueError, KeyError, OSError, ZeroDivisionError)
        errors = {k: rng.choice(kinds) for k in rng.sample(range(LENGTH), 2)}
    options: dict[str, Any] = {"num_workers": rng.choice([0, 0, 0, 1, 2])}
    if options["num_workers"]:
        options["persistent_workers"] = rng.random() < 0.4
        options["prefetch_factor"] = rng.choice([None, 1, 2, 3])
        options["worker_init_fn"] = rng.choice(INITS)
        if number >= NUM_FORKED and rng.random() < 0.01:  # each takes seconds
            options["multiprocessing_context"] = rng.choice(["spawn", "forkserver"])
    if options.get("worker_init_fn") is mark_worker and stream is None:
        options["worker_init_fn"] = seed_worker
    options["collate_fn"] = rng.choice(COLLATES)
    sampler = batch_sampler = None
    order = rng.random()
    if stream is None and order < 0.45:
        sampler = rng.choice(list(SAMPLERS))
    elif stream is None and order < 0.6:
        batch_sampler, sampler = rng.choice(list(BATCH_SAMPLERS)), rng.choice(list(SAMPLERS))
    elif stream is None and order < 0.85:
        options["shuffle"] = True
    if batch_sampler is None:
        options["batch_size"] = rng.choice([None, 1, 2, 3, 5, LENGTH + 3])
        options["drop_last"] = rng.random() < 0.3
    if rng.random() < 0.02:  # what contradicts the rest is refused by both
        options |= rng.choice(
            [{"batch_size": 0}, {"shuffle": True, "drop_last": True}, {"persistent_workers": True}]
        )
    stops = tuple(rng.choice([None, None, 0, 1, 2]) for _ in range(rng.randint(1, 3)))
    return ArgumentSet(
        number, tree, stream, errors, rng.random() < 0.15, sampler, batch_sampler,
        rng.random() < 0.4, options, stops,
    )  # fmt: skip


def observe(lib: Any, arguments: ArgumentSet) -> list[Any]:
    """Return what a training loop sees of `lib`'s loader that goes on after every error."""
    torch.manual_seed(arguments.number)
    random.seed(arguments.number)
    np.random.seed(arguments.number)
    own = torch.Generator().manual_seed(arguments.number + 1) if arguments.own_generator else None
    if arguments.stream is None:
        dataset: Any = Samples(arguments.tree, arguments.errors, arguments.together)
    else:
        dataset = arguments.stream()
    options = {**arguments.options, "generator": own}
    if arguments.sampler is not None:
        options["sampler"] = SAMPLERS[arguments.sampler](lib, dataset, own)
    if arguments.batch_sampler is not None:
        inner = options.pop("sampler")
        options["batch_sampler"] = BATCH_SAMPLERS[arguments.batch_sampler](lib, inner)
    try:
        loader = lib.DataLoader(dataset, **options)
    except Exception as error:
        return ["refused", _kind(error)]
    seen: list[Any] = []
    for stop in arguments.stops:
        with contextlib.closing(_Epoch(loader)) as epoch:
            seen.append(epoch.see(MOST_STEPS if stop is None else stop))
        seen.append(states(own))
    return seen


def _kind(error: Exception) -> type:
    """Return the type that code written for torch can catch; ours are subclasses of Python's."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")


class _Epoch:
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches: Any = None

    def see(self, num_steps: int) -> list[Any]:
        seen: list[Any] = []
        try:
            self.batches = iter(self.loader)
        except Exception as error:
            return ["not begun", _kind(error)]
        for _ in range(num_steps):
            try:
                seen.append(next(self.batches))
            except StopIteration:
                return [*seen, "end"]
            except Exception as error:
                seen.append(_kind(error))
        return seen

    def close(self) -> None:
        self.loader = self.batches = None
