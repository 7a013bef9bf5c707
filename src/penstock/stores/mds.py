# SPDX-License-Identifier: Apache-2.0
"""`MDSStore`: shards of MosaicML Streaming, in a folder or in object storage; to be read only.

    index.json          shards: name, number of samples, names and encodings of the columns
    shard.00000.mds …   number of samples, where each begins and the last one ends (uint32), the
                        columns once more, samples
    penstock-labels     the class of each sample, in object storage, once it was read

A sample is the size of each column that has no fixed one (uint32), then the columns.

Reference:
    MosaicML Streaming, version 2 of its format: docs.mosaicml.com/projects/streaming.
"""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.blobs.blobs import ByteRange, is_remote
from penstock.blobs.errors import BlobNotFound, checked_name
from penstock.blobs.ranges import RecordRanges
from penstock.data.packed_list import PackedList
from penstock.errors import StoreError
from penstock.opening import MAX_FILE_BYTES
from penstock.stores.blob_store import BlobStore
from penstock.stores.index import Index, vector
from penstock.stores.records import EncodedImage, Record, decode_record, encode_record
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

INDEX_NAME: Final = "index.json"
LABELS_NAME: Final = "penstock-labels"
_AT_ONCE: Final = 8
_DTYPES: Final = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_SCALARS: Final = frozenset(_DTYPES.values())
_CLASSES: Final = {"int": "int64"} | {
    name: name for name in _SCALARS if "int" in name and name != "uint64"
}
_IMAGES: Final = ("jpeg", "png")
_MODES: Final = {"L": (), "RGB": (3,), "RGBA": (4,)}
_OTHERS: Final = frozenset(
    (
        *("bytes", "str", "int", "str_int", "str_float", "str_decimal", "json", "ndarray", "pil"),
        *("list[jpeg]", "list[png]", "jpeg_array", "jpegarray"),
    )
)


