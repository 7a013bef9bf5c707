# SPDX-License-Identifier: Apache-2.0
"""A batch is walked as torch's `pin_memory` walks it."""

from __future__ import annotations

import array
import collections
import dataclasses
import time
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from penstock.torch.device.containers import map_leaves

Point = namedtuple("Point", ["x", "y"])
Edge = namedtuple("Edge", ["start", "to"])


@dataclasses.dataclass
class Leaf:
    """What can be pinned, here without a device."""

    value: int
    is_pinned: bool = False

    def pin_memory(self):
        return Leaf(self.value, True)

    to = pin_memory  # by which it is known as a leaf


class NamedList(list):
    """A list with an attribute."""

    name = "none"


class Frozen(Mapping):
    """A mapping that is made of a mapping."""

    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Unmakeable(Frozen):
    """A mapping whose constructor takes something else."""

    def __init__(self, one, two):
        super().__init__({"one": one, "two": two})


class Table(MutableMapping):
    """A mutable mapping that `update` can fill, and no constructor."""

    def __init__(self, *, columns):
        self.columns = columns

    def __copy__(self):
        return Table(columns=dict(self.columns))

    def __getitem__(self, key):
        return self.columns[key]

    def __setitem__(self, key, value):
        self.columns[key] = value

    def __delitem__(self, key):
        del self.columns[key]

    def __iter__(self):
        return iter(self.columns)

    def __len__(self):
        return len(self.columns)


class Row(Sequence):
    """A sequence with a constructor of its own."""

    def __init__(self, first, second):
        self.parts = [first, second]

    def __getitem__(self, position):
        return self.parts[position]

    def __len__(self):
        return len(self.parts)


@dataclasses.dataclass
class Boxes:
    """Of a user: a tensor inside is none of our business."""

    corners: object


def named_list():
    parts = NamedList([Leaf(1), Leaf(2)])
    parts.name = "a"
    return parts


def default_dict():
    parts = defaultdict(list)
    parts["x"] = Leaf(1)
    return parts


TREES = {
    "leaf": Leaf(1),
    "dict": {"x": Leaf(1), "y": [Leaf(2), 3], 4: None},
    "defaultdict": default_dict(),
    "OrderedDict": OrderedDict(b=Leaf(1), a=Leaf(2)),
    "Counter": collections.Counter(a=2),
    "UserDict": collections.UserDict(x=Leaf(1)),
    "ChainMap": collections.ChainMap({"x": Leaf(1)}, {"y": Leaf(2)}),
    "mappingproxy": types.MappingProxyType({"x": Leaf(1)}),
    "frozen mapping": Frozen({"x": Leaf(1)}),
    "mapping without constructor": Unmakeable(Leaf(1), Leaf(2)),
    "mutable mapping without constructor": Table(columns={"x": Leaf(1)}),
    "tuple": (Leaf(1), "text", b"bytes", 2.5),
    "namedtuple": Point(Leaf(1), Point(Leaf(2), (Leaf(3),))),
    "list": [Leaf(1), [Leaf(2)], []],
    "user list": named_list(),
    "UserList": collections.UserList([Leaf(1)]),
    "deque": deque([Leaf(1), 2], maxlen=3),
    "sequence without constructor": Row(Leaf(1), Leaf(2)),
    "range": range(3),
    "array": array.array("i", [1, 2]),
    "Size": torch.Size([2, 3]),
    "struct_time": time.gmtime(0),
    "dataclass": Boxes(Leaf(1)),
    "set": {1, 2},
    "nothing": None,
    "numbers": [1, 2.5, True, 3j, np.float32(1.5)],
    "empty": {"a": {}, "b": (), "c": ""},
}


def described(tree):
    """Types all the way down, and what is in them."""
    if isinstance(tree, Mapping):
        parts = [(key, described(part)) for key, part in tree.items()]
    elif isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        parts = [described(part) for part in tree]
    else:
        parts = repr(tree)
    extras = getattr(tree, "name", None), getattr(tree, "default_factory", None)
    return type(tree), parts, extras, getattr(tree, "maxlen", None)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_containers_come_out_as_from_torchs_pin_memory(tree):
    before = described(tree)
    got = map_leaves(tree, lambda leaf: leaf.pin_memory())
    assert described(got) == described(pin_memory(tree))
    assert described(tree) == before


def test_only_what_is_neither_container_nor_leaf_is_the_same_object():
    tree = {"array": np.ones(2), "boxes": Boxes(torch.ones(2)), "set": {1}}
    got = map_leaves(tree, lambda leaf: leaf + 1)
    assert got is not tree
    assert all(got[key] is tree[key] for key in tree)


def test_a_leaf_that_is_there_twice_is_asked_once_and_stays_one():
    x = torch.ones(2)
    asked = []
    got = map_leaves({"a": x, "b": [x, x[:]]}, lambda leaf: asked.append(leaf) or leaf.clone())
    assert got["a"] is got["b"][0]
    assert got["a"] is not got["b"][1]
    assert len(asked) == 2


class Fresh(Sequence):
    """A sequence that makes its items when they are asked for."""

    def __init__(self, *, number):
        self.number = number

    def __getitem__(self, position):
        if position >= self.number:
            raise IndexError(position)
        return torch.full((2,), float(position))

    def __len__(self):
        return self.number


def test_leaves_that_live_for_a_moment_are_not_taken_for_each_other():
    got = map_leaves(Fresh(number=50), lambda leaf: leaf + 1)
    assert [float(leaf[0]) for leaf in got] == [position + 1.0 for position in range(50)]


def test_a_packed_sequence_is_a_leaf_and_no_tuple():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    asked = []
    map_leaves([packed], asked.append)
    assert asked[0] is packed


def test_a_field_called_like_the_method_makes_no_leaf():
    got = map_leaves(Edge(torch.ones(1), torch.zeros(1)), lambda leaf: leaf + 1)
    assert type(got) is Edge
    assert (float(got.start), float(got.to)) == (2.0, 1.0)


def test_what_a_leaf_raises_is_not_taken_for_the_containers():
    asked = []

    def refuse(leaf):
        asked.append(leaf)
        raise TypeError("no")

    with pytest.raises(TypeError, match="no"):
        map_leaves(OrderedDict(x=torch.ones(1)), refuse)
    assert len(asked) == 1
