# SPDX-License-Identifier: Apache-2.0
"""Rows of Arrow tables equal what Arrow takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.collate import default_collate
from penstock.errors import CollateError

pa = pytest.importorskip("pyarrow")
pytest.importorskip("datasets")

from penstock.integrations.huggingface import _Column as Column  # noqa: E402

INT = st.integers(-100, 100)
# Type -> values of it, None now and then.
KINDS = [
    (pa.int8(), INT),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False) | st.none()),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=4) | st.none()),
    (pa.large_binary(), st.binary(max_size=4)),
    (pa.list_(pa.int32()), st.lists(INT, min_size=2, max_size=2)),
    (pa.large_list(pa.bool_()), st.lists(st.booleans(), min_size=3, max_size=3)),
    (pa.list_(pa.int16(), 3), st.lists(INT, min_size=3, max_size=3)),
    (
        pa.list_(pa.list_(pa.int64(), 2)),
        st.lists(st.lists(INT, min_size=2, max_size=2), min_size=1, max_size=1),
    ),
    (pa.list_(pa.list_(pa.int64())), st.just([[1], [2]])),
    (
        pa.struct({"n": pa.int32(), "s": pa.string()}),
        st.fixed_dictionaries({"n": INT, "s": st.text(max_size=3)}),
    ),
]


@st.composite
def chunked(draw):
    """A column of some type, in pieces that may begin inside their buffers."""
    kind, values = draw(st.sampled_from(KINDS))
    pieces = draw(st.lists(st.lists(values, max_size=6), min_size=1, max_size=4))
    arrays = [pa.array(piece, kind) for piece in pieces]
    cuts = [draw(st.integers(0, len(array))) for array in arrays]
    return pa.chunked_array([a.slice(cut) for a, cut in zip(arrays, cuts, strict=True)], kind)


def is_like(value, expected):
    """Return whether a row's value is Arrow's, apart from its type."""
    if isinstance(value, np.ndarray):
        return value.tolist() == expected
    if isinstance(value, np.floating):
        return np.isnan(value) if expected is None else value == expected
    return value == expected


@given(chunked(), st.randoms(use_true_random=False))
def test_rows_are_those_that_arrow_takes_and_a_batch_is_the_rows_collated(column, random):
    found = Column(column)
    expected = column.to_pylist()
    values = [found.value(row) for row in range(len(expected))]
    assert all(map(is_like, values, expected))
    if not expected:
        return
    rows = np.array([random.randrange(len(expected)) for _ in range(7)])
    batch = found.take(rows, np.empty)
    if pa.types.is_string(column.type):
        assert batch == [expected[row] for row in rows]
        return
    collated = default_collate([values[row] for row in rows])
    np.testing.assert_equal(batch, collated)
    if isinstance(batch, np.ndarray):
        assert batch.dtype == collated.dtype


@pytest.mark.parametrize("count", [2, 300])
def test_a_row_that_lacks_a_value_is_named(count):
    lists = pa.chunked_array([[[1] * count], [None, [2] * count]], pa.list_(pa.int64()))
    column = Column(lists)
    assert column.take(np.array([2, 0]), np.empty)[:, 0].tolist() == [2, 1]
    with pytest.raises(CollateError, match=r"sample 1 .* has no value \(a null\)"):
        column.take(np.array([0, 1]), np.empty)
    inner = Column(pa.chunked_array([[[0.5] * count, [None] * count]], pa.list_(pa.float32())))
    assert np.isnan(inner.take(np.array([0, 1]), np.empty)).all(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("values", [[1, 2], [[1.0], [2.0]]])
def test_numbers_are_written_into_the_memory_of_the_batch(values):
    given = []
    batch = Column(pa.chunked_array([values])).take(
        np.array([1, 0]), lambda *form: given.append(np.empty(*form)) or given[-1]
    )
    assert batch is given[0]


def test_lists_of_different_lengths_name_two_rows():
    column = Column(pa.chunked_array([[[1, 2], [3]]]))
    with pytest.raises(CollateError, match=r"sample 0 .* shape \(2,\) and sample 1 .* \(1,\)"):
        column.take(np.array([0, 1]), np.empty)
