# SPDX-License-Identifier: Apache-2.0
"""Batches as Ray's store takes them and gives them out, and what clocks of other machines say."""

from __future__ import annotations

import mmap
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.support.comparing import assert_same

import penstock.torch  # noqa: F401 - which knows tensors
from penstock.engine.backends.ray.backend import _writable, deserialize_tree, times_by_our_clock
from penstock.engine.backends.ray.worker import SerializedTree, serialize_tree, value_of
from penstock.engine.timing import NO_TIMES, replaced, row_of_worker

LARGE = 64 * 1024  # bytes; smaller buffers are copied, whosever memory they lie in


class Store:
    """Memory that the system lets this process write, or not; arrays over it are read-only."""

    def __init__(self, *, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_SHARED):
        self._how = {"prot": prot, "flags": flags | mmap.MAP_ANONYMOUS}

    def keep(self, content):
        """Lay bytes into the store; return the array that Ray would give."""
        memory = mmap.mmap(-1, max(len(content), 1), **self._how)
        if self._how["prot"] & mmap.PROT_WRITE:
            memory[: len(content)] = bytes(content)
        array = np.frombuffer(memory, np.uint8)[: len(content)]
        array.flags.writeable = False
        return array

    def hand_over(self, serialized):
        return SerializedTree(
            serialized.pickled, [self.keep(buffer) for buffer in serialized.buffers]
        )


def large(array):
    """The same items many times, so that they are worth a buffer of their own."""
    return (
        np.concatenate([array] * (2 * LARGE // max(array.nbytes, 1) + 1)) if array.nbytes else array
    )


DTYPES = st.one_of(  # of other endianness numpy itself pickles some as this machine's
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="="),
    npst.floating_dtypes(endianness="="),
    npst.complex_number_dtypes(endianness="="),
    npst.datetime64_dtypes(endianness="="),
    npst.unicode_string_dtypes(endianness="=", max_len=4),
    st.just(np.dtype([("a", "i4"), ("b", "f8", (2,))])),
)
LAYOUTS = st.sampled_from(
    [
        lambda array: array,
        np.asfortranarray,
        lambda array: array[::2],
        lambda array: array[::-1],
        lambda array: array.T,
        large,
        lambda array: np.asfortranarray(large(array)),
        lambda array: large(array)[::3],
        lambda array: large(array).T,
    ]
)
ARRAYS = st.builds(
    lambda array, layout: layout(array),
    DTYPES.flatmap(
        lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=1, max_dims=3, min_side=0))
    ),
    LAYOUTS,
)
LEAVES = st.one_of(ARRAYS, st.integers(), st.text(max_size=5), st.none(), st.just(b"x" * 9000))
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(tree=TREES)
def test_a_tree_comes_through_as_it_was_and_its_arrays_may_be_written(tree):
    serialized = serialize_tree(tree)
    assert all(buffer.dtype == np.uint8 and buffer.ndim == 1 for buffer in serialized.buffers)
    assert_same(value_of(serialized), tree)
    opened = deserialize_tree(Store().hand_over(serialized))
    assert_same(opened, tree)
    before = pickle.dumps(tree)
    for array in _arrays(opened):
        array[...] = np.zeros((), array.dtype)
    assert pickle.dumps(tree) == before, "what was sent has changed with what has come"


def _arrays(tree):
    if isinstance(tree, np.ndarray):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [a for item in tree for a in _arrays(item)] if isinstance(tree, (list, tuple)) else []


def test_an_array_that_is_twice_in_a_tree_is_one_and_large_ones_are_beside_the_pickle():
    array = np.arange(100_000)
    serialized = serialize_tree({"a": array, "b": [array, array[:10]]})
    assert len(serialized.pickled) < 4096
    assert [buffer.nbytes for buffer in serialized.buffers] == [array.nbytes]
    assert np.shares_memory(serialized.buffers[0], array), "copied though Ray is going to"
    opened = value_of(serialized)
    assert opened["a"] is opened["b"][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_tensors_come_through_with_their_layout_and_may_be_written(dtype):
    torch = pytest.importorskip("torch")

    flat = torch.arange(60_000).to(getattr(torch, dtype))
    tree = {
        "flat": flat,
        "turned": flat.reshape(300, 200).T,
        "every other": flat[::2],
        "small": flat[:3].clone(),
        "empty": flat[:0],
        "scalar": flat[5],
    }
    opened = deserialize_tree(Store().hand_over(serialize_tree(tree)))
    assert opened.keys() == tree.keys()
    for key, tensor in tree.items():
        assert opened[key].dtype == tensor.dtype
        assert torch.equal(opened[key], tensor)
    for tensor in opened.values():
        tensor.zero_()
    assert torch.equal(flat, torch.arange(60_000).to(flat.dtype))


SCRIPT = """
import dataclasses
import sys

import numpy as np

from penstock.engine.backends.ray.worker import serialize_tree


@dataclasses.dataclass
class Point:
    x: np.ndarray

    def doubled(self):
        return scale(self.x)


def scale(x):
    return x * FACTOR


FACTOR = 2
serialized = serialize_tree({"point": Point(np.arange(50_000)), "lambda": lambda x: scale(x) + 1})
with open(sys.argv[1], "wb") as file:
    file.write(len(serialized.pickled).to_bytes(8, "little") + serialized.pickled)
    for buffer in serialized.buffers:
        file.write(buffer)
"""


def test_what_the_trainers_script_defines_itself_is_known_in_another_process(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "serialized"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script, out], check=True, timeout=100)
    content = out.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    buffer = np.frombuffer(content[end:], np.uint8)
    opened = value_of(SerializedTree(content[8:end], [buffer]))
    assert type(opened["point"]).__name__ == "Point"
    assert np.array_equal(opened["point"].x, np.arange(50_000))
    assert opened["point"].doubled()[-1] == 99_998
    assert opened["lambda"](3) == 7


def test_memory_that_may_be_written_is_not_copied():
    array = Store().keep(bytes(range(256)) * 1024)
    view = _writable(array)
    assert not view.readonly
    view[0] = 99
    assert array[0] == 99
    assert (view.nbytes, view.format, view.ndim) == (array.nbytes, "B", 1)


def test_a_buffer_lives_as_long_as_the_last_view_of_it_and_no_longer():
    """Ray may use the memory of an object again as soon as its buffer is gone."""
    serialized = Store().hand_over(serialize_tree({"x": np.arange(100_000), "y": 1}))
    alive = weakref.ref(serialized.buffers[0])
    opened = deserialize_tree(serialized)
    del serialized
    part = opened["x"][10:20]
    del opened
    assert alive() is not None
    assert part.tolist() == list(range(10, 20))
    del part
    assert alive() is None


def test_a_task_has_ended_by_our_clock_when_its_batch_comes():
    times = replaced(NO_TIMES, begun_ns=5_000, ended_ns=5_600, idle_ns=3)
    noted = row_of_worker(times_by_our_clock(times, 1_000))
    assert noted == row_of_worker(times)._replace(begun_ns=400, ended_ns=1_000)
    assert times_by_our_clock(NO_TIMES, 20) == NO_TIMES


def test_tensors_travel_beside_the_pickle_as_arrays_do():
    serialized = serialize_tree({"tensor": torch.arange(100_000.0), "array": np.zeros(100_000)})
    assert sorted(buffer.nbytes for buffer in serialized.buffers) == [400_000, 800_000]
    assert len(serialized.pickled) < 2_000
    assert torch.equal(value_of(serialized)["tensor"], torch.arange(100_000.0))
