# SPDX-License-Identifier: Apache-2.0
"""Records: any tree there and back, and hostile bytes that run nothing and crash nothing."""

from __future__ import annotations

import contextlib
import gc
import pickle
import struct
import sys
import tracemalloc

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.stores import Program

from penstock.errors import StoreError
from penstock.stores.records import (
    HEADER_BYTES,
    EncodedImage,
    decode_record,
    encode_record,
    image_start,
)

numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=200),
)
dtypes = st.one_of(
    hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc"),
    hnp.unicode_string_dtypes(max_len=4),
    hnp.byte_string_dtypes(max_len=4),
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
images = st.binary(max_size=300).map(EncodedImage)
trees = st.recursive(
    st.one_of(numbers, arrays, images),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(0, 99)), inner, max_size=4),
    ),
    max_leaves=12,
)


def same(one, other):
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(deadline=None)
@given(key=st.text(), tree=trees, label=st.one_of(st.none(), st.integers(-9, 9)))
def test_any_tree_comes_back_whether_copied_or_not(key, tree, label):
    data = encode_record(key, tree, label).data
    for copy in (True, False):
        record = decode_record(data, copy=copy)
        assert (record.key, record.label) == (key, label)
        assert same(tree, record.sample) or not copy
        if not copy:
            assert same(tree, owned(record.sample))


def owned(value):
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, EncodedImage):
        return EncodedImage(bytes(value.data))
    if isinstance(value, (list, tuple)):
        return type(value)(map(owned, value))
    if isinstance(value, dict):
        return {key: owned(item) for key, item in value.items()}
    return value


def test_the_same_sample_gives_the_same_bytes():
    sample = {"b": np.arange(5), "a": (EncodedImage(b"x" * 70), 1)}
    assert encode_record("k", sample, 1) == encode_record("k", sample, 1)


def test_blobs_lie_at_multiples_of_sixteen_bytes():
    record = encode_record("k", [np.zeros(3, np.int8), np.full(5, 7.0), b"z" * 100])
    data = record.data
    start = data.index(struct.pack("<d", 7.0))
    assert start % 16 == 0
    assert data.index(b"z" * 100) % 16 == 0
    first, second, _ = decode_record(data, copy=False).sample
    assert second.flags.aligned
    assert first.tolist() == [0, 0, 0]


def test_the_image_of_a_pair_is_found_without_decoding():
    record = encode_record("some/key.jpg", (EncodedImage(b"jpeg" * 50), 4), 4)
    (head_bytes,) = struct.unpack_from("<I", record.data, 8)
    assert record.is_pair
    assert record.data[image_start(head_bytes) :] == b"jpeg" * 50
    for sample, label in (
        ((EncodedImage(b"x"), 4), 5),
        ([EncodedImage(b"x"), 4], 4),
        ((EncodedImage(b"x"), True), 1),
        ((b"x", 4), 4),
        ((EncodedImage(b"x"), 4, 4), 4),
    ):
        assert not encode_record("k", sample, label).is_pair


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"a": [1, object()]}, r"at \$\['a'\]\[1\] is a object"),
        ({"a": {1.5: 2}}, r"at \$\['a'\] a key is 1\.5"),
        ((np.array([object()]),), r"at \$\[0\] is an array of dtype object"),
        (np.zeros(2, [("x", "i4")]), r"at \$ is an array of dtype"),
        ([{1, 2}], r"at \$\[0\] is a set"),
        (2**64, "cannot be stored"),
        ("\ud800", "cannot be stored"),
        (lambda: 0, r"at \$ is a function"),
        (1 + 2j, r"at \$ is a complex"),
    ],
)
def test_what_a_record_cannot_hold_is_named_by_its_place(sample, message):
    with pytest.raises(StoreError, match=message) as raised:
        encode_record("the key", sample)
    assert "'the key'" in str(raised.value)


