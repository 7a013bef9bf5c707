# SPDX-License-Identifier: Apache-2.0
"""`ObjectFolderStore`: image files in object storage, as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.blobs.blobs import ByteRange
from penstock.blobs.errors import BlobNotFound
from penstock.blobs.ranges import RecordRanges
from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_FILE_BYTES
from penstock.stores.blob_store import BlobStore
from penstock.stores.folder.listing import (
    IMAGE,
    IMAGE_SUFFIXES,
    PAIR,
    Listing,
    is_system_folder,
)
from penstock.stores.folder.store import has_classes, no_image
from penstock.stores.index import Index, vector
from penstock.stores.records import EncodedImage, Record, decode_record, encode_record
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterable

LISTING_NAME: Final = ".penstock-listing"
_ANNOTATED: Final = (("Annotations", "JPEGImages"), ("images", "labels"))


class ObjectFolderStore(BlobStore):
    """Image files below a prefix of object storage: `PREFIX/CLASS/**/NAME.jpg`, or without classes.

    Keys, labels, class names and samples are those of a `FolderStore` of the same files; a class
    without an object is not there. By default the prefix is listed whenever it is opened, which
    is right always, and takes a request for 1,000 objects.

    Concurrency:
        As `BlobStore`.
    """

    max_file_size = MAX_FILE_BYTES

    def __init__(
        self,
        place: str,
        *,
        layout: Literal["auto", "classes", "flat", "voc"] = "auto",
        index: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Name the prefix; it is listed at first use.

        Args:
            place: An address as `s3://BUCKET/PREFIX`.
            layout: As for `FolderStore`; "voc" is refused.
            index: Whether to keep the listing in the object `.penstock-listing` there, and to take
                it from there the next time. Images that are new since are not found until it is
                deleted; images that were replaced or removed are errors.
            options: Of `BlobStore` and of the place, as `endpoint`.

        Raises:
            ConfigError: an argument is of another form.
        """
        if layout not in ("auto", "classes", "flat"):
            raise ConfigError(
                f"{layout=} is read on this machine alone: copy {place} to it, or pack it there. "
                "In object storage layout is 'auto', 'classes' or 'flat'."
            )
        super().__init__(place, **options)
        self._layout, self._keeps = layout, index

    @property
    def address(self) -> str:
        """`folder:` and the place."""
        return f"folder:{self.path}"

    @property
    def path(self) -> str:
        """The place."""
        return self._blobs.address

    def file_of(self, position: int) -> str:
        """Return the address of the object that a record is in."""
        return f"{self.path}/{self.keys[position]}"

    def _load(self) -> tuple[Index, RecordRanges]:
        if not self._keeps:
            return self._list()
        try:
            (view,) = self._blobs.read([ByteRange(LISTING_NAME)])
        except BlobNotFound:
            index, ranges = self._list()
            try:
                self._blobs.write(LISTING_NAME, _encoded(index, ranges, self._layout))
            except StoreError as error:
                warn_user(f"{self.address} is listed whenever it is opened: {error}")
            return index, ranges
        name = f"{LISTING_NAME!r} in {self.path}"
        try:
            return _decoded(decode_record(view, name).sample, name, self._layout)
        except (KeyError, TypeError, ValueError, StoreError) as error:
            raise StoreError(
                f"{name} is no listing for layout={self._layout!r}, or is damaged: {error}. Delete "
                "it, and it is made anew."
            ) from error

    def _list(self) -> tuple[Index, RecordRanges]:
        blobs = {blob.name: blob for blob in self._blobs.list()}
        listing = _listed(blobs, self._layout, self.path)
        found = [blobs[key] for key in listing.keys]
        ranges = _ranges(
            listing.keys,
            PackedList(blob.version for blob in found),
            np.array([blob.size_bytes for blob in found], np.int64),
        )
        return listing.index(listing.fingerprint(ranges.digest("").encode())), ranges

    def _record(self, position: int, view: memoryview, name: str, *, copy: bool) -> Record:
        label = self.index.one_label_of(position)
        image = EncodedImage(bytes(view) if copy else view)
        return Record(self.keys[position], label, image if label is None else (image, label))


def _listed(names: Iterable[str], layout: str, place: str) -> Listing:
    """Return the images among objects, in the order of `list_classes` and `list_flat`."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        images = folders.setdefault(folder, [])
        if file.lower().endswith(IMAGE_SUFFIXES):
            images.append(file)
    flat = sorted(folders.pop("", []))
    for folder in [f for f in folders if any(map(is_system_folder, f.split("/")))]:
        del folders[folder]
    class_names = sorted({folder.partition("/")[0] for folder in folders})
    if layout == "flat" or (layout == "auto" and not has_classes(place, class_names, flat)):
        keys: PackedList[str] = PackedList(flat)
        listing = Listing(keys, keys, np.full(len(keys), IMAGE, np.uint8))
    else:
        _refuse_annotated(folders, place)
        numbers = {name: number for number, name in enumerate(class_names)}
        in_order = sorted((numbers[f.partition("/")[0]], f, sorted(i)) for f, i in folders.items())
        keys = PackedList(f"{folder}/{image}" for _, folder, images in in_order for image in images)
        labels = np.repeat([label for label, *_ in in_order], [len(i) for *_, i in in_order])
        kinds = np.full(len(keys), PAIR, np.uint8)
        listing = Listing(keys, keys, kinds, labels.astype(np.int64), tuple(class_names))
    if not len(keys):
        raise no_image(place, class_names, flat)
    return listing


def _refuse_annotated(folders: Iterable[str], place: str) -> None:
    tops = {"/".join(folder.split("/")[:depth]) for folder in folders for depth in (1, 2)}
    for start in ("", "train/", "val/", "valid/", "validation/", "test/"):
        for one, other in _ANNOTATED:
            if {start + one, start + other} <= tops:
                raise StoreError(
                    f"{place} is a data set with annotations ({start}{one} beside {start}{other}), "
                    "and its subfolders are no classes. Copy it to this machine to read it, or to "
                    "pack it into object storage."
                )


def _ranges(
    keys: PackedList[str],
    versions: PackedList[str],
    sizes: Any,  # noqa: ANN401
) -> RecordRanges:
    numbers = np.arange(len(keys), dtype=np.int32)
    return RecordRanges(keys, versions, numbers, np.zeros(len(keys), np.int64), sizes)


def _encoded(index: Index, ranges: RecordRanges, layout: str) -> bytes:
    text, offsets = PackedList(ranges.versions).to_utf8()
    tree = {
        "index": index.to_tree(),
        "layout": layout,
        "versions": {"text": text, "offsets": offsets},
        "sizes": ranges.stops,
    }
    return encode_record(LISTING_NAME, tree).data


def _decoded(tree: Any, name: str, layout: str) -> tuple[Index, RecordRanges]:  # noqa: ANN401
    index = Index.from_tree(tree["index"], name)
    versions = PackedList.from_utf8(
        vector(tree["versions"]["text"], np.uint8), vector(tree["versions"]["offsets"], np.int64)
    )
    sizes = vector(tree["sizes"], np.int64)
    if tree["layout"] != layout:
        raise ValueError(f"it is one for layout={tree['layout']!r}")
    if not len(index) == len(versions) == len(sizes) or sizes.min(initial=0) < 0:
        raise ValueError("keys, versions and sizes are not of the same records")
    return index, _ranges(PackedList(index.keys), versions, sizes)
