# SPDX-License-Identifier: Apache-2.0
"""`PackedList`: millions of paths or labels in two arrays that workers share."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, overload

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
Kind = Literal["str", "bytes", "object"]

# Items handled at a time: enough to hide numpy's cost per call, small beside any list worth
# packing.
_CHUNK: Final = 4096
# The same in bytes, for large items: 1 MiB of them at a time.
_CHUNK_BYTES: Final = 1 << 20
_TYPES: Final[dict[type, Kind]] = {str: "str", bytes: "bytes"}


class PackedList(Sequence[T]):
    """An immutable list of strings, bytes or other objects, held in a uint8 and an int64 array.

    Forked workers share it: reading an object of a Python list writes its reference count, and page
    after page is copied. A spawned worker gets two arrays instead of millions of objects.

    Strings are kept as UTF-8 and bytes as they are, if all items are of exactly that type.
    Otherwise every item is pickled by itself. Every access makes a new object.

    Concurrency:
        Any thread or process. It pickles as its arrays (out of band under protocol 5), a slice as
        its own part of them alone. Unpickling arbitrary objects runs their code: load only files
        you trust.

    Example:
        >>> paths = PackedList(f"train/{i:04}.jpg" for i in range(1000))
        >>> paths[-1], len(paths), list(paths[10:12])
        ('train/0999.jpg', 1000, ['train/0010.jpg', 'train/0011.jpg'])
        >>> paths
        <PackedList of 1000 str, 14000 bytes>
    """

    __slots__ = ("_blob", "_bounds", "_decode", "_kind")

    _kind: Kind
    _blob: NDArray[np.uint8]
    # Row i holds start and stop of item i within the blob, in bytes. As built, the rows overlap in
    # memory (the stop of one is the start of the next), so this is the offsets array, seen twice.
    _bounds: NDArray[np.int64]
    _decode: Callable[[memoryview], Any]

    def __init__(self, items: Iterable[T] = ()) -> None:
        """Pack items, which are read once and never held all at once."""
        if isinstance(items, PackedList):
            self._set(items._kind, items._blob, items._bounds)
        else:
            kind, blob, offsets = _pack(iter(items))
            self._set(kind, blob, _bounds_of(offsets))

    def _set(self, kind: Kind, blob: NDArray[np.uint8], bounds: NDArray[np.int64]) -> None:
        self._kind, self._blob, self._bounds = kind, blob.view(), bounds
        self._blob.flags.writeable = False
        self._decode = _DECODE[kind]

    @classmethod
    def from_utf8(cls, text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> PackedList[str]:
        """Return strings that lie in `text` already, without copying them.

        Args:
            text: All of them in a row, as UTF-8; uint8, shape (bytes,).
            offsets: String i is `text[offsets[i] : offsets[i + 1]]`; int64, shape (strings + 1,).

        Raises:
            ValueError: the offsets do not rise from 0 to `len(text)`, or it is no UTF-8.

        Example:
            >>> text = np.frombuffer(b"catdog", np.uint8)
            >>> list(PackedList.from_utf8(text, np.array([0, 3, 6])))
            ['cat', 'dog']
        """
        offsets = np.ascontiguousarray(offsets, np.int64)
        ends = offsets[[0, -1]].tolist() if offsets.size else None
        if ends != [0, len(text)] or bool(np.any(np.diff(offsets) < 0)):
            raise ValueError(f"the offsets of strings do not rise from 0 to {len(text)}.")
        text = np.asarray(text, np.uint8)
        starts = offsets[:-1][offsets[:-1] < len(text)]
        if bool(np.any(text[starts] & 0xC0 == 0x80)):
            raise ValueError("the offsets of strings cut a character in two.")
        str(text.data, "utf-8", "surrogatepass")
        return _restore("str", text, offsets)

    def to_utf8(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the arrays that `from_utf8` takes; not copies where they lie side by side."""
        if self._kind != "str":
            raise TypeError(f"the items of {self!r} are not strings.")
        return self._packed()

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._bounds)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> PackedList[T]: ...
    def __getitem__(self, index: int | slice | NDArray[Any]) -> T | PackedList[T]:
        """Return a new object for an integer; a list over the same blob for a slice or index array.

        Args:
            index: An integer, a slice, or an array of integers (or of one bool per item); negative
                ones count from the end.
        """
        if isinstance(index, slice) or (isinstance(index, np.ndarray) and index.ndim == 1):
            if isinstance(index, np.ndarray) and not index.size:  # of an empty list: floats
                index = index.astype(np.int64)
            part: PackedList[T] = PackedList.__new__(PackedList)
            part._set(self._kind, self._blob, self._bounds[index])
            return part
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is out of range for {len(self)} items.")
        start, stop = self._bounds[position].tolist()
        return cast("T", self._decode(self._blob.data[start:stop]))

    def __iter__(self) -> Iterator[T]:
        """Yield a new object for each item."""
        memory, decode = self._blob.data, self._decode
        for first in range(0, len(self), _CHUNK):
            for start, stop in self._bounds[first : first + _CHUNK].tolist():
                yield decode(memory[start:stop])

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a PackedList or list of equal items in the same order."""
        if not isinstance(other, (PackedList, list)):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(a is b or a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        """Return kind and size, not the items."""
        num_bytes = int(np.subtract(self._bounds[:, 1], self._bounds[:, 0]).sum())
        return f"<PackedList of {len(self)} {self._kind}, {num_bytes} bytes>"

    def __reduce__(self) -> tuple[Callable[..., PackedList[T]], tuple[object, ...]]:
        """Pickle as kind, blob and offsets."""
        return _restore, (self._kind, *self._packed())

    def _packed(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Blob and len + 1 offsets of these items alone; views if they lie side by side."""
        # Empty bounds own no memory to be seen in another way.
        if len(self) and self._bounds.strides == (8, 8):
            offsets = as_strided(self._bounds, (len(self) + 1,), (8,), writeable=False)
            first, last = int(offsets[0]), int(offsets[-1])
            if first == 0:
                return self._blob[:last], offsets
            return self._blob[first:last], offsets - first
        memory = self._blob.data
        blob = b"".join(memory[start:stop] for start, stop in self._bounds.tolist())
        lengths = self._bounds[:, 1] - self._bounds[:, 0]
        return np.frombuffer(blob, np.uint8), _offsets([lengths])


