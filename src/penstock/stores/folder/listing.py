# SPDX-License-Identifier: Apache-2.0
"""The images of a folder, found by listing it: class folders, or images alone.

No file is opened and none is asked for its size: a million of them take a second or two.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError
from penstock.opening import read_file
from penstock.stores.index import Index
from penstock.stores.records import decode_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# Those of torchvision's ImageFolder: what trains through it is what has to be found.
IMAGE_SUFFIXES: Final = (
    ".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
# Folders of programs, which hold no images of the data set; so do names that begin with ".".
_SYSTEM_FOLDERS: Final = frozenset(
    (
        "__MACOSX",  # macOS, in zip files
        "__pycache__",  # Python
        "@eaDir",  # Synology's thumbnails
        "lost+found",  # Linux, at the root of a disk
        "$RECYCLE.BIN",  # Windows, likewise
        "System Volume Information",
    )
)
# JPEG, PNG, GIF, BMP, TIFF of either order, WebP, PNM.
_IMAGE: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8|BM|II\*\0|MM\0\*|RIFF....WEBP|P[1-6][\s#]", re.DOTALL
)

INDEX_NAME: Final = ".penstock-index"
"""The index of a folder that release 0.1 packed from other samples than images with a class."""
# What a file holds: an image that is a pair with its label, an image that is the sample, an image
# with annotations in a file of their own, an encoded record. The numbers are those of the index.
PAIR, IMAGE, VOC, RECORD = 0, 1, 2, 3
# Leaves the folder, or means another place on another system.
_UNSAFE: Final = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)|[\0\\]")


@dataclass(frozen=True, eq=False)
class Listing:
    """The records of a folder, and the files they are in."""

    keys: PackedList[str]
    paths: PackedList[str]
    kinds: NDArray[np.uint8]
    labels: NDArray[np.int64] | RaggedArray | None = None
    class_names: tuple[str, ...] = ()

    def index(self, fingerprint: str) -> Index:
        """Return the index of a store of these records."""
        return Index(
            self.keys,
            self.labels,
            self.class_names,
            fingerprint=fingerprint,
            are_pairs=len(self.keys) > 0 and bool(np.all(self.kinds == PAIR)),
        )

    def fingerprint(self, stats: bytes = b"") -> str:
        """Return a hash of keys, labels and class names, and of `stats`."""
        digest = hashlib.blake2b(digest_size=16)
        for names in (self.keys, PackedList(self.class_names)):
            text, offsets = names.to_utf8() if len(names) else (b"", np.zeros(1, np.int64))
            digest.update(bytes(offsets))
            digest.update(bytes(text))
        labels: Any = self.labels
        parts = [labels.values, labels.offsets] if isinstance(labels, RaggedArray) else [labels]
        for part in parts:
            digest.update(b"" if part is None else part.tobytes())
        digest.update(stats)
        return digest.hexdigest()


def is_system_folder(name: str) -> bool:
    """Return whether a folder of this name holds what some program keeps there."""
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def scan(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of subfolders, links to them included, and of image files; sorted."""
    subfolders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_dir(entry):
                    if not is_system_folder(entry.name):
                        subfolders.append(entry.name)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    images.append(entry.name)
    except OSError as error:
        raise_unlisted(error)
    return sorted(subfolders), sorted(images)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a ring: a file that cannot be read, which reading it will tell
        return False


def raise_unlisted(error: OSError) -> NoReturn:
    """Raise the error of a folder that cannot be listed; `onerror` of `os.walk`."""
    raise StoreError(
        f"cannot list {error.filename}: {error.strerror}. Its images would be passed over; allow "
        "it to be read, or name another folder."
    ) from error


def list_flat(root: Path) -> Listing:
    """Return the images that lie in `root` itself, without labels."""
    names = PackedList(scan(os.fspath(root))[1])
    return Listing(names, names, np.full(len(names), IMAGE, np.uint8))


def list_classes(root: Path) -> Listing:
    """Return the images of class folders, in the order of torchvision's ImageFolder."""
    class_names, _ = scan(os.fspath(root))
    entered = _identities(root, class_names)
    counts = np.zeros(len(class_names), np.int64)

    def keys() -> Iterator[str]:
        for label, name in enumerate(class_names):
            for folder, images in sorted(_walk(f"{root}/", name, entered)):
                counts[label] += len(images)
                yield from (f"{folder}/{image}" for image in images)

    packed = PackedList(keys())
    labels = np.repeat(np.arange(len(class_names)), counts) if len(packed) else None
    kinds = np.full(len(packed), PAIR, np.uint8)
    return Listing(packed, packed, kinds, labels, tuple(class_names))


def _identities(root: Path, class_names: list[str]) -> set[tuple[int, int]]:
    """Return device and inode of the folders that no link may lead into once more."""
    named: dict[tuple[int, int], str] = {}
    for name in class_names:
        identity = _identity(f"{root}/{name}")
        if identity in named:
            raise StoreError(
                f"the classes {named[identity]!r} and {name!r} of {root} are one folder: one is a "
                "link to the other. Which of the two are its images? Remove the link."
            )
        named[identity] = name
    return {*named, _identity(os.fspath(root))}


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise_unlisted(error)
    return status.st_dev, status.st_ino


def _walk(
    prefix: str, folder: str, entered: set[tuple[int, int]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder from `folder` down, relative to `prefix`, with its images."""
    waiting = [folder]
    while waiting:
        folder = waiting.pop()
        subfolders, images = scan(prefix + folder)
        yield folder, images
        found = []
        for name in subfolders:
            identity = _identity(f"{prefix}{folder}/{name}")
            if identity not in entered:
                entered.add(identity)
                found.append(f"{folder}/{name}")
        waiting += reversed(found)


def read_index(root: Path) -> Listing | None:
    """Return the listing in the index of a packed folder; None where there is no index."""
    path = root / INDEX_NAME
    if not path.is_file():
        return None
    name = f"the index {path}"
    try:
        tree = decode_record(read_file(path), name).sample
        index = Index.from_tree(tree["index"], name)
        paths = PackedList.from_utf8(tree["paths"]["text"], tree["paths"]["offsets"])
        # Each is decoded, so that what is no UTF-8 is found now.
        keys, paths = PackedList(iter(index.keys)), PackedList(iter(paths))
        kinds, labels = tree["kinds"], index.labels
        if kinds.dtype != np.uint8 or not len(paths) == len(keys) == len(kinds):
            raise ValueError("keys, paths and kinds are not of the same records")
        if len(kinds) and kinds.max() > RECORD:
            raise ValueError(f"a record is of kind {kinds.max()}; {RECORD} is the last one known")
        counts = np.diff(labels.offsets) if isinstance(labels, RaggedArray) else None
        has_one = np.full(len(kinds), labels is not None) if counts is None else counts == 1
        if not has_one[kinds == PAIR].all():
            raise ValueError("an image that should have one class has none, or several")
    except OSError as error:
        raise StoreError(f"{name} cannot be read: {error}.") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{name} is damaged: {error}.") from error
    unsafe = next((file for file in paths if _UNSAFE.search(file)), None)
    if unsafe is not None:
        raise StoreError(f"{name} names a file outside of the folder, {unsafe!r}. Do not trust it.")
    return Listing(keys, paths, kinds, labels, index.class_names)


def is_image(data: bytes | memoryview) -> bool:
    """Return whether a file is an image by its first bytes, whole or not."""
    return _IMAGE.match(bytes(data[:16])) is not None