def test_tensors_and_numpy_scalars_become_arrays_and_scalars():
    torch = pytest.importorskip("torch")
    sample = [torch.arange(6).reshape(2, 3), torch.tensor(2.5), np.int32(3), np.float64(1.5)]
    found = decode_record(encode_record("k", sample).data).sample
    assert same(found[0], np.arange(6).reshape(2, 3))
    assert found[1:] == [np.float32(2.5), np.int32(3), np.float64(1.5)]
    assert [type(value) for value in found[1:3]] == [np.float32, np.int32]
    with pytest.raises(StoreError, match=r"at \$"):
        encode_record("k", torch.zeros(2, dtype=torch.bfloat16))


GOOD = encode_record(
    "good", {"image": EncodedImage(b"i" * 90), "x": np.arange(6), "t": (1, "two", b"b" * 99)}, 7
).data


def sealed(head, blobs=b"", **changes):
    """A record with a right checksum, so that what is wrong lies further inside."""
    start = HEADER_BYTES + len(head)
    body = head + (bytes(-start % 16) + blobs if blobs else b"")
    fields = {
        "magic": b"PNSK",
        "version": 1,
        "head_bytes": len(head),
        "total": HEADER_BYTES + len(body),
        "sum": xxhash.xxh3_64_intdigest(body),
    } | changes
    return struct.pack("<4sB3xI4xQQ", *fields.values()) + body


def head(*items):
    return msgspec.msgpack.encode(list(items))


def ext(code, data):
    return msgspec.msgpack.Ext(code, data)


def array_ext(start, size, *form):
    return ext(1, struct.pack("<QQ", start, size) + msgspec.msgpack.encode(list(form)))


def nested_tuples(depth):
    data = b"\x90"
    for _ in range(depth):
        data = b"\x91\xc9" + struct.pack(">IB", len(data), 2) + data
    return b"\x93\xa1k\xc0" + data[1:]


HOSTILE = {
    "a bad checksum": (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), "is damaged: its checksum"),
    "a truncated record": (GOOD[:-1], "is truncated: its header says"),
    "less than a header": (GOOD[:31], "is truncated: it has 31 bytes"),
    "nothing": (b"", "is truncated: it has 0 bytes"),
    "bytes behind it": (GOOD + b"!", "is followed by other bytes"),
    "a wrong version": (GOOD[:4] + b"\x02" + GOOD[5:], "has version 2"),
    "another magic": (b"JUNK" + GOOD[4:], "is not a record"),
    "a total of 2^40 bytes": (sealed(head("k", None, 1), total=2**40), "1,099,511,627,776 bytes"),
    "a head of 2^32 bytes": (sealed(head("k", None, 1), head_bytes=2**32 - 1), "a head of 4,294,"),
    "an array of 2^40 bytes": (
        sealed(head("k", None, array_ext(0, 2**40, "<u1", [2**40])), b"1234"),
        "1,099,511,627,776 bytes should begin at byte 0",
    ),
    "an array that wraps around": (
        sealed(head("k", None, array_ext(2**64 - 4, 8, "<u1", [8])), b"1234"),
        "should begin",
    ),
    "an array whose shape is another": (
        sealed(head("k", None, array_ext(0, 4, "<u1", [2**62, 2**62, 4])), b"1234"),
        "does not fit 4 bytes",
    ),
    "a negative shape": (
        sealed(head("k", None, array_ext(0, 4, "<u1", [-2, -2])), b"1234"),
        "Expected `int` >= 0",
    ),
    "an array of objects": (
        sealed(head("k", None, array_ext(0, 8, "|O", [1])), b"12345678"),
        "has the dtype",
    ),
    "an array of fields": (
        sealed(head("k", None, array_ext(0, 8, "i4,i4", [1])), b"12345678"),
        "has the dtype",
    ),
    "an array of many dimensions": (
        sealed(head("k", None, array_ext(0, 1, "|u1", [1] * 100)), b"1"),
        "does not fit",
    ),
    "blobs that overlap": (
        sealed(head("k", None, [ext(3, struct.pack("<QQ", 0, 4))] * 2), b"1234"),
        "a blob begins at byte 0, the last ends at 4",
    ),
    "an unknown extension": (sealed(head("k", None, ext(9, b"x"))), "unknown extension type 9"),
    "a short extension": (sealed(head("k", None, ext(3, b"x"))), "is damaged"),
    "a tuple that is none": (sealed(head("k", None, ext(2, b"\x01"))), "Expected `array`"),
    "a head that is no list": (sealed(b"\x01"), "Expected `(str|array)`"),
    "a key that is no text": (sealed(head(1, None, 1)), "Expected `(str|array)`"),
    "a label that is none": (sealed(head("k", "cat", 1)), "Expected `int"),
    "two bytes too many in the head": (sealed(head("k", None, 1) + b"\x01\x01"), "is damaged"),
    "an array of 2^31 items in the head": (
        sealed(b"\x93\xa1k\xc0\xdd\x7f\xff\xff\xff"),
        "is damaged",
    ),
    "a text that is not UTF-8": (sealed(b"\x93\xa2\xff\xfe\xc0\x01"), "is damaged"),
    "lists in lists": (sealed(b"\x93\xa1k\xc0" + b"\x91" * 100_000), "containers in one another"),
    "tuples in tuples": (sealed(nested_tuples(300)), "more than 64 tuples"),
    "a time out of range": (sealed(b"\x93\xa1k\xc0\xd7\xff" + b"\xff" * 8), "is damaged"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_record_is_an_error_that_names_it_and_takes_no_memory(data, message):
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=message) as raised:
            decode_record(data, "record 5 of somewhere")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(raised.value).startswith("record 5 of somewhere")
    assert peak < 20 * len(data) + 1_000_000