def _restore(kind: Kind, blob: NDArray[np.uint8], offsets: NDArray[np.int64]) -> PackedList[Any]:
    restored: PackedList[Any] = PackedList.__new__(PackedList)
    restored._set(kind, blob, _bounds_of(offsets))
    return restored


def _bounds_of(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    return as_strided(offsets, (len(offsets) - 1, 2), (8, 8), writeable=False)


def _offsets(lengths: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    offsets = np.zeros(1 + sum(map(len, lengths)), np.int64)
    if lengths:
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return offsets


def _pack(items: Iterator[Any]) -> tuple[Kind, NDArray[np.uint8], NDArray[np.int64]]:
    """Pack by the type of the first item; start again, pickling, at an item of another."""
    first = list(islice(items, 1))
    items = chain(first, items)
    kind = _TYPES.get(type(first[0]), "object") if first else "str"
    blob = bytearray()  # grows in place, by an eighth at a time: never two copies
    lengths: list[NDArray[np.int64]] = []
    num_items = 1
    while chunk := list(islice(items, num_items)):
        if kind != "object" and any(_TYPES.get(type_) != kind for type_ in set(map(type, chunk))):
            done = _restore(kind, np.frombuffer(blob, np.uint8), _offsets(lengths))
            items = chain(done, chunk, items)
            kind, blob, lengths = "object", bytearray(), []
            continue
        parts = _encode(chunk, kind)
        blob += b"".join(parts)
        lengths.append(np.fromiter(map(len, parts), np.int64, len(parts)))
        num_bytes = max(1, int(lengths[-1].sum()) // len(parts))
        num_items = min(_CHUNK, 1 + _CHUNK_BYTES // num_bytes, 2 * num_items)
    return kind, np.frombuffer(blob, np.uint8), _offsets(lengths)


def _encode(chunk: list[Any], kind: Kind) -> list[bytes]:
    if kind == "bytes":
        return chunk
    if kind == "str":
        return [text.encode("utf-8", "surrogatepass") for text in chunk]
    return [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in chunk]


_DECODE: Final[dict[Kind, Callable[[memoryview], Any]]] = {
    "str": lambda memory: str(memory, "utf-8", "surrogatepass"),
    "bytes": bytes,
    "object": pickle.loads,
}
