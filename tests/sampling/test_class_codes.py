# SPDX-License-Identifier: Apache-2.0
"""Classes and codes are those of `np.unique`, however far apart the numbers are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sampling.class_items import class_codes

texts = st.text(max_size=3).filter(lambda text: "\0" not in text)


def wide(dtype):
    if dtype.kind in "iu":
        return np.uint64 if dtype.kind == "u" and dtype.itemsize == 8 else np.int64
    return dtype


def compare(labels):
    classes, inverse = np.unique(labels, return_inverse=True)
    found, codes = class_codes(labels)
    assert found.dtype == wide(labels.dtype)
    assert found.tolist() == classes.tolist()
    assert codes.tolist() == inverse.tolist()
    assert codes.dtype == np.min_scalar_type(len(classes))


@pytest.mark.parametrize(
    ("values", "dtypes"),
    [
        (st.integers(-50, 50), (np.int8, np.int16, np.int32, np.int64, ">i4")),
        (st.integers(-(2**63), 2**63 - 1), (np.int64,)),
        (st.integers(2**64 - 60, 2**64 - 1), (np.uint64, ">u8")),
        (texts, (np.str_,)),
        (st.booleans(), (np.bool_,)),
    ],
    ids=["near", "far apart", "unsigned alone", "texts", "bools"],
)
@given(data=st.data())
def test_classes_and_codes_are_those_of_unique(values, dtypes, data):
    labels = data.draw(st.lists(values, min_size=1, max_size=40))
    for dtype in dtypes:
        compare(np.array(labels, dtype))


@pytest.mark.parametrize("dtype", ["int32", "uint32", ">i4", ">u4", "int64", "uint64", ">u8"])
@pytest.mark.parametrize("step", [1, 1000, 500_000_000])
def test_classes_are_of_one_type_however_far_apart(dtype, step):
    compare(np.arange(5)[[3, 1, 3, 4]].astype(dtype) * np.array(step, dtype))


@pytest.mark.parametrize("num_classes", [255, 256, 65_535, 65_536, 70_000])
def test_codes_hold_one_class_more_than_there_are(num_classes):
    _, codes = class_codes(np.arange(num_classes))
    assert np.iinfo(codes.dtype).max >= num_classes
    assert codes[-1] == num_classes - 1
