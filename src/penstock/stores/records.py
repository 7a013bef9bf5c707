# SPDX-License-Identifier: Apache-2.0
"""Records: one sample as bytes that describe themselves, carry a checksum, and run nothing."""
#     byte  0   4  b"PNSK"
#           4   1  version, 1
#           5   3  zero
#           8   4  size of the head in bytes
#          12   4  zero
#          16   8  size of the whole record in bytes
#          24   8  XXH3-64 of all that follows
#          32   …  head: MessagePack of [key, label, sample]
#           …   …  blobs, from the next multiple of 16 on and each at one, zeros between
#
# Integers are little-endian and unsigned. In the head a sample is MessagePack's nil, booleans,
# integers, floats, strings, binaries, arrays (lists) and maps, and these extension types, in which
# `start` and `size` (8 bytes each) say where a blob lies, counted from the first blob:
#
#     1  array    start, size, then MessagePack of [dtype as numpy writes it, shape]; C order
#     2  tuple    MessagePack of an array
#     3  image    start, size: an image file's bytes as they were
#     4  bytes    start, size: long binaries, so that they need not be copied to be looked at
#
# The checksum finds what has rotted, not what was forged: it is no signature.
#
# Reference:
#     MessagePack specification, https://github.com/msgpack/msgpack/blob/master/spec.md; XXH3 of
#     xxHash 0.8. docs/records.md repeats this for readers in other languages.

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
import xxhash

from penstock.errors import StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER_BYTES: Final = 32
_HEADER: Final = struct.Struct("<4sB3xI4xQQ")
_SPAN: Final = struct.Struct("<QQ")
_MAGIC: Final = b"PNSK"
_VERSION: Final = 1
_ALIGNMENT: Final = 16
_ARRAY, _TUPLE, _IMAGE, _BYTES = 1, 2, 3, 4
_LONG_BYTES: Final = 64  # from here on a binary is a blob
_DEEPEST: Final = 64  # containers within containers
_LEAST_LABEL: Final = -(2**63)
_GREATEST_LABEL: Final = 2**63 - 1
_HEAD: Final = tuple[str, int | tuple[int, ...] | None, Any]  # key, label, sample
_LENGTH = Annotated[int, msgspec.Meta(ge=0)]
# Numbers, booleans, fixed-width strings, times: nothing that holds a pointer, or fields.
_DTYPE: Final = re.compile(r"[<>|=]?(?:[biufcSU]\d{1,9}|[mM]8(?:\[[0-9a-zA-Z/]{1,16}\])?)\Z")


@dataclass(slots=True, unsafe_hash=True, repr=False)
class EncodedImage:
    """An image file's bytes, as a leaf of a sample.

    Attributes:
        data: The bytes of the file. A view where a store lends its memory, otherwise bytes.

    Example:
        >>> EncodedImage(bytes.fromhex("ffd8ffe0")).data.hex()
        'ffd8ffe0'
    """

    data: bytes | memoryview

    def __repr__(self) -> str:
        """Return the size, not the bytes."""
        return f"<EncodedImage of {len(self.data):,} bytes>"


@dataclass(frozen=True, slots=True)
class Record:
    """A sample in a store.

    Attributes:
        key: Its name. Unique in a packed store; others may repeat it, see `Index.keys`.
        label: Its class; the classes of its objects; or None where there are none.
        sample: A tree of dicts, lists, tuples, strings, bytes, numbers, None, numpy arrays and
            `EncodedImage`.
    """

    key: str
    label: int | tuple[int, ...] | None
    sample: Any


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record as it is written."""

    key: str
    label: int | tuple[int, ...] | None
    data: bytes
    is_pair: bool


def encode_record(
    key: str,
    sample: Any,  # noqa: ANN401
    label: int | tuple[int, ...] | None = None,
) -> EncodedRecord:
    """Return a sample as a record.

    Args:
        key: Its name.
        sample: The tree. Tensors and Pillow's images become arrays, numpy scalars arrays of no
            dimension.
        label: Its class or classes.

    Raises:
        StoreError: a leaf that a record cannot hold; the message has its place in the tree.

    Example:
        >>> record = encode_record("cat/1.jpg", (EncodedImage(b"..."), 3), 3)
        >>> len(record.data), record.is_pair
        (83, True)
        >>> decode_record(record.data).sample
        (<EncodedImage of 3 bytes>, 3)
    """
    _check_label(label, key)
    blobs = _Blobs()
    try:
        head = msgspec.msgpack.encode([key, label, _plain(sample, blobs, "$", 0)])
    except (OverflowError, UnicodeEncodeError, TypeError, ValueError) as error:
        raise StoreError(f"sample {key!r} cannot be stored: {error}.") from error
    padding = bytes(image_start(len(head)) - HEADER_BYTES - len(head)) if blobs.parts else b""
    body = b"".join((head, padding, *blobs.parts))
    total = HEADER_BYTES + len(body)
    header = _HEADER.pack(_MAGIC, _VERSION, len(head), total, xxhash.xxh3_64_intdigest(body))
    return EncodedRecord(key, label, header + body, is_pair(sample, label))


def _check_label(label: Any, key: str) -> None:  # noqa: ANN401
    several = label if isinstance(label, tuple) else () if label is None else (label,)
    for one in several:
        if type(one) is not int or not _LEAST_LABEL <= one <= _GREATEST_LABEL:
            raise StoreError(
                f"sample {key!r} has label {label!r}: not a 64-bit integer, tuple of such, or None."
            )


def is_pair(sample: Any, label: object) -> bool:  # noqa: ANN401
    """Return whether a sample is the tuple (`EncodedImage`, its label)."""
    return (
        type(sample) is tuple
        and len(sample) == 2
        and isinstance(sample[0], EncodedImage)
        and type(sample[1]) is int
        and sample[1] == label
    )


class _Blobs:
    """Collects the large leaves of a sample."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.size_bytes = 0

    def add(self, data: bytes | memoryview) -> bytes:
        """Return where `data` will lie, packed."""
        padding = -self.size_bytes % _ALIGNMENT
        self.parts += (bytes(padding), data)
        start = self.size_bytes + padding
        self.size_bytes = start + len(data)
        return _SPAN.pack(start, len(data))


