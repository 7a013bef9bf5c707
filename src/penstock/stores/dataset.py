# SPDX-License-Identifier: Apache-2.0
"""Datasets over stores: map-style, with labels, read a batch at a time.

`StoreDataset` takes any store; `LMDBDataset` and `MongoDataset` are named for where samples lie.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np

from penstock.data.dataset import Dataset, is_current, read_each
from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.faults import UnreadSample, annotate, note_unread
from penstock.randomness.samples import one_sample, sample_rng
from penstock.stores.index import from_metadata
from penstock.stores.records import EncodedImage
from penstock.stores.registry import open_store
from penstock.user_code import transform_that_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    from penstock.data.array_cache import ArrayCache
    from penstock.data.dataset import Allocator
    from penstock.data.ragged import RaggedArray
    from penstock.stores.store import Store
    from penstock.vision.pipeline import ImagePipeline  # for its type alone: vision lies above

Decode = Literal["rgb", "pil"] | Callable[[bytes], Any] | None


class StoreDataset(Dataset[Any]):
    """The samples of a store.

    A sample is what was packed; its images are decoded. A batch is fetched at once: one read
    transaction, or one query. Labels and class names are there without a record being read, so
    samplers can balance.

    Attributes:
        cache: The cache of decoded images, an `ArrayCache` of `penstock.data.array_cache`, or None.

    Concurrency:
        Any thread. It pickles without its connection, and every process that gets a copy, forked or
        spawned, opens the store for itself at first use.

    Example:
        >>> import tempfile
        >>> from penstock.stores import pack
        >>> folder = tempfile.TemporaryDirectory()
        >>> address = f"lmdb:{folder.name}/points.lmdb"
        >>> _ = pack([(np.array([1.0, 2.0]), 0), (np.array([3.0, 4.0]), 1)], address)
        >>> dataset = StoreDataset(address, transform=lambda point: point.sum())
        >>> dataset[1], dataset.labels
        ((np.float64(7.0), 1), array([0, 1]))
        >>> dataset.close(); folder.cleanup()
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: Decode = "rgb",
        repair: bool = False,
        cache: str | Path | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Open the store, read its index, and let go of it again.

        Args:
            store: A store, or its address as `open_store` takes it.
            transform: Takes the sample; the first of the two if it is a pair, as it mostly is. An
                `ImagePipeline` takes the image files of pairs as they are, a batch at a time.
            target_transform: Takes the second.
            decode: What becomes of images: "rgb" gives uint8 arrays of shape (height, width, 3);
                "pil" Pillow's RGB images, for transforms made for those; a function is called with
                the file's bytes; None leaves these bytes.
            repair: Whether JPEG and PNG files that lack their end, as truncated ones do, are given
                one, so that they decode to what is there.
            cache: Where decoded images are kept for later epochs, shared by all processes:
                "ram:4GB", or a folder, see docs/guide/caching.md. Needs samples with one image each
                and `decode="rgb"`.
            options: Options of `open_store`, such as `local_cache`, if `store` is an address.

        Raises:
            StoreError: the store cannot be opened.
            ConfigError: `decode` is none of these, a transform cannot be called, or an option does
                not fit the store.
            TypeError: an argument is unknown.
        """
        for function in (transform, target_transform):
            if not (function is None or callable(function)):
                raise ConfigError(
                    f"a transform is called with each sample, which {function!r:.80} cannot be: "
                    "penstock.vision.Compose joins several."
                )
        is_ours = isinstance(store, (str, Path))
        if options and not is_ours:
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(sorted(options))}. Options of a "
                "store are for an address, not for a store that is open."
            )
        self.store = open_store(store, **options) if isinstance(store, (str, Path)) else store
        self.transform = transform
        self.target_transform = target_transform
        self.decode = decode
        if not (callable(decode) or decode in ("rgb", "pil", None)):
            raise ConfigError(f"decode is 'rgb', 'pil', a function or None, not {decode!r}.")
        if self._pipeline is not None and decode not in ("rgb", None):
            raise ConfigError(f"{type(transform).__name__} decodes images: leave out {decode=}.")
        self._repair = repair
        len(self.store)  # reads the index, and says at once if there is no such store
        self.cache = None if cache is None else self._opened_cache(cache)
        if is_ours:
            self.store.close()  # processes that are forked from here on inherit no connection

    def _opened_cache(self, place: str | Path) -> ArrayCache:
        frames = self._frames
        if self.decode != "rgb" or not (self.store.index.are_pairs or frames is not None):
            raise ConfigError(
                f'cache={place!r} keeps images of samples that have one each, decoded as "rgb". '
                f"{self.store.address} with decode={self.decode!r} does not give such."
            )
        transform: Any = self.transform
        if self._pipeline is not None and not is_current(
            type(transform), "write_pixels", ("write", "__call__")
        ):
            raise ConfigError(
                f"cache={place!r} gives a transform pixels, and {type(transform).__name__} makes "
                "its images of files alone: redefine write_pixels as well, or leave out the cache."
            )
        import cv2

        from penstock import __version__
        from penstock.data.array_cache import ArrayCache

        what = (
            self.store.fingerprint, self.store.address, self._repair, frames,
            getattr(self._pipeline, "max_pixels", None), __version__, cv2.__version__,
        )  # fmt: skip
        return ArrayCache(place, len(self), repr(what))

    @property
    def _frames(self) -> str | None:
        """What decides on the pixels, of samples that are no pairs and have one image each."""
        return None

    @property
    def _pipeline(self) -> ImagePipeline | None:
        """The transform, if it decodes files itself; asked anew, as it may be replaced."""
        transform = self.transform
        if getattr(transform, "takes_files", False) is not True:
            return None
        # A subclass that changes what calling it gives has not changed what it writes.
        is_one = is_current(type(transform), "write", ("__call__",))
        return cast("ImagePipeline", transform) if is_one else None

    @property
    def labels(self) -> NDArray[np.int64] | RaggedArray | None:
        """Class of each sample, int64 of shape (samples,), or its classes; a read-only view."""
        return self.store.labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; empty if they have none."""
        return self.store.class_names

    def column(self, name: str) -> NDArray[np.int64] | RaggedArray:
        """Return the classes of samples by a field of their objects: see `Store.column`."""
        return self.store.column(name)

    @property
    def attribute_names(self) -> Mapping[str, tuple[str, ...]]:
        """For each attribute of objects, the texts of its numbers."""
        kind = dict[str, tuple[str, ...]]
        return from_metadata(self.store.metadata, "attribute_names", kind, {})

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class of each name."""
        return {name: number for number, name in enumerate(self.class_names)}

    @property
    def order_follower(self) -> Callable[..., Callable[[int, int], None] | None] | None:
        """Starts reading samples ahead of a loader; None if the store has no local cache."""
        return getattr(self.store, "follow", None)

    @property
    def traffic(self) -> Any:  # noqa: ANN401
        """Counts of what this rank has read through the store's local cache; None without one."""
        return getattr(self.store, "traffic", None)

    @property
    def fingerprint(self) -> str:
        """A short text that changes if the store's contents do; for folders, if names do."""
        return self.store.index.fingerprint

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.store)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        """Return one sample.

        Raises:
            IndexError: out of range.
            StoreError: its record is missing or damaged.
            ValueError: an image in it cannot be decoded.
        """
        (sample,) = self._samples([index])
        return sample

    def __getitems__(self, indices: ArrayLike) -> list[Any]:
        """Return samples, fetched together, each made under its own random numbers.

        If a subclass has a `__getitem__` of its own, that is called for each of them.
        """
        if is_current(type(self), "__getitems__", ("__getitem__",)):
            return self._samples(indices)
        return read_each(self, np.asarray(indices).tolist())

    def _samples(self, indices: ArrayLike) -> list[Any]:
        positions = self.store.checked(indices)
        samples = self._taken(positions)
        for k, position in enumerate(positions.tolist()):
            try:
                with one_sample(k):
                    samples[k] = self._transformed(samples[k])
            except Exception as error:
                self._note(error, position)
                raise
        return samples

    def _taken(self, positions: NDArray[np.int64]) -> list[Any]:
        """Return samples with their images decoded and nothing in them that is the store's."""
        samples: list[Any] = []
        failure = None
        is_cached = self.cache is not None and self.store.index.are_pairs
        borrowed = (
            nullcontext(self._images(positions)) if is_cached else self.store.borrow(positions)
        )
        with borrowed as records:
            while len(samples) < len(records):  # no variable for a record, which would outlive it
                k = len(samples)
                try:
                    samples.append(
                        self._cached_sample(records[k], int(positions[k]))
                        if is_cached
                        else self._own_sample(records[k].sample, int(positions[k]))
                    )
                except Exception as error:
                    failure = error.with_traceback(None)
                    break
        if failure is not None:
            self._note(failure, int(positions[len(samples)]))
            raise failure
        return samples

    def _cached_sample(self, image: Any, position: int) -> Any:  # noqa: ANN401
        pixels = self._kept(image, position)
        if self._pipeline is None and not pixels.flags.writeable:
            pixels = pixels.copy()  # a transform may write into it
        return pixels, self.store.index.label_of(position)

    def _cached_pixels(self, file: bytes, position: int) -> NDArray[np.uint8]:
        assert self.cache is not None
        kept = self.cache.get(position)
        return self._kept(file, position) if kept is None else kept.copy()

    def _note(self, error: Exception, position: int) -> None:
        transform = transform_that_raised(self, error)
        where = "" if transform is None else f", in its transform {transform}"
        name = self.describe(position)
        annotate(error, f"while reading sample {position} ({name}){where}")
        note_unread(error, UnreadSample(position, name))

    @property
    def can_get_batch(self) -> bool:
        """Whether `get_batch` can be used: images with their labels, as files or by a pipeline."""
        if not self.store.index.are_pairs or self.target_transform is not None:
            return False
        if self._pipeline is not None:
            return True
        return self.decode is None and not self._repair and self.transform is None

    @property
    def is_drawless(self) -> bool:
        """Whether no random number is drawn: no code of the user's is run."""
        pipeline = self._pipeline
        return self.can_get_batch and (pipeline is None or pipeline.is_drawless)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> list[Any]:
        """Return the files' bytes as a tuple, and the labels, int64 of shape (batch,).

        In the place of the bytes, an `ImagePipeline` writes its images into the batch's memory.

        Only where `can_get_batch` is true.
        """
        positions = self.store.checked(indices)
        images = self._images(positions)
        labels = alloc((len(positions),), np.int64)
        np.take(np.asarray(self.labels), positions, out=labels)
        pipeline = self._pipeline
        if pipeline is None:
            return [tuple(images), labels]
        batch = alloc((len(images), *pipeline.shape), pipeline.dtype)
        for k, position in enumerate(positions.tolist()):
            try:
                self._write(pipeline, self._kept(images[k], position), batch[k], k)
            except Exception as error:
                self._note(error, position)
                raise
        return [batch, labels]

    def _images(self, positions: NDArray[np.int64]) -> list[Any]:
        """Return the files of images; of those that are in the cache, the pixels."""
        if self.cache is None:
            with self.store.borrow_images(positions) as files:
                return list(map(bytes, files))
        images: list[Any] = list(map(self.cache.get, positions.tolist()))
        absent = [k for k, image in enumerate(images) if image is None]
        if absent:
            with self.store.borrow_images(positions[absent]) as files:
                for k, file in zip(absent, files, strict=True):
                    images[k] = bytes(file)
        return images

    def _kept(self, image: Any, position: int) -> Any:  # noqa: ANN401
        """Return the pixels of an image, with a cache; else its file."""
        if self.cache is None or not isinstance(image, bytes):
            return image
        from penstock.images import decode_image
        from penstock.images.headers import MAX_PIXELS

        file, strict = self._repaired(image)
        limit = MAX_PIXELS if self._pipeline is None else self._pipeline.max_pixels
        pixels = decode_image(file, strict=strict, max_pixels=limit)
        self.cache.put(position, pixels)
        return pixels

    def _write(
        self,
        pipeline: ImagePipeline,
        data: bytes | NDArray[np.uint8],
        row: NDArray[Any],
        k: int | None = None,
    ) -> None:
        """Let the pipeline make sample k of a batch, or the one that is being made."""
        if pipeline.steps and k is not None:  # they may draw from anywhere
            with one_sample(k):
                self._write(pipeline, data, row)
            return
        rng = None if pipeline.is_drawless else sample_rng(k)
        if isinstance(data, bytes):
            file, strict = self._repaired(data)
            pipeline.write(file, row, rng, strict=strict)
        else:
            pipeline.write_pixels(data, row, rng)

    def _repaired(self, data: bytes) -> tuple[bytes, bool]:
        """Return a file, repaired if it is to be, and whether it is then to be read strictly."""
        if not self._repair:
            return data, True
        from penstock.images import repair_image

        repaired = repair_image(data)
        return (data, True) if repaired is None else (repaired, False)

    def _transformed(self, sample: Any) -> Any:  # noqa: ANN401
        if callable(self.decode):
            sample = _mapped(sample, self._user_decoded)
        if type(sample) is tuple and len(sample) == 2:
            first, second = sample
            if self.transform is not None:
                first = self._first_transformed(first)
            if self.target_transform is not None:
                second = self.target_transform(second)
            return first, second
        return sample if self.transform is None else self._first_transformed(sample)

    def _user_decoded(self, leaf: Any) -> Any:  # noqa: ANN401
        assert callable(self.decode)
        return self.decode(bytes(leaf.data)) if isinstance(leaf, EncodedImage) else leaf

    def _first_transformed(self, image: Any) -> Any:  # noqa: ANN401
        pipeline = self._pipeline
        if pipeline is None or not isinstance(image, bytes):
            assert self.transform is not None
            return self.transform(image)
        out = np.empty(pipeline.shape, pipeline.dtype)
        self._write(pipeline, image, out)
        return out

    def _own_sample(self, sample: Any, position: int) -> Any:  # noqa: ANN401
        """Return a sample as `_own` does, but for the file that a pipeline takes as it is."""
        if self._pipeline is not None:
            if isinstance(sample, EncodedImage):
                return bytes(sample.data)
            if type(sample) is tuple and len(sample) == 2 and isinstance(sample[0], EncodedImage):
                return bytes(sample[0].data), _mapped(sample[1], self._own)
        return _mapped(sample, functools.partial(self._own, position=position))

    def _own(self, leaf: Any, position: int = -1) -> Any:  # noqa: ANN401
        """Return a leaf of a sample, decoded if it is an image, that is not the store's."""
        if isinstance(leaf, np.ndarray):
            return leaf if leaf.flags.owndata else leaf.copy()
        if isinstance(leaf, memoryview):
            return bytes(leaf)
        if not isinstance(leaf, EncodedImage):
            return leaf
        if self.cache is not None:
            return self._cached_pixels(bytes(leaf.data), position)
        file, strict = leaf.data, True
        if self._repair:
            file, strict = self._repaired(bytes(file))
        if self.decode == "rgb":
            from penstock.images import decode_image  # needs the extra "vision"

            return decode_image(file, strict=strict)
        if self.decode == "pil":
            from PIL import Image

            return Image.open(io.BytesIO(file)).convert("RGB")
        return bytes(file) if self.decode is None else EncodedImage(bytes(file))

    def describe(self, index: int) -> str:
        """Return the key of a sample: what errors call it."""
        return self.store.keys[index]

    def close(self) -> None:
        """Close this process's connection to the store; the next read opens it again."""
        self.store.close()

    _shows = ()
    _shows_unless: ClassVar = {"transform": None, "target_transform": None, "decode": "rgb"}

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "store", self.store.address
        yield "length", len(self)
        if self.class_names:
            yield "classes", len(self.class_names)
        yield from super()._summary()


