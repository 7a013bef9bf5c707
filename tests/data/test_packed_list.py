# SPDX-License-Identifier: Apache-2.0
"""PackedList is a list, in two arrays."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import PackedList

# Characters of every kind, lone surrogates included: file names may hold them.
texts = st.lists(st.text(st.characters(codec=None)))
items = st.one_of(
    texts,
    st.lists(st.binary()),
    st.lists(
        st.one_of(st.text(), st.binary(), st.integers(), st.none(), st.tuples(st.floats(0, 1)))
    ),
)


@given(items)
def test_it_holds_what_it_was_given(values):
    packed = PackedList(iter(values))
    assert len(packed) == len(values)
    assert list(packed) == values
    assert [packed[i] for i in range(-len(values), len(values))] == values + values
    assert [type(item) for item in packed] == [type(value) for value in values]
    assert packed == values
    assert packed == PackedList(values)
    assert list(reversed(packed)) == values[::-1]


@given(items, st.slices(8), st.slices(5))
def test_slices_are_those_of_a_list(values, first, second):
    part = PackedList(values)[first][second]
    assert list(part) == values[first][second]
    assert part == PackedList(values[first][second])
    assert list(pickle.loads(pickle.dumps(part))) == values[first][second]


@given(st.lists(st.text(), min_size=1), st.data())
def test_an_index_array_selects(values, data):
    chosen = data.draw(st.lists(st.integers(-len(values), len(values) - 1)))
    part = PackedList(values)[np.array(chosen)]
    assert list(part) == [values[i] for i in chosen]
    assert list(pickle.loads(pickle.dumps(part))) == list(part)


@given(items, items)
def test_it_equals_only_lists_of_the_same_items(left, right):
    assert (PackedList(left) == PackedList(right)) == (left == right)
    assert (PackedList(left) == right) == (left == right)
    assert PackedList(left) != tuple(left)


def test_many_items_of_mixed_types_far_apart_are_kept():
    values = ["x" * (i % 7) for i in range(20_000)]
    values[15_000] = b"bytes"
    assert list(PackedList(values)) == values


def test_a_slice_shares_the_blob():
    packed = PackedList("abcdef")
    assert np.shares_memory(packed._blob, packed[1:3]._blob)
    assert np.shares_memory(packed._bounds, packed[1:3]._bounds)


def test_a_slice_pickles_without_the_rest():
    packed = PackedList(["x" * 1000] * 1000)
    assert len(pickle.dumps(packed[10:12])) < 3000
    assert len(pickle.dumps(packed[::500])) < 3000


def test_protocol_5_hands_the_arrays_over_uncopied():
    packed = PackedList(["some", "words"] * 500)
    buffers = []
    dumped = pickle.dumps(packed, 5, buffer_callback=buffers.append)
    assert len(dumped) < 1000
    assert sum(len(buffer.raw()) for buffer in buffers) == 4500 + 8 * 1001
    assert any(np.shares_memory(np.frombuffer(buffer), packed._bounds) for buffer in buffers[1:])
    assert pickle.loads(dumped, buffers=buffers) == packed


def test_it_cannot_be_changed():
    packed = PackedList(["a"])
    with pytest.raises(TypeError):
        packed[0] = "b"
    with pytest.raises(ValueError, match="read-only"):
        packed._blob[0] = 0
    with pytest.raises(TypeError, match="unhashable"):
        hash(packed)


@pytest.mark.parametrize("index", [3, -4, 1 << 70])
def test_an_index_out_of_range_names_itself_and_the_length(index):
    with pytest.raises(IndexError, match=rf"index {index} is out of range for 3 items"):
        PackedList("abc")[index]


def test_its_repr_is_short():
    assert repr(PackedList(["ab"] * 100_000)) == "<PackedList of 100000 str, 200000 bytes>"
    assert len(repr(PackedList([object] * 1000))) < 80


@pytest.mark.parametrize(
    ("text", "offsets", "said"),
    [
        (b"cat\xff", [0, 3, 4], "invalid start byte|cut a character"),
        ("é".encode(), [0, 1, 2], "cut a character in two"),
        (b"cat", [0, 2], "do not rise from 0 to 3"),
        (b"cat", [1, 3], "do not rise from 0 to 3"),
        (b"cat", [0, 3, 2, 3], "do not rise from 0 to 3"),
    ],
)
def test_strings_of_a_file_have_to_be_utf8_between_rising_offsets(text, offsets, said):
    with pytest.raises(ValueError, match=said):
        PackedList.from_utf8(np.frombuffer(text, np.uint8), np.array(offsets))
    surrogate = "\udc80".encode("utf-8", "surrogatepass")  # as paths of other encodings have
    kept = PackedList.from_utf8(np.frombuffer(surrogate, np.uint8), np.array([0, 3]))
    assert list(kept) == ["\udc80"]
