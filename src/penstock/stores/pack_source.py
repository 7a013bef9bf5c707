# SPDX-License-Identifier: Apache-2.0
"""What is to be packed, as a dataset of encoded records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.labels import known_labels
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.faults import annotate
from penstock.stores.address import open_store
from penstock.stores.records import EncodedImage, EncodedRecord, encode_record
from penstock.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.stores.records import Record


__all__ = ["PackSource", "pack_source"]


def pack_source(
    src: object, *, resize: int | None, quality: int | None, limit: int | None
) -> PackSource:
    """Return samples as encoded records.

    Raises:
        ConfigError: it is neither a store, an address nor a map-style dataset, or its images are
            not to be shrunk.
    """
    shrink = None if resize is None and quality is None else _Shrink(resize, quality)
    if isinstance(src, (str, Path)):
        src = open_store(src)
    if isinstance(src, Store):
        return _StoreSource(src, shrink, limit)
    if not (hasattr(src, "__getitem__") and hasattr(src, "__len__")):
        raise ConfigError(
            f"cannot pack a {type(src).__qualname__}: give a store's address, a folder, or a "
            "dataset with __getitem__ and __len__. Make a list or a folder of a stream first."
        )
    return _DatasetSource(src, shrink, limit)


class PackSource:
    """Records to be written, by number; given to the workers that encode them.

    Attributes:
        class_names: Name of each class.
        metadata: Of the source.
        what: Says what is packed, and how.
    """

    class_names: tuple[str, ...] = ()
    metadata: Mapping[str, Any]
    what: str

    def __len__(self) -> int:
        """Return the number of samples to pack."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> EncodedRecord:
        """Return one of them, encoded."""
        raise NotImplementedError

    def describe(self, index: int) -> str:
        """Return the sample's name, for errors."""
        raise NotImplementedError

    def position_of(self, key: str) -> int:
        """Return the number of the sample whose record is called `key`."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the source."""


class _StoreSource(PackSource):
    """The records of a store."""

    def __init__(self, store: Store, shrink: _Shrink | None, limit: int | None) -> None:
        self._store = store
        self._shrink = shrink
        self._length = len(store) if limit is None else min(limit, len(store))
        if shrink is not None and isinstance(store.labels, RaggedArray):
            raise ConfigError(
                f"the images of {store.address} have annotations in pixels, which would no longer "
                "fit if the images were shrunk. Pack without resize and quality."
            )
        self.class_names = store.class_names
        self.metadata = dict(store.metadata)
        self.what = f"{store.fingerprint} {shrink} {self._length}"
        store.close()  # workers that are forked inherit no connection

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> EncodedRecord:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[EncodedRecord]:
        with self._store.borrow(indices) as records:
            return list(map(self._encoded, records))

    def _encoded(self, record: Record) -> EncodedRecord:
        try:
            return encode_record(record.key, _storable(record.sample, self._shrink), record.label)
        except Exception as error:
            annotate(error, f"while encoding {record.key!r} of {self._store.address}")
            raise

    def describe(self, index: int) -> str:
        return self._store.keys[index]

    def position_of(self, key: str) -> int:
        return int(self._store.index.positions_of([key])[0])

    def close(self) -> None:
        self._store.close()


class _DatasetSource(PackSource):
    """The samples of a dataset; keys are their numbers."""

    def __init__(self, dataset: Any, shrink: _Shrink | None, limit: int | None) -> None:  # noqa: ANN401
        self._dataset = dataset
        self._shrink = shrink
        self._length = len(dataset) if limit is None else min(limit, len(dataset))
        self._width = len(str(max(0, self._length - 1)))
        self._labels = known_labels(dataset)
        names = getattr(dataset, "class_names", None) or getattr(dataset, "classes", None) or ()
        self.class_names = tuple(map(str, names))
        self.metadata = {}
        identity = getattr(dataset, "fingerprint", "")
        self.what = (
            f"{type(dataset).__qualname__} {len(dataset)} {identity} {shrink} {self._length}"
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> EncodedRecord:
        sample = self._dataset[index]
        label = self._label(index, sample)
        return encode_record(f"{index:0{self._width}}", _storable(sample, self._shrink), label)

    def _label(self, index: int, sample: Any) -> int | None:  # noqa: ANN401
        if self._labels is not None and self._labels.dtype.kind in "biu":
            return int(self._labels[index])
        if isinstance(sample, (tuple, list)) and len(sample) == 2:
            return _as_integer(sample[1])
        return None

    def describe(self, index: int) -> str:
        from penstock.data.names import describe_sample

        return describe_sample(self._dataset, index) or f"sample {index}"

    def position_of(self, key: str) -> int:
        return int(key)


def _as_integer(value: Any) -> int | None:  # noqa: ANN401
    if isinstance(value, (bool, float, str, bytes, list, tuple, dict)) or value is None:
        return None
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return int(array) if array.ndim == 0 and array.dtype.kind in "iu" else None


class _Shrink:
    """Makes images smaller."""

    def __init__(self, size_px: int | None, quality: int | None) -> None:
        self._size_px = size_px
        self._quality = quality

    def __repr__(self) -> str:
        return f"resize={self._size_px} quality={self._quality}"

    def __call__(self, data: bytes | memoryview) -> bytes | memoryview:
        from penstock.images import shrink_image

        return shrink_image(data, self._size_px, self._quality)


def _storable(value: Any, shrink: _Shrink | None) -> Any:  # noqa: ANN401
    """Return a sample with its images shrunk, and Pillow's images as arrays or files."""
    if isinstance(value, EncodedImage):
        return value if shrink is None else EncodedImage(shrink(value.data))
    if isinstance(value, tuple):
        return tuple(_storable(item, shrink) for item in value)
    if isinstance(value, list):
        return [_storable(item, shrink) for item in value]
    if isinstance(value, Mapping):
        return {key: _storable(item, shrink) for key, item in value.items()}
    if type(value).__module__.partition(".")[0] == "PIL":
        return _of_pillow(value, shrink)
    return value


def _of_pillow(image: Any, shrink: _Shrink | None) -> Any:  # noqa: ANN401
    if shrink is None:
        return np.asarray(image)
    import io

    file = io.BytesIO()
    image.save(file, "PNG")
    return EncodedImage(shrink(file.getvalue()))