def _mapped(value: Any, make: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return a tree with what `make` makes of its leaves; an error says which part it was."""
    is_map = isinstance(value, Mapping)
    if not is_map and type(value) not in (tuple, list):
        return make(value)
    made = []
    for key, item in value.items() if is_map else enumerate(value):
        try:
            made.append(_mapped(item, make))
        except Exception as error:
            annotate(error, f"in {key!r} of the sample")
            raise
    return dict(zip(value, made, strict=True)) if is_map else type(value)(made)


class LMDBDataset(StoreDataset):
    """The samples of an LMDB file.

    Example:
        >>> import tempfile
        >>> from penstock.stores import pack
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = pack([("a cat", 0), ("a dog", 1)], f"lmdb:{folder.name}/texts.lmdb")
        >>> dataset = LMDBDataset(f"{folder.name}/texts.lmdb", transform=str.upper)
        >>> dataset[0], len(dataset)
        (('A CAT', 0), 2)
        >>> dataset.close(); folder.cleanup()
    """

    @removed_arguments(copy_local="a copy of the file on a local disk")
    def __init__(self, path: str | Path, **options: Any) -> None:  # noqa: ANN401
        """Read the index of an LMDB file.

        Args:
            path: What `penstock pack` made: a file, or the folder of its shards.
            options: Those of `StoreDataset`; `layout` and `trusted`, as for `open_store`;
                `verify="once"`, "always" or "never": when checksums are compared, of each record
                and of the pages in which LMDB looks for records; over a damaged page LMDB may end
                the process. `readahead`: whether the system reads ahead, for reading in order.

        Raises:
            StoreError: there is no such file, it is damaged, or no store.
            ConfigError: an option is none of those named, or `trusted` is missing for pickles.
        """
        super().__init__(f"lmdb:{str(path).removeprefix('lmdb:')}", **options)


class MongoDataset(StoreDataset):
    """The samples of a MongoDB collection, of `penstock pack` or of other making."""

    def __init__(self, uri: str, **options: Any) -> None:  # noqa: ANN401
        """Read the index of a collection.

        Args:
            uri: `mongodb://USER:PASSWORD@HOST/DB.COLLECTION`, options of MongoDB's included. The
                password is kept to connect with, and shown nowhere.
            options: Those of `StoreDataset`, and of `MongoStore`: the fields of a collection that
                Penstock did not make, a manifest, options of the client.

        Raises:
            StoreError: the server cannot be reached, or there is no such collection.
            ConfigError: the URI or an option is wrong.
        """
        super().__init__(uri, **options)