def test_a_record_is_gone_when_it_is_dropped_without_a_collection():
    data = encode_record("k", (EncodedImage(b"x" * 1000), 1), 1).data
    gc.disable()
    try:
        before = sys.getrefcount(data)
        for _ in range(10):
            decode_record(data, copy=False)
        with contextlib.suppress(StoreError):
            decode_record(sealed(head("k", None, ext(9, b""))))
        assert sys.getrefcount(data) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("label", [True, 2**63, 1.5, "cat", [1], (1, None)])
def test_a_label_that_could_not_be_read_is_not_written(label):
    with pytest.raises(StoreError, match="sample 'k' has label"):
        encode_record("k", 1, label)


@pytest.mark.parametrize("depth", [63, 64])
@pytest.mark.parametrize("put_into", [lambda deep: (deep,), lambda deep: [deep]])
def test_as_deep_as_can_be_written_can_be_read(depth, put_into):
    deep = 1
    for _ in range(depth):
        deep = put_into(deep)
    assert decode_record(encode_record("k", deep).data).sample == deep
    with pytest.raises(StoreError, match="more than 64 containers"):
        encode_record("k", put_into(put_into(deep)))


def test_a_pickle_is_not_run(tmp_path):
    made = tmp_path / "made by a pickle"
    program = pickle.dumps(Program(str(made)))
    for data in (program, sealed(head("k", None, ext(5, program))), sealed(program)):
        with pytest.raises(StoreError):
            decode_record(data)
    record = sealed(head("k", None, program))
    assert decode_record(record).sample == program  # bytes, and no more than that
    assert not made.exists()


damage = st.lists(
    st.tuples(st.integers(0, 2**16), st.binary(max_size=9), st.integers(0, 9)), max_size=6
)


def check_refused_or_decoded(tree, changes, data):
    record = bytearray(encode_record("k", tree, 3).data)
    for place, inserted, num_removed in changes:
        place %= len(record) + 1
        record[place : place + num_removed] = inserted
    body = bytes(record[HEADER_BYTES:])
    for hostile in (bytes(record), sealed(body), data, sealed(data), sealed(HEAD + data)):
        with contextlib.suppress(StoreError):
            decode_record(hostile)


HEAD = head("k", None, 1)[:-1]


@settings(deadline=None, max_examples=300)
@given(trees, damage, st.binary(max_size=300))
def test_damaged_and_random_records_raise_store_errors_or_decode(tree, changes, data):
    check_refused_or_decoded(tree, changes, data)
