# SPDX-License-Identifier: Apache-2.0
"""Whatever a sample is made of, a batch of it is torch's: type, dtype, values, or kind of error."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import typing
import uuid
import warnings

import numpy as np
import pytest
import torch
import torch.utils.data as theirs
from PIL import Image
from tests.torch.comparing import assert_same
from tests.torch.conftest import no_resource_sharer  # noqa: F401 - a fixture for all tests here

import penstock.torch as ours

BATCH = 3
LARGE = 3000  # elements: a leaf of more than 4 KiB lies in a slot
Point = collections.namedtuple("Point", ["x", "y"])


class Typed(typing.NamedTuple):
    x: int
    y: float


class Plain:
    """An object of a user."""

    def __init__(self, k):
        self.k = k

    def __eq__(self, other):
        return type(other) is Plain and other.k == self.k

    __hash__ = None


class Wrong(Exception):
    """An error that is a sample."""

    def __eq__(self, other):
        return type(other) is Wrong and other.args == self.args

    __hash__ = None


@dataclasses.dataclass
class Data:
    x: int
    y: torch.Tensor


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    """A subclass of a leaf."""


class Whole(int):
    """Another."""


class Array(np.ndarray):
    """An array of a subclass."""


class Tensor(torch.Tensor):
    """A tensor of a subclass."""


class Table(collections.UserDict):
    """A mapping that is no dict."""


class Rows(collections.UserList):
    """A sequence that is no list."""


def objects(k):
    held = np.empty(2, object)
    held[:] = [k, "text"]
    return held


# Each makes sample k of its kind.
LEAVES = {
    "int": lambda k: k,
    "negative int": lambda k: -k - 1,
    "int64's largest": lambda k: 2**63 - 1 - k,
    "bool": lambda k: k % 2 == 0,
    "float": lambda k: k / 3,
    "nan and inf": lambda k: (float("nan"), float("inf"), -0.0)[k],
    "int and float": lambda k: (k, k / 3)[k % 2],
    "bool and int": lambda k: (True, 5, False)[k],
    "complex": lambda k: k + 1j,
    "huge int": lambda k: 2**80 + k,
    "str": lambda k: "text" * k,
    "str of all planes": lambda k: "ü☃\U0001f600" * k,
    "half a surrogate pair": lambda k: "\ud800" * k,
    "str with zeros": lambda k: "a\0b" * k,
    "long str": lambda k: "x" * 10_000 * (k + 1),
    "bytes": lambda k: b"\0\xff" * k,
    "long bytes": lambda k: b"x" * 10_000,
    "bytearray": lambda k: bytearray(b"abc"),
    "memoryview": lambda k: memoryview(b"abc"),
    "None": lambda k: None,
    "Ellipsis": lambda k: ...,
    "type": lambda k: int,
    "object": Plain,
    "dataclass": lambda k: Data(k, torch.tensor(k)),
    "enum": lambda k: Colour.RED,
    "IntEnum": lambda k: Number.ONE,
    "subclass of str": lambda k: Text("text"),
    "subclass of int": Whole,
    "Decimal": lambda k: decimal.Decimal(k) / 3,
    "Fraction": lambda k: fractions.Fraction(k, 3),
    "datetime": lambda k: datetime.datetime(2026, 1, 1 + k),
    "timedelta": lambda k: datetime.timedelta(k),
    "UUID": lambda k: uuid.UUID(int=k),
    "Path": lambda k: pathlib.PurePosixPath(f"a/{k}"),
    "range": range,
    "slice": slice,
    "set": lambda k: {1, 2},
    "frozenset": lambda k: frozenset({1}),
    "function": lambda k: len,
    "exception": lambda k: Wrong("x"),
    "array.array": lambda k: array.array("d", [k, 2.0]),
    "SimpleNamespace": lambda k: types.SimpleNamespace(x=k),
    "Pillow image": lambda k: Image.new("RGB", (2, 2)),
    **{
        f"np.{name}": lambda k, n=name: getattr(np, n)(k)
        for name in ("bool_", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
                     "uint64", "float16", "float32", "float64", "complex64", "complex128")
    },
    "np.str_": lambda k: np.str_("text"),
    "np.bytes_": lambda k: np.bytes_(b"text"),
    "np.datetime64": lambda k: np.datetime64("2026-01-01"),
    **{
        f"array of {name}": lambda k, n=name: np.arange(LARGE).astype(n) + np.array(k).astype(n)
        for name in ("bool", "uint8", "int16", "uint16", "uint32", "int64", "uint64", "float16",
                     "float32", "complex64")
    },
    "array, 0-d": lambda k: np.array(k),
    "array, empty": lambda k: np.empty((0, 3), np.float32),
    "array, big-endian": lambda k: np.arange(LARGE, dtype=">i4"),
    "array, transposed": lambda k: np.arange(6000.0).reshape(60, 100).T,
    "array, Fortran": lambda k: np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "array, stepped": lambda k: np.arange(2.0 * LARGE)[::2],
    "array, broadcast": lambda k: np.broadcast_to(np.float32(k), (50, 60)).copy(),
    "array, of a subclass": lambda k: np.arange(LARGE).view(Array),
    "array of objects": objects,
    "array of str": lambda k: np.array(["a", "bc"]),
    "array of structs": lambda k: np.zeros(2, [("x", "i4"), ("y", "f8")]),
    "array of datetimes": lambda k: np.arange("2026-01", "2026-05", dtype="M8[M]"),
    "array, other shapes": lambda k: np.zeros(k + 1),
    "array, other dtypes": lambda k: np.zeros(LARGE, ("f4", "f8", "i4")[k]),
    "array, other dimensions": lambda k: np.zeros((4,) * (k + 1)),
    **{
        f"tensor of {name}": lambda k, n=name: (torch.arange(LARGE) % 2 + k).to(getattr(torch, n))
        for name in ("bool", "uint8", "int32", "int64", "uint16", "float16", "bfloat16", "float32",
                     "complex64")
    },
    "tensor, 0-d": torch.tensor,
    "tensor, empty": lambda k: torch.empty(0, 3),
    "tensor, transposed": lambda k: torch.arange(6000.0).view(60, 100).t(),
    "tensor, expanded": lambda k: torch.tensor([float(k)]).expand(LARGE),
    "tensor, stepped": lambda k: torch.arange(2.0 * LARGE)[::2],
    "tensor, of a subclass": lambda k: torch.arange(float(LARGE)).as_subclass(Tensor),
    "tensor that requires grad": lambda k: torch.ones(3, requires_grad=True),
    "tensor, other shapes": lambda k: torch.zeros(k + 1),
    "tensor, other dtypes": lambda k: torch.zeros(3, dtype=(torch.int32, torch.float32)[k % 2]),
    "tensor, sparse": lambda k: torch.eye(3).to_sparse(),
    "tensor and array": lambda k: (torch.zeros(3), np.zeros(3), torch.zeros(3))[k],
    "Size": lambda k: torch.Size([2, 3]),
    "dtype": lambda k: torch.float32,
    "device": lambda k: torch.device("cpu"),
    "list": lambda k: [k, "a", torch.zeros(LARGE)],
    "tuple": lambda k: (k, k / 2),
    "empty list": lambda k: [],
    "empty tuple": lambda k: (),
    "empty dict": lambda k: {},
    "namedtuple": lambda k: Point(k, np.zeros(LARGE)),
    "NamedTuple": lambda k: Typed(k, 0.5),
    "dict": lambda k: {"a": k, 3: np.ones(LARGE), ("t", 1): "text"},
    "OrderedDict": lambda k: collections.OrderedDict(b=k, a=k),
    "defaultdict": lambda k: collections.defaultdict(list, a=k),
    "Counter": lambda k: collections.Counter(a=k),
    "ChainMap": lambda k: collections.ChainMap({"a": k}),
    "MappingProxy": lambda k: types.MappingProxyType({"a": k}),
    "UserDict": lambda k: Table(a=k),
    "UserList": lambda k: Rows([k]),
    "deque": lambda k: collections.deque([k, 2]),
    "deep": lambda k: {"a": [({"b": [k, (k, [k])]},)]},
    "lists of other lengths": lambda k: [1] * (k + 1),
    "dicts of other keys": lambda k: {f"key {k}": 1},
    "dicts with more keys later": lambda k: {str(n): n for n in range(k + 1)},
    "other types": lambda k: (1, "text", None)[k],
}  # fmt: skip


class Samples:
    """Samples k of every kind, one kind after the other."""

    def __init__(self, kinds=LEAVES):
        self.kinds = list(kinds)

    def __len__(self):
        return BATCH * len(self.kinds)

    def __getitem__(self, index):
        return LEAVES[self.kinds[index // BATCH]](index % BATCH)


def as_it_is(samples):
    """A collate function that leaves samples alone."""
    return samples


MODES = {
    "default collate": {"batch_size": BATCH},
    "collate that leaves samples alone": {"batch_size": BATCH, "collate_fn": as_it_is},
    "no batches": {"batch_size": None},
}
# What torch's worker cannot send, it does not tell of: its loader waits for ever.
NOT_TO_BE_SENT = {"memoryview", "MappingProxy"}
# Where torch's worker changes the sample and ours does not: the order of bytes, strides of nothing.
OTHERWISE = {
    ("process", "collate that leaves samples alone"): {"array, big-endian"},
    ("process", "no batches"): {"array, empty"},
}
WAYS = {"serial": (0, "process"), "process": (1, "process"), "thread": (1, "thread")}


def outcomes(loader):
    """Return batches, and the errors in their places."""
    found, stream = [], iter(loader)
    for _ in range(len(loader)):
        try:
            found.append(next(stream))
        except Exception as error:
            found.append(error.with_traceback(None))
    assert next(stream, None) is None
    return found


def difference(theirs_, ours_):
    """Return how ours differs from torch's; None if it is the same, or an error of its kind."""
    if isinstance(theirs_, Exception) and not isinstance(theirs_, Wrong):
        return None if isinstance(ours_, Exception) else f"no error, but {ours_!r:.80}"
    try:
        assert_same(theirs_, ours_)
    except Exception as error:
        return repr(error).splitlines()[0][:150]
    return None