@dataclass(frozen=True)
class _MDSColumns:
    """The columns of a sample, in its order: name, encoding, size where it is fixed."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    @property
    def class_column(self) -> int | None:
        """Number of the class, where the other column is an image; else None."""
        kinds = [
            "image" if e in _IMAGES else "class" if e in _CLASSES else "" for e in self.encodings
        ]
        return kinds.index("class") if sorted(kinds) == ["class", "image"] else None

    def values(self, data: memoryview) -> dict[str, Any]:
        """Return the values of a sample."""
        variable = [number for number, size in enumerate(self.sizes) if not size]
        sizes: list[int] = [size or 0 for size in self.sizes]
        start = 4 * len(variable)
        for number, size in zip(variable, np.frombuffer(data[:start], "<u4").tolist(), strict=True):
            sizes[number] = size
        if start + sum(sizes) != len(data):
            raise ValueError(f"its columns should have {start + sum(sizes):,} bytes")
        values = {}
        for name, encoding, size in zip(self.names, self.encodings, sizes, strict=True):
            values[name] = _value(encoding, data[start : start + size])
            start += size
        return values


@dataclass(frozen=True, eq=False)
class _MDSRanges(RecordRanges):
    columns: _MDSColumns


class MDSStore(BlobStore):
    """Samples in uncompressed MDS shards, as MosaicML Streaming's `MDSWriter` writes them.

    Any sample is one ranged read away. A sample of an image (`jpeg`, `png`) and a class (`int`,
    `uint8` …) alone is the pair (image, class); any other is a dict by the names of the columns.
    Keys are the numbers of the samples. Pickles are refused.

    MDS has no list of labels. So the class of each pair is read when the store is opened: of a
    folder some bytes of each sample; in object storage once, after which they are kept in an
    object `penstock-labels`.

    Concurrency:
        As `BlobStore`.
    """

    max_file_size = MAX_FILE_BYTES

    def __init__(
        self,
        place: str | Path,
        *,
        labels: bool = True,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Name the place; nothing is opened.

        Args:
            place: A folder with an `index.json`, or its address in object storage.
            labels: False reads no class at first; then all samples are dicts.
            options: Of `BlobStore` and of the place, as `endpoint`.

        Raises:
            ConfigError: an argument is of another form.
        """
        super().__init__(str(place), **options)
        self._has_labels = labels

    @property
    def address(self) -> str:
        """`mds:` and the place."""
        return f"mds:{self._blobs.address}"

    def _load(self) -> tuple[Index, RecordRanges]:
        names, sizes, counts, columns = self._read_index()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            shards = list(pool.map(self._blobs.stat, names))
        tables = self._blobs.read(
            [
                ByteRange(shard.name, 0, 4 * (count + 2), shard.version)
                for shard, count in zip(shards, counts, strict=True)
            ]
        )
        bounds = [np.frombuffer(table, "<u4").astype(np.int64) for table in tables]
        for shard, size, count, bound in zip(shards, sizes, counts, bounds, strict=True):
            if not (
                size == shard.size_bytes == bound[-1]
                and bound[0] == count
                and bound[1] >= 4 * (count + 2)
                and (bound[1:-1] < bound[2:]).all()
            ):
                raise StoreError(
                    f"{shard.name!r} in {self.address} is damaged or cut off: {INDEX_NAME} has "
                    f"{count:,} samples in {size:,} bytes. Restore it from a copy."
                )
        ranges = _MDSRanges(
            tuple(names),
            tuple(shard.version for shard in shards),
            np.repeat(np.arange(len(shards), dtype=np.int32), counts),
            np.concatenate([bound[1:-1] for bound in bounds]),
            np.concatenate([bound[2:] for bound in bounds]),
            columns,
        )
        labels = self._labels(ranges) if self._has_labels else None
        keys = PackedList(map(str, range(len(ranges))))
        index = Index(keys, labels, fingerprint=ranges.digest(""), are_pairs=labels is not None)
        return index, ranges

    def _read_index(self) -> tuple[list[str], list[int], list[int], _MDSColumns]:
        """Return names and sizes of the shards, how many samples each has, and the columns."""
        name = f"{INDEX_NAME!r} in {self.address}"
        try:
            (view,) = self._blobs.read([ByteRange(INDEX_NAME)])
        except BlobNotFound as error:
            raise StoreError(
                f"{self.address} has no {INDEX_NAME}. Name the folder that has it, as that of a "
                "split; streaming.base.util.merge_index makes one of several."
            ) from error
        try:
            said = json.loads(bytes(view))
            shards = said["shards"]
            for shard in shards:
                if (said["version"], shard["version"], shard["format"]) != (2, 2, "mds"):
                    raise StoreError(f"{name} is not of version 2 of the format MDS alone.")
                if shard["compression"]:
                    raise StoreError(
                        f"{name} has shards that are compressed ({shard['compression']}), so no "
                        "sample can be read without all before it. Write them anew without "
                        "compression=."
                    )
            found = {
                _MDSColumns(
                    *(tuple(shard[f"column_{what}"]) for what in ("names", "encodings", "sizes"))
                )
                for shard in shards
            }
            names = [checked_name(shard["raw_data"]["basename"]) for shard in shards]
            sizes = [int(shard["raw_data"]["bytes"]) for shard in shards]
            counts = [int(shard["samples"]) for shard in shards]
            if not sum(counts) or min(counts) < 0:
                raise ValueError("it has no sample")
            if len(found) > 1:
                raise ValueError("its shards have different columns")
            columns = found.pop()
            is_sized = all(size is None or size > 0 for size in columns.sizes)
            if not is_sized or len({*map(len, vars(columns).values())}) > 1:
                raise ValueError("its columns have not one encoding and one size each")
        except StoreError:
            raise
        except Exception as error:  # JSON of any form
            raise StoreError(f"{name} is damaged: {error!r}. Restore it from a copy.") from error
        for column, encoding in zip(columns.names, columns.encodings, strict=True):
            if encoding == "pkl":
                raise StoreError(
                    f"column {column!r} of {self.address} holds pickles, which can run any program "
                    "and are never decoded. Write it anew with the encoding json, ndarray or bytes."
                )
            if encoding.partition(":")[0] not in _SCALARS | _OTHERS | {*_IMAGES}:
                raise StoreError(
                    f"column {column!r} of {self.address} has the encoding {encoding!r}, which is "
                    "not known."
                )
        return names, sizes, counts, columns

    def _labels(self, ranges: _MDSRanges) -> NDArray[np.int64] | None:
        """Return the classes of pairs, from where they are kept, or out of the samples."""
        number = ranges.columns.class_column
        if number is None:
            return None
        is_far = is_remote(self._blobs.address)
        digest = ranges.digest("")
        if is_far:
            try:
                (view,) = self._blobs.read([ByteRange(LABELS_NAME)])
                tree = decode_record(view, LABELS_NAME).sample
                kept = vector(tree["labels"], np.int64)
                if tree["digest"] == digest and len(kept) == len(ranges):
                    return kept
            except (BlobNotFound, StoreError, KeyError, TypeError):
                pass  # it is made anew
        labels = self._read_labels(ranges, number)
        if is_far and not self._blobs.address.startswith("http"):
            data = encode_record(LABELS_NAME, {"digest": digest, "labels": labels}).data
            try:
                self._blobs.write(LABELS_NAME, data)
            except StoreError as error:
                warn_user(f"the labels of {self.address} are read whenever it is opened: {error}")
        return labels

    def _read_labels(self, ranges: _MDSRanges, number: int) -> NDArray[np.int64]:
        columns = ranges.columns
        dtype = np.dtype(_CLASSES[columns.encodings[number]]).newbyteorder("<")
        # An image has no fixed size: before the columns there is its own. It is first or last.
        starts = ranges.starts + 4 if number == 0 else ranges.stops - dtype.itemsize
        found = RecordRanges(
            ranges.names, ranges.versions, ranges.objects, starts, starts + dtype.itemsize
        )
        labels = []
        for shard in range(len(ranges.names)):  # near ones are read with what is between them
            views = self._blobs.read(found.at(np.flatnonzero(ranges.objects == shard)))
            labels.append(np.frombuffer(b"".join(views), dtype).astype(np.int64))
        return np.concatenate(labels)

    def _record(self, position: int, view: memoryview, name: str, *, copy: bool) -> Record:
        ranges = self._both[1]
        assert isinstance(ranges, _MDSRanges)
        try:
            sample: Any = ranges.columns.values(view)
        except Exception as error:  # over damaged numbers of bytes numpy raises nearly anything
            raise StoreError(f"{name} cannot be read: {error}.") from error
        label = self.index.one_label_of(position)
        if label is not None:
            (image,) = (value for value in sample.values() if isinstance(value, EncodedImage))
            sample = image, label
        return Record(self.keys[position], label, sample)