def image_start(head_bytes: int) -> int:
    """Return where the blobs of a record begin."""
    end = HEADER_BYTES + head_bytes
    return end + -end % _ALIGNMENT


def _plain(value: Any, blobs: _Blobs, path: str, depth: int) -> Any:  # noqa: ANN401
    """Return `value` as MessagePack takes it."""
    kind = type(value)
    if kind in (str, int, float, bool) or value is None:
        return value
    if depth >= _DEEPEST and isinstance(value, (Mapping, list, tuple)):
        raise ValueError(f"at {path} there are more than {_DEEPEST} containers in one another")
    if isinstance(value, EncodedImage):
        return msgspec.msgpack.Ext(_IMAGE, blobs.add(value.data))
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if len(data) < _LONG_BYTES:
            return data
        return msgspec.msgpack.Ext(_BYTES, blobs.add(data))
    if isinstance(value, Mapping):
        return {
            _plain_key(key, path): _plain(item, blobs, f"{path}[{key!r}]", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [
            _plain(item, blobs, f"{path}[{number}]", depth + 1) for number, item in enumerate(value)
        ]
        if isinstance(value, list):
            return items
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
    return _plain_array(value, blobs, path)


def _plain_key(key: object, path: str) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"at {path} a key is {key!r}; keys are strings or integers")
    return key  # type: ignore[return-value]


def _plain_array(value: Any, blobs: _Blobs, path: str) -> Any:  # noqa: ANN401
    # The second is Pillow's. Of the type, as the image's own would encode all of its pixels.
    is_array = hasattr(value, "__array__") or hasattr(type(value), "__array_interface__")
    if not isinstance(value, (np.ndarray, np.generic)) and is_array:
        try:
            value = np.asarray(value)
        except (TypeError, RuntimeError, ValueError) as error:
            raise TypeError(f"at {path}: {error}") from error
    if isinstance(value, (str, int, float)):  # a numpy scalar that is one, or an enumeration
        value = np.asarray(value)
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(
            f"at {path} is a {type(value).__qualname__}. A record holds dicts, lists, tuples, "
            "strings, bytes, numbers, None, arrays and EncodedImage; turn it into one of these"
        )
    if not _DTYPE.match(value.dtype.str):
        raise TypeError(
            f"at {path} is an array of dtype {value.dtype}; a record holds arrays of numbers, "
            "booleans, fixed-width strings and times"
        )
    array = np.asarray(value, order="C")
    span = blobs.add(array.tobytes())
    form = msgspec.msgpack.encode([array.dtype.str, array.shape])
    return msgspec.msgpack.Ext(_ARRAY, span + form)


def check_record(data: Any, name: str) -> int:  # noqa: ANN401
    """Check a record as a whole: magic, version, sizes and checksum."""
    head_bytes, checksum = header_of(data, name)
    found = xxhash.xxh3_64_intdigest(memoryview(data)[HEADER_BYTES:])
    if found != checksum:
        raise StoreError(
            f"{name} is damaged: its checksum is {checksum:016x}, that of its bytes {found:016x}. "
            "Restore it from a copy, or pack it anew; `penstock check` lists all such records."
        )
    return head_bytes


def header_of(data: Any, name: str) -> tuple[int, int]:  # noqa: ANN401
    """Return the size of a record's head and the checksum that its header states."""
    size = len(data)
    if size < HEADER_BYTES:
        raise StoreError(f"{name} is truncated: it has {size} bytes, its header {HEADER_BYTES}.")
    magic, version, head_bytes, total, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise StoreError(
            f"{name} is not a record: it begins with {magic!r} instead of {_MAGIC!r}. If a script "
            'pickled (bytes, label) into the file, read it with layout="pickle", trusted=True.'
        )
    if version != _VERSION:
        raise StoreError(
            f"{name} has version {version} of the encoding; this release of Penstock reads version "
            f"{_VERSION}. A newer release may read it."
        )
    if total != size:
        what = "is truncated" if total > size else "is followed by other bytes"
        raise StoreError(f"{name} {what}: its header says {total:,} bytes, it has {size:,}.")
    if HEADER_BYTES + head_bytes > size:
        raise StoreError(f"{name} is damaged: a head of {head_bytes:,} bytes in {size:,} bytes.")
    return head_bytes, checksum


def size_of(data: Any, name: str) -> int:  # noqa: ANN401
    """Return how many bytes the record has that `data` begins with."""
    if len(data) >= HEADER_BYTES:
        magic, _, _, total, _ = _HEADER.unpack_from(data)
        if magic == _MAGIC and HEADER_BYTES <= total <= len(data):
            return int(total)
    raise StoreError(f"{name} is no whole record.")


def begins_as_record(data: memoryview) -> bool:
    """Return whether data were written as a record, damaged or not."""
    return bytes(data[: len(_MAGIC)]) == _MAGIC


def decode_record(
    data: Any,  # noqa: ANN401
    name: str = "the record",
    *,
    verify: bool = True,
    copy: bool = True,
) -> Record:
    """Return the record that `data` holds. Nothing in it is run."""
    head_bytes = check_record(data, name) if verify else header_of(data, name)[0]
    view = memoryview(data)
    try:
        head = _here.decode(
            view[HEADER_BYTES : HEADER_BYTES + head_bytes],
            view[image_start(head_bytes) :],
            copy=copy,
        )
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise StoreError(f"{name} is damaged: {error}.") from error
    except RecursionError:
        raise StoreError(f"{name} is damaged: over {_DEEPEST} containers in one another.") from None
    return Record(*head)


class _Reading(threading.local):
    """Decodes the heads of records, one at a time in each thread."""

    def __init__(self) -> None:
        self._blobs = memoryview(b"")
        self._copy = True
        self._depth = 0
        self._end = 0  # of the blob before; they follow each other, none is there twice
        self._head = msgspec.msgpack.Decoder(_HEAD, ext_hook=self._extension)
        self._items = msgspec.msgpack.Decoder(tuple[Any, ...], ext_hook=self._extension)

    def decode(
        self, head: memoryview, blobs: memoryview, *, copy: bool
    ) -> tuple[str, int | tuple[int, ...] | None, Any]:
        self._blobs, self._copy, self._depth, self._end = blobs, copy, 0, 0
        try:
            return self._head.decode(head)
        finally:
            self._blobs = memoryview(b"")

    def _extension(self, code: int, data: memoryview) -> Any:  # noqa: ANN401
        if code == _TUPLE:
            return self._tuple(data)
        if code not in (_ARRAY, _IMAGE, _BYTES):
            raise ValueError(f"unknown extension type {code}")
        start, size = _SPAN.unpack_from(data)
        if start + size > len(self._blobs):
            raise ValueError(
                f"{size:,} bytes should begin at byte {start:,} of blobs of {len(self._blobs):,}"
            )
        if start != self._end + -self._end % _ALIGNMENT:  # or a small record could hold terabytes
            raise ValueError(f"a blob begins at byte {start:,}, the last ends at {self._end:,}")
        self._end = start + size
        blob = self._blobs[start : start + size]
        if code == _ARRAY:
            return self._array(blob, data[_SPAN.size :])
        found = bytes(blob) if self._copy else blob.toreadonly()
        return EncodedImage(found) if code == _IMAGE else found

    def _tuple(self, data: memoryview) -> tuple[Any, ...]:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} tuples in one another")
        items = self._items.decode(data)
        self._depth -= 1
        return items

    def _array(self, blob: memoryview, form: memoryview) -> Any:  # noqa: ANN401
        code, shape = _form.decode(form)
        if not _DTYPE.match(code):
            raise ValueError(f"an array has the dtype {code!r:.80}")
        dtype = np.dtype(code)
        if len(shape) > 64 or math.prod(shape) * dtype.itemsize != len(blob):
            raise ValueError(f"an array {tuple(shape)} of {code} does not fit {len(blob):,} bytes")
        array: NDArray[Any] = np.ndarray(shape, dtype, blob.toreadonly())
        if not shape:
            return array[()]
        return array.copy() if self._copy else array


_form: Final = msgspec.msgpack.Decoder(tuple[str, tuple[_LENGTH, ...]])
_here = _Reading()