def different(way, mode, kinds):
    """Return in what each kind of leaf differs from torch's."""
    num_workers, backend = WAYS[way]
    num_theirs = int(way == "process")
    dataset = Samples(kinds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = outcomes(theirs.DataLoader(dataset, **MODES[mode], num_workers=num_theirs))
        got = outcomes(
            ours.DataLoader(dataset, **MODES[mode], num_workers=num_workers, backend=backend)
        )
    every = len(expected) // len(kinds)
    found = {}
    for place, pair in enumerate(zip(expected, got, strict=True)):
        if why := difference(*pair):
            found.setdefault(kinds[place // every], why)
    return found


@pytest.mark.parametrize("kind", sorted(NOT_TO_BE_SENT))
def test_what_cannot_be_sent_is_an_error_that_names_the_sample_and_the_next_batch_comes(kind):
    loader = ours.DataLoader(Samples([kind, "int"]), BATCH, num_workers=1, collate_fn=as_it_is)
    error, batch = outcomes(loader)
    assert isinstance(error, TypeError)
    assert "cannot pickle" in str(error)
    assert "step 0" in "".join(error.__notes__)
    assert batch == [0, 1, 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_leaves_of_every_kind_are_torchs(way, mode):
    kinds = [kind for kind in LEAVES if way != "process" or kind not in NOT_TO_BE_SENT]
    found = different(way, mode, kinds)
    assert found.keys() == OTHERWISE.get((way, mode), set()), found