def _value(encoding: str, view: memoryview) -> Any:  # noqa: ANN401
    data = bytes(view)
    kind, _, form = encoding.partition(":")
    if kind in _IMAGES:
        return EncodedImage(data)
    if kind in _SCALARS:
        return np.frombuffer(data, np.dtype(kind).newbyteorder("<"))[0].astype(kind)
    if kind == "ndarray":
        return _array(data, form)
    if kind in ("list[jpeg]", "list[png]", "jpeg_array", "jpegarray"):
        return _images(data[4:] if kind.startswith("list") else data)
    if kind == "pil":
        return _pixels(data)
    return _PLAIN[kind](data)


_PLAIN: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytes": bytes,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str": bytes.decode,
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
}


def _array(data: bytes, form: str) -> NDArray[Any]:
    """Return an array; what the encoding does not say of it is in front of its values."""
    dtype, _, text = form.partition(":")
    shape = [int(size) for size in text.split(",")] if text else None
    if not dtype:
        dtype, data = _DTYPES[data[0]], data[1:]
    if shape is None:
        num_sizes, power = divmod(data[0], 4)
        stop = 1 + (num_sizes << power)
        shape = np.frombuffer(data[1:stop], f"<u{1 << power}").tolist()
        data = data[stop:]
    if dtype not in _SCALARS:
        raise ValueError(f"an array of {dtype!r}")
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    return values.astype(dtype).reshape(shape)


def _images(data: bytes) -> list[EncodedImage]:
    count = int.from_bytes(data[:4], "little")
    ends = np.cumsum([4 + 4 * count, *np.frombuffer(data[4 : 4 + 4 * count], "<u4").tolist()])
    if len(ends) != count + 1 or ends[-1] != len(data):
        raise ValueError(f"{count} images in {len(data):,} bytes")
    return [EncodedImage(data[a:b]) for a, b in itertools.pairwise(ends)]


def _pixels(data: bytes) -> NDArray[np.uint8]:
    width, height, length = np.frombuffer(data[:12], "<u4").tolist()
    mode = data[12 : 12 + length].decode()
    if mode not in _MODES:
        raise ValueError(f"an image of Pillow's mode {mode!r}; known are {', '.join(_MODES)}")
    pixels = np.frombuffer(data[12 + length :], np.uint8)
    return pixels.reshape(height, width, *_MODES[mode]).copy()
