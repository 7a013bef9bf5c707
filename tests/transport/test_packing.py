# SPDX-License-Identifier: Apache-2.0
"""Packing a tree into a slot and back is the identity."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.comparing import assert_same
from tests.support.slots import deliver

from penstock.transport.arena import Arena, Extent, SlotPool, SlotWriter
from penstock.transport.packing import pack, unpack


class Pipe:
    """A worker's end and a main process's end in one process."""

    def __init__(self):
        self.pool = SlotPool()
        self.writer = SlotWriter(self.pool)
        self.arena = Arena()

    def send(self, tree):
        packed = pack(tree, self.writer)
        return packed, unpack(packed, deliver(self.pool, self.arena, packed.slots))

    def recycle(self):
        self.pool.release(self.arena.take_freed()[0])


@dataclasses.dataclass
class Boxes:
    xyxy_px: np.ndarray
    name: str


Point = collections.namedtuple("Point", "x y")

# Times only in native byte order: numpy's own pickling forgets the other one.
dtypes = (
    hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.unsigned_integer_dtypes()
    | hnp.floating_dtypes() | hnp.complex_number_dtypes() | hnp.datetime64_dtypes(endianness="=")
    | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes()
)  # fmt: skip
arrays = st.one_of(
    hnp.arrays(dtypes, hnp.array_shapes(min_side=0)),
    hnp.arrays(hnp.integer_dtypes() | hnp.floating_dtypes(), st.integers(500, 3000)),
    hnp.arrays(np.float32, st.tuples(st.integers(20, 60), st.integers(20, 60))).map(
        np.asfortranarray
    ),
    hnp.arrays(np.int16, st.tuples(st.integers(50, 60), st.integers(50, 60))).map(
        lambda a: a[::2, ::-3]
    ),
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9000)
)
trees = st.recursive(
    arrays | scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.builds(Point, inner, inner)
        | st.builds(Boxes, arrays, st.text())
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.lists(trees, min_size=1, max_size=4))
def test_what_comes_out_is_what_went_in(several):
    pipe = Pipe()
    received = []
    for tree in several:
        received.append(pipe.send(tree)[1])
        pipe.recycle()
    for sent, got in zip(several, received, strict=True):
        assert_same(sent, got)


def test_large_arrays_lie_in_the_slot_and_small_ones_in_the_message():
    pipe = Pipe()
    packed, _ = pipe.send(
        {"large": np.zeros(1024, np.float32), "small": np.zeros(1023, np.float32)}
    )
    assert [extent.size_bytes for extent in packed.buffers] == [4096]


def test_an_array_made_by_empty_is_not_copied():
    pipe = Pipe()
    array = pipe.writer.empty((100, 100), np.float32)
    array[:] = 3
    packed, got = pipe.send([array, array[10:21]])
    assert packed.slots == (0,)
    assert packed.buffers == (Extent(0, 0, 40_000), Extent(0, 4000, 4400))
    got[0][10, 0] = 99
    assert got[1].flat[0] == 99  # both alias the same bytes, as they did in the worker


def test_a_long_message_goes_through_the_slot():
    pipe = Pipe()
    words = [f"word {i}" for i in range(20_000)]
    packed, got = pipe.send(words)
    assert isinstance(packed.pickle, Extent)
    assert got == words


def test_the_same_object_twice_is_the_same_object_again():
    pipe = Pipe()
    array = np.arange(5000)
    _, got = pipe.send([array, array])
    assert got[0] is got[1]


@pytest.mark.parametrize("order", ["C", "F"])
def test_received_arrays_are_aligned_and_writable_whatever_they_were(order):
    pipe = Pipe()
    frozen = np.arange(5000).reshape((50, 100), order=order)
    frozen.flags.writeable = False
    small = np.frombuffer(b"123", np.uint8)
    sent = [np.ones(6001, np.uint8), small, frozen, frozen]
    _, got = pipe.send(sent)
    assert [array.tolist() for array in got] == [array.tolist() for array in sent]
    assert [array.strides for array in got] == [array.strides for array in sent]
    assert got[2] is got[3]
    for array in got:
        array[0] = 0
    assert got[0].ctypes.data % 64 == got[2].ctypes.data % 64 == 0


def test_a_tree_that_does_not_pickle_leaves_no_slot_taken():
    pipe = Pipe()
    array = pipe.writer.empty((5000,), np.float32)
    with pytest.raises(Exception, match="lambda"):
        pack([array, lambda: None], pipe.writer)
    _, _ = pipe.send(np.zeros(5000, np.float32))
    assert len(pipe.pool._slots) == 1
