# SPDX-License-Identifier: Apache-2.0
"""What is to be packed, as a dataset of encoded records, without files from elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.data.labels.known import class_names_of, known_labels
from penstock.data.names import describe_sample
from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError, StoreError
from penstock.faults import annotate
from penstock.stores.dataset import StoreDataset
from penstock.stores.folder.listing import is_image
from penstock.stores.records import EncodedImage, EncodedRecord, encode_record
from penstock.stores.registry import open_store
from penstock.stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, Sized

    from numpy.typing import NDArray

    from penstock.stores.records import Record


def pack_source(src: object, images: Images, limit: int | None = None) -> PackSource:
    """Return samples as encoded records, at most `limit`."""
    if images.are_shrunk or images.are_checked:
        # Its extra is rather missed now than at each sample, which would be left out for it.
        import penstock.images  # noqa: F401

    if isinstance(src, (str, Path)):
        src = open_store(src)
    if isinstance(src, StoreDataset):
        src = _store_of(src)
    if isinstance(src, Store):
        files = None if images.are_examined else src.own_files()
        if files is not None:
            refuse_outside([files[0]], files[1])
        return _StoreSource(src, images, limit)
    if not (hasattr(src, "__getitem__") and hasattr(src, "__len__")):
        raise ConfigError(
            f"cannot pack a {type(src).__qualname__}: give a store's address, a folder, or a "
            "dataset with __getitem__ and __len__. Make a list or a folder of a stream first."
        )
    return _DatasetSource(src, images, limit)


def _store_of(dataset: StoreDataset) -> Store:
    """Return the store behind a dataset, whose samples would be decoded pixels otherwise."""
    if dataset.transform is not None or dataset.target_transform is not None:
        raise ConfigError(
            f"{dataset!r} has transforms. To pack what it is made from, give its attribute "
            "`store`. To pack what the transforms make, wrap it in a dataset of your own; random "
            "ones are then decided once and for all."
        )
    return dataset.store


class _Source:
    """Records to be written, by number; given to the workers that encode them."""

    def __init__(self, source: Sized, images: Images, limit: int | None) -> None:
        """Count the samples: those of `source`, at most `limit`."""
        self._images = images
        self._length = len(source) if limit is None else min(limit, len(source))

    def __len__(self) -> int:
        """Return the number of samples to pack."""
        return self._length

    def go_behind(self, num_records: int) -> None:
        """Take note of the records that these are appended to."""

    def close(self) -> None:
        """Let go of the source."""


class _StoreSource(_Source):
    """The records of a store."""

    def __init__(self, store: Store, images: Images, limit: int | None) -> None:
        super().__init__(store, images, limit)
        self._store = store
        self._keys = store.index.distinct_keys()
        self.class_names = store.class_names
        self.metadata = dict(store.metadata)
        self.what = f"{store.fingerprint} {images} {self._length}"
        if images.are_shrunk and self._length:
            try:  # what the first sample would say after a part was written
                self[0]
            except ConfigError:
                raise
            except Exception:
                pass
        store.close()  # workers that are forked inherit no connection; the next read opens it again

    def __getitem__(self, index: int) -> EncodedRecord:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[EncodedRecord]:
        with self._store.borrow(indices) as records:
            return [self._encoded(n, r) for n, r in zip(indices, records, strict=True)]

    def _encoded(self, index: int, record: Record) -> EncodedRecord:
        try:
            sample = self._images.storable(record.sample)
            return encode_record(self._keys[index], sample, record.label)
        except Exception as error:
            annotate(error, f"while encoding {record.key!r} of {self._store.address}")
            raise

    def describe(self, index: int) -> str:
        return self._keys[index]

    def position_of(self, key: str) -> int:
        if self._keys is self._store.keys:
            return int(self._store.index.positions_of([key])[0])
        return self._keys.index(key)

    def close(self) -> None:
        self._store.close()


class _DatasetSource(_Source):
    """The samples of a dataset; keys are their numbers."""

    def __init__(self, dataset: Any, images: Images, limit: int | None) -> None:  # noqa: ANN401
        super().__init__(dataset, images, limit)
        self._dataset = dataset
        self._num_before = 0
        self._width = len(str(max(0, self._length - 1)))
        self._labels = known_labels(dataset)
        # Texts are stored with the sample: a record's number goes by the names the dataset says.
        are_texts = isinstance(self._labels, np.ndarray) and self._labels.dtype.kind in "US"
        self.class_names = class_names_of(dataset, "name" if are_texts else None) or ()
        self.metadata: dict[str, Any] = {}
        identity = getattr(dataset, "fingerprint", "")
        if self._labels is not None:
            identity = f"{identity} {_checksum(self._labels):08x}"
        self.what = f"{type(dataset).__qualname__} {len(dataset)} {identity} {images} {len(self)}"

    def __getitem__(self, index: int) -> EncodedRecord:
        sample = self._dataset[index]
        label = self._label(index, sample)
        key = f"{self._num_before + index:0{self._width}}"
        return encode_record(key, self._images.storable(sample), label)

    def _label(self, index: int, sample: Any) -> int | tuple[int, ...] | None:  # noqa: ANN401
        if isinstance(self._labels, RaggedArray):
            return tuple(self._labels[index].tolist())
        if self._labels is not None and self._labels.dtype.kind in "biu":
            return int(self._labels[index])
        if isinstance(sample, (tuple, list)) and len(sample) == 2:
            return _as_integer(sample[1])
        if isinstance(sample, Mapping) and "labels" in sample:  # of the objects of an image
            array = np.asarray(sample["labels"])
            return tuple(array.tolist()) if array.ndim == 1 and array.dtype.kind in "iu" else None
        return None

    def describe(self, index: int) -> str:
        name = describe_sample(self._dataset, index)
        if name is None:
            raise LookupError(f"sample {index} has no name")
        return name

    def position_of(self, key: str) -> int:
        return int(key) - self._num_before

    def go_behind(self, num_records: int) -> None:
        """Count from the records that are there already."""
        self._num_before = num_records


PackSource = _StoreSource | _DatasetSource


def _checksum(labels: NDArray[Any] | RaggedArray) -> int:
    if isinstance(labels, RaggedArray):
        return zlib.crc32(labels.values.tobytes(), zlib.crc32(labels.offsets.tobytes()))
    return zlib.crc32(repr(labels.tolist()).encode())


def _as_integer(value: Any) -> int | None:  # noqa: ANN401
    if isinstance(value, (bool, float, str, bytes, list, tuple, dict)) or value is None:
        return None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "iu":
            return int(array)
    return None


class Images(NamedTuple):
    """What becomes of the images in a sample; `are_examined` where they may lie anywhere."""

    size_px: int | None = None
    quality: int | None = None
    are_checked: bool = False
    are_examined: bool = False

    @property
    def are_shrunk(self) -> bool:
        """Whether larger ones, or all, are encoded anew."""
        return self.size_px is not None or self.quality is not None

    def __str__(self) -> str:
        return f"resize={self.size_px} quality={self.quality}" if self.are_shrunk else "None"

    def storable(self, sample: Any) -> Any:  # noqa: ANN401
        """Return the sample as it is stored: images shrunk."""
        if self.are_examined and not all(is_image(one.data) for one in images_in(sample)):
            raise ValueError("not an image by its first bytes")
        if self.are_checked:
            from penstock.images.decode import check_image

            for image in images_in(sample):
                check_image(image.data)
        if not self.are_shrunk:
            return sample
        match sample:
            case (image, label) if _is_image(image) and _is_class(label):
                return self._shrunk(image), label
        if _is_image(sample):
            return self._shrunk(sample)
        raise ConfigError(
            f"a sample is a {type(sample).__name__}; resize and quality are for image files alone "
            "or with their class (EncodedImage, or Pillow's images). Anything else may hold places "
            "in pixels, which would no longer fit: pack without them."
        )

    def _shrunk(self, image: Any) -> EncodedImage:  # noqa: ANN401
        from penstock.images.shrink import shrink_image

        if isinstance(image, EncodedImage):
            data = image.data
        else:  # without loss
            file = io.BytesIO()
            image.save(file, "PNG")
            data = file.getvalue()
        return EncodedImage(shrink_image(data, self.size_px, self.quality))


def images_in(sample: Any) -> Iterator[EncodedImage]:  # noqa: ANN401
    """Yield the image files in a sample."""
    if isinstance(sample, EncodedImage):
        yield sample
    elif isinstance(sample, (tuple, list)):
        for item in sample:
            yield from images_in(item)
    elif isinstance(sample, Mapping):
        yield from images_in(list(sample.values()))


def _is_image(value: object) -> bool:
    is_pillow = type(value).__module__.partition(".")[0] == "PIL"
    return isinstance(value, EncodedImage) or is_pillow


def _is_class(label: Any) -> bool:  # noqa: ANN401
    is_number = isinstance(label, (int, float)) or getattr(label, "ndim", None) == 0
    return label is None or is_number


# Files of a data set that lie outside of its folder, where a link or a name with ".." leads, are
# read like all others. But copying a stranger's data set would copy one's own files with it.


def refuse_outside(roots: Sequence[str | Path], paths: Iterable[str]) -> None:
    """Raise if files lie outside of all of some folders."""
    below = tuple(os.path.join(os.path.realpath(root), "") for root in roots)
    folders: dict[str, tuple[str, frozenset[str] | None]] = {}
    count, outside, first = 0, 0, ("", "")
    for count, path in enumerate(paths, 1):  # noqa: B007 - the error has it
        above, name = os.path.split(path)
        if above not in folders:
            folders[above] = _links_in(os.path.join(roots[0], above), below)
        folder, links = folders[above]
        if links is not None and name not in links and name != "..":
            continue
        place = os.path.realpath(os.path.join(folder, name))
        if not place.startswith(below):
            first = first if outside else (path, place)
            outside += 1
    if outside:
        places = " and ".join(map(str, roots))
        raise StoreError(
            f"{outside:,} of {count:,} files are outside of {places}, where links or their names "
            f"lead: {first[0]!r} is {first[1]!r}. They would be copied with the rest. If they "
            "belong to it, as what git-annex, DVC and Hugging Face's cache link to, give "
            "--follow-links (follow_links=True in Python)."
        )


def _links_in(path: str, below: tuple[str, ...]) -> tuple[str, frozenset[str] | None]:
    """Return where a folder really is, and which names in it are links; None if it is outside."""
    place = os.path.realpath(path)
    if not os.path.join(place, "").startswith(below):
        return place, None
    try:
        with os.scandir(place) as entries:
            return place, frozenset(entry.name for entry in entries if entry.is_symlink())
    except OSError:  # not there: reading it says so
        return place, frozenset()
